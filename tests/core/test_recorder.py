"""What the adapters feed, and what comes back."""

import math

import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from runs import cyclic_run, full_run

import hidden_state_accountants as hsa
from hidden_state_accountants.runs.run import Step

RELATION = NeighboringRelation.REPLACE_SPECIAL


def recorder_of(event, **changes):
    arguments = {
        name: getattr(event, name)
        for name in (
            "batch_order",
            "batch_size",
            "dataset_size",
            "loss",
            "domain_diameter",
            "sampling_rate",
            "max_batch_size",
            "is_microbatched",
        )
    }
    return hsa.RunRecorder(**(arguments | changes))


def turn(recorder):
    return recorder.num_steps % 4


def step(recorder, **changes):
    arguments = {
        "noise_multiplier": 2.0,
        "learning_rate": 0.5,
        "clip_norm": 1.0,
        "weight_decay": 0.2,
        "batch": turn(recorder),
        "rows": 5,
    }
    recorder.add(Step(**(arguments | changes)))


def replay(event):
    """Feeds a recorder with the steps of an event."""
    recorder = recorder_of(event)
    names = ("noise_multiplier", "learning_rate", "weight_decay")
    columns = {name: event.per_step(name).tolist() for name in names}
    clip = [None] * event.num_steps if event.clip_norm is None else event.per_step("clip_norm")
    for t in range(event.num_steps):
        values = {name: column[t] for name, column in columns.items()}
        index = turn(recorder)
        step = Step(clip_norm=clip[t], batch=index, rows=event.batch_size, **values)
        recorder.add(step)
        if t + 1 in event.release_steps:
            recorder.release()
    return recorder


@pytest.mark.parametrize(
    "event",
    [
        cyclic_run(),
        full_run(),
        cyclic_run(learning_rate=np.linspace(0.5, 0.1, 24), release_steps=(3, 4, 20)),
        cyclic_run(clip_norm=None),
        cyclic_run(learning_rate=[0.5, 0.3, 0.5, 0.5, 0.3, 0.3, 0.5, 0.7] * 3),
        cyclic_run(noise_multiplier=[1.0] * 7 + [2.0] * 17, domain_diameter=2.0),
        cyclic_run(batch_order="poisson", max_batch_size=7),
        cyclic_run(is_microbatched=True),
        cyclic_run(batch_order="poisson", sampling_rate=0.3),
        cyclic_run(batch_order="reshuffled"),
    ],
)
def test_returns_the_event_that_happened(event):
    assert replay(event).event() == event


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"batch": 0}, "step 3 used batch 0, expected batch 2"),
        ({"batch": None}, "step 3 used batch None, expected batch 2"),
        ({"rows": 4}, "step 3 used 4 rows, expected batch_size = 5"),
        ({"clip_norm": None}, "step 3 does not clip"),
    ],
)
def test_a_wrong_batch_raises_and_records_nothing(changes, text):
    recorder = recorder_of(cyclic_run())
    step(recorder)
    step(recorder)
    before = recorder.state_dict()
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        step(recorder, **changes)
    assert recorder.state_dict() == before
    step(recorder)  # and the run can go on


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"rows": None}, TypeError, "rows"),
        ({"noise_multiplier": -1.0}, ValueError, "noise_multiplier"),
        ({"noise_multiplier": math.nan}, ValueError, "noise_multiplier"),
        ({"learning_rate": math.inf}, ValueError, "learning_rate"),
        ({"clip_norm": 0.0}, ValueError, "clip_norm"),
        ({"weight_decay": 2.0}, ValueError, "learning_rate \\* weight_decay < 1"),
        ({"learning_rate": "0.1"}, TypeError, "learning_rate"),
        ({"learning_rate": 1e-160}, ValueError, "learning_rate between"),
    ],
)
def test_bad_hyper_parameters_record_nothing(changes, error, text):
    recorder = recorder_of(cyclic_run())
    step(recorder)
    before = recorder.state_dict()
    with pytest.raises(error, match=text):
        step(recorder, **changes)
    assert recorder.state_dict() == before


def test_unclipped_steps_need_a_gradient_bound():
    recorder = recorder_of(cyclic_run(), loss=hsa.LossGeometry.convex(1.0))
    with pytest.raises(ValueError, match=r"loss.lipschitz when clip_norm is None"):
        step(recorder, clip_norm=None)


def test_poisson_rows_are_capped():
    recorder = recorder_of(cyclic_run(batch_order="poisson", max_batch_size=7))
    step(recorder, rows=0)
    with pytest.raises(hsa.UnsupportedRunError, match="max_batch_size = 7"):
        step(recorder, rows=8)


def test_guarantees_of_several_runs_compose():
    recorders = [replay(cyclic_run()), replay(cyclic_run(num_steps=7))]
    parts = [recorder.guarantee(RELATION) for recorder in recorders]
    both = hsa.compose_guarantees(parts, RELATION)
    accountant = hsa.LastIterateAccountant(RELATION)
    for recorder in recorders:
        accountant.compose(recorder.event())
    assert both.mu == pytest.approx(accountant.guarantee.mu, rel=1e-12)
    assert hsa.compose_guarantees(parts[:1], RELATION) == parts[0]
    assert hsa.compose_guarantees([], RELATION).epsilon(0.0) == 0.0
    with pytest.raises(ValueError, match="for REPLACE_ONE, got one for REPLACE_SPECIAL"):
        hsa.compose_guarantees(parts, NeighboringRelation.REPLACE_ONE)
