"""DiceSGD and DiceAdam in Keras: steps of the paper, the event of what ran, an error that stays."""

import copy
import itertools
import math
import pickle
import re
import zipfile

import attrs
import numpy as np
import pytest
from cases import first

pytest.importorskip("tensorflow_privacy")
import tensorflow as tf
from dice import normalise, update
from keras_models import compile_with

import hidden_state_accountants as hsa
from hidden_state_adapters.tf_privacy import (
    CyclicDPKerasSGDOptimizer,
    DiceKerasAdamOptimizer,
    DiceKerasSGDOptimizer,
)
from hidden_state_adapters.tf_privacy.dice import clip_factor
from hidden_state_adapters.tf_privacy.step import joint_norm

# Exact in float32, in which Keras keeps the learning rate.
RATE, CLIP, ERROR_CLIP = 0.25, 0.5, 0.2


def make(automatic=False, **options):
    given = {"learning_rate": RATE, "error_l2_norm_clip": ERROR_CLIP, **options}
    return DiceKerasSGDOptimizer(CLIP, 0.0, automatic=automatic, **given)


def step(optimizer, rows, x):
    """Of losses whose gradients are these rows."""
    optimizer.minimize(lambda: tf.linalg.matvec(tf.constant(rows), x), [x])


# --- the steps of the paper -----------------------------------------------------------------------


@pytest.mark.parametrize("automatic", [False, True])
def test_the_steps_are_those_of_the_paper(automatic):
    optimizer = make(automatic)
    x, place, error = tf.Variable(np.zeros(3)), np.zeros(3), np.zeros(3)
    clipper = {"clipper": normalise} if automatic else {}
    for seed in range(3):
        gradients = np.random.default_rng(seed).normal(size=(4, 3))
        step(optimizer, gradients, x)
        v, error = update(error, gradients, 4, CLIP, ERROR_CLIP, **clipper)
        place = place - RATE * v
        np.testing.assert_allclose(x, place, atol=1e-12)


def test_gradients_that_nobody_applies_leave_the_error_alone():
    x, optimizer, rows = tf.Variable(np.zeros(3)), make(), np.full((4, 3), 9.0)
    step(optimizer, rows, x)
    before = error_of(optimizer)
    optimizer._compute_gradients(lambda: tf.linalg.matvec(tf.constant(rows), x), [x])
    assert error_of(optimizer) == before
    assert np.linalg.norm(before) > 1


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


# --- the clip and what one record does ------------------------------------------------------------


@pytest.mark.parametrize("automatic", [False, True])
@pytest.mark.parametrize(
    ("dtype", "exponents"),
    [(tf.float32, np.linspace(-45, 35, 41)), (tf.float64, np.linspace(-320, 300, 63))],
)
def test_no_vector_is_longer_than_the_clip_norm_though_squares_underflow(
    dtype, exponents, automatic
):
    for exponent, clip in itertools.product(exponents, (1e-20, 1.0)):
        vector = np.full(100, 10.0**exponent).astype(dtype.as_numpy_dtype)
        norm = joint_norm([tf.constant(vector[:40]), tf.constant(vector[40:])])
        factor = clip_factor(norm, clip, dtype, automatic=automatic)
        result = (tf.cast(factor, dtype) * vector).numpy().astype(float)
        assert np.abs(result).max() * 10 <= clip * (1 + 1e-6)
        if vector[0] > 1e9 * np.finfo(vector.dtype).tiny:  # shorter ones may be flushed to zero
            assert float(norm) == pytest.approx(10 * float(vector[0]), rel=1e-12)


@pytest.mark.usefixtures("row_by_row")
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
        x, optimizer = tf.Variable(np.zeros(3)), make(automatic, learning_rate=1.0)
        places = [x.numpy()]
        for rows in [*np.split(gradients, 3)] * 5:
            step(optimizer, rows, x)
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


# --- the account ----------------------------------------------------------------------------------

DELTA = 1e-5
BOUND = 1.4143  # of the logistic loss on unit rows with a bias
EXPECTED = hsa.DiceSgdDpEvent(
    noise_std=40.0 * 0.25 / 4, clip_norm=0.25, error_clip_norm=0.125, batch_size=4,
    dataset_size=24, num_steps=12, batch_order="cyclic", gradient_bound=BOUND,
)  # fmt: skip


def dice(kind=DiceKerasSGDOptimizer, **kwargs):
    return kind(0.25, 40.0, **{"error_l2_norm_clip": 0.125, "learning_rate": 0.5, **kwargs})


@pytest.fixture
def make_dice(make_run, compile_options):
    def make(optimizer=None, compile=None, **callback):
        run = make_run(callback={"gradient_bound": BOUND, **callback})
        run.optimizer = optimizer or dice()
        compile_with(run, **(compile_options if compile is None else compile))
        return run

    return make


def exact(event):
    return hsa.DiceSgdAccountant().compose(event).get_epsilon(DELTA)


@pytest.mark.usefixtures("row_by_row")
def test_the_event_and_the_epsilon_of_every_epoch(make_dice):
    """Releases and files cost nothing more: all iterates are accounted."""
    run = make_dice(compile={"jit_compile": True}, target_delta=DELTA)
    save = tf.keras.callbacks.ModelCheckpoint("a.keras")
    history = run.fit(callbacks=[save], epochs=2).history["epsilon_if_released_now"]
    assert run.callback.privacy_event == EXPECTED
    assert history == [exact(attrs.evolve(EXPECTED, num_steps=6)), exact(EXPECTED)]
    assert history[0] < history[1] < math.inf
    assert run.callback.get_epsilon(DELTA) == history[1]
    assert run.callback.guarantee.neighboring_relation.name == "REPLACE_SPECIAL"


@pytest.mark.usefixtures("row_by_row")
def test_adam_and_automatic(make_dice):
    for optimizer, changes in (
        (dice(DiceKerasAdamOptimizer), {"gradient_bound": math.inf}),
        (dice(automatic=True), {"automatic": True}),
    ):
        run = make_dice(optimizer, gradient_bound=changes.get("gradient_bound", BOUND))
        run.fit()
        run.callback.release()
        run.fit()
        assert run.callback.privacy_event == attrs.evolve(EXPECTED, **changes)


@pytest.mark.usefixtures("row_by_row")
def test_bounds_that_are_refused(make_dice):
    with pytest.raises(hsa.UnsupportedRunError, match=r"longer than .*, or gradient_bound"):
        make_dice(gradient_bound=0.1).fit()
    with pytest.raises(hsa.UnsupportedRunError, match="gradient_bound for a Dice optimizer"):
        make_dice(CyclicDPKerasSGDOptimizer(1.0, 1.0)).fit()


# --- the error is in no file, text or copy --------------------------------------------------------

MARK = 777.25  # the error of the one record below: a value that stands out
# With its point: addresses and digests have digits of their own, at random.
SHOWN = re.compile(r"77[78]\.25")
NEEDLES = [kind(MARK).tobytes() for kind in (np.float32, np.float64)]


def error_of(optimizer):
    return np.concatenate([np.ravel(part) for part in optimizer._steps.rule._errors]).tolist()


def marked(kind, **options):
    """A compiled model whose optimizer has the error MARK in one coordinate."""
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, use_bias=False, dtype="float64")])
    model.build((None, 1))
    model.compile(kind(1.0, 1.0, learning_rate=0.0, **options), "mse")
    features = tf.constant([[MARK + 1]], tf.float64)
    model.optimizer.minimize(lambda: tf.reduce_sum(model(features), 1), model.trainable_variables)
    assert error_of(model.optimizer) == [MARK]
    return model


SAVERS = {
    "keras": lambda model, path: model.save(f"{path}.keras"),
    "h5": lambda model, path: model.save(f"{path}.h5"),
    "savedmodel": lambda model, path: model.save(f"{path}/model", save_format="tf"),
    "weights_h5": lambda model, path: model.save_weights(f"{path}.weights.h5"),
    "weights_tf": lambda model, path: model.save_weights(f"{path}/weights"),
    "checkpoint": lambda model, path: tf.train.Checkpoint(
        model=model, optimizer=model.optimizer
    ).save(f"{path}/checkpoint"),
}


@pytest.mark.parametrize("saver", SAVERS)
def test_the_error_is_in_no_file(tmp_path, saver):
    """Read as bytes, uncompressed, in which the search finds a weight."""
    model = marked(DiceKerasAdamOptimizer if "h5" in saver else DiceKerasSGDOptimizer)
    model.layers[0].kernel.assign([[-555.25]])
    SAVERS[saver](model, tmp_path / "saved")
    if saver == "keras":  # a zip file
        with zipfile.ZipFile(tmp_path / "saved.keras") as file:
            file.extractall(tmp_path / "extracted")
    found = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    assert not any(needle in found for needle in NEEDLES)
    assert np.float64(-555.25).tobytes() in found


def test_the_error_is_in_no_text_and_no_copy():
    optimizer = marked(DiceKerasAdamOptimizer, amsgrad=True).optimizer
    config = optimizer.get_config(), tf.keras.optimizers.serialize(optimizer)
    for text in (repr(optimizer), str(optimizer), vars(optimizer), config):
        assert not SHOWN.search(str(text))
    assert not any(needle in pickle.dumps(optimizer) for needle in NEEDLES)
    for copier in (pickle.dumps, copy.copy, copy.deepcopy):
        assert getattr(copier(optimizer), "_steps", None) is None
        with pytest.raises(hsa.UnsupportedRunError, match="cannot be copied or pickled"):
            copier(optimizer._steps.rule)
