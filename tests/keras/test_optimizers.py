"""The drop-in optimizers: they take the step of the private model, and refuse every other one."""

import copy
import math
import pickle
import subprocess
import sys

import numpy as np
import pytest
from cases import first

pytest.importorskip("tensorflow")
import tensorflow as tf
from keras_models import bce

import hidden_state_accountants as hsa
from hidden_state_adapters.tf_privacy import (
    BlockCoordinateKerasOptimizer,
    BlockCoordinateUpdate,
    CyclicDPKerasSGDOptimizer,
    DiceKerasAdamOptimizer,
    DiceKerasSGDOptimizer,
    make_private,
)

N, B, FEATURES = 12, 4, 3
SCHEDULE = tf.keras.optimizers.schedules.InverseTimeDecay(0.5, 5, 0.5)
PROX = hsa.Regulariser(l1=0.01, l2=0.1)
KINDS = {
    "cyclic": lambda z=0.0, **k: CyclicDPKerasSGDOptimizer(
        0.3, z, **{"learning_rate": SCHEDULE, "weight_decay": 0.1, "projection_radius": 1.2, **k}
    ),
    "microbatches": lambda z=0.0, **k: CyclicDPKerasSGDOptimizer(
        0.3, z, 2, prox=PROX, **{"learning_rate": 0.5, **k}
    ),
    "dice": lambda z=0.0, **k: DiceKerasSGDOptimizer(
        0.3, z, error_l2_norm_clip=0.1, momentum=0.9, **{"learning_rate": 0.5, **k}
    ),
    "adam": lambda z=0.0, **k: DiceKerasAdamOptimizer(
        0.3, z, error_l2_norm_clip=0.1, **{"learning_rate": 0.05, **k}
    ),
    "blocks": lambda z=0.0, **k: BlockCoordinateKerasOptimizer(
        0.3, z, l1=PROX.l1, l2=PROX.l2, **{"learning_rate": 0.5, **k}
    ),
}
layers = tf.keras.layers
X = np.random.default_rng(0).normal(size=(N, FEATURES)).astype("float32")
Y = (X[:, :1] > 0).astype("float32")


def network():
    model = tf.keras.Sequential([layers.Dense(2, activation="tanh"), layers.Dense(1)])
    model.build((None, FEATURES))
    random = np.random.default_rng(1)
    model.set_weights([0.5 * random.normal(size=w.shape) for w in model.get_weights()])
    return model


def of_layers(model):
    return [layer.trainable_variables for layer in model.layers]


def step(model, optimizer, x=X[:B], y=Y[:B]):
    has_blocks = isinstance(optimizer, BlockCoordinateKerasOptimizer)
    variables = of_layers(model) if has_blocks else model.trainable_variables
    optimizer.minimize(lambda: bce()(y, model(x)), variables)


def tape_step(model, optimizer, x, y):
    with tf.GradientTape() as tape:
        losses = bce()(y, model(x))
    optimizer.minimize(losses, model.trainable_variables, tape=tape)


def two_calls(model, optimizer, x, y):
    pairs = optimizer._compute_gradients(lambda: bce()(y, model(x)), model.trainable_variables)
    optimizer.apply_gradients(pairs)


LOOPS = {
    "cyclic": two_calls,
    "dice": tf.function(step, jit_compile=True),
    "blocks": step,
    "adam": tf.function(tape_step),
}


@pytest.mark.parametrize("name", first(2, ["cyclic", "dice", "blocks", "adam"]))
def test_a_loop_takes_the_steps_of_the_model(name):
    own, optimizer = network(), KINDS[name]()
    for first_row in [0, 4, 8] * 2:
        rows = slice(first_row, first_row + B)
        LOOPS[name](own, optimizer, X[rows], Y[rows])
    rule, settings = KINDS[name](), {}
    if name == "blocks":  # several are said to the model
        rule = BlockCoordinateUpdate(tf.keras.optimizers.SGD(0.5), lambda: of_layers(model))
        settings = {"l2_norm_clip": 0.3, "noise_multiplier": 0.0, "prox": PROX}
    model = make_private(network(), batch_order="cyclic", **settings)
    model.compile(rule, bce())
    model.fit(X, Y, batch_size=B, epochs=2, verbose=0)
    for a, b in zip(own.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-7)
    assert optimizer.last_step.steps == int(optimizer.iterations) == 6


@pytest.mark.usefixtures("row_by_row")
def test_the_gradient_of_a_microbatch_is_that_of_its_mean_loss():
    """As long as nothing is clipped it is the step of single examples. DiceSGD takes only these."""
    ends = []
    for number in (None, 2):
        model = network()
        step(model, CyclicDPKerasSGDOptimizer(9.0, 0.0, number, learning_rate=0.5))
        ends.append(model.get_weights())
    for a, b in zip(*ends, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    with pytest.raises(hsa.UnsupportedRunError, match="or one for each example of the batch"):
        step(model, KINDS["dice"](num_microbatches=2))


@pytest.mark.parametrize(
    ("jit", "dtype", "microbatches"),
    [(False, "float64", None), (True, "float32", None), (False, "float32", 2)],
)
def test_noise_is_gaussian_with_the_declared_deviation_and_independent(jit, dtype, microbatches):
    size, rows = 20_000, 4
    tf.random.set_seed(0)  # which the noise does not follow
    both = [tf.Variable(tf.zeros([size], dtype)) for _ in range(2)]
    optimizer = CyclicDPKerasSGDOptimizer(3.0, 2.0, microbatches, learning_rate=0.25)

    @tf.function(jit_compile=jit)
    def take():
        total = tf.reduce_sum(both[0]) + tf.reduce_sum(both[1])
        optimizer.minimize(lambda: tf.zeros([rows], dtype) * total, both)

    take()
    first = np.array([v.numpy() for v in both])
    take()
    noise = [*first, *(np.array([v.numpy() for v in both]) - first)]
    expected = 0.25 * 3.0 * 2.0 / (microbatches or rows)
    assert np.std(noise, axis=1) == pytest.approx(expected, rel=6 / math.sqrt(2 * size))
    correlations = np.corrcoef(noise)[np.triu_indices(4, 1)]
    assert np.abs(correlations).max() < 6 / math.sqrt(size)


def test_another_run_has_other_noise():
    def moved():
        tf.random.set_seed(0)
        variable = tf.Variable(tf.zeros(3))
        optimizer = CyclicDPKerasSGDOptimizer(3.0, 2.0, learning_rate=0.25)
        optimizer.minimize(lambda: tf.zeros(4) * tf.reduce_sum(variable), [variable])
        return variable.numpy()

    assert not np.isclose(moved(), moved()).any()


@pytest.mark.parametrize(("name", "jit"), [("cyclic", False), ("dice", True)])
def test_what_is_noted_of_steps_in_a_graph(name, jit, caplog):
    model, optimizer = network(), KINDS[name](1.0)

    @tf.function(jit_compile=jit)
    def take(x, y):
        step(model, optimizer, x, y)

    take(X[:4], Y[:4])
    take(X[:3], Y[:3])
    noted = optimizer.last_step
    assert (noted.steps, noted.rows, noted.problem) == (2, 3, "")
    rate = SCHEDULE(1) if name == "cyclic" else 0.5
    assert noted.learning_rate == pytest.approx(float(rate), rel=1e-6)
    take(X[:4] + np.nan, Y[:4])
    assert "not finite" in optimizer.last_step.problem
    assert caplog.text.count("nobody records the steps of") == 1


# What is refused; more of it is in tests/misuse


@pytest.mark.usefixtures("row_by_row")
@pytest.mark.parametrize(
    ("losses", "text"),
    [
        (lambda z: tf.reduce_mean(bce()(Y[:B], z)), "got a scalar"),
        (lambda z: (Y[:B, 0] - z) ** 2, r"shape \(examples,\)"),
        (lambda z: tf.cast(bce()(Y[:B], z), "float16"), "float32 or float64, got float16"),
    ],
    ids=["averaged", "broadcast", "half precision"],
)
def test_refused(losses, text):
    model = network()
    optimizer = KINDS["cyclic"](loss_geometry=hsa.LossGeometry.convex(9.0, 5.0))
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        optimizer.minimize(lambda: losses(model(X[:B])), model.trainable_variables)


@pytest.mark.usefixtures("row_by_row")
@pytest.mark.parametrize(
    ("blocks", "text"),
    [
        (lambda a, b: [[a], [a, b]], "each variable in one block"),
        (lambda a, b: [[b], [a]], "the blocks of the first step"),
        (lambda a, b: [[a]], "in one and not in the other"),
    ],
)
def test_other_blocks_are_refused(blocks, text):
    pair, optimizer = (tf.Variable([1.0]), tf.Variable([2.0])), KINDS["blocks"]()

    def losses():
        return pair[0] * pair[1] * tf.ones([2])

    optimizer.minimize(losses, [[v] for v in pair])
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        optimizer.minimize(losses, blocks(*pair))
    with pytest.raises(hsa.UnsupportedRunError, match="override train_step"):
        optimizer.minimize(losses(), [[v] for v in pair], tape=tf.GradientTape())


ARGUMENTS = [
    ("cyclic", {"l2_norm_clip": 0.0}, ValueError),
    ("dice", {"l2_norm_clip": 1e-31}, ValueError),
    ("blocks", {"noise_multiplier": -1.0}, ValueError),
    ("cyclic", {"noise_multiplier": "1"}, TypeError),
    ("adam", {"num_microbatches": 0}, ValueError),
    ("blocks", {"learning_rate": -0.1}, ValueError),
    ("cyclic", {"weight_decay": -0.1}, ValueError),
    ("cyclic", {"projection_radius": 0.0}, ValueError),
    ("cyclic", {"loss_geometry": "auto"}, ValueError),
    ("cyclic", {"beta_1": 0.9}, TypeError),
    ("cyclic", {"momentum": 0.9}, hsa.UnsupportedRunError),
    ("blocks", {"clipnorm": 1.0}, hsa.UnsupportedRunError),
    ("dice", {"gradient_accumulation_steps": 2}, hsa.UnsupportedRunError),
    ("dice", {"error_l2_norm_clip": math.nan}, ValueError),
    ("adam", {"automatic": 1}, TypeError),
    ("blocks", {"learning_rate": SCHEDULE}, hsa.UnsupportedRunError),
    ("blocks", {"l2": math.inf}, ValueError),
    ("blocks", {"nonnegative": 1}, TypeError),
]


@pytest.mark.parametrize(("name", "arguments", "kind"), ARGUMENTS)
def test_impossible_arguments(name, arguments, kind):
    with pytest.raises(kind, match=next(iter(arguments))):
        type(KINDS[name]())(**{"l2_norm_clip": 1.0, "noise_multiplier": 1.0, **arguments})


# Copies and files


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.usefixtures("row_by_row")
def test_copies_have_the_arguments_and_no_steps(name):
    optimizer = KINDS[name](1.0)
    step(network(), optimizer)
    assert all(np.any(variable) for variable in optimizer.variables())  # count and moments
    for again in (
        copy.copy(optimizer),
        copy.deepcopy(optimizer),
        pickle.loads(pickle.dumps(optimizer)),
        tf.keras.optimizers.deserialize(tf.keras.optimizers.serialize(optimizer)),
    ):
        assert type(again) is type(optimizer)
        assert again.get_config() == optimizer.get_config()
        assert again.last_step.steps == 0
        assert again._steps is None


@pytest.mark.parametrize(
    ("name", "suffix"),
    [("cyclic", ".keras"), ("microbatches", ".h5"), ("blocks", ""), ("adam", ".h5")],
)
@pytest.mark.usefixtures("row_by_row")
def test_saved_models_load_with_the_optimizer_and_begin_another_run(tmp_path, name, suffix):
    model = network()
    model.compile(KINDS[name](1.0), bce())
    step(model, model.optimizer)
    model.save(tmp_path / f"model{suffix}")
    loaded = tf.keras.models.load_model(tmp_path / f"model{suffix}")
    assert loaded.optimizer.get_config() == model.optimizer.get_config()
    step(loaded, loaded.optimizer)
    assert loaded.optimizer.last_step.steps == 1
    # Keras' own count, and the moments of Adam, go on: they are in .h5 only.
    assert int(loaded.optimizer.iterations) == (2 if suffix == ".h5" else 1)


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
