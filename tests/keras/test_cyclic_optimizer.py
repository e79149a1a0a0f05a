"""The optimizer alone: equal to the formula in every mode, saved and loaded, refusals."""

import copy
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("tensorflow_privacy")
import tensorflow as tf
from cyclic_sgd import cyclic_sgd, logistic_gradient
from tensorflow.python.framework import config
from tensorflow_privacy.privacy.optimizers import dp_optimizer_keras

import hidden_state_accountants as hsa
from hidden_state_adapters.tf_privacy import CyclicDPKerasSGDOptimizer

START = np.append(np.linspace(-0.4, 0.5, 4), 0.2)
TOLERANCE = {"float32": 2e-6, "float64": 1e-14}


@pytest.fixture(autouse=True)
def restored_precision():
    yield
    tf.keras.backend.set_floatx("float32")
    tf.keras.mixed_precision.set_global_policy("float32")


def data(dtype="float32", records=24):
    random = np.random.default_rng(0)
    x = random.normal(size=(records, 4))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    return x.astype(dtype), (random.random((records, 1)) < 0.5).astype(dtype)


def layer(dtype="float32"):
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, dtype=dtype)])
    model.build((None, 4))
    model.set_weights([START[:4].reshape(4, 1).astype(dtype), START[4:].astype(dtype)])
    return model


def losses(model, x, y):
    return tf.keras.losses.BinaryCrossentropy(from_logits=True, reduction="none")(y, model(x))


def flat(model):
    return np.concatenate([v.numpy().ravel() for v in model.trainable_variables])


def minimize_step(model, optimizer, x, y):
    optimizer.minimize(lambda: losses(model, x, y), model.trainable_variables)


def tape_step(model, optimizer, x, y):
    with tf.GradientTape() as tape:
        loss = losses(model, x, y)
    optimizer.minimize(loss, model.trainable_variables, tape=tape)


def two_calls_step(model, optimizer, x, y):
    with tf.GradientTape(persistent=True) as tape:
        loss = losses(model, x, y)
    optimizer.apply_gradients(
        optimizer._compute_gradients(loss, model.trainable_variables, tape=tape)
    )


def reference(x, y, noise, steps=8, rate=lambda t: 0.5, **kwargs):
    records = [(a.astype(float), float(b[0])) for a, b in zip(x, y, strict=True)]
    arguments = {"clip": 0.6, "weight_decay": 0.1, "radius": 0.55, **kwargs}
    return cyclic_sgd(
        START, logistic_gradient, records, batch_size=4, num_steps=steps, learning_rate=rate,
        noise=noise, **arguments,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "step"),
    [("float32", minimize_step), ("float32", tape_step), ("float64", two_calls_step)],
)
def test_own_loop_equals_the_formula_with_given_noise(monkeypatch, dtype, step):
    noise = np.random.default_rng(1).normal(size=(8, 5))
    drawn = []

    def normal(_, shape, stddev, dtype):
        t, position = divmod(len(drawn), 2)
        drawn.append(stddev)
        part = noise[t, :4].reshape(4, 1) if position == 0 else noise[t, 4:]
        assert tuple(shape) == part.shape
        return tf.constant(stddev * part, dtype)

    monkeypatch.setattr(tf.random.Generator, "normal", normal)
    tf.keras.backend.set_floatx(dtype)
    x, y = data(dtype)
    model = layer(dtype)
    optimizer = CyclicDPKerasSGDOptimizer(
        0.6, 1.5, learning_rate=0.5, weight_decay=0.1, projection_radius=0.55
    )
    expected = reference(x, y, 0.6 * 1.5 * noise)
    for t in range(8):
        rows = slice(t % 6 * 4, t % 6 * 4 + 4)
        step(model, optimizer, x[rows], y[rows])
        np.testing.assert_allclose(flat(model), expected[t], rtol=0, atol=TOLERANCE[dtype])
    assert set(drawn) == {0.6 * 1.5}
    projected = np.linalg.norm(expected, axis=1) > 0.55 - 1e-9
    assert 0 < projected.sum() < len(projected)


@pytest.mark.parametrize("mode", [{}, {"run_eagerly": True}, {"jit_compile": True}])
def test_fit_equals_the_formula_without_noise(mode):
    x, y = data()
    model = layer()
    rate = tf.keras.optimizers.schedules.InverseTimeDecay(0.5, 5, 1.0)
    optimizer = CyclicDPKerasSGDOptimizer(
        0.6, 0.0, 4, learning_rate=rate, weight_decay=0.1, projection_radius=0.6
    )
    model.compile(
        optimizer, tf.keras.losses.BinaryCrossentropy(from_logits=True, reduction="none"), **mode
    )
    model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    expected = reference(x, y, np.zeros((12, 5)), 12, rate=lambda t: 0.5 / (1 + t / 5), radius=0.6)
    np.testing.assert_allclose(flat(model), expected[-1], rtol=0, atol=4e-6)
    entry = optimizer.last_step
    assert (entry.steps, entry.rows, entry.problem) == (12, 4, 0)
    assert entry.learning_rate == pytest.approx(0.5 / (1 + 11 / 5))
    assert (entry.l2_norm_clip, entry.noise_multiplier, entry.weight_decay) == (0.6, 0.0, 0.1)
    assert optimizer.is_iterate(model.trainable_variables)
    assert int(optimizer.iterations) == 12


@pytest.mark.parametrize("arguments", [(None, 1), (2, 1), (2, 3)])
def test_without_decay_and_projection_it_is_the_optimizer_of_tf_privacy(arguments):
    x, y = data()
    results = []
    for kind in (CyclicDPKerasSGDOptimizer, dp_optimizer_keras.DPKerasSGDOptimizer):
        model = layer()
        optimizer = kind(0.3, 0.0, *arguments, learning_rate=0.5)
        for start in range(0, 24, 4):
            minimize_step(model, optimizer, x[start : start + 4], y[start : start + 4])
        results.append(flat(model))
    np.testing.assert_allclose(*results, rtol=0, atol=1e-6)


def test_accumulation_takes_one_step_with_the_mean_of_the_noisy_gradients():
    x, y = data()
    model = layer()
    optimizer = CyclicDPKerasSGDOptimizer(
        0.6, 0.0, None, 2, 0.5, weight_decay=0.1, projection_radius=10.0
    )
    for start in range(0, 24, 4):
        minimize_step(model, optimizer, x[start : start + 4], y[start : start + 4])
    records = [(a.astype(float), float(b[0])) for a, b in zip(x, y, strict=True)]
    expected = cyclic_sgd(
        START, logistic_gradient, records, batch_size=8, num_steps=3,
        learning_rate=lambda t: 0.5, clip=0.6, noise=np.zeros((3, 5)), weight_decay=0.1,
    )  # fmt: skip
    np.testing.assert_allclose(flat(model), expected[-1], rtol=0, atol=2e-6)


@pytest.mark.parametrize("jit", [None, False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_noise_is_gaussian_with_the_declared_deviation_and_independent(jit, dtype):
    size, rows, clip, multiplier, rate = 20_000, 5, 3.0, 2.0, 0.25
    variables = [tf.Variable(tf.zeros([size], dtype)) for _ in range(2)]
    optimizer = CyclicDPKerasSGDOptimizer(clip, multiplier, learning_rate=rate)

    def step():
        optimizer.minimize(
            lambda: tf.zeros([rows], dtype) * sum(tf.reduce_sum(v) for v in variables), variables
        )

    step = step if jit is None else tf.function(step, jit_compile=jit)
    increments, before = [], np.zeros((2, size))
    for _ in range(3):
        step()
        after = np.array([v.numpy() for v in variables], dtype=np.float64)
        increments += list(after - before)
        before = after
    noise = np.array(increments) * rows / (rate * clip * multiplier)
    # 5 standard deviations of each statistic.
    assert np.abs(noise.mean(axis=1)).max() < 5 / np.sqrt(size)
    assert np.abs(noise.var(axis=1) - 1).max() < 5 * np.sqrt(2 / size)
    assert np.abs((noise**4).mean(axis=1) - 3).max() < 5 * np.sqrt(96 / size)
    correlations = noise @ noise.T / size
    assert np.abs(correlations - np.diag(np.diag(correlations))).max() < 5 / np.sqrt(size)


@pytest.mark.parametrize("jit", [False, True])
def test_a_seed_does_not_repeat_the_noise_of_one_variable_in_another(jit):
    """As a retraced step with one more random operation would: every seed moves on by one."""
    tf.random.set_seed(1)
    variables = [tf.Variable(tf.zeros([100])) for _ in range(2)]
    optimizer = CyclicDPKerasSGDOptimizer(1.0, 1.0, learning_rate=1.0)

    @tf.function(jit_compile=jit)
    def step(has_dropout):
        def loss():
            total = sum(tf.reduce_sum(v) for v in variables)
            kept = tf.nn.dropout(tf.ones([4]), 0.5) if has_dropout else tf.ones([4])
            return tf.stop_gradient(kept * total) * total * 0.0

        optimizer.minimize(loss, variables)

    step(False)
    first = variables[1].numpy()
    variables_before = variables[0].numpy()
    step(True)
    second = variables[0].numpy() - variables_before
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.6


def test_noise_of_a_reproducible_program_is_fresh():
    variable = tf.Variable(tf.zeros([100]))
    tf.random.set_seed(1)
    tf.config.experimental.enable_op_determinism()
    try:
        draws = []
        for _ in range(2):
            tf.random.set_seed(1)
            optimizer = CyclicDPKerasSGDOptimizer(1.0, 1.0, learning_rate=1.0)
            before = variable.numpy()
            optimizer.minimize(lambda: tf.zeros([2]) * tf.reduce_sum(variable), [variable])
            draws.append(variable.numpy() - before)
    finally:
        config.disable_op_determinism()
    assert abs(np.corrcoef(draws)[0, 1]) < 0.6


# Saving and loading


def full_optimizer(**kwargs):
    return CyclicDPKerasSGDOptimizer(
        0.7, 1.1, 4, 1,
        tf.keras.optimizers.schedules.ExponentialDecay(0.3, 10, 0.9),
        weight_decay=0.2, projection_radius=3.0, name="mine",
        loss_geometry=hsa.LossGeometry.strongly_convex(2.0, 0.5, lipschitz=4.0), **kwargs,
    )  # fmt: skip


class Subclass(CyclicDPKerasSGDOptimizer):
    pass


def test_configuration_makes_the_round_trip():
    optimizer = full_optimizer()
    for again in (
        CyclicDPKerasSGDOptimizer.from_config(optimizer.get_config()),
        tf.keras.optimizers.deserialize(tf.keras.optimizers.serialize(optimizer)),
    ):
        assert type(again) is CyclicDPKerasSGDOptimizer
        assert again.get_config() == optimizer.get_config()
        assert again.loss_geometry == optimizer.loss_geometry
        assert again.projection_radius == 3.0
    assert isinstance(optimizer, dp_optimizer_keras.GenericDPSGDOptimizer)
    assert isinstance(optimizer, tf.keras.optimizers.legacy.SGD)
    assert type(Subclass.from_config(optimizer.get_config())) is Subclass


@pytest.mark.parametrize("suffix", [".keras", ".h5", ""])
def test_saved_models_load_with_the_optimizer_and_train_on(tmp_path, suffix):
    x, y = data()
    model = layer()
    loss = tf.keras.losses.BinaryCrossentropy(from_logits=True, reduction="none")
    model.compile(full_optimizer(), loss)
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    path = str(tmp_path / f"model{suffix}")
    model.save(path)
    loaded = tf.keras.models.load_model(path)
    assert type(loaded.optimizer) is CyclicDPKerasSGDOptimizer
    assert loaded.optimizer.get_config() == model.optimizer.get_config()
    np.testing.assert_array_equal(flat(loaded), flat(model))
    loaded.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    assert loaded.optimizer.last_step.steps == 6
    assert np.linalg.norm(flat(loaded)) <= 3


def test_the_log_is_in_no_checkpoint(tmp_path):
    model = layer()
    optimizer = full_optimizer()
    x, y = data()
    minimize_step(model, optimizer, x[:4], y[:4])
    path = tf.train.Checkpoint(model=model, optimizer=optimizer).save(str(tmp_path / "c"))
    names = [name for name, _ in tf.train.list_variables(path)]
    assert not [name for name in names if "log" in name or "counts" in name or "values" in name]
    assert [w.name for w in optimizer.weights] == ["mine/iter:0"]


# Refusals


def reduced_loss():
    model = layer()
    x, y = data()
    full_optimizer().minimize(
        lambda: tf.reduce_mean(losses(model, x, y)), model.trainable_variables
    )


def unequal_microbatches():
    model = layer()
    x, y = data()
    minimize_step(model, CyclicDPKerasSGDOptimizer(1.0, 1.0, 3), x[:4], y[:4])


def empty_batch():
    model = layer()
    x, y = data()
    minimize_step(model, CyclicDPKerasSGDOptimizer(1.0, 1.0), x[:0], y[:0])


def ragged_batches():
    model, optimizer = layer(), CyclicDPKerasSGDOptimizer(1.0, 1.0)
    x, y = data()
    minimize_step(model, optimizer, x[:4], y[:4])
    minimize_step(model, optimizer, x[:3], y[:3])


def weights_set_between_steps():
    model, optimizer = layer(), CyclicDPKerasSGDOptimizer(1.0, 1.0)
    x, y = data()
    minimize_step(model, optimizer, x[:4], y[:4])
    model.layers[0].kernel.assign_add(tf.fill([4, 1], 1e-6))
    minimize_step(model, optimizer, x[4:8], y[4:8])


def other_model_between_steps():
    optimizer = CyclicDPKerasSGDOptimizer(1.0, 1.0)
    x, y = data()
    for model in (layer(), layer()):
        minimize_step(model, optimizer, x[:4], y[:4])


def gradient_longer_than_declared():
    model = layer()
    x, y = data()
    minimize_step(model, full_optimizer(), 1e3 * x[:4], y[:4])


def gradient_not_finite():
    model = layer()
    x, y = data()
    x[0] = np.nan
    minimize_step(model, CyclicDPKerasSGDOptimizer(1.0, 1.0), x[:4], y[:4])


def gradients_changed():
    model, optimizer = layer(), CyclicDPKerasSGDOptimizer(1.0, 1.0)
    x, y = data()
    pairs = optimizer._compute_gradients(
        lambda: losses(model, x[:4], y[:4]), model.trainable_variables
    )
    optimizer.apply_gradients([(2.0 * g, v) for g, v in pairs])


def gradients_applied_twice():
    model, optimizer = layer(), CyclicDPKerasSGDOptimizer(1.0, 1.0)
    x, y = data()
    pairs = optimizer._compute_gradients(
        lambda: losses(model, x[:4], y[:4]), model.trainable_variables
    )
    optimizer.apply_gradients(pairs)
    optimizer.apply_gradients(pairs)


def several_replicas():
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        full_optimizer()


def loss_scaling():
    tf.keras.mixed_precision.set_global_policy("mixed_float16")
    layer(None).compile(full_optimizer(), "mse")


def mixed_bfloat16():
    tf.keras.mixed_precision.set_global_policy("mixed_bfloat16")
    model = layer(None)
    x, y = data()
    minimize_step(model, CyclicDPKerasSGDOptimizer(1.0, 1.0), x[:4], y[:4])


def half_precision_variables():
    minimize_step(layer("float16"), CyclicDPKerasSGDOptimizer(1.0, 1.0), *data("float16"))


def constraint():
    model = tf.keras.Sequential(
        [tf.keras.layers.Dense(1, kernel_constraint=tf.keras.constraints.UnitNorm())]
    )
    model.build((None, 4))
    minimize_step(model, CyclicDPKerasSGDOptimizer(1.0, 1.0), *data())


def clipnorm_set_later():
    optimizer = CyclicDPKerasSGDOptimizer(1.0, 1.0)
    optimizer.clipnorm = 1.0
    minimize_step(layer(), optimizer, *data())


def estimator_way():
    CyclicDPKerasSGDOptimizer(1.0, 1.0).get_gradients(None, None)


REFUSALS = [
    (reduced_loss, "got a scalar"),
    (unequal_microbatches, "num_microbatches to divide the batch of 4 rows, got 3"),
    (empty_batch, "at least one example"),
    (ragged_batches, "another number of rows"),
    (weights_set_between_steps, "changed outside"),
    (other_model_between_steps, "changed outside"),
    (gradient_longer_than_declared, "longer than loss_geometry.lipschitz"),
    (gradient_not_finite, "not finite"),
    (gradients_changed, "not the noisy mean"),
    (gradients_applied_twice, "not the noisy mean"),
    (several_replicas, "no distribution strategy"),
    (loss_scaling, "loss scaling"),
    (mixed_bfloat16, "mixed.precision"),
    (half_precision_variables, "float32 or float64"),
    (constraint, "without a constraint"),
    (clipnorm_set_later, "clipnorm = None"),
    (estimator_way, "TensorFlow 1 graphs"),
    (lambda: full_optimizer(momentum=0.9), "momentum = 0.0"),
    (lambda: full_optimizer(nesterov=True), "nesterov = False"),
    (lambda: full_optimizer(decay=0.1), "decay = 0.0"),
    (lambda: full_optimizer(clipnorm=1.0), "clipnorm = None"),
]


@pytest.mark.parametrize(
    ("act", "text"), REFUSALS, ids=[getattr(act, "__name__", "") + text for act, text in REFUSALS]
)
def test_refused(act, text):
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        act()


@pytest.mark.parametrize("jit", [False, True])
def test_a_refused_step_in_a_graph_changes_nothing(jit):
    model, optimizer = layer(), CyclicDPKerasSGDOptimizer(1.0, 1.0, weight_decay=0.1)
    x, y = data()
    signature = [tf.TensorSpec([None, 4]), tf.TensorSpec([None, 1])]

    @tf.function(jit_compile=jit, input_signature=signature)
    def step(x, y):
        minimize_step(model, optimizer, x, y)

    step(x[:4], y[:4])
    before = flat(model)
    if jit:  # XLA leaves assertions out
        step(x[:3], y[:3])
    else:
        with pytest.raises(tf.errors.InvalidArgumentError, match="The step was not taken"):
            step(x[:3], y[:3])
    np.testing.assert_array_equal(flat(model), before)
    with pytest.raises(tf.errors.InvalidArgumentError):
        step(x[:0], y[:0])
    np.testing.assert_array_equal(flat(model), before)
    assert optimizer.last_step.steps == 1
    if jit:
        assert "number of rows" in str(optimizer.last_step.problem)


def test_applying_foreign_gradients_first_fails_as_in_tf_privacy():
    model = layer()
    with pytest.raises(AssertionError, match="_compute_gradients"):
        full_optimizer().apply_gradients([(tf.ones_like(v), v) for v in model.trainable_variables])


@pytest.mark.parametrize(
    ("kwargs", "kind"),
    [
        ({"l2_norm_clip": 0.0}, ValueError),
        ({"l2_norm_clip": float("nan")}, ValueError),
        ({"l2_norm_clip": 1e-31}, ValueError),
        ({"l2_norm_clip": 1e31}, ValueError),
        ({"noise_multiplier": 1e-31}, ValueError),
        ({"noise_multiplier": -1.0}, ValueError),
        ({"noise_multiplier": "1"}, TypeError),
        ({"num_microbatches": 0}, ValueError),
        ({"learning_rate": -0.1}, ValueError),
        ({"weight_decay": -0.1}, ValueError),
        ({"projection_radius": 0.0}, ValueError),
        ({"loss_geometry": "convex"}, TypeError),
        ({"beta_1": 0.9}, TypeError),
    ],
)
def test_impossible_arguments(kwargs, kind):
    with pytest.raises(kind, match=next(iter(kwargs))):
        CyclicDPKerasSGDOptimizer(**{"l2_norm_clip": 1.0, "noise_multiplier": 1.0, **kwargs})


def test_a_copy_starts_without_steps():
    model, optimizer = layer(), full_optimizer()
    minimize_step(model, optimizer, *(part[:4] for part in data()))
    assert copy.deepcopy(optimizer).last_step.steps == 0


@pytest.mark.slow
def test_tensorflow_is_imported_late_and_torch_never():
    program = (
        "import sys, hidden_state_adapters.tf_privacy as t\n"
        "t.compute_last_iterate_privacy_statement\n"
        "assert not {'tensorflow', 'torch'} & set(sys.modules)\n"
        "t.CyclicDPKerasSGDOptimizer, t.cyclic_dataset, t.HiddenStateCallback\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
