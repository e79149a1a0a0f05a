"""The envelopes of losses of one prediction, and of the squared error, for any framework.

A function returns the values, shape (records,), and the gradients in the predictions, which have
the shape of the predictions. Proofs: docs/theory/moduli.md.
"""

from __future__ import annotations

import math

from hidden_state_accountants.losses.arrays import TINY, Array, Arrays
from hidden_state_accountants.losses.softmax import TOLERANCE

_NEWTON_STEPS = 8  # after which every root has its digits; a test tries all sizes


def logistic(
    xp: Arrays, logits: Array, targets: Array, clip_norm: float, smoothing: float
) -> tuple[Array, Array]:
    r"""Binary cross-entropy of one logit with targets in [0, 1].

    The gradient is that at the root u of :math:`u + m\,\sigma(u) = z + m t`, cut off at C. Not a
    number where no root was found.
    """
    z, t, m = logits, targets, smoothing
    u = z if m == 0 else _proximal_logit(xp, z + m * t, m)
    y = xp.sigmoid(u) - t
    error = xp.abs(z - u - m * y) / (4.0 + m)
    y = xp.where(error <= TOLERANCE * (1.0 + xp.abs(z)), y, math.nan + 0.0 * y)
    y = xp.minimum(xp.maximum(y, -clip_norm), clip_norm)
    p = t + y
    entropy = -p * xp.log(xp.maximum(p, TINY)) - (1.0 - p) * xp.log(xp.maximum(1.0 - p, TINY))
    return xp.maximum(y * z + entropy - 0.5 * m * y * y, 0.0), y


def _proximal_logit(xp: Arrays, a: Array, m: float) -> Array:
    """The root u of u + m sigma(u) = a.

    With (-u, m - a) for (u, a) it is negative, where sigma is convex: Newton's method descends to
    it from every point above.
    """
    is_mirrored = a > 0.5 * m
    a = xp.where(is_mirrored, m - a, a)
    # log p + m p <= a for p = sigma(u) <= 1/2, so m p <= omega(a + log m) <= max(1, a + log m).
    p = xp.minimum(xp.maximum(a + math.log(m), 1.0) / m, 0.5)
    u = xp.minimum(xp.log(p / (1.0 - p)), a)
    for _ in range(_NEWTON_STEPS):
        s = xp.sigmoid(u)
        u = u - (u + m * s - a) / (1.0 + m * s * (1.0 - s))
    return xp.where(is_mirrored, -u, u)


def hinge(
    xp: Arrays, predictions: Array, targets: Array, clip_norm: float, smoothing: float
) -> tuple[Array, Array]:
    """max(0, 1 - t z) with targets -1 and 1; the smoothing is positive."""
    gap = 1.0 - targets * predictions
    slope = xp.minimum(xp.maximum(gap / smoothing, 0.0), min(1.0, clip_norm))
    return slope * gap - 0.5 * smoothing * slope * slope, -targets * slope


def squared_error(
    xp: Arrays,
    predictions: Array,
    targets: Array,
    clip_norm: float,
    smoothing: float,
    scale: float,
) -> tuple[Array, Array]:
    """(scale/2) |prediction - target|**2 of vectors; shape (outputs, records)."""
    gap = predictions - targets
    inverse = 1.0 / scale + smoothing
    y = gap / inverse
    y = y * xp.minimum(clip_norm / xp.maximum(xp.sqrt(xp.total(y * y)), TINY), 1.0)
    return xp.total(y * gap) - 0.5 * inverse * xp.total(y * y), y
