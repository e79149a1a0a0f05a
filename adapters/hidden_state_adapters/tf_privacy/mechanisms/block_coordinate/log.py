"""What a block-coordinate run did so far, kept on the device and written by the steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import tensorflow as tf

from hidden_state_adapters.tf_privacy.step_log import Problem, StepLog, as_bits, as_double


@attrs.frozen
class BlockEntry:
    """The whole run, read by the host.

    Attributes:
        begun: Updates of blocks that were begun.
        taken: Those that were finished.
        learning_rate: Of every update.
        largest_norm: Of all gradients, before clipping.
    """

    begun: int
    taken: int
    learning_rate: float
    largest_norm: float


class BlockLog(StepLog):
    """The log of an optimizer that updates one of several lists of variables at a time.

    The fingerprints are of all blocks together: the gradient of one is taken at the others.

    Attributes:
        blocks: The variables of every block; set before the first update.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks: tuple[tuple[Any, ...], ...] = ()
        with tf.init_scope():
            self._begun = tf.Variable(tf.zeros([], tf.int64), trainable=False)
            # learning rate, clip norm and noise multiplier of the first update; largest norm
            self._run = tf.Variable(tf.zeros([4], tf.float64), trainable=False)

    @property
    def variables(self) -> list[Any]:
        """Of all blocks."""
        return [variable for block in self.blocks for variable in block]

    def begin(self) -> tf.Tensor:
        """Notes that an update begins; whether all that were begun before were finished."""
        begun, taken = self._begun.read_value(), self._counts.read_value()[0]
        noted = self._begun.assign_add(1, read_value=False)
        with tf.control_dependencies([noted]):  # it counts before anything can raise
            return tf.equal(begun, taken)

    def problem_of_update(
        self,
        *,
        is_begun: tf.Tensor,
        rows: tf.Tensor,
        expected_rows: int | None,
        largest_norm: tf.Tensor,
        noise_is_fresh: tf.Tensor,
        settings: Sequence[Any],
    ) -> tf.Tensor:
        """An int64 `Problem` of the update that is about to be made.

        Args:
            is_begun: What `begin` returned.
            rows: As for `problem`, like the next two.
            expected_rows: Of every batch, or None.
            largest_norm: Of the batch.
            noise_is_fresh: As for `problem`.
            settings: Learning rate, clip norm and noise multiplier, in float64.
        """
        common = self.problem(
            rows, expected_rows, self.variables, largest_norm, float("inf"), noise_is_fresh
        )
        is_first = tf.equal(self._counts.read_value()[0], 0)
        same = tf.reduce_all(tf.equal(self._run.read_value()[:3], tf.stack(settings)))
        holds = {
            Problem.ENDED: is_begun,
            Problem.SETTINGS: is_first | same,
        }
        return common + as_bits(holds)

    def write(
        self,
        *,
        rows: tf.Tensor,
        problem: tf.Tensor,
        variables: Sequence[Any],
        values: Sequence[Any],
    ) -> None:
        """As `StepLog.write`, of all blocks; and what the whole run was like."""
        is_first = tf.equal(self._counts.read_value()[0], 0)
        # The blocks after a refused one are refused because of it: its own problem has to stay.
        before = self._counts.read_value()[2]
        problem = tf.where(tf.equal(problem, 0), problem, tf.bitwise.bitwise_or(problem, before))
        super().write(rows=rows, problem=problem, variables=self.variables, values=values)
        rate, clip, multiplier, _, norm = (as_double(value) for value in values)
        old = self._run.read_value()
        # Changed since `problem_of_update`: an update that counts as not finished, for good.
        same = is_first | tf.reduce_all(tf.equal(old[:3], tf.stack([rate, clip, multiplier])))
        self._begun.assign_add(tf.where(same, tf.zeros([], tf.int64), tf.ones([], tf.int64)))
        taken = tf.stack([rate, clip, multiplier, tf.maximum(old[3], norm)])
        self._run.assign(tf.where(tf.equal(problem, 0), taken, old))

    def resume_run(
        self, steps: int, rows: int, settings: Sequence[float], largest_norm: float
    ) -> None:
        """Stands where a log stood that had noted these steps, each of all `blocks`.

        Args:
            steps: Each an update of every block.
            rows: Of every batch.
            settings: Learning rate, clip norm and noise multiplier.
            largest_norm: What no gradient so far was longer than.
        """
        updates = steps * len(self.blocks)
        self.resume(updates, rows, self.variables)
        self._begun.assign(updates)
        self._run.assign([*settings, largest_norm])

    def read_run(self) -> BlockEntry:
        """The run on the host."""
        rate, _, _, norm = self._run.numpy().tolist()
        return BlockEntry(int(self._begun.numpy()), int(self._counts.numpy()[0]), rate, norm)
