"""Another loss, microbatches, precision or options than declared raise in Model.fit.

See docs/threat_model.md. What every optimizer
refuses is in tests/misuse/misuse.py.
"""

import numpy as np
import pytest

pytest.importorskip("tensorflow_privacy")
import tensorflow as tf
from keras_fit import compile_with
from misuse import each_row

import hidden_state_accountants as hsa
from hidden_state_adapters.tf_privacy import cyclic_dataset

layers = tf.keras.layers


# Rows 4 to 7 and 9: another loss, longer features, microbatches.


def reduced_loss(run):
    compile_with(run, tf.keras.losses.BinaryCrossentropy(from_logits=True))
    run.fit()


class TenTimes(tf.keras.losses.BinaryCrossentropy):
    def call(self, y_true, y_pred):
        return 10.0 * super().call(y_true, y_pred)


def scaled_loss(run):
    compile_with(run, TenTimes(from_logits=True, reduction="none"))
    run.fit()


def loss_weights(run):
    compile_with(run, loss_weights=[0.5])
    run.fit()


def class_weights(run):
    run.fit(class_weight={0: 1.0, 1: 3.0})


def regularised(run, **kwargs):
    run.model = tf.keras.Sequential([layers.Dense(1, **kwargs)])
    compile_with(run)
    run.fit()


def kernel_regularizer(run):
    regularised(run, kernel_regularizer="l2")


def activity_regularizer(run):
    regularised(run, activity_regularizer="l2")


def trained_batch_normalisation(run):
    run.model = tf.keras.Sequential([layers.BatchNormalization(), layers.Dense(1)])
    compile_with(run)
    run.fit()


def batch_normalisation_without_running_statistics(run):
    synchronised = layers.experimental.SyncBatchNormalization(momentum=1.0)
    run.model = tf.keras.Sequential([synchronised, layers.Dense(1)])
    compile_with(run)
    run.fit()


def stateful_layer(run):
    run.model = tf.keras.Sequential([layers.SimpleRNN(1, stateful=True)])
    run.model.build((4, 2, 2))
    compile_with(run)
    run.fit()


class Counts(layers.Layer):
    def build(self, shape):
        self.total = self.add_weight(name="total", shape=[], trainable=False, initializer="zeros")

    def call(self, inputs):
        self.total.assign_add(tf.reduce_sum(inputs))
        return inputs


def layer_that_sums_the_examples(run):
    run.model = tf.keras.Sequential([Counts(), layers.Dense(1)])
    compile_with(run)
    run.fit()


# Options of parts of the model


def constraint_on_one_variable(run):
    run.model = tf.keras.Sequential([layers.Dense(1, bias_constraint="non_neg")])
    compile_with(run)
    run.fit()


def with_policy(run, policy):
    run.model = tf.keras.Sequential([layers.Dense(1, dtype=policy)])
    compile_with(run)
    run.fit()


def mixed_float16(run):
    with_policy(run, "mixed_float16")


def float16(run):
    with_policy(run, "float16")


def loss_scaling(run):
    run.optimizer = tf.keras.mixed_precision.LossScaleOptimizer(run.optimizer)
    compile_with(run)
    run.fit()


CASES = [
    (4, reduced_loss, "got a scalar"),
    (4, scaled_loss, "longer than loss_geometry.lipschitz"),
    (4, loss_weights, "loss_weights=None"),
    (7, class_weights, "data with class_weight"),
    (9, kernel_regularizer, "no regularisation losses"),
    (9, activity_regularizer, "got a scalar|no regularisation losses"),
    (5, trained_batch_normalisation, "no trainable batch normalisation"),
    (5, batch_normalisation_without_running_statistics, "no trainable batch normalisation"),
    (5, stateful_layer, "stateful=True"),
    (5, layer_that_sums_the_examples, "variable that is not trained was changed"),
    (3, constraint_on_one_variable, "without a constraint"),
    (10, mixed_float16, "precision"),
    (10, float16, "float32 or float64"),
    (10, loss_scaling, "BlockCoordinateKerasOptimizer in compile, got LossScaleOptimizer"),
]


@pytest.mark.usefixtures("row_by_row")
@each_row(("act", "text"), CASES)
def test_refused(make_run, act, text):
    run = make_run()
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        act(run)


def test_a_run_that_a_refused_step_ended_is_not_accounted(make_run):
    run = make_run()
    run.fit()
    data = cyclic_dataset(np.r_[run.x[:12], 5.0 * run.x[12:]], run.y, batch_size=4)
    run.callback._data = data  # as if the change were not noticed
    with pytest.raises(hsa.UnsupportedRunError, match="step 10 ends the run"):
        run.fit(data)
    run.data = data
    for act in (lambda: run.callback.report(1e-5), lambda: run.callback.privacy_event, run.fit):
        with pytest.raises(hsa.UnsupportedRunError, match="step 10 ends the run"):
            act()


def test_tensorfloat_32_is_refused(make_run, monkeypatch):
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [kind])
    with pytest.raises(hsa.UnsupportedRunError, match="TensorFloat-32"):
        make_run().fit()
    make_run(optimizer={"loss_geometry": None}).fit()
