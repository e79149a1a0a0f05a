"""DiceSGD and DiceAdam in Keras: the clip, the noise, and the event of what ran."""

import math

import attrs
import numpy as np
import pytest
from cases import first

pytest.importorskip("tensorflow_privacy")
import tensorflow as tf
from dp_accounting import NeighboringRelation
from keras_dice import CLIP, ERROR_CLIP, FOUR, VARIANTS, batches, compiled, make, make_model, step

import hidden_state_accountants as hsa
from hidden_state_accountants.figures import fixed_up
from hidden_state_adapters.tf_privacy.dice import clip_factor
from hidden_state_adapters.tf_privacy.step import joint_norm

pytestmark = pytest.mark.usefixtures("restored_precision")


# --- the clip and the noise -----------------------------------------------------------------------


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
    seen, optimizer = [], None
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
    event = attrs.evolve(
        optimizer.privacy_event(dataset_size=6, batch_order="cyclic", gradient_bound=size),
        noise_std=1.0,
    )
    allowed = hsa.DiceSgdAccountant().compose(event).guarantee.mu
    shown = np.linalg.norm(seen[0] - seen[1])
    assert 0.3 * allowed < shown <= allowed * (1 + 1e-9)


# --- what is said about a run ---------------------------------------------------------------------


def test_event_and_report_of_all_variants():
    """Epsilon is that of the accountant and larger than that of DP-SGD at the same noise."""
    for variant in VARIANTS:
        model, optimizer = make_model(depth=1), make(variant, 20.0)
        one = compiled(step, model, optimizer)
        for features in batches([4] * 3):
            one(features)
        event = optimizer.privacy_event(dataset_size=12, batch_order="cyclic", num_steps=3)
        assert event == hsa.DiceSgdDpEvent(
            noise_std=20.0 * CLIP / 4, clip_norm=CLIP, batch_size=4, dataset_size=12, num_steps=3,
            error_clip_norm=CLIP if variant == "automatic" else ERROR_CLIP, batch_order="cyclic",
            automatic=variant == "automatic",
        )  # fmt: skip
        plain = attrs.evolve(event, gradient_bound=CLIP, automatic=False)
        epsilon, dp_sgd = (
            hsa.DiceSgdAccountant().compose(e).get_epsilon(1e-5) for e in (event, plain)
        )
        assert dp_sgd < epsilon < math.inf
        for relation in (NeighboringRelation.REPLACE_SPECIAL, NeighboringRelation.REPLACE_ONE):
            text = optimizer.report(
                1e-5, dataset_size=12, batch_order="cyclic", neighboring_relation=relation
            )
            exact = hsa.DiceSgdAccountant(relation).compose(event).get_epsilon(1e-5)
            assert f"epsilon = {fixed_up(exact, 4)} at delta = 1e-05" in text
            assert f"update rule {'Adam' if variant == 'adam' else 'SGD'}" in text
            assert "published: " in text


@pytest.fixture(scope="module")
def optimizer():
    model, optimizer = make_model(depth=1), make("sgd", 1.0)
    for features in batches([4] * 3):
        step(model, optimizer, features)
    return optimizer


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"dataset_size": 12, "batch_order": "cyclic", "num_steps": 4}, hsa.UnsupportedRunError,
         "num_steps = 3, the steps taken, got 4"),
        ({"dataset_size": 12, "batch_order": "cyclic", "gradient_bound": 0.1},
         hsa.UnsupportedRunError, "gradient_bound >= "),
        ({"dataset_size": 3, "batch_order": "cyclic"}, ValueError, "batch_size <= dataset_size"),
        ({"dataset_size": 5, "batch_order": "full"}, ValueError, "batch_size = dataset_size"),
        ({"dataset_size": 12, "batch_order": "poisson"}, hsa.UnsupportedRunError,
         "expected_batch_size for Poisson"),
        ({"dataset_size": 12, "batch_order": "sorted"}, ValueError, "sorted"),
    ],
)  # fmt: skip
def test_events_of_another_run(optimizer, arguments, error, text):
    with pytest.raises(error, match=text):
        optimizer.privacy_event(**arguments)


@pytest.mark.parametrize(
    "relation", [NeighboringRelation.ADD_OR_REMOVE_ONE, "add_or_remove_one"], ids=str
)
def test_add_or_remove_one_needs_a_constant_divisor(relation):
    arguments = {"dataset_size": 4, "batch_order": "full", "neighboring_relation": relation}
    for divisor in (4, None):
        model, optimizer = make_model(depth=1), make("sgd", 1.0, expected_batch_size=divisor)
        step(model, optimizer, FOUR)
        if divisor:
            assert "ADD_OR_REMOVE_ONE" in optimizer.report(1e-5, **arguments)
        else:
            with pytest.raises(hsa.UnsupportedRunError, match="with an example less"):
                optimizer.report(1e-5, **arguments)


def test_rows_of_the_event():
    model, optimizer = make_model(depth=1), make("sgd", 1.0, expected_batch_size=4)
    for features in batches([4, 6, 0]):
        step(model, optimizer, features)
    event = optimizer.privacy_event(dataset_size=8, batch_order="poisson")
    assert (event.batch_size, event.num_steps) == (4, 3)
    with pytest.raises(hsa.UnsupportedRunError, match="used 0 rows, expected batch_size = 4"):
        optimizer.privacy_event(dataset_size=8, batch_order="cyclic")
    with pytest.raises(hsa.UnsupportedRunError, match="used more rows than dataset_size = 5"):
        optimizer.privacy_event(dataset_size=5, batch_order="poisson")
    with pytest.raises(ValueError, match="none yet"):
        make().privacy_event(dataset_size=8, batch_order="cyclic")
