"""A search for pairs of points at which an envelope is not as smooth, or not as convex, as proven.

A convex function with an M'-Lipschitz gradient g satisfies, and is characterised by,
|d - (2/M') (g(z + d) - g(z))| <= |d|. The search climbs on the ratio of the two sides.
"""

import functools
import itertools

import envelopes as envelope
import numpy as np
import pytest
from envelopes import batch

import hidden_state_accountants as hsa
from hidden_state_accountants import LossGeometry
from hidden_state_accountants.process.noisy_process import update_lipschitz

CLIMBERS, ROUNDS = 150, 60
ROUNDING = 1e-7  # errors of 1e-12 in gradients, at distances from 1e-4 on


def norms(rows):
    return np.linalg.norm(rows, axis=1)


def climb(ratio, dimension, scale, seed):
    """The largest ratio of pairs (z, z + d), each of which moves wherever that makes it larger."""
    random = np.random.default_rng(seed)
    points = random.normal(size=(CLIMBERS, dimension)) * scale
    lengths = 10 ** random.uniform(-3, 1, size=(CLIMBERS, 1)) / np.sqrt(dimension)
    steps = lengths * random.normal(size=points.shape)
    best, size = ratio(points, steps), np.ones((CLIMBERS, 1))
    for _ in range(ROUNDS):
        moved = points + size * random.normal(size=points.shape)
        turned = steps + size * norms(steps)[:, None] * random.normal(size=steps.shape)
        turned *= np.maximum(1, 1e-4 / norms(turned)[:, None])
        found = ratio(moved, turned)
        is_better = (found > best)[:, None]
        points, steps = np.where(is_better, moved, points), np.where(is_better, turned, steps)
        size = np.clip(size * np.where(is_better, 1.5, 0.8), 1e-3, 3.0)
        best = np.maximum(best, found)
    return best.max()


def expansion(gradient, inverse_smoothness):
    """|d - (2/M') (g(z + d) - g(z))| / |d|."""

    def ratio(points, steps):
        change = gradient(points + steps) - gradient(points)
        return norms(steps - 2 * inverse_smoothness * change) / norms(steps)

    return ratio


def softmax_gradient(targets, **arguments):
    return lambda z: envelope.softmax_cross_entropy(z, targets, **arguments).gradient


@pytest.mark.parametrize(
    ("clip_norm", "classes", "soft"),
    [(0.1, 2, True), (0.1, 4, False), (0.5, 4, True), (1.2, 2, False)],
)
def test_the_softmax_envelope_is_as_smooth_as_proven(clip_norm, classes, soft):
    for smoothing, scale in itertools.product([0.0, 3.0, 40.0], [1.0, 20.0]):
        _, targets = batch(CLIMBERS, classes, 1.0, classes, soft=soft)
        gradient = softmax_gradient(targets, clip_norm=clip_norm, smoothing=smoothing)
        found = climb(expansion(gradient, 2 + smoothing), classes, scale, seed=classes)
        assert 0.99 < found <= 1 + ROUNDING  # no smaller constant would do along flat directions


@pytest.mark.parametrize("smoothing", [0.0, 3.0])
def test_the_smoothness_is_attained(smoothing):
    """Halfway between two classes, inside the ball: |g(z + d) - g(z)| comes close to M' |d|."""
    _, targets = batch(CLIMBERS, 2, 1.0, 1)
    gradient = softmax_gradient(targets, clip_norm=1.2, smoothing=smoothing)

    def ratio(points, steps):
        return norms(gradient(points + steps) - gradient(points)) * (2 + smoothing) / norms(steps)

    assert 0.99 < climb(ratio, 2, 1.0, seed=2) <= 1 + ROUNDING


@pytest.mark.parametrize(
    ("loss", "inverse", "targets"),
    [
        (envelope.logistic, 4.0, (0.0, 0.3, 1.0)),
        (envelope.hinge, 0.0, (-1.0, 1.0)),
        (functools.partial(envelope.squared_error, scale=3.0), 1 / 3, (0.5,)),
    ],
)
def test_scalar_envelopes_are_as_smooth_as_proven(loss, inverse, targets):
    for target, clip, smoothing in itertools.product(targets, [0.1, 0.8], [0.2, 5.0]):

        def gradient(z, target=target, clip=clip, m=smoothing):
            targets = np.full(len(z), target)
            return loss(z[:, 0], targets, clip_norm=clip, smoothing=m).gradient[:, None]

        for scale in (1.0, 20.0):
            assert climb(expansion(gradient, inverse + smoothing), 1, scale, seed=3) <= 1 + ROUNDING


@pytest.mark.parametrize("decay", [0.0, 0.02])
@pytest.mark.parametrize("rate", [0.5, 6.0, 40.0])
def test_a_step_of_a_linear_model_contracts_as_accounted(rate, decay):
    """Three records with a bias, at the smoothing for this learning rate; the optimizer clips."""
    features, classes, records = 2, 3, 3
    random = np.random.default_rng(5)
    x = random.normal(size=(CLIMBERS, records, features))
    x /= np.linalg.norm(x, axis=2, keepdims=True)
    x = np.concatenate([x, np.ones((CLIMBERS, records, 1))], axis=2)
    _, targets = batch(CLIMBERS * records, classes, 1.0, 5)
    smoothing = hsa.envelope_smoothing(
        rate, curvature=0.5, feature_norm=1.0, bias=True, weight_decay=decay
    )
    loss = LossGeometry.envelope_softmax_cross_entropy(
        1.0, bias=True, clip_norm=0.5, smoothing=smoothing
    )
    gradient = softmax_gradient(targets, clip_norm=0.5, smoothing=smoothing)
    (c,) = update_lipschitz(loss, np.array([rate]), np.array([decay]), np.array([False]))
    assert c == pytest.approx(1 - rate * decay, rel=1e-14)
    longest = 0.0

    def step(weights):
        nonlocal longest
        matrix = weights.reshape(-1, classes, features + 1)
        logits = np.einsum("nrf,nkf->nrk", x, matrix)
        y = gradient(logits.reshape(-1, classes)).reshape(logits.shape)
        gradients = np.einsum("nrk,nrf->nrkf", y, x).reshape(CLIMBERS, records, -1)
        longest = max(longest, np.linalg.norm(gradients, axis=2).max())
        return (1 - rate * decay) * weights - rate * gradients.mean(axis=1)

    def ratio(points, steps):
        return norms(step(points + steps) - step(points)) / norms(steps)

    found = max(climb(ratio, classes * (features + 1), scale, seed=6) for scale in (1.0, 10.0))
    assert found <= c + rate * ROUNDING
    assert found > 0.98 * c
    assert 0.9 * loss.lipschitz < longest <= loss.lipschitz * (1 + 1e-14)
