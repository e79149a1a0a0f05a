"""Gradients of single examples, from linear layers or row by row, and the weights of examples."""

import math

import keras_models
import numpy as np
import pytest

pytest.importorskip("tensorflow")
import tensorflow as tf
from keras_models import AUTO, BATCH, FEATURES, RECORDS, SGD, X, clipped_steps, crossentropy

import hidden_state_accountants as hsa
from hidden_state_adapters.tf_privacy import DiceUpdate, keras_api
from hidden_state_adapters.tf_privacy.gradients import (
    RowByRow,
    ThroughLinearLayers,
    squared_lengths,
)
from hidden_state_adapters.tf_privacy.losses import RowLosses
from hidden_state_adapters.tf_privacy.settings import Declared

layers, losses = tf.keras.layers, tf.keras.losses
CLASSES = 3
Y = np.arange(RECORDS) % CLASSES


def head(**kwargs):
    return keras_models.head(CLASSES, **kwargs)


def built(*stack):
    model = tf.keras.Sequential(stack or [head()])
    model(X)
    return model


def both_ways(model, loss=None):
    """Of the gradients of a model: from its linear layers, if it has such alone, and by rows."""
    row_losses, trained = RowLosses(loss or crossentropy()), keras_api.trained(model)
    fast = ThroughLinearLayers.of(model, row_losses, trained, tf.constant(X))
    return fast, RowByRow(model, row_losses, trained)


def assert_same(found, expected, **tolerance):
    for own, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(own, other, **tolerance)


STACKS = {
    "without bias": lambda: [head(use_bias=False)],
    "frozen": lambda: [layers.Dense(5, activation="relu", trainable=False), head()],
    "softmax": lambda: [layers.Dense(5, activation="tanh"), head(activation="softmax")],
}


@pytest.mark.parametrize("stack", STACKS)
def test_linear_layers_give_the_gradients_of_rows(stack):
    model = built(*STACKS[stack]())
    model.set_weights([np.linspace(-1, 1, w.size).reshape(w.shape) for w in model.get_weights()])
    loss = losses.SparseCategoricalCrossentropy() if stack == "softmax" else None
    found, rows = (way.gradients(tf.constant(X), tf.constant(Y)) for way in both_ways(model, loss))
    for name in ("norms", "losses", "outputs"):
        np.testing.assert_allclose(getattr(found, name), getattr(rows, name), rtol=1e-4)
    factors = tf.constant(np.linspace(0, 1, RECORDS))
    assert_same(found.weighted_sum(factors), rows.weighted_sum(factors), atol=1e-5)


def test_lengths_whose_squares_underflow():
    """The one factor of a gradient's length is tiny, the other one large."""
    fast, _ = both_ways(
        built(head(use_bias=False)), lambda targets, outputs: 1e-25 * tf.reduce_sum(outputs, 1)
    )
    norms = fast.gradients(tf.constant(1e18 * X), tf.constant(Y)).norms
    assert (norms.numpy() >= 1e-7 * math.sqrt(CLASSES)).all()


@pytest.mark.parametrize("shape", [(), (0,), (512, 10), (10007,)])
def test_squared_lengths_are_those_of_double_precision(shape):
    rows = np.random.default_rng(0).normal(size=(3, *shape)).astype("float32")
    expected = (rows.astype(float) ** 2).reshape(3, -1).sum(1)
    unknown = tf.TensorSpec([None] * rows.ndim)
    for of in (squared_lengths, tf.function(squared_lengths, input_signature=[unknown])):
        np.testing.assert_allclose(of(tf.constant(rows)), expected, rtol=1e-6)


def graph_of(make):
    """A functional model, of its input."""
    inputs = tf.keras.Input((FEATURES,))
    return tf.keras.Model(inputs, make(inputs))


def twice(x):
    """A layer that is called with the examples and with what it makes of them."""
    inner = layers.Dense(FEATURES)
    return inner(inner(x))


def centred(layer):
    """A layer of Keras whose call somebody has replaced."""
    layer.call = lambda x: x - tf.reduce_mean(x, 0)
    return layer


class OfParts(tf.keras.Model):
    """Calls its one layer with the parts of all examples as rows."""

    def __init__(self):
        super().__init__()
        self.head = head(use_bias=False)

    def call(self, x):
        outputs = self.head(tf.reshape(x, [-1, 1]))
        return tf.reduce_mean(tf.reshape(outputs, [-1, FEATURES, CLASSES]), 1)


OTHERS = {
    "scale": lambda: [layers.LayerNormalization(), head()],
    "sequence": lambda: [layers.Reshape((3, 1)), layers.Dense(2), layers.Flatten(), head()],
    "embedding": lambda: [layers.Embedding(7, 2, input_length=FEATURES), layers.Flatten(), head()],
    "convolution": lambda: [
        layers.Reshape((3, 1)), layers.Conv1D(2, 2, activation="relu"), layers.Flatten(), head()
    ],
    "lambda": lambda: [layers.Lambda(lambda x: x / 2), head()],
    "activation": lambda: [layers.Dense(3, activation=lambda z: tf.nn.relu(z)), head()],
    "axis": lambda: [layers.Reshape((3, 1)), layers.Softmax(axis=1), layers.Flatten(), head()],
    "twice": lambda: [graph_of(twice), head()],
    "function": lambda: [graph_of(lambda x: layers.Dense(3)(tf.square(x))), head()],
    "moments": lambda: [layers.BatchNormalization(center=False, scale=False), head()],
    "call": lambda: [centred(layers.ReLU()), head()],
    "parts": lambda: [OfParts()],
}  # fmt: skip


@pytest.mark.parametrize("stack", OTHERS)
def test_other_layers_go_row_by_row(stack):
    if stack == "function" and keras_api.IS_KERAS_3:
        pytest.skip("Keras 3 puts no function of TensorFlow into a functional model")
    stack = OTHERS[stack]()
    model = stack[0] if isinstance(stack[0], OfParts) else tf.keras.Sequential(stack)
    x, y, factors = tf.constant(abs(X[:3])), tf.constant(Y[:3]), [1.0, 0.5, 2.0]
    model(x)
    fast, rows = both_ways(model)
    assert fast is None
    found = tf.function(
        lambda: rows.gradients(x, y).weighted_sum(tf.constant(factors, tf.float64))
    )()
    alone = [rows.of_row((x[k], y[k]))[0] for k in range(3)]
    expected = [
        sum(factor * row for factor, row in zip(factors, own, strict=True))
        for own in zip(*alone, strict=True)
    ]
    assert_same(found, expected, atol=1e-5)


def test_a_frozen_network_of_keras_own_layers():
    """Told by its structure, though the batch is normalised in it: by constants."""
    inputs = tf.keras.Input((FEATURES,))
    hidden = layers.Reshape((3, 1, 1))(layers.Rescaling(2.0)(inputs))
    hidden = layers.Conv2D(3, (2, 1), activation="relu")(hidden)
    hidden = layers.BatchNormalization()(hidden)
    hidden = layers.Add()([hidden, layers.Activation("swish")(hidden)])
    network = tf.keras.Model(inputs, layers.GlobalMaxPooling2D()(hidden))
    network.trainable = False
    fast, _ = both_ways(built(network, layers.Dropout(0.5), head()))
    assert fast


def contrastive(targets, outputs):
    among = tf.range(tf.shape(outputs)[0])
    products = tf.matmul(outputs, outputs, transpose_b=True)
    own = tf.nn.sparse_softmax_cross_entropy_with_logits(among, products)
    return own + losses.sparse_categorical_crossentropy(targets, outputs, from_logits=True)


def test_a_loss_that_mixes_examples():
    """Of every example it is that of a batch of one."""
    found, rows = (
        way.gradients(tf.constant(X), tf.constant(Y)) for way in both_ways(built(), contrastive)
    )
    np.testing.assert_allclose(found.norms, rows.norms, atol=1e-5)


@pytest.mark.parametrize("way", [0, 1], ids=["layers", "rows"])
def test_a_row_of_factor_zero_is_left_out_though_it_is_not_finite(way):
    clipping, factors = both_ways(built())[way], tf.constant([0.0, *np.ones(RECORDS - 1)])
    sums = []
    for first in (X[0], np.nan):
        x = X.copy()
        x[0] = first
        found = clipping.gradients(tf.constant(x), tf.constant(Y))
        sums.append(found.weighted_sum(tf.cast(factors, tf.float64)))
    assert_same(*sums, atol=1e-5)


# --- weights: factors of the gradients, with constants that grow with them ------------------------

EAGER = pytest.mark.usefixtures("row_by_row", "without_graphs")
OF_CLASSES, OF_EXAMPLES = {0: 0.5, 1: 1.0, 2: 2.0}, np.linspace(0, 2, RECORDS)
PLAIN = hsa.LossGeometry.softmax_cross_entropy(1.0, bias=True)


def make(optimizer=None, **settings):
    return keras_models.make(optimizer, [head()], **{"l2_norm_clip": 9.0, **settings})


def fit(model, **kwargs):
    return keras_models.fit(model, **{"y": Y, **kwargs})


@pytest.mark.parametrize(("clip", "optimizer"), [(0.7, None), (9.0, None), (9.0, "dice")])
@EAGER
def test_a_step_is_that_of_weighted_losses(clip, optimizer):
    """Also with what DiceSGD feeds back, as long as nothing is clipped."""
    update = optimizer and DiceUpdate(SGD(0.5))
    model = make(update, l2_norm_clip=clip, noise_multiplier=0.0)
    fit(model, class_weight=OF_CLASSES, sample_weight=OF_EXAMPLES)
    weights = np.array([OF_CLASSES[label] for label in Y]) * OF_EXAMPLES
    start, batches = np.ones((FEATURES, CLASSES)), np.arange(RECORDS).reshape(-1, BATCH)
    expected = clipped_steps(start, np.zeros(CLASSES), batches, y=Y, weights=weights, clip=clip)
    assert_same(model.get_weights(), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "settings", "largest"),
    [
        ({"class_weight": OF_CLASSES}, {}, 2.0),
        ({"class_weight": OF_CLASSES, "sample_weight": OF_EXAMPLES}, {"weight_bound": 4.0}, 8.0),
        ({"sample_weight": OF_EXAMPLES / 4}, {"weight_bound": 0.5}, 0.5),
    ],
    ids=["classes", "both", "small"],
)
@pytest.mark.parametrize("said", [AUTO, {"loss_geometry": PLAIN}], ids=["auto", "word"])
@EAGER
def test_constants_grow_with_the_weights(arguments, settings, largest, said):
    """Gradients of weight 2 are longer than the bound of the plain loss, and are in the run."""
    model = fit(make(noise_multiplier=0.01, **said, **settings), **arguments)
    loss = model.privacy_event.loss
    assert loss.lipschitz == largest * PLAIN.lipschitz
    assert loss.smoothness == largest * PLAIN.smoothness
    longest = model._run.steps.last_step.largest_norm
    assert longest <= loss.lipschitz
    assert largest != 2 or longest > PLAIN.lipschitz
    texts = " ".join(assumption.text for assumption in model.assumptions)
    assert "depend on nothing but their example" in texts
    assert (f"a weight of at most {largest:g}" in texts) == (said is AUTO)


@pytest.mark.parametrize(
    "loss",
    [
        hsa.LossGeometry.strongly_convex(2.0, 0.5, 3.0),
        hsa.LossGeometry.weakly_convex(2.0, 0.5, 3.0),
        hsa.LossGeometry.hoelder(2.0, 0.5, 3.0),
    ],
    ids=lambda loss: loss.kind.value,
)
def test_every_kind_of_loss(loss):
    """A weight may be 0: of strong convexity nothing is left."""
    found = Declared(loss_geometry=loss).weighted(3.0).geometry
    assert (found.smoothness, found.lipschitz) == (3 * loss.smoothness, 9.0)
    assert (found.strong_convexity, found.weak_convexity) == (0.0, 3 * loss.weak_convexity)


@EAGER
def test_a_bound_for_dice_grows_too():
    update = DiceUpdate("sgd", error_l2_norm_clip=0.1, gradient_bound=2.0)
    model = fit(make(update), class_weight=OF_CLASSES)
    assert model.privacy_event.gradient_bound == 4.0


@EAGER
def test_weights_that_come_with_the_examples():
    """The same run as with arrays, with the same demands."""
    triples = tf.data.Dataset.from_tensor_slices((X, Y, OF_EXAMPLES))
    model, beside = make(noise_multiplier=0.0), make(noise_multiplier=0.0)
    fit(beside, sample_weight=OF_EXAMPLES, class_weight=OF_CLASSES)
    fit(model, x=triples, y=None, class_weight=OF_CLASSES)
    assert_same(model.get_weights(), beside.get_weights(), atol=1e-6)
    assert model.privacy_event == beside.privacy_event
    fit(model, sample_weight=OF_EXAMPLES, class_weight=OF_CLASSES)
    for other in (None, OF_EXAMPLES[::-1]):
        with pytest.raises(hsa.UnsupportedRunError, match="examples of the run so far"):
            fit(model, sample_weight=other, class_weight=OF_CLASSES)
    with pytest.raises(hsa.UnsupportedRunError, match="examples of the run so far"):
        fit(model, x=triples, y=None)
    with pytest.raises(hsa.UnsupportedRunError, match="depends on its order"):
        fit(model, x=triples, y=None, class_weight=OF_CLASSES, sample_weight=OF_EXAMPLES)
    assert model.privacy_event.num_steps == 6


NEGATIVE, SHORT = np.full(RECORDS, -1.0), np.ones(3)
PAIRS = {"x": tf.data.Dataset.from_tensor_slices((X, Y)), "y": None}


@pytest.mark.parametrize(
    ("arguments", "settings", "text"),
    [
        ({"sample_weight": OF_EXAMPLES}, AUTO, "Expected weight_bound="),
        ({"sample_weight": OF_EXAMPLES}, {"weight_bound": 1.0}, "weight_bound = 1, got a larger"),
        ({"sample_weight": NEGATIVE}, {}, "finite and >= 0"),
        ({"sample_weight": SHORT}, {}, r"shape \(12,\)"),
        ({"class_weight": {0: 1.0, 1: 1.0}}, {}, "classes of class_weight"),
        ({"class_weight": {0: -1.0}}, {}, "class_weight"),
        ({**PAIRS, "sample_weight": SHORT}, {}, "depends on its order"),
    ],
)
@EAGER
def test_refused_weights(arguments, settings, text):
    model = make(**settings)
    with pytest.raises((hsa.UnsupportedRunError, TypeError, ValueError), match=text):
        fit(model, **arguments)
    with pytest.raises(ValueError, match="Call fit"):
        model.get_epsilon(1e-5)


@EAGER
def test_other_weights_of_a_class_that_no_example_has():
    """Another example could have had it: the constants of the loss are those of the largest."""
    alike = {"y": np.zeros(RECORDS, int)}
    model = fit(make(**AUTO), class_weight={0: 1.0, 1: 1.0}, **alike)
    with pytest.raises(hsa.UnsupportedRunError, match="another example could have"):
        fit(model, class_weight={0: 1.0, 1: 9.0}, **alike)
    fit(model, class_weight={0: 1.0, 1: 0.5}, **alike)
