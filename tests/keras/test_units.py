"""Microbatches and accumulated gradients: what the event says of them is what ran."""

import math

import attrs
import numpy as np
import pytest
from dp_accounting import NeighboringRelation

pytest.importorskip("tensorflow_privacy")
import tensorflow as tf

import hidden_state_accountants as hsa
from hidden_state_adapters.tf_privacy import (
    CyclicDPKerasSGDOptimizer,
    HiddenStateRecorder,
    make_private,
)

DELTA = 1e-5
EXPECTED = hsa.LastIterateDpEvent(
    noise_multiplier=2.0,
    learning_rate=0.5,
    clip_norm=1.5,
    batch_size=4,
    dataset_size=24,
    num_steps=12,
    batch_order="cyclic",
    loss=hsa.LossGeometry.logistic(1.0, bias=True),
    weight_decay=0.1,
)
# The mean of two logistic losses is convex, but no generalised linear model.
MEANS = hsa.LossGeometry.convex(EXPECTED.loss.smoothness, EXPECTED.loss.lipschitz)


def pairs(event):
    """With microbatches of two examples."""
    return attrs.evolve(
        event,
        batch_size=event.batch_size // 2,
        dataset_size=event.dataset_size // 2,
        loss=MEANS,
        is_microbatched=True,
    )


def threes(event):
    """With three batches of each step accumulated."""
    return attrs.evolve(event, batch_size=12, num_steps=4, noise_multiplier=2.0 * math.sqrt(3.0))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"num_microbatches": 2}, pairs(EXPECTED)),
        ({"gradient_accumulation_steps": 3}, threes(EXPECTED)),
        ({"num_microbatches": 2, "gradient_accumulation_steps": 3}, pairs(threes(EXPECTED))),
        ({"num_microbatches": 4}, EXPECTED),
    ],
)
def test_the_event(make_run, arguments, expected):
    run = make_run(optimizer=arguments, callback={"target_delta": DELTA})
    history = run.fit(epochs=2).history
    event = run.callback.privacy_event
    assert event == attrs.evolve(expected, noise_multiplier=event.noise_multiplier)
    assert event.noise_multiplier == pytest.approx(expected.noise_multiplier, rel=1e-15)
    has_pairs = arguments.get("num_microbatches") == 2
    relation = NeighboringRelation["REPLACE_ONE" if has_pairs else "REPLACE_SPECIAL"]
    exact = hsa.LastIterateAccountant(relation).compose(expected).get_epsilon(DELTA)
    assert run.callback.get_epsilon(DELTA) == pytest.approx(exact)
    assert history["epsilon_if_released_now"][-1] == pytest.approx(exact)
    text = " ".join(run.callback.report(DELTA).split())
    rows = 12 if "gradient_accumulation_steps" in arguments else 4
    assert f"over 24 examples with {rows} examples per iteration" in text
    assert "(2 epochs) with" in text
    assert ("with microbatches of 2" in text) is has_pairs
    assert ("moves it by up to twice the clip norm" in text) is has_pairs
    assert ("3 accumulated batches are one step" in text) is (rows == 12)


@pytest.mark.parametrize("relation", ["REPLACE_SPECIAL", "REPLACE_ONE"])
def test_one_account_whoever_makes_the_steps(make_run, relation):
    """Under either relation that of REPLACE_ONE, as of the model: never that of one example."""
    run = make_run(optimizer={"num_microbatches": 2}, callback={"neighboring_relation": relation})
    run.fit(epochs=2)
    other = make_run(optimizer={"num_microbatches": 2})
    model = make_private(other.model, neighboring_relation=relation)
    model.compile(other.optimizer, other.model.loss)
    model.fit(run.x, run.y, batch_size=4, epochs=2, verbose=0)
    assert run.callback.privacy_event == model.privacy_event == pairs(EXPECTED)
    assert run.callback.get_epsilon(DELTA) == model.get_epsilon(DELTA)
    of_examples = hsa.LastIterateAccountant().compose(EXPECTED)
    assert model.get_epsilon(DELTA) > of_examples.get_epsilon(DELTA)


@pytest.mark.parametrize("accumulated", [1, 3])
def test_the_noise_of_a_step(accumulated):
    size, rows = 20_000, 4
    variable = tf.Variable(tf.zeros([size]))
    optimizer = CyclicDPKerasSGDOptimizer(3.0, 2.0, 2, accumulated, learning_rate=0.25)

    @tf.function
    def step():
        optimizer.minimize(lambda: tf.zeros([rows]) * tf.reduce_sum(variable), [variable])

    for _ in range(accumulated):
        assert not variable.numpy().any()
        step()
    # As the event says: of two records a batch.
    event_multiplier, event_batch = 2.0 * math.sqrt(accumulated), 2 * accumulated
    expected = 0.25 * 3.0 * event_multiplier / event_batch
    assert np.std(variable.numpy()) == pytest.approx(expected, rel=6 / math.sqrt(2 * size))


def test_an_own_loop_that_accumulates(make_run):
    run = accumulating(make_run)
    record = HiddenStateRecorder(run.model, run.optimizer, run.data)
    bce = tf.keras.losses.BinaryCrossentropy(from_logits=True, reduction="none")

    @tf.function
    def step(x, y):
        run.optimizer.minimize(lambda: bce(y, run.model(x)), run.model.trainable_variables)

    for _ in range(2):
        for x, y in record.batches():
            step(x, y)
    event = record.privacy_event
    assert event == attrs.evolve(threes(EXPECTED), noise_multiplier=event.noise_multiplier)


def accumulating(make_run, **kwargs):
    return make_run(optimizer={"gradient_accumulation_steps": 3}, **kwargs)


def unequal_microbatches(make_run):
    make_run(optimizer={"num_microbatches": 3}).fit()


def steps_across_epochs(make_run):
    make_run(optimizer={"gradient_accumulation_steps": 4}).fit()


def optimizer_that_had_steps_elsewhere(make_run):
    run = accumulating(make_run)
    run.optimizer.iterations.assign(2)
    run.fit()


def count_changed_during_the_run(make_run):
    run = accumulating(make_run)
    change = tf.keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: run.optimizer.iterations.assign_add(1)
    )
    run.fit(callbacks=[change])


def accumulation_changed_during_the_run(make_run):
    run = accumulating(make_run)
    run.fit()
    run.optimizer.gradient_accumulation_steps = 2
    run.fit()


def files_within_a_step(make_run):
    files = tf.keras.callbacks.ModelCheckpoint("unused", save_freq=2, save_weights_only=True)
    accumulating(make_run).fit(callbacks=[files])


def report_within_a_step(make_run):
    run = accumulating(make_run)
    record = HiddenStateRecorder(run.model, run.optimizer, run.data)
    bce = tf.keras.losses.BinaryCrossentropy(from_logits=True, reduction="none")

    @tf.function
    def step(x, y):
        run.optimizer.minimize(lambda: bce(y, run.model(x)), run.model.trainable_variables)

    for count, (x, y) in enumerate(record.batches(), 1):
        step(x, y)
        if count == 3:
            assert record.privacy_event.num_steps == 1
        if count == 4:
            record.release()


def clip_changed_within_a_step(make_run):
    run = accumulating(make_run, compile={"run_eagerly": True})
    query = run.optimizer._mean
    change = tf.keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: setattr(query, "noise_multiplier", 1.9)
    )
    run.fit(callbacks=[change])


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (unequal_microbatches, "num_microbatches to divide"),
        (steps_across_epochs, "divide the 6 batches of an epoch, got 4"),
        (optimizer_that_had_steps_elsewhere, "optimizer.iterations is 2 after 0 batches"),
        (count_changed_during_the_run, "optimizer.iterations is 3 after 2 batches"),
        (accumulation_changed_during_the_run, "accumulation were changed|to divide"),
        (files_within_a_step, "hold the gradients accumulated so far"),
        (report_within_a_step, "1 of 3 gradients of a step are accumulated"),
        (clip_changed_within_a_step, "noise, clip norm or decay changed"),
    ],
)
def test_refused(make_run, act, text):
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        act(make_run)
