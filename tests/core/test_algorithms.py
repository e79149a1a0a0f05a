"""Algorithms as the adapters describe them: the run that each makes, and what is refused."""

import math

import pytest

import hidden_state_accountants as hsa
from hidden_state_accountants.guarantee import Topic
from hidden_state_accountants.runs.algorithms import BlockCoordinate, DiceSGD, NoisySGD

BATCHES = {
    "batch_order": hsa.BatchOrder.CYCLIC,
    "batch_size": 4,
    "dataset_size": 12,
    "sampling_rate": None,
    "max_batch_size": None,
}
NOISE = {"noise_multiplier": 2.0, "clip_norm": 1.5}
LOGISTIC = hsa.LossGeometry.logistic(1.0)


def event_of(algorithm, rate=0.5, decay=0.1, steps=3, batches=BATCHES):
    run = algorithm.new_run(batches)
    for number in range(steps):
        run.add(algorithm.step(learning_rate=rate, weight_decay=decay, rows=4, batch=number % 3))
    return run.event()


def test_sgd():
    event = event_of(NoisySGD(**NOISE, loss=LOGISTIC, prox_strong_convexity=0.2, radius=3.0))
    assert event == hsa.LastIterateDpEvent(
        noise_multiplier=2.0, clip_norm=1.5, learning_rate=0.5, weight_decay=0.1, batch_size=4,
        dataset_size=12, num_steps=3, batch_order="cyclic", loss=LOGISTIC,
        prox_strong_convexity=0.2, domain_diameter=6.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    "algorithm", [NoisySGD(**NOISE, other_rule="Adam"), NoisySGD(**NOISE)], ids=["Adam", "expands"]
)
def test_rates_that_do_not_count_are_one(algorithm):
    event = event_of(algorithm, rate=20.0)
    assert (event.learning_rate, event.weight_decay, event.loss) == (1.0, 0.0, None)


def test_microbatches_are_composed_under_replace_one_only():
    algorithm = NoisySGD(**NOISE, loss=LOGISTIC, microbatch=2)
    event = event_of(algorithm)
    assert event.loss is None
    with pytest.raises(hsa.UnsupportedRunError, match="REPLACE_ONE"):
        hsa.LastIterateAccountant().compose(event)
    assert any("microbatches of 2 examples" in text for text in algorithm.checked())


def test_dice_sgd():
    algorithm = DiceSGD(**NOISE, error_clip_norm=0.1, gradient_bound=3.0)
    assert event_of(algorithm) == hsa.DiceSgdDpEvent(
        noise_std=0.75, clip_norm=1.5, error_clip_norm=0.1, batch_size=4, dataset_size=12,
        num_steps=3, batch_order="cyclic", gradient_bound=3.0,
    )  # fmt: skip
    assert not algorithm.hides_iterates
    with pytest.raises(hsa.UnsupportedRunError, match="max_batch_size = None with DiceSGD, got 6"):
        algorithm.new_run({**BATCHES, "batch_order": hsa.BatchOrder.POISSON, "max_batch_size": 6})


def test_block_coordinate_descent():
    algorithm = BlockCoordinate(**NOISE, step_size=0.5, num_blocks=2, prox_strong_convexity=0.3)
    event = event_of(algorithm, decay=0.0)
    assert (event.num_blocks, event.num_epochs, event.step_size) == (2, 1, 0.5)
    assert event.prox_strong_convexity == 0.3
    assert event.noise_variance == pytest.approx(0.5 * (2.0 * 1.5 / 4) ** 2 / 2)
    for other in ({"rate": 0.25, "decay": 0.0}, {"decay": 0.1}):
        with pytest.raises(hsa.UnsupportedRunError, match="about constant values"):
            event_of(algorithm, **other)
    with pytest.raises(hsa.UnsupportedRunError, match='got "poisson"'):
        algorithm.new_run({**BATCHES, "batch_order": hsa.BatchOrder.POISSON})


@pytest.mark.parametrize(
    ("algorithm", "topic"),
    [
        (NoisySGD(**NOISE, loss=LOGISTIC, source="of the loss"), Topic.LOSS),
        (DiceSGD(**NOISE, error_clip_norm=1, gradient_bound=3, source="it"), Topic.GRADIENT_NORM),
        (DiceSGD(**NOISE, error_clip_norm=1, gradient_bound=math.inf, source="it"), None),
        (NoisySGD(**NOISE, loss=LOGISTIC), None),
        (NoisySGD(**NOISE, prox="proximal map of r"), Topic.REGULARISER),
    ],
)
def test_what_takes_the_place_of_a_declaration(algorithm, topic):
    assert [a.topic for a in algorithm.derived()][:1] == ([] if topic is None else [topic])
