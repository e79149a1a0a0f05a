"""DiceSGD as printed (Zhang, Bu, Wu, Hong 2024, arXiv 2311.14632), Algorithms 2, 3 and 4.

Each step takes the per-example gradients (rows) of its batch at `x` and the noise of the step, and
returns the new state. `noise` is added to the mean update v; the error uses v without noise.
"""

import numpy as np


def clip(vector, norm):
    return vector * min(1.0, norm / max(np.linalg.norm(vector), 1e-300))


def normalise(vector, norm):
    length = np.linalg.norm(vector)
    return vector * (norm / length) if length > 0 else vector


def update(error, gradients, divisor, clip_norm, error_clip_norm, clipper=clip):
    """Lines 5 and 7 of Algorithm 2 without noise: (v, next error)."""
    gradients = np.reshape(gradients, (-1, len(error)))
    clipped = sum((clipper(g, clip_norm) for g in gradients), np.zeros(len(error))) / divisor
    v = clipped + clipper(error, error_clip_norm)
    return v, error + gradients.sum(axis=0) / divisor - v


def sgd_step(x, error, gradients, noise, *, learning_rate, divisor, clip_norm, error_clip_norm):
    """Algorithm 2."""
    v, error = update(error, gradients, divisor, clip_norm, error_clip_norm)
    return x - learning_rate * (v + noise), error


def automatic_step(x, error, gradients, noise, *, learning_rate, divisor, clip_norm=1.0):
    """Algorithm 4; the paper's learning rate absorbs the clip norm."""
    v, error = update(error, gradients, divisor, clip_norm, clip_norm, normalise)
    return x - learning_rate * (v + noise), error


def adam_step(
    x, error, moments, step, gradients, noise,
    *, learning_rate, divisor, clip_norm, error_clip_norm, betas=(0.9, 0.999), eps=1e-8,
):  # fmt: skip
    """Algorithm 3; `step` counts from 1, the moments start at 0.

    The noise is inside the moments. Two misprints are put right: the second moment decays with
    1 - beta2 (not beta^2), and the bias corrections use t + 1 (t starts at 0: division by zero).
    """
    v, error = update(error, gradients, divisor, clip_norm, error_clip_norm)
    noisy = v + noise
    first = betas[0] * moments[0] + (1 - betas[0]) * noisy
    second = betas[1] * moments[1] + (1 - betas[1]) * noisy**2
    corrected = first / (1 - betas[0] ** step), second / (1 - betas[1] ** step)
    return x - learning_rate * corrected[0] / (np.sqrt(corrected[1]) + eps), error, (first, second)
