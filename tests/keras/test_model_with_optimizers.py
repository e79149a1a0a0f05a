"""A model that is compiled with one of the optimizers that have noise of their own."""

import numpy as np
import pytest

pytest.importorskip("tensorflow_privacy")
import tensorflow as tf
from tensorflow_privacy.privacy.optimizers.dp_optimizer_keras import DPKerasSGDOptimizer

import hidden_state_accountants as hsa
from hidden_state_adapters.tf_privacy import (
    BlockCoordinateKerasOptimizer,
    BlockCoordinateUpdate,
    CyclicDPKerasSGDOptimizer,
    DiceKerasAdamOptimizer,
    DiceKerasSGDOptimizer,
    DiceUpdate,
    HiddenStateSequential,
    make_private,
)
from hidden_state_adapters.tf_privacy.algorithm import Algorithm

pytestmark = pytest.mark.usefixtures("without_graphs", "row_by_row")
optimizers, layers = tf.keras.optimizers, tf.keras.layers
SGD, OLD = optimizers.SGD, optimizers.legacy
RECORDS, FEATURES, CLASSES, BATCH = 12, 4, 3, 4
CLIP, NOISE, RATE, DECAY = 0.4, 2.0, 0.5, 0.1
X = np.random.default_rng(0).normal(size=(RECORDS, FEATURES)).astype("float32")
X /= np.linalg.norm(X, axis=1, keepdims=True)
Y = np.arange(RECORDS) % CLASSES
SOFTMAX = hsa.LossGeometry.softmax_cross_entropy(1.0, bias=True)
PROX = hsa.Regulariser(l2=0.3)
SCHEDULE = optimizers.schedules.ExponentialDecay(RATE, 2, 0.5)


def crossentropy(**kwargs):
    return tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, **kwargs)


def make(optimizer, **settings):
    head = layers.Dense(CLASSES, kernel_initializer="ones")
    model = HiddenStateSequential([head], **{"batch_order": "cyclic", **settings})
    model.build((None, FEATURES))
    model.compile(optimizer, crossentropy(), run_eagerly=True)
    return model


def fit(model, **kwargs):
    model.fit(X, Y, **{"batch_size": BATCH, "epochs": 2, "verbose": 0, **kwargs})
    return model


def cyclic(noise=NOISE, *args, **kwargs):
    return CyclicDPKerasSGDOptimizer(CLIP, noise, *args, **{"learning_rate": RATE, **kwargs})


def dice(kind=DiceKerasSGDOptimizer, noise=NOISE, **kwargs):
    return kind(CLIP, noise, **{"learning_rate": RATE, "error_l2_norm_clip": 0.1, **kwargs})


# By name: an optimizer, what a model is compiled with in its place, and what it is made with.
PAIRS = {
    "cyclic": (
        lambda noise: cyclic(noise, weight_decay=DECAY, loss_geometry=SOFTMAX),
        lambda: SGD(RATE, weight_decay=DECAY),
        {"loss_geometry": SOFTMAX},
    ),
    "all of cyclic": (
        lambda noise: cyclic(
            noise, BATCH, learning_rate=SCHEDULE, prox=PROX, projection_radius=3.5
        ),
        lambda: SGD(SCHEDULE),
        {"num_microbatches": BATCH, "prox": PROX, "projection_radius": 3.5},
    ),
    "dice": (
        lambda noise: dice(noise=noise, momentum=0.9, nesterov=True, decay=0.1),
        lambda: DiceUpdate(OLD.SGD(RATE, 0.9, True, decay=0.1), error_l2_norm_clip=0.1),
        {},
    ),
    "dice with Adam": (
        lambda noise: dice(
            DiceKerasAdamOptimizer, noise, beta_1=0.8, beta_2=0.9, epsilon=0.1, amsgrad=True
        ),
        lambda: DiceUpdate(OLD.Adam(RATE, 0.8, 0.9, 0.1, True), error_l2_norm_clip=0.1),
        {},
    ),
    "block": (
        lambda noise: BlockCoordinateKerasOptimizer(
            CLIP, noise, learning_rate=RATE, l1=0.1, l2=0.3, nonnegative=True
        ),
        lambda: BlockCoordinateUpdate(SGD(RATE)),
        {"prox": hsa.Regulariser(l1=0.1, l2=0.3, low=0.0)},
    ),
    "plain block": (
        lambda noise: BlockCoordinateKerasOptimizer(CLIP, noise, learning_rate=RATE),
        lambda: BlockCoordinateUpdate(SGD(RATE)),
        {},
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_it_is_the_same_run(name, monkeypatch):
    """With the noise that it accounts, which is left out of the weights here."""
    monkeypatch.setattr(Algorithm, "_with_noise", lambda step, sums: list(sums))
    optimizer, plain, settings = PAIRS[name]
    settings = {"l2_norm_clip": CLIP, "noise_multiplier": NOISE, **settings}
    short = fit(make(optimizer(NOISE)))
    long = fit(make(plain(), batch_order="cyclic", **settings))
    for one, other in zip(short.get_weights(), long.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    assert short.privacy_event == long.privacy_event
    assert short.get_config()["hidden_state"] == long.get_config()["hidden_state"]
    assert short.get_epsilon(1e-5) == long.get_epsilon(1e-5)


@pytest.mark.parametrize("name", PAIRS)
def test_noise_is_added_once(name, monkeypatch):
    """Noise that is the same number everywhere moves every weight by it, step by step."""
    deviations = []

    def known(self, sums):
        deviations.append(deviation := self.noise_multiplier * self.clip)
        return [part + tf.cast(deviation, part.dtype) for part in sums]

    monkeypatch.setattr(Algorithm, "_with_noise", known)
    model = make(PAIRS[name][0](NOISE))
    before = np.vstack(model.get_weights()[:1])
    model.fit(np.zeros_like(X), Y, batch_size=BATCH, epochs=1, verbose=0)
    assert deviations == [CLIP * NOISE] * (RECORDS // BATCH)
    if name == "plain block":  # no gradient and no decay
        moved = before - model.get_weights()[0]
        np.testing.assert_allclose(moved, 3 * RATE * CLIP * NOISE / BATCH, rtol=1e-5)


def test_batches_are_poisson_unless_the_model_says_otherwise():
    model = fit(make(dice(), batch_order=None))
    assert model.privacy_event.batch_order is hsa.BatchOrder.POISSON
    assert "Batches are Poisson" in model.report(1e-5)


def test_a_model_that_was_made_private(tmp_path):
    """It is saved with what the optimizer said, and compiled again with something else."""
    plain = tf.keras.Sequential([layers.Dense(CLASSES)])
    plain.build((None, FEATURES))
    model = make_private(plain)
    model.compile(cyclic(), crossentropy(), run_eagerly=True)
    fit(model).save(tmp_path / "model.keras")
    loaded = tf.keras.models.load_model(tmp_path / "model.keras")
    loaded.run_eagerly = True
    assert loaded.noise_multiplier == NOISE
    assert type(loaded.optimizer) is SGD
    assert fit(loaded).privacy_events == (model.privacy_event,) * 2
    model.compile(cyclic(3.0), crossentropy(), run_eagerly=True)
    assert model.noise_multiplier == 3.0
    with pytest.raises(ValueError, match="Expected l2_norm_clip of the model, got none"):
        model.compile(SGD(RATE), crossentropy())
    assert fit(model).privacy_event.noise_multiplier == 3.0


GIVEN = cyclic(num_microbatches=2, prox=PROX, projection_radius=3.0, loss_geometry=SOFTMAX)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"l2_norm_clip": 0.5}, r"l2_norm_clip = 0\.5, .* got 0\.4 of CyclicDPKerasSGDOptimizer"),
        ({"noise_multiplier": 0.0}, r"noise_multiplier = 0\.0, .* got 2\.0"),
        ({"num_microbatches": 4}, "num_microbatches = 4, .* got 2"),
        (
            {"prox": hsa.Regulariser(l1=0.1)},
            r"prox = Regulariser\(l1=0\.1.* got Regulariser\(l1=0\.0",
        ),
        ({"projection_radius": 2}, r"projection_radius = 2\.0, .* got 3\.0"),
        ({"loss_geometry": "auto", "feature_norm": 1.0}, "loss_geometry = 'auto', .* LossGeom"),
        ({"max_batch_size": 8}, 'unless batch_order = "poisson"'),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_they_contradict_each_other(settings, text):
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        make(GIVEN, **settings)


@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        (lambda: cyclic(learning_rate=lambda: 0.1), "or a schedule of Keras"),
        (lambda: DiceUpdate(cyclic()), "noise would be added twice"),
        (lambda: DPKerasSGDOptimizer(CLIP, NOISE, learning_rate=RATE), "got DPOptimizerClass"),
    ],
)
def test_refusals(optimizer, text):
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        make(optimizer(), l2_norm_clip=CLIP, noise_multiplier=NOISE)


def test_what_the_data_has_to_fit():
    with pytest.raises(hsa.UnsupportedRunError, match="num_microbatches = None or 4"):
        fit(make(dice(num_microbatches=2)))
    with pytest.raises(TypeError, match="compile with an optimizer without noise"):
        fit(make(cyclic()), target_epsilon=1.0, target_delta=1e-5)
