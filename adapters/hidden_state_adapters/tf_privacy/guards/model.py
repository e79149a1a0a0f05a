"""The model: layers that mix or remember examples, and all else that is no part of the event."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from hidden_state_adapters.tf_privacy import keras_api
from hidden_state_adapters.tf_privacy.guards.step import check_constraints, check_variables
from hidden_state_adapters.tf_privacy.refusals import refusal


def build(model: Any, x: Any) -> None:
    """Lets a model that is not built yet create its variables, as its first step would.

    Args:
        model: A Keras model or layer.
        x: Arrays of examples, or a Dataset of batches.
    """
    if keras_api.is_built(model):
        return
    if isinstance(x, tf.data.Dataset):
        spec = x.element_spec
        x = spec[0] if isinstance(spec, tuple) else spec
    model(tf.nest.map_structure(lambda part: tf.zeros([1, *part.shape[1:]], part.dtype), x))


def check_compiled(model: Any) -> None:
    """Refuses what `Model.compile` was told, if it cannot be accounted.

    Raises:
        UnsupportedRunError: Several steps without a look at them, or weighted losses.
    """
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


def check_layers(model: Any) -> None:
    """Refuses a model whose layers or variables cannot be accounted.

    Raises:
        UnsupportedRunError: The text names the layer or variable.
    """
    for layer in model._flatten_layers():
        if isinstance(layer, keras_api.BATCH_NORMALIZATIONS) and layer.trainable:
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
        if keras_api.computes_otherwise(layer):
            raise refusal(
                f"Expected {layer.name} to use its variables in their own precision, got a "
                "mixed-precision or quantized policy: coarse rounding makes the update expand "
                'small distances. Train with the policy "float32" or "float64".'
            )
    if model.losses:
        raise refusal(
            "Expected no regularisation losses (kernel_regularizer, add_loss), got "
            f"{len(model.losses)}: inside the clip a penalty is no decoupled decay. Drop them, or "
            "use the weight_decay of CyclicDPKerasSGDOptimizer or the prox of "
            "BlockCoordinateKerasOptimizer."
        )
    if keras_api.IS_KERAS_3:  # whose own variables know of constraints, and TensorFlow's do not
        check_constraints(model.trainable_variables)
    check_variables(keras_api.trained(model))


class FixedVariables:
    """The variables of a model that are not trained: their values when the run began."""

    def __init__(self, model: Any):
        self._values = _values(model)

    def check(self, model: Any) -> None:
        """Raises UnsupportedRunError if one of them was changed."""
        now = _values(model)
        if len(now) != len(self._values) or not all(map(np.array_equal, now, self._values)):
            raise refusal(
                "a variable that is not trained was changed during the run (running statistics, "
                "counters): it carries the data of the examples past the noise."
            )


def _values(model: Any) -> list[np.ndarray]:
    return [variable.numpy() for variable in keras_api.fixed(model)]
