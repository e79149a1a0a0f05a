"""DiceSGD's event, and what the accountants say about it."""

import math

import pytest
from dice_events import ADD, ONE, SPECIAL, run
from dp_accounting import NeighboringRelation

import hidden_state_accountants as hsa
from hidden_state_accountants.bounds.dice_sgd_2024 import sound_curve

Order = hsa.BatchOrder


BINS = (Order.BALLS_IN_BINS, Order.BALLS_IN_BINS_REDRAWN)


# --- accountants ----------------------------------------------------------------------------------


@pytest.mark.parametrize("relation", list(NeighboringRelation))
@pytest.mark.parametrize("order", list(Order))
def test_orders_and_relations(order, relation):
    event = run(batch_order=order, batch_size=8 if order is Order.FULL else 2)
    accountant = hsa.DiceSgdAccountant(relation)
    if relation is ADD and order not in (Order.FULL, Order.POISSON, *BINS):
        with pytest.raises(hsa.UnsupportedRunError, match="REPLACE_SPECIAL"):
            accountant.compose(event)
        return
    epsilon = accountant.compose(event).get_epsilon(1e-5)
    assert 0 < epsilon < math.inf
    assert hsa.LastIterateAccountant(relation).compose(event).get_epsilon(1e-5) == epsilon
    twice = hsa.DiceSgdAccountant(relation).compose(event, 2).get_epsilon(1e-5)
    assert epsilon < twice < math.inf


def test_replacing_costs_more_than_zeroing():
    for order in (Order.POISSON, Order.CYCLIC, Order.RESHUFFLED):
        event = run(batch_order=order)
        assert sound_curve(event, ONE).delta(0.5) > sound_curve(event, SPECIAL).delta(0.5)


def test_unequal_batches_are_refused():
    event = run(batch_order="cyclic", batch_size=3)
    with pytest.raises(hsa.UnsupportedRunError, match="drop 2 records"):
        hsa.DiceSgdAccountant().compose(event)


def test_other_runs_and_analyses_are_refused():
    with pytest.raises(ValueError, match="analysis"):
        hsa.DiceSgdAccountant(analysis="paper")
    with pytest.raises(hsa.UnsupportedRunError, match="DiceSgdDpEvent"):
        hsa.DiceSgdAccountant().compose(hsa.LastIterateDpEvent(
            noise_multiplier=1.0, learning_rate=1.0, clip_norm=1.0, batch_size=2, dataset_size=2,
            num_steps=1, batch_order="full"))  # fmt: skip


def test_guarantee_names_what_it_rests_on():
    text = hsa.DiceSgdAccountant().compose(run(batch_order="cyclic")).guarantee.explain()
    for words in ("never released", "at most 1.5", "constant 2", "independently of the data"):
        assert words in text


def test_an_error_that_is_carried_over_is_one_run():
    """An event per step forgets the error: the guarantee says that it starts at zero."""

    def event(steps):
        return hsa.DiceSgdDpEvent(
            noise_std=1.0, clip_norm=1.0, error_clip_norm=1.0, batch_size=1, dataset_size=1,
            num_steps=steps, batch_order="full", gradient_bound=3.0,
        )  # fmt: skip

    whole = hsa.DiceSgdAccountant().compose(event(10)).guarantee
    pieces = hsa.DiceSgdAccountant().compose(event(1), 10).guarantee
    assert whole.mu > 2.5 * pieces.mu
    assert any("error starts at zero" in a.text for a in pieces.assumptions)
