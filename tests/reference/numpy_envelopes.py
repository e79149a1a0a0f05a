"""The envelope losses of NumPy arrays, by the core's own solver."""

from typing import NamedTuple

import numpy as np

from hidden_state_accountants.losses import scalar
from hidden_state_accountants.losses.arrays import NUMPY
from hidden_state_accountants.losses.envelope import softmax_envelope


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
