"""The callbacks in a fit: which of them release or choose something, and how steps are recorded."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from hidden_state_adapters.tf_privacy import keras_api
from hidden_state_adapters.tf_privacy.origins import digest
from hidden_state_adapters.tf_privacy.refusals import refusal
from hidden_state_adapters.tf_privacy.run import PrivateRun, quicker

_callbacks = tf.keras.callbacks
_WRITE_METRICS = (_callbacks.CSVLogger, _callbacks.TensorBoard, _callbacks.RemoteMonitor)
_CHOOSE_BY_METRICS = (_callbacks.EarlyStopping, _callbacks.ReduceLROnPlateau)
_EPSILON = "epsilon_if_released_now"


# The other callbacks


def releases_of(
    callbacks: Sequence[Any],
    own: Any,
    *,
    checkpoints_stay_private: bool,
    metrics_stay_private: bool,
    public_validation: bool = False,
    rates_are_free: bool = False,
) -> tuple[bool, bool]:
    """Whether an iterate is released after every epoch, and after every step.

    Args:
        callbacks: All of a fit.
        own: The one that records.
        checkpoints_stay_private: As declared.
        metrics_stay_private: Likewise.
        public_validation: Whether metrics of validation data are those of public data, and every
            iterate that they are computed from may count as released.
        rates_are_free: Whether every step counts in full, whatever its learning rate is.

    Raises:
        UnsupportedRunError: A callback chooses the model, the steps or their size by a metric,
            restores weights, or publishes metrics.
    """
    after_epochs = after_steps = False
    for position, callback in enumerate(callbacks):
        name = type(callback).__name__
        chooses = _chooses_by_validation(callback) or (rates_are_free and _chooses_rates(callback))
        if public_validation and chooses:
            after_epochs = True
        elif isinstance(callback, _CHOOSE_BY_METRICS):
            raise refusal(
                f"Expected steps that are fixed in advance, got {name}: it chooses them, or the "
                "model, by a metric that depends on the data. Drop it. (A model that owns its run "
                "takes EarlyStopping on a val_ metric with validation_data that are declared "
                "public: validation_data_is_public=True. ReduceLROnPlateau, too, where epsilon is "
                "that of composition: without loss_geometry.)"
            )
        if isinstance(callback, (_callbacks.BackupAndRestore, *keras_api.OTHER_CALLBACKS)):
            raise refusal(
                f"Expected no {name}: the files that it writes, or the weights that it puts in, "
                "are not followed here. Drop it, or use ModelCheckpoint."
            )
        if isinstance(callback, _WRITE_METRICS) and not metrics_stay_private:
            raise refusal(
                f"Expected no {name}: it writes losses and metrics of the training data, which "
                "have no privacy guarantee. Drop it, or declare metrics_stay_private=True."
            )
        if not isinstance(callback, _callbacks.ModelCheckpoint):
            continue
        if callback.save_best_only and not (public_validation and _chooses_by_validation(callback)):
            raise refusal(
                "Expected ModelCheckpoint(save_best_only=False), got True: it chooses the model by "
                "a metric. Release the last model."
            )
        if checkpoints_stay_private:
            continue
        each_step, after_epochs = callback.save_freq != "epoch", True
        after_steps |= each_step
        is_before = position < list(callbacks).index(own)
        if not callback.save_weights_only and (each_step or is_before):
            raise refusal(
                "Expected ModelCheckpoint after HiddenStateCallback in callbacks and with "
                'save_freq="epoch": a saved model holds the metrics of the epoch, computed from '
                "the training data, unless HiddenStateCallback has reset them. Reorder, use "
                "save_weights_only=True, or declare checkpoints_stay_private=True."
            )
    return after_epochs, after_steps


def _chooses_by_validation(callback: Any) -> bool:
    """Whether it is one of Keras that stops, or keeps files, by metrics of validation data."""
    kinds = (_callbacks.EarlyStopping, _callbacks.ModelCheckpoint)
    if not isinstance(callback, kinds) or not _is_of_keras(callback):
        return False
    if isinstance(callback, _callbacks.ModelCheckpoint) and callback.save_freq != "epoch":
        return False
    return str(callback.monitor).startswith("val_")


def _chooses_rates(callback: Any) -> bool:
    """Whether it is the one of Keras that sets learning rates by metrics of validation data."""
    is_known = isinstance(callback, _callbacks.ReduceLROnPlateau) and _is_of_keras(callback)
    return is_known and str(callback.monitor).startswith("val_")


def _is_of_keras(callback: Any) -> bool:
    """Whether it does only what Keras wrote; a LambdaCallback runs functions of the user."""
    is_lambda = isinstance(callback, _callbacks.LambdaCallback)
    return not is_lambda and keras_api.is_of_keras(callback)


def foreign_among(callbacks: Iterable[Any]) -> set[str]:
    """Names of those that Keras did not write."""
    return {type(callback).__name__ for callback in callbacks if not _is_of_keras(callback)}


def refuse_moved_rates(callbacks: Sequence[Any]) -> None:
    """Raises UnsupportedRunError if a callback sets the rates of steps that are accounted ahead."""
    if any(isinstance(callback, _callbacks.LearningRateScheduler) for callback in callbacks):
        raise refusal(
            "Expected no LearningRateScheduler with target_epsilon, EarlyStopping or "
            "save_best_only, got one: steps are accounted before they are made, with the rate "
            "of the moment. Give the optimizer a schedule, tf.keras.optimizers.schedules."
        )


# Those that record


class Recorder(tf.keras.callbacks.Callback):
    """What both do at the end of an epoch and of the training."""

    releases = (False, False)  # an iterate after every epoch, after every step
    _record: Any
    _target_delta: float | None

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the epsilon to the logs, and notes a checkpoint as released."""
        self.model.reset_metrics()  # Model.save would store them
        self._record.after_epoch()
        if self.releases[0]:
            self._record.release()
        if self._target_delta is not None and logs is not None:
            logs[_EPSILON] = self._record.guarantee().epsilon(self._target_delta)

    def refuse_stopped(self) -> None:
        """Ends the run: what stopped it may have looked at the data."""
        self._record.invalidate(
            "training was stopped early (model.stop_training), so the number of steps may "
            "depend on the data. Fix it in advance."
        )


class Recording(Recorder):
    """Records the steps of a fit; the first one of its callbacks.

    Attributes:
        releases: Whether an iterate is seen after every epoch, and after every step.
        chooses: Whether validation data choose the number of epochs, or one of them.
        chooses_rates: Whether they choose the learning rates.
        foreign: Names of the callbacks that Keras did not write.

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
        self.releases = releases_of(
            [self, *others],
            self,
            checkpoints_stay_private=settings.checkpoints_stay_private,
            metrics_stay_private=settings.metrics_stay_private,
            public_validation=settings.validation_data_is_public and has_validation,
            rates_are_free=run.steps.rates_are_free,
        )
        self.chooses_rates = any(map(_chooses_rates, others))
        self._stopping = [c for c in others if isinstance(c, _callbacks.EarlyStopping)]
        files = [c for c in others if isinstance(c, _callbacks.ModelCheckpoint)]
        self.chooses = bool(self._stopping) or any(c.save_best_only for c in files)
        self._released: set[tuple[str, ...]] = set()  # digests of iterates that may come back
        self.foreign = foreign_among(others)

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
        """As of every recorder; notes weights that EarlyStopping may put back."""
        super().on_epoch_end(epoch, logs)
        if self._stopping:
            self._released.add(self._digests())

    def on_train_end(self, logs: Any = None) -> None:
        """Refuses a run that something stopped before the declared number of epochs."""
        self.model.reset_metrics()
        stopped = any(callback.stopped_epoch for callback in self._stopping)
        if stopped and self._digests() in self._released:  # restore_best_weights
            self._run.steps.goes_back()
        if self.chooses:
            self._record.has_stopped(early=stopped)
        lacks_steps = self._record.num_batches < self._run.planned  # a StopIteration
        if (self.model.stop_training or lacks_steps) and not stopped:
            self.refuse_stopped()

    def after_fit(self) -> None:
        """Takes weights that EarlyStopping has put back for the newest, where it was late to.

        In Keras 3 it does so in its own on_train_end, also if it has not stopped the run.
        """
        steps = self._run.steps
        if self._stopping and not steps.is_iterate(keras_api.trained(self.model)):
            if self._digests() in self._released:
                steps.goes_back()
                self._record.is_over()

    def _digests(self) -> tuple[str, ...]:
        return tuple(map(digest, keras_api.trained(self.model)))
