"""The error of DiceSGD and what its steps looked like: data of the examples without noise."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import attrs
import numpy as np
import tensorflow as tf

from hidden_state_accountants import UnsupportedRunError
from hidden_state_adapters.tf_privacy.refusals import refusal
from hidden_state_adapters.tf_privacy.step_log import Problem, as_bits


@attrs.frozen
class ErrorLog:
    """The state of a run, read by the host, without the error.

    Attributes:
        drawn: How often noisy gradients were computed.
        fewest_rows: Of the batches of the steps taken.
        most_rows: Likewise.
        first_iteration: The optimizer's iterations when the run began: not 0 if it was loaded.
        largest_norm: Of all per-example gradients, before clipping.
    """

    drawn: int
    fewest_rows: int
    most_rows: int
    first_iteration: int
    largest_norm: float


class HiddenError:
    """The error e, one variable like each that is trained, and the counts of the run.

    TensorFlow variables in a plain object: Keras and tf.train.Checkpoint do not find them, so they
    are in no file. The object cannot be copied, pickled or printed either.
    """

    def __init__(self) -> None:
        self._trained: list[Any] = []
        self._errors: list[tf.Variable] = []
        with tf.init_scope():
            self._counts = tf.Variable(tf.zeros([4], tf.int64), trainable=False)
            self._largest = tf.Variable(tf.zeros([], tf.float64), trainable=False)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UnsupportedRunError(
            "The error of DiceSGD cannot be copied or pickled: it holds data of the examples "
            "without noise."
        )

    def belongs_to(self, variables: Sequence[Any]) -> None:
        """Starts with e = 0 for these variables; afterwards they must be the same.

        Raises:
            UnsupportedRunError: They are others.
        """
        if not self._trained:
            with tf.init_scope():
                self._errors = [
                    tf.Variable(tf.zeros(v.shape, v.dtype.base_dtype), trainable=False)
                    for v in variables
                ]
            self._trained = list(variables)
        if len(variables) != len(self._trained) or any(
            now is not then for now, then in zip(variables, self._trained, strict=True)
        ):
            raise refusal(
                f"Expected the {len(self._trained)} variables of the steps before, in the same "
                f"order, got {len(variables)}, not the same: the error belongs to them. Construct "
                "another optimizer for another set."
            )

    def read(self) -> list[tf.Tensor]:
        """The error e, in the trace that calls it."""
        return [error.read_value() for error in self._errors]

    def problem(self, steps: tf.Tensor, iterations: Any, error_norm: tf.Tensor) -> tf.Tensor:
        """An int64 `Problem` of the step whose gradients are being computed.

        Args:
            steps: Taken so far, as `StepLog` counts them.
            iterations: As Keras counts them.
            error_norm: The norm of e.
        """
        drawn, _, _, first = tf.unstack(self._counts.read_value())
        follows = tf.equal(tf.cast(iterations, tf.int64), first + drawn)
        return as_bits(
            {
                Problem.ENDED: tf.equal(drawn, steps),
                Problem.ITERATIONS: tf.equal(drawn, 0) | follows,
                Problem.ERROR: tf.math.is_finite(error_norm),
            }
        )

    def begin(self, iterations: Any) -> Any:
        """Notes that noisy gradients were computed, whatever happens from here on."""
        drawn, fewest, most, first = tf.unstack(self._counts.read_value())
        first = tf.where(tf.equal(drawn, 0), tf.cast(iterations, tf.int64), first)
        return self._counts.assign(tf.stack([drawn + 1, fewest, most, first]), read_value=False)

    def finish(
        self,
        *,
        is_fine: tf.Tensor,
        rows: tf.Tensor,
        largest: tf.Tensor,
        errors: Sequence[Any],
    ) -> None:
        """Notes the step after it was taken, and moves the error; nothing if it was refused.

        Args:
            is_fine: Whether it was taken.
            rows: Of the batch.
            largest: The longest gradient.
            errors: The next error.
        """
        drawn, fewest, most, first = tf.unstack(self._counts.read_value())
        fewest = tf.where(tf.equal(drawn, 1), rows, tf.minimum(fewest, rows))
        counts = tf.stack([drawn, fewest, tf.maximum(most, rows), first])
        self._counts.assign(tf.where(is_fine, counts, self._counts.read_value()))
        before = self._largest.read_value()
        self._largest.assign(tf.where(is_fine, tf.maximum(before, largest), before))
        for variable, error in zip(self._errors, errors, strict=True):
            variable.assign(tf.where(is_fine, error, variable.read_value()))

    def private_state(self) -> dict[str, Any]:
        """The error as plain types that restore it. Secret."""
        values = [error.numpy() for error in self._errors]
        return {
            "error": [
                {
                    "dtype": value.dtype.str,
                    "shape": list(value.shape),
                    "values": base64.b64encode(np.ascontiguousarray(value).tobytes()).decode(),
                }
                for value in values
            ]
        }

    def resume(
        self,
        variables: Sequence[Any],
        private: Mapping[str, Any],
        *,
        steps: int,
        rows: int,
        first_iteration: int,
        largest_norm: float,
    ) -> None:
        """Stands where the error of another optimizer stood.

        Args:
            variables: Those that are trained.
            private: What `private_state` returned there.
            steps: Taken there.
            rows: Of every batch.
            first_iteration: As Keras counted when the run began.
            largest_norm: What no gradient so far was longer than.

        Raises:
            ValueError: The error is of other variables, or damaged; nothing is changed.
        """
        errors = [_array(part) for part in private["error"]]
        expected = [(tuple(v.shape), v.dtype.as_numpy_dtype) for v in variables]
        found = [(error.shape, error.dtype.type) for error in errors]
        if found != expected:
            raise ValueError(f"Expected an error like the variables, {expected}, got {found}.")
        if not all(np.isfinite(error).all() for error in errors):
            raise ValueError("The private state is damaged: the error is not finite.")
        self.belongs_to(variables)
        for variable, error in zip(self._errors, errors, strict=True):
            variable.assign(error)
        self._counts.assign([steps, rows, rows, first_iteration])
        self._largest.assign(largest_norm)

    def read_run(self) -> ErrorLog:
        """The run on the host, without the error."""
        drawn, fewest, most, first = self._counts.numpy().tolist()
        return ErrorLog(drawn, fewest, most, first, float(self._largest.numpy()))


def _array(part: Mapping[str, Any]) -> np.ndarray:
    try:
        values = np.frombuffer(base64.b64decode(part["values"]), np.dtype(part["dtype"]))
        return values.reshape(part["shape"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"The private state is damaged: {error}") from error
