"""Every entry of the noisy process, re-derived from the update rule."""

import math

import numpy as np
import pytest
from cases import seeds
from dp_accounting import NeighboringRelation
from runs import cyclic_run, full_run

import hidden_state_accountants as hsa
from hidden_state_accountants.process.noisy_process import noisy_process, unmet_conditions

ADD_OR_REMOVE = NeighboringRelation.ADD_OR_REMOVE_ONE
REPLACE_ONE = NeighboringRelation.REPLACE_ONE
REPLACE_SPECIAL = NeighboringRelation.REPLACE_SPECIAL


@pytest.mark.parametrize(
    ("relation", "sensitivity"), [(REPLACE_SPECIAL, 0.5 / 5), (REPLACE_ONE, 2 * 0.5 / 5)]
)
def test_cyclic(relation, sensitivity):
    process = noisy_process(cyclic_run(), relation)
    np.testing.assert_allclose(process.sensitivity, sensitivity)
    np.testing.assert_allclose(process.noise_std, 0.5 * 2.0 / 5)
    np.testing.assert_allclose(process.contraction, 0.9)
    np.testing.assert_allclose(process.drift_contraction, 0.9)
    np.testing.assert_allclose(process.drift, 2 * 0.5)
    assert process.period == 4
    assert list(process.positions) == [0, 1, 2, 3]
    at_two = process.sensitivity_at(2)
    np.testing.assert_array_equal(np.flatnonzero(at_two), np.arange(2, 24, 4))


@pytest.mark.parametrize("relation", [ADD_OR_REMOVE, REPLACE_SPECIAL])
def test_full(relation):
    process = noisy_process(full_run(), relation)
    np.testing.assert_allclose(process.sensitivity, 0.5 / 20)
    # A neighbour that has one record more adds up 21 gradients, divided by 20.
    terms = 41 if relation is ADD_OR_REMOVE else 40
    np.testing.assert_allclose(process.drift, 0.5 * terms / 20)
    assert process.period == 1


def test_schedules_enter_step_by_step():
    rng = np.random.default_rng(0)
    eta, noise, clip, decay = (rng.uniform(0.1, 0.6, 24) for _ in range(4))
    event = cyclic_run(
        learning_rate=eta, noise_multiplier=noise, clip_norm=clip, weight_decay=decay
    )
    process = noisy_process(event, REPLACE_SPECIAL)
    np.testing.assert_allclose(process.sensitivity, eta * clip / 5)
    np.testing.assert_allclose(process.noise_std, eta * noise * clip / 5)
    clipped = hsa.clipped_update_lipschitz(eta, 1.0, 0.0, decay)  # lipschitz 1 > clip
    np.testing.assert_allclose(process.contraction, clipped)
    assert not process.is_constant


def test_clip_is_inactive_exactly_from_the_gradient_bound_on():
    clip = np.array([0.5, 0.999, 1.0, 2.0] * 6)
    process = noisy_process(cyclic_run(clip_norm=clip), REPLACE_SPECIAL)
    active = hsa.clipped_update_lipschitz(0.5, 1.0, 0.0, 0.2)
    np.testing.assert_allclose(process.contraction[:4], [active, active, 0.9, 0.9])
    np.testing.assert_allclose(process.sensitivity[:4], 0.1 * np.minimum(clip[:4], 1.0))
    np.testing.assert_allclose(process.noise_std[:4], 0.2 * clip[:4])  # noise follows the clip


def test_unclipped_noise_is_in_units_of_the_gradient_bound():
    process = noisy_process(
        cyclic_run(clip_norm=None, loss=hsa.LossGeometry.convex(1.0, lipschitz=3.0)),
        REPLACE_SPECIAL,
    )
    np.testing.assert_allclose(process.sensitivity, 0.3)
    np.testing.assert_allclose(process.noise_std, 0.6)


@pytest.mark.parametrize(
    ("event", "relation", "condition", "text"),
    [
        (cyclic_run(), ADD_OR_REMOVE, "neighboring relation", "REPLACE_SPECIAL"),
        (cyclic_run(batch_size=6), REPLACE_SPECIAL, "equal batches", "dataset_size=18"),
        (cyclic_run(loss=None), REPLACE_SPECIAL, "loss geometry", "LossGeometry"),
        (
            cyclic_run(loss=hsa.LossGeometry.hoelder(1.0, 0.5)),
            REPLACE_SPECIAL,
            "linear modulus",
            "exponent 1",
        ),
    ],
)
def test_refusals(event, relation, condition, text):
    (unmet,) = unmet_conditions(event, relation)
    assert unmet.condition == condition
    assert text in str(unmet)
    with pytest.raises(hsa.UnsupportedRunError, match=condition):
        noisy_process(event, relation)
    with pytest.raises(hsa.UnsupportedRunError, match=condition):
        hsa.ShiftedInterpolationAccountant(relation).compose(event)


def test_random_batches_are_no_process_of_theorem_a():
    event = cyclic_run(batch_order="poisson")
    (unmet,) = unmet_conditions(event, REPLACE_SPECIAL)
    assert unmet.condition == "batch order"
    with pytest.raises(hsa.UnsupportedRunError, match="needs FULL or CYCLIC batches"):
        hsa.ShiftedInterpolationAccountant(REPLACE_SPECIAL).compose(event)


def test_constant_runs_cost_no_memory_per_step():
    event = full_run(num_steps=10**6)
    assert event.per_step("learning_rate").strides == (0,)


@pytest.mark.parametrize("seed", seeds(20))
@pytest.mark.parametrize("relation", list(NeighboringRelation))
def test_bounds_hold_on_simulated_steps(seed, relation):
    """|phi(x) - phi'(y)| against c |x - y| + s and kappa |x - y| + drift, Huber losses, clipped."""
    rng = np.random.default_rng(seed)
    b, dimension, threshold = 4, 2, 0.7
    features = rng.normal(size=(b + 1, dimension))
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    targets = rng.normal(size=b + 1)
    clip_norm, eta, decay = rng.uniform(0.2, 1.0), rng.uniform(0.1, 1.5), rng.uniform(0, 0.5)
    event = full_run(
        batch_size=b,
        dataset_size=b,
        num_steps=1,
        clip_norm=clip_norm,
        learning_rate=eta,
        weight_decay=decay,
        loss=hsa.LossGeometry.huber(1.0, threshold),
    )
    process = noisy_process(event, relation)
    c, s = process.contraction[0], process.sensitivity[0]
    kappa, drift = process.drift_contraction[0], process.drift[0]

    def update(x, records):
        total = np.zeros(dimension)
        for i in records:
            g = np.clip(features[i] @ x - targets[i], -threshold, threshold) * features[i]
            total += g * min(1.0, clip_norm / max(np.linalg.norm(g), 1e-300))
        return (1 - eta * decay) * x - eta * total / b

    data = list(range(b))
    neighbours = {
        REPLACE_ONE: [[*range(1, b), b]],
        REPLACE_SPECIAL: [list(range(1, b))],  # the record's gradient is zero
        ADD_OR_REMOVE: [list(range(1, b)), list(range(b + 1))],
    }[relation]
    for neighbour in neighbours:
        for _ in range(200):
            x, y = rng.normal(size=(2, dimension)) * 3
            gap, start = (
                np.linalg.norm(update(x, data) - update(y, neighbour)),
                np.linalg.norm(x - y),
            )
            assert gap <= c * start + s + 1e-12
            assert gap <= kappa * start + drift + 1e-12


def test_infinite_diameter_is_the_default():
    assert noisy_process(cyclic_run(), REPLACE_SPECIAL).domain_diameter == math.inf
