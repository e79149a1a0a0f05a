"""DiceSGD and DiceAdam in Keras: every step is that of the paper."""

import numpy as np
import pytest
from cases import first

pytest.importorskip("tensorflow_privacy")
import tensorflow as tf
from dice import normalise, update

import hidden_state_accountants as hsa
from hidden_state_adapters.tf_privacy import CyclicDPKerasSGDOptimizer, DiceKerasSGDOptimizer
from hidden_state_adapters.tf_privacy.dice import clip_factor
from hidden_state_adapters.tf_privacy.step import joint_norm

pytestmark = pytest.mark.usefixtures("restored_precision")

# Exact in float32, in which Keras keeps the learning rate.
RATE, CLIP, ERROR_CLIP = 0.25, 0.5, 0.2


def make(automatic, **options):
    given = {"learning_rate": RATE, "error_l2_norm_clip": ERROR_CLIP, **options}
    return DiceKerasSGDOptimizer(CLIP, 0.0, automatic=automatic, **given)


# --- the steps of the paper -----------------------------------------------------------------------


@pytest.mark.parametrize("automatic", [False, True])
def test_the_steps_are_those_of_the_paper(automatic):
    optimizer = make(automatic)
    x, place, error = tf.Variable(np.zeros(3)), np.zeros(3), np.zeros(3)
    clipper = {"clipper": normalise} if automatic else {}
    for seed in range(3):
        gradients = np.random.default_rng(seed).normal(size=(4, 3))
        optimizer.minimize(lambda g=gradients: tf.linalg.matvec(tf.constant(g), x), [x])
        v, error = update(error, gradients, 4, CLIP, ERROR_CLIP, **clipper)
        place = place - RATE * v
        np.testing.assert_allclose(x, place, atol=1e-12)
    assert optimizer.last_step.steps == 3


def test_gradients_that_nobody_applies_leave_the_error_alone():
    x, optimizer = tf.Variable(np.zeros(3)), make(False)
    rows = lambda: tf.linalg.matvec(tf.constant(np.full((4, 3), 9.0)), x)  # noqa: E731
    optimizer.minimize(rows, [x])
    before = [error.numpy() for error in optimizer._steps.step.rule._errors]
    optimizer._compute_gradients(rows, [x])
    for error, old in zip(optimizer._steps.step.rule._errors, before, strict=True):
        np.testing.assert_array_equal(error, old)
    assert np.linalg.norm(before) > 1


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
        optimizer = make(automatic, learning_rate=1.0)

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
