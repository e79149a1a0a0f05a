"""The code of EXTENDING.md does what the page says."""

import re
from pathlib import Path

import pytest
import torch

import hidden_state_accountants as hsa

PAGE = Path(__file__).parents[2] / "EXTENDING.md"

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def names():
    """What the blocks of the page define, one after the other in one namespace."""
    namespace = {"__name__": "extending"}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), namespace)
    return namespace


def test_a_bound_refuses_cites_and_lists_what_all_bounds_assume(names):
    bound, event = names["LastStep"](), names["run"]
    relation = names["NeighboringRelation"].REPLACE_SPECIAL
    guarantee = bound.guarantee(event, relation)
    assert guarantee.citations == (bound.citation,)
    composed = hsa.bounds.Composition().guarantee(event, relation)
    assert guarantee.epsilon(1e-5) == pytest.approx(composed.epsilon(1e-5))
    assert "one record per person" in " ".join(a.text for a in guarantee.assumptions)
    two = names["attrs"].evolve(event, num_steps=2)
    with pytest.raises(hsa.UnsupportedRunError, match="number of steps: needs 1, got 2"):
        bound.guarantee(two, relation)


def test_a_mechanism_is_known_to_the_engine_alone(names):
    """The whole run is accounted, and checked."""
    engine, optimizer = names["engine"], names["optimizer"]
    assert engine.privacy_event.num_steps == 2
    assert "ExactlyClipped" not in engine.report(1e-5)
    with pytest.raises(hsa.UnsupportedRunError, match="no new batch"):
        optimizer.step()
    with pytest.raises(hsa.UnsupportedRunError, match="was refused or interrupted"):
        engine.get_epsilon(1e-5)
    assert torch.isfinite(next(names["model"].parameters())).all()
