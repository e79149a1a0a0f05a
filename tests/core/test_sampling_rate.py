"""Batches drawn at a rate of their own, and records that are microbatches of examples."""

import attrs
import dice_events
import dp_accounting
import numpy as np
import pytest
from dice_outlier import DiceOutlier
from dp_accounting import NeighboringRelation
from grid_oracle import GridOracle
from runs import cyclic_run, full_run
from scipy import stats

import hidden_state_accountants as hsa
from hidden_state_accountants.auditing import LinearLosses
from hidden_state_accountants.bounds import Composition, DiceSgd, Subsampling
from hidden_state_accountants.runs.statement import description_of

SPECIAL = NeighboringRelation.REPLACE_SPECIAL
ADD_OR_REMOVE = NeighboringRelation.ADD_OR_REMOVE_ONE


def opacus_run(**changes):
    """60,000 records in batches of 64, as stock Opacus draws them: 938 batches, 63 divides."""
    arguments = {
        "noise_multiplier": 1.0,
        "learning_rate": 0.5,
        "clip_norm": 2**0.5,
        "batch_size": 63,
        "dataset_size": 60_000,
        "sampling_rate": 1 / 938,
        "num_steps": 9380,
        "batch_order": "poisson",
        "loss": hsa.LossGeometry.softmax_cross_entropy(1.0),
        "weight_decay": 0.1,
    }
    return hsa.LastIterateDpEvent(**(arguments | changes))


def test_stock_opacus_is_covered():
    event = opacus_run()
    stock = dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(1 / 938, dp_accounting.GaussianDpEvent(1.0)), 9380
    )
    assert event.as_composition() == stock
    assert event.batches_per_epoch == 938
    assert event.sampling_probability == 1 / 938
    every = Composition().guarantee(event, SPECIAL).epsilon(1e-5)
    assert hsa.LastIterateAccountant().compose(event).get_epsilon(1e-5) < 0.9 * every


@pytest.mark.parametrize("batches", [1, 2, 49, 98, 107, 938, 12_345])
def test_as_many_batches_as_the_rate_says(batches):
    """1 / (1 / 49) is 48.99999999999999."""
    assert opacus_run(sampling_rate=1 / batches).batches_per_epoch == batches


def test_epsilon_grows_with_the_rate_and_falls_with_the_divisor():
    """A larger divisor shortens the steps, so that they contract less but stretch less, too."""
    epsilons = [
        Subsampling().guarantee(opacus_run(sampling_rate=rate), SPECIAL).epsilon(1e-5)
        for rate in (1 / 938, 2 / 938)
    ]
    assert epsilons == sorted(epsilons)
    composed = [
        Composition().guarantee(opacus_run(batch_size=size), SPECIAL).epsilon(1e-5)
        for size in (10, 63, 1000)
    ]
    assert len(set(composed)) == 1


def test_overfull_batches_follow_the_rate():
    event = cyclic_run(batch_order="poisson", sampling_rate=0.6, max_batch_size=12)
    tail = 24 * stats.binom(19, 0.6).sf(11)
    assert event.overfull_delta(SPECIAL, 12) == pytest.approx(min(1.0, tail))
    few = attrs.evolve(event, sampling_rate=0.1)
    assert few.cap_delta(SPECIAL) == pytest.approx(24 * stats.binom(19, 0.1).sf(11))


@pytest.mark.parametrize(("rate", "relation"), [(0.15, ADD_OR_REMOVE), (0.7, SPECIAL)])
def test_bound_dominates_the_exact_law(rate, relation):
    """Five records, all subsets of them enumerated, divided by 2 (a rate of 0.4 would be b / n)."""
    event = hsa.LastIterateDpEvent(
        noise_multiplier=3.0, learning_rate=1.0, clip_norm=1.0, batch_size=2, dataset_size=5,
        num_steps=5, weight_decay=0.4, sampling_rate=rate, batch_order="poisson",
        loss=hsa.LossGeometry.generalized_linear(0.5),
    )  # fmt: skip
    guarantee = Subsampling().guarantee(event, relation)
    gradients = [lambda x: np.ones_like(x)] + [lambda x: np.clip(x / 2, -1, 1)] * 4
    grid = GridOracle(event, gradients, None, cells_per_std=8)
    at_least = 0.0
    for epsilon in (0.0, 0.1, 0.5):
        claim = guarantee.delta(epsilon)
        for estimate in grid.delta(epsilon):
            assert estimate.value - 3 * estimate.error <= claim * (1 + 1e-3) + 1e-9
            at_least = max(at_least, estimate.value / claim)
    assert at_least > 0.3  # the oracle knows the rate
    attack = LinearLosses().evidence(event, relation, lambda text: None)
    assert attack.delta(0.1) <= guarantee.delta(0.1)


def test_dice_sgd_follows_the_rate():
    event = dice_events.run(batch_size=3, dataset_size=16, sampling_rate=0.25)
    twin = dice_events.run(batch_size=3, dataset_size=12)  # the bound knows n by the rate only
    for relation in NeighboringRelation:
        claim = DiceSgd().guarantee(event, relation)
        assert claim.epsilon(1e-5) == DiceSgd().guarantee(twin, relation).epsilon(1e-5)
        evidence = DiceOutlier().evidence(event, relation, lambda text: None)
        assert 0 < evidence.delta(0.2) <= claim.delta(0.2)
    rarely = dice_events.run(batch_size=3, dataset_size=16, sampling_rate=0.05)
    assert DiceSgd().guarantee(rarely, SPECIAL).epsilon(1e-5) < claim.epsilon(1e-5)
    unmet = DiceSgd("published").check(rarely, SPECIAL)
    assert [u.condition for u in unmet] == ["sampling rate", "error_clip_norm"]
    with pytest.raises(ValueError, match="sampling_rate = None for FULL"):
        dice_events.run(batch_size=8, batch_order="full", sampling_rate=0.5)
    assert hsa.DiceSgdDpEvent.from_dict(event.to_dict()) == event


def test_statement_and_assumptions_say_it():
    event = opacus_run(num_steps=2)
    guarantee = Composition().guarantee(event, SPECIAL)
    text = "63 of 60000 records, each drawn at a rate of 0.0010660981"
    assert any(text in str(a) for a in guarantee.assumptions)
    assert text in run_line(event)
    assert "each drawn at a rate of 0.2" in run_line(dice_events.run(sampling_rate=0.2))


def run_line(event):
    _, _, facts = description_of(event)
    return dict(facts(event, SPECIAL))["run"]


ONE = NeighboringRelation.REPLACE_ONE
OTHERS = [relation for relation in NeighboringRelation if relation is not ONE]
EVENTS = {
    "cyclic": cyclic_run(is_microbatched=True),
    "full": full_run(is_microbatched=True, domain_diameter=2.0),
    "poisson": cyclic_run(batch_order="poisson", is_microbatched=True),
    "reshuffled": cyclic_run(batch_order="reshuffled", is_microbatched=True),
    "bins": cyclic_run(batch_order="balls_in_bins", is_microbatched=True),
}
events = pytest.mark.parametrize("event", EVENTS.values(), ids=EVENTS)


@events
@pytest.mark.parametrize("relation", OTHERS, ids=lambda relation: relation.name)
def test_nothing_is_said_under_another_relation(event, relation):
    for bound in hsa.BOUNDS:
        if bound.event_type is hsa.LastIterateDpEvent:
            assert bound.check(event, relation)
    assert not hsa.LastIterateAccountant(relation).supports(event)
    cohort = dp_accounting.PoissonSampledDpEvent(0.5, event)
    assert not hsa.LastIterateAccountant(relation).supports(cohort)
    with pytest.raises(hsa.UnsupportedRunError, match="it is another record and not none"):
        event.as_composition(relation)
    reasons = [str(unmet) for unmet in LinearLosses().check(event, relation)]
    assert any("it is another record and not none" in reason for reason in reasons)


@events
def test_it_is_that_of_records_which_are_replaced(event):
    plain = attrs.evolve(event, is_microbatched=False)
    own, other = (hsa.LastIterateAccountant(ONE).compose(one) for one in (event, plain))
    assert own.get_epsilon(1e-5) == other.get_epsilon(1e-5)


@pytest.mark.parametrize(
    "loss",
    [hsa.LossGeometry.logistic(2.0), hsa.LossGeometry.generalized_linear(1.0)],
    ids=lambda loss: loss.kind.value,
)
def test_the_mean_loss_of_a_microbatch_is_no_generalized_linear_one(loss):
    """Its clipped gradient stretches a step; as that of single examples it would cost 6.3."""
    run = {"learning_rate": 1.9, "clip_norm": 0.3, "weight_decay": 0.01, "num_steps": 2000}
    with pytest.raises(ValueError, match=r"is_microbatched=True.*Use LossGeometry.convex\(1"):
        cyclic_run(loss=loss, is_microbatched=True, **run)
    convex = hsa.LossGeometry.convex(loss.smoothness, loss.lipschitz)
    event = cyclic_run(loss=convex, is_microbatched=True, **run)
    with pytest.raises(ValueError, match="is_microbatched=True"):
        attrs.evolve(event, loss=loss)
    costs = [
        hsa.LastIterateAccountant(ONE).compose(one).get_epsilon(1e-5)
        for one in (event, cyclic_run(loss=loss, **run))
    ]
    assert costs[0] > 5 * costs[1]
