"""Layers that were adapted to the data, and where the same layers are fine."""

import numpy as np
import pytest

pytest.importorskip("tensorflow_privacy")
import tensorflow as tf

import hidden_state_accountants as hsa
from hidden_state_adapters.tf_privacy.trained_part import check_layers

layers = tf.keras.layers
NUMBERS = np.arange(24, dtype="float32").reshape(12, 2)
WORDS = np.array([["a"], ["b"], ["a c"]] * 4)


class Fitted(layers.experimental.preprocessing.PreprocessingLayer):
    """A layer of the user's own."""

    def call(self, x):
        return x

    def reset_state(self):
        pass

    def update_state(self, data):
        pass


class Holder(tf.keras.Model):
    def __init__(self, layer):
        super().__init__()
        self.parts = [layer, layers.Dense(1)]
        self.parts[1].build((None, 2))


@pytest.mark.parametrize(
    ("layer", "data"),
    [
        (layers.Normalization(), NUMBERS),
        (layers.Discretization(num_bins=3), NUMBERS),
        (layers.StringLookup(), WORDS),
        (layers.IntegerLookup(), NUMBERS.astype("int64")),
        (layers.TextVectorization(output_sequence_length=2), WORDS),
        (Fitted(), NUMBERS),
    ],
    ids=lambda value: type(value).__name__,
)
def test_adapted_layers_are_refused(layer, data):
    layer.adapt(data)
    name = type(layer).__name__
    with pytest.raises(hsa.UnsupportedRunError, match=rf"{name}\(.*\) with constants, got"):
        check_layers(Holder(layer))


@pytest.mark.parametrize(
    "layer",
    [
        layers.Normalization(mean=[0.0, 1.0], variance=[1.0, 4.0]),
        layers.Discretization(bin_boundaries=[3.0, 9.0]),
        layers.StringLookup(vocabulary=["a", "b"]),
        layers.TextVectorization(output_sequence_length=2, vocabulary=["a", "b"]),
        layers.Rescaling(0.1),
        layers.CategoryEncoding(num_tokens=24),
        Fitted(),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_constants_are_fine(layer):
    check_layers(Holder(layer))
    check_layers(Holder(type(layer).from_config(layer.get_config())))


def test_a_frozen_backbone_whose_weights_were_loaded():
    """As in EfficientNet: nobody knows constants, and nothing was adapted."""
    network = tf.keras.Sequential([tf.keras.Input([2]), layers.Normalization(), layers.Dense(2)])
    with pytest.raises(hsa.UnsupportedRunError, match="Freeze it, where it is a part of a public"):
        check_layers(network)
    network.trainable = False
    model = tf.keras.Sequential([tf.keras.Input([2]), network, layers.Dense(1)])
    check_layers(model)
    network.layers[0].adapt(NUMBERS)
    with pytest.raises(hsa.UnsupportedRunError, match="as adapt left it"):
        check_layers(model)
