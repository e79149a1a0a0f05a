"""A logistic model on 24 records of 4 features in 6 batches of 4; TensorFlow is imported once."""

import numpy as np
import pytest

pytest.importorskip("tensorflow")
import tensorflow as tf

import hidden_state_adapters.tf_privacy as adapter  # which need not have TensorFlow Privacy
from hidden_state_accountants import LossGeometry
from hidden_state_adapters.tf_privacy import batches as owned_batches
from hidden_state_adapters.tf_privacy import run as private_run

RECORDS, FEATURES, BATCH = 24, 4, 4


def make_data():
    random = np.random.default_rng(0)
    x = random.normal(size=(RECORDS, FEATURES)).astype("float32")
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    return x, (random.random((RECORDS, 1)) < 0.5).astype("float32")


def bce():
    return tf.keras.losses.BinaryCrossentropy(from_logits=True, reduction="none")


def make_optimizer(**kwargs):
    return adapter.CyclicDPKerasSGDOptimizer(
        **{
            "l2_norm_clip": 1.5,
            "noise_multiplier": 2.0,
            "learning_rate": 0.5,
            "weight_decay": 0.1,
            "loss_geometry": LossGeometry.logistic(1.0, bias=True),
            **kwargs,
        }
    )


def make_layer():
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model.build((None, FEATURES))
    kernel = np.linspace(-0.4, 0.5, FEATURES, dtype="float32").reshape(FEATURES, 1)
    model.set_weights([kernel, np.array([0.2], "float32")])
    return model


class Run:
    """A compiled model with its data and its callback."""

    def __init__(self, *, optimizer=None, compile=None, callback=None):
        self.x, self.y = make_data()
        self.model = make_layer()
        self.optimizer = make_optimizer(**(optimizer or {}))
        self.model.compile(self.optimizer, bce(), **(compile or {}))
        self.callback = adapter.HiddenStateCallback(
            **{"dataset_size": RECORDS, "batch_size": BATCH, **(callback or {})}
        )
        self.data = adapter.cyclic_dataset(self.x, self.y, batch_size=BATCH)

    def fit(self, x=None, callbacks=(), **kwargs):
        return self.model.fit(
            self.data if x is None else x,
            callbacks=[self.callback, *callbacks],
            **{"verbose": 0, **kwargs},
        )

    @property
    def variables(self):
        return self.model.trainable_variables


@pytest.fixture
def compile_options(request):
    """How a test compiles its models: with `row_by_row` steps need no graph."""
    return {"run_eagerly": True} if "row_by_row" in request.fixturenames else {}


@pytest.fixture
def make_run(compile_options):
    def make(*, compile=None, **kwargs):
        return Run(compile=compile_options if compile is None else compile, **kwargs)

    return make


@pytest.fixture
def without_graphs():
    """For many short runs of models: tracing a step takes several times as long as the run."""
    tf.config.run_functions_eagerly(True)
    yield
    tf.config.run_functions_eagerly(False)


@pytest.fixture
def dealt(monkeypatch):
    """The records of every step of a model that owns its run, by step."""
    batches, deal = {}, owned_batches.Dealer.deal

    def noted(dealer, step):
        found = deal(dealer, step)
        batches[step] = found[2][: found[1]]
        return found

    monkeypatch.setattr(owned_batches.Dealer, "deal", noted)
    return batches


@pytest.fixture(autouse=True)
def _pace_of_a_fast_machine(monkeypatch):
    """Where nobody says how many steps are made at once, the clock does."""
    monkeypatch.setattr(private_run, "_MOMENT", 1e9)


@pytest.fixture(autouse=True)
def _folder_of_its_own(tmp_path, monkeypatch):
    """Callbacks write files relative to the working directory."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def restored_precision():
    """For tests that change the precision of Keras."""
    yield
    tf.keras.backend.set_floatx("float32")
    tf.keras.mixed_precision.set_global_policy("float32")


@pytest.fixture
def row_by_row(monkeypatch):
    """Per-example gradients without pfor, which traces a graph in every eager step."""
    init = tf.GradientTape.__init__

    def jacobian(tape, target, sources, unconnected_gradients=tf.UnconnectedGradients.NONE, **_):
        rows = [
            tape.gradient(target, sources, tf.one_hot(i, target.shape[0], dtype=target.dtype),
                          unconnected_gradients)
            for i in range(target.shape[0])
        ]  # fmt: skip
        return [tf.stack(parts) for parts in zip(*rows, strict=True)]

    def persistent_init(tape, persistent=False, **kwargs):
        init(tape, persistent=True, **kwargs)

    def loop(function, structure):
        rows = tf.nest.flatten(structure)[0].shape[0]
        results = [
            function(tf.nest.map_structure(lambda part, i=i: part[i], structure))
            for i in range(rows)
        ]
        return tf.nest.map_structure(lambda *parts: tf.stack(parts), *results)

    monkeypatch.setattr(tf, "vectorized_map", loop)
    monkeypatch.setattr(tf.GradientTape, "__init__", persistent_init)
    monkeypatch.setattr(tf.GradientTape, "jacobian", jacobian)
