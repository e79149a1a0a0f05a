"""A private softmax classifier on handwritten digits, trained by Keras in cyclic batches.

Prints the epsilon of the released model (the last iterate) after every 25 epochs, and the privacy
statement of the run: beside it the epsilon with every checkpoint released, and that of another
algorithm, Poisson sampling, at the same noise.

    python examples/keras_cyclic.py [--epochs 200] [--noise-multiplier 6.0] ...
"""

import argparse

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from hidden_state_accountants import LossGeometry
from hidden_state_accountants.figures import fixed_up
from hidden_state_adapters.tf_privacy import (
    CyclicDPKerasSGDOptimizer,
    HiddenStateCallback,
    cyclic_dataset,
)

TRAIN_RECORDS, CLASSES = 1500, 10
# The gradient of softmax cross-entropy is at most sqrt(2) long for features of norm 1. A clip norm
# just above never acts, and a clip that never acts costs no contraction.
CLIP_NORM = 1.4143


def load_data():
    """scikit-learn's digits, each record centred and scaled to norm 1 by itself."""
    images, labels = load_digits(return_X_y=True)
    images = images - images.mean(axis=1, keepdims=True)
    images = (images / np.linalg.norm(images, axis=1, keepdims=True)).astype(np.float32)
    return train_test_split(
        images, labels, train_size=TRAIN_RECORDS, random_state=0, stratify=labels
    )


def make_model(features):
    """A linear model that starts at zero; deep models get no amplification."""
    inputs = tf.keras.Input([features])
    logits = tf.keras.layers.Dense(CLASSES, use_bias=False, kernel_initializer="zeros")(inputs)
    return tf.keras.Model(inputs, logits)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--noise-multiplier", type=float, default=6.0)
    parser.add_argument("--learning-rate", type=float, default=0.5)
    parser.add_argument("--weight-decay", type=float, default=0.005)
    parser.add_argument("--batch-size", type=int, default=150, help="must divide 1500")
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--delta", type=float, default=1e-5)
    options = parser.parse_args()

    x, x_test, y, y_test = load_data()
    model = make_model(x.shape[1])
    model.compile(
        CyclicDPKerasSGDOptimizer(
            CLIP_NORM,
            options.noise_multiplier,
            learning_rate=options.learning_rate,
            weight_decay=options.weight_decay,
        ),
        # One entry per example: they are clipped one by one.
        tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none"),
        metrics=["accuracy"],
    )
    data = cyclic_dataset(x, y, batch_size=options.batch_size)
    record = HiddenStateCallback(
        data=data,
        target_delta=options.delta,
        loss_geometry=LossGeometry.softmax_cross_entropy(1.0),  # every record has norm 1
    )
    history = model.fit(data, epochs=options.epochs, callbacks=[record], verbose=0).history
    for epoch, epsilon in enumerate(history["epsilon_if_released_now"], 1):
        if epoch % 25 == 0 or epoch == options.epochs:
            print(f"  epoch {epoch}: epsilon if the model were released now {fixed_up(epsilon, 3)}")
    # The test records are not protected by this run; neither are they trained on.
    _, accuracy = model.evaluate(x_test, y_test, verbose=0)
    print(f"Test accuracy of the released model: {accuracy:.3f}\n")
    print(record.report())


if __name__ == "__main__":
    main()
