"""What Model.fit does differently than the event says is accounted as it happened, or refused.

See docs/threat_model.md. What every optimizer refuses is in tests/misuse/misuse.py.
"""

import attrs
import numpy as np
import pytest

pytest.importorskip("tensorflow_privacy")
import tensorflow as tf
from keras_models import EXPECTED, at_batch, callbacks, compile_with
from misuse import each_row

import hidden_state_accountants as hsa
from hidden_state_adapters.tf_privacy import cyclic_dataset

layers = tf.keras.layers
pytestmark = pytest.mark.usefixtures("row_by_row")


# What is accounted


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
    data = cyclic_dataset(x, y, batch_size=4, drop_remainder=True)
    run = make_run(callback={"data": data})
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


# Batches that are not the declared ones


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


class HalfOfTheRows(tf.keras.Sequential):
    def train_step(self, data):
        return super().train_step(tf.nest.map_structure(lambda part: part[::2], data))


def half_of_every_batch(run):
    run.model = HalfOfTheRows(run.model.layers)
    compile_with(run)
    run.fit()


def several_steps_per_execution(run):
    run.model.compile(
        run.optimizer,
        tf.keras.losses.BinaryCrossentropy(from_logits=True, reduction="none"),
        steps_per_execution=2,
    )
    run.fit()


# Another loss, longer features, microbatches, options of parts of the model


def reduced_loss(run):
    compile_with(run, tf.keras.losses.BinaryCrossentropy(from_logits=True))
    run.fit()


class TenTimes(tf.keras.losses.BinaryCrossentropy):
    def call(self, y_true, y_pred):
        return 10.0 * super().call(y_true, y_pred)


def scaled_loss(run):
    compile_with(run, TenTimes(from_logits=True, reduction="none"))
    run.fit()


def loss_weights(run):
    compile_with(run, loss_weights=[0.5])
    run.fit()


def class_weights(run):
    run.fit(class_weight={0: 1.0, 1: 3.0})


def regularised(run, **kwargs):
    run.model = tf.keras.Sequential([layers.Dense(1, **kwargs)])
    compile_with(run)
    run.fit()


def activity_regularizer(run):
    regularised(run, activity_regularizer="l2")


def batch_normalisation_without_running_statistics(run):
    synchronised = layers.experimental.SyncBatchNormalization(momentum=1.0)
    run.model = tf.keras.Sequential([synchronised, layers.Dense(1)])
    compile_with(run)
    run.fit()


def stateful_layer(run):
    run.model = tf.keras.Sequential([layers.SimpleRNN(1, stateful=True)])
    run.model.build((4, 2, 2))
    compile_with(run)
    run.fit()


class Counts(layers.Layer):
    def build(self, shape):
        self.total = self.add_weight(name="total", shape=[], trainable=False, initializer="zeros")

    def call(self, inputs):
        self.total.assign_add(tf.reduce_sum(inputs))
        return inputs


def layer_that_sums_the_examples(run):
    run.model = tf.keras.Sequential([Counts(), layers.Dense(1)])
    compile_with(run)
    run.fit()


def constraint_on_one_variable(run):
    run.model = tf.keras.Sequential([layers.Dense(1, bias_constraint="non_neg")])
    compile_with(run)
    run.fit()


def with_policy(run, policy):
    run.model = tf.keras.Sequential([layers.Dense(1, dtype=policy)])
    compile_with(run)
    run.fit()


def mixed_float16(run):
    with_policy(run, "mixed_float16")


def loss_scaling(run):
    run.optimizer = tf.keras.mixed_precision.LossScaleOptimizer(run.optimizer)
    compile_with(run)
    run.fit()


# Choices by metrics, and weights that the optimizer did not leave


def nudge(run):
    run.variables[0].assign_add(1e-6 * tf.ones_like(run.variables[0]))


def best_checkpoint(run):
    run.fit(callbacks=[callbacks.ModelCheckpoint("unused", monitor="loss", save_best_only=True)])


def stopped_by_a_callback(run):
    stop = callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: setattr(run.model, "stop_training", True)
    )
    run.fit(callbacks=[stop], epochs=3)


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


def other_optimizer_within_the_run(run):
    run.fit()
    run.model.compile(type(run.optimizer).from_config(run.optimizer.get_config()), run.model.loss)
    run.fit()


def other_kind_of_optimizer(run):
    run.model.compile("sgd", "mse")
    run.fit()


def backup_and_restore(run):
    run.fit(callbacks=[callbacks.BackupAndRestore("unused")])


def resumed_from_a_file_in_the_same_record(run):
    run.fit()
    run.model.save("model.keras")
    run.model = tf.keras.models.load_model("model.keras")
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
    (1, half_of_every_batch, "step 1 on all rows of batch 0, got batch 0 or other rows"),
    (1, several_steps_per_execution, "taken 2 steps, expected 1: one for every batch"),
    (4, reduced_loss, "got a scalar"),
    (4, scaled_loss, "longer than loss_geometry.lipschitz"),
    (4, loss_weights, "loss_weights=None"),
    (7, class_weights, "data with class_weight"),
    (9, activity_regularizer, "got a scalar|no regularisation losses"),
    (5, batch_normalisation_without_running_statistics, "no trainable batch normalisation"),
    (5, stateful_layer, "stateful=True"),
    (5, layer_that_sums_the_examples, "variable that is not trained was changed"),
    (3, constraint_on_one_variable, "without a constraint"),
    (10, mixed_float16, "precision"),
    (10, loss_scaling, "in compile, such as CyclicDPKerasSGDOptimizer, got LossScale"),
    (2, best_checkpoint, "save_best_only"),
    (2, stopped_by_a_callback, "stopped early"),
    (11, nudged_after_an_epoch, "changed outside the private optimizer"),
    (11, nudged_before_an_epoch, "changed outside the private optimizer"),
    (11, nudged_between_two_fits, "changed outside the private optimizer"),
    (11, nudged_after_a_part_of_an_epoch, "changed outside the private optimizer"),
    (11, other_optimizer_within_the_run, "got another one"),
    (11, other_kind_of_optimizer, "such as CyclicDPKerasSGDOptimizer"),
    (13, backup_and_restore, "BackupAndRestore"),
    (13, resumed_from_a_file_in_the_same_record, "got another one"),
]


@each_row(("act", "text"), CASES)
def test_refused(make_run, act, text):
    run = make_run()
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        act(run)


def test_a_run_that_a_refused_step_ended_is_not_accounted(make_run):
    run = make_run()
    run.fit()
    data = cyclic_dataset(np.r_[run.x[:12], 5.0 * run.x[12:]], run.y, batch_size=4)
    run.callback._data = data  # as if the change were not noticed
    with pytest.raises(hsa.UnsupportedRunError, match="step 10 ends the run"):
        run.fit(data)
    run.data = data
    for act in (lambda: run.callback.report(1e-5), lambda: run.callback.privacy_event, run.fit):
        with pytest.raises(hsa.UnsupportedRunError, match="step 10 ends the run"):
            act()


def test_tensorfloat_32_is_refused(make_run, monkeypatch):
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [kind])
    with pytest.raises(hsa.UnsupportedRunError, match="TensorFloat-32"):
        make_run().fit()
    make_run(optimizer={"loss_geometry": None}).fit()
