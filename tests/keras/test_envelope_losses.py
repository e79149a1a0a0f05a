"""Envelope losses in Keras: eagerly, in graphs, under XLA, and in a private run."""

import envelopes as envelope
import numpy as np
import pytest

pytest.importorskip("tensorflow_privacy")
import tensorflow as tf
from envelopes import batch
from keras_models import unit_rows

import hidden_state_accountants as hsa
from hidden_state_adapters.tf_privacy import (
    CyclicDPKerasSGDOptimizer,
    EnvelopeBinaryCrossentropy,
    EnvelopeCategoricalCrossentropy,
    EnvelopeHinge,
    EnvelopeSparseCategoricalCrossentropy,
    EnvelopeSquaredError,
    HiddenStateCallback,
    cyclic_dataset,
    losses,
)
from hidden_state_adapters.tf_privacy.gradients import ThroughLinearLayers
from hidden_state_adapters.tf_privacy.losses import RowLosses, known_loss

RANDOM = np.random.default_rng(0)
LOGITS, TARGETS = batch(12, 6, 4.0, 0, soft=True)
CLASSES = RANDOM.integers(6, size=12)
LINE, PAIRS = RANDOM.normal(size=(12, 1)) * 4, RANDOM.normal(size=(2, 12, 3)) * 2
CASES = {
    "categorical": (
        EnvelopeCategoricalCrossentropy, envelope.softmax_cross_entropy, LOGITS, TARGETS, {},
    ),
    "sparse": (
        EnvelopeSparseCategoricalCrossentropy, envelope.softmax_cross_entropy, LOGITS, CLASSES, {},
    ),
    "binary": (
        EnvelopeBinaryCrossentropy, envelope.logistic, LINE, RANDOM.random(size=(12, 1)), {},
    ),
    "hinge": (
        EnvelopeHinge, envelope.hinge, LINE, RANDOM.choice([-1.0, 1.0], size=(12, 1)), {},
    ),
    "squared": (EnvelopeSquaredError, envelope.squared_error, *PAIRS, {"scale": 3.0}),
}  # fmt: skip
WAYS = {
    "eager": lambda function: function,
    "graph": tf.function,
    "xla": lambda function: tf.function(function, jit_compile=True),
}


def make(case, clip_norm=0.3, smoothing=0.7, **more):
    kind, *_, settings = CASES[case]
    return kind(clip_norm, smoothing, reduction="none", **settings, **more)


def values_and_gradients(loss, targets, predictions, way="eager"):
    @WAYS[way]
    def run(targets, predictions):
        with tf.GradientTape() as tape:
            tape.watch(predictions)
            values = loss(targets, predictions)
        return values, tape.gradient(values, predictions)

    return [tensor.numpy() for tensor in run(tf.constant(targets), tf.constant(predictions))]


# Every loss in a graph, one in every way.
PAIRED = [*((name, "graph") for name in CASES), ("sparse", "eager"), ("sparse", "xla")]


@pytest.mark.parametrize(("name", "way"), PAIRED)
def test_they_are_those_of_numpy(name, way):
    _, reference, predictions, targets, more = CASES[name]
    for clip_norm, smoothing in [(0.3, 0.7), (5.0, 10.0)]:
        loss = make(name, clip_norm, smoothing)
        values, gradients = values_and_gradients(loss, targets, predictions, way)
        wanted = reference(predictions, targets, clip_norm=clip_norm, smoothing=smoothing, **more)
        np.testing.assert_allclose(values, wanted.value.reshape(-1), rtol=1e-12)
        np.testing.assert_allclose(gradients, wanted.gradient, atol=1e-13)


def test_single_precision_and_columns_of_targets():
    single = LOGITS.astype("float32")
    _, gradients = values_and_gradients(make("sparse"), CLASSES[:, None], single)
    wanted = envelope.softmax_cross_entropy(single, CLASSES, clip_norm=0.3, smoothing=0.7)
    np.testing.assert_array_equal(gradients, wanted.gradient.astype("float32"))


@pytest.mark.parametrize("way", ["eager", "xla"])
def test_records_that_need_the_slow_way(way, monkeypatch):
    """And no smoothing, where some records are solved from the start."""
    monkeypatch.setattr(losses, "NEWTON_STEPS", 2)
    # Another clip norm than elsewhere: what was traced for that one is kept.
    clip_norm = {"eager": 0.41, "xla": 0.43}[way]
    loss = make("categorical", clip_norm, 0.0)
    values, gradients = values_and_gradients(loss, TARGETS, LOGITS, way)
    wanted = envelope.softmax_cross_entropy(LOGITS, TARGETS, clip_norm=clip_norm)
    np.testing.assert_allclose(values, wanted.value, rtol=1e-11)
    np.testing.assert_allclose(gradients, wanted.gradient, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_configurations_make_equal_losses(name):
    loss = make(name, name="mine")
    copy = tf.keras.losses.deserialize(tf.keras.losses.serialize(loss))
    assert type(copy) is type(loss)
    assert copy.get_config() == loss.get_config()
    assert copy.geometry(1.5, bias=True) == loss.geometry(1.5, bias=True)


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("categorical", [0.5, 0.6, 0, 0, 0, 0]),
        ("categorical", [1.5, -0.5, 0, 0, 0, 0]),
        ("sparse", 6),
        ("sparse", -1),
        ("binary", 1.5),
        ("hinge", 0.0),
    ],
)
def test_bad_targets_are_no_numbers(name, bad):
    _, _, predictions, targets, _ = CASES[name]
    targets = targets.copy()
    targets[3] = bad
    for found in values_and_gradients(make(name), targets, predictions, "graph"):
        is_nan = np.isnan(found.reshape(12, -1)).any(axis=1)
        assert is_nan.tolist() == [i == 3 for i in range(12)]


@pytest.mark.parametrize(
    ("name", "targets", "predictions", "text"),
    [
        ("categorical", (4,), (4, 3), r"of shape \(3,\) each, got others, of shape \(\)"),
        ("sparse", (4, 3), (4, 3), r"of shape \(\) each, got others, of shape \(3,\)"),
        ("binary", (4, 3), (4, 3), "one output"),
        ("squared", (4, 3), (4, 2), r"of shape \(2,\) each, got others, of shape \(3,\)"),
        ("squared", (4, 1), (4,), None),
    ],
)
def test_shapes(name, targets, predictions, text):
    loss, given = make(name), (np.ones(targets), np.ones(predictions))
    if text is None:
        assert loss(*given).shape == [4]
        return
    with pytest.raises(ValueError, match=text):
        loss(*given)


# --- in a private run -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "outputs"),
    [("binary", 1), ("hinge", 1), ("sparse", 3), ("squared", 3), ("categorical", 6)],
)
def test_auto_geometry_is_what_the_loss_says(name, outputs):
    loss, targets = make(name), CLASSES % 3 if name == "sparse" else CASES[name][3]
    known = known_loss(RowLosses(loss), "linear", outputs, targets)
    for bias in (False, True):
        assert known.geometry(1.5, bias) == loss.geometry(1.5, bias)
    predictions = RANDOM.normal(size=(len(targets), outputs))
    values, slopes = values_and_gradients(loss, targets, predictions)
    found = known.evaluate(known.targets, tf.constant(predictions))
    np.testing.assert_allclose(found[0], values, rtol=1e-6)
    np.testing.assert_allclose(found[1], slopes, rtol=1e-6, atol=1e-7)


class Doubled(EnvelopeSquaredError):
    def _evaluate(self, predictions, targets):
        values, gradients = super()._evaluate(predictions, targets)
        return 2 * values, 2 * gradients


@pytest.mark.parametrize(
    ("loss", "outputs", "activation", "text"),
    [
        (make("binary"), 3, "linear", "one output for Envelope"),
        (make("categorical"), 3, "softmax", "activation 'linear'"),
        (make("hinge"), 1, "linear", "what EnvelopeHinge is made for as targets"),
        (Doubled(0.3, reduction="none"), 1, "linear", "of Keras, got Doubled"),
    ],
)
def test_auto_geometry_is_refused(loss, outputs, activation, text):
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        known_loss(RowLosses(loss), activation, outputs, np.zeros((4, outputs)))


def test_the_update_is_that_of_numpy():
    """A learning rate that needs a smoothing, with a clip norm at the longest gradient."""
    records, size, rate, decay = 24, 4, 9.0, 0.01
    x, y = unit_rows(records, 5, 3)
    curvature = EnvelopeSparseCategoricalCrossentropy.curvature
    smoothing = hsa.envelope_smoothing(
        rate, curvature=curvature, feature_norm=1.0, weight_decay=decay
    )
    loss = make("sparse", 0.3, smoothing)
    geometry = loss.geometry(1.0)
    optimizer = CyclicDPKerasSGDOptimizer(
        geometry.lipschitz, 0.0, learning_rate=rate, weight_decay=decay, loss_geometry=geometry
    )
    dense = tf.keras.layers.Dense(3, use_bias=False, kernel_initializer="zeros")
    model, data = tf.keras.Sequential([dense]), cyclic_dataset(x, y, batch_size=size)
    model.compile(optimizer, loss)
    model.fit(data, epochs=2, callbacks=[HiddenStateCallback(data=data)], verbose=0)
    weights = np.zeros((5, 3))
    for start in [*range(0, records, size)] * 2:
        part = slice(start, start + size)
        gradient = envelope.softmax_cross_entropy(
            x[part] @ weights, y[part], clip_norm=0.3, smoothing=smoothing
        ).gradient
        weights = (1 - rate * decay) * weights - rate * x[part].T @ gradient / size
    np.testing.assert_allclose(model.get_weights()[0], weights, atol=1e-5)


def test_without_a_geometry_they_are_differentiated_from_the_layer():
    """In one go: their loop cannot be vectorized, and takes every example by itself."""
    model, x, y = tf.keras.Sequential([tf.keras.layers.Dense(3)]), tf.ones([6, 2]), tf.range(6) % 3
    model(x)
    fast = ThroughLinearLayers.of(model, RowLosses(make("sparse")), model.weights, x)
    slopes = envelope.softmax_cross_entropy(
        model(x).numpy().astype(float), y.numpy(), clip_norm=0.3, smoothing=0.7
    ).gradient
    found = fast.gradients(x, y).norms
    np.testing.assert_allclose(found, np.linalg.norm(slopes, axis=1) * np.sqrt(3), rtol=1e-5)
