"""What Model.fit does differently from the event raises, or is accounted as it happened.

One case per way to get a silently wrong epsilon. A case acts on a run, and names the text that must
be raised, or the expected event is checked in a test of its own below. The rows:

     1  other batches than declared          10  precision in which rounding expands
     2  choices by metrics                   11  weights that the optimizer did not leave
     3  options of parts of the model        12  projection
     4  another loss                         13  runs that go on elsewhere
     5  longer features                      14  noise that repeats
     6  microbatches                         16  DiceSGD's error
     7  Keras' own arguments of fit          17  losses and metrics that are seen
     9  penalties in the loss                18  several rows of a person
"""

import pathlib
import zipfile

import attrs
import numpy as np
import pytest

pytest.importorskip("tensorflow_privacy")
import tensorflow as tf

import hidden_state_accountants as hsa
from hidden_state_accountants.guarantee import Status
from hidden_state_adapters.tf_privacy import DiceKerasSGDOptimizer, cyclic_dataset

callbacks = tf.keras.callbacks
layers = tf.keras.layers


def at_batch(index, act):
    """A callback that acts after the batch with this index of the first epoch."""
    state = {"done": False}

    def end(batch, logs):
        if batch == index and not state["done"]:
            state["done"] = True
            act()

    return callbacks.LambdaCallback(on_train_batch_end=end)


def nudge(run):
    run.variables[0].assign_add(1e-6 * tf.ones_like(run.variables[0]))


# Row 1: batches that are not the declared ones.


def shuffled_arrays(run):
    run.fit(run.x, y=run.y, batch_size=4)


def ragged_arrays(run):
    run.callback = type(run.callback)(dataset_size=23, batch_size=4)
    run.fit(run.x[:23], y=run.y[:23], batch_size=4, shuffle=False)


def default_batch_size_of_keras(run):
    run.fit(run.x, y=run.y, shuffle=False)


def fewer_examples_than_declared(run):
    run.fit(cyclic_dataset(run.x[:20], run.y[:20], batch_size=4))


def other_batch_size_than_declared(run):
    run.fit(cyclic_dataset(run.x, run.y, batch_size=6))


def shuffled_dataset(run):
    run.fit(run.data.shuffle(6))


def plain_dataset(run):
    run.fit(tf.data.Dataset.from_tensor_slices((run.x, run.y)).batch(4))


def generator(run):
    def batches():
        yield run.x[:4], run.y[:4]

    run.fit(batches())


def part_of_an_epoch(run):
    run.fit(steps_per_epoch=3, epochs=2)


def other_data_in_the_second_fit(run):
    run.fit()
    run.fit(cyclic_dataset(run.x[::-1], run.y[::-1], batch_size=4))


def arrays_reordered_between_fits(run):
    run.fit(run.x, y=run.y, shuffle=False, batch_size=4)
    np.random.default_rng(0).shuffle(run.x)
    run.fit(run.x, y=run.y, shuffle=False, batch_size=4)


def interrupted_epoch(run):
    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.fit(callbacks=[at_batch(2, interrupt)])
    assert run.callback.privacy_event.num_steps == 3
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


def own_loop_around_the_callback(run):
    run.callback.set_model(run.model)
    run.callback.on_train_begin()


# Row 2: choices by metrics.


def early_stopping(run):
    run.fit(callbacks=[callbacks.EarlyStopping(monitor="loss", restore_best_weights=True)])


def plateau(run):
    run.fit(callbacks=[callbacks.ReduceLROnPlateau(monitor="loss")])


def best_checkpoint(run):
    run.fit(callbacks=[callbacks.ModelCheckpoint("unused", monitor="loss", save_best_only=True)])


def stopped_by_a_callback(run):
    stop = callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: setattr(run.model, "stop_training", True)
    )
    run.fit(callbacks=[stop], epochs=3)


# Rows 4 to 7 and 9: another loss, longer features, microbatches.


def compile_with(run, loss=None, **kwargs):
    loss = loss or tf.keras.losses.BinaryCrossentropy(from_logits=True, reduction="none")
    run.model.compile(run.optimizer, loss, **kwargs)


def reduced_loss(run):
    compile_with(run, tf.keras.losses.BinaryCrossentropy(from_logits=True))
    run.fit()


class TenTimes(tf.keras.losses.BinaryCrossentropy):
    def call(self, y_true, y_pred):
        return 10.0 * super().call(y_true, y_pred)


def scaled_loss(run):
    compile_with(run, TenTimes(from_logits=True, reduction="none"))
    run.fit()


class TwoRowsPerExample(tf.keras.losses.BinaryCrossentropy):
    def call(self, y_true, y_pred):
        return tf.repeat(super().call(y_true, y_pred), 2)


def two_rows_per_example(run):
    compile_with(run, TwoRowsPerExample(from_logits=True, reduction="none"))
    run.fit()


def loss_weights(run):
    compile_with(run, loss_weights=[0.5])
    run.fit()


def class_weights(run):
    run.fit(class_weight={0: 1.0, 1: 3.0})


def sample_weights(run):
    run.fit(run.x, y=run.y, sample_weight=np.ones(24), shuffle=False, batch_size=4)


def long_features(run):
    run.fit(cyclic_dataset(5.0 * run.x, run.y, batch_size=4))


def validation_split(run):
    run.fit(run.x, y=run.y, validation_split=0.5, shuffle=False, batch_size=4)


def regularised(run, **kwargs):
    run.model = tf.keras.Sequential([layers.Dense(1, **kwargs)])
    compile_with(run)
    run.fit()


def kernel_regularizer(run):
    regularised(run, kernel_regularizer="l2")


def activity_regularizer(run):
    regularised(run, activity_regularizer="l2")


def trained_batch_normalisation(run):
    run.model = tf.keras.Sequential([layers.BatchNormalization(), layers.Dense(1)])
    compile_with(run)
    run.fit()


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


# Row 11 and 13: weights that the optimizer did not leave.


def nudged_between_batches(run):
    run.fit(callbacks=[at_batch(2, lambda: nudge(run))])


def nudged_between_batches_with_xla(run):
    compile_with(run, jit_compile=True)
    run.fit(callbacks=[at_batch(2, lambda: nudge(run))])


def nudged_between_fits(run):
    run.fit()
    nudge(run)
    run.fit()


def other_weights_reported(run):
    run.fit()
    run.model.set_weights([0.0 * w for w in run.model.get_weights()])
    run.callback.report(1e-5)


def earlier_weights_released(run):
    run.fit()
    weights = run.model.get_weights()
    run.fit()
    run.model.set_weights(weights)
    run.callback.release()


def frozen_within_the_run(run):
    run.fit()
    run.model.layers[0].bias = tf.Variable(run.model.layers[0].bias, trainable=False)
    compile_with(run)
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


# Row 12


def initial_weights_outside_of_the_ball(run):
    run.model.set_weights([10 + w for w in run.model.get_weights()])
    run.optimizer._projection_radius = 1.0
    run.fit()


# Row 14: noise


def seeded_in_every_step(run):
    compile_with(run, run_eagerly=True)

    def reset(batch, logs):
        run.optimizer._dp_sum_query._generator.reset_from_seed(0)

    run.fit(callbacks=[callbacks.LambdaCallback(on_train_batch_end=reset)])


# Row 17


def csv_logger(run):
    run.fit(callbacks=[callbacks.CSVLogger("unused")])


def tensorboard(run):
    run.fit(callbacks=[callbacks.TensorBoard("unused")])


def checkpoint_with_metrics(run):
    run.model.fit(
        run.data, callbacks=[callbacks.ModelCheckpoint("unused.keras"), run.callback], verbose=0
    )


# Row 3: options of parts of the model


def clipnorm_set_before_fit(run):
    run.optimizer.clipnorm = 0.5
    run.fit()


def momentum_set_before_fit(run):
    run.optimizer._momentum = True
    run.fit()


def gradient_transformers(run):
    run.optimizer.gradient_transformers.append(lambda pairs: pairs)
    run.fit()


def constraint_on_one_variable(run):
    run.model = tf.keras.Sequential([layers.Dense(1, bias_constraint="non_neg")])
    compile_with(run)
    run.fit()


# Row 6


def microbatches_that_do_not_divide(run):
    run.optimizer._num_microbatches = 3
    run.fit()


def microbatches_changed_within_the_run(run):
    run.fit()
    run.optimizer._num_microbatches = 2
    run.fit()


# Row 10


def with_policy(run, policy):
    run.model = tf.keras.Sequential([layers.Dense(1, dtype=policy)])
    compile_with(run)
    run.fit()


def mixed_float16(run):
    with_policy(run, "mixed_float16")


def mixed_bfloat16(run):
    with_policy(run, "mixed_bfloat16")


def float16(run):
    with_policy(run, "float16")


def loss_scaling(run):
    tf.keras.mixed_precision.LossScaleOptimizer(run.optimizer)


# Row 13


def resumed_from_a_file_in_the_same_record(run):
    run.fit()
    run.model.save("model.keras")
    run.model = tf.keras.models.load_model("model.keras")
    run.fit()


def earlier_weights_loaded(run):
    run.model.save_weights("start.h5")
    run.fit()
    run.model.load_weights("start.h5")
    run.fit()


def goes_on_in_the_middle_of_an_epoch(run):
    run.fit(epochs=1)
    run.callback._record.num_batches = 3  # as a state that lost its position would say
    run.fit()


CASES = {
    shuffled_arrays: "shuffle=True",
    ragged_arrays: "divides the 23 examples",
    default_batch_size_of_keras: "batch_size = 4 examples, got 32",
    fewer_examples_than_declared: "dataset_size = 24 examples, got 20",
    other_batch_size_than_declared: "batch_size = 4 examples, got 6",
    shuffled_dataset: "not known",
    plain_dataset: "not known",
    generator: "not known",
    part_of_an_epoch: "6 steps in an epoch, got 3",
    other_data_in_the_second_fit: "the same object",
    arrays_reordered_between_fits: "may have been reordered",
    interrupted_epoch: "go on with batch 3",
    fit_without_the_callback: "took 12 steps, but 6 are recorded",
    fit_without_the_callback_before: "not recorded",
    train_on_batch_within_an_epoch: "has taken 4 steps, expected 3",
    two_steps_on_every_batch: "has taken 2 steps, expected 1",
    several_steps_per_execution: "steps_per_execution = 1",
    own_loop_around_the_callback: "another caller",
    early_stopping: "got EarlyStopping",
    plateau: "got ReduceLROnPlateau",
    best_checkpoint: "save_best_only",
    stopped_by_a_callback: "stopped early",
    reduced_loss: "got a scalar",
    scaled_loss: "longer than loss_geometry.lipschitz",
    two_rows_per_example: "step 1 used 8 rows of batch 0, expected batch_size = 4",
    loss_weights: "loss_weights=None",
    class_weights: "class_weight = None",
    sample_weights: "sample_weight = None",
    long_features: "longer than loss_geometry.lipschitz",
    validation_split: "validation_split = 0",
    kernel_regularizer: "no regularisation losses",
    activity_regularizer: "got a scalar|no regularisation losses",
    trained_batch_normalisation: "no trainable batch normalisation",
    batch_normalisation_without_running_statistics: "no trainable batch normalisation",
    stateful_layer: "stateful=True",
    layer_that_sums_the_examples: "variable that is not trained was changed",
    nudged_between_batches: "step 4 was not taken. The trainable variables were changed",
    nudged_between_batches_with_xla: "step 4 was not taken. The trainable variables were changed",
    nudged_between_fits: "were changed outside",
    other_weights_reported: "were changed outside",
    earlier_weights_released: "were changed outside",
    frozen_within_the_run: "were changed outside",
    other_optimizer_within_the_run: "got another one",
    other_kind_of_optimizer: "Expected a CyclicDPKerasSGDOptimizer",
    backup_and_restore: "BackupAndRestore",
    resumed_from_a_file_in_the_same_record: "got another one",
    earlier_weights_loaded: "were changed outside",
    goes_on_in_the_middle_of_an_epoch: "took 6 steps, but 3 are recorded",
    clipnorm_set_before_fit: "clipnorm = None",
    momentum_set_before_fit: "momentum = 0.0",
    gradient_transformers: "no gradient_transformers",
    constraint_on_one_variable: "without a constraint",
    microbatches_that_do_not_divide: "num_microbatches to divide batch_size = 4",
    microbatches_changed_within_the_run: "microbatches or accumulation were changed",
    mixed_float16: "precision",
    mixed_bfloat16: "precision",
    float16: "float32 or float64",
    loss_scaling: "loss scaling",
    initial_weights_outside_of_the_ball: "projection_radius = 1",
    seeded_in_every_step: "step 3 used the noise of an earlier step",
    csv_logger: "no CSVLogger",
    tensorboard: "no TensorBoard",
    checkpoint_with_metrics: "after HiddenStateCallback",
}


ROWS = {
    2: (early_stopping, plateau, best_checkpoint, stopped_by_a_callback),
    3: (
        clipnorm_set_before_fit,
        momentum_set_before_fit,
        gradient_transformers,
        constraint_on_one_variable,
    ),
    4: (reduced_loss, scaled_loss, two_rows_per_example, loss_weights),
    5: (
        long_features,
        trained_batch_normalisation,
        batch_normalisation_without_running_statistics,
        stateful_layer,
        layer_that_sums_the_examples,
    ),
    6: (microbatches_that_do_not_divide, microbatches_changed_within_the_run),
    7: (shuffled_arrays, validation_split, class_weights, sample_weights, ragged_arrays),
    9: (kernel_regularizer, activity_regularizer),
    10: (mixed_float16, mixed_bfloat16, float16, loss_scaling),
    11: (
        nudged_between_batches,
        nudged_between_batches_with_xla,
        nudged_between_fits,
        other_weights_reported,
        earlier_weights_released,
        frozen_within_the_run,
        other_optimizer_within_the_run,
        other_kind_of_optimizer,
    ),
    12: (initial_weights_outside_of_the_ball,),
    13: (
        backup_and_restore,
        resumed_from_a_file_in_the_same_record,
        earlier_weights_loaded,
        goes_on_in_the_middle_of_an_epoch,
    ),
    14: (seeded_in_every_step,),
    17: (csv_logger, tensorboard, checkpoint_with_metrics),
}
ROW = {act: row for row, acts in ROWS.items() for act in acts}  # the others are of row 1


@pytest.mark.parametrize("act", CASES, ids=lambda act: f"row{ROW.get(act, 1)}-{act.__name__}")
def test_refused(make_run, act):
    run = make_run()
    with pytest.raises(hsa.UnsupportedRunError, match=CASES[act]):
        act(run)


def test_a_run_that_a_refused_step_ended_is_not_accounted(make_run):
    run = make_run()
    run.fit()
    data = cyclic_dataset(np.r_[run.x[:12], 5.0 * run.x[12:]], run.y, batch_size=4)
    run.callback._source = (data, None)  # as if the change were not noticed
    with pytest.raises(hsa.UnsupportedRunError, match="step 10 was not taken"):
        run.fit(data)
    assert run.optimizer.last_step.steps == 9
    for act in (lambda: run.callback.report(1e-5), lambda: run.callback.privacy_event, run.fit):
        with pytest.raises(hsa.UnsupportedRunError, match="step 10 was not taken"):
            act()


def test_tensorfloat_32_is_refused(make_run, monkeypatch):
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [kind])
    with pytest.raises(hsa.UnsupportedRunError, match="TensorFloat-32"):
        make_run().fit()
    make_run(optimizer={"loss_geometry": None}).fit()


# What is accounted as it happened


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


def arrays_in_order(run):
    run.fit(run.x, y=run.y, batch_size=4, shuffle=False, epochs=2)


def evaluation_within_the_run(run):
    run.fit(validation_data=(run.x[:5], run.y[:5]), epochs=2)
    run.model.evaluate(run.x, run.y, verbose=0)
    run.model.predict(run.x, verbose=0)


def later_epochs(run):
    run.fit(epochs=5, initial_epoch=3)


@pytest.mark.parametrize(
    "act", [two_epochs, two_fits, arrays_in_order, evaluation_within_the_run, later_epochs]
)
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
    assert (event.noise_multiplier, event.batch_size, event.dataset_size) == (1.0, 2, 12)
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
    assert both.get_epsilon(1e-5) > hsa.LastIterateAccountant().compose(EXPECTED).get_epsilon(1e-5)


@pytest.mark.parametrize("path", ["model.keras", "model.h5", "model"])
def test_row16_the_error_of_dice_is_in_no_file(make_run, path):
    run = make_run()
    run.optimizer = DiceKerasSGDOptimizer(0.1, 1.0, error_l2_norm_clip=0.05)
    compile_with(run)
    run.fit()
    values = np.concatenate([np.ravel(error) for error in run.optimizer._error._errors])
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
