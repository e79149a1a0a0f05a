"""Model and loss are looked at again: they may become others while the run goes on."""

import numpy as np
import pytest

pytest.importorskip("tensorflow_privacy")
import tensorflow as tf

import hidden_state_accountants as hsa
from hidden_state_adapters.tf_privacy import (
    CyclicDPKerasSGDOptimizer,
    HiddenStateCallback,
    cyclic_dataset,
)

RECORDS, BATCH = 6, 2
layers, losses = tf.keras.layers, tf.keras.losses
pytestmark = pytest.mark.usefixtures("row_by_row")


class Run:
    """A linear head on unit features; the loss is read off, if it `is_known`."""

    def __init__(self, loss, before=(), is_known=True):
        self.head = layers.Dense(2, use_bias=False, kernel_initializer="zeros")
        self.loss, self.optimizer = loss, CyclicDPKerasSGDOptimizer(1.5, 4.0, learning_rate=0.2)
        x = np.random.default_rng(0).normal(size=(RECORDS, 3)).astype("float32")
        x /= np.linalg.norm(x, axis=1, keepdims=True)
        y = np.arange(RECORDS) % 2
        if isinstance(loss, losses.MeanSquaredError):
            y = np.eye(2, dtype="float32")[y]
        self.data = cyclic_dataset(x, y, batch_size=BATCH)
        self.record = HiddenStateCallback(
            dataset_size=RECORDS,
            batch_size=BATCH,
            **({"loss_geometry": "auto", "feature_norm": 1.0} if is_known else {}),
        )
        self.compile([*before, self.head])

    def compile(self, parts):
        self.model = tf.keras.Sequential(parts)
        self.model.compile(self.optimizer, self.loss, run_eagerly=True)

    def fit(self, epochs=1, change=lambda epoch: None):
        begin = tf.keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, _: change(epoch))
        self.model.fit(self.data, epochs=epochs, callbacks=[self.record, begin], verbose=0)

    def refuses(self, text, act):
        with pytest.raises(hsa.UnsupportedRunError, match=text):
            act()
        with pytest.raises(hsa.UnsupportedRunError):
            self.record.get_epsilon(1e-5)


def cross_entropy():
    return losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")


def squared_error():
    return losses.MeanSquaredError(reduction="none")


def test_row102_a_scale_before_the_head_that_a_callback_changes():
    scale = tf.Variable(1.0, trainable=False)
    run = Run(squared_error(), [layers.Lambda(lambda x: x * scale)])
    raised = "features of the first batch at the linear layer as before"
    run.refuses(raised, lambda: run.fit(2, lambda epoch: scale.assign(1.0 + 4.0 * epoch)))


def test_row102_a_scale_that_is_changed_after_the_last_epoch():
    scale = tf.Variable(1.0, trainable=False)
    run = Run(squared_error(), [layers.Lambda(lambda x: x * scale)])
    run.fit()
    assert run.record.get_epsilon(1e-5) > 0
    run.fit(2, lambda epoch: scale.assign(3.0) if epoch == 1 else None)
    run.refuses("features of the first batch", lambda: run.record.privacy_event)


def test_row102_a_layer_that_is_added_between_two_calls_of_fit():
    run = Run(cross_entropy())
    run.fit()
    run.model.add(layers.Softmax())
    run.model.compile(run.optimizer, run.loss, run_eagerly=True)
    run.refuses("output of the model to be that of", run.fit)


def test_row102_another_model_around_the_same_head():
    run = Run(squared_error())
    run.fit()
    run.compile([layers.Rescaling(5.0), run.head])
    run.refuses("features of the first batch", run.fit)


def test_the_same_model_compiled_again_goes_on():
    run = Run(cross_entropy())
    run.fit()
    run.model.compile(run.optimizer, cross_entropy(), metrics=["accuracy"], run_eagerly=True)
    run.fit()
    assert run.record.privacy_event.num_steps == 6


class Warmed(losses.Loss):
    """A second term whose weight a callback sets, as in the annealing of a divergence."""

    def __init__(self, term):
        super().__init__(reduction="none")
        self.weight, self.term = tf.Variable(0.0, trainable=False), term

    def call(self, targets, outputs):
        plain = losses.sparse_categorical_crossentropy(targets, outputs, from_logits=True)
        return plain + self.weight * self.term(outputs)


def of_the_batch(outputs):
    return tf.reduce_sum(tf.square(outputs - tf.reduce_mean(outputs, axis=0)), axis=1)


def of_a_row(outputs):
    return tf.reduce_sum(tf.square(outputs), axis=1)


def test_row102_a_term_of_the_loss_that_mixes_the_batch_for_a_while():
    run = Run(Warmed(of_the_batch), is_known=False)

    def change(epoch):
        run.loss.weight.assign(float(epoch == 3))

    run.refuses("a loss of its own", lambda: run.fit(5, change))


def test_a_term_of_every_example_may_be_warmed_up():
    run = Run(Warmed(of_a_row), is_known=False)
    run.fit(3, lambda epoch: run.loss.weight.assign(epoch / 2))
    assert run.record.privacy_event.num_steps == 9
    assert run.record.get_epsilon(1e-5) > 0
