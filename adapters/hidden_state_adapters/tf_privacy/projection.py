"""The projection of all variables together on a ball around 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hidden_state_accountants.runs.base import SLACK
from hidden_state_adapters.tf_privacy.refusals import refusal


def project(variables: Sequence[Any], radius: float, is_fine: tf.Tensor) -> None:
    """Projects the variables together on the ball around 0, unless the step was refused.

    The radius is lowered by two units of rounding, so that the result lies inside the ball.

    Args:
        variables: What is projected, in place.
        radius: Of the ball.
        is_fine: Whether the step is taken.
    """
    eps = max(float(np.finfo(v.dtype.as_numpy_dtype).eps) for v in variables)
    norm = joint_norm(variables)
    factor = tf.minimum(tf.constant(1.0, tf.float64), radius * (1 - 2 * eps) / norm)
    factor = tf.where(is_fine, factor, tf.ones_like(factor))
    for variable in variables:
        variable.assign(variable.read_value() * tf.cast(factor, variable.dtype.base_dtype))


def check_within(variables: Sequence[Any], radius: float | None) -> None:
    """Refuses initial variables outside of the ball; None is no ball.

    Raises:
        UnsupportedRunError: They are.
    """
    if radius is None:
        return
    norm = float(joint_norm(variables))
    if not norm <= radius * (1 + SLACK):
        raise refusal(
            f"Expected initial variables within projection_radius = {radius:g} of 0, got norm "
            f"{norm:g}. Initialise smaller, or raise the radius."
        )


def joint_norm(parts: Sequence[Any]) -> tf.Tensor:
    """The L2 norm of all parts as one vector, in float64 (0-dim), without over- or underflow."""
    doubles = [tf.cast(part, tf.float64) for part in parts]
    unit = tf.ones([], tf.float64)  # squares of float32 numbers are within float64
    if any(part.dtype.base_dtype == tf.float64 for part in parts):
        largest = tf.reduce_max(tf.stack([tf.reduce_max(tf.abs(part)) for part in doubles]))
        unit = tf.where(largest > 0, largest, tf.ones_like(largest))
        doubles = [part / unit for part in doubles]
    return unit * tf.sqrt(tf.add_n([tf.reduce_sum(tf.square(part)) for part in doubles]))
