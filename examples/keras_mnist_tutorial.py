"""TensorFlow Privacy's MNIST tutorial with the hidden-state optimizer in place of its own.

The tutorial (mnist_dpsgd_tutorial_keras.py of tensorflow/privacy) trains a convolutional network.
Here the convolutions are a public backbone: random filters, drawn without looking at the data, and
frozen. Only the linear layer on top is trained, because only losses that are convex in the trained
parameters gain from hiding the iterates. The data are scikit-learn's handwritten digits, which come
with the package. The lines that differ from the tutorial in kind are marked, "-" as it was:

    python examples/keras_mnist_tutorial.py [--epochs 60] [--noise-multiplier 6.0] ...
"""

import argparse

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

from hidden_state_accountants import LossGeometry
from hidden_state_adapters.tf_privacy import (
    CyclicDPKerasSGDOptimizer,
    HiddenStateCallback,
    cyclic_dataset,
)

RECORDS, CLASSES = 1500, 10


def load_data():
    """1500 images to train on and 297 to test on, the order of the package."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype(np.float32).reshape(-1, 8, 8, 1)
    return (images[:RECORDS], labels[:RECORDS]), (images[RECORDS:], labels[RECORDS:])


def make_backbone(seed):
    """The tutorial's layers up to the last one. The seed is public, as is everything in it."""
    layers, normal = tf.keras.layers, tf.keras.initializers.HeNormal
    backbone = tf.keras.Sequential(
        [
            layers.Conv2D(8, 3, activation="relu", kernel_initializer=normal(seed)),
            layers.MaxPool2D(2, 1),
            layers.Conv2D(
                8, 3, padding="same", activation="relu", kernel_initializer=normal(seed + 1)
            ),
            layers.MaxPool2D(2, 1),
            layers.Flatten(),
            # Features of norm 1, one image at a time: what is known of the loss relies on it.
            layers.LayerNormalization(center=False, scale=False),
            layers.UnitNormalization(),
        ]
    )
    backbone.trainable = False
    return backbone


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--learning-rate", type=float, default=0.5)
    parser.add_argument("--noise-multiplier", type=float, default=6.0)
    parser.add_argument("--l2-norm-clip", type=float, default=1.4143)
    parser.add_argument("--weight-decay", type=float, default=0.005)
    parser.add_argument("--batch-size", type=int, default=150)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--delta", type=float, default=1e-5)
    options = parser.parse_args()

    (x, y), (x_test, y_test) = load_data()
    # The backbone is frozen, so its features are computed once.
    backbone = make_backbone(seed=0)
    x, x_test = (backbone.predict(part, verbose=0) for part in (x, x_test))
    zeros = tf.keras.initializers.Zeros()
    head = tf.keras.layers.Dense(CLASSES, use_bias=False, kernel_initializer=zeros)
    model = tf.keras.Sequential([head])

    # - optimizer = DPKerasSGDOptimizer(
    optimizer = CyclicDPKerasSGDOptimizer(
        l2_norm_clip=options.l2_norm_clip,
        noise_multiplier=options.noise_multiplier,
        num_microbatches=options.batch_size,
        learning_rate=options.learning_rate,
        weight_decay=options.weight_decay,  # new
    )
    # Compute vector of per-example loss rather than its mean over a minibatch.
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])

    # - model.fit(x, y, epochs=options.epochs, batch_size=options.batch_size, ...)
    data = cyclic_dataset(x, y, batch_size=options.batch_size)
    record = HiddenStateCallback(data=data, loss_geometry=LossGeometry.softmax_cross_entropy(1.0))
    model.fit(data, epochs=options.epochs, callbacks=[record], verbose=0)

    _, accuracy = model.evaluate(x_test, y_test, verbose=0)
    print(f"Test accuracy of the released model: {accuracy:.3f}\n")
    # - compute_dp_sgd_privacy_statement(len(x), options.batch_size, options.epochs,
    # -                                  options.noise_multiplier, options.delta)
    print(record.report(options.delta))


if __name__ == "__main__":
    main()
