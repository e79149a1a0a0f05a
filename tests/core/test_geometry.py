"""The modulus of every update map, against maps of the kind it speaks about."""

import math

import numpy as np
import pytest
from cases import seeds
from hypothesis import given
from hypothesis import strategies as st

import hidden_state_accountants as hsa
from hidden_state_accountants.process.noisy_process import (
    unclipped_update_lipschitz,
    update_lipschitz,
)


def clip(gradient, norm):
    length = np.linalg.norm(gradient)
    return gradient if length <= norm else gradient * (norm / length)


def grid_maximum(eta_big, eta_small):
    """max of |d - Delta/2| + |Delta|/2 over the ball with diameter [-eta m d, eta M d]: a grid."""
    centre, radius = (eta_big - eta_small) / 2, (eta_big + eta_small) / 2
    angle = np.linspace(0, math.pi, 200_001)
    x, y = centre + radius * np.cos(angle), radius * np.sin(angle)
    return float(np.max(np.hypot(2 - x, y) / 2 + np.hypot(x, y) / 2))


@given(st.floats(0.01, 6), st.floats(0, 6))
def test_clipped_row_is_the_maximum_and_never_below_it(eta_big, eta_small):
    closed = hsa.clipped_update_lipschitz(1.0, eta_big, eta_small)
    grid = grid_maximum(eta_big, eta_small)
    assert closed >= grid * (1 - 1e-13)
    assert closed == pytest.approx(grid, rel=1e-8)


@pytest.mark.parametrize(
    ("eta", "big", "small", "expected"),
    [
        (0.5, 1.0, 0.0, 1.0690449676496976),
        (1.0, 3.0, 0.0, 2.0),  # where the branches of the convex row meet
        (1.0, 5.0, 0.0, 4.0),
        (0.3, 2.0, 2.0, 1.6),  # m = M: smooth only
        (0.0, 1.0, 0.0, 1.0),
        (0.7, 0.0, 0.0, 1.0),
    ],
)
def test_clipped_row_values(eta, big, small, expected):
    assert hsa.clipped_update_lipschitz(eta, big, small) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("weak_convexity", [0.0, 0.02, 0.4, 0.999])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_moduli_are_convex_in_the_learning_rate(weak_convexity, weight_decay):
    """Steps of a schedule between two others follow from them (theory/random_distance.md)."""
    rates = np.linspace(0, 6, 2001)
    clipped = hsa.clipped_update_lipschitz(rates, 1.0, weak_convexity, weight_decay)
    free = unclipped_update_lipschitz(rates, 1.0, -weak_convexity, weight_decay)
    for c in (clipped, free):
        assert (c[:-2] + c[2:] - 2 * c[1:-1] >= -1e-13).all()


def test_clipped_convex_row_is_attained():
    # Rank-one Hessian, gradient just outside the clip ball: I - eta (I - n n^T) H.
    best = 0.0
    for angle in np.linspace(0, math.pi, 4001):
        n, u = np.array([1.0, 0.0]), np.array([math.cos(angle), math.sin(angle)])
        jacobian = np.eye(2) - 0.5 * (np.eye(2) - np.outer(n, n)) @ np.outer(u, u)
        best = max(best, np.linalg.norm(jacobian, 2))
    bound = hsa.clipped_update_lipschitz(0.5, 1.0)
    assert best <= bound
    assert best == pytest.approx(bound, rel=1e-6)


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


def test_opacus_clip_factor_is_firmly_nonexpansive():
    rng = np.random.default_rng(0)

    def opacus(g, c):
        return g * min(1.0, c / (np.linalg.norm(g) + 1e-6))

    for _ in range(20_000):
        c = rng.choice([1e-3, 0.1, 1.0])
        g = rng.normal(size=2) * c * rng.uniform(0, 3)
        h = g + rng.normal(size=2) * c * rng.choice([1e-3, 1.0])
        p = opacus(g, c) - opacus(h, c)
        assert p @ (g - h) >= p @ p - 1e-15 * c * c


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


def test_clipped_row_vectorises():
    eta = np.array([0.1, 0.5, 2.0])
    values = hsa.clipped_update_lipschitz(eta, 1.0, 0.2, np.array([0.0, 0.1, 0.2]))
    singles = [
        hsa.clipped_update_lipschitz(e, 1.0, 0.2, w)
        for e, w in zip(eta, [0, 0.1, 0.2], strict=True)
    ]
    np.testing.assert_array_equal(values, singles)


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
