"""Files of models: each is a release, tells of the runs behind its weights, and trains on."""

import json

import numpy as np
import pytest

pytest.importorskip("tensorflow")
import keras_models
import tensorflow as tf
from keras_models import DELTA, SGD, STEPS, X, Y, fit

import hidden_state_accountants as hsa
import hidden_state_adapters.tf_privacy as adapter
from hidden_state_adapters.tf_privacy import (
    BlockCoordinateUpdate,
    DiceUpdate,
    HiddenStateSequential,
    PrivateRun,
    keras_api,
    lineage,
    make_private,
)

pytestmark = pytest.mark.usefixtures("row_by_row", "without_graphs")
callbacks, layers = tf.keras.callbacks, tf.keras.layers
SECRET = {"stays_private": True, "include_private_state": True}
KERAS_2_ONLY = pytest.mark.skipif(keras_api.IS_KERAS_3, reason="is refused, or has no such format")


@pytest.fixture(autouse=True)
def _in_a_new_process():
    new_process()


def new_process():
    """Nothing is known but what a file tells."""
    lineage._newest.clear()


def two_layers(optimizer, **settings):
    model = keras_models.make(None, [layers.Dense(2), layers.Dense(2)], **settings)
    model.build(X.shape)
    return compiled(model, optimizer(model) if callable(optimizer) else optimizer)


def compiled(model, optimizer=None):
    model.compile(optimizer or SGD(0.1), keras_models.crossentropy())
    return model


def through(path, model):
    model.save(path)
    new_process()
    return tf.keras.models.load_model(path)


# What is in a file


def by_layers(model):
    return BlockCoordinateUpdate(
        SGD(0.5), lambda: [layer.trainable_variables for layer in reversed(model.layers)]
    )


MECHANISMS = {
    "sgd": lambda model: SGD(0.5, weight_decay=0.1),
    "dice": lambda model: DiceUpdate(
        SGD(0.5), error_l2_norm_clip=0.05, automatic=True, gradient_bound=100.0
    ),
    "blocks": by_layers,
    "dice, settings left out": lambda model: DiceUpdate(SGD(0.5)),
    "blocks by places": lambda model: BlockCoordinateUpdate(SGD(0.5), [[2, 3], [0, 1]]),
    "one block": lambda model: BlockCoordinateUpdate(SGD(0.5)),
}


def files(mechanisms):
    """Every mechanism in one format, every format with several of them; else exhaustive."""
    for first, mechanism in enumerate(mechanisms):
        for place, name in enumerate(("model.keras", "model.h5", "folder")):
            marks = [KERAS_2_ONLY] if place else []
            if place != first % 3:
                marks.append(pytest.mark.exhaustive)
            yield pytest.param(name, mechanism, marks=marks)


@pytest.mark.parametrize(("name", "mechanism"), [*files(MECHANISMS)])
def test_training_goes_on_as_if_there_had_been_no_file(name, mechanism, tmp_path):
    model = fit(two_layers(MECHANISMS[mechanism], l2_norm_clip=0.3, noise_multiplier=0.0))
    state = json.loads(json.dumps(model.state(**SECRET)))
    again = through(str(tmp_path / name), model)
    whole, event = fit(model).get_weights(), model.privacy_event
    new_process()
    again.resume(state)
    fit(again)
    for own, other in zip(again.get_weights(), whole, strict=True):
        np.testing.assert_array_equal(own, other)
    assert again.privacy_events == (event,)
    own, other = again.get_config(), model.get_config()
    for config in (own, other):  # layers are Keras' business, which adds shapes when it loads them
        del config["layers"]
    assert own == other


@pytest.mark.parametrize(("name", "mechanism"), [*files([*MECHANISMS][:3])])
def test_without_resume_another_run_of_the_mechanism_follows(name, mechanism, tmp_path):
    model = fit(two_layers(MECHANISMS[mechanism]))
    kind = type(model.privacy_event)
    for _ in range(2):
        model = through(str(tmp_path / name), model)
        with pytest.raises(ValueError, match="Call fit"):
            model.get_epsilon(DELTA)
        fit(model)
    assert [(type(event), event.num_steps) for event in model.privacy_events] == [(kind, STEPS)] * 3


def test_a_model_that_is_compiled_by_hand_has_what_it_was_compiled_with(tmp_path):
    path = str(tmp_path / "model.keras")
    model = fit(two_layers(MECHANISMS["dice"]))
    state = model.state(**SECRET)
    model.save(path)
    new_process()
    again = compiled(tf.keras.models.load_model(path, compile=False), SGD(0.5))
    assert "update_rule" not in again.get_config()
    again.resume(state)
    with pytest.raises(hsa.UnsupportedRunError, match="Expected optimizer = HiddenStateModel"):
        fit(again)


def test_blocks_of_another_model_are_not_written():
    model, other = two_layers(SGD(0.5)), two_layers(SGD(0.5))
    compiled(model, by_layers(other))
    with pytest.raises(hsa.UnsupportedRunError, match="together the trainable variables"):
        model.get_config()


@pytest.mark.skipif(not keras_api.IS_KERAS_3, reason="Keras 2 says that it reads a file")
def test_keras_3_writes_no_file_that_it_would_read_as_another_algorithm(tmp_path):
    with pytest.raises(hsa.UnsupportedRunError, match=r"Save as \.keras"):
        two_layers(MECHANISMS["dice"]).save(tmp_path / "model.h5")


# The runs behind the weights in it


def steps_of(model):
    return [event.num_steps for event in model.privacy_events]


def interrupt(hook):
    def stop(*_, **__):
        raise KeyboardInterrupt

    return callbacks.LambdaCallback(**{hook: stop})


def test_a_model_that_was_compiled_again_before_it_was_saved(tmp_path):
    model = compiled(fit(two_layers(SGD(0.1)), epochs=2))
    assert steps_of(fit(compiled(through(tmp_path / "model.keras", model)))) == [2 * STEPS, STEPS]


def test_a_fit_without_a_step_forgets_nothing(tmp_path):
    path = tmp_path / "model.keras"
    model = compiled(through(path, fit(two_layers(SGD(0.1)))))
    with pytest.raises(KeyboardInterrupt):
        fit(model, callbacks=[interrupt("on_train_begin")])
    assert steps_of(fit(compiled(through(path, model)))) == [STEPS, STEPS]


def test_layers_that_a_later_run_left_alone(tmp_path):
    model = fit(two_layers(SGD(0.1)), epochs=2)
    model.layers[0].trainable = False
    base = through(tmp_path / "model.keras", fit(compiled(model))).layers[0]
    other = HiddenStateSequential([base, layers.Dense(2)], l2_norm_clip=1.0, noise_multiplier=2.0)
    assert steps_of(fit(compiled(other))) == [2 * STEPS, STEPS, STEPS]


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_epoch_end"])
def test_layers_of_a_fit_that_was_interrupted(hook):
    model = two_layers(SGD(0.1))
    with pytest.raises(KeyboardInterrupt):
        fit(model, callbacks=[interrupt(hook)])
    with pytest.raises(hsa.UnsupportedRunError, match="interrupted"):
        model.get_epsilon(DELTA)
    other = HiddenStateSequential([*model.layers], l2_norm_clip=1.0, noise_multiplier=2.0)
    with pytest.raises(hsa.UnsupportedRunError, match="interrupted"):
        fit(compiled(other))


@pytest.mark.parametrize("stops", [True, False], ids=["stopped", "best"])
def test_a_file_that_was_chosen_holds_every_epoch_that_could_be(stops, tmp_path):
    """The file of the first epoch would otherwise tell of that epoch only."""
    path = str(tmp_path / "{epoch}.keras")
    best = callbacks.ModelCheckpoint(path, monitor="val_loss", save_best_only=True)
    stop = callbacks.EarlyStopping("val_loss", patience=1, min_delta=100.0)
    seen = [callbacks.ModelCheckpoint(path), stop] if stops else [best]
    model = two_layers(SGD(0.1), validation_data_is_public=True)
    fit(model, callbacks=seen, epochs=4, validation_data=(X, Y))
    assert steps_of(model) == [4 * STEPS]
    new_process()
    again = fit(compiled(tf.keras.models.load_model(path.format(epoch=1))))
    assert steps_of(again) == [4 * STEPS, STEPS]


# Each is a release

SETTINGS = {
    "l2_norm_clip": 1.5,
    "noise_multiplier": 2.0,
    "batch_order": "cyclic",
    "loss_geometry": hsa.LossGeometry.softmax_cross_entropy(1.0, bias=True),
}
WRITES = {
    "save": lambda model: model.save("model.keras"),
    "save_h5": lambda model: model.save("model.h5"),
    "save_weights": lambda model: model.save_weights("model.weights.h5"),
    "export": lambda model: model.export("folder"),
}


def functional():
    inputs = tf.keras.Input((3,))
    return tf.keras.Model(inputs, layers.Dense(2)(inputs))


def sequential():
    return tf.keras.Sequential([layers.Dense(2)])


class OfAModel:
    """A private model, which fit trains epoch by epoch."""

    def __init__(self, plain=sequential, **settings):
        self.told = self.model = compiled(make_private(plain(), **SETTINGS, **settings), SGD(0.5))

    def epoch(self):
        fit(self.model)


class OfALoop:
    def __init__(self, **settings):
        self.model = sequential()
        self.told = PrivateRun(
            self.model, X, Y, loss=keras_models.crossentropy(), optimizer=SGD(0.5), batch_size=4,
            **SETTINGS, **settings,
        )  # fmt: skip

    def epoch(self):
        self.told.train(1, verbose=False)


class OfACallback:
    def __init__(self, **settings):
        pytest.importorskip("tensorflow_privacy")
        optimizer = adapter.CyclicDPKerasSGDOptimizer(1.5, 2.0, learning_rate=0.5)
        self.model = sequential()
        each = keras_models.crossentropy(reduction="none")
        self.model.compile(optimizer, each, run_eagerly=True)
        self.data = adapter.cyclic_dataset(X, Y, batch_size=4)
        geometry = SETTINGS["loss_geometry"]
        self.told = adapter.HiddenStateCallback(self.data, loss_geometry=geometry, **settings)

    def epoch(self, after=(), first=()):
        self.model.fit(self.data, callbacks=[*first, self.told, *after], verbose=0)


KINDS = {
    "sequential": OfAModel,
    "functional": lambda **settings: OfAModel(functional, **settings),
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
    for _ in range(2):
        trained.epoch()
        write(trained.model)
    trained.epoch()
    assert released(trained) == [3, 6]
    epsilon = trained.told.get_epsilon(DELTA)
    event = trained.told.privacy_event
    assert epsilon == hsa.LastIterateAccountant().compose(event).get_epsilon(DELTA)
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


@pytest.mark.parametrize("place", ["after", "first"])
def test_a_callback_that_writes_after_every_step(place):
    """Also one that comes before the callback that records."""
    trained = OfACallback()

    def write(batch, logs):
        if batch == 1:
            trained.model.save_weights("model.weights.h5")

    trained.epoch(**{place: [callbacks.LambdaCallback(on_train_batch_end=write)]})
    assert released(trained) == [2]


def inside_of_another(given):
    given.build((None, 3))
    return HiddenStateSequential([given], **SETTINGS)


def wrapped(given):
    return make_private(given, **SETTINGS)


@pytest.mark.parametrize(
    ("plain", "around"),
    [(sequential, wrapped), (functional, wrapped), (sequential, inside_of_another)],
)
def test_the_model_that_was_made_private_or_a_part_of_it_is_saved(plain, around):
    """1.113 was reported of a run whose epochs were all saved, which is 2.258."""
    given = plain()
    model = compiled(around(given))
    for _ in range(2):
        fit(model)
        given(X)
        given.save("model.keras")
    fit(model)
    assert list(model.privacy_event.release_steps) == [3, 6]


def test_a_part_that_is_not_trained_is_saved():
    part = tf.keras.Sequential([tf.keras.Input((3,)), layers.Dense(4)])
    part.trainable = False
    model = compiled(HiddenStateSequential([part, layers.Dense(2)], **SETTINGS))
    fit(model)
    part.save("model.keras")
    fit(model)
    assert list(model.privacy_event.release_steps) == []
