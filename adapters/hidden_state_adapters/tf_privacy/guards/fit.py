"""How Model.fit was called: fixed equal batches, each once per epoch, and an unweighted loss."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

from hidden_state_adapters.tf_privacy.data import cyclic_batches
from hidden_state_adapters.tf_privacy.refusals import refusal


def fit_arguments() -> Mapping[str, Any]:
    """The variables of the call of Model.fit that is running.

    Keras does not tell callbacks how fit was called, so they are read from the stack.

    Raises:
        UnsupportedRunError: It is not Model.fit that runs.
    """
    for frame in _calls_of_fit(sys._getframe(1)):
        return frame.f_locals
    raise refusal(
        "Expected to be called by Model.fit, got another caller: the order of the data cannot be "
        "checked. For an own loop use HiddenStateRecorder."
    )


def is_fitting(model: Any) -> bool:
    """Whether a call of Model.fit of this model is running, in any thread."""
    newest = sys._current_frames().values()
    return any(call.f_locals["self"] is model for top in newest for call in _calls_of_fit(top))


def _calls_of_fit(frame: Any) -> Iterator[Any]:
    """The calls of Model.fit among a frame and its callers, the innermost first."""
    code = inspect.unwrap(tf.keras.Model.fit).__code__
    while frame is not None:
        if frame.f_code is code:
            yield frame
        frame = frame.f_back


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
