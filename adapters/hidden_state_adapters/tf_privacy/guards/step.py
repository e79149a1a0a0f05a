"""The loss and the variables of a step: one entry for each example, in full precision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hidden_state_adapters.tf_privacy.refusals import refusal

_PRECISIONS = (tf.float32, tf.float64)


def check_loss(
    loss: Any,
    num_microbatches: int | None,
    *,
    may_be_empty: bool = False,
    may_have_axes: bool = False,
) -> Any:
    """Returns the loss if it has one entry per example, as far as can be seen here.

    Args:
        loss: Of a batch.
        num_microbatches: As declared.
        may_be_empty: Whether a batch may have no rows.
        may_have_axes: Whether a row may have several entries, of which TensorFlow Privacy takes
            the mean: its rows are known not to depend on each other.

    Raises:
        UnsupportedRunError: It is reduced already, has no rows, is of low precision, or has
            another number of rows than `num_microbatches`.
    """
    loss = tf.convert_to_tensor(loss)
    if loss.dtype not in _PRECISIONS:
        raise refusal(
            f"Expected a loss in float32 or float64, got {loss.dtype.name}. Train without mixed "
            "precision."
        )
    if loss.shape.rank is None:
        raise refusal(
            "Expected a loss of known rank with one entry per example, got one of unknown rank. "
            "Give it a shape with tf.ensure_shape."
        )
    if loss.shape.rank == 0:
        raise refusal(
            "Expected a loss with one entry per example, got a scalar: the examples were averaged "
            'before their gradients could be clipped. Use reduction="none" in the loss, and no '
            "kernel_regularizer or add_loss (weight_decay is outside the clip)."
        )
    if not may_have_axes and _may_be_broadcast(loss.shape):
        raise refusal(
            "Expected a loss of shape (examples,), one entry for each, got shape "
            f"{tuple(loss.shape)}: targets of shape (b,) beside outputs of shape (b, 1) are "
            "broadcast to (b, b), and every entry depends on all examples. Give targets and "
            "outputs the same shape. If a row holds the losses of one example, take their mean, "
            "tf.reduce_mean(loss, axis=-1), as TensorFlow Privacy would."
        )
    rows = loss.shape[0]
    if rows == 0 and not may_be_empty:
        raise refusal("Expected at least one example in a batch, got none.")
    if None not in (rows, num_microbatches) and rows != num_microbatches:
        raise refusal(
            f"Expected num_microbatches = None or {rows}, one for each example of the batch, got "
            f"{num_microbatches}. Microbatches of several examples double the sensitivity; leave "
            "num_microbatches out."
        )
    return loss


def _may_be_broadcast(shape: tf.TensorShape) -> bool:
    """Whether a second axis may be one of examples, too: it is as long as the first, or unknown."""
    return any(size != 1 and (None in (size, shape[0]) or size == shape[0]) for size in shape[1:])


def check_microbatches(loss: Any, num_microbatches: int | None) -> None:
    """Refuses microbatches of unequal size; TensorFlow does so where the size is not known here."""
    rows = loss.shape[0]
    if rows is not None and num_microbatches is not None and rows % num_microbatches:
        raise refusal(
            f"Expected num_microbatches to divide the batch of {rows} rows, got "
            f"{num_microbatches}. Leave it out, for one example each."
        )


def check_variables(variables: Sequence[Any]) -> None:
    """Refuses variables of low or mixed precision, with constraints, or none at all."""
    if not variables:
        raise refusal("Expected trainable variables, got none.")
    for variable in variables:
        if hasattr(variable, "true_dtype"):  # Keras' AutoCastVariable
            raise refusal(
                f"Expected {variable.name} to be used in its own precision, got a mixed-precision "
                "policy: coarse rounding makes the update expand small distances. Train with the "
                'policy "float32" or "float64".'
            )
        if variable.dtype.base_dtype not in _PRECISIONS:
            raise refusal(
                f"Expected {variable.name} in float32 or float64, got {variable.dtype.name}: "
                "coarse rounding makes the update expand small distances."
            )
    check_constraints(variables)
    if len({variable.dtype.base_dtype for variable in variables}) > 1:
        raise refusal("Expected trainable variables of one precision, got float32 and float64.")


def check_constraints(variables: Sequence[Any]) -> None:
    """Refuses variables that an optimizer of Keras maps to something else after every update."""
    for variable in variables:
        if getattr(variable, "constraint", None) is not None:
            raise refusal(
                f"Expected {variable.name} without a constraint, got {variable.constraint!r}: it "
                "is no part of the event. Use projection_radius."
            )


def refuse_tensor_float_32() -> None:
    """Refuses a GPU that rounds to 10 bits, for runs whose loss has a declared curvature."""
    if (
        tf.config.list_physical_devices("GPU")
        and tf.config.experimental.tensor_float_32_execution_enabled()
    ):
        raise refusal(
            "Expected full float32 on the GPU, got TensorFloat-32 (TensorFlow's default): "
            "gradients rounded to 10 bits do not have the declared smoothness. Call "
            "tf.config.experimental.enable_tensor_float_32_execution(False)."
        )
