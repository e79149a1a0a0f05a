"""What a guarantee takes for granted: common to all bounds, replaced by topic, never by text."""

import pytest
from declared_lines import FIXED_RECORDS
from dp_accounting import NeighboringRelation
from runs import block_run, cyclic_run, dice_run

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
FULL, CYCLIC = hsa.BatchOrder.FULL, hsa.BatchOrder.CYCLIC
SAMPLED = (hsa.BatchOrder.POISSON, hsa.BatchOrder.WITHOUT_REPLACEMENT)
SHUFFLED = (hsa.BatchOrder.SHUFFLED_ONCE, hsa.BatchOrder.RESHUFFLED)
EXTRA = Assumption.declared("the moon is not made of cheese")
HOELDER = hsa.LossGeometry.hoelder(1.0, 0.5)


def in_order(make, order, **changes):
    size = 20 if order is FULL else 1 if make is dice_run else 5
    return make(batch_order=order, batch_size=size, num_steps=8, **changes)


RUNS = [
    *(in_order(cyclic_run, order) for order in ORDERS),
    *(in_order(cyclic_run, order, weight_decay=0.0) for order in ORDERS),
    in_order(cyclic_run, FULL, loss=hsa.LossGeometry.strongly_convex(1.0, 0.1, 1.0)),
    cyclic_run(loss=HOELDER),
    cyclic_run(loss=HOELDER, batch_order="shuffled_once"),
    cyclic_run(loss=None, batch_order="poisson"),
    cyclic_run(domain_diameter=1.0),
    *(in_order(dice_run, order, error_clip_norm=1.0) for order in ORDERS),
    block_run(gradient_sensitivity=None, clip_norm=1.0, num_epochs=2),
    block_run(gradient_sensitivity=None, clip_norm=1.0, num_epochs=2, num_blocks=2),
]
APPLICABLE = [
    (bound, event, relation)
    for event in RUNS
    for relation in NeighboringRelation
    for bound in hsa.BOUNDS
    if isinstance(event, bound.event_type) and not bound.check(event, relation)
]


def test_the_cases_reach_every_bound_and_order():
    assert {bound.name for bound, *_ in APPLICABLE} == {bound.name for bound in hsa.BOUNDS}
    reached = {event.batch_order for _, event, _ in APPLICABLE if hasattr(event, "batch_order")}
    assert reached == set(ORDERS)


def test_what_is_appended_to_the_common_list_reaches_every_guarantee(monkeypatch):
    monkeypatch.setattr(assumptions, "COMMON", (*assumptions.COMMON, EXTRA))
    best_bound.bound_guarantee.cache_clear()
    try:
        for bound, event, relation in APPLICABLE:
            assert EXTRA in bound.guarantee(event, relation).assumptions, (bound.name, event)
        for event in (*RUNS[: len(ORDERS)], *RUNS[-2:]):
            guarantee = hsa.LastIterateAccountant().compose(event).guarantee
            twice = compose_guarantees([guarantee] * 2, guarantee.neighboring_relation)
            for found in (guarantee, twice):
                assert EXTRA in found.assumptions, event
    finally:
        best_bound.bound_guarantee.cache_clear()


@pytest.mark.parametrize("bound", hsa.BOUNDS, ids=lambda bound: f"{bound.name} {bound.analysis}")
def test_what_every_guarantee_says(bound):
    """One thing about each topic, and never that a secret order is public."""
    for _, event, relation in (case for case in APPLICABLE if case[0] is bound):
        guarantee = bound.guarantee(event, relation)
        said = {
            topic: [a for a in guarantee.assumptions if a.topic is topic]
            for topic in (
                Topic.UNIT,
                Topic.METRICS,
                Topic.DIVISOR,
                Topic.ORDER,
                Topic.FIXED_IN_ADVANCE,
            )
        }
        assert all(len(found) == 1 for found in said.values()), (event, said)
        assert any("no metrics on the private data" in str(a) for a in guarantee.assumptions)
        assert guarantee.citations[0] == bound.citation
        assert guarantee.neighboring_relation is relation
        assert bool(guarantee.caveat) <= (not bound.sound)
        (order,), drawn = said[Topic.ORDER], getattr(event, "batch_order", None)
        if bound.event_type is hsa.LastIterateDpEvent and bound.name != "composition":
            assert (order.status is Status.PUBLIC) == (drawn in (FULL, CYCLIC))
            assert order.status is Status.PUBLIC or "published" in order.text
        # What amplifies, also by composition; DiceSGD averages over the batches.
        if drawn in SAMPLED or (bound.event_type is hsa.DiceSgdDpEvent and drawn in SHUFFLED):
            assert order.status is Status.DECLARED
            assert "never published" in order.text
        # A pseudo-label shows an iterate to the next step; composition covers that.
        hides = isinstance(bound, HiddenStateBound)
        if isinstance(event, hsa.BlockCoordinateDpEvent):
            hides = event.num_blocks == 1 or not bound.sound
        assert (FIXED_RECORDS in [a.text for a in guarantee.assumptions]) == hides


@pytest.mark.parametrize("bound", hsa.BOUNDS, ids=lambda bound: f"{bound.name} {bound.analysis}")
def test_a_bound_that_does_not_apply_is_refused_with_its_conditions(bound):
    for event in (event for event in RUNS if isinstance(event, bound.event_type)):
        for relation in NeighboringRelation:
            if unmet := bound.check(event, relation):
                with pytest.raises(hsa.UnsupportedRunError) as error:
                    bound.guarantee(event, relation)
                assert all(u.required in str(error.value) for u in unmet)
    assert type(bound)(bound.analysis) == bound
    with pytest.raises(ValueError, match='Expected analysis to be "sound"'):
        type(bound)("paper")


def test_what_is_new_replaces_its_topic_and_never_what_has_the_same_text():
    old = Assumption.public("known order", Topic.ORDER)
    loss = Assumption.declared("loss", Topic.LOSS)
    new = Assumption.declared("secret order", Topic.ORDER)
    first, second = Assumption.declared("first"), Assumption.declared("second")
    assert replace_assumptions((old, loss), new, first) == (loss, new, first)
    assert replace_assumptions((old, loss)) == (old, loss)
    assert replace_assumptions((first,), second) == (first, second)
    assert replace_assumptions((first,), first) == (first,)
    plain, about = Assumption.public("n"), Assumption.public("n", Topic.DIVISOR)
    assert plain == about
    assert merge_assumptions([(about,), (plain,)])[0].topic is Topic.DIVISOR
