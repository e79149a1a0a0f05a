"""A record that is a microbatch of several examples is replaced by another, never left out."""

import attrs
import dp_accounting
import pytest
from dp_accounting import NeighboringRelation
from runs import cyclic_run, full_run

import hidden_state_accountants as hsa
from hidden_state_accountants.auditing.linear_losses import LinearLosses
from hidden_state_accountants.runs.run import Step

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


def test_a_recorder_says_so():
    event = EVENTS["cyclic"]
    recorder = hsa.RunRecorder(
        batch_order="cyclic", batch_size=5, dataset_size=20, loss=event.loss, is_microbatched=True
    )
    recorder.add(Step(noise_multiplier=2.0, learning_rate=0.5, clip_norm=1.0, batch=0, rows=5))
    assert recorder.event().is_microbatched
    assert recorder.guarantee(ONE).epsilon(1e-5) > 0
    for relation in OTHERS:
        with pytest.raises(hsa.UnsupportedRunError):
            recorder.check_relation(relation)
        with pytest.raises(hsa.UnsupportedRunError):
            recorder.guarantee(relation)


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
