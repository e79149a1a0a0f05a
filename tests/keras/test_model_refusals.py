"""What the model that owns its run refuses, and what ends its run."""

import math

import keras_models
import numpy as np
import pytest

pytest.importorskip("tensorflow")
import tensorflow as tf
from keras_models import BATCH, FEATURES, RECORDS, Y, crossentropy, refused

import hidden_state_accountants as hsa
from hidden_state_adapters.tf_privacy import HiddenStateModel, HiddenStateSequential, keras_api

pytestmark = pytest.mark.usefixtures("without_graphs")
layers, optimizers, callbacks = tf.keras.layers, tf.keras.optimizers, tf.keras.callbacks
X = np.eye(RECORDS, FEATURES, dtype="float32") + 0.1


def make(stack=None, *, optimizer=None, **settings):
    return keras_models.make(optimizer, stack, **settings)


def fit(model, **kwargs):
    return keras_models.fit(model, **{"x": X, **kwargs})


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"l2_norm_clip": 1e-12}, ValueError, "l2_norm_clip between"),
        ({"batch_order": "sorted"}, ValueError, "poisson"),
        ({"max_batch_size": 8}, hsa.UnsupportedRunError, 'unless batch_order = "poisson"'),
        ({"loss_geometry": "auto"}, ValueError, "feature_norm"),
        ({"loss_geometry": "convex"}, TypeError, "loss_geometry"),
        ({"compile": {"steps_per_execution": 0}}, ValueError, "steps_per_execution"),
    ],
)
def test_arguments(arguments, error, text):
    with pytest.raises(error, match=text):
        make(**arguments)


def test_microbatches_of_several_examples():
    with refused(f"num_microbatches = None or {BATCH}, one"):
        fit(make(num_microbatches=2))
    assert "microbatches" not in fit(make(num_microbatches=BATCH)).report(1e-5)


def generated(batches=3, *more):
    for k in range(batches):
        part = slice(BATCH * (k % 3), BATCH * (k % 3 + 1))
        yield (X[part], Y[part], *(one[part] for one in more))


def dataset(*parts):
    return tf.data.Dataset.from_tensor_slices(parts if len(parts) > 1 else parts[0])


TARGET = {"target_epsilon": 1.0, "target_delta": 1e-5}
NO_NOISE = {"noise_multiplier": None}
GEOMETRY = {"loss_geometry": hsa.LossGeometry.softmax_cross_entropy(2.0, bias=True)}


def rate_of_a_function():
    takes_functions = optimizers if keras_api.IS_KERAS_3 else optimizers.legacy
    return {"optimizer": takes_functions.SGD(lambda: 0.5)}


@pytest.mark.parametrize(
    ("settings", "arguments", "text"),
    [
        ({}, {"validation_split": 0.5}, "validation_split = 0"),
        ({}, {"shuffle": False}, 'say batch_order="cyclic"'),
        ({}, {"steps_per_epoch": 2}, "3 steps in an epoch"),
        ({}, {"batch_size": 5}, "drop_remainder"),
        ({}, {"batch_size": 13}, "batch_size <= 12"),
        ({}, {"x": (row for row in X)}, "y = None when x is a generator"),
        ({}, {"x": generated(), "y": None}, "steps_per_epoch = None batches"),
        ({}, {"x": generated(4), "y": None, "steps_per_epoch": 3}, "3 batches, got 4 or more"),
        ({}, {"x": generated(2), "y": None, "steps_per_epoch": 3}, "3 batches, got 2"),
        ({}, {"x": generated(3, X, X), "y": None, "steps_per_epoch": 3}, "Expected pairs"),
        ({}, {"x": iter([X])}, "as an array"),
        ({}, {"x": dataset(X, Y).repeat(2), "y": None}, "repeat"),
        ({}, {"x": dataset(X), "y": None}, "Expected pairs"),
        ({}, {"x": dataset(X.reshape(2, 6, -1), Y.reshape(2, 6)), "y": None}, "= None or 6 with"),
        ({}, {"y": None}, "y as an array"),
        ({}, {"callbacks": [callbacks.EarlyStopping()]}, "make a private model with"),
        ({}, {"callbacks": [callbacks.ReduceLROnPlateau()]}, "Give the optimizer a schedule"),
        ({}, {"callbacks": [callbacks.CSVLogger("log.csv")]}, "CSVLogger"),
        (NO_NOISE, {}, "Expected noise_multiplier, or target"),
        ({}, {"target_epsilon": 1.0}, "target_epsilon = None"),
        (NO_NOISE, {"target_epsilon": 1.0}, "target_delta with target_epsilon"),
        (NO_NOISE, {**TARGET, "callbacks": [callbacks.LearningRateScheduler(abs)]},
         "no LearningRateScheduler"),
        ({**NO_NOISE, **GEOMETRY, **rate_of_a_function()}, TARGET, "or a schedule of Keras"),
    ],
    ids=lambda value: next(iter(value), "") if isinstance(value, dict) else "",
)  # fmt: skip
def test_fit(settings, arguments, text):
    model = make(**settings)
    with pytest.raises((hsa.UnsupportedRunError, ValueError, TypeError), match=text):
        fit(model, **arguments)
    with pytest.raises(ValueError, match="Call fit"):
        model.get_epsilon(1e-5)


class AddsLoss(layers.Layer):
    def call(self, features):
        self.add_loss(tf.reduce_sum(features))
        return features


class OwnStep(HiddenStateSequential):
    def train_step(self, data):
        return super().train_step(data)


class OwnLoss(HiddenStateSequential):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)


def two_outputs(stack, **settings):
    inputs = tf.keras.Input((FEATURES,))
    return HiddenStateModel(inputs, [layers.Dense(2)(inputs), layers.Dense(2)(inputs)], **settings)


class Noisy:
    """Stands for an optimizer of TensorFlow Privacy, where that is installed."""

    def __new__(cls):
        module = "tensorflow_privacy.privacy.optimizers.dp_optimizer_keras_vectorized"
        return pytest.importorskip(module).VectorizedDPKerasSGDOptimizer(1.0, 1.0)


def mean_of(features):
    return tf.reduce_mean(features, 0)


PENALTY = tf.keras.regularizers.L2(0.1)
WORDS = layers.TextVectorization(output_sequence_length=2, vocabulary=["a", "b"])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"optimizer": Noisy}, "an optimizer without noise"),
        ({"optimizer": optimizers.SGD(use_ema=True), **GEOMETRY}, "SGD with use_ema = True"),
        ({"optimizer": optimizers.SGD(momentum=0.9), **GEOMETRY}, "SGD with momentum = 0.9"),
        ({"optimizer": "adam", **GEOMETRY}, "plain SGD with loss_geometry, got Adam"),
        ({"optimizer": optimizers.SGD(clipvalue=1.0), **GEOMETRY}, "SGD with clipvalue = 1.0"),
        ({"optimizer": "adam", "projection_radius": 1.0}, "plain SGD with projection"),
        ({"projection_radius": 1.0}, "variables within projection_radius = 1 of 0, got norm 2.4"),
        ({"stack": [layers.Dense(2, dtype="float16")]}, "own precision, .* got float16"),
        ({"stack": [layers.Dense(2, dtype="float64"), layers.Dense(2)]}, "of one precision, got"),
        ({"stack": [layers.BatchNormalization(), layers.Dense(2)]}, "batch normalisation"),
        ({"stack": [AddsLoss(), layers.Dense(2)]}, "no regularisation losses"),
        ({"stack": [layers.Reshape((-1, 1)), layers.GRU(2), layers.Dense(2)]}, "unroll=True, got"),
        ({"stack": [layers.Dense(2, kernel_regularizer=PENALTY)]}, "no regularisation losses"),
        ({"stack": [layers.Dense(2, activity_regularizer=PENALTY)]}, "no regularisation"),
        ({"stack": [layers.Lambda(lambda x: x - mean_of(x)), layers.Dense(2)],
          "loss_geometry": "auto", "feature_norm": 9.0}, "features of every example by itself"),
        ({"stack": [WORDS, layers.Embedding(4, 2), layers.Flatten(), layers.Dense(2)]},
         "Call the layer before fit"),
        ({"kind": OwnStep}, "Expected the train_step"),
        ({"kind": OwnLoss}, "Expected the compute_loss"),
        ({"kind": two_outputs}, "one tensor of targets and one of outputs"),
        ({"compile": {"loss": None}}, "one loss for the one output"),
        ({"compile": {"loss": [crossentropy()] * 2}}, "got several"),
        ({"compile": {"loss": lambda y, p: tf.reduce_mean(p)}}, "one entry per example"),
        ({"compile": {"loss_weights": [2.0]}}, "loss_weights = None"),
        ({"compile": {"weighted_metrics": ["accuracy"]}}, "weighted_metrics = None"),
        ({"loss_geometry": "auto", "feature_norm": 0.5}, "feature_norm = 0.5"),
        ({"neighboring_relation": "ADD_OR_REMOVE_ONE"}, "or REPLACE_ONE, got"),
    ],
    ids=lambda value: str(next(iter(value))) if isinstance(value, dict) else "",
)  # fmt: skip
def test_models_and_optimizers(arguments, text):
    if arguments.get("optimizer") is Noisy:
        arguments = {"optimizer": Noisy()}
    x = tf.constant([["a b"]] * RECORDS) if WORDS in arguments.get("stack", ()) else X
    with refused(text):
        fit(make(**arguments), x=x)


@pytest.mark.parametrize(
    "arguments",
    [
        {"compile": {"loss": lambda targets, outputs: tf.map_fn(tf.reduce_sum, outputs)}},
        {"stack": [layers.Dense(2), layers.Lambda(lambda x: tf.map_fn(tf.square, x))]},
    ],
    ids=",".join,
)
def test_what_tensorflow_cannot_vectorize(arguments, monkeypatch):
    monkeypatch.undo()  # the loop over rows that stands for tf.vectorized_map
    with refused("that TensorFlow can vectorize"):
        fit(make(**arguments))


# --- what ends a run, and what does not -----------------------------------------------------------


def write_moments(model):
    model.optimizer.variables[-1].assign_add(tf.ones_like(model.optimizer.variables[-1]))


def write_weights(model):
    model.layers[0].kernel.assign_add(tf.ones_like(model.layers[0].kernel))


def set_momentum(model):
    model.optimizer.beta_1 = 0.5
    model.optimizer.clipnorm = 1.0


def interrupt(model):
    raise KeyboardInterrupt


def end_the_data(model):
    """Keras takes it for the end of the data, and fit returns."""
    raise StopIteration


def stop(model):
    model.stop_training = True


ENDS = {
    write_moments: "changed outside",
    write_weights: "changed outside",
    set_momentum: "Expected clipnorm = None",
    interrupt: "fit was interrupted",
    end_the_data: "fit was interrupted",
    stop: "stopped early",
}


@pytest.mark.parametrize("act", ENDS, ids=lambda act: act.__name__)
def test_what_ends_a_run(act):
    model = make(optimizer=optimizers.Adam())
    end = callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: batch == 1 and act(model))
    with pytest.raises((hsa.UnsupportedRunError, KeyboardInterrupt, StopIteration)):
        fit(model, callbacks=[end])
    for ask in (
        lambda: model.get_epsilon(1e-5),
        lambda: model.privacy_event,
        lambda: fit(model),
    ):
        with refused(ENDS[act]):
            ask()


def test_a_fixed_variable_that_is_what_it_was_by_the_end():
    """A count of the second epoch, which a callback of the user's sets back."""
    frozen = layers.Dense(FEATURES, trainable=False)
    model = make([frozen, layers.Dense(2)])

    def step(batch, logs):
        if model._run.record.num_batches > 4:
            frozen.bias.assign_add(tf.ones(FEATURES))

    back = callbacks.LambdaCallback(
        on_train_batch_end=step, on_epoch_end=lambda *_: frozen.bias.assign(tf.zeros(FEATURES))
    )
    with refused("not trained was changed"):
        fit(model, epochs=2, callbacks=[back])


def test_weights_that_are_written_before_the_first_step():
    """They begin no run, and the model is as good as before; nor does an optimizer with steps."""
    model = make()
    begin = callbacks.LambdaCallback(on_train_begin=lambda logs: write_weights(model))
    with refused("changed outside"):
        fit(model, callbacks=[begin])
    assert len(fit(model).privacy_events) == 1
    with pytest.raises((hsa.UnsupportedRunError, ValueError, KeyError)):
        fit(make(optimizer=model.optimizer))
    assert model.get_epsilon(1e-5) > 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"x": X + 1}, "examples of the run so far"),
        ({"y": 1 - Y}, "examples of the run so far"),
        ({"batch_size": 6}, "as in the run so far"),
    ],
)
def test_another_call_of_fit(arguments, text):
    model = fit(make())
    before = model.get_epsilon(1e-5)
    with refused(text):
        fit(model, **arguments)
    with refused("fit, got train_step or train_on_batch"):
        model.train_on_batch(X, Y)
    assert model.get_epsilon(1e-5) == before


def test_examples_that_are_written_later_are_not_used():
    x, model = X.copy(), make(compile={"loss": [crossentropy()]})
    write = callbacks.LambdaCallback(on_train_begin=lambda logs: x.fill(math.nan))
    fit(model, x=x, callbacks=[write])
    assert np.isfinite(model.get_weights()[0]).all()
    with refused("examples of the run so far"):
        fit(model, x=x)
