r"""One temperature for the probabilities of a classifier, released with noise.

Weights that clipping and noise left have a length of their own, so that the softmax of their logits
z is too sure on hard data. Of every record the clipped losses

.. math:: q(z, y) = \left(\ell(s z, y) - \log k\right)_{s \in (1/8, 1/4, 1/2, 1)}
          \min\left(1, \frac{2}{\|\cdot\|}\right)

are summed (k classes), and the sum gets Gaussian noise. The scale s at the least point of a
parabola in log s through the noisy means is taken. Labels stay what they are: the order of the
logits does. Where that noise is too long, s is a number of the run (MacKay 1992).
"""

from __future__ import annotations

import math

import numpy as np

RECORD_NORM = 2.0
"""The bound on the norm of what one record adds."""
_SCALES = np.array([1 / 8, 1 / 4, 1 / 2, 1])


def clipped_losses(
    logits: np.ndarray, labels: np.ndarray, weights: np.ndarray | None = None
) -> np.ndarray:
    """Returns the sum of q over records, shape (4,); no record adds more than `RECORD_NORM`.

    Args:
        logits: Shape (records, classes), or (records, 1) for two classes; finite.
        labels: Positions of the classes, shape (records,).
        weights: Weights in [0, 1] of the records; None for 1.
    """
    if logits.shape[1] == 1:
        logits = np.hstack([np.zeros_like(logits), logits])
    logits = logits - logits.max(axis=1, keepdims=True)
    own = np.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
    losses = np.array([np.log(np.exp(s * logits).sum(axis=1)) - s * own for s in _SCALES]).T
    losses -= math.log(logits.shape[1])
    factors = np.minimum(RECORD_NORM / np.maximum(np.linalg.norm(losses, axis=1), 1e-300), 1.0)
    return np.asarray(losses.T @ (factors if weights is None else factors * weights))


def public_scale(classes: int, records: float) -> float:
    """Returns the scale of the logits where nothing is released, from public numbers alone.

    The noise of a recommended run has a standard deviation of about 1.45 in a logit, so that two
    classes need 1/sqrt(1 + 1.45^2 pi/8); that more classes need less, and weights that are mostly
    noise more, was found on named data sets. `records` counts times the mu of the target.
    """
    return records / (records + 8) / math.sqrt(1 + 1.65 / classes)


def best_scale(means: np.ndarray) -> float:
    """Returns the scale of the logits, in [1/8, 1], from the mean of q with noise."""
    exponents = np.log2(_SCALES)
    square, slope, _ = np.polyfit(exponents, means, 2)
    if square <= 0:  # no least point inside
        return float(_SCALES[np.argmin(means)])
    return float(2 ** np.clip(-slope / (2 * square), exponents[0], exponents[-1]))
