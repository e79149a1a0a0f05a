"""DiceSGD and DiceAdam in Keras on a tiny model, and the paper's steps on one vector."""

import numpy as np
import tensorflow as tf

from hidden_state_adapters.tf_privacy import DiceKerasAdamOptimizer, DiceKerasSGDOptimizer

# Exact in float32, in which Keras keeps the learning rate and the betas.
RATE, CLIP, ERROR_CLIP, BETAS = 0.25, 0.5, 0.2, (0.875, 0.96875)
OPTIMIZERS = {
    "sgd": (DiceKerasSGDOptimizer, {}),
    "adam": (DiceKerasAdamOptimizer, {"beta_1": BETAS[0], "beta_2": BETAS[1]}),
    "automatic": (DiceKerasSGDOptimizer, {"automatic": True, "error_l2_norm_clip": None}),
}
VARIANTS = list(OPTIMIZERS)


def make_model(dtype="float64", depth=2):
    """One or two layers; two compile for twice as long."""
    layers = [
        tf.keras.layers.Dense(3, activation="tanh", dtype=dtype),
        tf.keras.layers.Dense(1, dtype=dtype),
    ]
    model = tf.keras.Sequential(layers[:depth])
    model.build((None, 2))
    random = np.random.default_rng(0)
    model.set_weights([random.normal(size=w.shape) for w in model.get_weights()])
    return model


def make(variant="sgd", noise_multiplier=0.0, **options):
    cls, extra = OPTIMIZERS[variant]
    arguments = {"error_l2_norm_clip": ERROR_CLIP, "learning_rate": RATE}
    return cls(CLIP, noise_multiplier, **(arguments | extra | options))


def batches(sizes, dtype="float64"):
    random = np.random.default_rng(1)
    return [tf.constant(random.normal(size=(size, 2)), dtype) for size in sizes]


FOUR, OTHER_FOUR = batches([4, 4])


def losses(model, features):
    return 3.0 * tf.reduce_sum(model(features) ** 2, axis=1)


def step(model, optimizer, features):
    optimizer.minimize(lambda: losses(model, features), model.trainable_variables)


def compiled(act, model, optimizer, **kwargs):
    @tf.function(**kwargs)
    def one(features):
        act(model, optimizer, features)

    return one


def flat(tensors):
    return np.concatenate([np.asarray(t).ravel() for t in tensors]).astype(float)


def error_of(optimizer):
    return flat(optimizer._steps.step.rule._errors)
