"""From the same start without noise the iterates are those of the reference, as for Opacus.

tests/opacus/test_same_trajectory.py compares with the same numbers.
"""

import numpy as np
import pytest
from cases import first

pytest.importorskip("tensorflow_privacy")
import shared_runs as shared
import tensorflow as tf

from hidden_state_adapters.tf_privacy import (
    CyclicDPKerasSGDOptimizer,
    cyclic_dataset,
)


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


@pytest.fixture(autouse=True)
def double_precision():
    tf.keras.backend.set_floatx("float64")
    yield
    tf.keras.backend.set_floatx("float32")


def test_cyclic():
    optimizer = CyclicDPKerasSGDOptimizer(
        shared.CLIP, 0.0, learning_rate=shared.RATE, weight_decay=shared.DECAY,
        projection_radius=shared.RADIUS,
    )  # fmt: skip
    np.testing.assert_allclose(iterates(optimizer), shared.cyclic_iterates(), rtol=0, atol=1e-13)


@pytest.mark.parametrize("prox", first(2, shared.PROXES), ids=str)
def test_prox(prox):
    optimizer = CyclicDPKerasSGDOptimizer(shared.CLIP, 0.0, learning_rate=shared.RATE, prox=prox)
    expected = shared.prox_iterates(prox, lambda x: [x[:-1, None], x[-1:]])
    np.testing.assert_allclose(iterates(optimizer), expected, rtol=0, atol=1e-13)
