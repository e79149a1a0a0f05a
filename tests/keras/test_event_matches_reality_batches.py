"""Batches that are not the declared ones raise in Model.fit.

See docs/threat_model.md.
"""

import pytest

pytest.importorskip("tensorflow_privacy")
import tensorflow as tf
from keras_fit import at_batch, compile_with
from misuse import each_row

import hidden_state_accountants as hsa
from hidden_state_adapters.tf_privacy import cyclic_dataset

# Batches that are not the declared ones.


def arrays(run):
    run.fit(run.x, y=run.y, batch_size=4, shuffle=False)


def shuffled_dataset(run):
    run.fit(run.data.shuffle(6))


def part_of_an_epoch(run):
    run.fit(steps_per_epoch=3, epochs=2)


def other_data_in_the_second_fit(run):
    run.fit()
    run.fit(cyclic_dataset(run.x[::-1], run.y[::-1], batch_size=4))


def interrupted_epoch(run):
    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.fit(callbacks=[at_batch(2, interrupt)])
    run.fit()


def fit_without_the_callback(run):
    run.fit()
    run.model.fit(run.data, verbose=0)
    run.callback.report(1e-5)


def fit_without_the_callback_before(run):
    run.model.fit(run.data, verbose=0)
    run.fit()


def train_on_batch_within_an_epoch(run):
    extra = at_batch(1, lambda: run.model.train_on_batch(run.x[:4], run.y[:4]))
    run.fit(callbacks=[extra])


class TwoSteps(tf.keras.Sequential):
    def train_step(self, data):
        super().train_step(data)
        return super().train_step(data)


def two_steps_on_every_batch(run):
    run.model = TwoSteps(run.model.layers)
    compile_with(run)
    run.fit()


def several_steps_per_execution(run):
    run.model.compile(
        run.optimizer,
        tf.keras.losses.BinaryCrossentropy(from_logits=True, reduction="none"),
        steps_per_execution=2,
    )
    run.fit()


CASES = [
    (1, arrays, "fit on a dataset of cyclic_dataset"),
    (1, shuffled_dataset, "not known"),
    (1, part_of_an_epoch, "batch 0, expected|of batch 3"),
    (1, other_data_in_the_second_fit, "fit on a dataset of cyclic_dataset"),
    (1, interrupted_epoch, "fit was interrupted"),
    (1, fit_without_the_callback, "took 12 steps, but 6 are recorded"),
    (1, fit_without_the_callback_before, "not recorded"),
    (1, train_on_batch_within_an_epoch, "has taken 4 steps, expected 3"),
    (1, two_steps_on_every_batch, "has taken 2 steps, expected 1"),
    (1, several_steps_per_execution, "taken 2 steps, expected 1: one for every batch"),
]


@pytest.mark.usefixtures("row_by_row")
@each_row(("act", "text"), CASES)
def test_refused(make_run, act, text):
    run = make_run()
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        act(run)
