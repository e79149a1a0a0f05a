"""Surroundings, layers and variables that a run can train in, and those that it leaves alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hidden_state_accountants import UnsupportedRunError
from hidden_state_adapters.tf_privacy import keras_api

PRECISIONS = (tf.float32, tf.float64)
# What gives a preprocessing layer the statistics that `adapt` would find.
_ADAPTED = {"input_mean": "mean=..., variance=...", "input_bin_boundaries": "bin_boundaries=..."}


# Strategies


def refuse_surroundings(strategy: Any = None) -> None:
    """Raises UnsupportedRunError in TensorFlow 1 graphs and strategies but the one of the model."""
    if not tf.compat.v1.executing_eagerly_outside_functions():
        raise UnsupportedRunError(
            "Expected TensorFlow 2, got a TensorFlow 1 graph or session: the steps cannot be "
            "checked there. Use Model.fit or an own loop."
        )
    if tf.distribute.has_strategy() and tf.distribute.get_strategy() is not strategy:
        found = tf.distribute.get_strategy()
        raise UnsupportedRunError(
            f"Expected no distribution strategy, got {type(found).__name__} with "
            f"{found.num_replicas_in_sync} replicas: each would divide by its own rows and add "
            "noise of its own. Train outside of strategy.scope()."
        )


def strategy_of(model: Any) -> Any:
    """Returns the strategy that the model was made in, or None."""
    if tf.distribute.has_strategy():
        raise UnsupportedRunError(
            f"Expected fit outside of strategy.scope(), got a call within that of a "
            f"{type(tf.distribute.get_strategy()).__name__}: steps are counted there once for each "
            "replica. Make and compile the model in the scope, and fit outside of it."
        )
    strategy = model.distribute_strategy
    with strategy.scope():
        if not tf.distribute.has_strategy():
            return None
    if type(strategy) is not tf.distribute.MirroredStrategy:
        raise UnsupportedRunError(
            f"Expected no distribution strategy or a MirroredStrategy, got "
            f"{type(strategy).__name__}: noise may be added by each of its replicas, or by none. "
            "Use tf.distribute.MirroredStrategy."
        )
    return strategy


def check_made_in(strategy: Any, variables: Sequence[Any]) -> None:
    """Raises UnsupportedRunError if a variable has no copy in every replica."""
    for variable in variables:
        if not isinstance(variable, tf.distribute.DistributedValues):
            raise UnsupportedRunError(
                f"Expected variables that were made in the scope of the MirroredStrategy, got "
                f"{variable.name}, which was not. Make, build and compile the model in the scope."
            )


# Layers


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
            _refuse_precision(layer.name, "a mixed-precision or quantized policy")
        if isinstance(layer, keras_api.ADAPTED_LAYERS) and (argument := _adapted(layer)):
            raise UnsupportedRunError(
                f"Expected {type(layer).__name__}({argument}) with constants, got {layer.name} as "
                "adapt left it: statistics of the examples would be in the model without noise. "
                "Freeze it, where it is a part of a public backbone."
            )
    refuse_added_losses(model)
    if keras_api.IS_KERAS_3:  # whose own variables know of constraints, and TensorFlow's do not
        _check_constraints(model.trainable_variables)
    check_variables(keras_api.trained(model))


def refuse_added_losses(model: Any) -> None:
    """Raises UnsupportedRunError if a layer, or the pass that was just made, added losses."""
    if model.losses:
        raise UnsupportedRunError(
            "Expected no regularisation losses (kernel_regularizer, add_loss), got "
            f"{len(model.losses)}: inside the clip a penalty is no decoupled decay. Give the "
            "optimizer the decay, SGD(weight_decay=); that of Keras' L2(a) is 2 a."
        )


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


# Variables


def check_variables(variables: Sequence[Any]) -> None:
    """Refuses variables of low or mixed precision, with constraints, or none at all."""
    if not variables:
        raise UnsupportedRunError("Expected trainable variables, got none.")
    for variable in variables:
        if hasattr(variable, "true_dtype"):  # Keras' AutoCastVariable
            _refuse_precision(variable.name, "a mixed-precision policy")
        if variable.dtype.base_dtype not in PRECISIONS:
            _refuse_precision(variable.name, variable.dtype.name)
    _check_constraints(variables)
    if len({variable.dtype.base_dtype for variable in variables}) > 1:
        raise UnsupportedRunError(
            "Expected trainable variables of one precision, got float32 and float64."
        )


def _refuse_precision(name: str, found: str) -> None:
    raise UnsupportedRunError(
        f"Expected {name} to use its own precision, float32 or float64, got {found}: coarse "
        'rounding makes the update expand small distances. Train with the policy "float32".'
    )


def _check_constraints(variables: Sequence[Any]) -> None:
    """Refuses variables that an optimizer of Keras maps to something else after every update."""
    for variable in variables:
        if getattr(variable, "constraint", None) is not None:
            raise UnsupportedRunError(
                f"Expected {variable.name} without a constraint, got {variable.constraint!r}: it "
                "is no part of the event. Use projection_radius."
            )


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
