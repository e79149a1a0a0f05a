"""How Model.fit was called, and what else takes part in it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from hidden_state_adapters.tf_privacy.data import cyclic_batches
from hidden_state_adapters.tf_privacy.dice_optimizer import DiceOptimizer
from hidden_state_adapters.tf_privacy.optimizer import CyclicDPKerasSGDOptimizer
from hidden_state_adapters.tf_privacy.optimizer_checks import (
    SLACK,
    check_variables,
    joint_norm,
    refuse_surroundings,
)
from hidden_state_adapters.tf_privacy.refusals import refusal

_callbacks = tf.keras.callbacks
_WRITE_METRICS = (_callbacks.CSVLogger, _callbacks.TensorBoard, _callbacks.RemoteMonitor)
_CHOOSE_BY_METRICS = (_callbacks.EarlyStopping, _callbacks.ReduceLROnPlateau)
_BATCH_NORMALIZATIONS = (  # three classes, of which none is a base of another
    tf.keras.layers.BatchNormalization,
    tf.keras.layers.experimental.SyncBatchNormalization,
    tf.compat.v1.keras.layers.BatchNormalization,
)


def fit_arguments() -> Mapping[str, Any]:
    """The variables of the call of Model.fit that is running.

    Keras does not tell callbacks how fit was called, so they are read from the stack.

    Raises:
        UnsupportedRunError: It is not Model.fit that runs.
    """
    code = inspect.unwrap(tf.keras.Model.fit).__code__
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            return frame.f_locals
        frame = frame.f_back
    raise refusal(
        "Expected to be called by Model.fit, got another caller: the order of the data cannot be "
        "checked. For an own loop use HiddenStateRecorder."
    )


def check_data(fit: Mapping[str, Any], dataset_size: int, batch_size: int) -> int:
    """The number of examples that fit uses, each exactly once per epoch in a fixed order.

    Args:
        fit: From `fit_arguments`.
        dataset_size: Declared; may count the examples that drop_remainder leaves out.
        batch_size: Declared.

    Raises:
        UnsupportedRunError: The batches are not fixed, not equal, or not the declared ones, or the
            loss is weighted.
    """
    if fit["validation_split"]:
        raise refusal(
            f"Expected validation_split = 0, got {fit['validation_split']!r}: it changes which "
            "examples are trained on. Split the data before, and pass validation_data."
        )
    for name in ("class_weight", "sample_weight"):
        if fit[name] is not None:
            raise refusal(
                f"Expected {name} = None, got weights: they change the loss that is accounted. "
                "Drop them."
            )
    batches = cyclic_batches(fit["x"])
    if batches is not None:
        given, used, actual = batches.given, batches.used, batches.batch_size
    else:
        given, actual = _check_arrays(fit)
        used = given
    if actual != batch_size:
        raise refusal(f"Expected batches of batch_size = {batch_size} examples, got {actual}.")
    if dataset_size not in (given, used):
        raise refusal(f"Expected dataset_size = {dataset_size} examples, got {used}.")
    if used % batch_size:
        raise refusal(
            f"Expected a batch_size that divides the {used} examples, got {batch_size}: the last "
            "batch would be smaller. Use cyclic_dataset(..., drop_remainder=True)."
        )
    steps = used // batch_size
    for name in ("steps_per_epoch", "data_handler"):
        value = fit[name]
        value = getattr(value, "inferred_steps", value)
        if value not in (None, steps):
            raise refusal(
                f"Expected {steps} steps in an epoch, got {value}: every batch is used once per "
                "epoch. Leave steps_per_epoch out."
            )
    return used


def _check_arrays(fit: Mapping[str, Any]) -> tuple[int, int]:
    arrays = tf.nest.flatten(fit["x"])
    if isinstance(fit["x"], tf.data.Dataset) or not all(hasattr(a, "shape") for a in arrays):
        raise refusal(
            f"Expected a dataset of cyclic_dataset, or arrays, got {type(fit['x']).__name__}: the "
            "order of its batches is not known. Use cyclic_dataset, and pass its result to fit as "
            "it is."
        )
    if fit["shuffle"]:
        raise refusal(
            "Expected a dataset of cyclic_dataset, or arrays with shuffle=False, got arrays with "
            f"shuffle={fit['shuffle']!r} (the default of fit): every epoch would have other "
            "batches. Pass cyclic_dataset(x, y, batch_size=...)."
        )
    return int(arrays[0].shape[0]), int(fit["batch_size"] or 32)


def check_callbacks(
    callbacks: Sequence[Any],
    own: Any,
    *,
    checkpoints_stay_private: bool,
    metrics_stay_private: bool,
) -> tuple[bool, bool]:
    """Whether a checkpoint is released after every epoch, and after every step.

    Raises:
        UnsupportedRunError: A callback chooses the model, the steps or their size by a metric,
            restores weights, or publishes metrics.
    """
    after_epochs = after_steps = False
    for position, callback in enumerate(callbacks):
        name = type(callback).__name__
        if isinstance(callback, _CHOOSE_BY_METRICS):
            raise refusal(
                f"Expected steps that are fixed in advance, got {name}: it chooses them, or the "
                "model, by a metric that depends on the data. Drop it."
            )
        if isinstance(callback, _callbacks.BackupAndRestore):
            raise refusal(
                f"Expected no {name}: it restores weights, but not the record of the steps. Drop "
                "it."
            )
        if isinstance(callback, _WRITE_METRICS) and not metrics_stay_private:
            raise refusal(
                f"Expected no {name}: it writes losses and metrics of the training data, which "
                "have no privacy guarantee. Drop it, or declare metrics_stay_private=True."
            )
        if not isinstance(callback, _callbacks.ModelCheckpoint):
            continue
        if callback.save_best_only:
            raise refusal(
                "Expected ModelCheckpoint(save_best_only=False), got True: it chooses the model by "
                "a metric. Release the last model."
            )
        if checkpoints_stay_private:
            continue
        after_steps |= callback.save_freq != "epoch"
        after_epochs = True
        if not callback.save_weights_only and (
            callback.save_freq != "epoch" or position < list(callbacks).index(own)
        ):
            raise refusal(
                "Expected ModelCheckpoint after HiddenStateCallback in callbacks and with "
                'save_freq="epoch": a saved model holds the metrics of the epoch, computed from '
                "the training data, unless HiddenStateCallback has reset them. Reorder, use "
                "save_weights_only=True, or declare checkpoints_stay_private=True."
            )
    return after_epochs, after_steps


def is_of_keras(callback: Any) -> bool:
    """Whether it does only what Keras wrote; a LambdaCallback runs functions of the user."""
    is_lambda = isinstance(callback, _callbacks.LambdaCallback)
    return not is_lambda and type(callback).__module__.startswith(("keras.src.", "tf_keras.src."))


def build(model: Any, fit: Mapping[str, Any]) -> None:
    """Lets a model that is not built yet create its variables, as its first step would."""
    if model.built:
        return
    x = fit["x"]
    if isinstance(x, tf.data.Dataset):
        spec = x.element_spec
        spec = spec[0] if isinstance(spec, tuple) else spec
        model(tf.nest.map_structure(lambda s: tf.zeros([1, *s.shape[1:]], s.dtype), spec))
    else:
        model(tf.nest.map_structure(lambda a: tf.zeros([1, *a.shape[1:]], a.dtype), x))


def check_model(model: Any) -> CyclicDPKerasSGDOptimizer | DiceOptimizer:
    """The model's optimizer, if the model can be accounted.

    Raises:
        UnsupportedRunError: It cannot.
    """
    optimizer = model.optimizer
    check_optimizer(optimizer)
    executions = getattr(model, "_steps_per_execution", None)
    if executions is not None and int(executions) != 1:
        raise refusal(
            f"Expected steps_per_execution = 1, got {int(executions)}: every step is checked."
        )
    if getattr(model.compiled_loss, "_user_loss_weights", None) is not None:
        raise refusal(
            "Expected compile(loss_weights=None), got weights: they change the loss that is "
            "accounted. Drop them."
        )
    check_layers(model, optimizer)
    return optimizer


def check_optimizer(optimizer: Any) -> None:
    """Refuses an optimizer whose steps cannot be accounted.

    Raises:
        UnsupportedRunError: It is none of this package.
    """
    refuse_surroundings()  # fit enters the strategy of the model
    if not isinstance(optimizer, CyclicDPKerasSGDOptimizer | DiceOptimizer):
        raise refusal(
            "Expected a CyclicDPKerasSGDOptimizer, DiceKerasSGDOptimizer or DiceKerasAdamOptimizer "
            f"(in Model.compile), got {type(optimizer).__name__}: its steps cannot be checked."
        )


def check_layers(model: Any, optimizer: CyclicDPKerasSGDOptimizer | DiceOptimizer) -> None:
    """Refuses a model whose layers or variables cannot be accounted.

    Raises:
        UnsupportedRunError: The text names the layer or variable.
    """
    for layer in model._flatten_layers():
        if isinstance(layer, _BATCH_NORMALIZATIONS) and layer.trainable:
            raise refusal(
                f"Expected no trainable batch normalisation, got {layer.name}: it mixes the "
                "examples of a batch and keeps statistics of them without noise. Use "
                "LayerNormalization, or set layer.trainable = False."
            )
        if getattr(layer, "stateful", False):
            raise refusal(
                f"Expected layers without state, got {layer.name} with stateful=True: it carries "
                "examples into later steps without noise."
            )
    if (
        getattr(optimizer, "loss_geometry", None) is not None
        and tf.config.list_physical_devices("GPU")
        and tf.config.experimental.tensor_float_32_execution_enabled()
    ):
        raise refusal(
            "Expected full float32 on the GPU, got TensorFloat-32 (TensorFlow's default): "
            "gradients rounded to 10 bits do not have the declared smoothness. Call "
            "tf.config.experimental.enable_tensor_float_32_execution(False)."
        )
    if model.losses:
        raise refusal(
            "Expected no regularisation losses (kernel_regularizer, add_loss), got "
            f"{len(model.losses)}: inside the clip a penalty is no decoupled decay. Drop them, or "
            "use the weight_decay of CyclicDPKerasSGDOptimizer."
        )
    check_variables(model.trainable_variables)
    radius = getattr(optimizer, "projection_radius", None)
    if radius is not None and optimizer.last_step.steps == 0:
        norm = float(joint_norm(model.trainable_variables))
        if not norm <= radius * (1 + SLACK):
            raise refusal(
                f"Expected initial variables within projection_radius = {radius:g} of 0, got norm "
                f"{norm:g}. Initialise smaller, or raise the radius."
            )
