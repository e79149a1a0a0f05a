"""Every way to use a private Keras optimizer on two replicas; run as a script of its own.

TensorFlow can be given two logical CPUs only before it is used, so not in the tests' process.
"""

import numpy as np
import tensorflow as tf

from hidden_state_adapters.tf_privacy import (
    BlockCoordinateKerasOptimizer,
    CyclicDPKerasSGDOptimizer,
    HiddenStateCallback,
    cyclic_dataset,
)

X, Y = np.eye(8, 4, dtype="float32"), np.zeros((8, 1), "float32")


def make_model():
    return tf.keras.Sequential([tf.keras.Input([4]), tf.keras.layers.Dense(1)])


def loss():
    return tf.keras.losses.BinaryCrossentropy(from_logits=True, reduction="none")


def constructed_in_scope(kind, strategy):
    with strategy.scope():
        kind(1.0, 1.0)


def fit(kind, strategy):
    optimizer = kind(1.0, 1.0)
    with strategy.scope():
        model = make_model()
        model.compile(optimizer, loss())
    data = cyclic_dataset(X, Y, batch_size=4)
    callback = HiddenStateCallback(data=data)
    model.fit(data, callbacks=[callback], verbose=0)


def fit_without_callback(kind, strategy):
    optimizer = kind(1.0, 1.0)
    with strategy.scope():
        model = make_model()
    model.compile(optimizer, loss())
    model.fit(X, Y, batch_size=4, verbose=0)


def own_loop(kind, strategy):
    optimizer = kind(1.0, 1.0)
    with strategy.scope():
        model = make_model()

    @tf.function
    def step(x, y):
        strategy.run(
            lambda x, y: optimizer.minimize(lambda: loss()(y, model(x)), model.trainable_variables),
            (x, y),
        )

    step(X[:4], Y[:4])


def main():
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    for kind in (CyclicDPKerasSGDOptimizer, BlockCoordinateKerasOptimizer):
        for act in (constructed_in_scope, fit_without_callback, own_loop, fit):
            try:
                act(kind, strategy)
            except Exception as error:
                text = f"{type(error).__name__}: {' '.join(str(error).split())}"
            else:
                text = "it ran"
            print(f"{kind.__name__} {act.__name__} | {text}")


if __name__ == "__main__":
    main()
