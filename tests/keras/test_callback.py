"""What HiddenStateCallback shows: epsilon per epoch, report, assumptions, releases."""

import pickle

import numpy as np
import pytest
from dp_accounting import NeighboringRelation

pytest.importorskip("tensorflow_privacy")
import tensorflow as tf

import hidden_state_accountants as hsa
from hidden_state_accountants.guarantee import Status
from hidden_state_adapters.tf_privacy import (
    CyclicDPKerasSGDOptimizer,
    HiddenStateCallback,
    compute_last_iterate_privacy_statement,
    cyclic_dataset,
)

pytestmark = pytest.mark.usefixtures("row_by_row")
DELTA = 1e-5


def test_epsilon_of_every_epoch_in_the_logs_and_the_progress_bar(make_run, capsys):
    run = make_run(callback={"target_delta": DELTA})
    history = run.fit(epochs=3, verbose=2).history["epsilon_if_released_now"]
    for epoch, epsilon in enumerate(history, 1):
        event = run.callback.privacy_event
        event = hsa.LastIterateDpEvent.from_dict({**event.to_dict(), "num_steps": 6 * epoch})
        exact = hsa.LastIterateAccountant().compose(event).get_epsilon(DELTA)
        assert epsilon == pytest.approx(exact, rel=1e-9)
    assert f"epsilon_if_released_now: {history[-1]:.4f}" in capsys.readouterr().out
    assert "Privacy of the released model" in run.callback.report()


def test_without_target_delta_the_logs_are_those_of_keras(make_run):
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


def test_foreign_callbacks_are_an_assumption(make_run):
    class Mine(tf.keras.callbacks.Callback):
        pass

    run = make_run()
    run.fit(callbacks=[Mine(), tf.keras.callbacks.TerminateOnNaN()])
    texts = [a.text for a in run.callback.assumptions]
    assert sum("of these Mine release nothing" in text for text in texts) == 1


def test_arrays_that_keras_shuffles_are_refused(make_run):
    run = make_run()
    arrays = [np.concatenate(parts) for parts in zip(*run.data, strict=True)]
    with pytest.raises(hsa.UnsupportedRunError, match="fit on a dataset of cyclic_dataset"):
        run.model.fit(*arrays, batch_size=4, callbacks=[run.callback], verbose=0)
    # A callback that asks the right data for batches changes nothing.
    evaluates = tf.keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: run.model.evaluate(run.data, verbose=0)
    )
    others = run.callback.with_others(evaluates)
    with pytest.raises(hsa.UnsupportedRunError, match="fit on a dataset of cyclic_dataset"):
        run.model.fit(*arrays, batch_size=4, callbacks=others, verbose=0)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupted_fit_has_no_epsilon(make_run, error):
    """It may have been interrupted because the model was good."""
    run = make_run()

    def interrupt(epoch, logs):
        run.callback.release()
        with pytest.raises(hsa.UnsupportedRunError, match="Within fit only target_delta"):
            run.callback.get_epsilon(DELTA)
        raise error

    stop = tf.keras.callbacks.LambdaCallback(on_epoch_end=interrupt)
    with pytest.raises(error):
        run.fit(callbacks=[stop], epochs=3)
    for act in (
        lambda: run.callback.get_epsilon(DELTA),
        lambda: run.callback.privacy_event,
        lambda: run.callback.report(DELTA),
        run.fit,
        run.callback.release,
    ):
        with pytest.raises(hsa.UnsupportedRunError, match="fit was interrupted"):
            act()


def test_a_fit_that_was_interrupted_before_its_first_step_is_none(make_run):
    run = make_run()

    def interrupt(logs):
        raise KeyboardInterrupt

    stop = tf.keras.callbacks.LambdaCallback(on_train_begin=interrupt)
    with pytest.raises(KeyboardInterrupt):
        run.fit(callbacks=[stop])
    with pytest.raises(ValueError, match="at least one step"):
        run.callback.get_epsilon(DELTA)
    run.fit()
    assert run.callback.privacy_event.num_steps == 6


def declared(run):
    return [a.text for a in run.callback.assumptions if a.status is Status.DECLARED]


class OfTheWeights(tf.keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step):
        return 0.5


@pytest.mark.parametrize(
    ("rate", "callbacks", "is_listed"),
    [
        (0.5, [], False),
        (tf.keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.9), [], False),
        (OfTheWeights(), [], True),
        (lambda: 0.5, [], True),
        (
            0.5,
            [tf.keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / (1 + epoch))],
            True,
        ),
    ],
    ids=["number", "schedule of Keras", "schedule", "function", "set"],
)
def test_learning_rates_that_may_come_from_the_weights_are_an_assumption(
    make_run, rate, callbacks, is_listed
):
    run = make_run(optimizer={"learning_rate": rate})
    run.fit(callbacks=callbacks, epochs=2)
    text = "the learning rates that were set or computed during the run depend neither on the"
    assert any(text in line for line in declared(run)) is is_listed


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
        assert (run.callback.privacy_event.dataset_size, run.callback.privacy_event.batch_size) == (
            24,
            4,
        )
    for sizes in ({"dataset_size": 28}, {"batch_size": 6}):
        with pytest.raises(hsa.UnsupportedRunError, match="of the data"):
            make_run(callback={"data": None, **sizes}).fit()


def test_before_the_first_step(make_run):
    callback = make_run().callback
    for act in (
        lambda: callback.privacy_event,
        lambda: callback.report(DELTA),
        lambda: callback.get_epsilon(DELTA),
        lambda: callback.assumptions,
    ):
        with pytest.raises(ValueError, match="at least one step"):
            act()
    with pytest.raises(hsa.UnsupportedRunError, match="pickled"):
        pickle.dumps(callback)


@pytest.mark.parametrize(
    ("kwargs", "kind", "text"),
    [
        ({"data": np.ones(4)}, TypeError, "cyclic_dataset as data"),
        ({"target_delta": -0.1}, ValueError, "target_delta"),
        ({"neighboring_relation": "REPLACE"}, ValueError, "neighboring_relation"),
        ({"neighboring_relation": "add_or_remove_one"}, hsa.UnsupportedRunError, "cannot add"),
        (
            {"neighboring_relation": NeighboringRelation.ADD_OR_REMOVE_ONE},
            hsa.UnsupportedRunError,
            "cannot add or remove",
        ),
    ],
)
def test_impossible_arguments(kwargs, kind, text):
    with pytest.raises(kind, match=text):
        HiddenStateCallback(**{"data": cyclic_dataset(np.ones(4), batch_size=4), **kwargs})
