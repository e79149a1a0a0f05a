"""What Model.fit does differently, where the event can express it, is accounted as it happened.

See docs/threat_model.md.
"""

import pathlib
import zipfile

import attrs
import numpy as np
import pytest

pytest.importorskip("tensorflow_privacy")
import tensorflow as tf
from keras_fit import callbacks, compile_with

import hidden_state_accountants as hsa
from hidden_state_accountants.guarantee import Status
from hidden_state_adapters.tf_privacy import DiceKerasSGDOptimizer, cyclic_dataset

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


@pytest.mark.parametrize("mode", [{"run_eagerly": True}, {"jit_compile": True}])
def test_accounted_in_every_mode(make_run, mode):
    run = make_run(compile=mode)
    run.fit()
    assert run.callback.privacy_event == attrs.evolve(EXPECTED, num_steps=6)


def test_learning_rates_are_those_that_were_used(make_run):
    run = make_run()
    scheduler = callbacks.LearningRateScheduler(lambda epoch, rate: 0.1 + 0.1 * epoch)
    run.fit(callbacks=[scheduler], epochs=2)
    assert run.callback.privacy_event == attrs.evolve(EXPECTED, learning_rate=[0.1] * 6 + [0.2] * 6)


def test_the_projection_is_on_a_set_of_twice_the_radius(make_run):
    run = make_run(optimizer={"projection_radius": 0.9})
    run.fit(epochs=2)
    assert run.callback.privacy_event == attrs.evolve(EXPECTED, domain_diameter=1.8)


def test_dropped_examples_do_not_count(make_run):
    for declared in (26, 24):
        run = make_run(callback={"dataset_size": declared})
        x, y = np.r_[run.x, run.x[:2]], np.r_[run.y, run.y[:2]]
        run.fit(cyclic_dataset(x, y, batch_size=4, drop_remainder=True), epochs=2)
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
    assert any("ModelCheckpoint stay private" in a.text for a in run.callback.assumptions)


def test_a_saved_model_holds_no_metrics_of_the_training_data(make_run, tmp_path):
    run = make_run()
    run.fit()
    path = str(tmp_path / "model")
    run.model.save(path, save_format="tf")
    reader = tf.train.load_checkpoint(path + "/variables/variables")
    names = [n for n in reader.get_variable_to_shape_map() if "metrics" in n]
    assert names
    assert not any(reader.get_tensor(name).any() for name in names)


def test_row6_microbatches_are_accounted_with_twice_the_sensitivity(make_run):
    run = make_run(optimizer={"num_microbatches": 2})
    run.fit(epochs=2)
    event = run.callback.privacy_event
    assert (event.noise_multiplier, event.batch_size, event.dataset_size) == (2.0, 2, 12)
    assert event.is_microbatched
    assert run.callback.get_epsilon(1e-5) > hsa.LastIterateAccountant().compose(
        EXPECTED
    ).get_epsilon(1e-5)


def test_row13_a_run_that_goes_on_from_a_file_is_another_run(make_run):
    run = make_run()
    run.fit()
    run.model.save("model.keras")
    first = run.callback.privacy_event
    again = make_run()
    again.model = tf.keras.models.load_model("model.keras")
    again.fit()
    second = again.callback.privacy_event
    assert first.num_steps == second.num_steps == 6  # each starts at batch 0
    both = hsa.LastIterateAccountant().compose(first).compose(second)
    assert again.callback.get_epsilon(1e-5) == pytest.approx(both.get_epsilon(1e-5), rel=1e-9)
    assert both.get_epsilon(1e-5) > hsa.LastIterateAccountant().compose(EXPECTED).get_epsilon(1e-5)


@pytest.mark.parametrize("path", ["model.keras", "model.h5", "model"])
def test_row16_the_error_of_dice_is_in_no_file(make_run, path):
    run = make_run()
    run.optimizer = DiceKerasSGDOptimizer(0.1, 1.0, error_l2_norm_clip=0.05)
    compile_with(run)
    run.fit()
    values = np.concatenate([np.ravel(error) for error in run.optimizer._steps.rule._errors])
    assert values.size == 5
    assert values.any()
    run.model.save(path)
    files = [file for file in pathlib.Path().rglob("*") if file.is_file()]
    stored = b"".join(map(read, files))
    kernel = run.model.get_weights()[0].ravel()
    assert kernel[:2].tobytes() in stored  # the search would find them
    assert not any(value.tobytes() in stored for value in values)
    loaded = tf.keras.models.load_model(path).optimizer
    assert loaded.last_step.steps == 0


def read(file):
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            return b"".join(archive.read(name) for name in archive.namelist())
    return file.read_bytes()


def test_row17_metrics_that_are_seen_are_declared(make_run):
    run = make_run(callback={"metrics_stay_private": True})
    run.fit(callbacks=[callbacks.CSVLogger("log.csv")])
    texts = [a.text for a in run.callback.assumptions if a.status is Status.DECLARED]
    assert any("losses and metrics of the training data" in text for text in texts)


def test_row18_one_record_per_person_is_an_assumption(make_run):
    run = make_run()
    run.fit()
    declared = [a.text for a in run.callback.assumptions if a.status is Status.DECLARED]
    assert "one record per person, clipped as one unit" in declared
    assert "No user-level privacy guarantee" in run.callback.report(1e-5)


def test_row18_equal_examples_are_warned_about_once(make_run, caplog):
    run = make_run()
    run.x[1], run.y[1] = run.x[0], run.y[0]
    run.fit(cyclic_dataset(run.x, run.y, batch_size=4), epochs=2)
    assert sum("examples of the data are equal" in text for text in caplog.messages) == 1
