"""Iterates without noise are those of the reference, as for Opacus; proximal maps after the noise.

tests/opacus/test_same_trajectory.py compares with the same numbers.
"""

import numpy as np
import pytest
from cases import first

pytest.importorskip("tensorflow_privacy")
import shared_runs as shared
import tensorflow as tf
from keras_models import AUTO, SGD, bce, fit, make

import hidden_state_accountants as hsa
from hidden_state_accountants import Regulariser
from hidden_state_adapters.tf_privacy import (
    CyclicDPKerasSGDOptimizer,
    HiddenStateSequential,
    cyclic_dataset,
)


def iterates(**options):
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, dtype="float64")])
    model.build((None, shared.FEATURES))
    model.set_weights([shared.START[:-1, None], shared.START[-1:]])
    optimizer = CyclicDPKerasSGDOptimizer(shared.CLIP, 0.0, learning_rate=shared.RATE, **options)
    model.compile(optimizer, bce())
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
def double_precision(restored_precision):
    tf.keras.backend.set_floatx("float64")


@pytest.mark.usefixtures("double_precision")
def test_cyclic_iterates_are_those_of_the_reference():
    found = iterates(weight_decay=shared.DECAY, projection_radius=shared.RADIUS)
    np.testing.assert_allclose(found, shared.cyclic_iterates(), rtol=0, atol=1e-13)


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("prox", first(2, shared.PROXES), ids=str)
def test_iterates_with_a_prox_are_those_of_the_reference(prox):
    expected = shared.prox_iterates(prox, lambda x: [x[:-1, None], x[-1:]])
    np.testing.assert_allclose(iterates(prox=prox), expected, rtol=0, atol=1e-13)


# --- proximal maps in a private run ---------------------------------------------------------------


def fitted(prox, **options):
    return fit(make(SGD(0.5), prox=prox, **options, **AUTO), epochs=2)


def test_the_event_reads_the_modulus_and_the_map_has_it():
    figures = []
    for l2 in (0.0, 0.5):
        run = fitted(Regulariser(l1=0.01, l2=l2), l2_norm_clip=2.0)
        event = run.privacy_event
        assert event.prox_strong_convexity == l2
        figures.append(run.get_epsilon(1e-5))
        expected = hsa.LastIterateAccountant().compose(event).get_epsilon(1e-5)
        assert figures[-1] == pytest.approx(expected, rel=1e-12)
        assert run.report(1e-5).count("proximal map of Regulariser(l1=0.01") == 1
    assert figures[1] < 0.97 * figures[0]


def test_every_step_ends_with_the_map():
    """After the noise."""
    assert all((weights == 0).all() for weights in fitted(Regulariser(l1=1000.0)).get_weights())


def test_a_model_and_an_optimizer_are_saved_with_it():
    prox = Regulariser(l1=0.5, group_lasso=0.25, group_axis=0, low=0.0)
    optimizer = CyclicDPKerasSGDOptimizer(1.0, 1.0, prox=prox)
    assert CyclicDPKerasSGDOptimizer.from_config(optimizer.get_config()).settings.prox == prox
    again = HiddenStateSequential.from_config(fitted(prox).get_config())
    assert again._settings.prox == prox


@pytest.mark.parametrize(
    ("prox", "error", "text"),
    [
        (lambda variables, rate: None, TypeError, "Expected prox to be a hidden_state_accountants"),
        (Regulariser(group_lasso=0.1, group_axis=2), ValueError, "an axis of every parameter"),
    ],
)
def test_arguments(prox, error, text):
    with pytest.raises(error, match=text):
        fitted(prox)
