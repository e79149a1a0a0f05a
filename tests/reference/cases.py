"""How many cases of a family "make test" runs; "make test-all" runs every one."""

import pytest

USUAL = 6


def seeds(count, usual=USUAL):
    """The parameters 0 to `count - 1`, of which those from `usual` on are marked exhaustive.

    Args:
        count: How many there are.
        usual: How many of them "make test" runs. More than six need a reason beside the test: the
            mutant that six of them do not notice.
    """
    further = [pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(usual, count)]
    return [*range(min(usual, count)), *further]
