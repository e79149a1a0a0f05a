"""Iterates without noise are those of the reference, as for Opacus; proximal maps after the noise.

tests/opacus/test_same_trajectory.py compares with the same numbers.
"""

import numpy as np
import pytest
from cases import first

pytest.importorskip("tensorflow_privacy")
import shared_runs as shared
import tensorflow as tf

import hidden_state_accountants as hsa
from hidden_state_accountants import Regulariser
from hidden_state_adapters.tf_privacy import (
    CyclicDPKerasSGDOptimizer,
    HiddenStateCallback,
    HiddenStateSequential,
    cyclic_dataset,
)
from hidden_state_adapters.tf_privacy.step import TENSORFLOW_PROX

RECORDS, BATCH, DELTA = 40, 10, 1e-5


def records():
    random = np.random.default_rng(0)
    x = random.normal(size=(RECORDS, 4)).astype("float32")
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    return x, (np.arange(RECORDS) % 3).astype("int32")


def fitted(kind, prox, epochs=2, rate=0.5, **options):
    x, y = records()
    layers = [tf.keras.layers.Dense(3, input_shape=(4,))]
    if kind == "model":
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model = HiddenStateSequential(
            layers, l2_norm_clip=2.0, noise_multiplier=2.0, batch_order="cyclic", prox=prox,
            loss_geometry="auto", feature_norm=1.0, **options,
        )  # fmt: skip
        model.compile(tf.keras.optimizers.SGD(rate), loss)
        model.fit(x, y, batch_size=BATCH, epochs=epochs, verbose=0)
        return model, model
    model = tf.keras.Sequential(layers)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    optimizer = CyclicDPKerasSGDOptimizer(2.0, 2.0, learning_rate=rate, prox=prox, **options)
    model.compile(optimizer, loss)
    geometry = hsa.LossGeometry.softmax_cross_entropy(1.0, bias=True)
    data = cyclic_dataset(x, y, batch_size=BATCH)
    record = HiddenStateCallback(data=data, loss_geometry=geometry)
    model.fit(data, epochs=epochs, verbose=0, callbacks=[record])
    return model, record


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "h",
    [
        Regulariser(l1=0.3, l2=0.2),
        Regulariser(group_lasso=0.3, group_axis=1),
        Regulariser(group_lasso=0.3, l1=0.1, low=0.0),
        Regulariser(low=-0.2, high=0.5),
    ],
    ids=str,
)
def test_tensors_as_numpy(h, dtype):
    x = np.random.default_rng(0).normal(size=(4, 3)).astype(dtype)
    rate = tf.constant(0.75, dtype)
    eps = float(np.finfo(dtype).eps)
    expected = h.prox(x.astype("float64"), 0.75)
    found = tf.function(lambda v: h.prox(v, rate, TENSORFLOW_PROX))(tf.constant(x))
    np.testing.assert_allclose(found, expected, rtol=8 * eps, atol=8 * eps)


def test_the_event_reads_the_modulus_and_the_map_has_it():
    figures = []
    for l2 in (0.0, 0.5):
        _, record = fitted("callback", Regulariser(l1=0.01, l2=l2))
        event = record.privacy_event
        assert event.prox_strong_convexity == l2
        figures.append(record.get_epsilon(DELTA))
        expected = hsa.LastIterateAccountant().compose(event).get_epsilon(DELTA)
        assert figures[-1] == pytest.approx(expected, rel=1e-12)
        assert record.report(DELTA).count("proximal map of Regulariser(l1=0.01") == 1
    assert figures[1] < 0.97 * figures[0]


def test_every_step_ends_with_the_map():
    model, _ = fitted("model", Regulariser(l1=1000.0))
    assert all((v.numpy() == 0).all() for v in model.trainable_variables)
    model, _ = fitted("callback", Regulariser(low=0.0, high=0.125))
    values = np.concatenate([v.numpy().ravel() for v in model.trainable_variables])
    assert (values >= 0).all()
    assert (values <= 0.125).all()
    assert (values > 0).any()


def test_a_model_and_an_optimizer_are_saved_with_it():
    prox = Regulariser(l1=0.5, group_lasso=0.25, group_axis=0, low=0.0)
    optimizer = CyclicDPKerasSGDOptimizer(1.0, 1.0, prox=prox)
    assert CyclicDPKerasSGDOptimizer.from_config(optimizer.get_config()).settings.prox == prox
    model, _ = fitted("model", prox)
    again = HiddenStateSequential.from_config(model.get_config())
    assert again._settings.prox == prox


@pytest.mark.parametrize(
    ("prox", "error", "text"),
    [
        (0.1, TypeError, "Expected prox to be a hidden_state_accountants.Regulariser"),
        (lambda variables, rate: None, TypeError, "Expected prox to be"),
        (Regulariser(group_lasso=0.1, group_axis=2), ValueError, "an axis of every parameter"),
    ],
)
def test_arguments(prox, error, text):
    with pytest.raises(error, match=text):
        fitted("model", prox)


# --- the reference --------------------------------------------------------------------------------


def iterates(optimizer):
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, dtype="float64")])
    model.build((None, shared.FEATURES))
    model.set_weights([shared.START[:-1, None], shared.START[-1:]])
    model.compile(optimizer, tf.keras.losses.BinaryCrossentropy(from_logits=True, reduction="none"))
    found = []

    def note(batch, logs):
        found.append(np.concatenate([v.numpy().ravel() for v in model.trainable_variables]))

    x, y = shared.records()
    model.fit(
        cyclic_dataset(x, y[:, None], batch_size=shared.BATCH), epochs=2, verbose=0,
        callbacks=[tf.keras.callbacks.LambdaCallback(on_train_batch_end=note)],
    )  # fmt: skip
    return np.array(found)


@pytest.fixture
def double_precision():
    tf.keras.backend.set_floatx("float64")
    yield
    tf.keras.backend.set_floatx("float32")


@pytest.mark.usefixtures("double_precision")
def test_cyclic_iterates_are_those_of_the_reference():
    optimizer = CyclicDPKerasSGDOptimizer(
        shared.CLIP, 0.0, learning_rate=shared.RATE, weight_decay=shared.DECAY,
        projection_radius=shared.RADIUS,
    )  # fmt: skip
    np.testing.assert_allclose(iterates(optimizer), shared.cyclic_iterates(), rtol=0, atol=1e-13)


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("prox", first(2, shared.PROXES), ids=str)
def test_iterates_with_a_prox_are_those_of_the_reference(prox):
    optimizer = CyclicDPKerasSGDOptimizer(shared.CLIP, 0.0, learning_rate=shared.RATE, prox=prox)
    expected = shared.prox_iterates(prox, lambda x: [x[:-1, None], x[-1:]])
    np.testing.assert_allclose(iterates(optimizer), expected, rtol=0, atol=1e-13)
