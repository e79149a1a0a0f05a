"""A neighbouring relation may be given by its name, everywhere, and means the same."""

import math

import pytest
from dp_accounting import NeighboringRelation
from runs import cyclic_run, full_run

import hidden_state_accountants as hsa
from hidden_state_accountants.curves.base import GaussianCurve
from hidden_state_accountants.runs.run import Step

ONE, SPECIAL = NeighboringRelation.REPLACE_ONE, NeighboringRelation.REPLACE_SPECIAL
BLOCKS = hsa.BlockCoordinateDpEvent(
    step_size=0.1, noise_variance=1.0, clip_norm=1.0, batch_size=4, dataset_size=12, num_epochs=2
)
DICE = hsa.DiceSgdDpEvent(
    noise_std=0.02, clip_norm=1.0, error_clip_norm=1.0, batch_size=10, dataset_size=500, num_steps=9
)
CAPPED = cyclic_run(batch_order="poisson", max_batch_size=12)


def recorded():
    recorder = hsa.RunRecorder(
        batch_order="cyclic", batch_size=5, dataset_size=20, loss=hsa.LossGeometry.convex(1.0, 1.0)
    )
    for step in range(6):
        values = {"noise_multiplier": 2.0, "learning_rate": 0.5, "weight_decay": 0.2}
        recorder.add(Step(clip_norm=1.0, batch=step % 4, rows=5, **values))
    return recorder


def composed(relation):
    guarantee = hsa.LastIterateAccountant(relation).compose(cyclic_run()).guarantee
    return hsa.compose_guarantees([guarantee, guarantee], relation).epsilon(1e-5)


WAYS = {
    "accountant": lambda r: hsa.LastIterateAccountant(r).compose(cyclic_run()).get_epsilon(1e-5),
    "shifted": lambda r: hsa.ShiftedInterpolationAccountant(r).compose(cyclic_run()).get_delta(1.0),
    "chien_li": lambda r: hsa.ChienLiAccountant(r).compose(cyclic_run()).get_epsilon(1e-5),
    "kong_ribero": lambda r: hsa.KongRiberoAccountant(r).compose(cyclic_run()).get_epsilon(1e-5),
    "blocks": lambda r: hsa.BlockCoordinateAccountant(r).compose(BLOCKS).get_epsilon(1e-5),
    "sensitivity": BLOCKS.sensitivity,
    "compose_guarantees": composed,
    "compare": lambda r: hsa.compare(cyclic_run(), 1e-5, r).best().epsilon,
    "position_profile": lambda r: hsa.position_profile(cyclic_run(), 1e-5, r).max(),
    "calibrate_noise": lambda r: hsa.calibrate_noise(1, 1e-5, full_run(), neighboring_relation=r),
    "calibrate_epochs": lambda r: hsa.calibrate_epochs(
        3.0, 1e-5, cyclic_run(noise_multiplier=8.0, weight_decay=0.0), neighboring_relation=r
    ),
    "audit": lambda r: hsa.audit((9.0, 1e-5), full_run(), neighboring_relation=r).lower_bound,
    "as_composition": lambda r: cyclic_run().as_composition(r).event.noise_multiplier,
    "guarantee": lambda r: hsa.Guarantee(GaussianCurve(1.0), r, "a claim").neighboring_relation,
    "bound": lambda r: hsa.BOUNDS[0].guarantee(cyclic_run(), r).epsilon(1e-5),
    "conditions": lambda r: hsa.bounds.DiceSgd(analysis="published").check(DICE, r),
    "recorder": lambda r: recorded().guarantee(r).epsilon(1e-5),
}


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("relation", [SPECIAL, ONE])
def test_a_name_means_the_relation(name, relation):
    way = WAYS[name]
    expected = way(relation)
    for text in (relation.name.lower(), f" {relation.name.replace('_', '-')} "):
        assert way(text) == expected


@pytest.mark.parametrize("name", WAYS)
def test_the_relations_differ(name):
    assert WAYS[name](ONE) != WAYS[name](SPECIAL)


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize(("relation", "error"), [("replace", ValueError), (1, TypeError)])
def test_anything_else_is_refused_with_the_names(name, relation, error):
    with pytest.raises(error, match="one of ADD_OR_REMOVE_ONE, REPLACE_ONE, REPLACE_SPECIAL"):
        WAYS[name](relation)


def test_a_cap_counts_the_records_of_the_relation():
    """Under ADD_OR_REMOVE_ONE there is a record more: a name must not be taken for another."""
    added, zeroed = (CAPPED.cap_delta(r) for r in ("add_or_remove_one", "replace_special"))
    assert added == CAPPED.cap_delta(NeighboringRelation.ADD_OR_REMOVE_ONE) > zeroed > 0
    assert math.isfinite(added)
