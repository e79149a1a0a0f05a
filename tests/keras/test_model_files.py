"""A file of a model that owns its run holds what it trains by, and training goes on from it."""

import json

import numpy as np
import pytest

pytest.importorskip("tensorflow")
import keras_models
import tensorflow as tf
from keras_models import SGD, X, fit

import hidden_state_accountants as hsa
from hidden_state_adapters.tf_privacy import (
    BlockCoordinateUpdate,
    DiceUpdate,
    keras_api,
    lineage,
)

pytestmark = pytest.mark.usefixtures("row_by_row", "without_graphs")
SECRET = {"stays_private": True, "include_private_state": True}


def by_layers(model):
    return BlockCoordinateUpdate(
        SGD(0.5), lambda: [layer.trainable_variables for layer in reversed(model.layers)]
    )


MECHANISMS = {
    "sgd": lambda model: SGD(0.5, weight_decay=0.1),
    "dice": lambda model: DiceUpdate(
        SGD(0.5), error_l2_norm_clip=0.05, automatic=True, gradient_bound=100.0
    ),
    "dice, settings left out": lambda model: DiceUpdate(SGD(0.5)),
    "blocks": by_layers,
    "blocks by places": lambda model: BlockCoordinateUpdate(SGD(0.5), [[2, 3], [0, 1]]),
    "one block": lambda model: BlockCoordinateUpdate(SGD(0.5)),
}
KERAS_2_ONLY = pytest.mark.skipif(keras_api.IS_KERAS_3, reason="is refused, or has no such format")


@pytest.fixture(autouse=True)
def _in_a_new_process():
    new_process()


def new_process():
    lineage._newest.clear()


def make(mechanism, noise=2.0):
    stack = [tf.keras.layers.Dense(2), tf.keras.layers.Dense(2)]
    model = keras_models.make(None, stack, l2_norm_clip=0.3, noise_multiplier=noise)
    model.build(X.shape)
    model.compile(MECHANISMS[mechanism](model), keras_models.crossentropy())
    return model


def through(path, model):
    model.save(path)
    new_process()
    return tf.keras.models.load_model(path)


def files(mechanisms):
    """Every mechanism in one format, every format with several of them; else exhaustive."""
    for first, mechanism in enumerate(mechanisms):
        for place, name in enumerate(("model.keras", "model.h5", "folder")):
            marks = [KERAS_2_ONLY] if place else []
            if place != first % 3:
                marks.append(pytest.mark.exhaustive)
            yield pytest.param(name, mechanism, marks=marks)


@pytest.mark.parametrize(("name", "mechanism"), files(MECHANISMS))
def test_training_goes_on_as_if_there_had_been_no_file(name, mechanism, tmp_path):
    model = fit(make(mechanism, noise=0.0))
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


@pytest.mark.parametrize(("name", "mechanism"), files(["sgd", "dice", "blocks"]))
def test_without_resume_another_run_of_the_mechanism_follows(name, mechanism, tmp_path):
    model = fit(make(mechanism))
    for _ in range(2):
        model = through(str(tmp_path / name), model)
        with pytest.raises(ValueError, match=r"come from private runs.*keep its report"):
            model.get_epsilon(1e-5)
        fit(model)
    events = model.privacy_events
    assert {type(event) for event in events} == {type(make_event(mechanism))}
    assert [event.num_steps for event in events] == [events[0].num_steps] * 3


def make_event(mechanism):
    new_process()
    return fit(make(mechanism)).privacy_event


def test_a_model_that_is_compiled_by_hand_has_what_it_was_compiled_with(tmp_path):
    path = str(tmp_path / "model.keras")
    model = fit(make("dice"))
    state = model.state(**SECRET)
    model.save(path)
    new_process()
    again = tf.keras.models.load_model(path, compile=False)
    again.compile(SGD(0.5), keras_models.crossentropy())
    assert "update_rule" not in again.get_config()
    again.resume(state)
    with pytest.raises(hsa.UnsupportedRunError, match="Expected optimizer = HiddenStateModel"):
        fit(again)


def test_blocks_of_another_model_are_not_written():
    model, other = make("sgd"), make("sgd")
    model.compile(by_layers(other), "mse")
    with pytest.raises(hsa.UnsupportedRunError, match="together the trainable variables"):
        model.get_config()


@pytest.mark.skipif(not keras_api.IS_KERAS_3, reason="Keras 2 says that it reads a file")
def test_keras_3_writes_no_file_that_it_would_read_as_another_algorithm(tmp_path):
    with pytest.raises(hsa.UnsupportedRunError, match=r"Save as \.keras"):
        make("dice").save(tmp_path / "model.h5")
