"""A training loop of one's own, as in TensorFlow's guides, with the hidden-state optimizer.

HiddenStateRecorder hands out the batches and records the steps that were taken on them, so the loop
gets the same privacy statement as Model.fit with HiddenStateCallback. At the end it shows what
happens to a loop that does something else than it says.

    python examples/keras_custom_loop.py [--epochs 60] [--noise-multiplier 6.0] ...
"""

import argparse

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

from hidden_state_accountants import UnsupportedRunError
from hidden_state_adapters.tf_privacy import (
    CyclicDPKerasSGDOptimizer,
    HiddenStateRecorder,
    cyclic_dataset,
)

RECORDS, CLASSES = 1500, 10


def load_data():
    """scikit-learn's digits, each record centred and scaled to norm 1 by itself."""
    images, labels = load_digits(return_X_y=True)
    images = images - images.mean(axis=1, keepdims=True)
    images = (images / np.linalg.norm(images, axis=1, keepdims=True)).astype(np.float32)
    return (images[:RECORDS], labels[:RECORDS]), (images[RECORDS:], labels[RECORDS:])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--noise-multiplier", type=float, default=6.0)
    parser.add_argument("--learning-rate", type=float, default=0.5)
    parser.add_argument("--projection-radius", type=float, default=10.0)
    parser.add_argument("--batch-size", type=int, default=150, help="must divide 1500")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--delta", type=float, default=1e-5)
    options = parser.parse_args()

    (x, y), (x_test, y_test) = load_data()
    model = tf.keras.layers.Dense(CLASSES, use_bias=False, kernel_initializer="zeros")
    optimizer = CyclicDPKerasSGDOptimizer(
        l2_norm_clip=1.4143,
        noise_multiplier=options.noise_multiplier,
        learning_rate=tf.keras.optimizers.schedules.CosineDecay(
            options.learning_rate, decay_steps=options.epochs * RECORDS // options.batch_size
        ),
        weight_decay=0.005,
        projection_radius=options.projection_radius,
    )
    record = HiddenStateRecorder(
        model,
        optimizer,
        cyclic_dataset(x, y, batch_size=options.batch_size),
        # What the loop below computes: every step is compared with it.
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none"),
        loss_geometry="auto",
        feature_norm=1.0,
    )

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x))  # one per example
        optimizer.minimize(losses, model.trainable_variables, tape=tape)

    for epoch in range(1, options.epochs + 1):
        for batch in record.batches():
            step(*batch)
        if epoch % 20 == 0:
            epsilon = record.get_epsilon(options.delta)
            print(f"  epoch {epoch}: epsilon if the model were released now {epsilon:.3f}")
    accuracy = np.mean(np.argmax(model(x_test), axis=1) == y_test)
    print(f"Test accuracy of the released model: {accuracy:.3f}\n")
    print(record.report(options.delta))

    try:
        for batch in record.batches():
            step(*batch)
            step(*batch)  # once more on the same batch
    except UnsupportedRunError as error:
        print(f"A loop that takes two steps on a batch is refused: {error}")


if __name__ == "__main__":
    main()
