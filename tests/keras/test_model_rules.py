"""Other updates of a model that owns its run: DiceSGD, DP-MBCD, and optimizers with noise."""

import copy
import importlib.util

import attrs
import block_coordinate
import dice as dice_reference
import numpy as np
import pytest
import shared_runs
from dice_outlier import DiceOutlier

pytest.importorskip("tensorflow")
import keras_models
import tensorflow as tf
from dp_accounting import NeighboringRelation
from keras_models import AUTO, DELTA, SGD, STEPS, X, crossentropy, head, refused

import hidden_state_accountants as hsa
import hidden_state_adapters.tf_privacy as adapter
from hidden_state_adapters.batch_plans import SampledPlan
from hidden_state_adapters.tf_privacy import (
    BlockCoordinateUpdate,
    DiceUpdate,
    HiddenStateSequential,
    keras_api,
    make_private,
)
from hidden_state_adapters.tf_privacy.algorithm import Algorithm
from hidden_state_adapters.tf_privacy.gradients import RowByRow, ThroughLinearLayers

optimizers, layers = tf.keras.optimizers, tf.keras.layers
EAGER = pytest.mark.usefixtures("row_by_row", "without_graphs")
SOFTMAX = hsa.LossGeometry.softmax_cross_entropy(1.0, bias=True)


@pytest.fixture
def in_float64(restored_precision):
    tf.keras.backend.set_floatx("float64")
    tf.keras.mixed_precision.set_global_policy("float64")


@pytest.fixture
def by_rows(monkeypatch):
    """Gradients of every example, though there are linear layers only."""

    def switch():
        monkeypatch.setattr(ThroughLinearLayers, "of", lambda *args: None)

    return switch


# --- DiceSGD --------------------------------------------------------------------------------------

CLIP, ERROR_CLIP, RATE, RECORDS, BATCH = (
    shared_runs.CLIP, shared_runs.ERROR_CLIP, shared_runs.RATE, shared_runs.RECORDS,
    shared_runs.BATCH,
)  # fmt: skip


def dice_rule(variant, optimizer=None):
    if variant == "adam":
        (first, second), epsilon = shared_runs.BETAS, shared_runs.ADAM_EPSILON
        optimizer = optimizers.Adam(RATE, beta_1=first, beta_2=second, epsilon=epsilon)
    kinds = {"automatic": True} if variant == "automatic" else {"error_l2_norm_clip": ERROR_CLIP}
    return DiceUpdate(optimizer or SGD(RATE), **kinds)


def fit_dice(rule=None, *, compile=None, epochs=1, **settings):
    """On the records that the optimizers of both frameworks are compared with, too."""
    given = {"l2_norm_clip": CLIP, "noise_multiplier": 0.0, "batch_order": "cyclic", **settings}
    model = HiddenStateSequential([layers.Dense(1)], **given)
    model.build((None, shared_runs.FEATURES))
    model.set_weights([shared_runs.START[:-1, np.newaxis], shared_runs.START[-1:]])
    loss = tf.keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(rule or dice_rule("sgd"), loss, **(compile or {}))
    x, labels = shared_runs.records()
    model.fit(x, labels[:, np.newaxis], batch_size=BATCH, epochs=epochs, verbose=0)
    return model


def flat(parts):
    return np.concatenate([np.ravel(part) for part in parts])


def held_error(model):
    return flat(model._run.steps.rule._errors)


@pytest.mark.parametrize("variant", shared_runs.DICE)
def test_dice_takes_the_steps_of_the_paper_and_of_opacus(variant, in_float64):
    model = fit_dice(dice_rule(variant), epochs=2)
    expected = shared_runs.dice_iterates(variant)[-1]
    np.testing.assert_allclose(flat(model.get_weights()), expected, rtol=1e-7)


@pytest.mark.parametrize(
    ("variant", "compile", "clipping"),
    [
        ("automatic", {"jit_compile": True}, ThroughLinearLayers),
        ("automatic", {}, RowByRow),
        ("sgd", {"run_eagerly": True}, ThroughLinearLayers),
        ("sgd", {}, RowByRow),
    ],
)
def test_steps_of_dice_on_poisson_batches(variant, compile, clipping, by_rows, monkeypatch):
    """One of them empty, and filled up under XLA.

    What is cut off of a normalised gradient that is shorter than C points the other way.
    """
    fixed = [[1, 2, 3], [], [4], [5, 6, 7, 8], [0, 9], [11]]
    monkeypatch.setattr(SampledPlan, "_draw", lambda plan, step: np.array(fixed[step], int))
    if clipping is RowByRow:
        by_rows()
    model = fit_dice(dice_rule(variant), compile=compile, batch_order="poisson")
    assert type(model._run.clipping[0]) is clipping
    iterate, error = shared_runs.START, np.zeros_like(shared_runs.START)
    rows = list(zip(*shared_runs.records(), strict=True))
    clips = (CLIP, dice_reference.normalise) if variant == "automatic" else (ERROR_CLIP,)
    for batch in fixed:
        gradients = [shared_runs.logistic_gradient(iterate, rows[i]) for i in batch]
        mean, error = dice_reference.update(error, gradients, BATCH, CLIP, *clips)
        iterate = iterate - RATE * mean
    np.testing.assert_allclose(flat(model.get_weights()), iterate, atol=1e-5)
    np.testing.assert_allclose(held_error(model), error, atol=1e-5)


@EAGER
def test_the_account_of_dice():
    model = fit_dice(
        dice_rule("sgd", optimizers.AdamW(RATE)), noise_multiplier=40.0, batch_order="poisson",
        epochs=2, **AUTO,
    )  # fmt: skip
    event = model.privacy_event
    assert event == hsa.DiceSgdDpEvent(
        noise_std=40.0 * CLIP / BATCH,
        clip_norm=CLIP,
        error_clip_norm=ERROR_CLIP,
        batch_size=BATCH,
        dataset_size=RECORDS,
        num_steps=2 * RECORDS // BATCH,
        gradient_bound=hsa.LossGeometry.logistic(1.0, bias=True).lipschitz,
    )
    expected = hsa.DiceSgdAccountant().compose(event).get_epsilon(DELTA)
    assert model.get_epsilon(DELTA) == pytest.approx(expected, rel=1e-9)
    report = model.report(DELTA)
    assert "update rule AdamW" in report
    assert "per-example gradient norms" in report
    model.release()  # every iterate is released anyway
    assert model.get_epsilon(DELTA) == pytest.approx(expected, rel=1e-9)


@EAGER
def test_an_attack_on_what_dice_feeds_back():
    """An outlier saturates the error, which moves every later step."""
    model = fit_dice(
        DiceUpdate(SGD(0.5), error_l2_norm_clip=2.0), l2_norm_clip=0.5, noise_multiplier=40.0,
        epochs=5,
    )  # fmt: skip
    event, relation = model.privacy_event, NeighboringRelation.REPLACE_SPECIAL
    found = DiceOutlier().evidence(event, relation, lambda text: None).epsilon(DELTA)
    without = attrs.evolve(event, error_clip_norm=1e-6)
    assert hsa.DiceSgdAccountant().compose(without).get_epsilon(DELTA) < 0.1 * found
    assert found <= model.get_epsilon(DELTA)


@pytest.mark.parametrize(
    ("bound", "arguments", "text"),
    [
        (np.inf, {"prox": hsa.Regulariser(l1=0.1)}, "prox = None with DiceUpdate"),
        (np.inf, {"projection_radius": 5.0}, "projection_radius = None with DiceUpdate"),
        (np.inf, {"batch_order": "poisson", "max_batch_size": 9}, "max_batch_size = None with D"),
        (1.0, {"loss_geometry": hsa.LossGeometry.logistic(1.0)}, "got both"),
        (0.125, {}, "longer than loss_geometry.lipschitz"),
    ],
)
@EAGER
def test_refusals_of_dice(bound, arguments, text):
    with refused(text):
        fit_dice(DiceUpdate(SGD(RATE), gradient_bound=bound), **arguments)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("error_l2_norm_clip", 0.0, ValueError),
        ("error_l2_norm_clip", 1e35, ValueError),
        ("automatic", 1, TypeError),
        ("gradient_bound", -1.0, ValueError),
    ],
)
def test_arguments_of_dice(name, value, error):
    with pytest.raises(error, match=name):
        DiceUpdate("sgd", **{name: value})


@EAGER
def test_the_error_is_in_no_file(tmp_path):
    model = fit_dice()
    model.save("model.keras")
    if not keras_api.IS_KERAS_3:
        model.save_weights("all")  # that TensorFlow finds
    found = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    error = held_error(model)
    assert flat(model.get_weights())[0].tobytes() in found
    assert error.all()
    assert not any(part.tobytes() in found for part in error)
    with refused("cannot be copied"):
        copy.deepcopy(model._run.steps.rule)


# --- DP-MBCD --------------------------------------------------------------------------------------

BLOCKS = block_coordinate.SHARED
PROX = hsa.Regulariser(l1=BLOCKS["l1"], l2=BLOCKS["l2"])


def squares(targets, outputs):
    return tf.reduce_sum((outputs - targets) ** 2, axis=1) / 2


def of_layers(model):
    return [layer.trainable_variables for layer in model.layers]


def make_blocks(sizes=(2, 3), *, blocks=of_layers, optimizer=None, compile=None, **settings):
    given = {"l2_norm_clip": BLOCKS["clip_norm"], "noise_multiplier": 0.0, **settings}
    rule = BlockCoordinateUpdate(optimizer or SGD(BLOCKS["step_size"]), lambda: blocks(model))
    stack = [layers.Dense(n, use_bias=False) for n in sizes]
    model = keras_models.make(rule, stack, compile={"loss": squares, **(compile or {})}, **given)
    model.build((None, 3))
    return model


def fit_blocks(model, **kwargs):
    _, batches, _ = block_coordinate.shared_run()
    x, y = (np.concatenate([batch[part] for batch in batches[:3]]) for part in (0, 1))
    return keras_models.fit(model, **{"x": x, "y": y, **kwargs})


@pytest.mark.parametrize(
    ("compile", "clipping"), [({}, RowByRow), ({"jit_compile": True}, ThroughLinearLayers)]
)
def test_blocks_take_the_steps_of_the_paper_and_of_opacus(compile, clipping, in_float64, by_rows):
    """Of the second block at what the first one has become."""
    if clipping is RowByRow:
        by_rows()
    start, _, expected = block_coordinate.shared_run()
    model = make_blocks(prox=PROX, compile=compile)
    model.set_weights([block.T for block in start])  # Keras' kernels are transposed
    fit_blocks(model, epochs=2)
    assert {type(one) for one in model._run.clipping} == {clipping}
    for own, block in zip(model.get_weights(), expected, strict=True):
        np.testing.assert_allclose(own.T, block, rtol=1e-9)


@pytest.mark.parametrize(("order", "size"), [("cyclic", 4), ("full", 12)])
@EAGER
def test_the_account_of_blocks(order, size):
    model = make_blocks(noise_multiplier=2.0, batch_order=order, prox=PROX, target_delta=DELTA)
    history = fit_blocks(model, epochs=2).history.history["epsilon_if_released_now"]
    event = hsa.BlockCoordinateDpEvent(
        step_size=0.25,
        noise_variance=0.25 * (2.0 * 0.75 / size) ** 2 / 2,
        clip_norm=0.75,
        batch_size=size,
        dataset_size=12,
        num_epochs=2,
        prox_strong_convexity=0.25,
        num_blocks=2,
    )
    assert model.privacy_event == event
    expected = hsa.BlockCoordinateAccountant().compose(event).get_epsilon(DELTA)
    assert history[1] == model.get_epsilon(DELTA) == pytest.approx(expected, rel=1e-9)
    assert "the clip of each block as one vector" in " ".join(model.report(DELTA).split())


@EAGER
def test_one_block_hides_its_iterates():
    """The loss of a linear head is read off, and a release in between costs composition."""
    rule = BlockCoordinateUpdate(SGD(0.5))
    model = keras_models.make(
        rule, l2_norm_clip=2.0, noise_multiplier=4.0, prox=hsa.Regulariser(l2=0.1), **AUTO
    )
    event = keras_models.fit(model, epochs=20).privacy_event
    assert (event.num_blocks, event.block_loss) == (1, SOFTMAX)
    hidden = model.get_epsilon(DELTA)
    model.release()
    assert keras_models.fit(model).privacy_event.block_loss is None
    assert model.get_epsilon(DELTA) > 1.2 * hidden


@EAGER
def test_noise_is_drawn_for_every_block():
    nothing = {"loss": lambda targets, outputs: 0.0 * outputs[:, 0]}
    model = make_blocks([200, 10], optimizer=SGD(1.0), compile=nothing, noise_multiplier=3.0)
    start = model.get_weights()
    fit_blocks(model)
    for own, before in zip(model.get_weights(), start, strict=True):
        assert np.std(own - before) == pytest.approx(np.sqrt(3) * 3.0 * 0.75 / 4, rel=0.2)


@EAGER
def test_a_refused_block_ends_the_run():
    """The gradient of the second block is not finite once the first one has moved."""

    def loss(targets, outputs):
        moved = tf.reduce_any(tf.not_equal(model.layers[0].kernel, start[0]))
        return tf.where(moved, np.inf, 1.0) * outputs[:, 0]

    model = make_blocks(compile={"loss": loss})
    start = model.get_weights()
    with refused("not finite"):
        fit_blocks(model)
    np.testing.assert_array_equal(model.get_weights()[-1], start[-1])
    with refused("not finite"):
        model.get_epsilon(DELTA)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"batch_order": "poisson"}, 'batch_order="cyclic" or "full"'),
        ({"projection_radius": 9.0}, "projection_radius = None"),
        ({"optimizer": optimizers.Adam()}, "rate in BlockCoordinateUpdate, got A"),
        ({"optimizer": SGD(0.1, weight_decay=0.1)}, "a weight_decay or a schedule"),
        ({"optimizer": SGD(optimizers.schedules.CosineDecay(0.1, 9))}, "weight_decay or a sched"),
        ({"blocks": lambda model: of_layers(model)[:1]}, "together the trainable variables"),
        ({"blocks": lambda model: [["a"], ["b"]]}, "blocks of variables, got 'a'"),
        ({"blocks": lambda model: of_layers(model) * 2}, "each variable in one block"),
        ({"blocks": lambda model: [*of_layers(model)[0], []]}, "got both in one list"),
    ],
)
@EAGER
def test_refusals_of_blocks(arguments, text):
    with refused(text):
        fit_blocks(make_blocks(**arguments))


# --- optimizers with noise of their own -----------------------------------------------------------

WITH_NOISE = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow_privacy") is None, reason="needs TensorFlow Privacy"
)
SCHEDULE = optimizers.schedules.ExponentialDecay(0.5, 2, 0.5)
L2 = hsa.Regulariser(l2=0.3)


def noisy(name, *args, noise=2.0, **kwargs):
    return getattr(adapter, name)(0.4, noise, *args, **{"learning_rate": 0.5, **kwargs})


def cyclic(*args, **kwargs):
    return noisy("CyclicDPKerasSGDOptimizer", *args, **kwargs)


def of_tf_privacy():
    module = "tensorflow_privacy.privacy.optimizers.dp_optimizer_keras"
    return importlib.import_module(module).DPKerasSGDOptimizer(0.4, 2.0, learning_rate=0.5)


def compiled(optimizer, **settings):
    model = HiddenStateSequential([head()], **{"batch_order": "cyclic", **settings})
    model.build(X.shape)
    model.compile(optimizer, crossentropy())
    return model


# By name: an optimizer, what a model is compiled with in its place, and what it is made with.
PAIRS = {
    "cyclic": (
        lambda: cyclic(weight_decay=0.1, loss_geometry=SOFTMAX),
        lambda: SGD(0.5, weight_decay=0.1),
        {"loss_geometry": SOFTMAX},
    ),
    "all of cyclic": (
        lambda: cyclic(4, learning_rate=SCHEDULE, prox=L2, projection_radius=3.5),
        lambda: SGD(SCHEDULE),
        {"num_microbatches": 4, "prox": L2, "projection_radius": 3.5},
    ),
    "dice": (
        lambda: noisy("DiceKerasSGDOptimizer", error_l2_norm_clip=0.1, momentum=0.9, decay=0.1),
        lambda: DiceUpdate(optimizers.legacy.SGD(0.5, 0.9, decay=0.1), error_l2_norm_clip=0.1),
        {},
    ),
    "block": (
        lambda: noisy("BlockCoordinateKerasOptimizer", l1=0.1, l2=0.3, nonnegative=True),
        lambda: BlockCoordinateUpdate(SGD(0.5)),
        {"prox": hsa.Regulariser(l1=0.1, l2=0.3, low=0.0)},
    ),
}


@pytest.mark.parametrize("name", PAIRS)
@WITH_NOISE
@EAGER
def test_an_optimizer_with_noise_makes_the_run_of_its_update(name, monkeypatch):
    """With the noise that it accounts, once in every step, which is left out of the weights."""
    deviations = []

    def without(step, sums):
        deviations.append(step.noise_multiplier * step.clip)
        return list(sums)

    monkeypatch.setattr(Algorithm, "_with_noise", without)
    optimizer, plain, settings = PAIRS[name]
    short = keras_models.fit(compiled(optimizer()), epochs=2)
    settings = {"l2_norm_clip": 0.4, "noise_multiplier": 2.0, **settings}
    long = keras_models.fit(compiled(plain(), **settings), epochs=2)
    for one, other in zip(short.get_weights(), long.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    assert deviations == [0.8] * (4 * STEPS)
    assert short.privacy_event == long.privacy_event
    assert short.get_config()["hidden_state"] == long.get_config()["hidden_state"]
    assert short.get_epsilon(DELTA) == long.get_epsilon(DELTA)


@WITH_NOISE
@EAGER
def test_batches_are_poisson_unless_the_model_says_otherwise():
    model = compiled(cyclic(), batch_order=None)
    with pytest.raises(TypeError, match="compile with an optimizer without noise"):
        keras_models.fit(model, target_epsilon=1.0, target_delta=DELTA)
    assert keras_models.fit(model).privacy_event.batch_order is hsa.BatchOrder.POISSON
    assert "Batches are Poisson" in model.report(DELTA)


@WITH_NOISE
@EAGER
def test_a_model_that_was_made_private_with_one():
    """It is saved with what the optimizer said, and compiled again with something else."""
    model = make_private(tf.keras.Sequential([tf.keras.Input((3,)), layers.Dense(2)]))
    model.compile(cyclic(), crossentropy())
    keras_models.fit(model).save("model.keras")
    loaded = tf.keras.models.load_model("model.keras")
    assert loaded.noise_multiplier == 2.0
    assert type(loaded.optimizer) is SGD
    assert keras_models.fit(loaded).privacy_events == (model.privacy_event,) * 2
    model.compile(cyclic(noise=3.0), crossentropy())
    assert model.noise_multiplier == 3.0
    with pytest.raises(ValueError, match="Expected l2_norm_clip of the model, got none"):
        model.compile(SGD(0.5), crossentropy())
    assert keras_models.fit(model).privacy_event.noise_multiplier == 3.0


def all_given():
    return cyclic(num_microbatches=2, prox=L2, projection_radius=3.0, loss_geometry=SOFTMAX)


@pytest.mark.parametrize(
    ("optimizer", "settings", "text"),
    [
        (all_given, {"l2_norm_clip": 0.5}, r"= 0\.5, .* got 0\.4 of CyclicDPKerasSGDOptimizer"),
        (all_given, {"noise_multiplier": 0.0}, r"noise_multiplier = 0\.0, .* got 2\.0"),
        (all_given, {"num_microbatches": 4}, "num_microbatches = 4, .* got 2"),
        (all_given, {"prox": PROX}, r"prox = Regulariser\(l1=0\.1.* got Regulariser\(l1=0\.0"),
        (all_given, {"projection_radius": 2}, r"projection_radius = 2\.0, .* got 3\.0"),
        (all_given, AUTO, "loss_geometry = 'auto', .* LossGeom"),
        (lambda: cyclic(num_microbatches=2), {}, "num_microbatches = None or 4"),
        (lambda: cyclic(learning_rate=lambda: 0.1), {}, "or a schedule of Keras"),
        (lambda: DiceUpdate(cyclic()), {}, "noise would be added twice"),
        (of_tf_privacy, {}, "got DPOptimizerClass"),
    ],
)
@WITH_NOISE
@EAGER
def test_refused_optimizers_with_noise(optimizer, settings, text):
    with refused(text):
        keras_models.fit(compiled(optimizer(), **settings))
