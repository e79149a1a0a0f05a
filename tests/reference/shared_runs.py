"""The same small runs for both frameworks, without noise, in float64, by the reference steps.

A logistic model of one logit on 24 records of 4 features in 6 batches of 4, two epochs.
Numbers that float32 holds exactly, because Keras keeps learning rates in float32.
"""

import numpy as np
from cyclic_sgd import cyclic_sgd, logistic_gradient
from dice import adam_step, automatic_step, sgd_step

from hidden_state_accountants import Regulariser

RECORDS, FEATURES, BATCH, STEPS = 24, 4, 4, 12
RATE, CLIP, ERROR_CLIP, BETAS, ADAM_EPSILON = 0.5, 0.25, 0.125, (0.875, 0.96875), 1e-9
DECAY, RADIUS = 0.125, 0.35546875
START = np.append(np.linspace(-0.2, 0.25, FEATURES), 0.1)
DICE = ("sgd", "adam", "automatic")


def records():
    """Features (24, 4) of unit rows and labels (24,) in {0, 1}."""
    random = np.random.default_rng(7)
    x = random.normal(size=(RECORDS, FEATURES))
    labels = (random.random(RECORDS) < 0.5).astype(float)
    return x / np.linalg.norm(x, axis=1, keepdims=True), labels


def cyclic_iterates():
    """Clipped, with decoupled decay and projection."""
    return cyclic_sgd(
        START, logistic_gradient, list(zip(*records(), strict=True)), batch_size=BATCH,
        num_steps=STEPS, learning_rate=lambda t: RATE, clip=CLIP, noise=np.zeros((STEPS, 5)),
        weight_decay=DECAY, radius=RADIUS,
    )  # fmt: skip


PROXES = [
    Regulariser(l1=0.0625, l2=0.25),
    Regulariser(group_lasso=0.0625, group_axis=0),
    Regulariser(l1=0.03125, low=0.0),
    Regulariser(low=-0.125, high=0.0625),
]


def prox_iterates(regulariser, as_parameters):
    """Clipped, and then the proximal map of every parameter.

    Args:
        regulariser: One of PROXES.
        as_parameters: Makes the list of arrays, in their shapes, of a vector.
    """
    x, iterates = START, []
    features, labels = records()
    for t in range(STEPS):
        rows = np.arange(BATCH) + t * BATCH % RECORDS
        gradients = np.array([logistic_gradient(x, (features[i], labels[i])) for i in rows])
        norms = np.linalg.norm(gradients, axis=1, keepdims=True)
        x = x - RATE / BATCH * (gradients * np.minimum(1, CLIP / norms)).sum(axis=0)
        parts = [regulariser.prox(p, RATE).ravel() for p in as_parameters(x)]
        x = np.concatenate(parts)
        iterates.append(x)
    return np.array(iterates)


def dice_iterates(variant):
    """DiceSGD, its Adam and its automatic variant (with both clip norms CLIP)."""
    x, error, moments = START, np.zeros_like(START), (0.0, 0.0)
    features, labels = records()
    common = {"learning_rate": RATE, "divisor": BATCH, "clip_norm": CLIP}
    iterates = []
    for t in range(STEPS):
        rows = np.arange(BATCH) + t * BATCH % RECORDS
        gradients = np.array([logistic_gradient(x, (features[i], labels[i])) for i in rows])
        if variant == "automatic":
            x, error = automatic_step(x, error, gradients, 0.0, **common)
        elif variant == "sgd":
            x, error = sgd_step(x, error, gradients, 0.0, error_clip_norm=ERROR_CLIP, **common)
        else:
            x, error, moments = adam_step(
                x, error, moments, t + 1, gradients, 0.0, error_clip_norm=ERROR_CLIP,
                betas=BETAS, eps=ADAM_EPSILON, **common,
            )  # fmt: skip
        iterates.append(x)
    return np.array(iterates)
