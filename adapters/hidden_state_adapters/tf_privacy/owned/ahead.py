"""What is known of a run before its first step: number of steps, learning rates, releases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import tensorflow as tf
from dp_accounting import DpEvent, NeighboringRelation

from hidden_state_accountants.runs.base import Run, Step
from hidden_state_adapters.calibration import calibrate_noise_after


@attrs.frozen
class StepsAhead:
    """The steps that a call of fit is going to take.

    Attributes:
        steps: Their number, those of earlier calls included.
        period: Batches of an epoch.
        releases_epochs: Whether a file is seen after every epoch.
        releases_steps: Whether after every step.
    """

    steps: int
    period: int
    releases_epochs: bool
    releases_steps: bool

    def add_to(self, run: Run, step: Callable[[int], Step]) -> Run:
        """Adds those that a run lacks.

        Args:
            run: Its steps so far.
            step: That of every number, from 0 on, of the whole run.

        Returns:
            The run.
        """
        for number in range(run.num_steps, self.steps):
            self._release_after(number, run)
            run.add(step(number))
        self._release_after(self.steps, run)
        return run

    def _release_after(self, steps: int, run: Run) -> None:
        if self.releases_steps or (self.releases_epochs and steps % self.period == 0):
            run.release()


def noise_for(
    target_epsilon: float,
    target_delta: float,
    event: DpEvent,
    before: tuple[DpEvent, ...],
    relation: NeighboringRelation,
) -> float:
    """The smallest noise multiplier of a run that meets a target together with runs before it.

    Args:
        target_epsilon: Met from below.
        target_delta: In (0, 1).
        event: The run, with a noise multiplier of 1.
        before: What was spent.
        relation: Of the guarantee.

    Raises:
        ValueError: No noise meets it.
    """
    return calibrate_noise_after(
        before,
        target_epsilon,
        target_delta,
        lambda noise: _with_noise(event, noise),
        relation,
        "start from weights that no private run left",
    )


def _with_noise(event: Any, noise: float) -> DpEvent:
    powers = {"noise_multiplier": 1, "noise_std": 1, "noise_variance": 2}
    name = next(name for name in powers if hasattr(event, name))
    changed: DpEvent = attrs.evolve(event, **{name: noise ** powers[name] * getattr(event, name)})
    return changed


def rates_ahead(given: Any, first: int, count: int) -> list[float] | None:
    """The learning rates of the next steps, where they are known: numbers and Keras' schedules.

    Args:
        given: To the optimizer.
        first: Keras' count at the first step.
        count: Of the steps.

    Returns:
        One for each step, as the step reads it; None if a function of the user's makes them.
    """
    if isinstance(given, tf.keras.optimizers.schedules.LearningRateSchedule):
        numbers = tf.range(first, first + count, dtype=tf.int64)

        def rate(number: tf.Tensor) -> tf.Tensor:
            return tf.cast(given(number), tf.float32)

        found = tf.function(lambda: tf.map_fn(rate, numbers, fn_output_signature=tf.float32))()
        return [float(value) for value in found.numpy()]
    if callable(given):
        return None
    return [float(tf.convert_to_tensor(given))] * count
