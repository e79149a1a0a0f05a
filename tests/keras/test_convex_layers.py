"""A loss is convex in one trained layer: in the product of two it is not."""

import numpy as np
import pytest

pytest.importorskip("tensorflow")
import tensorflow as tf

import hidden_state_accountants as hsa
from hidden_state_adapters.tf_privacy import (
    BlockCoordinateUpdate,
    HiddenStateSequential,
    PrivateRun,
)

CONVEX, SMOOTH = hsa.LossGeometry.convex(1.0), hsa.LossGeometry.smooth(1.0)
SETTINGS = {"l2_norm_clip": 1.0, "noise_multiplier": 2.0, "batch_order": "cyclic"}
REFUSED = "got .*dense.*, .*dense.*: no loss is convex in the weights of layers"
X, Y = np.eye(8, 4, dtype="float32"), np.arange(8) % 2
layers = tf.keras.layers
pytestmark = pytest.mark.usefixtures("without_graphs")


def mlp():
    return [layers.Dense(3, "tanh"), layers.Dense(2)]


def loss():
    return tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def fit(own_layers, update=None, **settings):
    model = HiddenStateSequential(own_layers, **SETTINGS, **settings)
    sgd = tf.keras.optimizers.SGD(0.1)
    model.compile(sgd if update is None else update(sgd), loss(), run_eagerly=True)
    model.fit(X, Y, batch_size=4, epochs=1, verbose=0)
    return model.privacy_event


def test_fit_of_two_layers_in_a_row():
    with pytest.raises(hsa.UnsupportedRunError, match=REFUSED):
        fit(mlp(), loss_geometry=CONVEX)
    with pytest.raises(hsa.UnsupportedRunError, match=REFUSED):
        fit([tf.keras.Sequential(mlp())], loss_geometry=CONVEX)


def test_what_is_not_convex_may_have_two():
    assert fit(mlp(), loss_geometry=SMOOTH).loss == SMOOTH


def test_one_trained_layer():
    first, last = mlp()
    first.trainable = False
    assert fit([first, last], loss_geometry=CONVEX).loss == CONVEX


def test_a_run_of_a_loop():
    with pytest.raises(hsa.UnsupportedRunError, match=REFUSED):
        PrivateRun(
            tf.keras.Sequential(mlp()), X, Y, loss=loss(), optimizer=tf.keras.optimizers.SGD(0.1),
            batch_size=4, loss_geometry=CONVEX, **SETTINGS,
        )  # fmt: skip


def test_blocks_are_looked_at_one_by_one():
    def each_layer(optimizer):
        return BlockCoordinateUpdate(optimizer, [[0, 1], [2, 3]])

    assert fit(mlp(), each_layer, loss_geometry=CONVEX).num_blocks == 2
    with pytest.raises(hsa.UnsupportedRunError, match=REFUSED):
        fit(mlp(), BlockCoordinateUpdate, loss_geometry=CONVEX)


def test_the_callback(make_run):
    pytest.importorskip("tensorflow_privacy")
    run = make_run()
    run.model = tf.keras.Sequential([layers.Dense(3, "tanh"), layers.Dense(1)])
    run.model.compile(run.optimizer, tf.keras.losses.BinaryCrossentropy(True, reduction="none"))
    with pytest.raises(hsa.UnsupportedRunError, match=REFUSED):
        run.fit()


def test_no_text_advises_it():
    with pytest.raises(hsa.UnsupportedRunError) as error:
        fit(mlp(), loss_geometry="auto", feature_norm=1.0)
    assert "hidden_state_accountants.LossGeometry" not in str(error.value)
    assert "Leave out loss_geometry= and feature_norm=" in str(error.value)
