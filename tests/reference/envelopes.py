"""The envelope losses of NumPy arrays, by the core's own solver; one of them by plain bisection."""

from typing import NamedTuple

import numpy as np
from scipy.special import softmax, wrightomega

from hidden_state_accountants.losses import scalar
from hidden_state_accountants.losses.arrays import NUMPY
from hidden_state_accountants.losses.envelope import softmax_envelope

BISECTIONS = 60


def bisected_gradient(logits, targets, clip_norm, smoothing):
    """p - t, shape (records, classes): a bisection on the ridge around one on the normaliser.

    Clip norm and smoothing may be given for each record.
    """
    z = logits - logits.max(axis=1, keepdims=True)
    c, m = (np.broadcast_to(np.asarray(a, float), len(z)) for a in (clip_norm, smoothing))

    def point(ridge):
        is_plain = ridge == 0
        ridge = np.where(is_plain, 1.0, ridge)
        right = z + ridge[:, None] * targets
        below, above = right.max(axis=1) - ridge - 1, right.max(axis=1) + np.log(z.shape[1]) + 1
        for _ in range(BISECTIONS):
            level = (below + above) / 2
            x = right - level[:, None] + np.log(ridge)[:, None]
            p = wrightomega(x) / ridge[:, None]
            is_below = p.sum(axis=1) > 1
            below, above = np.where(is_below, level, below), np.where(is_below, above, level)
        p /= p.sum(axis=1, keepdims=True)
        return np.where(is_plain[:, None], softmax(z, axis=1), p) - targets

    def norms(y):
        return np.linalg.norm(y, axis=1)

    inside = point(m)
    is_inside = norms(inside) <= c
    below = m
    above = m + 1 + 2 * norms(z) / c + np.log(z.shape[1]) / c**2
    for _ in range(BISECTIONS):
        ridge = (below + above) / 2
        is_long = norms(point(ridge)) > c
        below, above = np.where(is_long, ridge, below), np.where(is_long, above, ridge)
    return np.where(is_inside[:, None], inside, point(above))


def batch(records, classes, scale, seed, *, soft=False):
    """Logits of a size, and targets: one class each, or probabilities, of which some are 0."""
    random = np.random.default_rng(seed)
    logits = random.normal(size=(records, classes)) * scale
    if not soft:
        return logits, np.eye(classes)[random.integers(classes, size=records)]
    targets = random.dirichlet(np.full(classes, 0.5), size=records)
    targets[::3] *= random.random(size=targets[::3].shape) < 0.6
    targets[targets.sum(axis=1) == 0] = 1
    return logits, targets / targets.sum(axis=1, keepdims=True)


class LossValues(NamedTuple):
    """Values, shape (records,), and gradients in the predictions, of their shape."""

    value: np.ndarray
    gradient: np.ndarray


def softmax_cross_entropy(logits, targets, *, clip_norm, smoothing=0.0):
    """Targets are classes, shape (records,), or probabilities, shape (records, classes)."""
    z, t = np.asarray(logits, dtype=np.float64), np.asarray(targets)
    t = np.eye(z.shape[1])[t] if t.ndim == 1 else t / t.sum(axis=1, keepdims=True)
    return LossValues(*softmax_envelope(z, t, clip_norm, smoothing))


def logistic(logits, targets, *, clip_norm, smoothing=0.0):
    """Targets in [0, 1]."""
    z, t = np.asarray(logits, dtype=np.float64), np.asarray(targets, dtype=np.float64)
    with np.errstate(all="ignore"):
        return LossValues(*scalar.logistic(NUMPY, z, t, clip_norm, smoothing))


def hinge(predictions, targets, *, clip_norm, smoothing):
    """Targets -1 and 1."""
    z, t = np.asarray(predictions, dtype=np.float64), np.asarray(targets, dtype=np.float64)
    return LossValues(*scalar.hinge(NUMPY, z, t, clip_norm, smoothing))


def squared_error(predictions, targets, *, clip_norm, smoothing=0.0, scale=1.0):
    """Of shape (records,) or (records, outputs)."""
    z, t = np.asarray(predictions, dtype=np.float64), np.asarray(targets, dtype=np.float64)
    rows = z.reshape(len(z), -1).T, t.reshape(len(t), -1).T
    with np.errstate(over="ignore"):
        value, gradient = scalar.squared_error(NUMPY, *rows, clip_norm, smoothing, scale)
    return LossValues(value, gradient.T.reshape(z.shape))
