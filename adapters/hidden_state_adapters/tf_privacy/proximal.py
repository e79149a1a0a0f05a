"""The proximal map of a public regulariser, on variables of TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import tensorflow as tf

from hidden_state_accountants import Assumption, Regulariser
from hidden_state_accountants.guarantee import Topic
from hidden_state_accountants.regulariser import ProxOperations, group_axes, regulariser_or_none


def _group_norms(values: tf.Tensor, axis: int | None) -> tf.Tensor:
    axes = group_axes(len(values.shape), axis)
    wide = tf.cast(values, tf.float64)
    norms = tf.sqrt(tf.reduce_sum(tf.square(wide), axis=axes, keepdims=True))
    return tf.cast(norms, values.dtype)


TENSORFLOW_PROX = ProxOperations(maximum=tf.maximum, minimum=tf.minimum, group_norms=_group_norms)
"""What `Regulariser.prox` computes with on tensors."""


def prox_of(value: Any) -> Regulariser | None:
    """The regulariser that was passed, or None; a mapping is one of a configuration.

    Raises:
        TypeError, ValueError: It is none.
    """
    if isinstance(value, Mapping):
        value = Regulariser(**value)
    return regulariser_or_none("prox", value)


def plain_prox(prox: Regulariser | None) -> dict[str, Any] | None:
    """The arguments of the regulariser as plain types."""
    return None if prox is None else attrs.asdict(prox)


def after_prox(prox: Regulariser | None, values: tf.Tensor, rate: tf.Tensor) -> tf.Tensor:
    """What the proximal map makes of the new value of a variable."""
    return values if prox is None else prox.prox(values, rate, TENSORFLOW_PROX)


def strong_convexity(prox: Regulariser | None) -> float:
    """The event's `prox_strong_convexity`."""
    return 0.0 if prox is None else prox.strong_convexity


def derived(prox: Regulariser | None) -> list[Assumption]:
    """What takes the place of a user's word about the map."""
    return [] if prox is None else [Assumption.checked(prox.effect, Topic.REGULARISER)]
