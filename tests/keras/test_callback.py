"""What HiddenStateCallback shows: epsilon per epoch, report, assumptions, releases."""

import pickle

import attrs
import numpy as np
import pytest
from dp_accounting import NeighboringRelation

pytest.importorskip("tensorflow_privacy")
import tensorflow as tf
from keras_models import DELTA

import hidden_state_accountants as hsa
from hidden_state_accountants.guarantee import Status
from hidden_state_adapters.tf_privacy import (
    CyclicDPKerasSGDOptimizer,
    HiddenStateCallback,
    compute_last_iterate_privacy_statement,
    cyclic_dataset,
)

pytestmark = pytest.mark.usefixtures("row_by_row")
callbacks, schedules = tf.keras.callbacks, tf.keras.optimizers.schedules


def test_epsilon_of_every_epoch_in_the_logs_and_the_progress_bar(make_run, capsys):
    run = make_run(callback={"target_delta": DELTA})
    history = run.fit(epochs=3, verbose=2).history["epsilon_if_released_now"]
    event = run.callback.privacy_event
    for epoch, epsilon in enumerate(history, 1):
        so_far = hsa.LastIterateAccountant().compose(attrs.evolve(event, num_steps=6 * epoch))
        assert epsilon == pytest.approx(so_far.get_epsilon(DELTA), rel=1e-9)
    assert f"epsilon_if_released_now: {history[-1]:.4f}" in capsys.readouterr().out
    assert "Privacy of the released model" in run.callback.report()
    run = make_run()
    assert set(run.fit().history) == {"loss"}
    with pytest.raises(ValueError, match="Expected delta, got None"):
        run.callback.report()


@pytest.mark.parametrize(
    "relation", [NeighboringRelation.REPLACE_SPECIAL, NeighboringRelation.REPLACE_ONE]
)
def test_report(make_run, relation):
    run = make_run(
        optimizer={"projection_radius": 2.0}, callback={"neighboring_relation": relation}
    )
    run.fit(epochs=2)
    text = run.callback.report(DELTA)
    plain = compute_last_iterate_privacy_statement(run.callback.privacy_event, DELTA, relation)
    figures = [line for line in plain.splitlines() if line.startswith("epsilon ")]
    assert len(figures) == 2
    assert all(line in text for line in figures)
    flat = " ".join(text.split())
    for part in (
        "checked by the software: - batches of equal size",
        "all variables together within 2 of 0",
        "per-example gradient norms at most 1.41421",
        "losses and metrics of the training data (History, progress bar) stay private",
    ):
        assert part in flat


class OfTheWeights(schedules.LearningRateSchedule):
    def __call__(self, step):
        return 0.5


class Mine(callbacks.Callback):
    pass


COMPUTED = "the learning rates that were set or computed during the run depend neither on the"
FOREIGN = "of these Mine release nothing"


@pytest.mark.parametrize(
    ("rate", "more", "texts"),
    [
        (schedules.ExponentialDecay(0.5, 1, 0.9), [], []),
        (OfTheWeights(), [], [COMPUTED]),
        (lambda: 0.5, [], [COMPUTED]),
        (0.5, [callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)], [COMPUTED]),
        (0.5, [Mine(), callbacks.TerminateOnNaN()], [FOREIGN]),
    ],
    ids=["schedule of Keras", "schedule", "function", "set", "callback"],
)
def test_what_may_depend_on_the_weights_is_an_assumption(make_run, rate, more, texts):
    run = make_run(optimizer={"learning_rate": rate})
    run.fit(callbacks=more, epochs=2)
    listed = [a.text for a in run.callback.assumptions if a.status is Status.DECLARED]
    assert [text for text in (COMPUTED, FOREIGN) if any(text in one for one in listed)] == texts


def test_arrays_that_keras_shuffles_are_refused(make_run):
    """A callback that asks the right data for batches changes nothing."""
    run = make_run()
    evaluates = callbacks.LambdaCallback(
        on_train_begin=lambda logs: run.model.evaluate(run.data, verbose=0)
    )
    for others in ([run.callback], run.callback.with_others(evaluates)):
        with pytest.raises(hsa.UnsupportedRunError, match="fit on a dataset of cyclic_dataset"):
            run.model.fit(run.x, run.y, batch_size=4, callbacks=others, verbose=0)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupted_fit_has_no_epsilon(make_run, error):
    """It may have been interrupted because the model was good; before a step it was no fit."""
    run = make_run()

    def interrupt(*_):
        if run.model.optimizer.last_step.steps:
            run.callback.release()
            with pytest.raises(hsa.UnsupportedRunError, match="Within fit only target_delta"):
                run.callback.get_epsilon(DELTA)
        raise error

    with pytest.raises(error):
        run.fit(callbacks=[callbacks.LambdaCallback(on_train_begin=interrupt)])
    questions = (
        lambda: run.callback.privacy_event,
        lambda: run.callback.report(DELTA),
        lambda: run.callback.get_epsilon(DELTA),
    )
    for ask in questions:
        with pytest.raises(ValueError, match="at least one step"):
            ask()
    run.fit()
    assert run.callback.privacy_event.num_steps == 6
    with pytest.raises(error):
        run.fit(callbacks=[callbacks.LambdaCallback(on_epoch_end=interrupt)], epochs=3)
    for ask in (*questions, run.fit, run.callback.release):
        with pytest.raises(hsa.UnsupportedRunError, match="fit was interrupted"):
            ask()


def test_a_file_that_a_callback_before_it_writes_is_a_release(make_run):
    run = make_run()
    write = callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, _: batch == 1 and run.model.save_weights("a.weights.h5")
    )
    run.model.fit(run.data, callbacks=[write, run.callback], verbose=0)
    assert run.callback.privacy_event.release_steps == (2,)


def test_models_that_are_not_built_and_have_several_inputs_and_dropout():
    inputs = {name: tf.keras.Input([3], name=name) for name in "ab"}
    joined = tf.keras.layers.Concatenate()(list(inputs.values()))
    functional = tf.keras.Model(inputs, tf.keras.layers.Dense(2)(joined))
    lazy = tf.keras.Sequential([tf.keras.layers.Dropout(0.5), tf.keras.layers.Dense(2)])
    x, y = np.ones((12, 3), "float32"), np.arange(12) % 2
    for model, data in ((functional, {"a": x, "b": x}), (lazy, x)):
        model.compile(
            CyclicDPKerasSGDOptimizer(1.0, 1.0, projection_radius=10.0),
            tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none"),
            metrics=["accuracy"],
        )
        batches = cyclic_dataset(data, y, batch_size=4)
        callback = HiddenStateCallback(data=batches)
        model.fit(batches, callbacks=[callback], verbose=0)
        assert callback.privacy_event.num_steps == 3
        assert callback.privacy_event.loss is None  # nothing declared: composition
        assert "composition" in callback.guarantee.theorem.lower()


def test_the_dataset_that_fit_asks_for_batches_is_found(make_run):
    for sizes in ({}, {"dataset_size": 24, "batch_size": 4}):
        run = make_run(callback={"data": None, **sizes})
        run.fit()
        event = run.callback.privacy_event
        assert (event.dataset_size, event.batch_size) == (24, 4)
    for sizes in ({"dataset_size": 28}, {"batch_size": 6}):
        with pytest.raises(hsa.UnsupportedRunError, match="of the data"):
            make_run(callback={"data": None, **sizes}).fit()


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"data": np.ones(4)}, TypeError, "cyclic_dataset as data"),
        ({"target_delta": -0.1}, ValueError, "target_delta"),
        ({"neighboring_relation": "REPLACE"}, ValueError, "neighboring_relation"),
        ({"neighboring_relation": "add_or_remove_one"}, hsa.UnsupportedRunError, "cannot add"),
    ],
)
def test_impossible_arguments(make_run, arguments, kind, text):
    with pytest.raises(kind, match=text):
        make_run(callback=arguments)


def test_it_is_not_pickled(make_run):
    with pytest.raises(hsa.UnsupportedRunError, match="pickled"):
        pickle.dumps(make_run().callback)
