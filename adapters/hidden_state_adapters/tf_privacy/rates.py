"""The learning rates of a run: what was meant, and whose word they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from hidden_state_accountants import Schedule
from hidden_state_adapters.tf_privacy.guards.callbacks import is_of_keras


def as_meant(rate: float) -> float:
    """The shortest decimal that is the same float32, if it is one: Keras keeps rates in float32."""
    single = np.float32(rate)
    return float(str(single)) if float(single) == rate else rate


def declared_rates(given: Any, recorded: float | Schedule) -> list[str]:
    """What is the user's word about learning rates, unless they are a number or Keras' schedule.

    Args:
        given: To the optimizer: a number, a schedule, or a function.
        recorded: Of the steps.
    """
    if isinstance(given, tf.keras.optimizers.schedules.LearningRateSchedule):
        if is_of_keras(given):
            return []
    elif not callable(given) and not isinstance(recorded, Schedule):
        return []
    return [
        "the learning rates that were set or computed during the run depend neither on the "
        "examples nor on the weights"
    ]
