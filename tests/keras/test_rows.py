"""Rows of a batch that depend on each other are noticed, and others are not accused."""

import numpy as np
import pytest

pytest.importorskip("tensorflow_privacy")
import tensorflow as tf

import hidden_state_accountants as hsa
from hidden_state_adapters.tf_privacy.guards.rows import rows_that_move, same_random_numbers
from hidden_state_adapters.tf_privacy.guards.trained_loss import TrainedLoss

layers, losses = tf.keras.layers, tf.keras.losses
ROWS = 5
X = tf.constant(np.random.default_rng(0).normal(size=(ROWS, 3)).astype("float32"))
UNIT = X / tf.norm(X, axis=1, keepdims=True)
WORDS = tf.constant([[1, 2], [3, 4], [1, 1], [0, 3], [2, 2]])


def moved(function, x=X, variables=()):
    return rows_that_move(lambda x, y: [function(x)], x, None, list(variables))


MIXING = {
    "mean": lambda x: x - tf.reduce_mean(x, axis=0),
    "standard deviation": lambda x: x / tf.math.reduce_std(x),
    "longest": lambda x: x / tf.reduce_max(tf.norm(x, axis=1)),
    "shortest": lambda x: x * tf.reduce_min(tf.norm(x, axis=1)),
    "sums of earlier rows": lambda x: tf.cumsum(x),
    "sums of later rows": lambda x: tf.cumsum(x, reverse=True),
    "neighbour": lambda x: x + tf.roll(x, 1, axis=0),
    "attention": lambda x: tf.nn.softmax(x @ tf.transpose(x)) @ x,
    "ranks": lambda x: tf.cast(tf.argsort(x, axis=0), tf.float32),
    "statistics of the batch": lambda x: tf.nn.batch_normalization(
        x, *tf.nn.moments(x, axes=[0]), None, None, 1e-3
    ),
}


@pytest.mark.parametrize("name", MIXING)
def test_noticed(name):
    assert moved(MIXING[name]) == "results"
    assert moved(MIXING[name], UNIT) == "results"


def test_at_zero_weights_the_gradients_show_it():
    kernel = tf.Variable(tf.zeros([3, 2]))
    assert moved(lambda x: (x - tf.reduce_mean(x, 0)) @ kernel, variables=[kernel]) == "gradients"
    assert moved(lambda x: x @ kernel, variables=[kernel]) == ""


PIXELS = tf.constant(np.random.default_rng(0).integers(256, size=(ROWS, 2)), tf.uint8)
BRIGHT = tf.concat([PIXELS, tf.fill([ROWS, 1], tf.constant(255, tf.uint8))], axis=1)


@pytest.mark.parametrize("pixels", [PIXELS, BRIGHT, tf.cast(BRIGHT, tf.int32)])
def test_row103_a_scale_by_the_largest_pixel_of_the_batch(pixels):
    def scaled(x):
        return tf.cast(x, tf.float32) / tf.cast(tf.reduce_max(x), tf.float32)

    assert moved(scaled, pixels) == "results"
    assert moved(lambda x: tf.cast(x, tf.float32) / 255, pixels) == ""


EMBEDDING = layers.Embedding(5, 2)
APART = {
    "dense": (layers.Dense(4, activation="relu"), X),
    "layer normalisation": (layers.LayerNormalization(), X),
    "attention within a row": (lambda x: layers.Attention()([x[:, :, None]] * 2), X),
    "root of a negative number": (tf.sqrt, X),
    "words": (EMBEDDING, WORDS),
    "words in floating point": (EMBEDDING, tf.cast(WORDS, tf.float32)),
    "strings": (lambda x: tf.cast(tf.strings.length(x), tf.float32), tf.constant(["a", "bc"])),
    "one row": (lambda x: x - tf.reduce_mean(x, 0), X[:1]),
    "a dictionary": (lambda x: x["a"] * x["b"], {"a": X, "b": X}),
}


@pytest.mark.parametrize("name", APART)
def test_not_accused(name):
    function, x = APART[name]
    assert moved(function, x) == ""


def refuses(x):
    if not np.array_equal(x, X):
        raise AssertionError("not what I know")
    return x


def test_not_looked_at():
    assert moved(refuses) is None
    assert moved(lambda x: x, tf.sparse.from_dense(X)) is None
    assert rows_that_move(lambda x, y: [], X, None, []) is None


# What is trained


def look(parts, loss, y, x=X, **options):
    model = tf.keras.Sequential(parts)
    model.build((None, 3))
    trained = TrainedLoss(model, lambda: [(x, y)], loss, **options)
    trained.look()
    return trained


def texts(trained, status):
    return " ".join(trained.checked([]) if status == "checked" else trained.left_open)


LABELS = tf.constant([[0.0], [1.0], [1.0], [0.0], [1.0]])
BCE = losses.BinaryCrossentropy(from_logits=True, reduction="none")


def squares(targets, outputs):
    return tf.reduce_mean(tf.square(targets - outputs), axis=-1)


@pytest.mark.parametrize(
    ("loss", "y"),
    [
        (squares, LABELS[:, 0]),  # targets of shape (b,) beside outputs of shape (b, 1)
        (lambda y, p: BCE(y, p) / tf.reduce_max(BCE(y, p)), LABELS),
        (lambda y, p: BCE(y, p) * tf.reduce_mean(y), LABELS),
    ],
)
def test_losses_that_mix_the_batch(loss, y):
    with pytest.raises(hsa.UnsupportedRunError, match="Expected every example to have a loss of"):
        look([layers.Dense(1)], loss, y)


def by_frequency(targets, outputs):
    positive = tf.reduce_mean(targets)
    weights = tf.where(targets > 0.5, 1 / (positive + 0.1), 1 / (1.1 - positive))
    return weights[:, 0] * BCE(targets, outputs)


def by_largest_target(targets, outputs):
    return squares(targets / tf.reduce_max(targets), outputs)


@pytest.mark.parametrize(
    ("loss", "y"),
    [
        (by_frequency, [0, 0, 1, 1, 0]),  # the neighbours of the first and last row are like them
        (by_frequency, [0, 0, 0, 0, 0]),
        (by_largest_target, [1, 3, 9, 2, 1]),
    ],
)
def test_row103_losses_that_depend_on_the_targets_of_the_batch(loss, y):
    with pytest.raises(hsa.UnsupportedRunError, match="a loss of its own"):
        look([layers.Dense(1)], loss, tf.constant(y, tf.float32)[:, None])


def test_losses_that_do_not():
    trained = look([layers.Dense(1)], squares, LABELS)
    assert trained.is_compared
    assert "no other example's losses" in texts(trained, "checked")
    assert texts(trained, "declared") == ""


class Sampled(layers.Layer):
    """Noise for every example, in training and in inference, as in Keras' VAE tutorial."""

    def call(self, x):
        return x + tf.random.normal(tf.shape(x))


@pytest.mark.parametrize("kernel", ["zeros", "ones"])
def test_noise_of_ones_own_is_not_taken_for_other_examples(kernel):
    head = layers.Dense(1, kernel_initializer=kernel)
    trained = look([Sampled(), head], squares, LABELS)
    assert "no other example's losses" in texts(trained, "checked")
    assert not trained.is_compared
    mean = layers.Lambda(lambda x: x - tf.reduce_mean(x, axis=0))
    with pytest.raises(hsa.UnsupportedRunError, match="a loss of its own"):
        look([Sampled(), mean, head], squares, LABELS)


class MixedInTraining(layers.Layer):
    def call(self, x, training=None):
        return x + tf.random.uniform([]) * tf.reverse(x, [0]) if training else x


def test_random_mixtures_of_the_examples_of_a_training_pass():
    with pytest.raises(hsa.UnsupportedRunError, match="a loss of its own"):
        look([MixedInTraining(), layers.Dense(1, kernel_initializer="ones")], squares, LABELS)


def test_looking_does_not_disturb_the_random_numbers_of_the_program():
    tf.random.set_seed(3)
    expected = [float(tf.random.normal([])) for _ in range(2)]
    tf.random.set_seed(3)
    first = float(tf.random.normal([]))
    with same_random_numbers(tf.keras.Sequential()):
        tf.random.normal([])
    assert [first, float(tf.random.normal([]))] == expected


def test_random_outputs_are_looked_at_without_randomness():
    dropout = [layers.Dropout(0.5), layers.Dense(1)]
    trained = look(dropout, squares, LABELS, is_the_step=True)
    assert "in inference mode" in texts(trained, "checked")
    assert "every entry of the loss depends on one example" in texts(trained, "declared")
    loop = look(dropout, squares, LABELS)
    assert not loop.is_compared
    assert "at the weights that the step moves" in texts(loop, "declared")
    mean = layers.Lambda(lambda x: x - tf.reduce_mean(x, axis=0))
    with pytest.raises(hsa.UnsupportedRunError, match="a loss of its own"):
        look([*dropout, mean], squares, LABELS)


def test_what_cannot_be_looked_at_is_declared():
    class Other(tf.keras.Model):
        def call(self, features):
            raise NotImplementedError

    trained = TrainedLoss(Other(), lambda: [(X, LABELS)], None)
    trained.look()
    sparse = look([layers.Dense(1)], squares, LABELS, tf.sparse.from_dense(X))
    for one in (trained, sparse):
        assert texts(one, "checked") == ""
        assert "every entry of the loss depends on one example" in texts(one, "declared")
    # A loss that was compiled for something else than the train_step of one's own.
    outputs = look([layers.Dense(1)], lambda y, p: tf.reduce_mean(y - p), LABELS)
    assert "no other example's outputs" in texts(outputs, "checked")
    assert "every entry of the loss depends on one example" in texts(outputs, "declared")
    told = TrainedLoss.of_loop(Other(), lambda: [(X, LABELS)], squares)
    with pytest.raises(hsa.UnsupportedRunError, match="leave loss out"):
        told.look()


def test_another_number_of_losses():
    with pytest.raises(hsa.UnsupportedRunError, match="one loss for each of the 5 examples"):
        look([layers.Dense(1)], lambda y, p: tf.repeat(squares(y, p), 2), LABELS, is_the_step=True)
