"""What the private steps did, kept on the device and written by the step itself."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import tensorflow as tf

MOST_STEPS = 256  # between two looks
_INTEGERS = {tf.float32: tf.int32, tf.float64: tf.int64}


class Problem(enum.IntFlag):
    """Why a step was not taken."""

    NONE = 0
    ROWS = 1
    WEIGHTS = 2
    GRADIENT = 4
    NOT_FINITE = 8
    ENDED = 16
    ITERATIONS = 32
    ERROR = 64
    SETTINGS = 128
    BATCH = 256

    def __str__(self) -> str:
        return " ".join(text for problem, text in PROBLEMS.items() if problem in self)


PROBLEMS = {
    Problem.ROWS: (
        "The batch has another number of rows than the batches before it, or none: every batch "
        "must have the same size, one row per example. Use cyclic_dataset(..., "
        "drop_remainder=True)."
    ),
    Problem.WEIGHTS: (
        "The trainable variables were changed outside the private optimizer, or other variables "
        "are trained than before, so the model is not the iterate that was accounted. Leave them "
        "alone during the run."
    ),
    Problem.GRADIENT: (
        "A per-example gradient is longer than loss_geometry.lipschitz, or gradient_bound: the "
        "loss is not the declared one (sum instead of mean? class weights? a scaled loss?), or the "
        "features are longer than declared."
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
    Problem.SETTINGS: "The learning rate was changed. The event has a constant one.",
    Problem.BATCH: (
        "The batch is not the one that was dealt for this step: train_step was called by something "
        "else than fit, or twice. Train with fit."
    ),
}


@attrs.frozen
class StepEntry:
    """A step, read by the host.

    Attributes:
        steps: Number of steps taken so far.
        rows: Of the batch.
        problem: Why a step was refused; nothing was changed then.
        learning_rate: In float64, as all that follow.
        l2_norm_clip: C.
        noise_multiplier: Standard deviation of the noise on the sum over C.
        weight_decay: Decoupled.
        largest_norm: Of the gradients of the batch, before clipping.
    """

    steps: int
    rows: int
    problem: Problem
    learning_rate: float
    l2_norm_clip: float
    noise_multiplier: float
    weight_decay: float
    largest_norm: float


@attrs.frozen
class Totals:
    """All steps together.

    Attributes:
        drawn: How often noise was made; in a run as often as a step was taken.
        fewest_rows: Of the batches of the steps taken.
        most_rows: Likewise.
        largest_norm: Of all gradients, before clipping.
    """

    drawn: int
    fewest_rows: int
    most_rows: int
    largest_norm: float


class StepLog:
    """The entries of the last `MOST_STEPS` steps, and copies of what only the steps may write.

    TensorFlow variables outside of checkpoints and saved models, read and written in every step, in
    graphs, under XLA and eagerly alike. A copy shares its memory with the variable as long as
    nobody writes to one of them, and is compared bit by bit. After a refused step the copies mean
    nothing, and no step is taken any more.

    Args:
        variables: What only the steps may write.
    """

    def __init__(self, variables: Sequence[Any]):
        with tf.init_scope():
            self._copies = [tf.Variable(v.read_value(), trainable=False) for v in variables]
            # drawn, taken, problem; rows: last, fewest, most
            self._counts = tf.Variable(tf.zeros([6], tf.int64), trainable=False)
            self._largest = tf.Variable(tf.zeros([], tf.float64), trainable=False)
            self._entries = tf.Variable(tf.zeros([MOST_STEPS, 7], tf.float64), trainable=False)

    # In a step

    @property
    def steps(self) -> tf.Tensor:
        """Number of steps taken so far."""
        return self._counts.read_value()[1]

    @property
    def last_rows(self) -> tf.Tensor:
        """Of the last step."""
        return self._counts.read_value()[3]

    def begin(self) -> tf.Tensor:
        """Notes that noise is made; whether a step was taken with all that was made before."""
        drawn, taken, *_ = tf.unstack(self._counts.read_value())
        noted = self._counts.assign_add([1, 0, 0, 0, 0, 0], read_value=False)
        with tf.control_dependencies([noted]):  # it counts before anything can raise
            return tf.equal(drawn, taken)

    def with_standing(self, problem: tf.Tensor) -> tf.Tensor:
        """The `Problem` of a step, or of an earlier one: after that no step is taken any more."""
        standing = self._counts.read_value()[2]
        return tf.where(tf.equal(standing, 0), problem, standing)

    def is_iterate(self, variables: Sequence[Any]) -> tf.Tensor:
        """Whether the variables are as the last step left them, bit by bit."""
        if [v.shape for v in variables] != [copy.shape for copy in self._copies]:
            return tf.constant(False)
        same = [
            tf.reduce_all(tf.equal(_bits(copy), _bits(variable)))
            for copy, variable in zip(self._copies, variables, strict=True)
        ]
        return tf.reduce_all(tf.stack(same))

    def write(
        self,
        *,
        rows: tf.Tensor,
        problem: tf.Tensor,
        variables: Sequence[Any],
        values: Sequence[Any],
    ) -> None:
        """Notes the step after it was taken; of a refused one only the problem.

        Args:
            rows: Of the batch, int64.
            problem: An int64 `Problem`.
            variables: As the step left them.
            values: Those of a `StepEntry`, from the learning rate on.
        """
        fine = tf.equal(problem, 0)
        drawn, before, _, last, fewest, most = tf.unstack(self._counts.read_value())
        fewest = tf.where(tf.equal(before, 0), rows, tf.minimum(fewest, rows))
        taken = tf.stack([drawn, before + 1, problem, rows, fewest, tf.maximum(most, rows)])
        refused = tf.stack([drawn, before, problem, last, fewest, most])
        self._counts.assign(tf.where(fine, taken, refused))
        doubles = [as_double(value) for value in values]
        old = self._largest.read_value()
        self._largest.assign(tf.where(fine, tf.maximum(old, doubles[-1]), old))
        entry = tf.stack([as_double(before + 1), as_double(rows), *doubles])
        self._entries.scatter_nd_update([[before % MOST_STEPS]], [entry])
        self._note(variables)

    def _note(self, variables: Sequence[Any]) -> None:
        for copy, variable in zip(self._copies, variables, strict=True):
            copy.assign(variable.read_value())

    # On the host

    def resume(self, steps: int, rows: int, largest: float, variables: Sequence[Any]) -> None:
        """Stands where a log stood that had noted these steps, the last one with these weights."""
        self._counts.assign([steps, steps, int(Problem.NONE), rows, rows, rows])
        self._largest.assign(largest)
        self._note(variables)

    def read(self) -> StepEntry:
        """The last step; if another one was refused after it, its problem."""
        _, steps, problem, rows, *_ = self._counts.numpy().tolist()
        place = (steps if problem else steps - 1) % MOST_STEPS
        _, _, *values = self._entries.numpy()[place].tolist()
        return StepEntry(steps, rows, Problem(problem), *values)

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
                found.append(StepEntry(step, int(rows), Problem.NONE, *values))
        return [*found, last] if last.problem or not found else found

    def totals(self) -> Totals:
        """Of all steps."""
        drawn, *_, fewest, most = self._counts.numpy().tolist()
        return Totals(drawn, fewest, most, float(self._largest.numpy()))


def as_bits(holds: Mapping[Problem, Any]) -> tf.Tensor:
    """The problems whose condition does not hold, as an int64 number."""
    bits = tf.constant([int(problem) for problem in holds], tf.int64)
    fine = tf.stack([tf.convert_to_tensor(one, tf.bool) for one in holds.values()])
    return tf.reduce_sum(tf.where(fine, tf.zeros_like(bits), bits))


def as_double(value: Any) -> tf.Tensor:
    """Without a detour of Python floats through float32."""
    return (
        tf.constant(value, tf.float64) if isinstance(value, float) else tf.cast(value, tf.float64)
    )


def _bits(variable: Any) -> tf.Tensor:
    value = tf.convert_to_tensor(variable)
    return tf.bitcast(value, _INTEGERS[value.dtype])
