"""Head runs are right by construction: a misused one trains the honest weights, or is refused."""

import functools

import numpy as np
import pytest

pytest.importorskip("tensorflow")
import tensorflow as tf
from keras_models import crossentropy as loss
from keras_models import unit_rows

import hidden_state_accountants as hsa
from hidden_state_adapters.tf_privacy import HiddenStateModel, HiddenStateSequential, PrivateRun

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


def looped(act, noise=0.0):
    """The run of a loop of one's own in which something happens before every step."""
    model = tf.keras.Sequential([Scale(), Row(), layers.Dense(CLASSES, kernel_initializer="ones")])
    run = PrivateRun(
        model, X, Y, loss=loss(), optimizer=tf.keras.optimizers.SGD(0.5, weight_decay=0.1),
        batch_size=BATCH, l2_norm_clip=0.5, noise_multiplier=noise, **AUTO,
    )  # fmt: skip
    for _ in range(STEPS):
        act(model)
        run.step()
    return model if noise == 0 else run


def trained(act=None, *, at="begin", stack=(), the_loss=None, noise=0.0, **kwargs):
    """A fit of two epochs in which something happens: before it, at its begin, or in every step."""
    head = layers.Dense(CLASSES, kernel_initializer="ones")
    model = HiddenStateSequential(
        [Scale(), Row(), *stack, head], l2_norm_clip=0.5, noise_multiplier=noise, **AUTO
    )
    model.compile(tf.keras.optimizers.SGD(0.5, weight_decay=0.1), the_loss or loss())
    model.build((None, FEATURES))

    def happens(*_):
        act(model)

    hooks = {"begin": "on_train_begin", "steps": "on_train_batch_begin"}
    others = []
    if act is not None and at == "before":
        act(model)
    elif act is not None:
        others = [tf.keras.callbacks.LambdaCallback(**{hooks[at]: happens})]
    model.fit(X, Y, batch_size=BATCH, epochs=2, verbose=0, callbacks=others, **kwargs)
    return model


def scaled(model):
    model.layers[0].factor = 100.0


def mixing(model):
    model.layers[1].mixes = True


def another_loss(model):
    model.loss = loss(label_smoothing=0.9) if hasattr(loss(), "label_smoothing") else losses.MSE


def temperature(model):
    model.layers[-1].activation = lambda z: z / 100


def hooked(model):
    model.layers[-1].call = lambda x: tf.zeros([len(x), CLASSES])


def regularised(model):
    model.layers[-1].kernel_regularizer = tf.keras.regularizers.L2(9.0)


def patched_call(model):
    model.call = lambda x, training=None: tf.zeros([len(x), CLASSES])


def long_features(model):
    model.layers[0].factor = 3.0


def nudged(model):
    model.layers[-1].kernel.assign_add(tf.ones_like(model.layers[-1].kernel))


def zeroed(model):
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
    model = HiddenStateSequential(
        [Longest(100.0), layers.Dense(CLASSES)], l2_norm_clip=0.5, noise_multiplier=1.0, **AUTO
    )
    model.compile(tf.keras.optimizers.SGD(0.5), loss())
    with pytest.raises(hsa.UnsupportedRunError, match="features of every example by itself"):
        model.fit(x, np.resize(Y, 6000), batch_size=1000, verbose=0)


def test_a_layer_that_would_divide_by_a_longer_row_than_there_is():
    """No example is longer than 1; one that was would change the features of the others."""
    model = HiddenStateSequential(
        [Longest(), layers.Dense(CLASSES)], l2_norm_clip=0.5, noise_multiplier=1.0, **AUTO
    )
    model.compile(tf.keras.optimizers.SGD(0.5), loss())
    with pytest.raises(hsa.UnsupportedRunError, match="beside longer ones"):
        model.fit(X / 2, Y, batch_size=BATCH, verbose=0)


@pytest.mark.parametrize(
    ("own", "said"),
    [([Scale()], "before the first step, twice"), ([], "by layers that are Keras' own")],
)
def test_how_features_were_looked_at(own, said):
    frozen = [layers.Dense(FEATURES, kernel_initializer="identity", trainable=False)]
    model = HiddenStateSequential(
        [*own, *frozen, layers.Dense(CLASSES)], l2_norm_clip=0.5, noise_multiplier=1.0, **AUTO
    )
    model.compile(tf.keras.optimizers.SGD(0.5), loss())
    model.fit(X, Y, batch_size=BATCH, verbose=0)
    assert said in " ".join(model.report(1e-5).split())


NO_EFFECT = [scaled, mixing, another_loss, temperature, hooked, regularised, patched_call]
REFUSED = {
    (mixing, "before"): "features of every example by itself",
    (long_features, "before"): "feature_norm = 2",
    (nudged, "begin"): "changed outside",
    (nudged, "steps"): "changed outside",
    (zeroed, "steps"): "changed outside",
}


@functools.cache
def honest():
    return trained().get_weights()


def check_honest(model):
    for own, other in zip(model.get_weights(), honest(), strict=True):
        np.testing.assert_allclose(own, other, atol=1e-6)


@pytest.mark.parametrize("act", NO_EFFECT, ids=lambda act: act.__name__)
def test_what_happens_to_the_rest_has_no_effect(act):
    """Neither callbacks of fit nor a loop of one's own change the accounted step."""
    check_honest(trained(act, at="steps"))
    check_honest(looped(act))


@pytest.mark.parametrize(
    ("act", "at"), REFUSED, ids=lambda value: getattr(value, "__name__", value)
)
def test_what_is_refused(act, at):
    with pytest.raises(hsa.UnsupportedRunError, match=REFUSED[act, at]):
        trained(act, at=at)


def test_targets_are_never_broadcast():
    """Of an unknown number of rows a column of labels would be."""
    head = [layers.Dense(1, kernel_initializer="ones")]
    y = (Y > 0).astype("float32")
    ends = []
    for targets in (y, y[:, None]):
        model = HiddenStateSequential(head, l2_norm_clip=0.5, noise_multiplier=0.0, **AUTO)
        model.compile(tf.keras.optimizers.SGD(0.5), losses.BinaryCrossentropy(from_logits=True))
        model.build((None, FEATURES))
        model.set_weights([np.ones((FEATURES, 1)), np.zeros(1)])
        model.fit(X, targets, batch_size=BATCH, verbose=0)
        ends.append(model.get_weights())
    for own, other in zip(*ends, strict=True):
        np.testing.assert_array_equal(own, other)
    model = HiddenStateSequential(head, l2_norm_clip=0.5, noise_multiplier=0.0, **AUTO)
    model.compile(tf.keras.optimizers.SGD(0.5), losses.MeanSquaredError())
    with pytest.raises(hsa.UnsupportedRunError, match="Expected 1 targets for each example"):
        model.fit(X, np.c_[y, y], batch_size=BATCH, verbose=0)


@pytest.mark.parametrize("bad", [-1, CLASSES, 0.5])
def test_labels_of_no_class(bad):
    y = Y.astype("float64")
    y[7] = bad
    model = HiddenStateSequential(
        [layers.Dense(CLASSES)], l2_norm_clip=0.5, noise_multiplier=0.0, **AUTO
    )
    model.compile(tf.keras.optimizers.SGD(0.5), loss())
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
    model = HiddenStateSequential(
        [layers.Dense(CLASSES)], l2_norm_clip=0.5, noise_multiplier=1.0,
        **{**AUTO, "feature_norm": longest},
    )  # fmt: skip
    model.compile(tf.keras.optimizers.SGD(0.5), loss())
    with pytest.warns(UserWarning, match="is the largest norm of the data"):
        model.fit(rows, Y, batch_size=BATCH, epochs=1, verbose=0)
    with pytest.warns(UserWarning, match=r"not below 1/n for n = 24 records"):
        model.get_epsilon(0.05)
