"""A logistic model on 24 records of 4 features in 6 batches of 4; TensorFlow is imported once."""

import numpy as np
import pytest

pytest.importorskip("tensorflow")
import tensorflow as tf
from keras_fixtures import (  # noqa: F401
    folder_of_its_own,
    pace_of_a_fast_machine,
    row_by_row,
    without_graphs,
)
from keras_models import bce, unit_rows

import hidden_state_adapters.tf_privacy as adapter  # which need not have TensorFlow Privacy
from hidden_state_accountants import LossGeometry
from hidden_state_adapters.batch_plans import BatchPlan

RECORDS, FEATURES, BATCH = 24, 4, 4

# Every test traces graphs of its own and runs them a few times: not worth optimizing.
tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})


class Run:
    """A compiled model with its data and its callback."""

    def __init__(self, *, optimizer=None, compile=None, callback=None):
        self.x, labels = unit_rows(RECORDS, FEATURES, 2)
        self.y = labels[:, np.newaxis].astype("float32")
        self.model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
        self.model.build((None, FEATURES))
        kernel = np.linspace(-0.4, 0.5, FEATURES).reshape(-1, 1)
        self.model.set_weights([kernel, np.array([0.2])])
        given = {
            "l2_norm_clip": 1.5,
            "noise_multiplier": 2.0,
            "learning_rate": 0.5,
            "weight_decay": 0.1,
            "loss_geometry": LossGeometry.logistic(1.0, bias=True),
        }
        self.optimizer = adapter.CyclicDPKerasSGDOptimizer(**given | (optimizer or {}))
        self.model.compile(self.optimizer, bce(), **(compile or {}))
        self.told = callback or {}
        self.take(self.x, self.y)

    def take(self, x, y, **options):
        """Begins anew on other data."""
        self.data = adapter.cyclic_dataset(x, y, batch_size=BATCH, **options)
        self.callback = adapter.HiddenStateCallback(**{"data": self.data, **self.told})

    def fit(self, x=None, callbacks=(), **kwargs):
        return self.model.fit(
            self.data if x is None else x,
            callbacks=self.callback.with_others(*callbacks),
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
def dealt(monkeypatch):
    """The records of every step of a model that owns its run, by step."""
    batches, deal = {}, BatchPlan.batch

    def noted(plan, step):
        batches[step] = np.array(deal(plan, step), int)
        return batches[step]

    monkeypatch.setattr(BatchPlan, "batch", noted)
    return batches


@pytest.fixture
def restored_precision():
    """For tests that change the precision of Keras."""
    yield
    tf.keras.backend.set_floatx("float32")
    tf.keras.mixed_precision.set_global_policy("float32")
