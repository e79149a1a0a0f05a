"""Envelope losses in Keras: eagerly, in graphs, under XLA, and in a private run."""

import numpy as np
import pytest

pytest.importorskip("tensorflow_privacy")
import envelopes as envelope
import tensorflow as tf
from envelopes import batch

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


def values_and_gradients(loss, targets, predictions, way="eager"):
    @WAYS[way]
    def run(targets, predictions):
        with tf.GradientTape() as tape:
            tape.watch(predictions)
            values = loss(targets, predictions)
        return values, tape.gradient(values, predictions)

    return [tensor.numpy() for tensor in run(tf.constant(targets), tf.constant(predictions))]


def expected(name, clip_norm, smoothing):
    _, reference, predictions, targets, more = CASES[name]
    return reference(predictions, targets, clip_norm=clip_norm, smoothing=smoothing, **more)


# Every loss in a graph, one in every way.
PAIRED = [*((name, "graph") for name in CASES), ("sparse", "eager"), ("sparse", "xla")]


@pytest.mark.parametrize(("name", "way"), PAIRED)
def test_they_are_those_of_numpy(name, way):
    kind, _, predictions, targets, more = CASES[name]
    for clip_norm, smoothing in [(0.3, 0.7), (5.0, 10.0)]:
        loss = kind(clip_norm, smoothing, reduction="none", **more)
        values, gradients = values_and_gradients(loss, targets, predictions, way)
        wanted = expected(name, clip_norm, smoothing)
        np.testing.assert_allclose(values, wanted.value.reshape(-1), rtol=1e-12)
        np.testing.assert_allclose(gradients, wanted.gradient, atol=1e-13)


@pytest.mark.parametrize("way", ["eager", "xla"])
def test_records_that_need_the_slow_way(way, monkeypatch):
    """And no smoothing, where some records are solved from the start."""
    monkeypatch.setattr(losses, "NEWTON_STEPS", 2)
    # Another clip norm than elsewhere: what was traced for that one is kept.
    clip_norm = {"eager": 0.41, "xla": 0.43}[way]
    loss = EnvelopeCategoricalCrossentropy(clip_norm, reduction="none")
    values, gradients = values_and_gradients(loss, TARGETS, LOGITS, way)
    wanted = envelope.softmax_cross_entropy(LOGITS, TARGETS, clip_norm=clip_norm)
    np.testing.assert_allclose(values, wanted.value, rtol=1e-11)
    np.testing.assert_allclose(gradients, wanted.gradient, atol=1e-12)


def test_extreme_logits_and_batches_of_any_size():
    loss = EnvelopeSparseCategoricalCrossentropy(0.3, 2.0, reduction="none")
    for rows, classes, scale in [(5, 6, 1e4), (1, 100, 30.0)]:
        logits, targets = batch(rows, classes, scale, rows)
        _, gradients = values_and_gradients(loss, targets.argmax(axis=1), logits)
        wanted = envelope.softmax_cross_entropy(logits, targets, clip_norm=0.3, smoothing=2.0)
        np.testing.assert_allclose(gradients, wanted.gradient, atol=1e-10)
        assert np.linalg.norm(gradients, axis=1).max() <= 0.3 * (1 + 1e-15)


@pytest.mark.parametrize("name", ["categorical", "squared"])
def test_gradients_of_single_examples(name):
    """As the private optimizers take them: the Jacobian of the losses."""
    kind, _, predictions, targets, more = CASES[name]
    loss = kind(0.3, 0.7, reduction="none", **more)
    x = np.random.default_rng(1).normal(size=(12, 4))
    kernel = tf.Variable(np.linalg.pinv(x) @ predictions)

    @tf.function
    def jacobian():
        with tf.GradientTape() as tape:
            values = loss(targets, tf.constant(x) @ kernel)
        return tape.jacobian(values, kernel)

    reference = CASES[name][1](
        x @ kernel.numpy(), targets, clip_norm=0.3, smoothing=0.7, **more
    ).gradient
    np.testing.assert_allclose(jacobian(), np.einsum("nd,nk->ndk", x, reference), atol=1e-12)


def test_reductions_and_precisions():
    single = LOGITS.astype("float32"), CLASSES
    wanted = envelope.softmax_cross_entropy(*single, clip_norm=0.3, smoothing=0.7)
    for reduction, value in [("sum", wanted.value.sum()), ("auto", wanted.value.mean())]:
        loss = EnvelopeSparseCategoricalCrossentropy(0.3, 0.7, reduction=reduction)
        found, gradients = values_and_gradients(loss, CLASSES, single[0])
        assert found == pytest.approx(value, rel=1e-6)
        assert gradients.dtype == np.float32
    loss = EnvelopeSparseCategoricalCrossentropy(0.3, 0.7, reduction="none")
    _, gradients = values_and_gradients(loss, CLASSES[:, None], single[0])
    np.testing.assert_array_equal(gradients, wanted.gradient.astype("float32"))


@pytest.mark.parametrize("name", CASES)
def test_configurations_make_equal_losses(name):
    kind, _, _, _, more = CASES[name]
    loss = kind(0.3, 0.7, reduction="none", name="mine", **more)
    copy = tf.keras.losses.deserialize(tf.keras.losses.serialize(loss))
    assert type(copy) is kind
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
    kind, _, predictions, targets, more = CASES[name]
    targets = targets.copy()
    targets[3] = bad
    loss = kind(0.3, 0.7, reduction="none", **more)
    for found in values_and_gradients(loss, targets, predictions, "graph"):
        is_nan = np.isnan(found.reshape(12, -1)).any(axis=1)
        assert is_nan.tolist() == [i == 3 for i in range(12)]


@pytest.mark.parametrize(
    ("loss", "targets", "predictions", "error", "text"),
    [
        (EnvelopeCategoricalCrossentropy(0.3), np.ones(4), np.ones((4, 3)), ValueError,
         "of shape \\(3,\\) each, got others, of shape \\(\\)"),
        (EnvelopeSparseCategoricalCrossentropy(0.3), np.ones((4, 3), int), np.ones((4, 3)),
         ValueError, "of shape \\(\\) each, got others, of shape \\(3,\\)"),
        (EnvelopeBinaryCrossentropy(0.3), np.ones((4, 3)), np.ones((4, 3)), ValueError,
         "one output"),
        (EnvelopeSquaredError(0.3), np.ones((4, 3)), np.ones((4, 2)), ValueError,
         "of shape \\(3?2?,\\) each, got others, of shape \\(3,\\)"),
    ],
)  # fmt: skip
def test_bad_predictions_and_targets(loss, targets, predictions, error, text):
    with pytest.raises(error, match=text):
        loss(targets, predictions)


# --- in a private run -----------------------------------------------------------------------------

CLIP, RATE, DECAY, RECORDS, BATCH = 0.3, 9.0, 0.01, 24, 4


def private_run(targets=None, noise=2.0, **compile):
    """A learning rate that needs a smoothing, with a clip norm at the longest gradient."""
    random = np.random.default_rng(1)
    x = random.normal(size=(RECORDS, 5))
    x = (x / np.linalg.norm(x, axis=1, keepdims=True)).astype("float32")
    y = random.integers(3, size=RECORDS) if targets is None else targets
    smoothing = hsa.envelope_smoothing(
        RATE,
        curvature=EnvelopeSparseCategoricalCrossentropy.curvature,
        feature_norm=1.0,
        weight_decay=DECAY,
    )
    loss = EnvelopeSparseCategoricalCrossentropy(CLIP, smoothing, reduction="none")
    geometry = loss.geometry(1.0)
    optimizer = CyclicDPKerasSGDOptimizer(
        geometry.lipschitz, noise, learning_rate=RATE, weight_decay=DECAY, loss_geometry=geometry
    )
    dense = tf.keras.layers.Dense(3, use_bias=False, kernel_initializer="zeros")
    model = tf.keras.Sequential([dense])
    model.compile(optimizer, loss, **compile)
    data = cyclic_dataset(x, y, batch_size=BATCH)
    return model, HiddenStateCallback(data=data), data


AUTO_CASES = [
    *((name, 1, {"use_bias": bias}) for name in ("binary", "hinge") for bias in (False, True)),
    *((name, 3, {"use_bias": bias}) for name in ("sparse", "squared") for bias in (False, True)),
    ("categorical", 6, {}),
]


@pytest.mark.parametrize(("name", "outputs", "dense"), AUTO_CASES)
def test_auto_geometry_is_what_the_loss_says(name, outputs, dense):
    kind, _, _, _, more = CASES[name]
    loss = kind(0.3, 0.7, reduction="none", **more)
    targets = {
        "binary": np.ones((12, 1)), "hinge": np.ones((12, 1)), "sparse": CLASSES % 3,
        "squared": PAIRS[1], "categorical": TARGETS,
    }[name]  # fmt: skip
    bias = dense.get("use_bias", True)
    known = known_loss(RowLosses(loss), "linear", outputs, targets)
    assert known.geometry(1.5, bias) == loss.geometry(1.5, bias)
    predictions = tf.constant(np.random.default_rng(0).normal(size=(len(targets), outputs)))
    with tf.GradientTape() as tape:
        tape.watch(predictions)
        values = loss(tf.constant(targets), predictions)
    found = known.evaluate(known.targets, predictions)
    np.testing.assert_allclose(found[0], values, rtol=1e-6)
    np.testing.assert_allclose(found[1], tape.gradient(values, predictions), rtol=1e-6, atol=1e-7)


class Doubled(EnvelopeSquaredError):
    def _evaluate(self, predictions, targets):
        values, gradients = super()._evaluate(predictions, targets)
        return 2 * values, 2 * gradients


@pytest.mark.parametrize(
    ("loss", "outputs", "activation", "text"),
    [
        (EnvelopeBinaryCrossentropy(0.3, reduction="none"), 3, "linear", "one output for Envelope"),
        (EnvelopeHinge(0.3, 1.0, reduction="none"), 2, "linear", "one output for Envelope"),
        (EnvelopeBinaryCrossentropy(0.3, reduction="none"), 1, "sigmoid", "activation 'linear'"),
        (EnvelopeCategoricalCrossentropy(0.3, reduction="none"), 3, "softmax",
         "activation 'linear'"),
        (Doubled(0.3, reduction="none"), 1, "linear", "of Keras, got Doubled"),
    ],
)  # fmt: skip
def test_auto_geometry_is_refused(loss, outputs, activation, text):
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        known_loss(RowLosses(loss), activation, outputs, np.ones((4, outputs)))


def test_the_update_is_that_of_numpy():
    model, record, data = private_run(noise=0.0)
    x, y = (np.concatenate(parts) for parts in zip(*data.as_numpy_iterator(), strict=True))
    model.fit(data, epochs=2, callbacks=[record], verbose=0)
    weights, smoothing = np.zeros((5, 3)), model.loss.smoothing
    for start in [*range(0, RECORDS, BATCH)] * 2:
        part = slice(start, start + BATCH)
        gradient = envelope.softmax_cross_entropy(
            x[part] @ weights, y[part], clip_norm=CLIP, smoothing=smoothing
        ).gradient
        weights = (1 - RATE * DECAY) * weights - RATE * x[part].T @ gradient / BATCH
    np.testing.assert_allclose(model.get_weights()[0], weights, atol=1e-5)


def test_a_step_with_a_bad_target_is_refused():
    targets = np.zeros(RECORDS, int)
    targets[5] = 3
    model, record, data = private_run(targets)
    with pytest.raises(hsa.UnsupportedRunError, match="not finite"):
        model.fit(data, callbacks=[record], verbose=0)


def test_without_a_geometry_they_are_differentiated_from_the_layer():
    """In one go: their loop cannot be vectorized, and takes every example by itself."""
    model, x, y = tf.keras.Sequential([tf.keras.layers.Dense(3)]), tf.ones([6, 2]), tf.range(6) % 3
    model(x)
    loss = EnvelopeSparseCategoricalCrossentropy(0.6, 0.1)
    fast = ThroughLinearLayers.of(model, RowLosses(loss), model.weights, x)
    slopes = envelope.softmax_cross_entropy(
        model(x).numpy().astype(float), y.numpy(), clip_norm=0.6, smoothing=0.1
    ).gradient
    found = fast.gradients(x, y).norms
    np.testing.assert_allclose(found, np.linalg.norm(slopes, axis=1) * np.sqrt(3), rtol=1e-5)
