"""Noisy gradient steps of a linear model, for all records of a batch at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import attrs
import numpy as np

from hidden_state_accountants import BatchOrder, LastIterateDpEvent, UnsupportedRunError
from hidden_state_accountants.losses import scalar
from hidden_state_accountants.losses.arrays import NUMPY
from hidden_state_accountants.losses.envelope import softmax_envelope
from hidden_state_adapters.sklearn.randomness import OwnGenerator
from hidden_state_adapters.sklearn.records import Records

Progress = Callable[[int, int], None]
_TINY = 1e-300


@attrs.frozen
class Slopes:
    """The gradients of a loss in the predictions.

    Attributes:
        loss: "logistic", "softmax_cross_entropy" or "squared_error".
        clip_norm: C of the envelope.
        smoothing: Of the envelope; None for the plain loss.
    """

    loss: str
    clip_norm: float
    smoothing: float | None

    def __call__(self, predictions: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Shape (records, outputs), as both arguments; float64."""
        if self.loss == "softmax_cross_entropy":
            return self._softmax(predictions, targets)
        z, t = predictions.T, targets.T
        clip_norm = math.inf if self.smoothing is None else self.clip_norm
        smoothing = self.smoothing or 0.0
        with np.errstate(all="ignore"):
            if self.loss == "logistic":
                return scalar.logistic(NUMPY, z, t, clip_norm, smoothing)[1].T
            if self.smoothing is None:
                return predictions - targets
            return scalar.squared_error(NUMPY, z, t, clip_norm, smoothing, 1.0)[1].T

    def _softmax(self, predictions: np.ndarray, targets: np.ndarray) -> np.ndarray:
        if self.smoothing is not None:
            return softmax_envelope(predictions, targets, self.clip_norm, self.smoothing)[1]
        exponentials = np.exp(predictions - predictions.max(axis=1, keepdims=True, initial=-np.inf))
        return exponentials / exponentials.sum(axis=1, keepdims=True) - targets


def train(
    event: LastIterateDpEvent,
    records: Records,
    targets: Callable[[np.ndarray | slice], np.ndarray],
    outputs: int,
    slopes: Slopes,
    generator: OwnGenerator,
    progress: Progress,
    weights_of_records: np.ndarray | None = None,
) -> np.ndarray:
    """The last iterate of a run that starts at zero, shape (num_weights, outputs).

    Args:
        event: The run: everything that its steps do is read off it.
        records: Those that take part are the first `event.dataset_size`.
        targets: The targets of records, shape (rows, outputs), of their index.
        outputs: Predictions of a record.
        slopes: The loss.
        generator: Of the noise and of the batches.
        progress: Called with the number of steps taken and of all steps.
        weights_of_records: In [0, 1], shape (records,); None for 1. They multiply gradients that
            are as short as the event says already, so that every constant of it holds.

    Raises:
        UnsupportedRunError: A gradient is not finite. No epsilon covers what was trained so far.
    """
    weights = np.zeros((records.num_weights, outputs))
    std = float(event.noise_std_on_sum()[0])
    rate, decay = (float(event.per_step(name)[0]) for name in ("learning_rate", "weight_decay"))
    for step, index in enumerate(batches(event, generator)):
        total = gradient_sum(event, records, targets, slopes, weights, index, weights_of_records)
        if not np.isfinite(total).all():
            raise UnsupportedRunError(
                f"Step {step + 1} has a gradient that is not a finite number, so no epsilon covers "
                "the run. Look for extreme values in X, and start again with other records."
            )
        total += generator.normal(std, total.shape)
        weights *= 1 - rate * decay
        weights -= (rate / event.batch_size) * total
        progress(step + 1, event.num_steps)
    return weights


def batches(event: LastIterateDpEvent, generator: OwnGenerator) -> Iterator[np.ndarray | slice]:
    """The records of every step, as the event's order deals them."""
    n, b, order = event.dataset_size, event.batch_size, event.batch_order
    if order is BatchOrder.POISSON:
        for _ in range(event.num_steps):
            yield generator.members(n, event.sampling_probability)
        return
    if order not in (BatchOrder.FULL, BatchOrder.CYCLIC, BatchOrder.SHUFFLED_ONCE):
        raise UnsupportedRunError(f"Expected an order that the estimators deal, got {order.name}.")
    sequence = generator.permutation(n) if order is BatchOrder.SHUFFLED_ONCE else None
    for step in range(event.num_steps):
        first = step % (n // b) * b
        part = slice(first, first + b)
        yield part if sequence is None else sequence[part]


def gradient_sum(
    event: LastIterateDpEvent,
    records: Records,
    targets: Callable[[np.ndarray | slice], np.ndarray],
    slopes: Slopes,
    weights: np.ndarray,
    index: np.ndarray | slice,
    weights_of_records: np.ndarray | None = None,
) -> np.ndarray:
    """The sum of the clipped and weighted gradients of a batch, of the shape of the weights."""
    total, clip_norm = np.zeros_like(weights), event.per_step("clip_norm")[0]
    for block in records.blocks(index):
        y = slopes(records.predictions(block, weights), targets(block))
        # The gradient is an outer product: its norm is that of y times that of the record.
        norms = np.sqrt((y * y).sum(axis=1)) * records.norms[block]
        factors = np.minimum(clip_norm / np.maximum(norms, _TINY), 1.0)
        if weights_of_records is not None:
            factors = factors * weights_of_records[block]
        y = y * factors[:, None]
        records.add_gradients(block, y, total)
    return total
