"""What Keras 3 does in another way than Keras 2, and would be another run than is accounted."""

import copy

import numpy as np
import pytest

pytest.importorskip("tensorflow")
import keras_models
import tensorflow as tf
from keras_models import AUTO, BATCH, FEATURES, RECORDS, X, Y, crossentropy, fit

import hidden_state_accountants as hsa
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


def make(stack=None, *, optimizer=None, compile=None, loss=None, **settings):
    compile = {**({} if loss is None else {"loss": loss}), **(compile or {})}
    return keras_models.make(optimizer, stack, compile=compile, l2_norm_clip=0.5, **settings)


def refused(text):
    return pytest.raises(hsa.UnsupportedRunError, match=text)


def low_rank():
    head = layers.Dense(2)
    head.build((None, FEATURES))
    head.enable_lora(1)
    return head


def test_a_product_of_trained_matrices_is_no_linear_layer():
    """Dense.enable_lora trains two factors of what is added to the kernel: nothing is convex."""
    with refused("one Dense layer is trained"):
        fit(make([low_rank()], **AUTO))
    model = make([low_rank()])
    fit(model)
    assert isinstance(model._run.clipping[0], RowByRow)
    assert len(model._run.steps.variables) == 3
    assert model.get_epsilon(1e-5) > 0


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("at", ["layer", "inner"])
def test_one_layer_of_low_precision(policy, at):
    head = layers.Dense(2, dtype=policy)
    stack = [head] if at == "layer" else [tf.keras.Sequential([head])]
    with refused("own precision"):
        fit(make(stack))


def test_a_quantized_layer():
    head = layers.Dense(2, dtype="float8_from_float32")
    with refused("quantized policy"):
        fit(make([head], compile={"run_eagerly": True}))


def test_losses_in_low_precision():
    with refused("loss in float32"):
        fit(make(loss=crossentropy(dtype="bfloat16")))


@pytest.fixture
def policy():
    yield tf.keras.config.set_dtype_policy
    tf.keras.config.set_dtype_policy("float32")


CLASSIFIERS = {
    "softmax": (2, losses.SparseCategoricalCrossentropy, Y, 2**0.5),
    "sigmoid": (1, losses.BinaryCrossentropy, np.zeros((RECORDS, 1), "float32"), 1.0),
}


@pytest.mark.parametrize("activation", CLASSIFIERS)
def test_probabilities_that_are_nearly_one(activation, policy):
    """The slopes are those of what went into the activation, in the precision of the head.

    Keras clips probabilities that are cast, and a wrong answer has no gradient there any more.
    """
    units, loss, targets, slope = CLASSIFIERS[activation]
    x = np.abs(np.eye(RECORDS, FEATURES)) + (np.arange(RECORDS)[:, None] >= FEATURES) * X[:1]

    def trained(**options):
        head = layers.Dense(units, activation=activation, use_bias=False)
        model = make([head], loss=loss(**options), compile={"run_eagerly": True}, **AUTO)
        model.build((None, FEATURES))
        weights = np.zeros((FEATURES, units))
        weights[:, 0] = 60.0
        model.set_weights([weights])
        model.fit(x, targets, batch_size=BATCH, verbose=0)
        return model

    for precision, options in (("float32", {}), ("float64", {}), ("float64", {"dtype": "float64"})):
        policy(precision)
        largest = trained(**options)._run.steps.last_step.largest_norm
        assert largest == pytest.approx(slope, rel=1e-5)


def test_products_that_tensorflow_computes_of_foreign_memory(monkeypatch):
    """A layer of attention, of a batch of one, with TensorFlow 2.21 and oneDNN (#117700)."""
    is_broken = (2, 15) < tuple(map(int, tf.__version__.split(".")[:2])) < (2, 22)
    rows, parts = (
        layers.Reshape((FEATURES, 1)),
        layers.EinsumDense("abc,cde->abde", (FEATURES, 2, 2)),
    )
    stack = [rows, parts, layers.Flatten(), layers.Dense(2)]
    monkeypatch.setattr(gradients._pywrap_util_port, "IsMklEnabled", lambda: True)
    if is_broken:
        with refused("TF_ENABLE_ONEDNN_OPTS=0"):
            fit(make(stack))
    fit(make([layers.Dense(4, activation="relu"), layers.Dense(2)]))
    fit(
        make(
            [layers.Reshape((FEATURES, 1)), layers.Conv1D(2, 2), layers.Flatten(), layers.Dense(2)]
        )
    )


def test_constraints():
    with refused("without a constraint"):
        fit(make([layers.Dense(2, kernel_constraint=tf.keras.constraints.NonNeg())]))


class Keeps(layers.Layer):
    """Keeps a number of the examples in a place that Keras 3 does not count as a weight."""

    def __init__(self, place, **kwargs):
        super().__init__(**kwargs)
        self.place = place
        if place == "metric":
            self.kept = tf.keras.metrics.Mean()
        elif place == "variable":
            self.kept = tf.Variable(0.0, trainable=False)
        elif place == "container":
            self.kept = {"all": [tf.Variable(0.0)]}
        else:
            self.kept = tf.Module()
            self.kept.inner = tf.Variable(0.0)

    def call(self, x, training=None):
        if training:
            total = tf.reduce_sum(tf.abs(tf.stop_gradient(x)))
            if self.place == "metric":
                self.kept.update_state(total)
            elif self.place == "variable":
                self.kept.assign_add(total)
            elif self.place == "container":
                self.kept["all"][0].assign_add(total)
            else:
                self.kept.inner.assign_add(total)
        return x


@pytest.mark.parametrize("place", ["metric", "variable", "container", "module"])
def test_what_a_layer_keeps_of_the_examples(place):
    with refused("variable that is not trained was changed"):
        fit(make([Keeps(place), layers.Dense(2)], compile={"run_eagerly": True}))


@pytest.mark.parametrize("name", ["MixUp", "CutMix"])
def test_images_that_are_mixed_with_others_of_the_batch(name):
    if not hasattr(layers, name):
        pytest.skip("this Keras has it not")
    images = np.random.default_rng(0).uniform(size=(RECORDS, 4, 4, 1)).astype("float32")
    model = make(
        [layers.Input((4, 4, 1)), getattr(layers, name)(), layers.Flatten(), layers.Dense(2)]
    )
    model.fit(images, Y, batch_size=BATCH, verbose=0)
    assert isinstance(model._run.clipping[0], RowByRow)  # each alone


def test_random_numbers_of_a_layer():
    """Their state moves with every step, and is no memory of the examples."""
    model = make([layers.Dropout(0.5), layers.Dense(2)])
    fit(model, epochs=2)
    assert model.get_epsilon(1e-5) > 0


def test_every_step_has_random_numbers_of_its_own():
    """Which all examples share: Keras 3 draws from a state that moves once in a step."""
    model = make([layers.Dropout(0.5), layers.Dense(2, kernel_initializer="ones")])
    model.build((None, 64))
    rows = RowByRow(model, lambda y, p: tf.reduce_sum(p, 1), keras_api.trained(model))
    gradients = tf.function(lambda: rows.gradients(tf.ones([8, 64]), tf.zeros([8])).norms)
    assert len({round(float(gradients()[0]), 4) for _ in range(9)}) > 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps = 2"),
        ({"momentum": 0.9}, "momentum = 0.9"),
        ({"global_clipnorm": 1.0}, "global_clipnorm = 1.0"),
    ],
)
def test_sgd_that_is_not_plain(options, text):
    with refused(f"plain SGD with loss_geometry, got SGD with {text}"):
        fit(make(optimizer=optimizers.SGD(0.5, **options), **AUTO))
    model = make(optimizer=optimizers.SGD(0.5, **options))
    fit(model)
    assert model.privacy_event.num_steps == RECORDS // BATCH


def test_a_decay_that_leaves_variables_out_by_name():
    optimizer = optimizers.SGD(0.5, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    with refused("plain SGD with loss_geometry, got SGD with exclude_from_weight_decay"):
        fit(make(optimizer=optimizer, **AUTO))


@pytest.mark.parametrize("name", ["OrbaxCheckpoint", "SwapEMAWeights"])
def test_callbacks_that_keras_2_has_not(name):
    if not hasattr(callbacks, name):
        pytest.skip("this Keras has it not")
    callback = object.__new__(getattr(callbacks, name))  # OrbaxCheckpoint needs a package
    callbacks.Callback.__init__(callback)
    with refused(f"Expected no {name}"):
        fit(make(), callbacks=[callback])


@pytest.mark.parametrize("batch_size", [BATCH, 1])
def test_a_kernel_that_the_graph_uses_twice(batch_size):
    """An operation of the graph is no layer, and takes the variable past the layer.

    TensorFlow 2.21 cannot vectorize this product over a single row.
    """
    inputs, head = tf.keras.Input((FEATURES,)), layers.Dense(2, kernel_initializer="ones")
    first = layers.Dense(FEATURES, kernel_initializer="zeros")
    hidden = first(inputs)
    outputs = head(hidden) + keras_api.keras.ops.matmul(hidden, head.kernel)
    plain = tf.keras.Model(inputs, outputs)
    model = make_private(plain, l2_norm_clip=0.5, noise_multiplier=2.0, batch_order="cyclic")
    model.compile(optimizers.SGD(0.5), crossentropy())
    fit(model, batch_size=batch_size)
    assert not isinstance(model._run.clipping[0], ThroughLinearLayers)
    assert model.privacy_event.num_steps == RECORDS // batch_size


def test_weights_that_come_back_though_nothing_stopped():
    """In Keras 3 EarlyStopping restores the best ones after the last epoch as well."""
    model = make(validation_data_is_public=True, **AUTO)
    stop = callbacks.EarlyStopping("val_loss", patience=9, min_delta=100, restore_best_weights=True)
    fit(model, epochs=3, callbacks=[stop], validation_data=(X, Y))
    assert stop.stopped_epoch == 0
    whole = 3 * (RECORDS // BATCH)
    assert model.privacy_event.num_steps == whole
    assert model.privacy_event.release_steps == (whole // 3, 2 * whole // 3)
    assert model.get_epsilon(1e-5) > 0
    with refused("that EarlyStopping has not stopped"):  # no step goes on from an older iterate
        fit(model)


def test_constants_that_the_configuration_lacks():
    """Of Huber's delta Keras 3 writes nothing down; it is the largest slope."""
    model = make([layers.Dense(1)], loss=losses.Huber(delta=3.0), **AUTO)
    fit(model)
    assert model.privacy_event.loss.lipschitz == pytest.approx(3 * 2**0.5)


def test_xla_is_for_the_user_to_say():
    assert not make(compile={"jit_compile": "auto"})._uses_xla
    assert make(compile={"jit_compile": True})._uses_xla


def test_a_copy_knows_the_run_of_its_weights():
    model = make(**AUTO)
    fit(model)
    again = copy.deepcopy(model)
    again.compile(optimizers.SGD(0.5), crossentropy())
    fit(again)
    assert len(again.privacy_events) == 2


def test_no_file_holds_metrics_of_the_examples(tmp_path):
    model = make(compile={"metrics": ["accuracy"]})
    path = tmp_path / "{epoch}.keras"
    fit(model, epochs=2, callbacks=[callbacks.ModelCheckpoint(str(path))])
    for epoch in (1, 2):
        loaded = tf.keras.models.load_model(tmp_path / f"{epoch}.keras")
        assert all(float(v.numpy().sum()) == 0 for m in loaded.metrics for v in m.variables)
    assert model.privacy_event.release_steps == (RECORDS // BATCH,)


class Net(HiddenStateModel):
    """A class whose constructor has arguments."""

    def __init__(self, units=2, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.head = layers.Dense(units)

    def call(self, features):
        return self.head(features)

    def get_config(self):
        return {**super().get_config(), "units": self.units}


def test_a_class_of_ones_own_is_saved(tmp_path):
    model = Net(3, l2_norm_clip=0.5, noise_multiplier=2.0, **AUTO)
    model.compile(optimizers.SGD(0.5), crossentropy())
    fit(model)
    model.save(tmp_path / "net.keras")
    kinds = {"Net": Net}
    loaded = tf.keras.models.load_model(tmp_path / "net.keras", custom_objects=kinds)
    assert loaded.units == 3
    np.testing.assert_array_equal(loaded.predict(X, verbose=0), model.predict(X, verbose=0))
    fit(loaded)
    assert len(loaded.privacy_events) == 2


def test_integers_go_into_a_private_model_as_they_are():
    inputs = tf.keras.Input((FEATURES,), dtype="int32")
    stack = [inputs, layers.Embedding(5, 2), layers.Flatten(), layers.Dense(2)]
    model = make_private(tf.keras.Sequential(stack), l2_norm_clip=0.5, noise_multiplier=2.0)
    assert model.input_dtype == "int32"
    model.compile("adam", crossentropy())
    words = np.arange(RECORDS * FEATURES).reshape(RECORDS, FEATURES) % 5
    model.fit(words, Y, batch_size=BATCH, verbose=0)
    assert model.get_epsilon(1e-5) > 0
