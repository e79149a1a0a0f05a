"""The same small runs for both frameworks, without noise, in float64, by the reference steps.

A logistic model of one logit on 24 records of 4 features in 6 batches of 4, two epochs.
Numbers that float32 holds exactly, because Keras keeps learning rates in float32.
"""

import numpy as np
from dice import adam_step, automatic_step, clip, sgd_step

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


def logistic_gradient(x, record):
    """Of the cross-entropy of the logit <features, x[:-1]> + x[-1] and a label in {0, 1}."""
    features, label = record
    extended = np.append(features, 1.0)
    return (1 / (1 + np.exp(-extended @ x)) - label) * extended


def gradients(x, t):
    """Of the records of the batch of step t, one in a row."""
    rows = np.arange(BATCH) + t * BATCH % RECORDS
    features, labels = records()
    return np.array([logistic_gradient(x, (features[i], labels[i])) for i in rows])


def clipped_iterates(finish):
    """The iterates x <- finish(x, lr/b (sum of clipped gradients)) of STEPS steps."""
    x, iterates = START, []
    for t in range(STEPS):
        total = sum(clip(gradient, CLIP) for gradient in gradients(x, t))
        x = finish(x, RATE / BATCH * total)
        iterates.append(x)
    return np.array(iterates)


def cyclic_iterates():
    """Clipped, with decoupled decay and projection."""
    return clipped_iterates(lambda x, step: clip((1 - RATE * DECAY) * x - step, RADIUS))


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
    return clipped_iterates(
        lambda x, step: np.concatenate(
            [regulariser.prox(p, RATE).ravel() for p in as_parameters(x - step)]
        )
    )


def dice_iterates(variant):
    """DiceSGD, its Adam and its automatic variant (with both clip norms CLIP)."""
    x, error, moments = START, np.zeros_like(START), (0.0, 0.0)
    common = {"learning_rate": RATE, "divisor": BATCH, "clip_norm": CLIP}
    iterates = []
    for t in range(STEPS):
        rows = gradients(x, t)
        if variant == "automatic":
            x, error = automatic_step(x, error, rows, 0.0, **common)
        elif variant == "sgd":
            x, error = sgd_step(x, error, rows, 0.0, error_clip_norm=ERROR_CLIP, **common)
        else:
            x, error, moments = adam_step(
                x, error, moments, t + 1, rows, 0.0, error_clip_norm=ERROR_CLIP,
                betas=BETAS, eps=ADAM_EPSILON, **common,
            )  # fmt: skip
        iterates.append(x)
    return np.array(iterates)
