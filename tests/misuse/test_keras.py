"""Every Keras optimizer, the private model and an own loop through every misuse of misuse.py."""

import contextlib
import copy
import functools
import json
import pickle
from collections.abc import Callable

import attrs
import misuse
import numpy as np
import pytest

pytest.importorskip("tensorflow_privacy")
import tensorflow as tf
from keras_fixtures import (  # noqa: F401
    folder_of_its_own,
    pace_of_a_fast_machine,
    row_by_row,
    without_graphs,
)
from keras_models import bce
from misuse import BATCH, RECORDS, Trial, nothing

import hidden_state_accountants as hsa
from hidden_state_adapters.tf_privacy import (
    BlockCoordinateKerasOptimizer,
    BlockCoordinateUpdate,
    CyclicDPKerasSGDOptimizer,
    DiceKerasAdamOptimizer,
    DiceKerasSGDOptimizer,
    DiceUpdate,
    HiddenStateCallback,
    HiddenStateSequential,
    PrivateRun,
    cyclic_dataset,
)

pytestmark = pytest.mark.usefixtures("without_graphs")

FEATURES = 3
SMOOTH = hsa.LossGeometry.smooth(0.5, 2**0.5)  # of two layers, which nobody knows to be one
layers = tf.keras.layers


class Counts(layers.Layer):
    def build(self, shape):
        self.seen = self.add_weight(shape=(FEATURES,), initializer="zeros", trainable=False)

    def call(self, features, training=None):
        if training:
            self.seen.assign_add(tf.reduce_sum(features, axis=0))
        return features


class Shift(layers.Layer):
    def __init__(self, size, trainable):
        super().__init__(trainable=trainable)
        self.shift = self.add_weight(shape=(size,), initializer="zeros")

    def call(self, features):
        return features + self.shift


def adapted():
    layer = layers.Normalization()
    layer.adapt(np.random.default_rng(0).normal(size=(RECORDS, FEATURES)))
    return layer


LAYERS = {
    "": lambda: layers.Activation("linear"),
    "batch_norm": layers.BatchNormalization,
    "counts": Counts,
    "adapted": adapted,
}


def linear(**kwargs):
    return layers.Dense(1, kernel_initializer="ones", **kwargs)


AUTO = {"loss_geometry": "auto", "feature_norm": 1.0}
HALF = hsa.LossGeometry.squared_error(1.0, bias=True)
# By name: what a private model trains, with which loss, and what is said of the loss.
HEADS = {
    "tanh": lambda: ([linear(activation="tanh")], bce(), AUTO),
    "sigmoid_after": lambda: ([linear(), layers.Lambda(tf.sigmoid)], bce(), AUTO),
    "focal": lambda: (
        [linear()],
        tf.keras.losses.BinaryFocalCrossentropy(from_logits=True, reduction="none"),
        AUTO,
    ),
    "largest": lambda: (
        [layers.Lambda(lambda x: x / tf.reduce_max(tf.abs(x))), linear()],
        bce(),
        AUTO,
    ),
    "half_squared_error": lambda: (
        [linear()],
        tf.keras.losses.MeanSquaredError(reduction="none"),
        {"loss_geometry": HALF},
    ),
}


class Model(tf.keras.Sequential):
    """In Model.fit a step is `act`."""

    act = None

    def train_step(self, data):
        self.act(*data)
        return {}


def arrays():
    random = np.random.default_rng(0)
    x = random.normal(size=(RECORDS, FEATURES)).astype("float32")
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    return x, (x[:, :1] > 0).astype("float32")


def data(change=lambda dataset: dataset):
    dataset = tf.data.Dataset.from_tensor_slices(arrays())
    return cyclic_dataset(change(dataset), batch_size=BATCH)


class OnKeras(Trial):
    """What is done to a model of Keras: `model`, with `backbone`, `buffer` and `bias` in it."""

    def stack(self, head=None):
        """The layer before a frozen one, a buffer, and the head, which is linear if not given."""
        self.backbone = layers.Dense(
            FEATURES, use_bias=False, kernel_initializer="identity", trainable=False
        )
        self.buffer, self.bias = Shift(FEATURES, trainable=False), Shift(1, trainable=True)
        before = LAYERS.get(self.layer, LAYERS[""])()
        head = head or [linear(use_bias=False), self.bias]
        return [before, self.backbone, self.buffer, *head]

    def weights(self):
        return [v.numpy() for v in self.model.trainable_variables]

    def set_weights(self, weights):
        for variable, value in zip(self.model.trainable_variables, weights, strict=True):
            variable.assign(value)

    def write_weights(self):
        self.model.save_weights("model.weights.h5")

    def frozen(self):
        return self.backbone.kernel.numpy()

    def write_frozen(self, value):
        self.backbone.kernel.assign(value)

    def write_buffer(self):
        self.buffer.shift.assign_add(0.1 * tf.ones([FEATURES]))

    def freeze(self):
        self.bias.trainable = False

    def unfreeze(self):
        self.backbone.trainable = True

    def seed_the_program(self):
        tf.random.set_seed(0)

    def get_epsilon(self):
        return self.account.get_epsilon(1e-5)

    def event(self):
        return self.account.privacy_event

    def release(self):
        self.account.release()


@attrs.define(slots=False)
class KerasTrial(OnKeras):
    """A run of Keras' own fit with a train_step of one's own.

    Attributes:
        layer: Before the head, of `LAYERS`.
        kind: The optimizer.
        start, records, has_bound: See `Trial`.
        options: More options of the optimizer.
        declared: What the callback is told.
        by_blocks: Whether the optimizer asks for the loss of every block.
    """

    layer: str
    kind: type
    start: dict
    options: dict = attrs.Factory(dict)
    declared: dict = attrs.Factory(dict)
    records: frozenset = frozenset()
    has_bound: bool = True
    by_blocks: bool = False

    is_trusted = True

    def __attrs_post_init__(self):
        if self.layer not in ("", "batch_norm", "counts", "adapted"):
            raise NotImplementedError("what an entry of the loss is about is the user's word")
        self.loss, self.data = bce(), data()
        self.optimizer = self.new_optimizer()
        self.build()
        self.account = self.account_of(self.optimizer)

    def new_optimizer(self):
        return self.kind(
            self.start["clip_norm"],
            self.start["noise_multiplier"],
            learning_rate=self.start["learning_rate"],
            **self.options,
        )

    def build(self):
        self.model = Model(self.stack())
        self.model.build((None, FEATURES))
        self.model.act = self.act
        self.acts, self.extra = (nothing, nothing, 1.0), None
        self.factor, self.pairs, self.broadcasts = 1.0, None, False

    def compile(self, optimizer):
        self.model.compile(optimizer, self.loss, run_eagerly=True)

    def account_of(self, optimizer):
        self.compile(optimizer)
        return HiddenStateCallback(data=self.data, **self.declared)

    def broadcast_targets(self):
        self.broadcasts = True

    # The loop

    def epoch(self, *, at=1, between=nothing, before=nothing, after=nothing, scale=1.0):
        def begin(index, logs):
            if index == at:
                between()
                self.acts = before, after, scale

        act = tf.keras.callbacks.LambdaCallback(on_train_batch_begin=begin)
        self.model.fit(self.data, callbacks=self.account.with_others(act), verbose=0)

    def act(self, x, y):
        """One step, with what was asked for."""
        (before, after, scale), self.acts = self.acts, (nothing, nothing, 1.0)

        def losses():
            before()
            outputs = self.model(x, training=True)
            values = scale * self.loss(y, outputs)
            if self.broadcasts:
                values = tf.square(y[:, 0] - outputs)
                self.broadcasts = False
            if self.extra is not None:
                values += 0.0 * self.extra
            after()
            return values

        self.update(losses)

    def update(self, losses):
        if self.by_blocks:
            self.optimizer.minimize(losses, [[v] for v in self.variables])
            return
        with tf.GradientTape() as tape:
            values = losses()
        pairs = self.optimizer._compute_gradients(values, self.variables, tape=tape)
        self.pairs = [(self.factor * g, v) for g, v in pairs] if self.factor != 1.0 else pairs
        self.factor = 1.0
        self.optimizer.apply_gradients(self.pairs)

    @property
    def variables(self):
        extra = [] if self.extra is None else [self.extra]
        return [*self.model.trainable_variables, *extra]

    def take_data(self, change):
        self.data = data(change)
        self.account = self.account_of(self.optimizer)
        self.epoch()

    def evaluate(self):
        self.model(next(iter(self.data))[0])

    # The optimizer

    def set(self, name, value):
        setattr(self.optimizer, self._setting(name), value)

    def get(self, name):
        return getattr(self.optimizer, self._setting(name), None)

    def _setting(self, name):
        if name not in self.optimizer._hyper:  # of Adam no momentum
            raise NotImplementedError(f"{name} cannot be set by public means")
        return name

    def copy(self):
        self.go_on_with(copy.deepcopy(self.optimizer))

    def pickle(self):
        self.go_on_with(pickle.loads(pickle.dumps(self.optimizer)))

    def go_on_with(self, optimizer):
        self.optimizer = optimizer
        self.compile(optimizer)
        self.epoch()

    def unused_gradients(self):
        if self.by_blocks:
            raise NotImplementedError("every block's gradient is used at once")
        x, y = next(iter(self.data))
        self.optimizer._compute_gradients(
            lambda: tf.nn.sigmoid_cross_entropy_with_logits(y, self.model(x))[:, 0], self.variables
        )

    def change_update(self):
        if self.by_blocks:
            raise NotImplementedError("the update is made inside the step")
        self.factor = 2.0

    def apply_again(self):
        if self.by_blocks:
            raise NotImplementedError("the update is made inside the step")
        self.optimizer.apply_gradients(self.pairs)

    def hook_on_the_update(self):
        self.optimizer.gradient_transformers.append(lambda pairs: pairs)

    def add_a_parameter(self):
        self.extra = tf.Variable(1.0)

    @contextlib.contextmanager
    def interrupted_update(self):
        def interrupt(*args, **kwargs):
            raise KeyboardInterrupt

        self.optimizer.apply_gradients = interrupt
        yield
        del self.optimizer.apply_gradients

    def account_again(self):
        self.account = self.account_of(self.optimizer)
        self.epoch()

    def begin_anew(self):
        self.optimizer = self.new_optimizer()
        self.account = self.account_of(self.optimizer)

    def copy_model(self):
        self.model = Model([*self.model.layers])
        self.model.build((None, FEATURES))
        self.model.act = self.act

    def questions(self):
        """A release within fit is one of a callback; that fit is over shows in the next one."""
        return [self.get_epsilon, self.event, self.epoch]


@attrs.define(slots=False)
class ModelTrial(OnKeras):
    """A run of a model that owns its steps; there is no loop and no optimizer that makes noise.

    Attributes:
        layer: Before the head, of `LAYERS`, or the head itself, of `HEADS`.
        start, records: See `Trial`.
        rule: What the model is compiled with, of the trial and its optimizer.
        said: What the model is told of the loss.
        decay: Of the weights.
        has_bound: See `Trial`.
        grouping, sample_weight: What `group` and `weigh` have changed.
    """

    layer: str
    start: dict
    records: frozenset = frozenset()
    rule: Callable = lambda trial, optimizer: optimizer
    said: dict = attrs.Factory(lambda: {"loss_geometry": SMOOTH})
    decay: float | None = 0.1
    has_bound: bool = True
    grouping: dict = attrs.Factory(dict)
    sample_weight: np.ndarray | None = None

    def __attrs_post_init__(self):
        if self.layer == "half_squared_error" and self.rule is dice_update:
            raise NotImplementedError("the curvature of the loss does not matter")
        self.factor = tf.Variable(1.0, trainable=False)
        self.x, self.y = arrays()
        self.interrupts = False
        self.build()

    def losses(self, targets, outputs):
        return self.factor * tf.nn.sigmoid_cross_entropy_with_logits(targets, outputs)[:, 0]

    def build(self):
        head, self.loss, said = None, self.losses, self.said
        if self.layer in HEADS:
            head, self.loss, said = HEADS[self.layer]()
        self.settings = {
            "l2_norm_clip": self.start["clip_norm"],
            "noise_multiplier": self.start["noise_multiplier"],
            **{"batch_order": "cyclic", **said, **self.grouping},
        }
        self.build_of(self.stack(head))

    def build_of(self, stack):
        self.model = HiddenStateSequential(stack, **self.settings)
        self.model.build((None, FEATURES))
        self.compile()

    def compile(self):
        self.optimizer = self.new_optimizer()
        self.model.compile(self.rule(self, self.optimizer), self.loss, run_eagerly=True)

    def new_optimizer(self):
        return tf.keras.optimizers.SGD(self.start["learning_rate"], weight_decay=self.decay)

    def epoch(self, *, at=1, between=nothing, before=nothing, after=nothing, scale=1.0):
        if (before, after) != (nothing, nothing):
            raise NotImplementedError("the step has no loop of one's own")

        def begin(index, logs):
            self.factor.assign(scale if index == at else 1.0)
            if index == at and self.interrupts:
                raise KeyboardInterrupt
            if index == at:
                between()

        act = tf.keras.callbacks.LambdaCallback(on_train_batch_begin=begin)
        self.model.fit(
            self.x,
            self.y,
            batch_size=BATCH,
            sample_weight=self.sample_weight,
            callbacks=[act],
            verbose=0,
        )

    def group(self, number, **settings):
        self.grouping = {"num_microbatches": number, **settings}
        self.build()

    def weigh(self, weights):
        self.sample_weight = np.resize(weights, RECORDS)

    def evaluate(self):
        self.model(self.x)

    def set(self, name, value):
        setattr(self.optimizer, name, value)

    def get(self, name):
        if name not in ("learning_rate", "momentum", "clipnorm"):
            raise NotImplementedError(f"no {name}")
        value = getattr(self.optimizer, name)
        return float(value) if name == "learning_rate" else value

    @contextlib.contextmanager
    def interrupted_update(self):
        self.interrupts = True
        yield
        self.interrupts = False

    def begin_anew(self):
        self.compile()

    def begin_with_a_convex_loss_of_two_layers(self):
        if "loss_geometry" not in self.said:
            raise NotImplementedError("convexity is of no use")
        self.said = {"loss_geometry": hsa.LossGeometry.convex(0.5, 2**0.5)}
        self.build()

    def begin_under_add_or_remove(self):
        relation = {"neighboring_relation": "add_or_remove_one"}
        self.group(BATCH, **relation, batch_order="poisson", loss_geometry=None)

    def copy_model(self):
        self.build_of([*self.model.layers])

    def save(self):
        is_secret = self.rule is dice_update
        state = self.account.state(stays_private=True, include_private_state=is_secret)
        return json.loads(json.dumps(state)), self.model.get_weights()

    def stay_here(self):
        return copy.copy(self)

    def go_on_from(self, saved):
        state, weights = saved
        self.build()
        self.model.set_weights(weights)
        self.model.resume(state)

    @property
    def account(self):
        return self.model


@attrs.define(slots=False)
class LoopTrial(ModelTrial):
    """A loop of one's own that asks a `PrivateRun` for its steps."""

    run = None

    def model_of(self, stack):
        return tf.keras.Sequential(stack)

    def compile(self):
        self.optimizer, self.run = self.new_optimizer(), None

    @property
    def account(self):
        if self.run is None:
            self.begin()
        return self.run

    def begin(self, state=None):
        self.run = PrivateRun(
            self.model, self.x, self.y, loss=self.loss, optimizer=self.rule(self, self.optimizer),
            batch_size=self.batch, sample_weight=self.sample_weight, state=state, **self.settings,
        )  # fmt: skip

    def epoch(self, *, at=1, between=None, before=None, after=None, scale=1.0):
        if before is not None or after is not None:
            raise NotImplementedError("a step is one call")
        for index in range(self.account.steps_per_epoch):
            self.factor.assign(scale if index == at else 1.0)
            if index == at and between is not None:
                between()
            self.run.step()

    def _held(self):
        if self.run is not None:
            raise NotImplementedError("the run holds its records")

    def group(self, *arguments, **settings):
        self._held()
        super().group(*arguments, **settings)

    def weigh(self, weights):
        self._held()
        super().weigh(weights)

    def interrupted_update(self):
        raise NotImplementedError("who leaves the loop says when")

    def go_on_from(self, saved):
        state, weights = saved
        self.build()
        self.model.set_weights(weights)
        self.begin(state)


def block_update(trial, optimizer):
    return BlockCoordinateUpdate(optimizer, lambda: [[v] for v in trial.model.trainable_variables])


def dice_update(trial, optimizer):
    bound = {} if trial.layer in HEADS else {"gradient_bound": DICE["declared"]["gradient_bound"]}
    return DiceUpdate(optimizer, **DICE["options"], **bound)


PLAIN = {"learning_rate": 0.5, "noise_multiplier": 2.0, "clip_norm": 1.5}
DICE = {
    "start": {"learning_rate": 0.5, "noise_multiplier": 40.0, "clip_norm": 0.25},
    "options": {"error_l2_norm_clip": 0.125},
    "declared": {"gradient_bound": 1.4143},
    "records": {"learning_rate"},
}
RULES = {
    "": {"start": PLAIN, "records": {"learning_rate"}},
    "_dice": {
        "start": DICE["start"], "records": {"learning_rate"}, "rule": dice_update, "said": {},
    },
    "_blocks": {
        "start": PLAIN, "rule": block_update, "said": {}, "decay": None, "has_bound": False,
    },
}  # fmt: skip
OPTIMIZERS = {
    "cyclic": functools.partial(
        KerasTrial,
        kind=CyclicDPKerasSGDOptimizer,
        start=PLAIN,
        options={"weight_decay": 0.1, "loss_geometry": SMOOTH},
        records={"learning_rate", "noise_multiplier", "clip_norm"},
    ),
    "dice_sgd": functools.partial(KerasTrial, kind=DiceKerasSGDOptimizer, **DICE),
    "dice_adam": functools.partial(KerasTrial, kind=DiceKerasAdamOptimizer, **DICE),
    "block_coordinate": functools.partial(
        KerasTrial, kind=BlockCoordinateKerasOptimizer, start=PLAIN, has_bound=False, by_blocks=True
    ),
    **{
        f"{name}{rule}": functools.partial(kind, **arguments)
        for name, kind in (("model", ModelTrial), ("loop", LoopTrial))
        for rule, arguments in RULES.items()
    },
}


@pytest.mark.parametrize("case", misuse.cases("keras"))
def test_misuse(case):
    """On one trial each; which one follows from its place in the table."""
    misuse.on_one("keras", case, list(OPTIMIZERS.values()))


@pytest.mark.exhaustive
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("case", misuse.cases("keras"))
def test_misuse_of_every_trial(case, optimizer):
    try:
        misuse.check("keras", case, OPTIMIZERS[optimizer])
    except NotImplementedError as error:
        pytest.skip(f"cannot be done here: {error}")
