"""Models that take every example of a batch by itself, told by their structure.

A model is one if it is a `Sequential` or functional model of the layers below: Keras' own, with
settings that leave the axis of the examples alone. No values are looked at, so that it holds for
every batch. A layer that is missing here costs time and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hidden_state_adapters.tf_privacy import keras_api

_ANY_SETTINGS = (
    "Dense", "Embedding", "Dropout", "GaussianNoise", "GaussianDropout", "ReLU", "LeakyReLU", "ELU",
    "Activation", "Flatten", "Rescaling", "Normalization", "Add", "Multiply", "Conv1D", "Conv2D",
    "DepthwiseConv2D", "SeparableConv2D", "ZeroPadding2D", "MaxPooling1D", "MaxPooling2D",
    "AveragePooling2D", "GlobalAveragePooling1D", "GlobalAveragePooling2D", "GlobalMaxPooling1D",
    "GlobalMaxPooling2D",
)  # fmt: skip
# No tensor has the axis of the examples only, so that the last axis is never this one.
_SOME_SETTINGS: dict[str, Callable[[Any], bool]] = {
    "InputLayer": lambda layer: len(layer.output.shape) > 1,
    "Reshape": lambda layer: len(layer.target_shape) > 0,
    "Softmax": lambda layer: layer.axis == -1,
    "Concatenate": lambda layer: layer.axis == -1 or layer.axis > 0,
    "BatchNormalization": lambda layer: not layer.trainable,  # by constants
}
_LAYERS: dict[Any, Callable[[Any], bool]] = {
    getattr(keras_api.layers, name): holds
    for name, holds in {**dict.fromkeys(_ANY_SETTINGS, lambda _: True), **_SOME_SETTINGS}.items()
}
_PRIVATE_MODELS = "hidden_state_adapters.tf_privacy.model"
# Entry by entry, or over the last axis.
_ACTIVATIONS = (
    *(
        getattr(tf.keras.activations, name)
        for name in ("linear", "relu", "sigmoid", "tanh", "softmax", "elu", "selu", "gelu",
                     "softplus", "softsign", "swish", "exponential", "hard_sigmoid")
    ),
    *(tf.nn.relu, tf.nn.tanh, tf.nn.elu, tf.nn.selu, tf.nn.gelu, tf.nn.leaky_relu, tf.nn.swish),
)  # fmt: skip


def takes_examples_alone(model: Any, examples: Any) -> bool:
    """Returns whether every output of a model depends on its own example only."""
    return (
        all(len(part.shape) > 1 for part in tf.nest.flatten(examples))
        and not keras_api.has_other_operations(model)
        and all(map(_is_alone, model._flatten_layers()))
    )


def _is_alone(layer: Any) -> bool:
    if "call" in vars(layer):
        return False
    if isinstance(layer, tf.keras.Model):
        own = keras_api.is_of_keras(layer) or type(layer).__module__ == _PRIVATE_MODELS
        return own and isinstance(layer, (tf.keras.Sequential, keras_api.Functional))
    activation = getattr(layer, "activation", None)
    is_known = type(layer) in _LAYERS and _LAYERS[type(layer)](layer)
    return is_known and (activation is None or any(activation is one for one in _ACTIVATIONS))
