"""In Keras, too, a declared curvature is held against the features of every batch."""

import numpy as np
import pytest

pytest.importorskip("tensorflow_privacy")
import tensorflow as tf

import hidden_state_accountants as hsa
from hidden_state_adapters.tf_privacy import (
    HiddenStateCallback,
    HiddenStateSequential,
    run,
)

pytestmark = pytest.mark.usefixtures("without_graphs", "row_by_row")
N, D, K, B = 48, 6, 3, 12
LOSS = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
Y = np.arange(N) % K


def features():
    """The batches of the first half are more curved than those of the second."""
    rows = np.random.default_rng(0).normal(size=(N, D))
    rows *= np.where(np.arange(N)[:, None] < N // 2, np.geomspace(1, 0.2, D), 1.0)
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype("float32")


def largest_share(rows, bias, size=B):
    """The largest of lambda_max(X^T X)/(b B^2) of the batches in their order."""
    rows = np.c_[rows, np.ones(len(rows))] / np.sqrt(2) if bias else rows
    return max(np.linalg.eigvalsh(p.T @ p / size)[-1] for p in np.split(rows, len(rows) // size))


def declared(share, bias=False, failure=0.0):
    loss = hsa.LossGeometry.softmax_cross_entropy(1.0, bias=bias)
    return loss.with_curvature(share * loss.smoothness, failure)


def layers(bias):
    return [tf.keras.layers.Dense(K, use_bias=bias, kernel_initializer="zeros")]


def owned(
    loss, *, bias=False, order="cyclic", feature_norm=1.0, made_of=layers, rate=4.0, epochs=1
):
    model = HiddenStateSequential(
        made_of(bias),
        l2_norm_clip=2.001,
        noise_multiplier=2.0,
        batch_order=order,
        loss_geometry=loss,
        feature_norm=feature_norm,
    )
    model.compile(tf.keras.optimizers.SGD(rate), LOSS)
    model.fit(features(), Y, batch_size=B, epochs=epochs, verbose=0)
    return model


@pytest.mark.parametrize("bias", [True, False])
def test_batches_within_the_bound_train_and_gain(bias):
    known = declared(largest_share(features(), bias), bias)
    long = {"bias": bias, "rate": 1.9 / known.curvature, "epochs": 4}
    run = owned(known, **long)
    assert run.get_epsilon(1e-5) < 0.9 * owned(declared(1.0, bias), **long).get_epsilon(1e-5)
    checked = [a.text for a in run.assumptions if a.status.value == "checked"]
    assert any("every batch is" in text and "smooth" in text for text in checked)


@pytest.mark.parametrize("bias", [False, True])
def test_a_batch_above_the_bound_is_refused_before_the_first_step(bias):
    share = 0.99 * largest_share(features(), bias)
    with pytest.raises(hsa.UnsupportedRunError, match=r"batch \d has a mean loss that is"):
        owned(declared(share, bias), bias=bias)
    with pytest.raises(hsa.UnsupportedRunError, match="among the 1e-06 that delta counts"):
        owned(declared(share, bias, failure=1e-6), bias=bias)


def test_the_batch_of_a_step_is_what_is_looked_at():
    """All records together are less curved."""
    share = largest_share(features(), False)
    assert share > largest_share(features(), False, N)
    owned(declared(largest_share(features(), False, N)), order="full")
    with pytest.raises(hsa.UnsupportedRunError, match="expected at most curvature"):
        owned(declared(0.9 * largest_share(features(), False, N)), order="full")


def test_the_batches_are_those_of_the_secret_order(monkeypatch):
    """Not those of the data set's order, which may be less curved."""
    looked_at = []

    def look(declared, head, batches):
        looked_at.extend(batch.numpy() for batch in batches)
        return []

    monkeypatch.setattr(run, "check_curvature", look)
    model = owned(declared(0.999), order="shuffled_once")
    dealt = [features()[model._run.plan.batch(step)] for step in range(N // B)]
    assert np.array_equal(looked_at, dealt)
    assert not np.array_equal(np.concatenate(looked_at), features())


@pytest.mark.parametrize("order", ["reshuffled", "without_replacement"])
def test_batches_that_are_drawn_anew_are_refused_by_name(order):
    with pytest.raises(hsa.UnsupportedRunError, match="every epoch has other batches here"):
        owned(declared(0.9), order=order)
    owned(declared(1.0), order=order)  # says nothing more than the smoothness


def test_no_theorem_uses_it_of_poisson_batches():
    owned(declared(0.01), order="poisson")


def test_without_the_norm_of_the_features_it_is_refused():
    with pytest.raises(hsa.UnsupportedRunError, match="feature_norm= beside a loss_geometry"):
        owned(declared(0.9), feature_norm=None)
    with pytest.raises(hsa.UnsupportedRunError, match="without curvature"):
        HiddenStateCallback(dataset_size=N, batch_size=B, loss_geometry=declared(0.9))


def test_of_other_models_it_is_the_users_word():
    def convolution(bias):
        own = tf.keras.layers
        return [own.Reshape((D, 1)), own.Conv1D(K, D, use_bias=bias), own.Flatten()]

    loss = hsa.LossGeometry.convex(1.0).with_curvature(0.01)
    model = owned(loss, feature_norm=None, made_of=convolution)
    assert not any("every batch is" in a.text for a in model.assumptions)
