"""A loss is convex in one trained layer: in the product of two it is not."""

import pytest

pytest.importorskip("tensorflow")
import keras_models
import tensorflow as tf
from keras_models import SGD, X, Y

import hidden_state_accountants as hsa
from hidden_state_adapters.tf_privacy import BlockCoordinateUpdate, PrivateRun

CONVEX, SMOOTH = hsa.LossGeometry.convex(1.0), hsa.LossGeometry.smooth(2.0)
REFUSED = "got .*dense.*, .*dense.*: no loss is convex in the weights of layers"
layers = tf.keras.layers
pytestmark = pytest.mark.usefixtures("without_graphs")


def mlp():
    return [layers.Dense(3, "tanh"), layers.Dense(2)]


def fit(own_layers, update=None, **settings):
    optimizer = SGD(0.1) if update is None else update(SGD(0.1))
    model = keras_models.make(optimizer, own_layers, compile={"run_eagerly": True}, **settings)
    return keras_models.fit(model).privacy_event


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
            tf.keras.Sequential(mlp()), X, Y, loss=keras_models.crossentropy(), optimizer=SGD(0.1),
            batch_size=4, l2_norm_clip=1.0, noise_multiplier=2.0, loss_geometry=CONVEX,
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
