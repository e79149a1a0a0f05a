"""Microbatches: what the event says of them is what ran."""

import math

import attrs
import numpy as np
import pytest

pytest.importorskip("tensorflow_privacy")
import tensorflow as tf
from keras_models import EXPECTED

import hidden_state_accountants as hsa
from hidden_state_adapters.tf_privacy import CyclicDPKerasSGDOptimizer

pytestmark = pytest.mark.usefixtures("row_by_row")
DELTA = 1e-5


def pairs(event):
    """With microbatches of two examples: by composition."""
    return attrs.evolve(
        event,
        batch_size=event.batch_size // 2,
        dataset_size=event.dataset_size // 2,
        loss=None,
        is_microbatched=True,
    )


@pytest.mark.parametrize("relation", ["REPLACE_SPECIAL", "REPLACE_ONE"])
def test_the_account_of_pairs(make_run, relation):
    """Under either relation that of REPLACE_ONE: never that of one example."""
    run = make_run(
        optimizer={"num_microbatches": 2},
        callback={"neighboring_relation": relation, "target_delta": DELTA},
    )
    history = run.fit(epochs=2).history
    assert run.callback.privacy_event == pairs(EXPECTED)
    epsilon = run.callback.get_epsilon(DELTA)
    assert epsilon == history["epsilon_if_released_now"][-1]
    assert epsilon > hsa.LastIterateAccountant().compose(EXPECTED).get_epsilon(DELTA)
    text = " ".join(run.callback.report(DELTA).split())
    assert "in microbatches of 2" in text
    assert "moves it by up to twice the clip norm" in text


def test_the_noise_of_a_step():
    size, rows = 20_000, 4
    variable = tf.Variable(tf.zeros([size]))
    optimizer = CyclicDPKerasSGDOptimizer(3.0, 2.0, 2, learning_rate=0.25)
    optimizer.minimize(lambda: tf.zeros([rows]) * tf.reduce_sum(variable), [variable])
    # As the event says: of two records a batch.
    expected = 0.25 * 3.0 * 2.0 / 2
    assert np.std(variable.numpy()) == pytest.approx(expected, rel=6 / math.sqrt(2 * size))


def test_what_is_refused(make_run):
    with pytest.raises(hsa.UnsupportedRunError, match="num_microbatches to divide"):
        make_run(optimizer={"num_microbatches": 3}).fit()
    with pytest.raises(hsa.UnsupportedRunError, match="gradient_accumulation_steps = 1, got 3"):
        make_run(optimizer={"gradient_accumulation_steps": 3})
