"""Every guarantee lists what docs/threat_model.md says that you declare."""

import pytest

pytest.importorskip("tensorflow")
import keras_models
import tensorflow as tf
from declared_lines import FIXED_RECORDS, GEOMETRY, OF_EVERY_RUN, listed
from keras_models import SGD, X, Y

import hidden_state_accountants as hsa
import hidden_state_adapters.tf_privacy as adapter

pytestmark = pytest.mark.usefixtures("row_by_row", "without_graphs")
EVERY = (*OF_EVERY_RUN, FIXED_RECORDS, GEOMETRY)
SOFTMAX = hsa.LossGeometry.softmax_cross_entropy(1.0, bias=True)
KINDS = {
    "head": ({"loss_geometry": "auto", "feature_norm": 1.0}, (FIXED_RECORDS,)),
    "declared": ({"loss_geometry": SOFTMAX}, (FIXED_RECORDS, GEOMETRY)),
    "composition": ({}, ()),
}


def settings(options):
    return {"l2_norm_clip": 2.1, "noise_multiplier": 2.0, "batch_order": "cyclic", **options}


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_and_a_run(kind):
    options, more = KINDS[kind]
    model = keras_models.make(SGD(0.1, weight_decay=0.1), **settings(options))
    keras_models.fit(model, epochs=3)
    run = adapter.PrivateRun(
        tf.keras.Sequential([tf.keras.layers.Dense(2)]), X, Y, loss=keras_models.crossentropy(),
        batch_size=4, optimizer=SGD(0.1, weight_decay=0.1), **settings(options),
    )  # fmt: skip
    run.train(3, verbose=False)
    for told in (model, run):
        assert listed(told.guarantee, EVERY) == [*OF_EVERY_RUN, *more]
        assert told.guarantee.assumptions == told.assumptions


@pytest.mark.skipif(adapter.keras_api.IS_KERAS_3, reason="of TensorFlow Privacy")
def test_a_callback(make_run):
    pytest.importorskip("tensorflow_privacy")
    run = make_run()
    run.fit(epochs=3)
    assert listed(run.callback.guarantee, EVERY) == list(EVERY)
