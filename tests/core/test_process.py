"""Every entry of the noisy process, and the modulus of every update map, re-derived."""

import math

import numpy as np
import pytest
from cases import seeds
from dp_accounting import NeighboringRelation
from hypothesis import example, given
from hypothesis import strategies as st
from runs import cyclic_run, full_run

import hidden_state_accountants as hsa
from hidden_state_accountants.process.noisy_process import (
    noisy_process,
    unclipped_update_lipschitz,
    unmet_conditions,
    update_lipschitz,
)

ADD_OR_REMOVE, REPLACE_ONE, REPLACE_SPECIAL = NeighboringRelation
UNCLIPPED = cyclic_run(clip_norm=None, loss=hsa.LossGeometry.convex(1.0, lipschitz=3.0))


@pytest.mark.parametrize(
    ("event", "relation", "sensitivity", "noise", "drift"),
    [
        (cyclic_run(), REPLACE_SPECIAL, 0.5 / 5, 0.5 * 2.0 / 5, 2 * 0.5),
        (cyclic_run(), REPLACE_ONE, 2 * 0.5 / 5, 0.5 * 2.0 / 5, 2 * 0.5),
        (full_run(), REPLACE_SPECIAL, 0.5 / 20, 0.5 * 2.0 / 20, 2 * 0.5),
        # A neighbour that has one record more adds up 21 gradients, divided by 20.
        (full_run(), ADD_OR_REMOVE, 0.5 / 20, 0.5 * 2.0 / 20, 0.5 * 41 / 20),
        # Noise is in units of the gradient bound.
        (UNCLIPPED, REPLACE_SPECIAL, 3 * 0.5 / 5, 3 * 0.5 * 2.0 / 5, 3 * 2 * 0.5),
    ],
)
def test_constant_runs(event, relation, sensitivity, noise, drift):
    process = noisy_process(event, relation)
    np.testing.assert_allclose(process.sensitivity, sensitivity)
    np.testing.assert_allclose(process.noise_std, noise)
    np.testing.assert_allclose(process.contraction, 0.9)
    np.testing.assert_allclose(process.drift_contraction, 0.9)
    np.testing.assert_allclose(process.drift, drift)
    assert process.is_constant
    assert list(process.positions) == list(range(process.period))
    assert process.period == event.dataset_size // event.batch_size
    taken = np.flatnonzero(process.sensitivity_at(process.period - 1))
    np.testing.assert_array_equal(taken, np.arange(process.period - 1, 24, process.period))


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


@pytest.mark.parametrize(
    ("changes", "relation", "condition", "text"),
    [
        ({}, ADD_OR_REMOVE, "neighboring relation", "REPLACE_SPECIAL"),
        ({"batch_size": 6}, REPLACE_SPECIAL, "equal batches", "dataset_size=18"),
        ({"loss": None}, REPLACE_SPECIAL, "loss geometry", "LossGeometry"),
        (
            {"loss": hsa.LossGeometry.hoelder(1.0, 0.5)},
            REPLACE_SPECIAL,
            "linear modulus",
            "exponent 1",
        ),
    ],
)
def test_refusals(changes, relation, condition, text):
    event = cyclic_run(**changes)
    (unmet,) = unmet_conditions(event, relation)
    assert unmet.condition == condition
    assert text in str(unmet)
    with pytest.raises(hsa.UnsupportedRunError, match=condition):
        noisy_process(event, relation)
    with pytest.raises(hsa.UnsupportedRunError, match=condition):
        hsa.ShiftedInterpolationAccountant(relation).compose(event)


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
            gap = np.linalg.norm(update(x, data) - update(y, neighbour))
            start = np.linalg.norm(x - y)
            assert gap <= c * start + s + 1e-12
            assert gap <= kappa * start + drift + 1e-12


def clip(gradient, norm):
    length = np.linalg.norm(gradient)
    return gradient if length <= norm else gradient * (norm / length)


@given(st.floats(0.01, 6), st.floats(0, 6))
@example(3.0, 0.0)  # where the branches of the convex row meet
@example(0.6, 0.6)
def test_clipped_row_is_the_maximum_and_never_below_it(eta_big, eta_small):
    """Of |d - Delta/2| + |Delta|/2 over the ball with diameter [-eta m d, eta M d]: on a grid."""
    centre, radius = (eta_big - eta_small) / 2, (eta_big + eta_small) / 2
    angle = np.linspace(0, math.pi, 200_001)
    x, y = centre + radius * np.cos(angle), radius * np.sin(angle)
    grid = float(np.max(np.hypot(2 - x, y) / 2 + np.hypot(x, y) / 2))
    closed = hsa.clipped_update_lipschitz(1.0, eta_big, eta_small)
    assert closed >= grid * (1 - 1e-13)
    assert closed == pytest.approx(grid, rel=1e-8)


@pytest.mark.parametrize("weak_convexity", [0.0, 0.02, 0.4, 0.999])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_moduli_are_convex_in_the_learning_rate(weak_convexity, weight_decay):
    """Steps of a schedule between two others follow from them (theory/random_distance.md)."""
    rates = np.linspace(0, 6, 2001)
    clipped = hsa.clipped_update_lipschitz(rates, 1.0, weak_convexity, weight_decay)
    free = unclipped_update_lipschitz(rates, 1.0, -weak_convexity, weight_decay)
    for c in (clipped, free):
        assert (c[:-2] + c[2:] - 2 * c[1:-1] >= -1e-13).all()


@pytest.mark.parametrize("seed", seeds(30))
def test_clipped_row_dominates_random_losses(seed):
    # Mean over two records of clipped gradients of quadratics with Hessian in [-m, M], with decay.
    rng = np.random.default_rng(seed)
    big, small = rng.uniform(0.1, 3), rng.uniform(0, 1) * (rng.random() < 0.5)
    eta, decay = rng.uniform(0.05, 0.9), rng.uniform(0, 1)
    bound = hsa.clipped_update_lipschitz(eta, big, small, decay)
    hessians = []
    for _ in range(2):
        rotation, _ = np.linalg.qr(rng.normal(size=(3, 3)))
        hessians.append(rotation @ np.diag([big, -small, rng.uniform(-small, big)]) @ rotation.T)
    slopes = rng.normal(size=(2, 3))
    norm = rng.uniform(0.1, 2)

    def update(x):
        mean = sum(clip(h @ x + g, norm) for h, g in zip(hessians, slopes, strict=True)) / 2
        return (1 - eta * decay) * x - eta * mean

    for _ in range(300):
        x = rng.normal(size=3) * 3
        y = x + rng.normal(size=3) * rng.choice([1e-4, 1.0])
        assert np.linalg.norm(update(x) - update(y)) <= bound * np.linalg.norm(x - y) * (1 + 1e-9)


LOSSES_OF_A_PREDICTION = {
    "logistic": (hsa.LossGeometry.logistic(1.5), lambda z: 1 / (1 + math.exp(-z)) - 1),
    "squared": (hsa.LossGeometry.squared_error(1.5), lambda z: z - 0.7),
    "mse": (hsa.LossGeometry.squared_error(1.5, scale=2.0), lambda z: 2 * (z - 0.7)),
    "huber": (hsa.LossGeometry.huber(1.5, 0.4), lambda z: float(np.clip(z - 0.7, -0.4, 0.4))),
}


@pytest.mark.parametrize("name", LOSSES_OF_A_PREDICTION)
@pytest.mark.parametrize("eta", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("norm", [0.05, 0.5, 100.0])
def test_generalized_linear_row_survives_clipping(name, eta, norm):
    loss, slope = LOSSES_OF_A_PREDICTION[name]
    rng = np.random.default_rng(1)
    decay = 0.1
    active = np.array([loss.lipschitz is None or loss.lipschitz > norm])
    (bound,) = update_lipschitz(loss, np.array([eta]), np.array([decay]), active)
    features = rng.normal(size=(3, 2))
    features *= 1.5 / np.linalg.norm(features, axis=1, keepdims=True)

    def update(x):
        mean = sum(clip(slope(float(f @ x)) * f, norm) for f in features) / 3
        return (1 - eta * decay) * x - eta * mean

    for _ in range(1000):
        x, y = rng.normal(size=(2, 2)) * 4
        assert np.linalg.norm(update(x) - update(y)) <= bound * np.linalg.norm(x - y) * (1 + 1e-12)


@pytest.mark.parametrize(
    ("loss", "active", "expected"),
    [
        (hsa.LossGeometry.convex(2.0), False, max(0.95, abs(0.95 - 1.0))),
        (hsa.LossGeometry.strongly_convex(2.0, 0.5), False, 0.95 - 0.25),
        (hsa.LossGeometry.strongly_convex(2.0, 0.5), True, None),
        (hsa.LossGeometry.weakly_convex(2.0, 0.5), False, 0.95 + 0.25),
        (hsa.LossGeometry.smooth(2.0), False, 0.95 + 1.0),
        (hsa.LossGeometry.smooth(2.0), True, 0.95 + 1.0),
        (hsa.LossGeometry.linear(1.0), True, 0.95),
        (hsa.LossGeometry.generalized_linear(2.0), True, 0.95),
        (hsa.LossGeometry.hoelder(2.0, 1.0), False, 0.95 + 1.0),
    ],
)
def test_rows(loss, active, expected):
    (c,) = update_lipschitz(loss, np.array([0.5]), np.array([0.1]), np.array([active]))
    if expected is None:  # strong convexity inside an active clip never helps
        expected = hsa.clipped_update_lipschitz(0.5, 2.0, 0.0, 0.1)
    assert c == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((-1.0, 1.0), "learning_rate >= 0"),
        ((1.0, -1.0), "smoothness >= 0"),
        ((1.0, 1.0, math.nan), "weak_convexity >= 0"),
        ((1.0, 1.0, 0.0, 1.0), "learning_rate \\* weight_decay < 1"),
        ((math.inf, 1.0), "learning_rate >= 0"),
    ],
)
def test_bad_input(arguments, text):
    with pytest.raises(ValueError, match=text):
        hsa.clipped_update_lipschitz(*arguments)
