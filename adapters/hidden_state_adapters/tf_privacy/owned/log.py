"""The log of a run whose model makes several steps before the host looks at them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hidden_state_adapters.tf_privacy.step_log import Problem, StepEntry, StepLog, as_double

MOST_STEPS = 256  # between two looks
_BITS = {tf.float32: tf.int32, tf.float64: tf.int64}


class OwnedLog(StepLog):
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


def _bits(variable: Any) -> tf.Tensor:
    value = tf.convert_to_tensor(variable)
    return tf.bitcast(value, _BITS[value.dtype])
