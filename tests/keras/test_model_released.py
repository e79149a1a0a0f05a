"""A file of the trained model is a release of the iterate in it, as that of ModelCheckpoint is."""

import numpy as np
import pytest

pytest.importorskip("tensorflow")
import tensorflow as tf

import hidden_state_adapters.tf_privacy as adapter
from hidden_state_accountants import LastIterateAccountant, LossGeometry
from hidden_state_adapters.tf_privacy import (
    HiddenStateModel,
    HiddenStateSequential,
    PrivateRun,
    make_private,
)

pytestmark = pytest.mark.usefixtures("row_by_row", "without_graphs")
DELTA, EPOCHS = 1e-5, 3
X = np.eye(4, dtype="float32")[np.arange(12) % 4]
Y = np.arange(12) % 2
SETTINGS = {
    "l2_norm_clip": 1.5,
    "noise_multiplier": 2.0,
    "batch_order": "cyclic",
    "loss_geometry": LossGeometry.softmax_cross_entropy(1.0, bias=True),
}
WRITES = {
    "save": lambda model: model.save("model.keras"),
    "save_h5": lambda model: model.save("model.h5"),
    "save_weights": lambda model: model.save_weights("model.weights.h5"),
    "export": lambda model: model.export("folder"),
}


def loss():
    return tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def sgd():
    return tf.keras.optimizers.SGD(0.5, weight_decay=0.1)


class OfAModel:
    """A private model, which fit trains epoch by epoch."""

    def __init__(self, functional=False, **settings):
        stack = [tf.keras.layers.Dense(2)]
        if functional:
            inputs = tf.keras.Input((4,))
            self.model = HiddenStateModel(inputs, stack[0](inputs), **SETTINGS, **settings)
        else:
            self.model = HiddenStateSequential(stack, **SETTINGS, **settings)
        self.model.compile(sgd(), loss())
        self.told = self.model

    def epoch(self, **kwargs):
        self.model.fit(X, Y, batch_size=4, verbose=0, **kwargs)


class OfALoop(OfAModel):
    def __init__(self, **settings):
        self.model = tf.keras.Sequential([tf.keras.layers.Dense(2)])
        self.told = PrivateRun(
            self.model, X, Y, loss=loss(), optimizer=sgd(), batch_size=4, **SETTINGS, **settings
        )

    def epoch(self):
        self.told.train(1, verbose=False)


class OfACallback(OfAModel):
    def __init__(self, **settings):
        pytest.importorskip("tensorflow_privacy")
        clip, noise, geometry = (SETTINGS[n] for n in SETTINGS if n != "batch_order")
        optimizer = adapter.CyclicDPKerasSGDOptimizer(clip, noise, learning_rate=0.5)
        self.model = tf.keras.Sequential([tf.keras.layers.Dense(2)])
        each = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
        self.model.compile(optimizer, each, run_eagerly=True)
        self.data = adapter.cyclic_dataset(X, Y, batch_size=4)
        self.told = adapter.HiddenStateCallback(data=self.data, loss_geometry=geometry, **settings)

    def epoch(self, callbacks=(), first=()):
        every = [*first, self.told, *callbacks]
        self.model.fit(self.data, callbacks=every, verbose=0)


KINDS = {
    "sequential": OfAModel,
    "functional": lambda **settings: OfAModel(functional=True, **settings),
    "loop": OfALoop,
    "callback": OfACallback,
}


def released(trained):
    return list(trained.told.privacy_event.release_steps)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("sequential", name) for name in WRITES),
        ("functional", "save"),
        ("loop", "save_weights"),
        ("callback", "save_weights"),
    ],
)
def test_a_file_of_every_epoch_is_a_release(kind, name):
    trained, write = KINDS[kind](), WRITES[name]
    for _ in range(EPOCHS - 1):
        trained.epoch()
        write(trained.model)
    trained.epoch()
    assert released(trained) == [3, 6]
    event = trained.told.privacy_event
    epsilon = trained.told.get_epsilon(DELTA)
    assert epsilon == LastIterateAccountant().compose(event).get_epsilon(DELTA)
    write(trained.model)  # of the last iterate
    assert trained.told.get_epsilon(DELTA) == epsilon
    trained.epoch()
    assert released(trained) == [3, 6, 9]


@pytest.mark.parametrize("kind", ["sequential", "callback"])
def test_files_that_stay_private(kind):
    trained = KINDS[kind](checkpoints_stay_private=True)
    trained.epoch()
    trained.model.save_weights("model.weights.h5")
    trained.epoch()
    assert released(trained) == []
    listed = " ".join(a.text for a in trained.told.assumptions)
    assert "save_weights and export wrote before the last step stay private" in listed


@pytest.mark.parametrize("kind", ["sequential", "loop"])
def test_a_state_that_stays_private_covers_the_weights_saved_with_it(kind):
    trained = KINDS[kind]()
    trained.epoch()
    trained.told.state(stays_private=True)
    trained.model.save_weights("model.weights.h5")
    trained.epoch()
    assert released(trained) == []
    trained.model.save_weights("model.weights.h5")
    trained.epoch()
    assert released(trained) == [6]


@pytest.mark.parametrize("place", ["callbacks", "first"])
def test_a_callback_that_writes_after_every_step(place):
    """Also one that comes before the callback that records."""
    trained = OfACallback()

    def write(batch, logs):
        if batch == 1:
            trained.model.save_weights("model.weights.h5")

    trained.epoch(**{place: [tf.keras.callbacks.LambdaCallback(on_train_batch_end=write)]})
    assert released(trained) == [2]


def of_a_sequential_model():
    given = tf.keras.Sequential([tf.keras.layers.Dense(2)])
    return given, make_private(given, **SETTINGS)


def of_a_functional_model():
    inputs = tf.keras.Input((4,))
    given = tf.keras.Model(inputs, tf.keras.layers.Dense(2)(inputs))
    return given, make_private(given, **SETTINGS)


def inside_of_another():
    given = tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(2)])
    return given, HiddenStateSequential([given], **SETTINGS)


@pytest.mark.parametrize("make", [of_a_sequential_model, of_a_functional_model, inside_of_another])
def test_the_model_that_was_made_private_or_a_part_of_it_is_saved(make):
    """1.113 was reported of a run whose epochs were all saved, which is 2.258."""
    given, model = make()
    model.compile(sgd(), loss())
    for _ in range(2):
        model.fit(X, Y, batch_size=4, verbose=0)
        given(X)
        given.save("model.keras")
    model.fit(X, Y, batch_size=4, verbose=0)
    assert list(model.privacy_event.release_steps) == [3, 6]


def test_a_part_that_is_not_trained_is_saved():
    part = tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(4)])
    part.trainable = False
    model = HiddenStateSequential([part, tf.keras.layers.Dense(2)], **SETTINGS)
    model.compile(sgd(), loss())
    model.fit(X, Y, batch_size=4, verbose=0)
    part.save("model.keras")
    model.fit(X, Y, batch_size=4, verbose=0)
    assert list(model.privacy_event.release_steps) == []
