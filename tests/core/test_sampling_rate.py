"""Batches drawn at a rate of their own, and records that are microbatches of examples."""

import attrs
import dice_events
import dp_accounting
import pytest
from dice_outlier import DiceOutlier
from dp_accounting import NeighboringRelation
from runs import cyclic_run, full_run, probe_run
from scipy import stats

import hidden_state_accountants as hsa
from hidden_state_accountants.auditing import LinearLosses
from hidden_state_accountants.bounds import Composition, DiceSgd

SPECIAL = NeighboringRelation.REPLACE_SPECIAL


def opacus_run(**changes):
    """60,000 records in batches of 64, as stock Opacus draws them: 938 batches, 63 divides."""
    arguments = {
        "noise_multiplier": 1.0, "clip_norm": 2**0.5, "batch_size": 63, "dataset_size": 60_000,
        "sampling_rate": 1 / 938, "num_steps": 9380, "batch_order": "poisson", **changes,
    }  # fmt: skip
    return probe_run(**arguments)


def test_stock_opacus_is_covered():
    event = opacus_run()
    stock = dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(1 / 938, dp_accounting.GaussianDpEvent(1.0)), 9380
    )
    assert event.as_composition() == opacus_run(batch_size=1000).as_composition() == stock
    assert event.sampling_probability == 1 / 938
    for batches in (1, 49, 938, 12_345):  # 1 / (1 / 49) is 48.99999999999999
        assert opacus_run(sampling_rate=1 / batches).batches_per_epoch == batches
    every = Composition().guarantee(event, SPECIAL)
    assert hsa.LastIterateAccountant().compose(event).get_epsilon(1e-5) < 0.9 * every.epsilon(1e-5)
    text = "63 of 60000 records, each drawn at a rate of 0.0010660981"
    assert any(text in str(a) for a in every.assumptions)


def test_overfull_batches_follow_the_rate():
    event = cyclic_run(batch_order="poisson", sampling_rate=0.6, max_batch_size=12)
    tail = 24 * stats.binom(19, 0.6).sf(11)
    assert event.overfull_delta(SPECIAL, 12) == pytest.approx(min(1.0, tail))
    few = attrs.evolve(event, sampling_rate=0.1)
    assert few.cap_delta(SPECIAL) == pytest.approx(24 * stats.binom(19, 0.1).sf(11))


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
def test_microbatches_have_no_epsilon_under_another_relation(event, relation):
    for bound in hsa.BOUNDS:
        if bound.event_type is hsa.LastIterateDpEvent:
            assert bound.check(event, relation)
    for one in (event, dp_accounting.PoissonSampledDpEvent(0.5, event)):
        assert not hsa.LastIterateAccountant(relation).supports(one)
    with pytest.raises(hsa.UnsupportedRunError, match="it is another record and not none"):
        event.as_composition(relation)
    assert LinearLosses().check(event, relation)


@events
def test_microbatches_have_the_epsilon_of_records_that_are_replaced(event):
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
