"""The same small runs for both frameworks, without noise, in float64, by the reference steps.

A logistic model of one logit on 24 records of 4 features in 6 batches of 4, two epochs.
Numbers that float32 holds exactly, because Keras keeps learning rates in float32.
"""

import numpy as np
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


def cyclic_sgd(x, gradient, records, *, batch_size, num_steps, learning_rate, clip, noise,
               weight_decay=0.0, radius=np.inf):  # fmt: skip
    """The iterates x_1 to x_T of

        x <- P_R((1 - lr w) x - lr/b (sum of clip_C(gradient(x, record)) + noise_t)).

    Batch k is records[k*b : (k+1)*b]; noise[t] is added to the sum in step t; learning_rate is a
    function of the number of steps taken before.
    """
    iterates, period = [], len(records) // batch_size
    for t in range(num_steps):
        start = t % period * batch_size
        total = np.array(noise[t], dtype=np.float64)
        for record in records[start : start + batch_size]:
            g = gradient(x, record)
            total = total + g * min(1.0, clip / max(np.linalg.norm(g), 1e-300))
        rate = learning_rate(t)
        x = (1 - rate * weight_decay) * x - rate / batch_size * total
        x = x * min(1.0, radius / max(np.linalg.norm(x), 1e-300))
        iterates.append(x)
    return np.array(iterates)


def logistic_gradient(x, record):
    """Of the cross-entropy of the logit <features, x[:-1]> + x[-1] and a label in {0, 1}."""
    features, label = record
    extended = np.append(features, 1.0)
    return (1 / (1 + np.exp(-extended @ x)) - label) * extended


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
