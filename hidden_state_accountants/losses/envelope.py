r"""Huber envelopes of convex losses: what a clip would do, as the gradient of a convex loss.

The envelope of a convex loss l with an M-Lipschitz gradient is

.. math:: L(z) = \min_u\; l(u) + h(z - u), \qquad
    h(v) = \begin{cases} |v|^2/(2m) & |v| \le mC \\ C|v| - mC^2/2 & \text{else} \end{cases}

with the clip norm C and the smoothing m >= 0. L is convex, its gradient is nowhere longer than C,
and it is Lipschitz with the constant M/(1 + mM). Proofs: docs/theory/moduli.md.
"""

from __future__ import annotations

import numpy as np

from hidden_state_accountants import validate
from hidden_state_accountants.events.loss_geometry import square_norm
from hidden_state_accountants.losses.arrays import NUMPY
from hidden_state_accountants.losses.softmax import SoftmaxEnvelope, solve

LEAST_SOFTMAX_CLIP_NORM = 0.01
_BLOCK = 2**15  # numbers of an array that is worked on: all of them together fit into the cache


def check_clip_norm(value: object, *, least: float = 0.0) -> float:
    """Returns a clip norm: a positive number, not below `least`; other things raise."""
    clip_norm = validate.magnitude("clip_norm", value, positive=True)
    if clip_norm < least:
        raise ValueError(
            f"Expected clip_norm >= {least:g} for softmax cross-entropy, got {clip_norm!r}: the "
            "difference of probabilities and target loses too many digits in shorter gradients. "
            "Raise it; it is the norm in the logits, for gradients of up to sqrt(2)."
        )
    return clip_norm


def check_smoothing(value: object, *, needed_by: str = "") -> float:
    """Returns a smoothing: a number >= 0, and > 0 for a loss with a kink; other things raise."""
    smoothing = validate.magnitude("smoothing", value)
    if needed_by and not smoothing:
        raise ValueError(
            f"Expected smoothing > 0 for the {needed_by} loss, which has a kink, got {value!r}. "
            "envelope_smoothing says how much a learning rate needs."
        )
    return smoothing


def envelope_smoothing(
    learning_rate: float,
    *,
    curvature: float,
    feature_norm: float,
    bias: bool = False,
    weight_decay: float = 0.0,
    batch_stretch: float = 1.0,
) -> float:
    r"""The least smoothing with which a step of a linear model stretches no distance.

    .. math:: m = \max\Bigl(0,\; \frac{\eta k F^2}{2 (1 - \eta w)} - \frac1M\Bigr)

    Then the modulus of the update is c = 1 - learning_rate * weight_decay for every smaller
    learning rate as well, if the clip norm of the optimizer is not below the envelope's.

    Args:
        learning_rate: eta, the largest of the run, for the mean of the gradients of a batch.
        curvature: M, the Lipschitz constant of the plain loss' gradient in the prediction: 1/2 for
            softmax cross-entropy, 1/4 for the logistic loss, `scale` for the squared error,
            infinite for the hinge loss.
        feature_norm: F, a bound on the L2 norm of every record's features.
        bias: True if a bias is trained as well (F**2 becomes F**2 + 1).
        weight_decay: w, with learning_rate * weight_decay < 1.
        batch_stretch: k, how many times the batch size the largest batch may be: more than 1 for
            Poisson batches, whose gradients are divided by their mean size.

    Returns:
        m, to be passed as `smoothing`.

    Raises:
        TypeError, ValueError: An argument has an impossible value.
    """
    rate = validate.magnitude("learning_rate", learning_rate)
    decay = validate.magnitude("weight_decay", weight_decay)
    if not rate * decay < 1:
        raise ValueError(
            f"Expected learning_rate * weight_decay < 1, got {rate * decay:g}. Lower one of them."
        )
    curvature = validate.real("curvature", curvature, above=0, allow_inf=True)
    stretch = validate.real("batch_stretch", batch_stretch, minimum=1)
    needed = rate * stretch * square_norm(feature_norm, bias) / (2 * (1 - rate * decay))
    # Rounded up, so that no rounding later makes the step longer than what was asked for.
    return max(0.0, needed * (1 + 1e-12) - 1 / curvature)


def softmax_envelope(
    logits: np.ndarray, targets: np.ndarray, clip_norm: float, smoothing: float
) -> tuple[np.ndarray, np.ndarray]:
    """Values and gradients, of arguments that were checked; shape (records, classes)."""
    records, classes = logits.shape
    value, gradient = np.empty(records), np.empty((records, classes))
    size = max(1, _BLOCK // classes)
    with np.errstate(all="ignore"):
        for first in range(0, records, size):
            part = slice(first, first + size)
            z, t = (np.array(a[part].T, dtype=np.float64, order="C") for a in (logits, targets))
            problem = SoftmaxEnvelope.of(NUMPY, z, t, clip_norm, smoothing)
            point = solve(problem)
            value[part], gradient[part] = problem.value(point), problem.gradient(point).T
    return value, gradient
