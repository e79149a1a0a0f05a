"""The compiled loss as a vector with one entry for each example."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hidden_state_adapters.tf_privacy import keras_api
from hidden_state_adapters.tf_privacy.guards.step import check_loss
from hidden_state_adapters.tf_privacy.refusals import refusal


class RowLosses:
    """The loss of every example, whatever reduction the compiled loss has over a batch.

    A loss of one example with several entries is their mean, or their sum if that is the reduction,
    as Keras computes it for a batch of one.

    Args:
        given: What the user passed to compile.

    Raises:
        UnsupportedRunError: It is none, or there are several.
    """

    def __init__(self, given: Any):
        if given is None or tf.nest.is_nested(given):
            what = "none" if given is None else "several"
            raise refusal(
                f"Expected one loss for the one output of the model, got {what}: "
                "compile(loss=...) with a name, a function or an object of Keras. (Several losses "
                "can be added up in one function of several outputs that are concatenated.)"
            )
        self.given = given
        loss = tf.keras.losses.get(given)
        self._sums = getattr(loss, "reduction", None) == "sum"
        if isinstance(loss, tf.keras.losses.Loss):
            loss = keras_api.without_reduction(loss)
        self.keras_loss = loss

    def __call__(self, targets: Any, outputs: Any) -> tf.Tensor:
        """Losses of shape (examples,).

        Args:
            targets: Of a batch.
            outputs: Of the model, one tensor.

        Raises:
            UnsupportedRunError: The loss has not one row for each example.
        """
        if tf.nest.is_nested(outputs) or tf.nest.is_nested(targets) or targets is None:
            raise refusal(
                "Expected one tensor of targets and one of outputs, got "
                f"{_kind(targets)} and {_kind(outputs)}. Concatenate several outputs."
            )
        targets, outputs = tf.convert_to_tensor(targets), tf.convert_to_tensor(outputs)
        # As Keras' container of losses does it, so that targets are not broadcast.
        if targets.shape.rank == 1 and outputs.shape.rank == 2:
            targets = tf.expand_dims(targets, -1)
        for is_kind in ("is_floating", "is_integer"):
            if getattr(targets.dtype, is_kind) and getattr(outputs.dtype, is_kind):
                targets = tf.cast(targets, outputs.dtype)
        losses = check_loss(
            self.keras_loss(targets, outputs), None, may_be_empty=True, may_have_axes=True
        )
        axes = list(range(1, losses.shape.rank))
        return (tf.reduce_sum if self._sums else tf.reduce_mean)(losses, axes) if axes else losses


def _kind(value: Any) -> str:
    return "none" if value is None else type(value).__name__
