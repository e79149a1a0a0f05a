"""Several steps of the model that owns its run are made before the host looks at them."""

import numpy as np
import pytest

pytest.importorskip("tensorflow")
import tensorflow as tf

import hidden_state_accountants as hsa
from hidden_state_adapters.tf_privacy import HiddenStateSequential

RECORDS, FEATURES, BATCH = 24, 4, 2
PERIOD = RECORDS // BATCH
X = np.random.default_rng(0).normal(size=(RECORDS, FEATURES)).astype("float32")
Y = np.arange(RECORDS) % 3


def make(*, optimizer=None, stack=None, loss_geometry=None, **compile):
    model = HiddenStateSequential(
        stack or [tf.keras.layers.Dense(3, kernel_initializer="ones")],
        l2_norm_clip=0.5,
        noise_multiplier=0.0,
        batch_order="cyclic",
        loss_geometry=loss_geometry,
    )
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer or tf.keras.optimizers.SGD(0.5), loss, **compile)
    return model


def fit(model, x=X, **kwargs):
    return model.fit(x, Y, batch_size=BATCH, verbose=0, **kwargs)


class Seen(tf.keras.callbacks.Callback):
    """The calls after a batch, and how many steps were recorded then."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def on_train_batch_end(self, batch, logs=None):
        self.calls.append((batch, self.model.privacy_event.num_steps))


@pytest.mark.parametrize("given", [1, 5, PERIOD])
def test_every_step_is_recorded(given):
    rate = tf.keras.optimizers.schedules.PiecewiseConstantDecay([6], [0.5, 0.25])
    seen = Seen()
    model = make(optimizer=tf.keras.optimizers.SGD(rate), steps_per_execution=given)
    fit(model, epochs=2, callbacks=[seen])
    event = model.privacy_event
    assert list(event.per_step("learning_rate")) == [0.5] * 7 + [0.25] * (2 * PERIOD - 7)
    ends = [min(end, PERIOD) for end in range(given, PERIOD + given, given)]
    assert seen.calls == [(end - 1, epoch * PERIOD + end) for epoch in range(2) for end in ends]


def test_callbacks_that_wait_for_batches_see_each():
    seen = Seen()
    fit(make(), callbacks=[seen])
    assert [batch for batch, _ in seen.calls] == list(range(PERIOD))


def test_without_them_several_steps_are_made_at_once(monkeypatch):
    """As many as take a moment, an endless one in all tests; the next fit knows how many."""
    calls = []
    record = tf.keras.callbacks.CallbackList.on_train_batch_end

    def noted(callbacks, batch, logs=None):
        calls.append(batch)
        return record(callbacks, batch, logs)

    monkeypatch.setattr(tf.keras.callbacks.CallbackList, "on_train_batch_end", noted)
    together, alone = make(), make(steps_per_execution=1)
    fit(together, epochs=2, validation_data=(X, Y))
    fit(together)
    assert calls == [0, 8, 11, 11, 11]
    assert together.privacy_event.num_steps == 3 * PERIOD
    fit(alone, epochs=3)
    for own, other in zip(together.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(own, other, atol=1e-6)


def test_after_a_refused_step_none_is_taken():
    """Batches 0, 1, 2 are fine, the others would be as well."""
    x = X.copy()
    x[3 * BATCH] *= 100
    declared = hsa.LossGeometry.convex(1e6, lipschitz=20.0)
    model = make(steps_per_execution=PERIOD, loss_geometry=declared)
    with pytest.raises(hsa.UnsupportedRunError, match=r"step 4 ends the run.*is longer"):
        fit(model, x=x)
    alone = make()
    alone.fit(x[: 4 * BATCH], Y[: 4 * BATCH], batch_size=BATCH, verbose=0)
    for own, other in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(own, other, atol=1e-6)
    with pytest.raises(hsa.UnsupportedRunError):
        model.get_epsilon(1e-5)


class Moves(tf.keras.layers.Layer):
    """Changes the weights of another layer in a forward pass of training."""

    def __init__(self, own):
        super().__init__()
        self._own, self.passes = [own], 0

    def call(self, features, training=None):
        if training:
            kernel = self._own[0].kernel
            kernel.assign(kernel + 1e-7)
        return features


def test_weights_that_change_between_two_steps_of_one_execution_are_found():
    head = tf.keras.layers.Dense(3, kernel_initializer="ones")
    head.build((None, FEATURES))
    model = make(stack=[Moves(head), head], steps_per_execution=PERIOD)
    with pytest.raises(hsa.UnsupportedRunError):
        fit(model)


@pytest.mark.parametrize("given", [0, 1.5, "auto"])
def test_a_number_is_asked_for(given):
    with pytest.raises((TypeError, ValueError), match="steps_per_execution"):
        make(steps_per_execution=given)
