"""Keras' options and the surroundings: what would change an update behind the mechanism's back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from hidden_state_accountants import validate
from hidden_state_adapters.tf_privacy.refusals import refusal

_LARGEST = 1e30

_CLIPS = {"clipnorm": None, "clipvalue": None, "global_clipnorm": None}
NEUTRAL: Mapping[str, Any] = {"momentum": 0.0, "nesterov": False, "decay": 0.0, **_CLIPS}
# Where every noisy update is accounted as released, what follows it is free.
NEUTRAL_AFTER_RELEASE: Mapping[str, Any] = {"gradient_accumulation_steps": 1, **_CLIPS}


def refuse_options(name: str, options: Mapping[str, Any], neutral: Mapping[str, Any]) -> None:
    """Refuses arguments of Keras' optimizers that are not at their neutral values.

    Args:
        name: Of the optimizer.
        options: What it was given.
        neutral: The values that are accepted.

    Raises:
        UnsupportedRunError: A known option is not at its neutral value.
        TypeError: An option is unknown.
    """
    for option, value in options.items():
        if option not in neutral:
            raise TypeError(f"{name} got an unexpected argument {option!r}.")
        expected = neutral[option]
        if value is expected or (expected is not None and value == expected):
            continue
        raise refusal(
            f"Expected {option} = {expected}, got {value!r}: no theorem here covers it. Drop it."
        )


def clip_and_noise(l2_norm_clip: Any, noise_multiplier: Any) -> tuple[float, float]:
    """Both as floats, if float32 holds them and their product."""
    clip = validate.real("l2_norm_clip", l2_norm_clip, above=0)
    noise = validate.magnitude("noise_multiplier", noise_multiplier)
    check_scale("l2_norm_clip", clip)
    check_scale("l2_norm_clip * noise_multiplier", clip * noise)
    return clip, noise


def microbatches(num_microbatches: Any) -> int | None:
    """None or a positive integer."""
    if num_microbatches is None:
        return None
    return validate.integer("num_microbatches", num_microbatches, minimum=1)


def check_learning_rate(learning_rate: Any) -> None:
    """Raises unless it is a schedule or a number >= 0."""
    if isinstance(learning_rate, int | float):
        validate.magnitude("learning_rate", learning_rate)


def check_scale(name: str, value: float) -> None:
    """Raises ValueError unless float32 holds the value (or 0): else clip or noise would vanish."""
    if value and not 1 / _LARGEST <= value <= _LARGEST:
        raise ValueError(
            f"Expected {name} between {1 / _LARGEST:g} and {_LARGEST:g}, got {value!r}."
        )


def refuse_changed_options(optimizer: Any, neutral: Mapping[str, Any]) -> None:
    """Refuses options that were set after construction."""
    now = {name: _current(optimizer, name) for name in neutral}
    refuse_options(type(optimizer).__name__, now, neutral)
    if optimizer.gradient_transformers:
        raise refusal("Expected no gradient_transformers, got some: they change the update.")


def _current(optimizer: Any, name: str) -> Any:
    if name == "momentum":
        return 0.9 if optimizer._momentum else 0.0
    if name == "decay":
        return float(optimizer._initial_decay)
    return 1 if name == "gradient_accumulation_steps" else getattr(optimizer, name)


def refuse_surroundings(strategy: Any = None) -> None:
    """Refuses several replicas and TensorFlow 1 graphs.

    Args:
        strategy: The one whose replicas are known to make one step together.
    """
    if not tf.compat.v1.executing_eagerly_outside_functions():
        raise refusal(
            "Expected TensorFlow 2, got a TensorFlow 1 graph or session: the steps cannot be "
            "checked there. Use Model.fit or an own loop."
        )
    if tf.distribute.has_strategy() and tf.distribute.get_strategy() is not strategy:
        found = tf.distribute.get_strategy()
        raise refusal(
            f"Expected no distribution strategy, got {type(found).__name__} with "
            f"{found.num_replicas_in_sync} replicas: every replica would divide by its own rows "
            "and add noise of its own. Train outside of strategy.scope()."
        )
