"""Private steps in a loop of somebody else, who may write to the variables between two of them.

A model's own run is one call of the device, and the host knows what it asked for. A loop that calls
an optimizer, within a `tf.function` or not, asks for gradients and applies them when it likes: here
the step itself counts, and compares the variables with what the step before left.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import tensorflow as tf

from hidden_state_adapters.tf_privacy.gradients import ExampleGradients
from hidden_state_adapters.tf_privacy.step import (
    MOVED,
    NOT_FINITE,
    TOO_LONG,
    PrivateStep,
    StepEntry,
)


class Problem(enum.IntFlag):
    """Reasons why a step was not taken."""

    NONE = 0
    ROWS = 1
    WEIGHTS = 2
    GRADIENT = 4
    NOT_FINITE = 8
    ENDED = 16
    SETTINGS = 32

    def __str__(self) -> str:
        return " ".join(text for problem, text in PROBLEMS.items() if problem in self)


PROBLEMS = {
    Problem.ROWS: (
        "The batch has another number of rows than the batches before it, or none: every batch "
        "must have the same size, one row per example. Use cyclic_dataset(..., "
        "drop_remainder=True)."
    ),
    Problem.WEIGHTS: MOVED,
    Problem.GRADIENT: TOO_LONG,
    Problem.NOT_FINITE: NOT_FINITE,
    Problem.ENDED: (
        "Earlier noisy gradients were refused, interrupted or not applied, and the bound is about "
        "a number of steps that does not depend on the examples. Start again with another "
        "optimizer."
    ),
    Problem.SETTINGS: "The learning rate was changed. The event has a constant one.",
}


@attrs.frozen(eq=False)
class Prepared:
    """The update of a block that is ready to be made, once, in the trace that prepared it.

    Attributes:
        block: Place of the block in `PrivateStep.blocks`.
        along: Gradients that the rule moves along, and what it keeps.
        rows: Number of rows of the batch.
        problem: `Problem` of the step so far, int64; nothing moves unless it is 0.
        largest: Norm of the longest gradient of the step so far.
    """

    block: int
    along: tuple[list[Any], Any]
    rows: tf.Tensor
    problem: tf.Tensor
    largest: tf.Tensor

    @property
    def gradients(self) -> list[Any]:
        """What the rule moves along."""
        return self.along[0]


class Watch:
    """Takes the steps of an optimizer, and tells of them; stands in the place of an `Iterate`.

    It keeps counts, and copies of what only the steps may write, in TensorFlow variables outside of
    checkpoints and saved models, in graphs, under XLA and eagerly alike. A copy shares its memory
    with the variable as long as nobody writes to one of them. After a refused step no step is taken
    any more.

    Attributes:
        has_equal_rows: Whether all batches must have as many rows.

    Args:
        step: The private step.
        rate: Function that gives the learning rate of the next update.
        count: Function that notes so many updates in Keras' count.
        has_equal_rows: Whether all batches must have as many rows.
        has_one_rate: Whether all steps must have the learning rate of the moment.
    """

    def __init__(
        self,
        step: PrivateStep,
        rate: Callable[[], Any],
        count: Callable[[Any], None],
        *,
        has_equal_rows: bool,
        has_one_rate: bool,
    ):
        self._step, self._rate, self._count = step, rate, count
        self.has_equal_rows = has_equal_rows
        self._begun: Prepared | None = None  # of a step that has more blocks
        self._first_rate = float(rate()) if has_one_rate else None
        with tf.init_scope():
            self._copies = [tf.Variable(value, trainable=False) for value in step.values()]
            # drawn, taken, problem; rows: last, fewest, most
            self._counts = tf.Variable(tf.zeros([6], tf.int64), trainable=False)
            # learning rate and longest gradient of the last step, longest of all
            self._numbers = tf.Variable(tf.zeros([3], tf.float64), trainable=False)

    # In a step

    def begin(self) -> None:
        """Makes what comes next the first block of a step."""
        self._begun = None

    @property
    def next_block(self) -> int:
        """The place of the block that the next update moves."""
        return 0 if self._begun is None else self._begun.block + 1

    def prepare(self, found: ExampleGradients, rows: tf.Tensor | None = None) -> Prepared:
        """Returns the noisy update of the next block; nothing moves.

        Args:
            found: Gradients of the batch.
            rows: Number of examples, which are the first rows; None for all.
        """
        step, begun = self._step, self._begun
        sums, largest = step.sums(found, rows)
        rows = tf.size(found.norms, tf.int64) if rows is None else rows
        along = step.direction(sums, rows)
        is_finite = tf.math.is_finite(largest) & step.rule.is_finite(along)
        holds = {
            Problem.GRADIENT: step.is_fine(largest) | ~is_finite,
            Problem.NOT_FINITE: is_finite,
        }
        if begun is not None:
            self._begun = None
            problem = tf.bitwise.bitwise_or(begun.problem, _as_bits(holds))
            return Prepared(
                begun.block + 1, along, rows, problem, tf.maximum(begun.largest, largest)
            )
        drawn, taken, standing, last, *_ = tf.unstack(self._counts.read_value())
        noted = self._counts.assign_add([1, 0, 0, 0, 0, 0], read_value=False)
        with tf.control_dependencies([noted]):  # it counts before anything can raise
            holds[Problem.ENDED] = tf.equal(drawn, taken)
        holds[Problem.WEIGHTS] = step.is_left(self._copies)
        if self.has_equal_rows:
            expected = last if step.divisor is None else step.divisor
            is_first = tf.equal(taken, 0) & (step.divisor is None)
            holds[Problem.ROWS] = (rows > 0) & (is_first | tf.equal(rows, expected))
        if self._first_rate is not None:
            rate = tf.cast(self._rate(), tf.float64)
            holds[Problem.SETTINGS] = tf.equal(rate, tf.constant(self._first_rate, tf.float64))
        problem = tf.where(tf.equal(standing, 0), _as_bits(holds), standing)
        return Prepared(0, along, rows, problem, largest)

    def commit(self, prepared: Prepared) -> None:
        """Moves a block, unless there is a problem; after the last one the step is noted."""
        step, rate = self._step, self._rate()
        fine = tf.equal(prepared.problem, 0)
        step.rule.move(step.blocks[prepared.block], prepared.along, rate, fine)
        if prepared.block + 1 < len(step.blocks):
            self._begun = prepared
            return
        self._count(fine)
        drawn, before, _, last, fewest, most = tf.unstack(self._counts.read_value())
        rows, problem = prepared.rows, prepared.problem
        fewest = tf.where(tf.equal(before, 0), rows, tf.minimum(fewest, rows))
        taken = tf.stack([drawn, before + 1, problem, rows, fewest, tf.maximum(most, rows)])
        refused = tf.stack([drawn, before, problem, last, fewest, most])
        self._counts.assign(tf.where(fine, taken, refused))
        numbers = self._numbers.read_value()
        longest = tf.maximum(numbers[2], prepared.largest)
        noted = tf.stack([tf.cast(rate, tf.float64), prepared.largest, longest])
        self._numbers.assign(tf.where(fine, noted, numbers))
        self._note()

    def _note(self) -> None:
        for copy, value in zip(self._copies, self._step.values(), strict=True):
            copy.assign(value)

    # On the host

    @property
    def last(self) -> StepEntry:
        """The last step; if another one was refused after it, with its problem."""
        drawn, steps, problem, rows, *_ = self._counts.numpy().tolist()
        rate, largest, _ = self._numbers.numpy().tolist()
        return StepEntry(steps, drawn, rows, rate, largest, str(Problem(problem)))

    def totals(self) -> tuple[int, int, float]:
        """The fewest and the most rows of a batch, and the norm of the longest gradient."""
        *_, fewest, most = self._counts.numpy().tolist()
        return fewest, most, float(self._numbers.numpy()[2])

    @property
    def values(self) -> Sequence[Any]:
        """Values that the last step left."""
        return self._copies

    def is_left(self, variables: Sequence[Any]) -> bool:
        """Whether variables, and what the rule keeps, are as the last step left them."""
        return bool(self._step.is_left(self._copies, variables))

    def stands_at(self, steps: int, rows: int, largest: float = 0.0) -> None:
        """Takes the variables of the moment for what so many steps left."""
        self._counts.assign([steps, steps, 0, rows, rows, rows])
        self._numbers.assign([0.0, largest, largest])
        self._note()


def _as_bits(holds: dict[Problem, Any]) -> tf.Tensor:
    """The problems whose condition does not hold, as an int64 number."""
    bits = tf.constant([int(problem) for problem in holds], tf.int64)
    fine = tf.stack([tf.convert_to_tensor(one, tf.bool) for one in holds.values()])
    return tf.reduce_sum(tf.where(fine, tf.zeros_like(bits), bits))
