"""The other callbacks in a fit: which of them release a model, choose one, or show metrics."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from hidden_state_accountants import UnsupportedRunError
from hidden_state_adapters.tf_privacy import keras_api

_callbacks = tf.keras.callbacks
_WRITE_METRICS = (_callbacks.CSVLogger, _callbacks.TensorBoard, _callbacks.RemoteMonitor)
_PUT_WEIGHTS_IN = (_callbacks.BackupAndRestore, *keras_api.OTHER_CALLBACKS)


def releases_of(
    callbacks: Sequence[Any],
    own: Any = None,
    *,
    checkpoints_stay_private: bool,
    metrics_stay_private: bool,
    public_validation: bool = False,
) -> tuple[bool, bool]:
    """Returns whether an iterate is released after every epoch, and after every step.

    Args:
        callbacks: All callbacks of a fit.
        own: Callback that records, if it is one of them.
        checkpoints_stay_private: True if nobody sees files from before the last step.
        metrics_stay_private: True if nobody sees what callbacks write of metrics.
        public_validation: True if metrics of validation data are those of public data, and every
            iterate that they are computed from may count as released.
    """
    after_epochs = after_steps = False
    for position, callback in enumerate(callbacks):
        name, is_public = type(callback).__name__, public_validation and _looks_at_val(callback)
        if isinstance(callback, _callbacks.ReduceLROnPlateau):
            raise UnsupportedRunError(
                f"Expected steps that are fixed in advance, got {name}: it chooses them by a "
                "metric. Give the optimizer a schedule, tf.keras.optimizers.schedules."
            )
        if not is_public and (
            isinstance(callback, _callbacks.EarlyStopping)
            or getattr(callback, "save_best_only", False)
        ):
            raise UnsupportedRunError(
                f"Expected steps that are fixed in advance, and no save_best_only, got {name}: it "
                "chooses the model by a metric. Leave it out; or make a private model with "
                "validation_data_is_public=True, and monitor a val_ metric."
            )
        if isinstance(callback, _PUT_WEIGHTS_IN):
            raise UnsupportedRunError(
                f"Expected no {name}: the files that it writes, or the weights that it puts in, "
                "are not followed here. Use ModelCheckpoint."
            )
        if isinstance(callback, _WRITE_METRICS) and not metrics_stay_private:
            raise UnsupportedRunError(
                f"Expected no {name}: it writes losses and metrics of the training data, which "
                "have no privacy guarantee. Drop it, or declare metrics_stay_private=True."
            )
        after_epochs |= is_public
        if not isinstance(callback, _callbacks.ModelCheckpoint) or checkpoints_stay_private:
            continue
        each_step, after_epochs = callback.save_freq != "epoch", True
        after_steps |= each_step
        is_before = own is not None and position < list(callbacks).index(own)
        if not callback.save_weights_only and (each_step or is_before):
            raise UnsupportedRunError(
                'Expected ModelCheckpoint after HiddenStateCallback and with save_freq="epoch": a '
                "saved model holds metrics of the training data until they are reset. Use "
                "save_weights_only=True."
            )
    return after_epochs, after_steps


def _looks_at_val(callback: Any) -> bool:
    """Returns whether it stops, or keeps files, by metrics of validation data, as Keras' do."""
    kinds = (_callbacks.EarlyStopping, _callbacks.ModelCheckpoint)
    if not isinstance(callback, kinds) or not _is_of_keras(callback):
        return False
    is_of_epochs = getattr(callback, "save_freq", "epoch") == "epoch"
    return is_of_epochs and str(callback.monitor).startswith("val_")


def _is_of_keras(callback: Any) -> bool:
    """Returns whether it does only what Keras wrote, and runs no functions of the user."""
    is_lambda = isinstance(callback, _callbacks.LambdaCallback)
    return not is_lambda and keras_api.is_of_keras(callback)


def foreign_among(callbacks: Iterable[Any]) -> set[str]:
    """Returns the names of those that Keras did not write."""
    return {type(callback).__name__ for callback in callbacks if not _is_of_keras(callback)}


def refuse_moved_rates(callbacks: Sequence[Any]) -> None:
    """Raises UnsupportedRunError if a callback sets the rates of steps that are accounted ahead."""
    if any(isinstance(callback, _callbacks.LearningRateScheduler) for callback in callbacks):
        raise UnsupportedRunError(
            "Expected no LearningRateScheduler with target_epsilon, EarlyStopping or "
            "save_best_only, got one: steps are accounted before they are made. Give the optimizer "
            "a schedule, tf.keras.optimizers.schedules."
        )
