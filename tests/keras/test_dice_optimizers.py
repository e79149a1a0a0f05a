"""DiceSGD and DiceAdam in Keras: every step is that of the paper."""

import math

import numpy as np
import pytest
from cases import first

pytest.importorskip("tensorflow_privacy")
import tensorflow as tf
from dice import adam_step, automatic_step, sgd_step
from keras_dice import (
    BETAS,
    CLIP,
    ERROR_CLIP,
    RATE,
    batches,
    error_of,
    flat,
    losses,
    make,
    make_model,
    step,
)

import hidden_state_accountants as hsa
from hidden_state_adapters.tf_privacy import CyclicDPKerasSGDOptimizer, DiceKerasSGDOptimizer
from hidden_state_adapters.tf_privacy.dice import clip_factor
from hidden_state_adapters.tf_privacy.step import joint_norm

pytestmark = pytest.mark.usefixtures("restored_precision")

TOLERANCE = {"float32": 2e-5, "float64": 1e-12}


def tape_step(model, optimizer, features):
    with tf.GradientTape() as tape:
        loss = losses(model, features)
    optimizer.minimize(loss, model.trainable_variables, tape=tape)


def two_calls_step(model, optimizer, features):
    with tf.GradientTape(persistent=True) as tape:
        loss = losses(model, features)
    optimizer.apply_gradients(
        optimizer._compute_gradients(loss, model.trainable_variables, tape=tape)
    )


def per_example(model, features):
    if not len(features):
        return np.zeros((0, sum(int(tf.size(v)) for v in model.trainable_variables)))
    if not hasattr(model, "jacobian"):  # compiled once
        model.jacobian = tf.function(lambda f: jacobian(model, f), reduce_retracing=True)
    parts = model.jacobian(features)
    return np.concatenate([j.numpy().reshape(len(features), -1) for j in parts], axis=1)


def jacobian(model, features):
    with tf.GradientTape() as tape:
        loss = losses(model, features)
    return tape.jacobian(loss, model.trainable_variables)


class Reference:
    """The steps of tests/reference/dice.py on one vector."""

    def __init__(self, variant, x, divisor=4):
        self.variant, self.x, self.divisor = variant, x, divisor
        self.error, self.moments, self.steps = np.zeros_like(x), (0.0, 0.0), 0

    def step(self, gradients, noise, rate=RATE):
        self.steps += 1
        common = {"learning_rate": rate, "divisor": self.divisor, "clip_norm": CLIP}
        state = self.x, self.error
        if self.variant == "automatic":
            self.x, self.error = automatic_step(*state, gradients, noise, **common)
        elif self.variant == "sgd":
            self.x, self.error = sgd_step(
                *state, gradients, noise, error_clip_norm=ERROR_CLIP, **common
            )
        else:  # Keras adds epsilon before the bias correction
            eps = 1e-7 / math.sqrt(1 - BETAS[1] ** self.steps)
            self.x, self.error, self.moments = adam_step(
                *state, self.moments, self.steps, gradients, noise,
                error_clip_norm=ERROR_CLIP, betas=BETAS, eps=eps, **common,
            )  # fmt: skip


def give_noise(monkeypatch, model, steps):
    """Standard normal numbers, one row per step, that the optimizer will draw."""
    sizes = [int(tf.size(v)) for v in model.trainable_variables]
    noise = np.random.default_rng(2).normal(size=(steps, sum(sizes)))
    parts = [part for row in noise for part in np.split(row, np.cumsum(sizes)[:-1])]

    def normal(_, shape, stddev, dtype):
        return tf.constant(stddev * parts.pop(0).reshape(shape.numpy()), dtype)

    monkeypatch.setattr(tf.random.Generator, "normal", normal)
    return noise


# --- the steps of the paper -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "dtype", "act"),
    [
        ("sgd", "float64", step),
        ("adam", "float64", tape_step),
        ("automatic", "float32", two_calls_step),
    ],
)
def test_every_eager_step_is_that_of_the_paper(monkeypatch, variant, dtype, act):
    """Several layers, given noise, batches of any size; an empty one takes its step, too."""
    model = make_model(dtype)
    optimizer = make(variant, 0.75, expected_batch_size=4)
    reference = Reference(variant, flat(model.trainable_variables))
    data = batches([6, 4, 0, 1, 4], dtype)
    noise = give_noise(monkeypatch, model, len(data))
    largest_error = 0.0
    for features, normal in zip(data, noise, strict=True):
        gradients = per_example(model, features)
        act(model, optimizer, features)
        reference.step(gradients, 0.75 * CLIP / 4 * normal)  # sigma_1, on the mean update
        np.testing.assert_allclose(
            flat(model.trainable_variables), reference.x, rtol=0, atol=TOLERANCE[dtype]
        )
        np.testing.assert_allclose(
            error_of(optimizer), reference.error, rtol=1e-5, atol=TOLERANCE[dtype]
        )
        largest_error = max(largest_error, np.linalg.norm(reference.error))
    assert largest_error > 2 * ERROR_CLIP  # both clips acted
    assert optimizer.last_step.steps == 5


@pytest.mark.parametrize("variant", ["sgd", "automatic"])
def test_rows_that_are_filled_up_with_masked_ones_are_not_there(variant):
    """For fixed shapes: a Poisson batch of 2, filled up to 5."""
    ends = []
    features = batches([5])[0]
    for rows, mask in ((2, [1.0, 1.0]), (5, [1.0, 1.0, 0.0, 0.0, 0.0])):
        model, optimizer = make_model(), make(variant, expected_batch_size=4)
        for _ in range(3):
            optimizer.minimize(
                lambda m=model, n=rows, k=mask: losses(m, features[:n]) * tf.constant(k, "float64"),
                model.trainable_variables,
            )
        ends.append(flat(model.trainable_variables))
    np.testing.assert_allclose(*ends, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("variant", "base", "options"),
    [
        ("sgd", tf.keras.optimizers.legacy.SGD, {"momentum": 0.9, "nesterov": True}),
        ("sgd", tf.keras.optimizers.legacy.SGD, {"momentum": 0.5, "decay": 0.1}),
        ("adam", tf.keras.optimizers.legacy.Adam, {"amsgrad": True, "epsilon": 1e-3}),
        ("adam", tf.keras.optimizers.legacy.Adam, {"decay": 0.1}),
    ],
)
def test_keras_sees_the_noisy_updates_only(variant, base, options):
    """The same noisy updates through Keras' own optimizer give the same iterates."""
    model, optimizer = make_model(), make(variant, 1.0, **options)
    moments = {} if variant == "sgd" else {"beta_1": BETAS[0], "beta_2": BETAS[1]}
    plain = base(learning_rate=RATE, **moments, **options)
    copies = [tf.Variable(v) for v in model.trainable_variables]
    for features in batches([4] * 4):
        pairs = optimizer._compute_gradients(
            lambda f=features: losses(model, f), model.trainable_variables
        )
        optimizer.apply_gradients(pairs)
        plain.apply_gradients([(g, c) for (g, _), c in zip(pairs, copies, strict=True)])
    np.testing.assert_array_equal(flat(model.trainable_variables), flat(copies))


# --- the clip and what one record does ----------------------------------------------


def test_the_clip_is_exact():
    norms = tf.constant([0.0, 0.3, 0.5, 2.0], tf.float64)
    factors = clip_factor(norms, 0.5, tf.float32, automatic=False)
    np.testing.assert_array_equal(factors, [1.0, 1.0, 1.0, 0.25])
    factors = clip_factor(norms, 0.5, tf.float32, automatic=True)
    np.testing.assert_allclose(factors * norms, [0.0, 0.5, 0.5, 0.5])


@pytest.mark.parametrize("automatic", [False, True])
@pytest.mark.parametrize("clip", [1e-20, 1.0])
@pytest.mark.parametrize(
    ("dtype", "exponents"),
    [(tf.float32, np.linspace(-45, 35, 81)), (tf.float64, np.linspace(-320, 300, 63))],
)
def test_no_vector_is_longer_than_the_clip_norm_though_squares_underflow(
    dtype, exponents, clip, automatic
):
    for exponent in exponents:
        vector = np.full(100, 10.0**exponent).astype(dtype.as_numpy_dtype)
        norm = joint_norm([tf.constant(vector[:40]), tf.constant(vector[40:])])
        factor = clip_factor(norm, clip, dtype, automatic=automatic)
        result = (tf.cast(factor, dtype) * vector).numpy().astype(float)
        assert np.abs(result).max() * 10 <= clip * (1 + 1e-6)
        if vector[0] > 1e9 * np.finfo(vector.dtype).tiny:  # shorter ones may be flushed to zero
            assert float(norm) == pytest.approx(10 * float(vector[0]), rel=1e-12)


@pytest.mark.parametrize(
    ("size", "automatic"), first(2, [(300.0, False), (0.7, True), (0.7, False), (300.0, True)])
)
def test_what_one_record_does_is_within_the_bound(size, automatic):
    """Without noise on neighbouring data sets: the squared differences of all updates together.

    The outlier is preceded by a batch that pulls the error the other way.
    """
    gradients = np.zeros((6, 3))
    gradients[:2, 0] = -size
    seen = []
    for gradients[2, 0] in (size, 0.0):
        x = tf.Variable(np.zeros(3))
        optimizer = make(automatic=automatic, learning_rate=1.0)

        @tf.function
        def one(rows, x=x, optimizer=optimizer):
            optimizer.minimize(lambda: tf.linalg.matvec(rows, x), [x])

        places = [x.numpy()]
        for rows in [*np.split(gradients, 3)] * 5:
            one(tf.constant(rows))
            places.append(x.numpy())
        seen.append(np.diff(places, axis=0))
    event = hsa.DiceSgdDpEvent(
        noise_std=1.0, clip_norm=CLIP, batch_size=2, dataset_size=6, num_steps=15,
        error_clip_norm=ERROR_CLIP, batch_order="cyclic",
        automatic=automatic, gradient_bound=size,
    )  # fmt: skip
    allowed = hsa.DiceSgdAccountant().compose(event).guarantee.mu
    shown = np.linalg.norm(seen[0] - seen[1])
    assert 0.3 * allowed < shown <= allowed * (1 + 1e-9)


# --- what the algorithm is for --------------------------------------------------------------------


def end_in_appendix_b1(optimizer, steps=400):
    """Huber losses bent at C' = 2, records -1, -1 and 2, full batches, from 0."""
    records = tf.constant([-1.0, -1.0, 2.0], tf.float64)
    x = tf.Variable(0.0, dtype=tf.float64)

    def huber():
        size = tf.abs(x - records)
        return tf.where(size <= 2, size**2 / 2, 2 * (size - 1))

    one = tf.function(lambda: optimizer.minimize(huber, [x]) and None)
    for _ in range(steps):
        one()
    return float(x)


def test_the_bias_of_clipping_vanishes():
    """Appendix B.1 (arXiv 2311.14632): DP-SGD ends far from the optimum 0, DiceSGD does not.

    Two records at -1 pull with x + 1 each until the clip at 1/2, one at 2 with 1/2: for DP-SGD
    2 (x + 1) = 1/2.
    """
    clipped = CyclicDPKerasSGDOptimizer(0.5, 0.0, learning_rate=0.125)
    assert end_in_appendix_b1(clipped) == pytest.approx(-0.75, abs=1e-3)
    dice = DiceKerasSGDOptimizer(0.5, 0.0, learning_rate=0.125)
    assert end_in_appendix_b1(dice) == pytest.approx(0.0, abs=1e-3)
