"""What a fit tells its run: the callback that stands first in it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hidden_state_adapters.tf_privacy import keras_api
from hidden_state_adapters.tf_privacy.guards.callbacks import (
    check_callbacks,
    chooses_rates,
    is_of_keras,
    keeps_the_best,
    stopping,
)
from hidden_state_adapters.tf_privacy.lineage import digest
from hidden_state_adapters.tf_privacy.run import PrivateRun, quicker

_EPSILON = "epsilon_if_released_now"


class Recording(tf.keras.callbacks.Callback):
    """Records the steps of a fit; the first one of its callbacks.

    Attributes:
        releases: Whether an iterate is seen after every epoch, and after every step.
        stopping: The callbacks that may stop early.
        chooses: Whether validation data choose the number of epochs, or one of them.
        chooses_rates: Whether they choose the learning rates.

    Args:
        run: Of the model.
        others: The user's callbacks.
        pace: How many steps are made between two looks, for this callback to choose; or None.
        has_validation: Whether fit has validation data.

    Raises:
        UnsupportedRunError: One of them chooses by the data, restores weights or shows metrics.
    """

    def __init__(
        self,
        run: PrivateRun,
        others: Sequence[Any],
        pace: tf.Variable | None = None,
        *,
        has_validation: bool,
    ):
        super().__init__()
        self._run, self._steps, self._pace, self._began = run, run.steps, pace, 0.0
        settings = run.settings
        self._record, self._target_delta = run.record, settings.target_delta
        self.releases = check_callbacks(
            [self, *others],
            self,
            checkpoints_stay_private=settings.checkpoints_stay_private,
            metrics_stay_private=settings.metrics_stay_private,
            public_validation=settings.validation_data_is_public and has_validation,
            rates_are_free=run.steps.rates_are_free,
        )
        self.chooses_rates = any(map(chooses_rates, others))
        self.stopping = stopping(others)
        self.chooses = bool(self.stopping) or keeps_the_best(others)
        self._released: set[tuple[str, ...]] = set()  # digests of iterates that may come back
        self.foreign = {type(c).__name__ for c in others if not is_of_keras(c)}

    def on_train_begin(self, logs: Any = None) -> None:
        """Goes on at the pace that an earlier fit of the run has found."""
        if self._pace is not None:
            self._pace.assign(self._run.pace)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Notes the time."""
        self._began = time.monotonic()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Records the steps since the last look, and chooses how many follow until the next."""
        for entry in self._steps.steps_since(self._record.num_batches):
            self._record.add(self._record.next_batch, entry)
        if self.releases[1]:
            self._record.release()
        if self._pace is not None:
            found = quicker(int(self._pace.numpy()), time.monotonic() - self._began)
            self._pace.assign(found)
            self._run.pace = max(found, self._run.pace)  # the last steps of an epoch are few

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the epsilon to the logs, and notes a checkpoint as released."""
        self.model.reset_metrics()  # Model.save would store them
        self._run.after_epoch()
        if self.releases[0]:
            self._record.release()
        if self.stopping:
            self._released.add(self._digests())
        if self._target_delta is not None and logs is not None:
            logs[_EPSILON] = self._record.guarantee().epsilon(self._target_delta)

    def on_train_end(self, logs: Any = None) -> None:
        """Refuses a run that something stopped before the declared number of epochs."""
        self.model.reset_metrics()
        stopped = any(callback.stopped_epoch for callback in self.stopping)
        if stopped and self._digests() in self._released:  # restore_best_weights
            self._run.steps.goes_back()
        if self.chooses:
            self._record.has_stopped(early=stopped)
        lacks_steps = self._record.num_batches < self._run.planned  # a StopIteration
        if (self.model.stop_training or lacks_steps) and not stopped:
            self._record.invalidate(
                "training was stopped early (model.stop_training), so the number of steps may "
                "depend on the data. Fix it in advance."
            )

    def after_fit(self) -> None:
        """Takes weights that EarlyStopping has put back for the newest, where it was late to.

        In Keras 3 it does so in its own on_train_end, also if it has not stopped the run.
        """
        steps = self._run.steps
        if self.stopping and not steps.is_iterate(keras_api.trained(self.model)):
            if self._digests() in self._released:
                steps.goes_back()
                self._record.is_over()

    def _digests(self) -> tuple[str, ...]:
        return tuple(map(digest, keras_api.trained(self.model)))
