"""Layers that a run can train, and variables that it must leave alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from hidden_state_accountants import UnsupportedRunError
from hidden_state_adapters.tf_privacy import keras_api
from hidden_state_adapters.tf_privacy.step import check_constraints, check_variables

# What gives a preprocessing layer the statistics that `adapt` would find.
_ADAPTED = {"input_mean": "mean=..., variance=...", "input_bin_boundaries": "bin_boundaries=..."}


def check_layers(model: Any) -> None:
    """Raises UnsupportedRunError, which names it, for a layer or variable that cannot be accounted.

    Keras does not tell which data `adapt` has seen, so constants are the way to say that they do
    not come from the examples.
    """
    for layer in model._flatten_layers():
        if isinstance(layer, keras_api.BATCH_NORMALIZATIONS) and layer.trainable:
            raise UnsupportedRunError(
                f"Expected no trainable batch normalisation, got {layer.name}: it mixes the "
                "examples of a batch and keeps statistics of them without noise. Use "
                "LayerNormalization, or set layer.trainable = False."
            )
        if getattr(layer, "stateful", False):
            raise UnsupportedRunError(
                f"Expected layers without state, got {layer.name} with stateful=True: it carries "
                "examples into later steps without noise."
            )
        if keras_api.computes_otherwise(layer):
            raise UnsupportedRunError(
                f"Expected {layer.name} to use its variables in their own precision, got a "
                "mixed-precision or quantized policy: coarse rounding makes the update expand "
                'small distances. Train with the policy "float32" or "float64".'
            )
        if isinstance(layer, keras_api.ADAPTED_LAYERS) and (argument := _adapted(layer)):
            raise UnsupportedRunError(
                f"Expected {type(layer).__name__}({argument}) with constants, got {layer.name} as "
                "adapt left it: statistics of the examples would be in the model without noise. "
                "Adapt a layer to public data, and give what it found as constants. In a backbone "
                "that came with public weights freeze it: backbone.trainable = False."
            )
    if model.losses:
        raise UnsupportedRunError(
            "Expected no regularisation losses (kernel_regularizer, add_loss), got "
            f"{len(model.losses)}: inside the clip a penalty is no decoupled decay. Drop them, and "
            "give the optimizer the decay, SGD(weight_decay=); that of Keras' L2(a) is 2 a. For L1 "
            "take prox= of the private model."
        )
    if keras_api.IS_KERAS_3:  # whose own variables know of constraints, and TensorFlow's do not
        check_constraints(model.trainable_variables)
    check_variables(keras_api.trained(model))


def _adapted(layer: Any) -> str:
    """Returns the argument that would have given what `adapt` found; "" if it was given."""
    if not layer.trainable and not getattr(layer, "is_adapted", False):
        return ""  # of a frozen backbone (EfficientNet), whose weights are declared to be public
    for attribute, argument in _ADAPTED.items():
        if hasattr(layer, attribute):
            return argument if getattr(layer, attribute) is None else ""
    if hasattr(layer, "_has_input_vocabulary"):
        return "" if layer._has_input_vocabulary else "vocabulary=..."
    return "..." if layer.is_adapted else ""


class FixedVariables:
    """The variables of a model that are not trained: their values when the run began."""

    def __init__(self, model: Any):
        self._values = self._now(model)

    def check(self, model: Any) -> None:
        """Raises UnsupportedRunError if one of them was changed."""
        now = self._now(model)
        if len(now) != len(self._values) or not all(map(np.array_equal, now, self._values)):
            raise UnsupportedRunError(
                "a variable that is not trained was changed during the run (running statistics, "
                "counters): it carries the data of the examples past the noise."
            )

    def _now(self, model: Any) -> list[np.ndarray]:
        return [variable.numpy() for variable in keras_api.fixed(model)]
