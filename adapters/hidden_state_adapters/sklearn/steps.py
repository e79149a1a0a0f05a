"""Noisy gradient descent of a linear model, on all records at once, with momentum."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.special import expit, softmax

from hidden_state_accountants import Candidate, UnsupportedRunError
from hidden_state_adapters.sklearn.randomness import OwnGenerator
from hidden_state_adapters.sklearn.records import Records

Progress = Callable[[int, int], None]
Targets = Callable[[slice], np.ndarray]
_TINY = 1e-300


def slopes(loss: str, predictions: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """The gradients of a loss in the predictions: shape (records, outputs), as both arguments.

    Args:
        loss: "logistic", "softmax_cross_entropy" or "squared_error".
        predictions: float64.
        targets: Rows of the unit matrix for softmax.
    """
    if loss == "softmax_cross_entropy":
        return softmax(predictions, axis=1) - targets
    return (expit(predictions) if loss == "logistic" else predictions) - targets


def train(
    run: Candidate,
    records: Records,
    targets: Targets,
    outputs: int,
    generator: OwnGenerator,
    progress: Progress,
    weights_of_records: np.ndarray | None = None,
) -> np.ndarray:
    """The last iterate of a run that starts at zero, shape (num_weights, outputs).

    Formal guarantees: that of `run.event`, with the noisy sums of all steps released. The sums of
    two data sets that differ in one record are no further apart than the clip norm, twice that if
    the record is replaced by another, wherever the weights are; everything else is computed from
    the noisy sums and from public numbers.

    Args:
        run: With full batches: everything that its steps do is read off it.
        records: As many as the event says.
        targets: The targets of records, shape (rows, outputs), of their slice.
        outputs: Predictions of a record.
        generator: Of the noise.
        progress: Called with the number of steps taken and of all steps.
        weights_of_records: In [0, 1], shape (records,); None for 1. They multiply gradients that
            are as short as the event says already.

    Raises:
        UnsupportedRunError: A gradient is not finite. No epsilon covers what was trained so far.
    """
    event = run.event
    std = float(event.noise_std_on_sum()[0])
    clip, rate, decay = (
        float(event.per_step(name)[0]) for name in ("clip_norm", "learning_rate", "weight_decay")
    )
    weights = np.zeros((records.num_weights, outputs))
    velocity = np.zeros_like(weights)
    for step in range(event.num_steps):
        total = gradient_sum(run.loss, clip, records, targets, weights, weights_of_records)
        if not np.isfinite(total).all():
            raise UnsupportedRunError(
                f"Step {step + 1} has a gradient that is not a finite number, so no epsilon covers "
                "the run. Look for extreme values in X, and start again with other records."
            )
        total += generator.normal(std, total.shape)
        velocity = run.momentum * velocity + total / event.batch_size + decay * weights
        weights -= rate * velocity
        progress(step + 1, event.num_steps)
    return weights


def gradient_sum(
    loss: str,
    clip_norm: float,
    records: Records,
    targets: Targets,
    weights: np.ndarray,
    weights_of_records: np.ndarray | None = None,
) -> np.ndarray:
    """The sum of the clipped and weighted gradients of all records, of the shape of the weights."""
    total = np.zeros_like(weights)
    for block in records.blocks():
        y = slopes(loss, records.predictions(block, weights), targets(block))
        # The gradient is an outer product: its norm is that of y times that of the record.
        norms = np.sqrt(np.einsum("ij,ij->i", y, y)) * records.norms[block]
        factors = np.minimum(clip_norm / np.maximum(norms, _TINY), 1.0)
        if weights_of_records is not None:
            factors = factors * weights_of_records[block]
        y *= factors[:, None]
        records.add_gradients(block, y, total)
    return total
