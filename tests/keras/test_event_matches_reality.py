"""What Keras' own fit does differently than the event says is accounted as it happened, or refused.

See docs/threat_model.md. What every optimizer refuses is in tests/misuse/misuse.py.
"""

import attrs
import numpy as np
import pytest

pytest.importorskip("tensorflow_privacy")
import tensorflow as tf
from keras_models import EXPECTED, bce, callbacks, compile_with
from misuse import each_row

import hidden_state_accountants as hsa
from hidden_state_adapters.tf_privacy import BlockCoordinateKerasOptimizer, cyclic_dataset

layers = tf.keras.layers
pytestmark = pytest.mark.usefixtures("row_by_row")
DELTA = 1e-5


def exact(event):
    return hsa.LastIterateAccountant().compose(event).get_epsilon(DELTA)


# What is accounted


@pytest.mark.parametrize("mode", [{"run_eagerly": True}, {"jit_compile": True}])
def test_accounted(make_run, mode):
    """Several calls of fit, with evaluations; examples that are left out do not count."""
    run = make_run(compile=mode)
    run.take(np.r_[run.x, run.x[:2]], np.r_[run.y, run.y[:2]], drop_remainder=True)
    run.fit(validation_data=(run.x[:5], run.y[:5]))
    run.model.evaluate(run.x, run.y, verbose=0)
    run.fit(epochs=5, initial_epoch=4)
    assert run.callback.privacy_event == EXPECTED
    assert run.callback.get_epsilon(DELTA) == pytest.approx(exact(EXPECTED))
    assert any("calls of fit was fixed" in a.text for a in run.callback.assumptions)


def test_learning_rates_are_those_that_were_used(make_run):
    run = make_run()
    scheduler = callbacks.LearningRateScheduler(lambda epoch, rate: 0.1 + 0.1 * epoch)
    run.fit(callbacks=[scheduler], epochs=2)
    assert run.callback.privacy_event == attrs.evolve(EXPECTED, learning_rate=[0.1] * 6 + [0.2] * 6)


@pytest.mark.parametrize(
    ("options", "told", "steps"),
    [
        ({}, {}, (6,)),
        ({"save_freq": 1, "save_weights_only": True}, {}, tuple(range(1, 12))),
        ({}, {"checkpoints_stay_private": True}, ()),
    ],
)
def test_checkpoints_count_as_released(make_run, options, told, steps):
    run = make_run(callback=told)
    run.fit(callbacks=[callbacks.ModelCheckpoint("a.keras", **options)], epochs=2)
    assert run.callback.privacy_event == attrs.evolve(EXPECTED, release_steps=steps)


def test_a_saved_model_holds_no_metrics_of_the_training_data(make_run):
    """After an epoch, and after a fit in which a callback has evaluated it."""
    run, held = make_run(), []

    def look(epoch, logs):
        held.extend(v.numpy() for metric in run.model.metrics for v in metric.variables)
        run.model.evaluate(run.x, run.y, verbose=0)

    run.fit(callbacks=[callbacks.LambdaCallback(on_epoch_end=look)])
    run.model.save("model", save_format="tf")
    reader = tf.train.load_checkpoint("model/variables/variables")
    names = [n for n in reader.get_variable_to_shape_map() if "metrics" in n]
    assert names
    assert held
    assert not any(held + [reader.get_tensor(name) for name in names])


@pytest.mark.parametrize("relation", ["REPLACE_SPECIAL", "REPLACE_ONE"])
def test_the_account_of_pairs(make_run, relation):
    """Of microbatches of two under either relation that of REPLACE_ONE, and by composition."""
    run = make_run(
        optimizer={"num_microbatches": 2},
        callback={"neighboring_relation": relation, "target_delta": DELTA},
    )
    history = run.fit(epochs=2).history
    assert run.callback.privacy_event == attrs.evolve(
        EXPECTED, batch_size=2, dataset_size=12, loss=None, is_microbatched=True
    )
    epsilon = run.callback.get_epsilon(DELTA)
    assert epsilon == history["epsilon_if_released_now"][-1] > exact(EXPECTED)
    text = " ".join(run.callback.report(DELTA).split())
    assert "in microbatches of 2" in text
    assert "moves it by up to twice the clip norm" in text


# Batches that are not the declared ones


def part_of_an_epoch(run):
    run.fit(steps_per_epoch=3, epochs=2)


def other_data_in_the_second_fit(run):
    run.fit()
    run.fit(cyclic_dataset(run.x[::-1], run.y[::-1], batch_size=4))


def fit_without_the_callback(run):
    run.fit()
    run.model.fit(run.data, verbose=0)
    run.callback.report(DELTA)


def fit_without_the_callback_before(run):
    run.model.fit(run.data, verbose=0)
    run.fit()


class HalfOfTheRows(tf.keras.Sequential):
    def train_step(self, data):
        return super().train_step(tf.nest.map_structure(lambda part: part[::2], data))


def half_of_every_batch(run):
    run.model = HalfOfTheRows(run.model.layers)
    compile_with(run)
    run.fit()


def several_steps_per_execution(run):
    compile_with(run, steps_per_execution=2)
    run.fit()


# Another loss, longer features, microbatches, options of parts of the model


def long_features(run):
    run.take(5.0 * run.x, run.y)
    run.fit()


def loss_weights(run):
    compile_with(run, loss_weights=[0.5])
    run.fit()


def class_weights(run):
    run.fit(class_weight={0: 1.0, 1: 3.0})


def microbatches_that_do_not_divide(run):
    run.optimizer = type(run.optimizer)(1.5, 2.0, 3)
    compile_with(run, run_eagerly=True)
    run.fit()


def of_layers(run, *stack, **arguments):
    run.model = tf.keras.Sequential(stack)
    compile_with(run, run_eagerly=bool(arguments))
    run.fit(**arguments)


def penalised(run):
    of_layers(run, layers.Dense(1, activity_regularizer="l2"))


def stateful(run):
    of_layers(run, layers.Reshape((2, 2)), layers.SimpleRNN(1, stateful=True))


def constrained(run):
    of_layers(run, layers.Dense(1, bias_constraint="non_neg"))


def mixed_precision(run):
    of_layers(run, layers.Dense(1, dtype="mixed_float16"))


def counted_within_an_epoch(run):
    """And set back before anybody asks."""
    frozen = layers.Dense(4, trainable=False)
    counts = callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: frozen.bias.assign_add(1e-6 * tf.ones(4)),
        on_epoch_end=lambda epoch, logs: frozen.bias.assign(tf.zeros(4)),
    )
    of_layers(run, frozen, layers.Dense(1), callbacks=[counts])


# Weights that the optimizer did not leave, and other ends


def nudge(run):
    run.variables[0].assign_add(1e-6 * tf.ones_like(run.variables[0]))


def stopped_by_a_callback(run):
    stop = callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: setattr(run.model, "stop_training", True)
    )
    run.fit(callbacks=[stop], epochs=3)


def nudged_before_an_epoch(run):
    """By a callback whose turn comes last."""
    swap = callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: epoch and nudge(run))
    run.fit(callbacks=[swap], epochs=2)


def nudged_after_a_part_of_an_epoch(run):
    run.fit(steps_per_epoch=2)
    assert run.callback.privacy_event.num_steps == 2
    nudge(run)
    run.callback.get_epsilon(DELTA)


def other_optimizer_within_the_run(run):
    run.fit()
    run.optimizer = type(run.optimizer).from_config(run.optimizer.get_config())
    compile_with(run)
    run.fit()


def other_kind_of_optimizer(run):
    run.model.compile("sgd", "mse")
    run.fit()


def backup_and_restore(run):
    run.fit(callbacks=[callbacks.BackupAndRestore("unused")])


CASES = [
    (1, part_of_an_epoch, "batch 0, expected|of batch 3"),
    (1, other_data_in_the_second_fit, "fit on a dataset of cyclic_dataset"),
    (1, fit_without_the_callback, "took 12 steps, but 6 are recorded"),
    (1, fit_without_the_callback_before, "not recorded"),
    (1, half_of_every_batch, "step 1 on all rows of batch 0, got batch 0 or other rows"),
    (1, several_steps_per_execution, "taken 2 steps, expected 1: one for every batch"),
    (4, long_features, "longer than loss_geometry.lipschitz"),
    (4, loss_weights, "loss_weights=None"),
    (7, class_weights, "data with class_weight"),
    (183, microbatches_that_do_not_divide, "num_microbatches to divide"),
    (9, penalised, "got a scalar|no regularisation losses"),
    (5, stateful, "stateful=True"),
    (3, constrained, "without a constraint"),
    (10, mixed_precision, "precision"),
    (11, counted_within_an_epoch, "not trained was changed"),
    (2, stopped_by_a_callback, "stopped early"),
    (11, nudged_before_an_epoch, "changed outside the private optimizer"),
    (11, nudged_after_a_part_of_an_epoch, "changed outside the private optimizer"),
    (11, other_optimizer_within_the_run, "got another one"),
    (11, other_kind_of_optimizer, "such as CyclicDPKerasSGDOptimizer"),
    (13, backup_and_restore, "BackupAndRestore"),
]


@each_row(("act", "text"), CASES)
def test_refused(make_run, act, text):
    run = make_run()
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        act(run)


def test_tensorfloat_32_is_refused(make_run, monkeypatch):
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [kind])
    with pytest.raises(hsa.UnsupportedRunError, match="TensorFloat-32"):
        make_run().fit()
    make_run(optimizer={"loss_geometry": None}).fit()


# DP-MBCD

RATE, CLIP, NOISE, L2 = 0.5, 1.5, 40.0, 0.25


def of_blocks(num_epochs=2, **more):
    variance = RATE * (NOISE * CLIP / 4) ** 2 / 2
    return hsa.BlockCoordinateDpEvent(
        step_size=RATE, noise_variance=variance, clip_norm=CLIP, batch_size=4, dataset_size=24,
        num_epochs=num_epochs, prox_strong_convexity=L2, **more,
    )  # fmt: skip


class EachLayerABlock(tf.keras.Sequential):
    """The recipe of docs/papers/block_coordinate.md."""

    def blocks(self):
        return [layer.trainable_variables for layer in self.layers if layer.trainable]

    def train_step(self, data):
        x, y = data
        self.optimizer.minimize(
            lambda: self.compute_loss(x, y, self(x, training=True)), self.blocks()
        )
        return {}


@pytest.fixture
def make_blocks(make_run, compile_options):
    def make(*stack, compile=None, **callback):
        run = make_run(callback=callback)
        run.optimizer = BlockCoordinateKerasOptimizer(CLIP, NOISE, learning_rate=RATE, l2=L2)
        if stack:
            run.model = EachLayerABlock(stack)
            run.model.build((None, 4))
        compile_with(run, **(compile_options if compile is None else compile))
        return run

    return make


def test_one_block_hides_its_iterates_until_one_is_released(make_blocks):
    loss = EXPECTED.loss
    run = make_blocks(compile={"jit_compile": True}, target_delta=DELTA, loss_geometry=loss)
    history = run.fit(epochs=2).history["epsilon_if_released_now"]
    assert run.callback.privacy_event == of_blocks(block_loss=loss)
    assert history == pytest.approx([exact(of_blocks(n, block_loss=loss)) for n in (1, 2)])
    run.callback.release()  # of the last one, which costs nothing more
    assert run.callback.get_epsilon(DELTA) == history[1] < exact(of_blocks())
    run.fit()
    assert run.callback.get_epsilon(DELTA) == pytest.approx(exact(of_blocks(3)))


def test_several_blocks_are_composed(make_blocks):
    """A frozen layer is in none, files of every step cost nothing more, the rate is constant."""
    run = make_blocks(layers.Dense(3, trainable=False), layers.Dense(2), layers.Dense(1))
    run.fit()
    assert run.callback.privacy_event == of_blocks(1, num_blocks=2)
    every = callbacks.ModelCheckpoint("b", save_freq=1, save_weights_only=True)
    run.fit(callbacks=[every])
    assert run.callback.get_epsilon(DELTA) == pytest.approx(exact(of_blocks(num_blocks=2)))
    halve = callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
    with pytest.raises(hsa.UnsupportedRunError, match=r"learning_rate = 0\.25, expected 0\.5"):
        run.fit(callbacks=[halve])


def test_a_step_that_was_interrupted_between_its_blocks(make_blocks):
    run = make_blocks(layers.Dense(2), layers.Dense(1))
    run.fit()
    turns = iter([1])

    def losses():
        next(turns)
        return bce()(run.y[:4], run.model(run.x[:4]))

    with pytest.raises(StopIteration):
        run.optimizer.minimize(losses, run.model.blocks())
    with pytest.raises(hsa.UnsupportedRunError, match="changed outside the private optimizer"):
        run.callback.report(DELTA)
