"""What Keras 3 does in another way than Keras 2, and would be another run than is accounted."""

import copy

import numpy as np
import pytest

pytest.importorskip("tensorflow")
import tensorflow as tf
from keras_models import (
    AUTO,
    BATCH,
    FEATURES,
    RECORDS,
    SGD,
    X,
    Y,
    crossentropy,
    fit,
    head,
    make,
    refused,
)

from hidden_state_adapters.tf_privacy import (
    HiddenStateModel,
    gradients,
    keras_api,
    make_private,
)
from hidden_state_adapters.tf_privacy.gradients import RowByRow, ThroughLinearLayers

pytestmark = pytest.mark.skipif(not keras_api.IS_KERAS_3, reason="Keras 2 runs")
layers, losses, optimizers = tf.keras.layers, tf.keras.losses, tf.keras.optimizers
callbacks = tf.keras.callbacks
STEPS = RECORDS // BATCH


def without_decay_of_biases():
    optimizer = SGD(0.5, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


NOT_PLAIN = "plain SGD with loss_geometry, got SGD with "
REFUSED = {
    "float16": (lambda: make(stack=[head(dtype="mixed_float16")]), "own precision"),
    "bfloat16 inside": (
        lambda: make(stack=[tf.keras.Sequential([head(dtype="mixed_bfloat16")])]), "own precision",
    ),
    "quantized": (
        lambda: make(stack=[head(dtype="float8_from_float32")], compile={"run_eagerly": True}),
        "quantized policy",
    ),
    "loss": (lambda: make(compile={"loss": crossentropy(dtype="bfloat16")}), "loss in float32"),
    "constraint": (
        lambda: make(stack=[head(kernel_constraint=tf.keras.constraints.NonNeg())]),
        "without a constraint",
    ),
    "accumulation": (
        lambda: make(SGD(0.5, gradient_accumulation_steps=2), **AUTO),
        NOT_PLAIN + "gradient_accumulation_steps = 2",
    ),
    "clipping": (
        lambda: make(SGD(0.5, global_clipnorm=1.0), **AUTO), NOT_PLAIN + "global_clipnorm = 1.0",
    ),
    "decay by name": (
        lambda: make(without_decay_of_biases(), **AUTO), NOT_PLAIN + "exclude_from_weight_decay",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    make_model, text = REFUSED[name]
    with refused(text):
        fit(make_model())


@pytest.mark.parametrize("name", ["OrbaxCheckpoint", "SwapEMAWeights"])
def test_callbacks_that_keras_2_has_not(name):
    if not hasattr(callbacks, name):
        pytest.skip("this Keras has it not")
    callback = object.__new__(getattr(callbacks, name))  # OrbaxCheckpoint needs a package
    callbacks.Callback.__init__(callback)
    with refused(f"Expected no {name}"):
        fit(make(), callbacks=[callback])


class Keeps(layers.Layer):
    """Keeps a number of the examples in a place that Keras 3 does not count as a weight."""

    def __init__(self, kept, add):
        super().__init__()
        self.kept, self.add = kept, add

    def call(self, x, training=None):
        if training:
            self.add(self.kept, tf.reduce_sum(tf.abs(tf.stop_gradient(x))))
        return x


class Module(tf.Module):
    def __init__(self):
        super().__init__()
        self.inner = tf.Variable(0.0)


PLACES = {
    "metric": (tf.keras.metrics.Mean, lambda kept, total: kept.update_state(total)),
    "variable": (
        lambda: tf.Variable(0.0, trainable=False), lambda kept, total: kept.assign_add(total),
    ),
    "container": (
        lambda: {"all": [tf.Variable(0.0)]}, lambda kept, total: kept["all"][0].assign_add(total),
    ),
    "module": (Module, lambda kept, total: kept.inner.assign_add(total)),
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_what_a_layer_keeps_of_the_examples(place):
    make_kept, add = PLACES[place]
    with refused("variable that is not trained was changed"):
        fit(make(stack=[Keeps(make_kept(), add), head()], compile={"run_eagerly": True}))


# --- gradients ------------------------------------------------------------------------------------


def test_a_product_of_trained_matrices_is_no_linear_layer():
    """Dense.enable_lora trains two factors of what is added to the kernel: nothing is convex."""

    def low_rank():
        layer = head()
        layer.build((None, FEATURES))
        layer.enable_lora(1)
        return layer

    with refused("one Dense layer is trained"):
        fit(make(stack=[low_rank()], **AUTO))
    model = fit(make(stack=[low_rank()]))
    assert isinstance(model._run.clipping[0], RowByRow)
    assert len(model._run.steps.variables) == 3


@pytest.mark.parametrize("name", ["MixUp", "CutMix"])
def test_images_that_are_mixed_with_others_of_the_batch(name):
    """Each is alone."""
    if not hasattr(layers, name):
        pytest.skip("this Keras has it not")
    images = np.random.default_rng(0).uniform(size=(RECORDS, 4, 4, 1)).astype("float32")
    stack = [layers.Input((4, 4, 1)), getattr(layers, name)(), layers.Flatten(), head()]
    assert isinstance(fit(make(stack=stack), x=images)._run.clipping[0], RowByRow)


def test_every_step_has_random_numbers_of_its_own():
    """Which all examples share: Keras 3 draws from a state that moves once in a step.

    This state is no memory of the examples.
    """
    model = make(stack=[layers.Dropout(0.5), head()])
    model.build((None, 64))
    rows = RowByRow(model, lambda y, p: tf.reduce_sum(p, 1), keras_api.trained(model))
    norms = tf.function(lambda: rows.gradients(tf.ones([8, 64]), tf.zeros([8])).norms)
    assert len({round(float(norms()[0]), 4) for _ in range(9)}) > 1
    assert fit(make(stack=[layers.Dropout(0.5), head()]), epochs=2).get_epsilon(1e-5) > 0


@pytest.mark.parametrize("batch_size", [BATCH, 1])
def test_a_kernel_that_the_graph_uses_twice(batch_size):
    """An operation of the graph is no layer, and takes the variable past the layer.

    TensorFlow 2.21 cannot vectorize this product over a single row.
    """
    inputs, last = tf.keras.Input((FEATURES,)), head()
    hidden = layers.Dense(FEATURES, kernel_initializer="zeros")(inputs)
    outputs = last(hidden) + keras_api.keras.ops.matmul(hidden, last.kernel)
    plain = tf.keras.Model(inputs, outputs)
    model = make_private(plain, l2_norm_clip=0.5, noise_multiplier=2.0, batch_order="cyclic")
    model.compile(SGD(0.5), crossentropy())
    fit(model, batch_size=batch_size)
    assert not isinstance(model._run.clipping[0], ThroughLinearLayers)
    assert model.privacy_event.num_steps == RECORDS // batch_size


def test_products_that_tensorflow_computes_of_foreign_memory(monkeypatch):
    """A layer of attention, of a batch of one, with TensorFlow 2.21 and oneDNN (#117700)."""
    is_broken = (2, 15) < tuple(map(int, tf.__version__.split(".")[:2])) < (2, 22)
    rows, flat = layers.Reshape((FEATURES, 1)), layers.Flatten()
    monkeypatch.setattr(gradients._pywrap_util_port, "IsMklEnabled", lambda: True)
    if is_broken:
        products = layers.EinsumDense("abc,cde->abde", (FEATURES, 2, 2))
        with refused("TF_ENABLE_ONEDNN_OPTS=0"):
            fit(make(stack=[rows, products, flat, head()]))
    fit(make(stack=[layers.Dense(4, activation="relu"), head()]))
    fit(make(stack=[rows, layers.Conv1D(2, 2), flat, head()]))


@pytest.fixture
def policy():
    yield tf.keras.config.set_dtype_policy
    tf.keras.config.set_dtype_policy("float32")


CLASSIFIERS = {
    "softmax": (2, losses.SparseCategoricalCrossentropy, Y, 2**0.5),
    "sigmoid": (1, losses.BinaryCrossentropy, np.zeros((RECORDS, 1), "float32"), 1.0),
}


@pytest.mark.parametrize("activation", CLASSIFIERS)
@pytest.mark.parametrize(
    ("precision", "options"),
    [("float32", {}), ("float64", {}), ("float64", {"dtype": "float64"})],
)
def test_probabilities_that_are_nearly_one(activation, precision, options, policy):
    """The slopes are those of what went into the activation, in the precision of the head.

    Keras clips probabilities that are cast, and a wrong answer has no gradient there any more.
    """
    policy(precision)
    units, loss, targets, slope = CLASSIFIERS[activation]
    x = np.abs(np.eye(RECORDS, FEATURES)) + (np.arange(RECORDS)[:, None] >= FEATURES) * X[:1]
    last = layers.Dense(units, activation=activation, use_bias=False)
    model = make(stack=[last], compile={"loss": loss(**options), "run_eagerly": True}, **AUTO)
    model.build((None, FEATURES))
    weights = np.zeros((FEATURES, units))
    weights[:, 0] = 60.0
    model.set_weights([weights])
    fit(model, x=x, y=targets)
    assert model._run.steps.last_step.largest_norm == pytest.approx(slope, rel=1e-5)


def test_constants_that_the_configuration_lacks():
    """Of Huber's delta Keras 3 writes nothing down; it is the largest slope."""
    model = fit(make(stack=[head(1)], compile={"loss": losses.Huber(delta=3.0)}, **AUTO))
    assert model.privacy_event.loss.lipschitz == pytest.approx(3 * 2**0.5)


# --- weights and files ----------------------------------------------------------------------------


def test_weights_that_come_back_though_nothing_stopped():
    """In Keras 3 EarlyStopping restores the best ones after the last epoch as well."""
    model = make(validation_data_is_public=True, **AUTO)
    stop = callbacks.EarlyStopping("val_loss", patience=9, min_delta=100, restore_best_weights=True)
    fit(model, epochs=3, callbacks=[stop], validation_data=(X, Y))
    assert stop.stopped_epoch == 0
    assert model.privacy_event.num_steps == 3 * STEPS
    assert model.privacy_event.release_steps == (STEPS, 2 * STEPS)
    assert model.get_epsilon(1e-5) > 0
    with refused("that EarlyStopping has not stopped"):  # no step goes on from an older iterate
        fit(model)


def test_a_copy_knows_the_run_of_its_weights():
    again = copy.deepcopy(fit(make(**AUTO)))
    again.compile(SGD(0.5), crossentropy())
    assert len(fit(again).privacy_events) == 2


def test_no_file_holds_metrics_of_the_examples(tmp_path):
    model = make(compile={"metrics": ["accuracy"]})
    path = tmp_path / "{epoch}.keras"
    fit(model, epochs=2, callbacks=[callbacks.ModelCheckpoint(str(path))])
    for epoch in (1, 2):
        loaded = tf.keras.models.load_model(tmp_path / f"{epoch}.keras")
        assert all(float(v.numpy().sum()) == 0 for m in loaded.metrics for v in m.variables)
    assert model.privacy_event.release_steps == (STEPS,)


class Net(HiddenStateModel):
    """A class whose constructor has arguments."""

    def __init__(self, units=2, **kwargs):
        super().__init__(**kwargs)
        self.units, self.head = units, layers.Dense(units)

    def call(self, features):
        return self.head(features)

    def get_config(self):
        return {**super().get_config(), "units": self.units}


def test_a_class_of_ones_own_is_saved(tmp_path):
    model = Net(3, l2_norm_clip=0.5, noise_multiplier=2.0, **AUTO)
    model.compile(SGD(0.5), crossentropy())
    fit(model).save(tmp_path / "net.keras")
    kinds = {"Net": Net}
    loaded = tf.keras.models.load_model(tmp_path / "net.keras", custom_objects=kinds)
    assert loaded.units == 3
    np.testing.assert_array_equal(loaded.predict(X, verbose=0), model.predict(X, verbose=0))
    assert len(fit(loaded).privacy_events) == 2


def test_integers_go_into_a_private_model_as_they_are():
    inputs = tf.keras.Input((FEATURES,), dtype="int32")
    stack = [inputs, layers.Embedding(5, 2), layers.Flatten(), head()]
    model = make_private(tf.keras.Sequential(stack), l2_norm_clip=0.5, noise_multiplier=2.0)
    assert model.input_dtype == "int32"
    model.compile("adam", crossentropy())
    words = np.arange(RECORDS * FEATURES).reshape(RECORDS, FEATURES) % 5
    assert fit(model, x=words).get_epsilon(1e-5) > 0
