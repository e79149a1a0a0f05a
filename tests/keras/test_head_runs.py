"""Head runs are right by construction: a misused one trains the honest weights, or is refused.

A loss is convex in one trained layer: in the product of two it is not.
"""

import functools

import numpy as np
import pytest

pytest.importorskip("tensorflow")
import keras_models
import tensorflow as tf
from keras_models import crossentropy as loss
from keras_models import unit_rows

import hidden_state_accountants as hsa
from hidden_state_adapters.tf_privacy import (
    BlockCoordinateUpdate,
    HiddenStateModel,
    HiddenStateSequential,
    PrivateRun,
)

RECORDS, FEATURES, CLASSES, BATCH, STEPS = 24, 4, 3, 6, 8
X, Y = unit_rows(RECORDS, FEATURES, CLASSES)
layers, losses = tf.keras.layers, tf.keras.losses
AUTO = {"loss_geometry": "auto", "feature_norm": 2.0, "batch_order": "cyclic"}
pytestmark = pytest.mark.usefixtures("without_graphs")


class Scale(layers.Layer):
    """A fixed map whose number somebody may change."""

    factor = 1.0

    def call(self, x):
        return self.factor * x


class Row(layers.Layer):
    """A mean over the batch, from a moment on."""

    mixes = False

    def call(self, x):
        return x - tf.reduce_mean(x, 0) if self.mixes else x


def looped(act):
    """The run of a loop of one's own in which something happens before every step."""
    model = tf.keras.Sequential([Scale(), Row(), layers.Dense(CLASSES, kernel_initializer="ones")])
    run = PrivateRun(
        model, X, Y, loss=loss(), optimizer=tf.keras.optimizers.SGD(0.5, weight_decay=0.1),
        batch_size=BATCH, l2_norm_clip=0.5, noise_multiplier=0.0, **AUTO,
    )  # fmt: skip
    for _ in range(STEPS):
        act(model)
        run.step()
    return model


def private(stack, noise=0.0, the_loss=None, **settings):
    """A compiled model that is built."""
    given = {"l2_norm_clip": 0.5, "noise_multiplier": noise, **AUTO, **settings}
    model = HiddenStateSequential(stack, **given)
    model.compile(tf.keras.optimizers.SGD(0.5, weight_decay=0.1), the_loss or loss())
    model.build((None, FEATURES))
    return model


def trained(act=None, *, at="begin"):
    """A fit of two epochs in which something happens: before it, at its begin, or in every step."""
    model = private([Scale(), Row(), layers.Dense(CLASSES, kernel_initializer="ones")])
    hooks = {"begin": "on_train_begin", "steps": "on_train_batch_begin"}
    others = []
    if act is not None and at == "before":
        act(model)
    elif act is not None:
        others = [tf.keras.callbacks.LambdaCallback(**{hooks[at]: lambda *_: act(model)})]
    model.fit(X, Y, batch_size=BATCH, epochs=2, verbose=0, callbacks=others)
    return model


def changed(model):
    """Everything but what a step reads: layers, their order, loss, call, activation, penalties."""
    model.layers[0].factor, model.layers[1].mixes = 100.0, True
    model.loss = losses.MSE
    model.call = lambda x, training=None: tf.zeros([len(x), CLASSES])
    head = model.layers[-1]
    head.activation, head.kernel_regularizer = lambda z: z / 100, tf.keras.regularizers.L2(9.0)
    head.call = lambda x: tf.zeros([len(x), CLASSES])


def mixing(model):
    model.layers[1].mixes = True


def long_features(model):
    model.layers[0].factor = 3.0


def nudged(model):
    model.layers[-1].bias.assign_add(tf.ones_like(model.layers[-1].bias))


class Longest(layers.Layer):
    """Brings features within a bound that the longest row of the batch sets, but for outliers."""

    def __init__(self, outlier=np.inf):
        super().__init__()
        self.outlier = outlier

    def call(self, x):
        norms = tf.norm(x, axis=1)
        return x / tf.maximum(1.0, tf.reduce_max(tf.where(norms < self.outlier, norms, 0.0)))


def test_a_layer_that_divides_by_the_longest_row_of_its_batch():
    """Of 6,000 examples, only those beside the one long row have other features than alone."""
    x = np.resize(X / 2, (6000, FEATURES)).astype("float32")
    x[600] *= 100
    model = private([Longest(100.0), layers.Dense(CLASSES)])
    with pytest.raises(hsa.UnsupportedRunError, match="features of every example by itself"):
        model.fit(x, np.resize(Y, 6000), batch_size=1000, verbose=0)


def test_a_layer_that_would_divide_by_a_longer_row_than_there_is():
    """No example is longer than 1; one that was would change the features of the others."""
    model = private([Longest(), layers.Dense(CLASSES)])
    with pytest.raises(hsa.UnsupportedRunError, match="beside longer ones"):
        model.fit(X / 2, Y, batch_size=BATCH, verbose=0)


@pytest.mark.parametrize(
    ("own", "said"),
    [([Scale()], "before the first step, twice"), ([], "by layers that are Keras' own")],
)
def test_how_features_were_looked_at(own, said):
    frozen = [layers.Dense(FEATURES, kernel_initializer="identity", trainable=False)]
    model = private([*own, *frozen, layers.Dense(CLASSES)], noise=1.0)
    model.fit(X, Y, batch_size=BATCH, verbose=0)
    assert said in " ".join(model.report(1e-5).split())


@functools.cache
def honest():
    return trained().get_weights()


def check_honest(model):
    for own, other in zip(model.get_weights(), honest(), strict=True):
        np.testing.assert_allclose(own, other, atol=1e-6)


def test_what_happens_to_the_rest_has_no_effect():
    """Neither callbacks of fit nor a loop of one's own change the accounted step."""
    check_honest(trained(changed, at="steps"))
    check_honest(looped(changed))


@pytest.mark.parametrize(
    ("act", "at", "text"),
    [
        (mixing, "before", "features of every example by itself"),
        (long_features, "before", "feature_norm = 2"),
        (nudged, "begin", "changed outside"),
        (nudged, "steps", "changed outside"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_what_is_refused(act, at, text):
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        trained(act, at=at)


def test_targets_are_never_broadcast():
    """Of an unknown number of rows a column of labels would be."""
    head = [layers.Dense(1, kernel_initializer="ones")]
    y = (Y > 0).astype("float32")
    ends = []
    for targets in (y, y[:, None]):
        model = private(head, the_loss=losses.BinaryCrossentropy(from_logits=True))
        model.set_weights([np.ones((FEATURES, 1)), np.zeros(1)])
        model.fit(X, targets, batch_size=BATCH, verbose=0)
        ends.append(model.get_weights())
    for own, other in zip(*ends, strict=True):
        np.testing.assert_array_equal(own, other)
    model = private(head, the_loss=losses.MeanSquaredError())
    with pytest.raises(hsa.UnsupportedRunError, match="Expected 1 targets for each example"):
        model.fit(X, np.c_[y, y], batch_size=BATCH, verbose=0)


@pytest.mark.parametrize("bad", [CLASSES, 0.5])
def test_labels_of_no_class(bad):
    y = Y.astype("float64")
    y[7] = bad
    model = private([layers.Dense(CLASSES)])
    with pytest.raises(hsa.UnsupportedRunError, match="Expected labels from 0 to 2"):
        model.fit(X, y, batch_size=BATCH, verbose=0)


@pytest.mark.parametrize("declared", [False, True])
def test_a_declared_geometry_is_differentiated_example_by_example(declared):
    """A loss that mixes the examples of a batch mixes none here: each is alone."""

    def users(y, z):
        losses_of_rows = tf.nn.sparse_softmax_cross_entropy_with_logits(
            tf.cast(tf.reshape(y, [-1]), tf.int64), z
        )
        return losses_of_rows + (tf.reduce_mean(z) - tf.reduce_mean(z) if declared else 0.0)

    settings = dict(AUTO)
    if declared:
        settings["loss_geometry"] = hsa.LossGeometry.softmax_cross_entropy(2.0, bias=True)
    model = tf.keras.Sequential([layers.Dense(CLASSES, kernel_initializer="ones")])
    run = PrivateRun(
        model, X, Y, loss=users if declared else loss(),
        optimizer=tf.keras.optimizers.SGD(0.5, weight_decay=0.1),
        batch_size=BATCH, l2_norm_clip=0.5, noise_multiplier=0.0, **settings,
    )  # fmt: skip
    run.train(2, verbose=False)
    check_honest(model)


def test_a_model_of_ones_own_and_of_several_inputs():
    class Two(HiddenStateModel):
        def __init__(self, **kwargs):
            super().__init__(l2_norm_clip=0.5, noise_multiplier=0.0, **AUTO, **kwargs)
            self.head = layers.Dense(CLASSES, kernel_initializer="ones")

        def call(self, inputs):
            return self.head(tf.concat([inputs["left"], inputs["right"]], 1))

    model = Two()
    model.compile(tf.keras.optimizers.SGD(0.5, weight_decay=0.1), loss())
    model.fit({"left": X[:, :1], "right": X[:, 1:]}, Y, batch_size=BATCH, epochs=2, verbose=0)
    check_honest(model)


def test_numbers_that_have_to_be_public():
    """The largest norm of the examples as their bound, and a delta of 1/n."""
    rows = X * np.linspace(0.5, 1.9, RECORDS, dtype="float32")[:, None]
    longest = float(np.linalg.norm(rows.astype(np.float64), axis=1).max())
    model = private([layers.Dense(CLASSES)], noise=1.0, feature_norm=longest)
    with pytest.warns(UserWarning, match="is the largest norm of the data"):
        model.fit(rows, Y, batch_size=BATCH, epochs=1, verbose=0)
    with pytest.warns(UserWarning, match=r"not below 1/n for n = 24 records"):
        model.get_epsilon(0.05)


# Two trained layers

CONVEX, SMOOTH = hsa.LossGeometry.convex(1.0), hsa.LossGeometry.smooth(2.0)
REFUSED = "got .*dense.*, .*dense.*: no loss is convex in the weights of layers"


def two():
    return [layers.Dense(3, "tanh"), layers.Dense(2)]


def event_of(stack, update=lambda optimizer: optimizer, **settings):
    optimizer = update(tf.keras.optimizers.SGD(0.1))
    model = keras_models.make(optimizer, stack, compile={"run_eagerly": True}, **settings)
    return keras_models.fit(model).privacy_event


def of_a_loop():
    PrivateRun(
        tf.keras.Sequential(two()), X, Y % 2, loss=loss(), optimizer="sgd", batch_size=4,
        l2_norm_clip=1.0, noise_multiplier=2.0, loss_geometry=CONVEX,
    )  # fmt: skip


@pytest.mark.parametrize(
    "train",
    [
        lambda: event_of(two(), loss_geometry=CONVEX),
        lambda: event_of([tf.keras.Sequential(two())], loss_geometry=CONVEX),
        lambda: event_of(two(), BlockCoordinateUpdate, loss_geometry=CONVEX),
        of_a_loop,
    ],
    ids=["fit", "inner", "one block", "loop"],
)
def test_no_loss_is_convex_in_two_layers_in_a_row(train):
    with pytest.raises(hsa.UnsupportedRunError, match=REFUSED):
        train()


def test_what_may_have_two_layers():
    def each(optimizer):
        return BlockCoordinateUpdate(optimizer, [[0, 1], [2, 3]])

    first, last = two()
    first.trainable = False
    assert event_of(two(), loss_geometry=SMOOTH).loss == SMOOTH
    assert event_of([first, last], loss_geometry=CONVEX).loss == CONVEX
    assert event_of(two(), each, loss_geometry=CONVEX).num_blocks == 2


def test_no_text_advises_two_layers():
    with pytest.raises(hsa.UnsupportedRunError) as error:
        event_of(two(), loss_geometry="auto", feature_norm=1.0)
    assert "hidden_state_accountants.LossGeometry" not in str(error.value)
    assert "Leave out loss_geometry= and feature_norm=" in str(error.value)


def test_the_callback_refuses_them(make_run):
    pytest.importorskip("tensorflow_privacy")
    run = make_run(optimizer={"loss_geometry": CONVEX})
    run.model = tf.keras.Sequential([layers.Dense(3, "tanh"), layers.Dense(1)])
    run.model.compile(run.optimizer, losses.BinaryCrossentropy(True, reduction="none"))
    with pytest.raises(hsa.UnsupportedRunError, match=REFUSED):
        run.fit()
