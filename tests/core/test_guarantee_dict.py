"""A guarantee as plain JSON types, and back: the same answers, whatever it is made of."""

import copy
import json
import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from runs import cyclic_run, full_run

import hidden_state_accountants as hsa
from hidden_state_accountants.accountants import BoundAccountant
from hidden_state_accountants.curves.base import RdpCurve
from hidden_state_accountants.curves.composed import compose_curves
from hidden_state_accountants.curves.renyi import ORDERS, STOCK_ORDERS

BLOCKS = hsa.BlockCoordinateDpEvent(
    step_size=0.1, noise_variance=1.0, clip_norm=1.0, batch_size=4, dataset_size=12, num_epochs=2
)
DICE = hsa.DiceSgdDpEvent(
    noise_std=0.02, clip_norm=1.0, error_clip_norm=1.0, batch_size=10, dataset_size=500, num_steps=9
)
LAPLACE = dp_accounting.LaplaceDpEvent(3.0)
RELATION = NeighboringRelation.REPLACE_SPECIAL
RATES = [0.5] * 12 + [0.1] * 12


NEED_OTHER_LOSSES = {"block_coordinate_published", "hoelder", "langevin", "ye_shokri"}


def last_iterate(order="cyclic", relation="replace_one", count=1, **changes):
    run = full_run if order == "full" else cyclic_run
    event = run(batch_order=order, **changes)
    return hsa.LastIterateAccountant(relation).compose(event, count).guarantee


def composed(*events, relation="replace_special"):
    accountant = hsa.LastIterateAccountant(relation)
    for event in events:
        accountant.compose(event)
    return accountant.guarantee


GUARANTEES = {
    "nothing": lambda: hsa.LastIterateAccountant().guarantee,
    "no noise": lambda: last_iterate(noise_multiplier=0.0),
    "one position": lambda: last_iterate(record_position=1),
    "shuffled_once": lambda: last_iterate("shuffled_once", "replace_special"),
    "reshuffled, schedule": lambda: last_iterate("reshuffled", learning_rate=RATES),
    "without_replacement": lambda: last_iterate("without_replacement", num_steps=4),
    "poisson": lambda: last_iterate("poisson", "add_or_remove_one", num_steps=8),
    "poisson, replaced, cap": lambda: last_iterate("poisson", max_batch_size=14),
    "groups": lambda: last_iterate("shuffled_once").for_groups_of(3),
    "blocks": lambda: hsa.BlockCoordinateAccountant("replace_one").compose(BLOCKS).guarantee,
    "dice": lambda: hsa.LastIterateAccountant().compose(DICE).guarantee,
    "with events": lambda: composed(cyclic_run(), LAPLACE, dp_accounting.GaussianDpEvent(4.0)),
    "cohort": lambda: composed(
        dp_accounting.PoissonSampledDpEvent(0.1, full_run()),
        dp_accounting.PoissonSampledDpEvent(0.1, cyclic_run(batch_order="poisson")),
        relation="add_or_remove_one",
    ),
}


def applying_bounds():
    orders = ("cyclic", "shuffled_once", "reshuffled")
    runs = [cyclic_run(batch_order=order) for order in orders]
    runs += [cyclic_run(batch_order="poisson", num_steps=8), full_run(), BLOCKS, DICE]
    runs += [full_run(weight_decay=0.0, domain_diameter=1.0)]
    for bound in hsa.BOUNDS:
        for event in runs:
            if isinstance(event, bound.event_type) and not bound.check(event, RELATION):
                yield bound, event
                break


def answers(guarantee):
    """All that a guarantee says, as texts and exact numbers."""
    orders = STOCK_ORDERS[:100:12]
    return {
        "texts": (repr(guarantee), guarantee.statement(), guarantee.cite(), guarantee.scope(1e-6)),
        "assumptions": [(a.text, a.status, a.topic) for a in guarantee.assumptions],
        "alternatives": guarantee.alternatives,
        "mu": guarantee.mu,
        "epsilon": [guarantee.epsilon(delta) for delta in (0.0, 1e-6, 1e-3)],
        "delta": [guarantee.delta(epsilon) for epsilon in (0.0, 1.0, math.inf)],
        "rdp": repr(guarantee.rdp(orders).tolist()),  # nan is nan
    }


def again(guarantee):
    return hsa.Guarantee.from_dict(json.loads(json.dumps(guarantee.to_dict(), allow_nan=False)))


@pytest.mark.parametrize("make", GUARANTEES.values(), ids=GUARANTEES.keys())
def test_answers_are_the_same(make):
    guarantee = make()
    read = again(guarantee)
    assert answers(read) == answers(guarantee)
    assert read.to_dict() == guarantee.to_dict()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("bound", "event"), [pytest.param(*case, id=case[0].name) for case in applying_bounds()]
)
def test_answers_of_every_bound_are_the_same(bound, event):
    accountant = BoundAccountant(RELATION, bound)
    guarantee = accountant.compose(event).guarantee
    assert answers(again(guarantee)) == answers(guarantee)


def test_every_bound_is_there():
    names = {bound.name for bound, _ in applying_bounds()}
    missing = {bound.name for bound in hsa.BOUNDS} - names
    assert missing <= NEED_OTHER_LOSSES, missing


def test_it_composes_and_exports_as_before():
    guarantee = last_iterate("shuffled_once")
    twice = [compose_curves([(g.curve, 2)]).epsilon(1e-5) for g in (guarantee, again(guarantee))]
    assert twice[0] == twice[1]
    losses = [g.privacy_loss().get_epsilon_for_delta(1e-5) for g in (guarantee, again(guarantee))]
    assert losses[0] == losses[1]
    errors = [g.tradeoff([0.0, 0.01, 0.3]).tolist() for g in (guarantee, again(guarantee))]
    assert errors[0] == errors[1]
    poisson = last_iterate("poisson", "add_or_remove_one", loss=None)
    assert again(poisson).to_dpevent() == poisson.to_dpevent()


def test_divergences_between_the_known_orders_are_rounded_up():
    guarantee = last_iterate("shuffled_once").after_selection(10, 1.0)
    orders = (ORDERS[:-1] + ORDERS[1:]) / 2
    before, after = guarantee.rdp(orders), again(guarantee).rdp(orders)
    assert (after >= before * (1 - 1e-9)).all()
    assert after[:300] == pytest.approx(before[:300], rel=0.05)
    first, beyond = again(guarantee).rdp(np.array([1.0001, 1.5e6]))
    assert first == guarantee.rdp(ORDERS[:1])[0]  # the true divergence grows with the order
    assert beyond == math.inf
    read = again(guarantee)
    assert isinstance(read.curve, RdpCurve)
    assert read.rdp(np.array([])).shape == (0,)


@pytest.fixture(scope="module")
def plain():
    return last_iterate("poisson").to_dict()


class TestRefusals:
    @pytest.mark.parametrize(("key", "value"), [("schema", 2), ("type", "Curve")])
    def test_of_other_versions(self, plain, key, value):
        with pytest.raises(ValueError, match=f"Expected {key} = .*, got {value!r}"):
            hsa.Guarantee.from_dict({**plain, key: value})

    def test_of_what_was_changed(self, plain):
        def paths(part, path=()):
            if isinstance(part, dict | list):
                for key, value in part.items() if isinstance(part, dict) else enumerate(part):
                    yield from paths(value, (*path, key))
            else:
                yield path

        found = [path for path in paths(plain) if path[0] not in ("schema", "type")]
        for path in found[:: max(1, len(found) // 60)]:
            changed = copy.deepcopy(plain)
            place = changed
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = 0.125
            with pytest.raises(ValueError, match="changed after it was written"):
                hsa.Guarantee.from_dict(changed)

    @pytest.mark.parametrize("key", ["curve", "sha256", "theorem", "caveat"])
    def test_of_what_is_missing_or_new(self, plain, key):
        with pytest.raises(ValueError, match="changed after"):
            hsa.Guarantee.from_dict({k: v for k, v in plain.items() if k != key})
        with pytest.raises(ValueError, match="changed after"):
            hsa.Guarantee.from_dict({**plain, "more": 1})

    def test_of_other_things(self, plain):
        with pytest.raises(TypeError, match="Expected a dictionary, got str"):
            hsa.Guarantee.from_dict(json.dumps(plain))
        with pytest.raises(ValueError, match="plain JSON"):
            hsa.Guarantee.from_dict({**plain, "more": object()})
