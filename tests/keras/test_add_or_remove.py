"""ADD_OR_REMOVE_ONE: nothing that is shown may be computed from the number of examples."""

import json

import numpy as np
import pytest

pytest.importorskip("tensorflow")
import keras_models
import tensorflow as tf
from keras_models import DELTA, SGD, crossentropy

import hidden_state_accountants as hsa
from hidden_state_adapters.tf_privacy import DiceUpdate, PrivateRun

pytestmark = pytest.mark.usefixtures("row_by_row", "without_graphs")

ADDS = {"neighboring_relation": "add_or_remove_one", "noise_multiplier": 20.0}
RULES = {"sgd": SGD, "dice": lambda rate: DiceUpdate(SGD(rate), error_l2_norm_clip=1.0)}


def data(examples):
    return np.eye(3, dtype="float32")[np.arange(examples) % 3], np.arange(examples) % 2


def model(rule="sgd", **settings):
    return keras_models.make(RULES[rule](1.0), **{"batch_order": None, **ADDS, **settings})


def fit(model, examples, **kwargs):
    x, y = data(examples)
    return keras_models.fit(model, **{"x": x, "y": y, "batch_size": 4, **kwargs})


def run(**settings):
    plain = tf.keras.Sequential([tf.keras.layers.Dense(2)])
    return PrivateRun(
        plain, *data(28), loss=crossentropy(), optimizer=SGD(1.0), batch_size=4,
        l2_norm_clip=1.0, **{**ADDS, **settings},
    )  # fmt: skip


@pytest.mark.parametrize("begin", [model, run])
@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, "constant rate and divisor.*sampling_rate= here and batch_size= to fit"),
        ({"sampling_rate": 0.1, "max_batch_size": 40}, "max_batch_size = None"),
        (
            {"sampling_rate": 0.1, "batch_order": "balls_in_bins"},
            "the number of batches follows from the number of examples",
        ),
        (
            {"sampling_rate": 0.1, "loss_geometry": hsa.LossGeometry.convex(1.0)},
            "loss_geometry = None",
        ),
        (
            {"sampling_rate": 0.1, "neighboring_relation": "replace_one"},
            "sampling_rate = None with REPLACE_ONE",
        ),
    ],
)
def test_what_follows_from_the_number_of_examples_is_refused(begin, settings, text):
    """Rate and divisor are 1/7 and 4 of 28 examples, and 1/6 and 4 of 27."""
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        begin(**settings)


@pytest.mark.parametrize("rule", RULES)
def test_nothing_follows_from_the_number_of_examples(rule):
    found = []
    for examples in (28, 27, 60, 3):
        trained = fit(model(rule, sampling_rate=1 / 7), examples)
        private = {"stays_private": True, "include_private_state": True} if rule == "dice" else {}
        state = trained.state(**private)
        found.append((trained.privacy_event, trained.report(DELTA), state["examples"]))
    assert (found[0][0].num_steps, found[0][0].batch_size) == (7, 4)
    assert found == found[:1] * 4
    assert "not computed from the examples or their number" in " ".join(found[0][1].split())


def test_noise_for_a_target_does_not_either():
    noises = set()
    for examples in (28, 27):
        trained = model(noise_multiplier=None, sampling_rate=1 / 7)
        fit(trained, examples, target_epsilon=1.0, target_delta=DELTA)
        noises.add(trained.noise_multiplier)
    assert len(noises) == 1


def test_the_step_divides_by_the_constant():
    """Without noise, of all 30 examples, each of which has a gradient of norm 1 after the clip."""
    trained = model(noise_multiplier=0.0, sampling_rate=1.0, l2_norm_clip=1e-3)
    x, y = data(30)
    trained.build((None, 3))
    before = trained.get_weights()
    fit(trained, 30, x=x[:1].repeat(30, 0), y=y[:1].repeat(30), batch_size=20)
    moved = [b - a for a, b in zip(before, trained.get_weights(), strict=True)]
    length = np.sqrt(sum((part**2).sum() for part in moved))
    assert length == pytest.approx(30 / 20 * 1e-3, rel=1e-3)


def test_a_model_is_saved_and_goes_on(tmp_path):
    trained = fit(model(sampling_rate=1 / 7), 30)
    state = json.loads(json.dumps(trained.state()))
    trained.save(tmp_path / "model.keras")
    again = tf.keras.models.load_model(tmp_path / "model.keras")
    again.resume(state)
    assert fit(again, 30).privacy_event.num_steps == 14
