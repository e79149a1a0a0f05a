"""What a guarantee takes for granted: common to all bounds, replaced by topic, never by text."""

import attrs
import pytest
from declared_lines import FIXED_RECORDS
from dp_accounting import NeighboringRelation

import hidden_state_accountants as hsa
from hidden_state_accountants import best_bound
from hidden_state_accountants.accountants import compose_guarantees
from hidden_state_accountants.bounds import assumptions
from hidden_state_accountants.bounds.base import HiddenStateBound
from hidden_state_accountants.guarantee import (
    Assumption,
    Status,
    Topic,
    merge_assumptions,
    replace_assumptions,
)

ORDERS = list(hsa.BatchOrder)
SPECIAL = NeighboringRelation.REPLACE_SPECIAL
EXTRA = Assumption.declared("the moon is not made of cheese")


def last_iterate_run(order, **changes):
    size = 8 if order is hsa.BatchOrder.FULL else 2
    arguments = {
        "noise_multiplier": 2.0, "learning_rate": 0.1, "clip_norm": 1.0, "batch_size": size,
        "dataset_size": 8, "num_steps": 8, "batch_order": order, "weight_decay": 0.1,
        "loss": hsa.LossGeometry.convex(1.0, lipschitz=1.0),
    }  # fmt: skip
    return hsa.LastIterateDpEvent(**(arguments | changes))


def dice_run(order):
    return hsa.DiceSgdDpEvent(
        noise_std=1.0, clip_norm=1.0, error_clip_norm=1.0, num_steps=8, batch_order=order,
        batch_size=8 if order is hsa.BatchOrder.FULL else 1, dataset_size=8,
    )  # fmt: skip


def block_run(**changes):
    arguments = {
        "step_size": 0.1, "noise_variance": 1.0, "clip_norm": 1.0, "batch_size": 4,
        "dataset_size": 8, "num_epochs": 2, "block_loss": hsa.LossGeometry.convex(1.0),
    }  # fmt: skip
    return hsa.BlockCoordinateDpEvent(**(arguments | changes))


RUNS = [
    *(last_iterate_run(order) for order in ORDERS),
    *(last_iterate_run(order, weight_decay=0.0) for order in ORDERS),
    last_iterate_run(hsa.BatchOrder.FULL, loss=hsa.LossGeometry.strongly_convex(1.0, 0.1, 1.0)),
    last_iterate_run(hsa.BatchOrder.CYCLIC, loss=hsa.LossGeometry.hoelder(1.0, 0.5)),
    last_iterate_run(hsa.BatchOrder.SHUFFLED_ONCE, loss=hsa.LossGeometry.hoelder(1.0, 0.5)),
    last_iterate_run(hsa.BatchOrder.POISSON, loss=None),
    last_iterate_run(hsa.BatchOrder.CYCLIC, domain_diameter=1.0),
    *(dice_run(order) for order in ORDERS),
    block_run(),
    block_run(num_blocks=2),
]


def applicable():
    for event in RUNS:
        for relation in NeighboringRelation:
            for bound in hsa.BOUNDS:
                if isinstance(event, bound.event_type) and not bound.check(event, relation):
                    yield bound, event, relation


CASES = list(applicable())


def of_topic(guarantee, topic):
    return [a for a in guarantee.assumptions if a.topic is topic]


def test_the_cases_reach_every_bound_and_order():
    assert {bound.name for bound, *_ in CASES} == {bound.name for bound in hsa.BOUNDS}
    reached = {event.batch_order for _, event, _ in CASES if hasattr(event, "batch_order")}
    assert reached == set(ORDERS)


def test_what_is_appended_to_the_common_list_reaches_every_guarantee(monkeypatch):
    monkeypatch.setattr(assumptions, "COMMON", (*assumptions.COMMON, EXTRA))
    best_bound.bound_guarantee.cache_clear()
    try:
        for bound, event, relation in CASES:
            assert EXTRA in bound.guarantee(event, relation).assumptions, (bound.name, event)
        for event in (*map(last_iterate_run, ORDERS), dice_run(hsa.BatchOrder.CYCLIC), block_run()):
            accountant = hsa.LastIterateAccountant().compose(event)
            assert EXTRA in accountant.guarantee.assumptions, event
            twice = compose_guarantees([accountant.guarantee] * 2, SPECIAL)
            assert EXTRA in twice.assumptions, event
    finally:
        best_bound.bound_guarantee.cache_clear()


@pytest.mark.parametrize("topic", [Topic.UNIT, Topic.METRICS, Topic.DIVISOR, Topic.ORDER,
                                   Topic.FIXED_IN_ADVANCE])  # fmt: skip
def test_every_guarantee_says_one_thing_about_each_topic(topic):
    for bound, event, relation in CASES:
        found = of_topic(bound.guarantee(event, relation), topic)
        assert len(found) == 1, (bound.name, event, found)


def test_metrics_are_named_in_every_guarantee():
    for bound, event, relation in CASES:
        text = " ".join(map(str, bound.guarantee(event, relation).assumptions))
        assert "no metrics on the private data" in text


def test_a_secret_order_is_never_called_public():
    for bound, event, relation in CASES:
        if bound.event_type is not hsa.LastIterateDpEvent or bound.name == "composition":
            continue
        (order,) = of_topic(bound.guarantee(event, relation), Topic.ORDER)
        is_public = event.batch_order in (hsa.BatchOrder.FULL, hsa.BatchOrder.CYCLIC)
        assert (order.status is Status.PUBLIC) == is_public
        assert is_public or "published" in order.text


def test_batches_that_amplify_are_never_published():
    """Also by composition, and by every bound that averages over the batches of DiceSGD."""
    sampled = (hsa.BatchOrder.POISSON, hsa.BatchOrder.WITHOUT_REPLACEMENT)
    shuffled = (hsa.BatchOrder.SHUFFLED_ONCE, hsa.BatchOrder.RESHUFFLED)
    for bound, event, relation in CASES:
        needed = (*sampled, *shuffled) if bound.event_type is hsa.DiceSgdDpEvent else sampled
        if getattr(event, "batch_order", None) in needed:
            (order,) = of_topic(bound.guarantee(event, relation), Topic.ORDER)
            assert order.status is Status.DECLARED
            assert "never published" in order.text


def test_every_guarantee_cites_its_bound():
    for bound, event, relation in CASES:
        guarantee = bound.guarantee(event, relation)
        assert guarantee.citations[0] == bound.citation
        assert guarantee.neighboring_relation is relation
        assert bool(guarantee.caveat) <= (not bound.sound)


def test_a_bound_that_does_not_apply_is_refused_with_its_conditions():
    for event in RUNS:
        for relation in NeighboringRelation:
            for bound in hsa.BOUNDS:
                if not isinstance(event, bound.event_type):
                    continue
                unmet = bound.check(event, relation)
                if unmet:
                    with pytest.raises(hsa.UnsupportedRunError) as error:
                        bound.guarantee(event, relation)
                    assert all(u.required in str(error.value) for u in unmet)


@pytest.mark.parametrize("bound", hsa.BOUNDS, ids=lambda bound: bound.name)
def test_bounds_are_values(bound):
    twin = type(bound)(bound.analysis)
    assert twin == bound
    assert hash(twin) == hash(bound)
    assert len({*hsa.BOUNDS, twin}) == len(hsa.BOUNDS)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        bound.analysis = "sound"
    with pytest.raises(ValueError, match='Expected analysis to be "sound"'):
        type(bound)("paper")


class TestTopics:
    def test_equality_ignores_them(self):
        plain, about = Assumption.public("n"), Assumption.public("n", Topic.DIVISOR)
        assert plain == about
        assert hash(plain) == hash(about)
        assert merge_assumptions([(about,), (plain,)])[0].topic is Topic.DIVISOR
        assert repr(plain) == repr(about)

    def test_what_is_new_replaces_its_topic(self):
        old = Assumption.public("known order", Topic.ORDER)
        loss = Assumption.declared("loss", Topic.LOSS)
        new = Assumption.declared("secret order", Topic.ORDER)
        seed = Assumption.declared("secret seed", Topic.ORDER)
        assert replace_assumptions((old, loss), new, seed) == (loss, new, seed)
        assert replace_assumptions((old, loss)) == (old, loss)

    def test_what_is_of_no_topic_stays(self):
        first, second = Assumption.declared("first"), Assumption.declared("second")
        assert replace_assumptions((first,), second) == (first, second)
        assert replace_assumptions((first,), first) == (first,)


def test_hidden_iterates_need_records_that_do_not_follow_from_them():
    """A pseudo-label shows an iterate to the next step; composition covers that."""
    for bound, event, relation in CASES:
        guarantee = bound.guarantee(event, relation)
        hides = isinstance(bound, HiddenStateBound)
        if isinstance(event, hsa.BlockCoordinateDpEvent):
            hides = event.num_blocks == 1 or not bound.sound
        assert (FIXED_RECORDS in [a.text for a in guarantee.assumptions]) == hides, bound.name
