"""The model that owns its run: what its steps do, and that the event says so."""

import math

import numpy as np
import pytest

pytest.importorskip("tensorflow")
import tensorflow as tf
from keras_models import AUTO, crossentropy, unit_rows

import hidden_state_accountants as hsa
from hidden_state_adapters.batch_plans import SampledPlan
from hidden_state_adapters.tf_privacy import (
    DiceUpdate,
    HiddenStateModel,
    HiddenStateSequential,
    keras_api,
    make_private,
)
from hidden_state_adapters.tf_privacy import run as private_run
from hidden_state_adapters.tf_privacy.gradients import (
    RowByRow,
    ThroughLinearLayers,
    squared_lengths,
)
from hidden_state_adapters.tf_privacy.losses import RowLosses

layers, losses = tf.keras.layers, tf.keras.losses
RECORDS, FEATURES, CLASSES, BATCH = 24, 4, 3, 6
X, Y = unit_rows(RECORDS, FEATURES, CLASSES)


def head(**kwargs):
    return layers.Dense(CLASSES, kernel_initializer="ones", **kwargs)


def make(stack=None, *, optimizer=None, compile=None, loss=None, **kwargs):
    settings = {"l2_norm_clip": 0.5, "noise_multiplier": 2.0, **kwargs}
    model = HiddenStateSequential(stack or [head()], **settings)
    optimizer = optimizer or tf.keras.optimizers.SGD(0.5, weight_decay=0.1)
    model.compile(optimizer, loss or crossentropy(), **(compile or {}))
    return model


def fit(model, **kwargs):
    return model.fit(X, Y, **{"batch_size": BATCH, "verbose": 0, **kwargs})


def clipped_steps(kernel, bias, batches, *, clip=0.5, rate=0.5, decay=0.1, divisor=BATCH):
    """The same run without noise, in float64."""
    kernel, bias = kernel.astype(float), bias.astype(float)
    for batch in batches:
        x, y = X[batch].astype(float), Y[batch]
        logits = x @ kernel + bias
        slopes = np.exp(logits - logits.max(1, keepdims=True))
        slopes /= slopes.sum(1, keepdims=True)
        slopes[np.arange(len(y)), y] -= 1
        norms = np.linalg.norm(slopes, axis=1) * np.sqrt((x**2).sum(1) + 1)
        slopes *= np.minimum(1, clip / norms)[:, None]
        kernel = (1 - rate * decay) * kernel - rate / divisor * x.T @ slopes
        bias = (1 - rate * decay) * bias - rate / divisor * slopes.sum(0)
    return kernel, bias


@pytest.mark.parametrize("order", ["poisson", "full"])
def test_a_step_is_the_one_of_the_event(order, dealt):
    model = make(noise_multiplier=0.0, batch_order=order)
    model.build((None, FEATURES))
    start = model.get_weights()
    fit(model, epochs=2)
    divisor = RECORDS if order == "full" else BATCH
    batches = [dealt[step] for step in range(2 * RECORDS // divisor)]
    expected = clipped_steps(*start, batches, divisor=divisor)
    for own, other in zip(model.get_weights(), expected, strict=True):
        np.testing.assert_allclose(own, other, atol=1e-5)


@pytest.mark.parametrize("compile", [{"jit_compile": True}, {"run_eagerly": True}])
def test_compiled_and_eager_steps_are_the_same(compile, dealt):
    model = make(noise_multiplier=0.0, compile=compile, max_batch_size=8)
    model.build((None, FEATURES))
    start = model.get_weights()
    fit(model, epochs=2)
    expected = clipped_steps(*start, [dealt[step] for step in range(8)])
    for own, other in zip(model.get_weights(), expected, strict=True):
        np.testing.assert_allclose(own, other, atol=1e-5)


def test_what_fills_a_batch_up_has_no_influence(dealt, monkeypatch):
    """The first example stands in every row of padding, and its gradient is not finite."""
    x = X.copy()
    x[0] = np.nan
    fixed = [[1, 2, 3], [], [4], [5, 6, 7, 8]]
    monkeypatch.setattr(SampledPlan, "_draw", lambda plan, step: np.array(fixed[step], int))
    model = make(noise_multiplier=0.0, compile={"jit_compile": True})
    model.build((None, FEATURES))
    start = model.get_weights()
    model.fit(x, Y, batch_size=BATCH, verbose=0)
    for own, other in zip(model.get_weights(), clipped_steps(*start, fixed), strict=True):
        np.testing.assert_allclose(own, other, atol=1e-5)


STACKS = {
    "without bias": lambda: [head(use_bias=False)],
    "frozen": lambda: [layers.Dense(5, activation="relu", trainable=False), head()],
    "softmax": lambda: [layers.Dense(5, activation="tanh"), head(activation="softmax")],
}


@pytest.mark.parametrize("stack", STACKS)
def test_linear_layers_give_the_gradients_of_rows(stack):
    model = make(STACKS[stack]())
    model.build((None, FEATURES))
    model.set_weights([np.linspace(-1, 1, w.size).reshape(w.shape) for w in model.get_weights()])
    row_losses = RowLosses(
        crossentropy() if stack != "softmax" else losses.SparseCategoricalCrossentropy()
    )
    x, y = tf.constant(X), tf.constant(Y)
    trained = keras_api.trained(model)
    fast = ThroughLinearLayers.of(model, row_losses, trained, x)
    factors = tf.constant(np.linspace(0, 1, RECORDS))
    found, rows = fast.gradients(x, y), RowByRow(model, row_losses, trained).gradients(x, y)
    for name in ("norms", "losses", "outputs"):
        np.testing.assert_allclose(getattr(found, name), getattr(rows, name), rtol=1e-4)
    for own, other in zip(found.weighted_sum(factors), rows.weighted_sum(factors), strict=True):
        np.testing.assert_allclose(own, other, atol=1e-5)


def test_lengths_whose_squares_underflow():
    """The one factor of a gradient's length is tiny, the other one large."""
    model = make([head(use_bias=False)])
    model.build((None, FEATURES))
    row_losses = RowLosses(lambda targets, outputs: 1e-25 * tf.reduce_sum(outputs, 1))
    fast = ThroughLinearLayers(model, row_losses, model.layers, keras_api.trained(model))
    norms = fast.gradients(tf.constant(1e18 * X), tf.constant(Y)).norms
    assert (norms.numpy() >= 1e-7 * math.sqrt(CLASSES)).all()


def twice():
    """A layer that is called with the examples and with what it makes of them."""
    inner = layers.Dense(FEATURES)
    inputs = tf.keras.Input((FEATURES,))
    return tf.keras.Model(inputs, inner(inner(inputs)))


def after(first, of=lambda x: x):
    """A functional model whose input goes through a function of TensorFlow and a layer."""
    inputs = tf.keras.Input((FEATURES,))
    return tf.keras.Model(inputs, first(of(inputs)))


OTHERS = {
    "scale": lambda: [layers.LayerNormalization(), head()],
    "sequence": lambda: [layers.Reshape((2, 2)), layers.Dense(2), layers.Flatten(), head()],
    "embedding": lambda: [layers.Embedding(7, 2, input_length=FEATURES), layers.Flatten(), head()],
    "convolution": lambda: [
        layers.Reshape((2, 2, 1)), layers.Conv2D(2, 2, activation="relu"), layers.Flatten(), head()
    ],
    "lambda": lambda: [layers.Lambda(lambda x: x / 2), head()],
    "activation": lambda: [layers.Dense(3, activation=lambda z: tf.nn.relu(z)), head()],
    "axis": lambda: [layers.Reshape((2, 2)), layers.Softmax(axis=1), layers.Flatten(), head()],
    "twice": lambda: [twice(), head()],
    "function": lambda: [after(layers.Dense(3), lambda x: tf.square(x)), head()],
    "moments": lambda: [layers.BatchNormalization(center=False, scale=False), head()],
}  # fmt: skip


@pytest.mark.parametrize("stack", OTHERS)
def test_other_layers_go_row_by_row(stack):
    if stack == "function" and keras_api.IS_KERAS_3:
        pytest.skip("Keras 3 puts no function of TensorFlow into a functional model")
    model = make(OTHERS[stack]())
    x, y, row_losses = tf.constant(abs(X[:3])), tf.constant(Y[:3]), RowLosses(crossentropy())
    model(x)
    trained = keras_api.trained(model)
    assert ThroughLinearLayers.of(model, row_losses, trained, x) is None
    rows, factors = RowByRow(model, row_losses, trained), tf.constant([1.0, 0.5, 2.0], tf.float64)
    found = tf.function(lambda: rows.gradients(x, y).weighted_sum(factors))()
    alone = [rows.of_row((x[k], y[k]))[0] for k in range(3)]
    for own, *others in zip(found, *alone, strict=True):
        expected = sum(
            factor * other for factor, other in zip([1.0, 0.5, 2.0], others, strict=True)
        )
        np.testing.assert_allclose(own, expected, atol=1e-5)


def frozen_network():
    inputs = tf.keras.Input((4, 4, 1))
    hidden = layers.Rescaling(2.0)(inputs)
    hidden = layers.Conv2D(3, 2, activation="relu")(hidden)
    hidden = layers.BatchNormalization()(hidden)
    hidden = layers.Add()([hidden, layers.Activation("swish")(hidden)])
    pools = layers.GlobalAveragePooling2D()(hidden), layers.GlobalMaxPooling2D()(hidden)
    network = tf.keras.Model(inputs, layers.Concatenate()(pools))
    network.trainable = False
    return network


def test_a_frozen_network_of_keras_own_layers():
    """Told by its structure, though the batch is normalised in it: by constants."""
    model = make([frozen_network(), layers.Dropout(0.5), head()], compile={"metrics": ["accuracy"]})
    x = tf.reshape(tf.range(32.0), [2, 4, 4, 1])
    model(x)
    assert ThroughLinearLayers.of(model, RowLosses(crossentropy()), keras_api.trained(model), x)


class OneLayerForAll(HiddenStateModel):
    """Calls its one layer with the parts of all examples as rows, or with the examples turned."""

    def __init__(self, parts, **kwargs):
        super().__init__(l2_norm_clip=0.5, noise_multiplier=0.0, batch_order="full", **kwargs)
        self.parts, self.head = parts, head(use_bias=False)

    def call(self, x):
        if self.parts == 1:
            return tf.reverse(self.head(tf.reverse(x, [0])), [0])
        outputs = self.head(tf.reshape(x, [-1, FEATURES // self.parts]))
        return tf.reduce_mean(tf.reshape(outputs, [-1, self.parts, CLASSES]), 1)


@pytest.mark.parametrize(("parts", "rows"), [(2, 1), (1, RECORDS)])
@pytest.mark.usefixtures("without_graphs")
def test_rows_of_a_layer_that_are_not_those_of_the_examples(parts, rows):
    """Each part was clipped by itself, and all but the first rows of them were left out."""
    model, x = OneLayerForAll(parts), tf.constant(X[:rows])
    model(x)
    given = model, RowLosses(crossentropy()), keras_api.trained(model)
    assert ThroughLinearLayers.of(*given, x) is None
    model.compile(tf.keras.optimizers.SGD(1.0), crossentropy())
    before = keras_api.trained(model)[0].numpy()
    model.fit(X[:rows], Y[:rows], verbose=0)
    stack = [layers.Input((FEATURES // parts,)), head(use_bias=False)]
    plain = make(
        stack, optimizer=tf.keras.optimizers.SGD(1.0), noise_multiplier=0.0, batch_order="full"
    )
    # The mean over the parts is the layer of the mean of the parts.
    plain.fit(X[:rows].reshape(rows, parts, -1).mean(1), Y[:rows], verbose=0)
    moved, expected = (keras_api.trained(one)[0].numpy() - before for one in (model, plain))
    np.testing.assert_allclose(moved, expected, atol=1e-6)


def contrastive(targets, outputs):
    among = tf.range(tf.shape(outputs)[0])
    products = tf.matmul(outputs, outputs, transpose_b=True)
    own = tf.nn.sparse_softmax_cross_entropy_with_logits(among, products)
    return own + losses.sparse_categorical_crossentropy(targets, outputs, from_logits=True)


def over_the_positives(targets, outputs):
    own = losses.sparse_categorical_crossentropy(targets, outputs, from_logits=True)
    return own / tf.maximum(1.0, tf.reduce_sum(tf.cast(targets == 1, own.dtype)))


def broadcast(targets, outputs):
    return tf.square(tf.cast(tf.reshape(targets, [-1]), tf.float32) - outputs[:, :1])


@pytest.mark.parametrize("loss", [contrastive, over_the_positives, broadcast])
def test_a_loss_that_mixes_examples(loss):
    """Of every example it is that of a batch of one."""
    model, x, y = make(), tf.constant(X), tf.constant(Y)
    model(x)
    given = model, RowLosses(loss), keras_api.trained(model)
    found, rows = ThroughLinearLayers.of(*given, x).gradients(x, y), RowByRow(*given)
    np.testing.assert_allclose(found.norms, rows.gradients(x, y).norms, atol=1e-5)


def test_a_number_is_a_variable_of_every_example_alone():
    """Its gradients have no axis but that of the examples, whose lengths must not mix."""
    scale = tf.Variable(2.0)
    model = make([layers.Lambda(lambda x: x)])
    row_losses = RowLosses(lambda targets, outputs: tf.reduce_sum(scale * outputs, 1))
    found = RowByRow(model, row_losses, [scale]).gradients(tf.constant(X), tf.constant(Y))
    own = X.astype(float).sum(1)
    np.testing.assert_allclose(found.norms, abs(own), rtol=1e-5)
    (total,) = found.weighted_sum(tf.cast(own > 0, tf.float64))
    assert float(total) == pytest.approx(own[own > 0].sum(), rel=1e-5)


@pytest.mark.parametrize("kind", ["rows", "layers"])
def test_a_row_of_factor_zero_is_left_out_though_it_is_not_finite(kind):
    model = make()
    model.build((None, FEATURES))
    arguments = model, RowLosses(crossentropy())
    if kind == "rows":
        clipping = RowByRow(*arguments, keras_api.trained(model))
    else:
        clipping = ThroughLinearLayers(*arguments, model.layers, keras_api.trained(model))
    x, factors = X.copy(), tf.constant([0.0, *np.ones(RECORDS - 1)], tf.float64)
    expected = clipping.gradients(tf.constant(x), tf.constant(Y)).weighted_sum(factors)
    x[0] = np.nan
    found = clipping.gradients(tf.constant(x), tf.constant(Y)).weighted_sum(factors)
    for own, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(own, other, atol=1e-5)


@pytest.mark.parametrize("shape", [(), (0,), (512, 10), (10007,)])
def test_squared_lengths_are_those_of_double_precision(shape):
    rows = np.random.default_rng(0).normal(size=(3, *shape)).astype("float32")
    expected = (rows.astype(float) ** 2).reshape(3, -1).sum(1)
    unknown = tf.TensorSpec([None] * rows.ndim)
    for of in (squared_lengths, tf.function(squared_lengths, input_signature=[unknown])):
        np.testing.assert_allclose(of(tf.constant(rows)), expected, rtol=1e-6)


@pytest.mark.parametrize(("rows", "full", "xla"), [(0, 2, 0), (1, 2, 0), (3, 3, 0), (9, 16, 1)])
def test_no_batch_has_a_single_row_on_the_device(rows, full, xla):
    """Under XLA there are a few sizes."""
    multiple = private_run.multiple_of_sizes(is_compiled=xla, expected=64)
    assert private_run.filled(rows, multiple) == full
    assert int(private_run.filled(tf.constant(rows, tf.int64), multiple)) == full


@pytest.mark.parametrize("order", ["poisson", "full", "balls_in_bins"])
@pytest.mark.usefixtures("without_graphs")
def test_the_event_is_the_run(order):
    model = make(batch_order=order, compile={"run_eagerly": True}, **AUTO)
    fit(model, epochs=2)
    event = model.privacy_event
    size = RECORDS if order == "full" else BATCH
    assert event == hsa.LastIterateDpEvent(
        noise_multiplier=2.0,
        learning_rate=0.5,
        clip_norm=0.5,
        batch_size=size,
        dataset_size=RECORDS,
        num_steps=2 * RECORDS // size,
        batch_order=order,
        loss=hsa.LossGeometry.softmax_cross_entropy(1.0, bias=True),
        weight_decay=0.1,
    )
    expected = hsa.LastIterateAccountant().compose(event).get_epsilon(1e-5)
    assert model.get_epsilon(1e-5) == pytest.approx(expected, rel=1e-9)


def test_the_noise_is_that_of_the_event():
    """Gradients of zero: what moves the weights is the noise, on the mean over b."""
    model = make(
        [layers.Dense(4000)],
        optimizer=tf.keras.optimizers.SGD(1.0),
        noise_multiplier=3.0,
        batch_order="cyclic",
        loss=lambda targets, outputs: 0.0 * outputs[:, 0],
    )
    model.build((None, FEATURES))
    start = model.get_weights()
    fit(model)
    moved = np.concatenate(
        [np.ravel(a - b) for a, b in zip(model.get_weights(), start, strict=True)]
    )
    expected = math.sqrt(RECORDS / BATCH) * 3.0 * 0.5 / BATCH
    assert np.std(moved) == pytest.approx(expected, rel=0.05)


@pytest.mark.usefixtures("without_graphs")
def test_a_projection_is_of_all_variables():
    model = make(projection_radius=0.3, batch_order="cyclic", **AUTO)
    model.build((None, FEATURES))
    model.set_weights([0.0 * w for w in model.get_weights()])
    fit(model)
    assert math.sqrt(sum((w**2).sum() for w in model.get_weights())) <= 0.3
    assert model.privacy_event.domain_diameter == 0.6


@pytest.mark.parametrize("rows", [4, 1])
@pytest.mark.usefixtures("without_graphs")
def test_batches_of_one_example(rows):
    """Keras 2 makes the graph of a Sequential model anew when it first sees another number."""
    model = make([tf.keras.layers.Dense(3)], batch_order="cyclic")
    model.fit(X[:rows], Y[:rows], batch_size=1, epochs=2, verbose=0)
    assert model.privacy_event.num_steps == 2 * rows
    assert type(model._run.clipping[0]) is ThroughLinearLayers


def test_an_average_of_the_iterates_takes_their_place(without_graphs, row_by_row):
    """As in Keras, at the end of fit: of iterates that all count it shows nothing more."""
    optimizer = tf.keras.optimizers.SGD(0.5, use_ema=True, ema_momentum=0.5)
    model = make(optimizer=optimizer, batch_order="cyclic")
    model.build((None, FEATURES))
    averages = model.get_weights()

    def average(index, logs):
        share = (
            1.0 if keras_api.IS_KERAS_3 and index == 0 else 0.5
        )  # it begins at the first iterate
        averages[:] = [
            a + share * (b - a) for a, b in zip(averages, model.get_weights(), strict=True)
        ]

    fit(model, callbacks=[tf.keras.callbacks.LambdaCallback(on_train_batch_end=average)])
    for own, expected in zip(model.get_weights(), averages, strict=True):
        np.testing.assert_allclose(own, expected, atol=1e-6)
    assert model.get_epsilon(1e-5) > 0
    assert model.privacy_event.loss is None
    fit(model)
    assert model.privacy_event.num_steps == 2 * RECORDS // BATCH


def test_a_model_that_is_compiled_again_goes_on_with_its_weights():
    model = make(**AUTO)
    fit(model)
    first = model.privacy_event
    assert model.compare().best().epsilon == pytest.approx(model.get_epsilon(1e-5), rel=1e-6)
    model.compile(tf.keras.optimizers.SGD(0.5), crossentropy())
    with pytest.raises(ValueError, match="Call fit"):
        model.get_epsilon(1e-5)
    fit(model)
    assert model.privacy_events == (first, model.privacy_event)


def functional():
    inputs = tf.keras.Input((FEATURES,))
    return tf.keras.Model(inputs, head()(inputs))


def sequential():
    model = tf.keras.Sequential([head()])
    model.build((None, FEATURES))
    return model


@pytest.mark.parametrize("kind", [functional, sequential])
@pytest.mark.usefixtures("without_graphs")
def test_a_model_becomes_private_and_is_saved(kind, tmp_path):
    plain = kind()
    model = make_private(plain, l2_norm_clip=0.5, noise_multiplier=2.0, **AUTO)
    np.testing.assert_array_equal(model.predict(X, verbose=0), plain.predict(X, verbose=0))
    model.compile(tf.keras.optimizers.SGD(0.5), crossentropy())
    fit(model)
    model.save(tmp_path / "model.keras")
    loaded = tf.keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded) is type(model)
    assert loaded.get_config()["hidden_state"] == model.get_config()["hidden_state"]
    np.testing.assert_array_equal(loaded.predict(X, verbose=0), model.predict(X, verbose=0))


class Net(HiddenStateModel):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.head = head()

    def call(self, features):
        return self.head(features)


def test_a_class_of_ones_own():
    model = Net(l2_norm_clip=0.5, noise_multiplier=2.0, **AUTO)
    model.compile(tf.keras.optimizers.SGD(0.5), crossentropy(), metrics=["accuracy"])
    history = fit(model, validation_data=(X, Y)).history
    assert set(history) == {"loss", "accuracy", "val_loss", "val_accuracy"}
    assert 0 < model.get_epsilon(1e-5) < math.inf
    with pytest.raises(TypeError, match="inherit from HiddenStateModel"):
        make_private(model, l2_norm_clip=0.5, noise_multiplier=2.0)


class Doubles(layers.Layer):
    def call(self, features):
        if tf.reduce_max(features) > 0.5:
            features = 2 * features
        return features


@pytest.mark.skipif(keras_api.IS_KERAS_3, reason="Keras 3 traces such layers without AutoGraph")
def test_control_flow_of_python_in_a_layer():
    model = make([Doubles(), head()])
    fit(model)
    assert model.privacy_event.num_steps == RECORDS // BATCH


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.usefixtures("without_graphs")
def test_a_dataset_is_read_once(batched):
    """Its batches are taken apart, and its shuffles do not matter."""
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(RECORDS)
    if batched:
        dataset = dataset.batch(BATCH).prefetch(1)
    model = make(compile={"run_eagerly": True})
    for _ in range(2):
        model.fit(dataset, verbose=0, batch_size=None if batched else BATCH)
    event, held = model.privacy_event, model._run._examples
    assert (event.dataset_size, event.batch_size, event.num_steps) == (RECORDS, BATCH, 8)
    rows = {tuple(row): target for row, target in zip(X, Y, strict=True)}
    assert {tuple(x): y for x, y in zip(held.x.numpy(), held.y.numpy(), strict=True)} == rows


class Batches(tf.keras.utils.Sequence):
    """Batches that are other ones in every epoch."""

    def __init__(self):
        self.order = np.arange(RECORDS)

    def __len__(self):
        return RECORDS // BATCH

    def __getitem__(self, index):
        rows = self.order[index * BATCH : (index + 1) * BATCH]
        return X[rows], Y[rows]

    def on_epoch_end(self):
        self.order = np.zeros(RECORDS, int)


def generated():
    source = Batches()
    yield from (source[index] for index in range(len(source)))


@pytest.mark.parametrize("make_source", [Batches, generated])
def test_batches_are_read_once(make_source, dealt, without_graphs, row_by_row):
    model, source = make(batch_order="reshuffled"), make_source()
    for again in (source, source, make_source()):
        model.fit(again, steps_per_epoch=RECORDS // BATCH, verbose=0)
    event = model.privacy_event
    assert (event.dataset_size, event.batch_size, event.num_steps) == (RECORDS, BATCH, 12)
    np.testing.assert_array_equal(model._run._examples.x.numpy(), X)
    np.testing.assert_array_equal(model._run._examples.y.numpy(), Y)
    for epoch in range(3):
        used = np.concatenate([dealt[4 * epoch + step] for step in range(4)])
        assert sorted(used) == list(range(RECORDS))


@pytest.mark.parametrize(
    "settings",
    [
        {"batch_order": "cyclic", **AUTO},
        {"batch_order": "cyclic", "optimizer": "dice", **AUTO},
    ],
    ids=["cyclic", "dice"],
)
def test_noise_is_found(settings, without_graphs, row_by_row):
    """Learning rates are read off the schedule, the number of steps off fit."""
    schedule = tf.keras.optimizers.schedules.ExponentialDecay(0.5, 3, 0.9)
    optimizer = {"optimizer": tf.keras.optimizers.SGD(schedule, weight_decay=0.2), **settings}
    if settings.get("optimizer") == "dice":
        optimizer["optimizer"] = DiceUpdate("adam", error_l2_norm_clip=0.1)
    model = make(noise_multiplier=None, target_delta=1e-5, **optimizer)
    assert model.noise_multiplier is None
    fit(model, epochs=2, target_epsilon=3.0)
    assert 3.0 * (1 - 1e-3) <= model.get_epsilon(1e-5) <= 3.0
    if hasattr(model.privacy_event, "noise_multiplier"):
        assert model.privacy_event.noise_multiplier == model.noise_multiplier
    assert model.get_config()["hidden_state"]["noise_multiplier"] == model.noise_multiplier
    fit(model)  # goes on with it
    assert model.get_epsilon(1e-5) > 3.0
    with pytest.raises(hsa.UnsupportedRunError, match="in the first call of fit"):
        fit(model, target_epsilon=9.0)


def test_noise_is_found_for_releases_and_runs_before(tmp_path, without_graphs):
    """Files of every epoch count, and so does what the weights show already."""
    checkpoint = tf.keras.callbacks.ModelCheckpoint(str(tmp_path / "{epoch}.weights.h5"))
    checkpoint.save_weights_only = True
    model = make(noise_multiplier=None, batch_order="cyclic", **AUTO)
    found = []
    for epsilon, callbacks in ((5.0, []), (9.0, [checkpoint])):
        model.compile(tf.keras.optimizers.SGD(0.5, weight_decay=0.2), crossentropy())
        fit(model, epochs=2, target_epsilon=epsilon, target_delta=1e-5, callbacks=callbacks)
        assert epsilon * (1 - 1e-3) <= model.get_epsilon(1e-5) <= epsilon
        found.append(model.noise_multiplier)
    assert model.privacy_event.release_steps == (4,)  # and the last one
    model.compile(tf.keras.optimizers.SGD(0.5), crossentropy())
    with pytest.raises(ValueError, match="what the runs before spent"):
        fit(model, target_epsilon=8.0, target_delta=1e-5)
    assert not math.isclose(*found)


def statuses(model, text):
    return [a.status.value for a in model.assumptions if text in a.text]


def test_what_was_fixed_in_advance(without_graphs):
    """The only call of fit says the number of steps, and Keras' schedule the learning rates."""
    schedule = tf.keras.optimizers.schedules.ExponentialDecay(0.5, 3, 0.9)
    model = make(optimizer=tf.keras.optimizers.SGD(schedule), **AUTO)
    fit(model, epochs=2)
    assert statuses(model, "only call of fit was asked for") == ["checked"]
    assert statuses(model, "the compiled ExponentialDecay") == ["checked"]
    assert statuses(model, "constant noise, clip norm, decay") == ["checked"]
    fit(model)
    assert statuses(model, "number of steps fixed in advance") == ["declared"]
    model = make(num_steps=8, **AUTO)
    fit(model)
    assert statuses(model, "training ends after step 4 of the 8") == ["declared"]
    fit(model)
    assert statuses(model, "all of the 8 steps declared in advance") == ["checked"]
    before = model.get_epsilon(1e-5)
    with pytest.raises(hsa.UnsupportedRunError, match="8 so far and 4 more"):
        fit(model)
    assert model.get_epsilon(1e-5) == before


@pytest.mark.usefixtures("without_graphs")
def test_validation_data_change_nothing_of_what_an_epoch_shows():
    """Keras 2 showed its own mean loss, 0, in place of that of the steps."""
    settings = {"noise_multiplier": 0.0, "batch_order": "cyclic"}
    compile = {"metrics": ["accuracy"]}
    histories = []
    for validation in ({}, {"validation_data": (X[:5], Y[:5])}):
        model = make(compile=compile, **settings)
        histories.append(fit(model, epochs=3, **validation).history)
    alone, beside = histories
    assert min(alone["loss"]) > 0.1
    for name in ("loss", "accuracy"):
        assert beside[name] == pytest.approx(alone[name], abs=1e-6)
    shown = model.evaluate(X[:5], Y[:5], verbose=0)
    assert shown == pytest.approx([beside["val_loss"][-1], beside["val_accuracy"][-1]])
    assert abs(beside["val_loss"][-1] - beside["loss"][-1]) > 1e-3
