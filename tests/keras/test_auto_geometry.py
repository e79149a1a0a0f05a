"""`loss_geometry="auto"`: the constants hold for Keras' gradients, and what has none is refused."""

import math

import numpy as np
import pytest

pytest.importorskip("tensorflow_privacy")
import tensorflow as tf

import hidden_state_accountants as hsa
from hidden_state_adapters.tf_privacy import (
    BlockCoordinateKerasOptimizer,
    CyclicDPKerasSGDOptimizer,
    DiceKerasSGDOptimizer,
    PrivateRun,
    make_private,
)
from hidden_state_adapters.tf_privacy.losses import RowLosses, known_loss

RECORDS, FEATURES, CLASSES, BATCH = 12, 3, 3, 4
layers, losses = tf.keras.layers, tf.keras.losses
LINEAR = layers.Dense


def one_hot(random, rows, outputs):
    return np.eye(outputs, dtype="float32")[random.integers(outputs, size=rows)]


def unit(random, rows, outputs):
    return random.random((rows, outputs)).astype("float32")


def any_number(random, rows, outputs):
    return random.normal(size=(rows, outputs)).astype("float32")


def class_index(random, rows, outputs):
    return random.integers(outputs, size=rows)


def none(kind, **options):
    return kind(reduction="none", **options)


CONSTANTS = [
    (none(losses.SparseCategoricalCrossentropy, from_logits=True), class_index, 4),
    (none(losses.CategoricalCrossentropy, from_logits=True, label_smoothing=0.3), one_hot, 4),
    (none(losses.BinaryCrossentropy, from_logits=True), unit, 1),
    (none(losses.BinaryCrossentropy, from_logits=True, label_smoothing=0.3), unit, 3),
    (none(losses.MeanSquaredError), any_number, 1),
    (none(losses.MeanSquaredError), any_number, 3),
    (none(losses.Huber, delta=0.4), any_number, 1),
    (none(losses.Huber, delta=0.4), any_number, 3),
    (none(losses.LogCosh), any_number, 1),
    (losses.mean_squared_error, any_number, 2),
    (losses.log_cosh, any_number, 3),
]


def slopes(loss, targets, predictions):
    """The derivative of the loss of every row in its predictions, by Keras."""
    predictions = tf.constant(predictions, tf.float32)
    with tf.GradientTape() as tape:
        tape.watch(predictions)
        values = loss(tf.constant(targets), predictions)
    return tape.gradient(values, predictions).numpy()


@pytest.mark.parametrize(
    ("loss", "make_targets", "outputs"),
    CONSTANTS,
    ids=[f"{getattr(loss, 'name', '') or loss.__name__}-{n}" for loss, _, n in CONSTANTS],
)
def test_values_and_slopes_are_those_of_keras(loss, make_targets, outputs):
    """That the constants hold for them is tested in core/test_linear_losses.py."""
    random, rows = np.random.default_rng(0), 200
    targets = make_targets(random, rows, outputs)
    row_losses = RowLosses(loss)
    known = known_loss(row_losses, "linear", outputs, targets)
    predictions = 2.0 * random.normal(size=(rows, outputs))
    values, found = known.evaluate(known.targets, tf.constant(predictions, tf.float32))
    np.testing.assert_allclose(found, slopes(loss, targets, predictions), atol=1e-6)
    expected = row_losses(targets, tf.constant(predictions, tf.float32))
    np.testing.assert_allclose(values, expected, rtol=1e-6)


def make_data(targets="classes", scale=1.0):
    random = np.random.default_rng(0)
    x = random.normal(size=(RECORDS, FEATURES)).astype("float32")
    x *= scale / np.linalg.norm(x, axis=1, keepdims=True)
    y = {
        "classes": random.integers(CLASSES, size=RECORDS),
        "one_hot": one_hot(random, RECORDS, CLASSES),
        "labels": (x[:, :1] > 0).astype("float32"),
        "numbers": random.normal(size=(RECORDS, 4)).astype("float32"),
    }[targets]
    return x, y


SPARSE = none(losses.SparseCategoricalCrossentropy, from_logits=True)
PROBABILITIES = none(losses.SparseCategoricalCrossentropy)
LOGISTIC = none(losses.BinaryCrossentropy, from_logits=True)
SQUARED = none(losses.MeanSquaredError)


def begin(
    parts,
    loss,
    targets="classes",
    *,
    optimizer=CyclicDPKerasSGDOptimizer,
    feature_norm=1.0,
    loss_geometry="auto",
    data=None,
):
    """What fit of a private model checks before its first step."""
    x, y = data or make_data(targets)
    options = {"error_l2_norm_clip": 0.1} if optimizer is DiceKerasSGDOptimizer else {}
    model = make_private(
        parts if isinstance(parts, tf.keras.Model) else tf.keras.Sequential(parts),
        loss_geometry=loss_geometry,
        feature_norm=feature_norm,
        batch_order="cyclic",
    )
    model.compile(optimizer(1.5, 2.0, learning_rate=0.5, **options), loss)
    model.fit(x, y, batch_size=BATCH, epochs=0, verbose=0)
    return model


def private_run(parts, loss, optimizer="sgd", targets="classes", **settings):
    x, y = make_data(targets)
    run = PrivateRun(
        tf.keras.Sequential(parts), x, y, loss=loss, optimizer=optimizer, batch_size=BATCH,
        **{"l2_norm_clip": 1.5, "noise_multiplier": 2.0, **settings},
    )  # fmt: skip
    run.train(2, verbose=False)
    return run


def test_a_bound_on_the_features_makes_a_known_loss_hide_the_iterates():
    """As for Opacus; it used to be ignored without loss_geometry="auto"."""
    run = private_run([LINEAR(CLASSES)], SPARSE, feature_norm=1.0)
    auto = private_run([LINEAR(CLASSES)], SPARSE, feature_norm=1.0, loss_geometry="auto")
    assert run.privacy_event == auto.privacy_event
    assert run.privacy_event.loss == SOFTMAX(1.0, bias=True)


FOCAL = none(losses.BinaryFocalCrossentropy, from_logits=True)
WHY = {
    "no bound": (([LINEAR(CLASSES)], SPARSE), {}, "feature_norm=, a bound on the L2 norm"),
    "two layers": (([LINEAR(5), LINEAR(CLASSES)], SPARSE), {}, "deep networks among them"),
    "unknown loss": (
        ([LINEAR(1)], FOCAL), {"targets": "labels", "feature_norm": 1.0},
        "got BinaryFocalCrossentropy",
    ),
    "another update": (
        ([LINEAR(CLASSES)], SPARSE), {"optimizer": "adam", "feature_norm": 1.0},
        "Every step counts: Adam is not SGD.",
    ),
    "add or remove": (
        ([LINEAR(CLASSES)], SPARSE),
        {"neighboring_relation": "add_or_remove_one", "sampling_rate": 0.3, "feature_norm": 1.0},
        "bounds on hidden iterates need REPLACE_SPECIAL",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WHY)
def test_the_report_says_why_every_step_counts(name):
    (parts, loss), settings, text = WHY[name]
    run = private_run(parts, loss, **settings)
    report = " ".join(run.report(1e-5).split())
    assert run.privacy_event.loss is None
    assert text in report
    assert "needs FULL or CYCLIC" not in report
    assert "Batches are Poisson, the default of batch_order=." in report


def test_a_clip_norm_just_above_the_longest_gradient():
    run = private_run([LINEAR(CLASSES)], SPARSE, feature_norm=1.0, l2_norm_clip="auto")
    assert 2 < run.privacy_event.clip_norm < 2.001
    weights = {"class_weight": {0: 2.0, 1: 1.0, 2: 1.0}}
    run = private_run([LINEAR(CLASSES)], SPARSE, feature_norm=1.0, l2_norm_clip="auto", **weights)
    assert 4 < run.privacy_event.clip_norm < 4.001
    for settings, text in (({}, "feature_norm="), ({"loss_geometry": ROUGH}, "the loss has none")):
        with pytest.raises(hsa.UnsupportedRunError, match=f'got "auto".*{text}'):
            private_run([LINEAR(CLASSES)], SPARSE, l2_norm_clip="auto", **settings)


def functional():
    inputs = tf.keras.Input([FEATURES])
    frozen = layers.Dense(5, "relu", kernel_initializer="identity", trainable=False)(inputs)
    return tf.keras.Model(inputs, LINEAR(CLASSES)(frozen))


SOFTMAX, ROUGH = hsa.LossGeometry.softmax_cross_entropy, hsa.LossGeometry.smooth(2.0)
ACCEPTED = {
    "softmax": ([LINEAR(CLASSES, use_bias=False)], SPARSE, SOFTMAX(1.0)),
    "bias": ([LINEAR(CLASSES)], SPARSE, SOFTMAX(1.0, bias=True)),
    "functional": (functional, SPARSE, SOFTMAX(1.0, bias=True)),
    "probabilities": ([LINEAR(CLASSES, "softmax")], PROBABILITIES, SOFTMAX(1.0, bias=True)),
    "logistic": ([LINEAR(1)], LOGISTIC, hsa.LossGeometry.logistic(1.0, bias=True)),
    "squared": (
        [LINEAR(1, use_bias=False)],
        SQUARED,
        hsa.LossGeometry.squared_error(1.0, scale=2.0),
    ),
    "squared_errors": ([LINEAR(4)], SQUARED, hsa.LossGeometry.squared_error(1.0, True, scale=0.5)),
    "huber": ([LINEAR(1)], none(losses.Huber, delta=2.0), hsa.LossGeometry.huber(1.0, 2.0, True)),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_derived_in_fit(name):
    parts, loss, expected = ACCEPTED[name]
    targets = "classes" if expected.kind.value == "convex" else "labels"
    targets = "numbers" if name == "squared_errors" else targets
    parts = parts() if callable(parts) else parts
    assert begin(parts, loss, targets)._run.record.declared.geometry == expected


def test_what_is_derived_and_what_is_declared_is_named():
    x, y = make_data()
    for declared in ("auto", SOFTMAX(1.0)):
        model = make_private(
            tf.keras.Sequential([LINEAR(CLASSES, use_bias=False)]),
            loss_geometry=declared,
            feature_norm=1.0,
            batch_order="cyclic",
        )
        model.compile(CyclicDPKerasSGDOptimizer(1.5, 2.0, learning_rate=0.5), SPARSE)
        # After one epoch epsilon is that of composition, which needs no geometry.
        model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0)
        assert model.privacy_event.loss == SOFTMAX(1.0)
        by_status = {}
        for assumption in model.assumptions:
            by_status.setdefault(assumption.status.value, []).append(assumption.text)
        checked, texts = " ".join(by_status["checked"]), by_status["declared"]
        assert "per-example gradient norms at most 1.41421" in checked
        if declared == "auto":
            assert "that of SparseCategoricalCrossentropy and one linear layer on" in checked
            assert "per-example loss" not in " ".join(texts)
            assert "the features of every example that the data could hold" in " ".join(texts)
        else:
            assert any(text.endswith(f" could have: {SOFTMAX(1.0)!r}") for text in texts)


def test_what_the_other_optimizers_make_of_it():
    model = begin([LINEAR(1)], LOGISTIC, "labels", optimizer=DiceKerasSGDOptimizer)
    assert model._run.record.declared.longest_gradient == pytest.approx(math.sqrt(2))
    model = begin([LINEAR(1)], LOGISTIC, "labels", optimizer=BlockCoordinateKerasOptimizer)
    known = model._run.steps.known_loss
    assert known == hsa.LossGeometry.logistic(1.0, bias=True)


def softmax_of_ones_own():
    return layers.Lambda(tf.nn.softmax)


def twice():
    inputs, head = tf.keras.Input([FEATURES]), LINEAR(FEATURES)
    return tf.keras.Model(inputs, head(head(inputs)))


def last_example(change):
    x, y = make_data()
    change(x[-1])
    return x, y


def lengthen(row):
    row *= 1.001


def spoil(row):
    row[0] = math.nan


LABELS = {"targets": "labels"}
REFUSED = {
    "own_softmax": ([LINEAR(3), softmax_of_ones_own()], SPARSE, {}, "be that of dense"),
    "softmax_and_logits": ([LINEAR(3, "softmax")], SPARSE, {}, "activation 'linear'"),
    "no_softmax": ([LINEAR(3)], PROBABILITIES, {}, "activation 'softmax'"),
    "tanh": ([LINEAR(3, "tanh")], SPARSE, {}, "activation 'linear' .* got 'tanh'"),
    "two_layers": ([LINEAR(5), LINEAR(3)], SPARSE, {}, "one Dense layer is trained"),
    "conv": ([layers.Reshape([3, 1]), layers.Conv1D(3, 3), layers.Flatten()], SPARSE, {},
             "one Dense layer is trained"),
    "focal": ([LINEAR(1)], none(losses.BinaryFocalCrossentropy, from_logits=True), LABELS,
              "got BinaryFocalCrossentropy"),
    "hinge": ([LINEAR(1)], none(losses.SquaredHinge), LABELS, "got SquaredHinge"),
    "smoothing": ([LINEAR(1)], none(losses.BinaryCrossentropy, from_logits=True,
                  label_smoothing=-1.0), LABELS, "label_smoothing from 0 to 1"),
    "ignored": ([LINEAR(3)], none(losses.SparseCategoricalCrossentropy, from_logits=True,
                ignore_class=0), {}, "ignore_class = None"),
    "dropout": ([layers.Dropout(0.5), LINEAR(3)], SPARSE, {}, "in training mode"),
    "head_twice": (twice(), SPARSE, {}, "after 2 calls"),
    "sequences": ([layers.Reshape([1, 3]), LINEAR(3), layers.Flatten()], SPARSE, {},
                  "be that of dense"),
    "long": ([LINEAR(3)], SPARSE, {"data": last_example(lengthen)},
             "feature_norm = 1 .* got 1.001.* for example 11"),
    "not_a_number": ([LINEAR(3)], SPARSE, {"data": last_example(spoil)}, "got nan for example 11"),
    "targets": ([LINEAR(3)], none(losses.CategoricalCrossentropy, from_logits=True),
                {"data": (make_data()[0], 2 * make_data("one_hot")[1])}, "of probabilities"),
    "labels": ([LINEAR(1)], LOGISTIC, {"data": (make_data()[0], 3 * make_data("labels")[1])},
               "Expected probabilities as targets, got"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    parts, loss, options, text = REFUSED[name]
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        begin(parts, loss, **options)


def test_features_are_measured_for_a_declared_geometry_if_a_norm_is_given():
    model = begin([LINEAR(3)], SPARSE, loss_geometry=SOFTMAX(0.5, True))
    (measured,) = model._run.record.declared.measured
    assert str(measured).startswith("checked: features of norm at most 1 at the linear layer")
    with pytest.raises(hsa.UnsupportedRunError, match=r"feature_norm = 0.5 .* got 1"):
        begin([LINEAR(3)], SPARSE, loss_geometry=SOFTMAX(0.5, True), feature_norm=0.5)


# Keras' squared error has no factor 1/2


def test_a_declared_curvature_that_the_squared_error_exceeds():
    half = hsa.LossGeometry.squared_error(1.0, bias=True)
    with pytest.raises(hsa.UnsupportedRunError, match="smoothness >= 4, the curvature of Keras'"):
        begin([LINEAR(1)], SQUARED, "labels", loss_geometry=half, feature_norm=None)
    whole = hsa.LossGeometry.squared_error(1.0, bias=True, scale=2.0)
    begin([LINEAR(1)], SQUARED, "labels", loss_geometry=whole, feature_norm=None)
    # Nothing is known of the curvature of what is not one linear layer.
    begin(
        [LINEAR(2), LINEAR(1)], SQUARED, "labels",
        loss_geometry=hsa.LossGeometry.smooth(2.0), feature_norm=None,
    )  # fmt: skip
