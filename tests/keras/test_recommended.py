"""What hsa.recommend gives is what a Keras model takes."""

import numpy as np
import pytest

pytest.importorskip("tensorflow")
import tensorflow as tf
from scipy.special import expit, softmax

import hidden_state_accountants as hsa
from hidden_state_accountants.losses import scalar
from hidden_state_accountants.losses.arrays import NUMPY
from hidden_state_accountants.losses.envelope import softmax_envelope
from hidden_state_adapters.tf_privacy import HiddenStateSequential, recommended_run

D = 4


def number(order):
    """Fixed batches leave some out; Poisson batches of a last, smaller one would be rarer."""
    return 204 if order == "poisson" else 206


def recommended(order, loss, **options):
    orders, n = [order], number(order)
    return hsa.recommend(
        n, 1.0, 1e-5, classes=3, orders=orders, epochs=2, loss=loss, **options
    ).best


@pytest.mark.parametrize(
    ("order", "loss", "options"),
    [
        ("cyclic", "softmax_cross_entropy", {"bias": True}),
        ("poisson", "logistic", {"neighboring_relation": "ADD_OR_REMOVE_ONE"}),
        ("full", "squared_error", {"weight_decay": 0.01}),
        ("shuffled_once", "squared_error", {"feature_norm": 2.0}),
    ],
)
def test_the_model_trains_the_recommended_run(order, loss, options):
    found = recommended(order, loss, **options)
    run = recommended_run(found)
    softmax = loss == "softmax_cross_entropy"
    random, n = np.random.default_rng(0), number(order)
    x = random.normal(size=(n, D))
    x *= options.get("feature_norm", 1.0) / np.linalg.norm(x, axis=1, keepdims=True) * 0.999
    y = random.integers(3, size=n) if softmax else random.random((n, 1))
    layer = tf.keras.layers.Dense(
        3 if softmax else 1, use_bias=options.get("bias", False), kernel_initializer="zeros"
    )
    model = HiddenStateSequential([layer], **run.model)
    model.compile(**run.compile)
    model.fit(x.astype("float32"), y, verbose=0, **run.fit)
    assert 0.95 < model.get_epsilon(1e-5) <= 1
    event = model.privacy_events[-1]
    for name in ("batch_order", "num_steps", "batch_size", "dataset_size"):
        assert getattr(event, name) == getattr(found.event, name), name
    for name in ("learning_rate", "weight_decay", "noise_multiplier", "clip_norm"):
        assert event.per_step(name)[0] == pytest.approx(found.event.per_step(name)[0], rel=1e-6)


def slopes(found, predictions, targets):
    """Of the recommended loss in the predictions, by the core's formulas."""
    if found.smoothing is None:
        return plain_slopes(found.loss, predictions, targets)
    if found.loss == "softmax_cross_entropy":
        return softmax_envelope(predictions, targets, found.clip_norm, found.smoothing)[1]
    of_one = {"logistic": scalar.logistic, "squared_error": scalar.squared_error}[found.loss]
    width = (1.0,) if found.loss == "squared_error" else ()
    return of_one(NUMPY, predictions.T, targets.T, found.clip_norm, found.smoothing, *width)[1].T


def plain_slopes(loss, predictions, targets):
    mean = {"softmax_cross_entropy": softmax, "logistic": expit}.get(loss, lambda z: z)
    return (mean(predictions, axis=1) if mean is softmax else mean(predictions)) - targets


@pytest.mark.parametrize("loss", ["softmax_cross_entropy", "logistic", "squared_error"])
@pytest.mark.parametrize("order", ["full", "cyclic"])
def test_the_loss_is_the_one_that_is_named(loss, order):
    found = recommended(order, loss)
    random = np.random.default_rng(1)
    z = tf.Variable(random.normal(size=(7, 3 if loss.startswith("softmax") else 1)))
    labels = np.arange(7) % 3 if loss.startswith("softmax") else random.random((7, 1))
    targets = np.eye(3)[labels] if loss.startswith("softmax") else labels
    with tf.GradientTape() as tape:
        mean = recommended_run(found).compile["loss"](labels, z)
    expected = slopes(found, z.numpy(), targets)
    np.testing.assert_allclose(7 * tape.gradient(mean, z).numpy(), expected, atol=1e-6)
