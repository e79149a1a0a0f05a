"""What the last step did, kept on the device and written by the step itself.

Variables that somebody else changed are found by their fingerprint, on the device as well.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import tensorflow as tf

# Odd constants of splitmix64 (Steele, Lea & Flood 2014), as signed 64-bit integers.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX = 0xBF58476D1CE4E5B9 - 2**64
MOST_STEPS = 256  # between two looks
_INTEGERS = {tf.float32: tf.int32, tf.float64: tf.int64}


class Problem(enum.IntFlag):
    """Why a step was not taken."""

    NONE = 0
    EMPTY = 1
    ROWS = 2
    WEIGHTS = 4
    GRADIENT = 8
    NOT_FINITE = 16
    ENDED = 32
    ITERATIONS = 64
    ERROR = 128
    NOISE = 256
    SETTINGS = 512
    BATCH = 2048

    def __str__(self) -> str:
        return " ".join(text for problem, text in PROBLEMS.items() if problem in self)


PROBLEMS = {
    Problem.EMPTY: "The batch is empty.",
    Problem.ROWS: (
        "The batch has another number of rows than the batches before it, or than "
        "num_microbatches: every batch must have the same size, one row per example. Use "
        "cyclic_dataset(..., drop_remainder=True)."
    ),
    Problem.WEIGHTS: (
        "The trainable variables were changed outside the private optimizer, or other variables "
        "are trained than before, so the model is not the iterate that was accounted. Leave them "
        "alone during the run."
    ),
    Problem.GRADIENT: (
        "A per-example gradient is longer than loss_geometry.lipschitz: the loss is not the "
        "declared one (sum instead of mean? class weights? a scaled loss?), or the features are "
        "longer than declared."
    ),
    Problem.NOT_FINITE: "A per-example gradient is not finite.",
    Problem.ENDED: (
        "Earlier noisy gradients were refused, interrupted or not applied, and the bound is about "
        "a number of steps that does not depend on the examples. Start again with another "
        "optimizer."
    ),
    Problem.ITERATIONS: (
        "optimizer.iterations was changed during the run, as by loading a checkpoint, which holds "
        "no error. Load into a new optimizer: that is another run."
    ),
    Problem.ERROR: "The error overflowed; no clip bounds it.",
    Problem.NOISE: (
        "The generator of the noise was set between two steps, so the noise of an earlier step "
        "would repeat and cancel, or be known. Leave the generator of the optimizer alone."
    ),
    Problem.SETTINGS: (
        "The learning rate, clip norm or noise multiplier was changed. The event has constant ones."
    ),
    Problem.BATCH: (
        "The batch is not the one that was dealt for this step: train_step was called by something "
        "else than fit, or twice. Train with fit."
    ),
}


@attrs.frozen
class StepEntry:
    """The log, read by the host.

    Attributes:
        steps: Number of steps taken so far.
        rows: Rows of the last batch.
        problem: Why a step was refused; nothing was changed then.
        weights: Fingerprint of the trainable variables after the last step.
        learning_rate: In float64, as all that follow, of the last step.
        l2_norm_clip: C.
        noise_multiplier: Standard deviation of the noise on the sum over C.
        weight_decay: Decoupled.
        largest_norm: Of the gradients of the batch, before clipping.
    """

    steps: int
    rows: int
    problem: Problem
    weights: int
    learning_rate: float
    l2_norm_clip: float
    noise_multiplier: float
    weight_decay: float
    largest_norm: float


class StepLog:
    """Two small variables, outside of checkpoints and saved models.

    They are read and written with TensorFlow operations only, in every step, in graphs, under XLA
    and eagerly alike.
    """

    def __init__(self) -> None:
        with tf.init_scope():
            self._counts = tf.Variable(tf.zeros([4], tf.int64), trainable=False)
            self._values = tf.Variable(tf.zeros([5], tf.float64), trainable=False)
            self._drawn = tf.Variable(tf.zeros([], tf.int64), trainable=False)
        self._knows_start = False

    def problem(
        self,
        rows: tf.Tensor,
        expected_rows: int | None,
        variables: Sequence[Any],
        largest_norm: tf.Tensor,
        norm_bound: float,
        noise_is_fresh: tf.Tensor,
        *,
        rows_vary: bool = False,
    ) -> tf.Tensor:
        """An int64 `Problem` of the step that is about to be taken.

        Args:
            rows: int64, the rows of the batch.
            expected_rows: What they must be; None for as many as in the last step.
            variables: The trainable variables.
            largest_norm: The longest gradient of the batch, float64.
            norm_bound: What it may be, or inf.
            noise_is_fresh: As the query says.
            rows_vary: Whether expected_rows = None allows any number, none included.
        """
        steps, last_rows, _, weights = tf.unstack(self._counts.read_value())
        is_first = tf.equal(steps, 0)
        if expected_rows is not None:
            same_rows = tf.equal(rows, expected_rows)
        else:
            same_rows = is_first | tf.equal(rows, last_rows) | rows_vary
        is_finite = tf.math.is_finite(largest_norm)
        holds = {
            Problem.EMPTY: (rows > 0) | rows_vary,
            Problem.ROWS: same_rows,
            Problem.WEIGHTS: self._is_marked(weights, variables)
            | (is_first & (not self._knows_start)),
            Problem.GRADIENT: (largest_norm <= norm_bound) | ~is_finite,
            Problem.NOT_FINITE: is_finite,
            Problem.NOISE: noise_is_fresh,
        }
        return as_bits(holds)

    @property
    def steps(self) -> tf.Tensor:
        """Number of steps taken so far, in the trace that reads it."""
        return self._counts.read_value()[0]

    def write(
        self,
        *,
        rows: tf.Tensor,
        problem: tf.Tensor,
        variables: Sequence[Any],
        values: Sequence[Any],
    ) -> None:
        """Notes the step after it was taken, or that it was refused."""
        old = self._counts.read_value()
        taken = tf.stack([old[0] + 1, rows, tf.zeros([], tf.int64), self._mark(variables)])
        refused = tf.stack([old[0], old[1], problem, old[3]])
        self._counts.assign(tf.where(tf.equal(problem, 0), taken, refused))
        self._values.assign(tf.stack([as_double(value) for value in values]))

    def start_at(self, variables: Sequence[Any]) -> None:
        """Notes the variables that the first step has to find; without this it takes any."""
        self._counts.assign([0, 0, int(Problem.NONE), int(self._mark(variables))])
        self._knows_start = True

    def resume(self, steps: int, rows: int, variables: Sequence[Any]) -> None:
        """Stands where a log stood that had noted these steps, the last one with these weights."""
        weights = int(self._mark(variables))
        self._counts.assign([steps, rows, int(Problem.NONE), weights])
        self._drawn.assign(steps)

    def count_draw(self) -> Any:
        """Notes that noisy gradients were computed, applied or not."""
        return self._drawn.assign_add(1, read_value=False)

    @property
    def drawn(self) -> int:
        """How often noisy gradients were computed."""
        return int(self._drawn.numpy())

    def read(self) -> StepEntry:
        """The log on the host."""
        steps, rows, problem, weights = self._counts.numpy().tolist()
        return StepEntry(steps, rows, Problem(problem), weights, *self._values.numpy().tolist())

    def has_written(self, variables: Sequence[Any]) -> bool:
        """Whether the variables are as the last step left them, bit by bit."""
        return bool(self._is_marked(self._counts.read_value()[3], variables))

    def _mark(self, variables: Sequence[Any]) -> tf.Tensor:
        """Notes the variables as they are now; an int64 number that goes with them."""
        return fingerprint(variables)

    def _is_marked(self, mark: tf.Tensor, variables: Sequence[Any]) -> tf.Tensor:
        """Whether the variables are those of `_mark`, which gave this number."""
        return tf.equal(mark, fingerprint(variables))


class RingLog(StepLog):
    """As `StepLog`, with the entries of the last `MOST_STEPS` steps, and copies of the variables.

    A copy shares its memory with the variable as long as nobody writes to one of them, so that it
    costs less than a fingerprint, and is compared bit by bit in a tenth of the time. After a
    refused step the copies mean nothing, and no step is taken any more.

    Args:
        variables: What only the steps may write.
    """

    def __init__(self, variables: Sequence[Any]):
        super().__init__()
        with tf.init_scope():
            self._copies = [tf.Variable(v.read_value(), trainable=False) for v in variables]
            self._entries = tf.Variable(tf.zeros([MOST_STEPS, 7], tf.float64), trainable=False)
        self.start_at(variables)

    def with_standing(self, problem: tf.Tensor) -> tf.Tensor:
        """The `Problem` of a step, or of an earlier one: after that no step is taken any more."""
        standing = self._counts.read_value()[2]
        return tf.where(tf.equal(standing, 0), problem, standing)

    def write(
        self,
        *,
        rows: tf.Tensor,
        problem: tf.Tensor,
        variables: Sequence[Any],
        values: Sequence[Any],
    ) -> None:
        """As `StepLog.write`; of a refused step only the problem is noted."""
        before = self.steps
        super().write(rows=rows, problem=problem, variables=variables, values=values)
        entry = tf.stack([as_double(value) for value in (before + 1, rows, *values)])
        self._entries.scatter_nd_update([[before % MOST_STEPS]], [entry])

    def read_since(self, steps: int) -> list[StepEntry]:
        """The steps after the first `steps`, `MOST_STEPS` at most; a refused one is the last.

        If none was made, the last step that there was.
        """
        last = self.read()
        entries = self._entries.numpy()
        found = []
        for step in range(steps + 1, last.steps + 1):
            noted, rows, *values = entries[(step - 1) % MOST_STEPS].tolist()
            if noted == step:  # else the log was written to
                found.append(StepEntry(step, int(rows), Problem.NONE, last.weights, *values))
        return [*found, last] if last.problem or not found else found

    def is_iterate(self, variables: Sequence[Any]) -> tf.Tensor:
        """Whether the variables are as the last step left them, in the trace that asks."""
        return self._is_marked(tf.zeros([], tf.int64), variables)

    def _mark(self, variables: Sequence[Any]) -> tf.Tensor:
        for copy, variable in zip(self._copies, variables, strict=True):
            copy.assign(variable.read_value())
        return tf.zeros([], tf.int64)

    def _is_marked(self, mark: tf.Tensor, variables: Sequence[Any]) -> tf.Tensor:
        if [v.shape for v in variables] != [copy.shape for copy in self._copies]:
            return tf.constant(False)
        same = [
            tf.reduce_all(tf.equal(_bits(copy), _bits(variable)))
            for copy, variable in zip(self._copies, variables, strict=True)
        ]
        return tf.reduce_all(tf.stack(same))


def as_bits(holds: Mapping[Problem, Any]) -> tf.Tensor:
    """The problems whose condition does not hold, as an int64 number."""
    bits = tf.constant([int(problem) for problem in holds], tf.int64)
    fine = tf.stack([tf.convert_to_tensor(one, tf.bool) for one in holds.values()])
    return tf.reduce_sum(tf.where(fine, tf.zeros_like(bits), bits))


def fingerprint(tensors: Sequence[Any]) -> tf.Tensor:
    """The int64 sum of a mixed hash of every entry and its position.

    Integer sums do not depend on the order of summation, so every device and compiler gives the
    same number.

    Args:
        tensors: float32 or float64 tensors or variables.
    """
    total = tf.zeros([], tf.int64)
    start = tf.ones([], tf.int64)
    for tensor in tensors:
        flat = tf.reshape(tf.convert_to_tensor(tensor), [-1])
        bits = tf.cast(tf.bitcast(flat, _INTEGERS[flat.dtype]), tf.int64)
        size = tf.size(flat, out_type=tf.int64)
        mixed = (bits + tf.range(start, start + size) * _GOLDEN) * _MIX
        mixed = _xor_shift(_xor_shift(mixed, 29) * _GOLDEN, 32)
        total += tf.reduce_sum(mixed)
        start += size
    return total


def _xor_shift(values: tf.Tensor, bits: int) -> tf.Tensor:
    shifted = tf.bitwise.right_shift(values, tf.constant(bits, tf.int64))
    return tf.bitwise.bitwise_xor(values, shifted)


def as_double(value: Any) -> tf.Tensor:
    """Without a detour of Python floats through float32."""
    return (
        tf.constant(value, tf.float64) if isinstance(value, float) else tf.cast(value, tf.float64)
    )


def _bits(variable: Any) -> tf.Tensor:
    value = tf.convert_to_tensor(variable)
    return tf.bitcast(value, _INTEGERS[value.dtype])
