"""Runs of Keras where most tests begin: a head on twelve unit rows, and ways of Model.fit."""

import numpy as np
import pytest
import tensorflow as tf

import hidden_state_accountants as hsa
from hidden_state_adapters.tf_privacy import HiddenStateSequential, PrivateRun

RECORDS, FEATURES, BATCH, STEPS, DELTA = 12, 3, 4, 3, 1e-5
SGD = tf.keras.optimizers.SGD
AUTO = {"loss_geometry": "auto", "feature_norm": 1.0}


def unit_rows(records, features, classes):
    """Rows of norm 1, and a class for each at random."""
    random = np.random.default_rng(0)
    x = random.normal(size=(records, features)).astype("float32")
    return x / np.linalg.norm(x, axis=1, keepdims=True), random.integers(0, classes, records)


X, Y = unit_rows(RECORDS, FEATURES, 2)[0], np.arange(RECORDS) % 2


def bce():
    return tf.keras.losses.BinaryCrossentropy(from_logits=True, reduction="none")


def crossentropy(**kwargs):
    return tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, **kwargs)


def refused(text):
    return pytest.raises(hsa.UnsupportedRunError, match=text)


def head(units=2, **kwargs):
    return tf.keras.layers.Dense(units, kernel_initializer="ones", **kwargs)


SETTINGS = {"l2_norm_clip": 1.0, "noise_multiplier": 2.0, "batch_order": "cyclic"}


def make(optimizer=None, stack=None, *, compile=None, kind=HiddenStateSequential, **settings):
    """A compiled private model; `compile` holds more of what it is compiled with."""
    model = kind([head()] if stack is None else stack, **{**SETTINGS, **settings})
    model.compile(optimizer or SGD(0.5), **{"loss": crossentropy(), **(compile or {})})
    return model


def fit(model, **kwargs):
    """Trains an epoch, and returns the model."""
    model.fit(**{"x": X, "y": Y, "batch_size": BATCH, "verbose": 0, **kwargs})
    return model


def private_run(optimizer=None, model=None, **kwargs):
    """A run for a loop of one's own; likewise."""
    given = {"x": X, "y": Y, "batch_size": BATCH, "loss": crossentropy(), **SETTINGS, **kwargs}
    return PrivateRun(
        model or tf.keras.Sequential([head()]), optimizer=optimizer or SGD(0.5), **given
    )


def clipped_steps(
    kernel, bias, batches, *, y=Y, weights=1.0, clip=0.5, rate=0.5, decay=0.0, divisor=BATCH
):
    """Kernel and bias of a softmax layer after steps without noise on rows of X, in float64."""
    kernel, bias, factors = (
        kernel.astype(float),
        bias.astype(float),
        np.broadcast_to(weights, len(y)),
    )
    for batch in batches:
        x, labels = X[batch].astype(float), y[batch]
        slopes = np.exp(x @ kernel + bias)
        slopes /= slopes.sum(1, keepdims=True)
        slopes[np.arange(len(labels)), labels] -= 1
        slopes *= factors[batch][:, None]
        norms = np.linalg.norm(slopes, axis=1) * np.sqrt((x**2).sum(1) + 1)
        slopes *= (clip / np.maximum(norms, clip))[:, None]
        kernel = (1 - rate * decay) * kernel - rate / divisor * x.T @ slopes
        bias = (1 - rate * decay) * bias - rate / divisor * slopes.sum(0)
    return kernel, bias


# --- Model.fit of the run that the fixture `make_run` makes ---------------------------------------

callbacks = tf.keras.callbacks
# Two epochs of the run that `make_run` makes.
EXPECTED = hsa.LastIterateDpEvent(
    noise_multiplier=2.0,
    learning_rate=0.5,
    clip_norm=1.5,
    batch_size=4,
    dataset_size=24,
    num_steps=12,
    batch_order="cyclic",
    loss=hsa.LossGeometry.logistic(1.0, bias=True),
    weight_decay=0.1,
)


def compile_with(run, loss=None, **kwargs):
    run.model.compile(run.optimizer, loss or bce(), **kwargs)
