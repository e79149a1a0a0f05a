"""Your own training loop asks a private run for its steps.

python examples/keras_custom_loop.py [--epochs 60] [--noise-multiplier 6.0] ...
"""

import argparse

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

from hidden_state_accountants.figures import fixed_up
from hidden_state_adapters.tf_privacy import PrivateRun

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
    steps = RECORDS // options.batch_size
    rate = tf.keras.optimizers.schedules.CosineDecay(
        options.learning_rate, decay_steps=options.epochs * steps
    )
    run = PrivateRun(
        model,
        x,
        y,
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=tf.keras.optimizers.SGD(rate, weight_decay=0.005),
        batch_size=options.batch_size,
        batch_order="cyclic",
        l2_norm_clip=1.4143,
        noise_multiplier=options.noise_multiplier,
        projection_radius=options.projection_radius,
        feature_norm=1.0,
    )
    for epoch in range(1, options.epochs + 1):
        for _ in range(steps):
            run.step()
        if epoch % 20 == 0:
            epsilon = run.get_epsilon(options.delta)
            print(f"  epoch {epoch}: epsilon if the model were released now {fixed_up(epsilon, 3)}")
    accuracy = np.mean(np.argmax(model(x_test), axis=1) == y_test)
    print(f"Test accuracy of the released model: {accuracy:.3f}\n")
    print(run.report(options.delta))


if __name__ == "__main__":
    main()
