"""DiceSGD and DiceAdam in Keras: what is refused."""

import math

import numpy as np
import pytest

pytest.importorskip("tensorflow_privacy")
import tensorflow as tf
from keras_dice import FOUR, OTHER_FOUR, compiled, error_of, flat, losses, make, make_model, step

import hidden_state_accountants as hsa
from hidden_state_adapters.tf_privacy import DiceKerasAdamOptimizer, DiceKerasSGDOptimizer

pytestmark = pytest.mark.usefixtures("restored_precision")


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"l2_norm_clip": 0.0}, ValueError, "l2_norm_clip"),
        ({"l2_norm_clip": math.inf}, ValueError, "l2_norm_clip"),
        ({"l2_norm_clip": 1e-31}, ValueError, "l2_norm_clip"),
        ({"noise_multiplier": -1.0}, ValueError, "noise_multiplier"),
        ({"noise_multiplier": "1"}, TypeError, "noise_multiplier"),
        ({"noise_multiplier": 1e-31}, ValueError, "noise_multiplier"),
        ({"num_microbatches": 0}, ValueError, "num_microbatches"),
        ({"error_l2_norm_clip": 0.0}, ValueError, "error_l2_norm_clip"),
        ({"error_l2_norm_clip": math.nan}, ValueError, "error_l2_norm_clip"),
        ({"error_l2_norm_clip": 1e31}, ValueError, "error_l2_norm_clip"),
        ({"automatic": 1}, TypeError, "automatic"),
        ({"expected_batch_size": 2.0}, TypeError, "expected_batch_size"),
        ({"expected_batch_size": 0}, ValueError, "expected_batch_size"),
        ({"learning_rate": -0.1}, ValueError, "learning_rate"),
        ({"no_such_argument": 1}, TypeError, "no_such_argument"),
        ({"clipnorm": 1.0}, hsa.UnsupportedRunError, "clipnorm = None"),
        ({"global_clipnorm": 1.0}, hsa.UnsupportedRunError, "global_clipnorm = None"),
        ({"gradient_accumulation_steps": 2}, hsa.UnsupportedRunError,
         "gradient_accumulation_steps = 1"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", [DiceKerasSGDOptimizer, DiceKerasAdamOptimizer])
def test_impossible_arguments(kind, arguments, error, text):
    with pytest.raises(error, match=text):
        kind(**{"l2_norm_clip": 1.0, "noise_multiplier": 1.0, **arguments})


def test_neutral_arguments_are_taken():
    make(gradient_accumulation_steps=1, clipnorm=None)


def ragged_batch(model, optimizer):
    step(model, optimizer, OTHER_FOUR[:3])


def empty_batch(model, optimizer):
    step(model, optimizer, OTHER_FOUR[:0])


def reduced_loss(model, optimizer):
    optimizer.minimize(lambda: tf.reduce_mean(losses(model, FOUR)), model.trainable_variables)


def weights_changed(model, optimizer):
    model.layers[0].kernel.assign_add(tf.fill([2, 3], tf.constant(1e-9, tf.float64)))
    step(model, optimizer, FOUR)


def other_variables(model, optimizer):
    other = make_model(depth=1)
    step(other, optimizer, FOUR)


def fewer_variables(model, optimizer):
    optimizer.minimize(lambda: losses(model, FOUR), model.trainable_variables[:1])


def not_finite(model, optimizer):
    step(model, optimizer, tf.concat([FOUR[:3], [[math.nan, 0.0]]], 0))


def seeded_again(model, optimizer):
    optimizer._mean._noise._generator.reset_from_seed(0)
    step(model, optimizer, FOUR)


def gradients_not_applied(model, optimizer):
    optimizer._compute_gradients(lambda: losses(model, FOUR), model.trainable_variables)
    step(model, optimizer, OTHER_FOUR)


def gradients_applied_twice(model, optimizer):
    pairs = optimizer._compute_gradients(lambda: losses(model, FOUR), model.trainable_variables)
    optimizer.apply_gradients(pairs)
    optimizer.apply_gradients(pairs)


def checkpoint_restored(model, optimizer):
    optimizer.iterations.assign(0)
    step(model, optimizer, FOUR)


def estimator_way(model, optimizer):
    optimizer.get_gradients(None, None)


def weighted(model, optimizer):
    optimizer._compute_gradients(
        lambda: losses(model, FOUR), model.trainable_variables, grad_loss=tf.ones([4])
    )


def replicas(model, optimizer):
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        make()


def loss_scaling(model, optimizer):
    tf.keras.mixed_precision.set_global_policy("mixed_float16")
    make_model(None, depth=1).compile(optimizer, "mse")


def half_precision(model, optimizer):
    step(make_model("float16", depth=1), make(), tf.cast(FOUR, tf.float16))


# What is refused, its text, and whether the run is over.
REFUSALS = [
    (ragged_batch, "another number of rows", True),
    (empty_batch, "at least one example", False),
    (reduced_loss, "got a scalar", False),
    (weights_changed, "changed outside", True),
    (other_variables, "the error belongs to them", False),
    (fewer_variables, "the error belongs to them", False),
    (not_finite, "not finite", True),
    (seeded_again, "generator of the noise was set", True),
    (gradients_not_applied, "not applied", True),
    (gradients_applied_twice, "not the noisy mean", False),
    (checkpoint_restored, "iterations was changed", True),
    (estimator_way, "TensorFlow 1 graphs", False),
    (weighted, "grad_loss = None", False),
    (replicas, "no distribution strategy", False),
    (loss_scaling, "loss scaling", False),
    (half_precision, "float32 or float64", False),
]


@pytest.mark.parametrize(
    ("act", "text", "ends"), REFUSALS, ids=[act.__name__ for act, _, _ in REFUSALS]
)
def test_refused(act, text, ends):
    model, optimizer = make_model(depth=1), make("sgd", 1.0)
    step(model, optimizer, FOUR)
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        act(model, optimizer)
    arguments = {"dataset_size": 8, "batch_order": "cyclic"}
    if ends:
        with pytest.raises(hsa.UnsupportedRunError):
            step(model, optimizer, FOUR)
        with pytest.raises(hsa.UnsupportedRunError):
            optimizer.privacy_event(**arguments)
    else:
        assert optimizer.privacy_event(**arguments).num_steps == optimizer.last_step.steps


def test_an_error_that_overflows():
    """An infinite error has no direction to clip."""
    x = tf.Variable([0.0])
    optimizer = DiceKerasSGDOptimizer(1.0, 1.0, learning_rate=0.0)

    def one():
        optimizer.minimize(lambda: tf.ones([4]) * x, [x])

    one()
    optimizer._error._errors[0].assign([math.inf])
    with pytest.raises(hsa.UnsupportedRunError, match="The error overflowed"):
        one()


@pytest.mark.parametrize(("variant", "jit"), [("sgd", False), ("adam", False), ("adam", True)])
def test_a_refused_step_in_a_graph_changes_nothing_and_ends_the_run(variant, jit):
    model = make_model(depth=1)
    optimizer = make(variant, 1.0, **({"momentum": 0.9} if variant == "sgd" else {}))
    signature = [tf.TensorSpec([4, 2], tf.float64)]
    one = compiled(step, model, optimizer, jit_compile=jit, input_signature=signature)
    one(FOUR)
    before = flat(model.trainable_variables), error_of(optimizer), flat(optimizer.get_weights()[1:])
    bad = tf.concat([FOUR[:3], [[math.nan, 0.0]]], 0)
    for features, problem in ((bad, "not finite"), (FOUR, "depend on the examples")):
        if jit:  # XLA leaves assertions out
            one(features)
            assert problem in str(optimizer.last_step.problem)
        else:
            with pytest.raises(tf.errors.InvalidArgumentError, match="The step was not taken"):
                one(features)
        after = flat(model.trainable_variables), error_of(optimizer)
        np.testing.assert_array_equal(np.r_[after], np.r_[before[:2]])
        np.testing.assert_array_equal(flat(optimizer.get_weights()[1:]), before[2])
    with pytest.raises(hsa.UnsupportedRunError, match=r"computed \d times, but 1 steps"):
        optimizer.privacy_event(dataset_size=8, batch_order="cyclic")


def test_gradients_that_are_only_looked_at_in_a_graph_are_counted():
    model, optimizer = make_model(depth=1), make("sgd", 1.0)

    @tf.function
    def look(features):
        pairs = optimizer._compute_gradients(
            lambda: losses(model, features), model.trainable_variables
        )
        return [gradient for gradient, _ in pairs]

    look(FOUR)
    with pytest.raises(hsa.UnsupportedRunError, match="computed 1 times, but 0 steps"):
        optimizer.privacy_event(dataset_size=8, batch_order="cyclic")
