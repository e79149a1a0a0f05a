"""Choices by metrics, weights the optimizer did not leave and repeated noise raise in fit.

See docs/threat_model.md. What every optimizer
refuses is in tests/misuse/misuse.py.
"""

import pytest

pytest.importorskip("tensorflow_privacy")
import tensorflow as tf
from keras_fit import callbacks
from misuse import each_row

import hidden_state_accountants as hsa


def nudge(run):
    run.variables[0].assign_add(1e-6 * tf.ones_like(run.variables[0]))


# Choices by metrics.


def early_stopping(run):
    run.fit(callbacks=[callbacks.EarlyStopping(monitor="loss", restore_best_weights=True)])


def best_checkpoint(run):
    run.fit(callbacks=[callbacks.ModelCheckpoint("unused", monitor="loss", save_best_only=True)])


def stopped_by_a_callback(run):
    stop = callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: setattr(run.model, "stop_training", True)
    )
    run.fit(callbacks=[stop], epochs=3)


# Weights that the optimizer did not leave.


def nudged_after_an_epoch(run):
    """By a callback whose turn comes first."""
    swap = callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: nudge(run))
    run.model.fit(run.data, callbacks=[swap, run.callback], epochs=2, verbose=0)


def nudged_before_an_epoch(run):
    """By a callback whose turn comes last."""
    swap = callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: epoch and nudge(run))
    run.fit(callbacks=[swap], epochs=2)


def nudged_between_two_fits(run):
    run.fit()
    nudge(run)
    run.fit()


def nudged_after_a_part_of_an_epoch(run):
    run.fit(steps_per_epoch=2)
    assert run.callback.privacy_event.num_steps == 2
    nudge(run)
    run.callback.get_epsilon(1e-5)


def trained_on_one_batch_between_two_fits(run):
    run.fit()
    run.model.train_on_batch(run.x[:4], run.y[:4])
    run.fit()


def other_optimizer_within_the_run(run):
    run.fit()
    run.model.compile(type(run.optimizer).from_config(run.optimizer.get_config()), run.model.loss)
    run.fit()


def other_kind_of_optimizer(run):
    run.model.compile("sgd", "mse")
    run.fit()


def backup_and_restore(run):
    run.fit(callbacks=[callbacks.BackupAndRestore("unused")])


# Noise


def csv_logger(run):
    run.fit(callbacks=[callbacks.CSVLogger("unused")])


def resumed_from_a_file_in_the_same_record(run):
    run.fit()
    run.model.save("model.keras")
    run.model = tf.keras.models.load_model("model.keras")
    run.fit()


CASES = [
    (2, early_stopping, "got EarlyStopping"),
    (2, best_checkpoint, "save_best_only"),
    (2, stopped_by_a_callback, "stopped early"),
    (11, nudged_after_an_epoch, "changed outside the private optimizer"),
    (11, nudged_before_an_epoch, "changed outside the private optimizer"),
    (11, nudged_between_two_fits, "changed outside the private optimizer"),
    (11, nudged_after_a_part_of_an_epoch, "changed outside the private optimizer"),
    (1, trained_on_one_batch_between_two_fits, "took 7 steps, but 6 are recorded"),
    (11, other_optimizer_within_the_run, "got another one"),
    (11, other_kind_of_optimizer, "Expected a CyclicDPKerasSGDOptimizer"),
    (13, backup_and_restore, "BackupAndRestore"),
    (13, resumed_from_a_file_in_the_same_record, "got another one"),
    (17, csv_logger, "no CSVLogger"),
]


@pytest.mark.usefixtures("row_by_row")
@each_row(("act", "text"), CASES)
def test_refused(make_run, act, text):
    run = make_run()
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        act(run)
