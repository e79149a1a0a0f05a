"""What Model.fit does differently, where the event can express it, is accounted as it happened.

See docs/threat_model.md.
"""

import attrs
import numpy as np
import pytest

pytest.importorskip("tensorflow_privacy")
import tensorflow as tf
from keras_fit import callbacks

import hidden_state_accountants as hsa
from hidden_state_adapters.tf_privacy import cyclic_dataset

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


def two_epochs(run):
    run.fit(epochs=2)


def two_fits(run):
    run.fit()
    run.fit()


def evaluation_within_the_run(run):
    run.fit(validation_data=(run.x[:5], run.y[:5]), epochs=2)
    run.model.evaluate(run.x, run.y, verbose=0)
    run.model.predict(run.x, verbose=0)


def later_epochs(run):
    run.fit(epochs=5, initial_epoch=3)


@pytest.mark.parametrize("act", [two_epochs, two_fits, evaluation_within_the_run, later_epochs])
def test_accounted(make_run, act):
    run = make_run()
    act(run)
    assert run.callback.privacy_event == EXPECTED
    assert run.callback.get_epsilon(1e-5) == pytest.approx(
        hsa.LastIterateAccountant().compose(EXPECTED).get_epsilon(1e-5)
    )


@pytest.mark.parametrize("mode", [{"jit_compile": True}])
def test_accounted_in_every_mode(make_run, mode):
    run = make_run(compile=mode)
    run.fit()
    assert run.callback.privacy_event == attrs.evolve(EXPECTED, num_steps=6)


def test_learning_rates_are_those_that_were_used(make_run):
    run = make_run()
    scheduler = callbacks.LearningRateScheduler(lambda epoch, rate: 0.1 + 0.1 * epoch)
    run.fit(callbacks=[scheduler], epochs=2)
    assert run.callback.privacy_event == attrs.evolve(EXPECTED, learning_rate=[0.1] * 6 + [0.2] * 6)


def test_dropped_examples_do_not_count(make_run):
    x, y = (part.copy() for part in (make_run().x, make_run().y))
    x, y = np.r_[x, x[:2]], np.r_[y, y[:2]]
    for declared in (26, 24, None):
        data = cyclic_dataset(x, y, batch_size=4, drop_remainder=True)
        run = make_run(callback={"data": data, "dataset_size": declared})
        run.fit(data, epochs=2)
        assert run.callback.privacy_event == EXPECTED


def test_checkpoints_count_as_released(make_run, tmp_path):
    run = make_run()
    run.fit(callbacks=[callbacks.ModelCheckpoint(str(tmp_path / "a.keras"))], epochs=2)
    assert run.callback.privacy_event == attrs.evolve(EXPECTED, release_steps=(6,))
    run = make_run()
    every = callbacks.ModelCheckpoint(str(tmp_path / "b"), save_freq=1, save_weights_only=True)
    run.fit(callbacks=[every], epochs=2)
    assert run.callback.privacy_event.release_steps == tuple(range(1, 12))
    run = make_run(callback={"checkpoints_stay_private": True})
    run.fit(callbacks=[callbacks.ModelCheckpoint(str(tmp_path / "c.keras"))], epochs=2)
    assert run.callback.privacy_event == EXPECTED
    texts = " ".join(a.text for a in run.callback.assumptions)
    assert "files that ModelCheckpoint, save, save_weights and export wrote" in texts


def test_a_saved_model_holds_no_metrics_of_the_training_data(make_run, tmp_path):
    run = make_run()
    run.fit()
    path = str(tmp_path / "model")
    run.model.save(path, save_format="tf")
    reader = tf.train.load_checkpoint(path + "/variables/variables")
    names = [n for n in reader.get_variable_to_shape_map() if "metrics" in n]
    assert names
    assert not any(reader.get_tensor(name).any() for name in names)
