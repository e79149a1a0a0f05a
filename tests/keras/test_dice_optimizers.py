"""DiceSGD for Keras: the steps of the paper, a hidden error, the event of what ran."""

import copy
import math
import pickle
import zipfile
from pathlib import Path

import attrs
import numpy as np
import pytest

pytest.importorskip("tensorflow_privacy")
import tensorflow as tf
from dice import adam_step, automatic_step, sgd_step
from dp_accounting import NeighboringRelation
from tensorflow_privacy.privacy.optimizers import dp_optimizer_keras

import hidden_state_accountants as hsa
from hidden_state_adapters.tf_privacy import DiceKerasAdamOptimizer, DiceKerasSGDOptimizer, query
from hidden_state_adapters.tf_privacy.dice_query import clip_factor, joint_norm

# Exact in float32, in which Keras keeps the learning rate and the betas.
RATE, CLIP, ERROR_CLIP, BETAS = 0.25, 0.5, 0.2, (0.875, 0.96875)
OPTIMIZERS = {
    "sgd": (DiceKerasSGDOptimizer, {}),
    "adam": (DiceKerasAdamOptimizer, {"beta_1": BETAS[0], "beta_2": BETAS[1]}),
    "automatic": (DiceKerasSGDOptimizer, {"automatic": True, "error_l2_norm_clip": None}),
}
VARIANTS = list(OPTIMIZERS)
TOLERANCE = {"float32": 2e-5, "float64": 1e-12}


@pytest.fixture(autouse=True)
def restored_precision():
    yield
    tf.keras.backend.set_floatx("float32")
    tf.keras.mixed_precision.set_global_policy("float32")


def make_model(dtype="float64", depth=2):
    """One or two layers; two compile for twice as long."""
    layers = [
        tf.keras.layers.Dense(3, activation="tanh", dtype=dtype),
        tf.keras.layers.Dense(1, dtype=dtype),
    ]
    model = tf.keras.Sequential(layers[:depth])
    model.build((None, 2))
    random = np.random.default_rng(0)
    model.set_weights([random.normal(size=w.shape) for w in model.get_weights()])
    return model


def make(variant="sgd", noise_multiplier=0.0, **options):
    cls, extra = OPTIMIZERS[variant]
    arguments = {"error_l2_norm_clip": ERROR_CLIP, "learning_rate": RATE}
    return cls(CLIP, noise_multiplier, **(arguments | extra | options))


def batches(sizes, dtype="float64"):
    random = np.random.default_rng(1)
    return [tf.constant(random.normal(size=(size, 2)), dtype) for size in sizes]


FOUR, OTHER_FOUR = batches([4, 4])


def losses(model, features):
    return 3.0 * tf.reduce_sum(model(features) ** 2, axis=1)


def step(model, optimizer, features):
    optimizer.minimize(lambda: losses(model, features), model.trainable_variables)


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


def compiled(act, model, optimizer, **kwargs):
    @tf.function(**kwargs)
    def one(features):
        act(model, optimizer, features)

    return one


def flat(tensors):
    return np.concatenate([np.asarray(t).ravel() for t in tensors]).astype(float)


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


def error_of(optimizer):
    return flat(optimizer._error.read())


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

    monkeypatch.setattr(query.tf.random.Generator, "normal", normal)
    return noise


# --- the steps of the paper -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "dtype", "act"),
    [
        ("sgd", "float64", step),
        ("adam", "float64", tape_step),
        ("automatic", "float64", two_calls_step),
        ("sgd", "float32", step),
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


@pytest.mark.parametrize(
    ("variant", "jit"), [("sgd", False), ("automatic", False), ("sgd", True), ("adam", True)]
)
def test_every_compiled_step_is_that_of_the_paper(variant, jit):
    model, optimizer = make_model(), make(variant)
    reference = Reference(variant, flat(model.trainable_variables))
    one = compiled(step, model, optimizer, jit_compile=jit)
    for features in batches([4] * 4):
        gradients = per_example(model, features)
        one(features)
        reference.step(gradients, 0.0)
    np.testing.assert_allclose(flat(model.trainable_variables), reference.x, rtol=0, atol=1e-12)
    np.testing.assert_allclose(error_of(optimizer), reference.error, rtol=0, atol=1e-11)


def test_empty_and_smaller_batches_in_a_graph():
    model, optimizer = make_model(), make(expected_batch_size=4)
    reference = Reference("sgd", flat(model.trainable_variables))
    signature = [tf.TensorSpec([None, 2], tf.float64)]
    one = compiled(step, model, optimizer, input_signature=signature)
    for features in batches([6, 0, 3]):
        gradients = per_example(model, features)
        one(features)
        reference.step(gradients, 0.0)
    np.testing.assert_allclose(flat(model.trainable_variables), reference.x, rtol=0, atol=1e-12)


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


class ThreeSquares(tf.keras.losses.Loss):
    def call(self, y, outputs):
        return 3.0 * tf.reduce_sum(outputs**2, axis=1)


@pytest.mark.parametrize("mode", [{}, {"run_eagerly": True}, {"jit_compile": True}])
def test_fit_with_a_schedule(mode):
    model, copied = make_model("float32"), make_model()
    schedule = tf.keras.optimizers.schedules.InverseTimeDecay(0.25, 5, 1.0)
    optimizer = make(num_microbatches=4, learning_rate=schedule)
    features = np.concatenate(batches([4] * 3, "float32"))
    model.compile(optimizer, ThreeSquares(reduction="none"), **mode)
    reference = Reference("sgd", flat(model.trainable_variables))
    ends = np.cumsum([int(tf.size(v)) for v in copied.trainable_variables])[:-1]
    for t in range(6):
        for variable, part in zip(
            copied.trainable_variables, np.split(reference.x, ends), strict=True
        ):
            variable.assign(part.reshape(variable.shape))
        rows = tf.constant(features[t % 3 * 4 : t % 3 * 4 + 4], tf.float64)
        reference.step(per_example(copied, rows), 0.0, 0.25 / (1 + t / 5))
    model.fit(features, np.zeros(12), batch_size=4, epochs=2, shuffle=False, verbose=0)
    np.testing.assert_allclose(flat(model.trainable_variables), reference.x, rtol=0, atol=1e-4)
    assert optimizer.last_step.steps == 6


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
    clipped = dp_optimizer_keras.GenericDPSGDOptimizer(
        query.WatchedGaussianSumQuery(0.5, 0.0), learning_rate=0.125
    )
    assert end_in_appendix_b1(clipped) == pytest.approx(-0.75, abs=1e-3)
    dice = DiceKerasSGDOptimizer(0.5, 0.0, learning_rate=0.125)
    assert end_in_appendix_b1(dice) == pytest.approx(0.0, abs=1e-3)


def test_dp_sgd_is_recovered_when_nothing_is_clipped(monkeypatch):
    """The same noise, and no error at all."""
    ends = []
    for kind in ("dice", "dp"):
        model = make_model()
        give_noise(monkeypatch, model, 5)
        if kind == "dice":
            optimizer = DiceKerasSGDOptimizer(1e4, 1e-6, learning_rate=RATE)
        else:
            optimizer = dp_optimizer_keras.GenericDPSGDOptimizer(
                query.WatchedGaussianSumQuery(1e4, 1e-6), learning_rate=RATE
            )
        for features in batches([4] * 5):
            step(model, optimizer, features)
        ends.append(flat(model.trainable_variables))
        if kind == "dice":
            assert not error_of(optimizer).any()
    np.testing.assert_allclose(*ends, rtol=0, atol=1e-14)


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


@pytest.mark.parametrize("jit", [None, False, True])
def test_the_noise_on_the_mean_update_has_the_stated_deviation(jit):
    """sigma_1 = noise_multiplier * C_1 / B, independent in every step and coordinate."""
    size, rows, divisor = 20_000, 3, 5
    variables = [tf.Variable(tf.zeros([size])) for _ in range(2)]
    optimizer = DiceKerasSGDOptimizer(
        0.2, 3.0, expected_batch_size=divisor, error_l2_norm_clip=1.0, learning_rate=1.0
    )

    def one():
        optimizer.minimize(
            lambda: tf.zeros([rows]) * sum(tf.reduce_sum(v) for v in variables), variables
        )

    one = one if jit is None else tf.function(one, jit_compile=jit)
    draws, before = [], np.zeros((2, size))
    for _ in range(3):
        one()
        after = np.array([v.numpy() for v in variables], dtype=float)
        draws += list(before - after)
        before = after
    event = optimizer.privacy_event(dataset_size=5, batch_order="poisson")
    assert event.noise_std == pytest.approx(3.0 * 0.2 / divisor)
    noise = np.array(draws) / event.noise_std
    # 5 standard deviations of each statistic.
    assert np.abs(noise.mean(axis=1)).max() < 5 / math.sqrt(size)
    assert np.abs(noise.var(axis=1) - 1).max() < 5 * math.sqrt(2 / size)
    correlations = np.corrcoef(noise)[np.triu_indices(6, 1)]
    assert np.abs(correlations).max() < 5 / math.sqrt(size)


@pytest.mark.parametrize("automatic", [False, True])
@pytest.mark.parametrize("size", [0.7, 300.0])
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


# --- the error stays here -------------------------------------------------------------------------

MARK = 777.25  # the error of the one record below: a value that stands out
NEEDLES = [kind(MARK).tobytes() for kind in (np.float32, np.float64)]


def marked(variant="sgd", dtype="float64", **options):
    """A compiled model whose optimizer has the error MARK in one coordinate."""
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, use_bias=False, dtype=dtype)])
    model.build((None, 1))
    cls, extra = OPTIMIZERS[variant]
    arguments = extra | {"error_l2_norm_clip": None, "learning_rate": 0.0} | options
    optimizer = cls(1.0, 1.0, **arguments)
    model.compile(optimizer, "mse")
    features = tf.constant([[MARK + 1]], dtype)
    optimizer.minimize(lambda: tf.reduce_sum(model(features), 1), model.trainable_variables)
    assert error_of(optimizer) == [MARK]
    return model, optimizer


def content(path):
    path = Path(path)
    files = [path] if path.is_file() else [f for f in path.rglob("*") if f.is_file()]
    return b"".join(f.read_bytes() for f in files)


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
@pytest.mark.parametrize("variant", ["sgd", "adam"])
def test_the_error_is_in_no_file(tmp_path, saver, variant):
    """Read as bytes, uncompressed, and that the search would find a weight."""
    model, _ = marked(variant)
    if variant == "sgd":  # something that must be found
        model.layers[0].kernel.assign([[-555.25]])
    SAVERS[saver](model, tmp_path / "saved")
    if saver == "keras":  # a zip file
        with zipfile.ZipFile(tmp_path / "saved.keras") as file:
            file.extractall(tmp_path / "extracted")
    found = content(tmp_path)
    assert not any(needle in found for needle in NEEDLES)
    if variant == "sgd":
        assert np.float64(-555.25).tobytes() in found


def test_the_error_is_in_no_checkpoint_of_the_optimizer_alone(tmp_path):
    _, optimizer = marked("adam")
    path = tf.train.Checkpoint(optimizer=optimizer).save(str(tmp_path / "c"))
    reader = tf.train.load_checkpoint(path)
    shapes = reader.get_variable_to_shape_map()
    values = [reader.get_tensor(name) for name in shapes if name != "_CHECKPOINTABLE_OBJECT_GRAPH"]
    assert not any(MARK in np.ravel(value) for value in values)
    assert [w.name.split("/")[-1] for w in optimizer.weights] == ["iter:0", "m:0", "v:0"]
    for listed in (optimizer.get_weights(), optimizer.variables(), optimizer.weights):
        assert not any(MARK in np.ravel(np.asarray(value)) for value in listed)


def test_the_error_is_in_no_text_and_no_config():
    _, optimizer = marked()
    report = optimizer.report(1e-5, dataset_size=1, batch_order="full")
    config = optimizer.get_config(), tf.keras.optimizers.serialize(optimizer)
    for text in (repr(optimizer), str(optimizer), vars(optimizer), report, config):
        assert "777" not in str(text)
        assert "778" not in str(text)


def test_copies_and_pickles_start_anew():
    _, optimizer = marked("adam", amsgrad=True)
    assert not any(needle in pickle.dumps(optimizer) for needle in NEEDLES)
    for again in (
        copy.copy(optimizer),
        copy.deepcopy(optimizer),
        pickle.loads(pickle.dumps(optimizer)),
    ):
        assert type(again) is DiceKerasAdamOptimizer
        assert again.get_config() == optimizer.get_config()
        assert again.last_step.steps == 0
        assert again._error.read() == []
    for copier in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(hsa.UnsupportedRunError, match="cannot be copied or pickled"):
            copier(optimizer._error)


class Subclass(DiceKerasSGDOptimizer):
    pass


@pytest.mark.parametrize("variant", VARIANTS)
def test_configuration_makes_the_round_trip(variant):
    schedule = tf.keras.optimizers.schedules.ExponentialDecay(0.3, 10, 0.9)
    options = {"momentum": 0.9, "nesterov": True} if variant != "adam" else {"amsgrad": True}
    optimizer = make(
        variant, 1.5, num_microbatches=3, expected_batch_size=7, learning_rate=schedule,
        decay=0.1, name="mine", **options,
    )  # fmt: skip
    for again in (
        type(optimizer).from_config(optimizer.get_config()),
        tf.keras.optimizers.deserialize(tf.keras.optimizers.serialize(optimizer)),
    ):
        assert type(again) is type(optimizer)
        assert again.get_config() == optimizer.get_config()
    assert optimizer.get_config()["error_l2_norm_clip"] == (
        CLIP if variant == "automatic" else ERROR_CLIP
    )
    assert isinstance(optimizer, tf.keras.optimizers.legacy.Optimizer)
    if variant != "adam":
        assert isinstance(optimizer, dp_optimizer_keras.GenericDPSGDOptimizer)
        assert type(Subclass.from_config(optimizer.get_config())) is Subclass
    else:
        assert isinstance(optimizer, dp_optimizer_keras.GenericDPAdamOptimizer)


@pytest.mark.parametrize("suffix", [".keras", ".h5", ""])
def test_a_loaded_optimizer_starts_another_run(tmp_path, suffix):
    """Keras restores its own state of a legacy optimizer from .h5 only."""
    model, optimizer = marked("adam", "float32")
    model.save(tmp_path / f"model{suffix}")
    loaded = tf.keras.models.load_model(tmp_path / f"model{suffix}")
    assert type(loaded.optimizer) is DiceKerasAdamOptimizer
    assert loaded.optimizer.get_config() == optimizer.get_config()
    check_another_run(loaded, loaded.optimizer, optimizer, 1 if suffix == ".h5" else 0)


def test_a_checkpoint_starts_another_run(tmp_path):
    model, optimizer = marked("adam", "float32")
    path = tf.train.Checkpoint(model=model, optimizer=optimizer).save(str(tmp_path / "c"))
    other, again = marked("adam", "float32")[0], make("adam", 1.0, error_l2_norm_clip=None)
    tf.train.Checkpoint(model=other, optimizer=again).restore(path)
    check_another_run(other, again, optimizer, 1)


def check_another_run(model, again, old, before):
    features = tf.constant([[0.25]])
    again.minimize(lambda: tf.reduce_sum(model(features), 1), model.trainable_variables)
    assert int(again.iterations) == before + 1  # Keras' count, and the moments, go on
    assert error_of(again) == [0.0]  # 0.25 is not clipped
    arguments = {"dataset_size": 1, "batch_order": "full"}
    assert again.privacy_event(**arguments).num_steps == 1
    line = "NOT in these figures: 1 steps before this optimizer was loaded"
    assert (line in again.report(1e-5, **arguments)) is bool(before)
    assert line not in old.report(1e-5, **arguments)


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
            assert f"epsilon = {exact:.4f} at delta = 1e-05" in text
            assert f"update rule {'Adam' if variant == 'adam' else 'SGD'}" in text
            assert "published: " in text


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
def test_events_of_another_run(arguments, error, text):
    model, optimizer = make_model(depth=1), make("sgd", 1.0)
    for features in batches([4] * 3):
        step(model, optimizer, features)
    with pytest.raises(error, match=text):
        optimizer.privacy_event(**arguments)


def test_add_or_remove_one_needs_a_constant_divisor():
    arguments = {
        "dataset_size": 4,
        "batch_order": "full",
        "neighboring_relation": NeighboringRelation.ADD_OR_REMOVE_ONE,
    }
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
    with pytest.raises(hsa.UnsupportedRunError, match="every cyclic batch, got 0 to 6"):
        optimizer.privacy_event(dataset_size=8, batch_order="cyclic")
    with pytest.raises(hsa.UnsupportedRunError, match="at most dataset_size = 5 rows"):
        optimizer.privacy_event(dataset_size=5, batch_order="poisson")
    with pytest.raises(ValueError, match="none yet"):
        make().privacy_event(dataset_size=8, batch_order="cyclic")


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"l2_norm_clip": 0.0}, ValueError, "l2_norm_clip"),
        ({"l2_norm_clip": math.inf}, ValueError, "l2_norm_clip"),
        ({"l2_norm_clip": 1e-31}, ValueError, "l2_norm_clip"),
        ({"noise_multiplier": -1.0}, ValueError, "noise_multiplier"),
        ({"noise_multiplier": "1"}, TypeError, "noise_multiplier"),
        ({"noise_multiplier": 1e-31}, ValueError, "noise_multiplier"),
        ({"num_microbatches": 0}, ValueError, "num_microbatches"),
        ({"error_l2_norm_clip": 0.0}, ValueError, "error_l2_norm_clip"),
        ({"error_l2_norm_clip": math.nan}, ValueError, "error_l2_norm_clip"),
        ({"error_l2_norm_clip": 1e31}, ValueError, "error_l2_norm_clip"),
        ({"automatic": 1}, TypeError, "automatic"),
        ({"expected_batch_size": 2.0}, TypeError, "expected_batch_size"),
        ({"expected_batch_size": 0}, ValueError, "expected_batch_size"),
        ({"learning_rate": -0.1}, ValueError, "learning_rate"),
        ({"no_such_argument": 1}, TypeError, "no_such_argument"),
        ({"clipnorm": 1.0}, hsa.UnsupportedRunError, "clipnorm = None"),
        ({"global_clipnorm": 1.0}, hsa.UnsupportedRunError, "global_clipnorm = None"),
        ({"gradient_accumulation_steps": 2}, hsa.UnsupportedRunError,
         "gradient_accumulation_steps = 1"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", [DiceKerasSGDOptimizer, DiceKerasAdamOptimizer])
def test_impossible_arguments(kind, arguments, error, text):
    with pytest.raises(error, match=text):
        kind(**{"l2_norm_clip": 1.0, "noise_multiplier": 1.0, **arguments})


def test_neutral_arguments_are_taken():
    make(gradient_accumulation_steps=1, clipnorm=None)


def ragged_batch(model, optimizer):
    step(model, optimizer, OTHER_FOUR[:3])


def empty_batch(model, optimizer):
    step(model, optimizer, OTHER_FOUR[:0])


def reduced_loss(model, optimizer):
    optimizer.minimize(lambda: tf.reduce_mean(losses(model, FOUR)), model.trainable_variables)


def weights_changed(model, optimizer):
    model.layers[0].kernel.assign_add(tf.fill([2, 3], tf.constant(1e-9, tf.float64)))
    step(model, optimizer, FOUR)


def other_variables(model, optimizer):
    other = make_model(depth=1)
    step(other, optimizer, FOUR)


def fewer_variables(model, optimizer):
    optimizer.minimize(lambda: losses(model, FOUR), model.trainable_variables[:1])


def not_finite(model, optimizer):
    step(model, optimizer, tf.concat([FOUR[:3], [[math.nan, 0.0]]], 0))


def seeded_again(model, optimizer):
    for seed in (0, 1, 0):
        optimizer._dp_sum_query._generator.reset_from_seed(seed)
        step(model, optimizer, FOUR)


def gradients_not_applied(model, optimizer):
    optimizer._compute_gradients(lambda: losses(model, FOUR), model.trainable_variables)
    step(model, optimizer, OTHER_FOUR)


def gradients_changed(model, optimizer):
    pairs = optimizer._compute_gradients(lambda: losses(model, FOUR), model.trainable_variables)
    optimizer.apply_gradients([(2.0 * g, v) for g, v in pairs])


def gradients_applied_twice(model, optimizer):
    pairs = optimizer._compute_gradients(lambda: losses(model, FOUR), model.trainable_variables)
    optimizer.apply_gradients(pairs)
    optimizer.apply_gradients(pairs)


def checkpoint_restored(model, optimizer):
    optimizer.iterations.assign(0)
    step(model, optimizer, FOUR)


def noise_changed(model, optimizer):
    optimizer._dp_sum_query.noise_multiplier = 0.1
    step(model, optimizer, FOUR)


def error_clip_changed(model, optimizer):
    optimizer._dp_sum_query.error_l2_norm_clip = 10.0
    step(model, optimizer, FOUR)


def clipnorm_set(model, optimizer):
    optimizer.clipnorm = 1.0
    step(model, optimizer, FOUR)


def accumulation_set(model, optimizer):
    optimizer.gradient_accumulation_steps = 2
    step(model, optimizer, FOUR)


def transformers_set(model, optimizer):
    optimizer.gradient_transformers.append(lambda pairs: pairs)
    step(model, optimizer, FOUR)


def estimator_way(model, optimizer):
    optimizer.get_gradients(None, None)


def weighted(model, optimizer):
    optimizer._compute_gradients(
        lambda: losses(model, FOUR), model.trainable_variables, grad_loss=tf.ones([4])
    )


def replicas(model, optimizer):
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        make()


def loss_scaling(model, optimizer):
    tf.keras.mixed_precision.set_global_policy("mixed_float16")
    make_model(None, depth=1).compile(optimizer, "mse")


def half_precision(model, optimizer):
    step(make_model("float16", depth=1), make(), tf.cast(FOUR, tf.float16))


# What is refused, its text, and whether the run is over.
REFUSALS = [
    (ragged_batch, "another number of rows", True),
    (empty_batch, "at least one example", False),
    (reduced_loss, "got a scalar", False),
    (weights_changed, "changed outside", True),
    (other_variables, "the error belongs to them", False),
    (fewer_variables, "the error belongs to them", False),
    (not_finite, "not finite", True),
    (seeded_again, "noise was used in an earlier step", True),
    (gradients_not_applied, "not applied", True),
    (gradients_changed, "not the noisy mean", True),
    (gradients_applied_twice, "not the noisy mean", False),
    (checkpoint_restored, "iterations was changed", True),
    (noise_changed, "about constant values", True),
    (error_clip_changed, "about constant values", True),
    (clipnorm_set, "clipnorm = None", False),
    (accumulation_set, "gradient_accumulation_steps = 1", False),
    (transformers_set, "gradient_transformers", False),
    (estimator_way, "TensorFlow 1 graphs", False),
    (weighted, "grad_loss = None", False),
    (replicas, "no distribution strategy", False),
    (loss_scaling, "loss scaling", False),
    (half_precision, "float32 or float64", False),
]


@pytest.mark.parametrize(
    ("act", "text", "ends"), REFUSALS, ids=[act.__name__ for act, _, _ in REFUSALS]
)
def test_refused(act, text, ends):
    model, optimizer = make_model(depth=1), make("sgd", 1.0)
    step(model, optimizer, FOUR)
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        act(model, optimizer)
    arguments = {"dataset_size": 8, "batch_order": "cyclic"}
    if ends:
        with pytest.raises(hsa.UnsupportedRunError):
            step(model, optimizer, FOUR)
        with pytest.raises(hsa.UnsupportedRunError):
            optimizer.privacy_event(**arguments)
    else:
        assert optimizer.privacy_event(**arguments).num_steps == optimizer.last_step.steps


def test_an_error_that_overflows():
    """An infinite error has no direction to clip."""
    x = tf.Variable([0.0])
    optimizer = DiceKerasSGDOptimizer(1.0, 1.0, expected_batch_size=1, learning_rate=0.0)

    def one():
        optimizer.minimize(lambda: tf.fill([4], 3e38) * x, [x])

    one()
    with pytest.raises(hsa.UnsupportedRunError, match="The error overflowed"):
        one()


@pytest.mark.parametrize(("variant", "jit"), [("sgd", False), ("adam", False), ("adam", True)])
def test_a_refused_step_in_a_graph_changes_nothing_and_ends_the_run(variant, jit):
    model = make_model(depth=1)
    optimizer = make(variant, 1.0, **({"momentum": 0.9} if variant == "sgd" else {}))
    signature = [tf.TensorSpec([4, 2], tf.float64)]
    one = compiled(step, model, optimizer, jit_compile=jit, input_signature=signature)
    one(FOUR)
    before = flat(model.trainable_variables), error_of(optimizer), flat(optimizer.get_weights()[1:])
    bad = tf.concat([FOUR[:3], [[math.nan, 0.0]]], 0)
    for features, problem in ((bad, "not finite"), (FOUR, "depend on the examples")):
        if jit:  # XLA leaves assertions out
            one(features)
            assert problem in str(optimizer.last_step.problem)
        else:
            with pytest.raises(tf.errors.InvalidArgumentError, match="The step was not taken"):
                one(features)
        after = flat(model.trainable_variables), error_of(optimizer)
        np.testing.assert_array_equal(np.r_[after], np.r_[before[:2]])
        np.testing.assert_array_equal(flat(optimizer.get_weights()[1:]), before[2])
    with pytest.raises(hsa.UnsupportedRunError, match=r"computed \d times, but 1 steps"):
        optimizer.privacy_event(dataset_size=8, batch_order="cyclic")


def test_gradients_that_are_only_looked_at_in_a_graph_are_counted():
    model, optimizer = make_model(depth=1), make("sgd", 1.0)

    @tf.function
    def look(features):
        pairs = optimizer._compute_gradients(
            lambda: losses(model, features), model.trainable_variables
        )
        return [gradient for gradient, _ in pairs]

    look(FOUR)
    with pytest.raises(hsa.UnsupportedRunError, match="computed 1 times, but 0 steps"):
        optimizer.privacy_event(dataset_size=8, batch_order="cyclic")
