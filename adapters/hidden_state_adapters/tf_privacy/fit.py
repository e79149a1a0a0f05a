"""One call of fit: epochs of private steps, with validation and callbacks as in Keras."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hidden_state_adapters.tf_privacy import keras_api
from hidden_state_adapters.tf_privacy.lineage import fingerprint
from hidden_state_adapters.tf_privacy.other_callbacks import foreign_among, releases_of
from hidden_state_adapters.tf_privacy.run import PrivateRun, mean_loss


class Fit:
    """The loop of a call of fit.

    Attributes:
        releases: True if an iterate is seen after every epoch, and after every step.
        chooses: True if validation data choose the number of epochs, or one of them.
        foreign: Names of the callbacks that Keras did not write.
    """

    def __init__(
        self,
        run: PrivateRun,
        model: Any,
        callbacks: Sequence[Any],
        pace: int | None,
        *,
        has_validation: bool,
    ):
        self._run, self._model, self._callbacks = run, model, list(callbacks)
        settings = run.settings
        self.releases = releases_of(
            callbacks,
            checkpoints_stay_private=settings.checkpoints_stay_private,
            metrics_stay_private=settings.metrics_stay_private,
            public_validation=settings.validation_data_is_public and has_validation,
        )
        kinds = tf.keras.callbacks
        self._stopping = [c for c in callbacks if isinstance(c, kinds.EarlyStopping)]
        files = [c for c in callbacks if isinstance(c, kinds.ModelCheckpoint)]
        self.chooses = bool(self._stopping) or any(c.save_best_only for c in files)
        self._released: set[str] = set()  # iterates that may come back
        self.foreign = foreign_among(callbacks)
        waits = any(map(keras_api.waits_for_batches, callbacks))
        self._pace = 1 if pace is None and (waits or model.run_eagerly) else pace

    def train(
        self, first: int, last: int, verbose: int, validation: Callable[[int, Any], dict[str, Any]]
    ) -> Any:
        """Trains the epochs from `first` to before `last`, and returns Keras' History.

        Args:
            first: Number of the first epoch.
            last: Number after that of the last epoch.
            verbose: Mode of the progress bar, a number.
            validation: Function of an epoch and all callbacks that validates, and gives metrics.
        """
        model = self._model
        told = tf.keras.callbacks.CallbackList(
            self._callbacks, add_history=True, add_progbar=verbose != 0, model=model,
            verbose=verbose, epochs=last, steps=self._run.steps_per_epoch,
        )  # fmt: skip
        model.stop_training, logs = False, {}
        told.on_train_begin()
        for epoch in range(first, last):
            model.reset_metrics()
            told.on_epoch_begin(epoch)
            logs = {**self._epoch(told), **validation(epoch, told)}
            model.reset_metrics()  # Model.save would store them
            if self.releases[0]:
                self._run.record.release()
            logs |= self._run.record.shown_after_epoch(self._run.settings.target_delta)
            if self._stopping:
                self._released.add(self._fingerprint())
            told.on_epoch_end(epoch, logs)
            if model.stop_training:
                break
        told.on_train_end(logs)
        self._end()
        return model.history

    def _epoch(self, told: Any) -> dict[str, Any]:
        """Takes the steps of an epoch; what they show of the training data."""
        run, model, total, logs = self._run, self._model, np.zeros(2), {}
        told.on_train_batch_begin(0)
        for done, sums in run.epoch(self._pace, eagerly=model.run_eagerly):
            if self.releases[1]:
                run.record.release()
            total += sums
            shown = {name: _plain(value) for name, value in model.get_metrics_result().items()}
            # Keras' own mean loss is that of evaluate.
            logs = {"loss": 0.0, **shown} | {"loss": mean_loss(total)}
            told.on_train_batch_end(done - 1, logs)
            if model.stop_training:
                break
            if done < run.steps_per_epoch:
                told.on_train_batch_begin(done)
        return logs

    def _end(self) -> None:
        """Takes what EarlyStopping has put back for the newest; nothing else may have stopped."""
        run, steps = self._run, self._run.steps
        stopped = any(callback.stopped_epoch for callback in self._stopping)
        moved = not steps.is_iterate(keras_api.trained(self._model))
        if self._stopping and moved and self._fingerprint() in self._released:
            # restore_best_weights, which Keras 3 does without stopping, too
            steps.stands_at(steps.last_step)
            stopped = True
        if self.chooses:
            run.record.has_stopped(early=stopped)
        if self._model.stop_training and not stopped:
            run.record.refuse_stopped()
        if getattr(self._model.optimizer, "use_ema", False):
            # As in Keras: the average of the iterates, which all count, takes their place.
            self._model.optimizer.finalize_variable_values(self._model.trainable_variables)
            steps.stands_at(steps.last_step)

    def _fingerprint(self) -> str:
        return fingerprint(keras_api.trained(self._model))


def _plain(value: Any) -> Any:
    array = np.asarray(value)
    return array.item() if array.ndim == 0 else array
