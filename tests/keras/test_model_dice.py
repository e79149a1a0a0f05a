"""DiceSGD of a model that owns its run: its steps, its error, and what is said of it."""

import copy
import functools
import io
import zipfile

import numpy as np
import pytest
import shared_runs
from cases import first
from dice import normalise, update
from shared_runs import BATCH, BETAS, CLIP, ERROR_CLIP, FEATURES, RATE, RECORDS, START

pytest.importorskip("tensorflow")
import h5py
import tensorflow as tf

import hidden_state_accountants as hsa
from hidden_state_adapters.batch_plans import SampledPlan
from hidden_state_adapters.tf_privacy import DiceUpdate, HiddenStateSequential, keras_api
from hidden_state_adapters.tf_privacy.gradients import RowByRow

optimizers = tf.keras.optimizers
WITHOUT_GRAPHS = pytest.mark.usefixtures("without_graphs")
ORDERS = ("poisson", "cyclic", "reshuffled", "shuffled_once", "without_replacement", "full")
X, LABELS = shared_runs.records()
Y = LABELS[:, np.newaxis]


def sgd():
    return optimizers.SGD(RATE)


def adam():
    return optimizers.Adam(RATE, beta_1=BETAS[0], beta_2=BETAS[1], epsilon=shared_runs.ADAM_EPSILON)


RULES = {
    "sgd": functools.partial(DiceUpdate, error_l2_norm_clip=ERROR_CLIP),
    "adam": functools.partial(DiceUpdate, error_l2_norm_clip=ERROR_CLIP),
    "automatic": functools.partial(DiceUpdate, automatic=True),
}


def make(rule=None, *, compile=None, **kwargs):
    settings = {"l2_norm_clip": CLIP, "noise_multiplier": 0.0, "batch_order": "cyclic", **kwargs}
    model = HiddenStateSequential([tf.keras.layers.Dense(1)], **settings)
    model.build((None, FEATURES))
    model.set_weights([START[:-1, np.newaxis], START[-1:]])
    loss = tf.keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(rule or RULES["sgd"](sgd()), loss, **(compile or {}))
    return model


def fit(model, **kwargs):
    return model.fit(X, Y, **{"batch_size": BATCH, "verbose": 0, **kwargs})


def weights(model):
    return np.concatenate([np.ravel(w) for w in model.get_weights()])


def held_error(model):
    return np.concatenate([np.ravel(part) for part in model._run.steps.rule._errors])


@pytest.fixture
def in_float64(restored_precision):
    tf.keras.backend.set_floatx("float64")
    tf.keras.mixed_precision.set_global_policy("float64")


@pytest.mark.parametrize("variant", shared_runs.DICE)
def test_the_steps_are_those_of_the_paper_and_of_opacus(variant, in_float64):
    """The run that the optimizers of both frameworks are compared with, too."""
    model = make(RULES[variant](adam() if variant == "adam" else sgd()))
    fit(model, epochs=2)
    expected = shared_runs.dice_iterates(variant)[-1]
    np.testing.assert_allclose(weights(model), expected, rtol=1e-7)


def dice_steps(batches, divisor, *, automatic=False):
    x, error = START, np.zeros_like(START)
    options = {"clipper": normalise} if automatic else {}
    for batch in batches:
        gradients = [shared_runs.logistic_gradient(x, (X[i], LABELS[i])) for i in batch]
        error_clip = CLIP if automatic else ERROR_CLIP
        v, error = update(error, gradients, divisor, CLIP, error_clip, **options)
        x = x - RATE * v
    return x, error


@pytest.mark.parametrize("order", first(2, ORDERS))
@WITHOUT_GRAPHS
def test_every_order(order, dealt, in_float64):
    model = make(batch_order=order)
    fit(model, epochs=2)
    divisor = RECORDS if order == "full" else BATCH
    x, error = dice_steps([dealt[step] for step in range(2 * RECORDS // divisor)], divisor)
    np.testing.assert_allclose(weights(model), x, rtol=1e-7)
    np.testing.assert_allclose(held_error(model), error, rtol=1e-6, atol=1e-9)
    assert model.privacy_event == hsa.DiceSgdDpEvent(
        noise_std=0.0,
        clip_norm=CLIP,
        error_clip_norm=ERROR_CLIP,
        batch_size=divisor,
        dataset_size=RECORDS,
        num_steps=2 * RECORDS // divisor,
        batch_order=order,
    )


@pytest.mark.parametrize(
    ("compile", "automatic"), [({"jit_compile": True}, True), ({"run_eagerly": True}, False)]
)
def test_compiled_and_eager_steps(compile, automatic, dealt, monkeypatch):
    """Poisson batches, one of them empty, and filled up under XLA."""
    fixed = [[1, 2, 3], [], [4], [5, 6, 7, 8], [0, 9], [11]]
    monkeypatch.setattr(SampledPlan, "_draw", lambda plan, step: np.array(fixed[step], int))
    rule = RULES["automatic" if automatic else "sgd"](sgd())
    model = make(rule, compile=compile, batch_order="poisson")
    fit(model)
    x, _ = dice_steps(fixed, BATCH, automatic=automatic)
    np.testing.assert_allclose(weights(model), x, atol=1e-5)


@pytest.mark.parametrize("automatic", [False, True])
def test_rows_that_are_differentiated_one_by_one(automatic, monkeypatch):
    """What is cut off of a normalised gradient that is shorter than C points the other way."""
    rule = RULES["automatic" if automatic else "sgd"]
    fast, slow = make(rule(sgd())), make(rule(sgd()))
    fit(fast)
    monkeypatch.setattr(
        "hidden_state_adapters.tf_privacy.gradients.ThroughLinearLayers.of",
        lambda *args: None,
    )
    fit(slow)
    assert isinstance(slow._run.clipping[0], RowByRow)
    np.testing.assert_allclose(weights(fast), weights(slow), atol=1e-5)


@WITHOUT_GRAPHS
def test_the_account_is_that_of_the_event():
    model = make(
        RULES["sgd"](optimizers.AdamW(RATE)),
        noise_multiplier=40.0,
        batch_order="poisson",
        compile={"run_eagerly": True},
        loss_geometry="auto",
        feature_norm=1.0,
    )
    fit(model, epochs=2)
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
    expected = hsa.DiceSgdAccountant().compose(event).get_epsilon(1e-5)
    assert model.get_epsilon(1e-5) == pytest.approx(expected, rel=1e-9)
    report = model.report(1e-5)
    assert "update rule AdamW" in report
    assert "per-example gradient norms" in report
    model.release()  # every iterate is released anyway
    assert model.get_epsilon(1e-5) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"prox": hsa.Regulariser(l1=0.1)}, "prox = None with DiceUpdate"),
        ({"projection_radius": 5.0}, "projection_radius = None with DiceUpdate"),
        ({"batch_order": "poisson", "max_batch_size": 9}, "max_batch_size = None with DiceUpdate"),
        ({"loss_geometry": hsa.LossGeometry.logistic(1.0), "gradient_bound": 1.0}, "got both"),
        ({"gradient_bound": 0.125}, "longer than loss_geometry.lipschitz"),
    ],
)
@WITHOUT_GRAPHS
def test_refusals(arguments, text):
    bound = arguments.pop("gradient_bound", np.inf)
    rule = DiceUpdate(sgd(), gradient_bound=bound)
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        fit(make(rule, compile={"run_eagerly": True}, **arguments))


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"error_l2_norm_clip": 0.0}, ValueError, "error_l2_norm_clip"),
        ({"error_l2_norm_clip": 1e35}, ValueError, "error_l2_norm_clip"),
        ({"automatic": 1}, TypeError, "automatic"),
        ({"gradient_bound": -1.0}, ValueError, "gradient_bound"),
    ],
)
@WITHOUT_GRAPHS
def test_arguments(arguments, error, text):
    with pytest.raises(error, match=text):
        DiceUpdate("sgd", **arguments)


def stored_in(model, folder):
    """The arrays of a file of the weights, in the format that holds most."""
    if not keras_api.IS_KERAS_3:
        model.save_weights(folder / "all")
        names = [name for name, _ in tf.train.list_variables(str(folder))]
        stored = [tf.train.load_variable(str(folder), name) for name in names]
        return [part for part in stored if isinstance(part, np.ndarray)]
    stored, path = [], folder / "all.keras"
    model.save(path)
    with zipfile.ZipFile(path) as archive, archive.open("model.weights.h5") as file:
        with h5py.File(io.BytesIO(file.read())) as arrays:
            arrays.visititems(
                lambda _, part: stored.append(part[()]) if isinstance(part, h5py.Dataset) else None
            )
    return stored


@WITHOUT_GRAPHS
def test_the_error_is_in_no_file(tmp_path):
    model = make(compile={"run_eagerly": True})
    fit(model)
    numbers = np.concatenate([np.ravel(v) for v in stored_in(model, tmp_path)])
    error = held_error(model)
    assert weights(model)[0] in numbers
    assert np.count_nonzero(error) == len(error)
    assert not np.isin(error, numbers).any()
    with pytest.raises(hsa.UnsupportedRunError, match="cannot be copied"):
        copy.deepcopy(model._run.steps.rule)
