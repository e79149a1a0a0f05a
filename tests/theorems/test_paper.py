"""The sound reading of a paper is what the bound of this project proves, under its conditions."""

import pytest
from dp_accounting import NeighboringRelation
from runs import cyclic_run, full_run

import hidden_state_accountants as hsa
from hidden_state_accountants.bounds import (
    ChienLi,
    Hoelder,
    KongRibero,
    Langevin,
    ShiftedInterpolation,
    ShuffledOnce,
)
from hidden_state_accountants.bounds.hoelder import MOST_STEPS

REPLACE_ONE = NeighboringRelation.REPLACE_ONE
ADD_OR_REMOVE_ONE = NeighboringRelation.ADD_OR_REMOVE_ONE
ROUGH = hsa.LossGeometry.hoelder(0.3, 0.5)
CURVED = hsa.LossGeometry.strongly_convex(1.0, 0.1, lipschitz=1.0)


@pytest.mark.parametrize(
    ("paper", "theorem", "event", "bound"),
    [
        (ChienLi(), "Theorem 3.1", full_run(domain_diameter=0.5), ShiftedInterpolation()),
        (ChienLi(), "Theorem 3.7", full_run(loss=ROUGH), Hoelder()),
        (ChienLi(), "Theorem A.1", cyclic_run(), ShiftedInterpolation()),
        (ChienLi(), "Theorem A.1", cyclic_run(loss=ROUGH, domain_diameter=0.2), Hoelder()),
        (ChienLi(), "Corollary A.3", cyclic_run(batch_order="shuffled_once"), ShuffledOnce()),
        (ChienLi(), "Corollary A.3", cyclic_run(batch_order="shuffled_once", loss=ROUGH),
         Hoelder()),
        (KongRibero(), "Theorems 2.2 and 2.3", cyclic_run(prox_strong_convexity=0.5),
         ShiftedInterpolation()),
        (Langevin(), "Lemmas 2 and 3", full_run(loss=CURVED, release_steps=(8, 16)),
         ShiftedInterpolation()),
    ],
)  # fmt: skip
def test_sound_is_theorem_a(paper, theorem, event, bound):
    relations = [relation for relation in NeighboringRelation if not bound.check(event, relation)]
    assert (ADD_OR_REMOVE_ONE in relations) == (event.batch_order is hsa.BatchOrder.FULL)
    for relation in relations:
        found, proved = (b.guarantee(event, relation) for b in (paper, bound))
        assert found.epsilon(1e-5) == proved.epsilon(1e-5)
        assert found.theorem.startswith(f"{theorem} ({paper.citation.authors}, ")
        assert found.theorem.endswith(f"by {proved.theorem}")
        assert found.citations == (paper.citation, bound.citation)
        assert set(proved.assumptions) <= set(found.assumptions)


def test_what_theorem_a_cannot_do_is_refused_as_well():
    long = full_run(loss=ROUGH, num_steps=MOST_STEPS + 1)
    (unmet,) = ChienLi().check(long, REPLACE_ONE)
    assert unmet == Hoelder().check(long, REPLACE_ONE)[0]
    assert unmet.condition == "steps to optimise"
