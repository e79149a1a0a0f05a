"""A linear head on fixed features: what is known of its loss, and runs right by construction.

A misused run trains the honest weights, or is refused.
"""

import math

import numpy as np
import pytest

pytest.importorskip("tensorflow")
import tensorflow as tf
from keras_models import AUTO, BATCH, FEATURES, RECORDS, SGD, STEPS, X, Y, fit, head, make

import hidden_state_accountants as hsa
from hidden_state_adapters.tf_privacy import BlockCoordinateUpdate, PrivateRun
from hidden_state_adapters.tf_privacy.losses import RowLosses, known_loss

pytestmark = pytest.mark.usefixtures("without_graphs")
layers, losses = tf.keras.layers, tf.keras.losses


# --- losses ---------------------------------------------------------------------------------------


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


SPARSE = none(losses.SparseCategoricalCrossentropy, from_logits=True)
PROBABILITIES = none(losses.SparseCategoricalCrossentropy)
LOGISTIC = none(losses.BinaryCrossentropy, from_logits=True)
SQUARED = none(losses.MeanSquaredError)
FOCAL = none(losses.BinaryFocalCrossentropy, from_logits=True)
CONSTANTS = [
    (SPARSE, class_index, 4),
    (none(losses.CategoricalCrossentropy, from_logits=True, label_smoothing=0.3), one_hot, 4),
    (LOGISTIC, unit, 1),
    (none(losses.BinaryCrossentropy, from_logits=True, label_smoothing=0.3), unit, 3),
    (SQUARED, any_number, 1),
    (SQUARED, any_number, 3),
    (none(losses.Huber, delta=0.4), any_number, 3),
    (none(losses.LogCosh), any_number, 1),
    (losses.mean_squared_error, any_number, 2),
    (losses.log_cosh, any_number, 3),
]


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
    predictions = tf.constant(2.0 * random.normal(size=(rows, outputs)), tf.float32)
    with tf.GradientTape() as tape:
        tape.watch(predictions)
        expected = loss(tf.constant(targets), predictions)
    values, slopes = known.evaluate(known.targets, predictions)
    np.testing.assert_allclose(slopes, tape.gradient(expected, predictions), atol=1e-6)
    np.testing.assert_allclose(values, row_losses(targets, predictions), rtol=1e-6)


# --- what is read off -----------------------------------------------------------------------------

LABELS = Y[:, np.newaxis].astype("float32")
NUMBERS = np.random.default_rng(0).normal(size=(RECORDS, 4)).astype("float32")
SOFTMAX, ROUGH = hsa.LossGeometry.softmax_cross_entropy, hsa.LossGeometry.smooth(2.0)
LEAST_SQUARES = hsa.LossGeometry.squared_error


def begin(stack, loss=SPARSE, *, x=X, y=Y, **settings):
    """What fit checks before its first step."""
    model = make(stack=stack, compile={"loss": loss}, **{**AUTO, **settings})
    return fit(model, x=x, y=y, epochs=0)


def functional():
    inputs = tf.keras.Input([FEATURES])
    frozen = layers.Dense(5, "relu", kernel_initializer="identity", trainable=False)(inputs)
    return tf.keras.Model(inputs, head()(frozen))


DECLARED = {"loss_geometry": LEAST_SQUARES(1.0, True, scale=2.0), "feature_norm": None}
ACCEPTED = {
    "softmax": ([head(use_bias=False)], {}, SOFTMAX(1.0)),
    "bias": ([head()], {}, SOFTMAX(1.0, bias=True)),
    "a bound alone": ([head()], {"loss_geometry": None}, SOFTMAX(1.0, bias=True)),
    "functional": ([functional()], {}, SOFTMAX(1.0, bias=True)),
    "probabilities": (
        [head(activation="softmax")], {"loss": PROBABILITIES}, SOFTMAX(1.0, bias=True),
    ),
    "logistic": (
        [head(1)], {"loss": LOGISTIC, "y": LABELS}, hsa.LossGeometry.logistic(1.0, bias=True),
    ),
    "squared": (
        [head(1, use_bias=False)], {"loss": SQUARED, "y": LABELS}, LEAST_SQUARES(1.0, scale=2.0),
    ),
    "squared errors": (
        [head(4)], {"loss": SQUARED, "y": NUMBERS}, LEAST_SQUARES(1.0, True, scale=0.5),
    ),
    "huber": (
        [head(1)], {"loss": none(losses.Huber, delta=2.0), "y": LABELS},
        hsa.LossGeometry.huber(1.0, 2.0, True),
    ),
    # Keras' squared error has no factor 1/2. Of two layers nobody knows the curvature.
    "declared": (
        [head(1)], {"loss": SQUARED, "y": LABELS, **DECLARED}, DECLARED["loss_geometry"],
    ),
    "two layers": (
        [head(2), head(1)],
        {"loss": SQUARED, "y": LABELS, "loss_geometry": ROUGH, "feature_norm": None}, ROUGH,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(name):
    stack, arguments, expected = ACCEPTED[name]
    assert begin(stack, **arguments)._run.record.declared.geometry == expected


def twice():
    inputs, layer = tf.keras.Input([FEATURES]), head(FEATURES)
    return tf.keras.Model(inputs, layer(layer(inputs)))


def last_row(*, length=1.0):
    x = X.copy()
    x[-1] *= length
    return x


def smoothed(**options):
    return none(losses.BinaryCrossentropy, from_logits=True, **options)


class Counts(layers.Layer):
    """Keeps a sum of what it sees in training mode."""

    def build(self, shape):
        self.seen = self.add_weight("seen", trainable=False)

    def call(self, x, training=None):
        if training:
            self.seen.assign_add(tf.reduce_sum(x))
        return x


CATEGORICAL = none(losses.CategoricalCrossentropy, from_logits=True)
REFUSED = {
    "own softmax": ([head(), layers.Lambda(tf.nn.softmax)], {}, "be that of dense"),
    "softmax and logits": ([head(activation="softmax")], {}, "activation 'linear' .* 'softmax'"),
    "no softmax": ([head()], {"loss": PROBABILITIES}, "activation 'softmax'"),
    # and no advice to declare a geometry
    "two layers": ([head(5), head()], {}, "one Dense layer is trained.*: every step then counts.$"),
    "smoothing": (
        [head(1)], {"loss": smoothed(label_smoothing=-1.0), "y": LABELS},
        "label_smoothing from 0 to 1",
    ),
    "ignored": (
        [head()], {"loss": none(losses.SparseCategoricalCrossentropy, from_logits=True,
                                ignore_class=0)}, "ignore_class = None",
    ),
    "dropout": ([layers.Dropout(0.5), head()], {}, "in training mode"),
    "head twice": ([twice()], {}, "after 2 calls"),
    "sequences": ([layers.Reshape([1, 3]), head(), layers.Flatten()], {}, "be that of dense"),
    "long": ([head()], {"x": last_row(length=1.001)}, "feature_norm = 1 .* 1.001.* for example 11"),
    "not a number": ([head()], {"x": last_row(length=math.nan)}, "got nan for example 11"),
    "declared": (
        [head()], {"loss_geometry": SOFTMAX(0.5, True), "feature_norm": 0.5}, "= 0.5 .* got 1",
    ),
    "half": (
        [head(1)], {"loss": SQUARED, "y": LABELS, "loss_geometry": LEAST_SQUARES(1.0, True)},
        "has no factor 1/2",
    ),
    "counts": ([Counts(), head()], {}, "not trained was changed"),
    "class": ([head()], {"y": Y + 1}, "labels from 0 to 1"),
    "half a class": ([head()], {"y": Y / 2}, "labels from 0 to 1"),
    "targets": ([head()], {"loss": CATEGORICAL, "y": 2.0 * np.eye(2)[Y]}, "of probabilities"),
    "labels": ([head(1)], {"loss": LOGISTIC, "y": 3 * LABELS}, "Expected probabilities as targets"),
    "two targets": ([head(1)], {"loss": SQUARED, "y": np.c_[Y, Y]}, "1 targets for each example"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    stack, arguments, text = REFUSED[name]
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        begin(stack, **arguments)


def looped(stack, *, loss=SPARSE, y=Y, optimizer="sgd", **settings):
    run = PrivateRun(
        tf.keras.Sequential(stack), X, y, loss=loss, optimizer=optimizer, batch_size=BATCH,
        **{"l2_norm_clip": 1.5, "noise_multiplier": 2.0, **settings},
    )  # fmt: skip
    run.train(2, verbose=False)
    return run


WHY = {
    "no bound": ([head()], {}, "feature_norm=, a bound on the L2 norm"),
    "two layers": ([head(5), head()], {}, "deep networks among them"),
    "unknown loss": (
        [head(1)], {"loss": FOCAL, "y": LABELS, "feature_norm": 1.0}, "got BinaryFocalCrossentropy",
    ),
    "another update": (
        [head()], {"optimizer": "adam", "feature_norm": 1.0},
        "Every step counts: Adam is not SGD.",
    ),
    "add or remove": (
        [head()],
        {"neighboring_relation": "add_or_remove_one", "sampling_rate": 0.3, "feature_norm": 1.0},
        "bounds on hidden iterates need REPLACE_SPECIAL",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WHY)
def test_the_report_says_why_every_step_counts(name):
    stack, settings, text = WHY[name]
    run = looped(stack, **settings)
    report = " ".join(run.report(1e-5).split())
    assert run.privacy_event.loss is None
    assert text in report
    assert "needs FULL or CYCLIC" not in report
    assert "Batches are Poisson, the default of batch_order=." in report


def test_a_clip_norm_just_above_the_longest_gradient():
    known = {"feature_norm": 1.0, "l2_norm_clip": "auto"}
    assert 2 < looped([head()], **known).privacy_event.clip_norm < 2.001
    weighted = looped([head()], class_weight={0: 2.0, 1: 1.0}, **known)
    assert 4 < weighted.privacy_event.clip_norm < 4.001
    for settings, text in (({}, "feature_norm="), ({"loss_geometry": ROUGH}, "the loss has none")):
        with pytest.raises(hsa.UnsupportedRunError, match=f'got "auto".*{text}'):
            looped([head()], l2_norm_clip="auto", **settings)


def test_numbers_that_have_to_be_public():
    """The largest norm of the examples as their bound, and a delta of 1/n."""
    rows = X * np.linspace(0.5, 1.9, RECORDS, dtype="float32")[:, None]
    longest = float(np.linalg.norm(rows.astype(np.float64), axis=1).max())
    model = make(stack=[head()], loss_geometry="auto", feature_norm=longest)
    with pytest.warns(UserWarning, match="is the largest norm of the data"):
        fit(model, x=rows)
    with pytest.warns(UserWarning, match=r"not below 1/n for n = 12 records"):
        model.get_epsilon(0.1)


# --- features -------------------------------------------------------------------------------------


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
    model = make(stack=[Longest(100.0), head()], loss_geometry="auto", feature_norm=2.0)
    with pytest.raises(hsa.UnsupportedRunError, match="features of every example by itself"):
        fit(model, x=x, y=np.resize(Y, 6000), batch_size=1000)


def test_a_layer_that_would_divide_by_a_longer_row_than_there_is():
    """No example is longer than 1; one that was would change the features of the others."""
    with pytest.raises(hsa.UnsupportedRunError, match="beside longer ones"):
        begin([Longest(), head()], x=X / 2)


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


def change(model):
    """Everything but what a step reads: layers, their order, loss, call, activation, penalties."""
    model.layers[0].factor, model.layers[1].mixes = 100.0, True
    model.loss = losses.MSE
    model.call = lambda x, training=None: tf.zeros([len(x), 2])
    own = model.layers[-1]
    own.activation, own.kernel_regularizer = lambda z: z / 100, tf.keras.regularizers.L2(9.0)
    own.call = lambda x: tf.zeros([len(x), 2])


def test_what_happens_to_the_rest_has_no_effect():
    """Neither callbacks of fit nor a loop of one's own change the accounted step."""
    known = {"noise_multiplier": 0.0, **AUTO}
    honest, misused = (make(stack=[Scale(), Row(), head()], **known) for _ in range(2))
    fit(honest, epochs=2)
    act = tf.keras.callbacks.LambdaCallback(on_train_batch_begin=lambda *_: change(misused))
    fit(misused, epochs=2, callbacks=[act])
    plain = tf.keras.Sequential([Scale(), Row(), head()])
    run = PrivateRun(
        plain, X, Y, loss=SPARSE, optimizer=SGD(0.5), batch_size=BATCH, l2_norm_clip=1.0,
        batch_order="cyclic", **known,
    )  # fmt: skip
    for _ in range(2 * STEPS):
        change(plain)
        run.step()
    for other in (misused, plain):
        for own, expected in zip(other.get_weights(), honest.get_weights(), strict=True):
            np.testing.assert_allclose(own, expected, atol=1e-6)


def test_targets_are_never_broadcast():
    """Of an unknown number of rows a column of labels would be."""
    ends = []
    for targets in (LABELS[:, 0], LABELS):
        logistic = {"loss": losses.BinaryCrossentropy(from_logits=True)}
        model = make(stack=[head(1)], compile=logistic, noise_multiplier=0.0, **AUTO)
        ends.append(fit(model, y=targets).get_weights())
    for own, other in zip(*ends, strict=True):
        np.testing.assert_array_equal(own, other)


# --- two trained layers, in the weights of which no loss is convex --------------------------------

CONVEX = hsa.LossGeometry.convex(1.0)
IN_A_ROW = "got .*dense.*, .*dense.*: no loss is convex in the weights of layers"


def two(units=2):
    return [layers.Dense(3, "tanh"), layers.Dense(units)]


def event_of(stack, update=lambda optimizer: optimizer, geometry=CONVEX):
    return fit(make(update(SGD(0.1)), stack, loss_geometry=geometry)).privacy_event


@pytest.mark.parametrize(
    ("stack", "update"), [([tf.keras.Sequential(two())], []), (two(), [BlockCoordinateUpdate])]
)
def test_no_loss_is_convex_in_two_layers_in_a_row(stack, update):
    with pytest.raises(hsa.UnsupportedRunError, match=IN_A_ROW):
        event_of(stack, *update)


def test_the_callback_refuses_them(make_run):
    pytest.importorskip("tensorflow_privacy")
    run = make_run(optimizer={"loss_geometry": CONVEX})
    run.model = tf.keras.Sequential(two(1))
    run.model.compile(run.optimizer, LOGISTIC)
    with pytest.raises(hsa.UnsupportedRunError, match=IN_A_ROW):
        run.fit()


def test_what_may_have_two_layers():
    first, last = two()
    first.trainable = False
    assert event_of(two(), geometry=ROUGH).loss == ROUGH
    assert event_of([first, last]).loss == CONVEX
    each = [[0, 1], [2, 3]]
    blocks = event_of(two(), lambda optimizer: BlockCoordinateUpdate(optimizer, each))
    assert blocks.num_blocks == 2
