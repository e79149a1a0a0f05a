"""Gradient descent of the methods that are compared: every batch order, losses and envelopes."""

import numpy as np

from hidden_state_accountants import BatchOrder
from hidden_state_accountants.losses import scalar
from hidden_state_accountants.losses.arrays import NUMPY
from hidden_state_accountants.losses.envelope import softmax_envelope
from hidden_state_accountants.losses.linear import BY_NAME

_ORDERS = np.random.default_rng()  # of batches; noise has a generator of its own


def slopes(candidate, logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """The gradients of the loss, or of its envelope, in the logits; shape (records, outputs)."""
    if candidate.smoothing is None:
        return BY_NAME[candidate.loss](NUMPY, logits.shape[1]).slopes(logits, targets)
    settings = candidate.clip_norm, candidate.smoothing
    if candidate.loss == "softmax_cross_entropy":
        return softmax_envelope(logits, targets, *settings)[1]
    with np.errstate(all="ignore"):
        return scalar.logistic(NUMPY, logits.T, targets.T, *settings)[1].T


def train(candidate, features: np.ndarray, targets: np.ndarray, generator) -> np.ndarray:
    """The last iterate of a run from zero, shape (features, outputs).

    Args:
        candidate: Of `hidden_state_accountants.recommend`, perhaps changed.
        features: Of norm 1, shape (records, features).
        targets: Shape (records, outputs): rows of the unit matrix, or 0 and 1.
        generator: Has `normal(std, shape)`.
    """
    event = candidate.event
    weights = np.zeros((features.shape[1], targets.shape[1]))
    std = float(event.noise_std_on_sum()[0])
    rate, clip_norm = (float(event.per_step(n)[0]) for n in ("learning_rate", "clip_norm"))
    for index in batches(event):
        rows = features[index]
        logits = np.asarray(rows @ weights.astype(rows.dtype), dtype=np.float64)
        y = slopes(candidate, logits, targets[index])
        norms = np.maximum(np.linalg.norm(y, axis=1, keepdims=True), 1e-300)
        y = (y * np.minimum(clip_norm / norms, 1.0)).astype(rows.dtype)
        total = rows.T @ y + generator.normal(std, weights.shape)
        weights -= (rate / event.batch_size) * total
    return weights


def batches(event):
    """The records of every step, as the event's order deals them."""
    n, b, order = event.dataset_size, event.batch_size, event.batch_order
    sequence = _ORDERS.permutation(n) if order is BatchOrder.SHUFFLED_ONCE else None
    for step in range(event.num_steps):
        if order is BatchOrder.POISSON:
            size = _ORDERS.binomial(n, event.sampling_probability)
            yield _ORDERS.choice(n, size, replace=False, shuffle=False)
            continue
        part = slice(step % (n // b) * b, step % (n // b) * b + b)
        yield part if sequence is None else sequence[part]
