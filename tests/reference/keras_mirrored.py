"""Runs of a model on one device and on two replicas; run as a script of its own.

TensorFlow can be given two logical CPUs only before it is used, so not in the tests' process.
Prints one line "case | text" for each that is asked for, all by default.
"""

import contextlib
import sys

import numpy as np
import tensorflow as tf
from keras_models import AUTO, FEATURES, RECORDS, SGD, X, Y, crossentropy

import hidden_state_adapters.tf_privacy as adapter
from hidden_state_adapters.batch_plans import SampledPlan
from hidden_state_adapters.tf_privacy import (
    BlockCoordinateUpdate,
    DiceUpdate,
    HiddenStateSequential,
    keras_api,
)

BATCH = 5
layers, optimizers = tf.keras.layers, tf.keras.optimizers
FIXED = [[0, 1, 2, 3, 4], [], [7], [3, 5, 9], [1, 11], [2, 4, 6, 8]]  # of Poisson batches


def sgd():
    return SGD(0.5, weight_decay=0.1)


def dice():
    return DiceUpdate(SGD(0.5), error_l2_norm_clip=0.1)


def make(strategy, stack, optimizer=sgd, **kwargs):
    settings = {"l2_norm_clip": 0.5, "noise_multiplier": 0.0, "drop_remainder": True, **kwargs}
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model = HiddenStateSequential(stack(), **{"batch_order": "cyclic", **settings})
        model.build((None, FEATURES))
        model.compile(
            optimizer(), crossentropy(),
            metrics=["accuracy"], steps_per_execution=None if strategy is None else 2,
        )  # fmt: skip
    return model


def fit(model, **kwargs):
    return model.fit(X, Y, **{"batch_size": BATCH, "verbose": 0, "epochs": 2, **kwargs})


def apart(one, other):
    """The largest difference of two lists of arrays."""
    return max(float(np.max(np.abs(np.subtract(a, b)))) for a, b in zip(one, other, strict=True))


def head():
    return [layers.Dense(2, kernel_initializer="ones")]


def normalised():
    """Of which rows are differentiated one by one."""
    return [layers.Dense(4, kernel_initializer="ones"), layers.LayerNormalization(), *head()]


def difference(strategy, stack=head, **kwargs):
    """Between the weights after two calls of fit, on one device and on two replicas."""
    ends, events = [], []
    for where in (None, strategy):
        model = make(where, stack, **kwargs)
        start = [np.linspace(-1, 1, w.size).reshape(w.shape) for w in model.get_weights()]
        model.set_weights(start)
        fit(model)
        assert all(apart([a], [b]) > 0.01 for a, b in zip(model.get_weights(), start, strict=True))
        history = fit(model, epochs=1).history
        ends.append([*model.get_weights(), history["loss"], history["accuracy"]])
        events.append(model.privacy_event)
    copies = [v.values for v in keras_api.trained(model)]
    assert all((first.numpy() == second.numpy()).all() for first, second in copies)
    assert events[0] == events[1]
    assert events[0].num_steps == 3 * (3 if events[0].batch_order.value == "poisson" else 2)
    return apart(*ends)


def poisson(strategy):
    SampledPlan._draw = lambda plan, step: np.array(FIXED[step % 6], int)
    return difference(strategy, normalised, batch_order="poisson")


def noise(strategy):
    """The standard deviation of what moves the weights, where gradients are zero, over its own."""
    with strategy.scope():
        model = HiddenStateSequential(
            [layers.Dense(3000)], l2_norm_clip=0.5, noise_multiplier=3.0, batch_order="full"
        )
        model.compile(SGD(1.0), lambda targets, outputs: 0.0 * outputs[:, 0])
        model.build((None, FEATURES))
    start = model.get_weights()[0]
    fit(model, epochs=1)
    return float(np.std(model.get_weights()[0] - start) / (3.0 * 0.5 / RECORDS))


def resumed(strategy):
    """On one device, from the state of a run on two replicas."""
    whole, model, own = make(None, head), make(strategy, head), make(None, head)
    for one in (whole, whole, model):
        fit(one)
    own.set_weights(model.get_weights())
    own.resume(model.state(stays_private=True))
    fit(own)
    return apart(own.get_weights(), whole.get_weights())


def written(strategy):
    """The copy of one replica, between two steps."""
    model = make(strategy, head, noise_multiplier=2.0)

    def write(batch, logs):
        copy = keras_api.tensor_of(model.layers[0].kernel).values[1]
        copy.assign_add(tf.ones_like(copy))

    fit(model, callbacks=[tf.keras.callbacks.LambdaCallback(on_train_batch_end=write)])


def within_the_scope(strategy):
    model = make(strategy, head)
    with strategy.scope():
        fit(model)


def made_elsewhere(strategy):
    with strategy.scope():
        model = HiddenStateSequential(head(), l2_norm_clip=0.5, noise_multiplier=0.0)
        model.compile(sgd(), crossentropy())
    model.build((None, FEATURES))
    fit(model)


def compiled(strategy):
    with strategy.scope():
        model = make(strategy, head)
        model.compile(sgd(), model.loss, jit_compile=True)
    fit(model)


def with_noise(strategy):
    """A model, its loss, and an optimizer that has noise of its own."""
    with strategy.scope():
        model = tf.keras.Sequential([tf.keras.Input([FEATURES]), *head()])
        optimizer = adapter.CyclicDPKerasSGDOptimizer(1.0, 1.0)
        model.compile(optimizer, loss := crossentropy(reduction="none"))
    return model, loss, optimizer


def optimizer_in_fit(strategy):
    model, *_ = with_noise(strategy)
    batches = adapter.cyclic_dataset(X, Y, batch_size=4)
    model.fit(batches, callbacks=[adapter.HiddenStateCallback(data=batches)], verbose=0)


def optimizer_in_own_loop(strategy):
    model, loss, optimizer = with_noise(strategy)
    variables = model.trainable_variables
    tf.function(
        lambda: strategy.run(lambda: optimizer.minimize(lambda: loss(Y, model(X)), variables))
    )()


CASES = {
    "optimizer_in_fit": optimizer_in_fit,
    "optimizer_in_own_loop": optimizer_in_own_loop,
    "head": lambda strategy: difference(strategy, **AUTO),
    "rows_of_poisson_batches": poisson,
    "dice": lambda strategy: difference(strategy, optimizer=dice),
    "noise": noise,
    "resumed": resumed,
    "written": written,
    "within_the_scope": within_the_scope,
    "compiled": compiled,
    "made_elsewhere": made_elsewhere,
    "adam": lambda strategy: fit(make(strategy, head, optimizers.Adam)),
    "blocks": lambda strategy: fit(make(strategy, head, lambda: BlockCoordinateUpdate("sgd"))),
    "one_device": lambda _: fit(make(tf.distribute.OneDeviceStrategy("CPU:0"), head)),
    "workers": lambda _: fit(make(tf.distribute.MultiWorkerMirroredStrategy(), head)),
}


def main():
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})  # as conftest.py
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    for name in sys.argv[1:] or CASES:
        try:
            text = str(CASES[name](strategy))
        except Exception as error:
            text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        print(f"{name} | {text}", flush=True)


if __name__ == "__main__":
    main()
