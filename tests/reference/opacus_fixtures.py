"""What tests of Opacus run with."""

import pytest

from hidden_state_adapters.opacus.run import registry


@pytest.fixture(autouse=True)
def no_earlier_runs():
    """Models of other tests start from the same weights, and some end there."""
    yield
    registry._left.clear()
    registry._trained.clear()
