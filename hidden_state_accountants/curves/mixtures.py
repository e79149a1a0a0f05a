"""Privacy profiles that are the mean of many Gaussian ones."""

from __future__ import annotations

import math

import numpy as np
from scipy import special

from hidden_state_accountants.curves.gaussian import deltas_from_mu
from hidden_state_accountants.curves.polygons import polygon
from hidden_state_accountants.curves.profiles import Profile

_RATIO = 1.01  # of neighbouring nodes
_SMALL = 1e-3  # first node, in standard deviations of the privacy loss
_NEAR = 3e-3  # distance of the nodes at least, in the same unit
_FAR, _TINY = 12.0, 1e-25  # a Gaussian has 2e-33 beyond _FAR: nothing beside _TINY


def many_gaussians(weights: np.ndarray, mus: np.ndarray, smallest: float) -> Profile:
    r"""Gaussian pairs, one of which is chosen, and revealed, with a probability that is its weight.

    What is returned is the polygon through its values at nodes that are one per cent apart, and
    0.3 % of a standard deviation at least: the variance of the loss grows by a few
    hundred-thousandths.

    Args:
        weights: >= 0.
        mus: In [0, inf].
        smallest: The profile ends where it is smaller.
    """
    finite = mus < math.inf
    nodes, values = _polygon(weights[finite], mus[finite], smallest)
    values = values + float(weights[~finite].sum())
    deltas = polygon(nodes, values)
    return Profile(deltas, deltas, float(nodes[-1]))


def _polygon(
    weights: np.ndarray, mus: np.ndarray, smallest: float
) -> tuple[np.ndarray, np.ndarray]:
    """Epsilons, the first of which is 0, and divergences there, until they are small."""
    deviation = math.sqrt(float(weights @ mus**2))
    if not deviation:
        return np.array([0.0, 1.0]), np.zeros(2)
    far = _FAR if smallest >= _TINY else None
    nodes, values = [np.zeros(1)], [_mean(weights, mus, np.zeros(1), far)]
    start = _SMALL * deviation
    while values[-1][-1] > smallest:
        if start < _NEAR / (_RATIO - 1) * deviation:
            stretch = start + _NEAR * deviation * np.arange(100)
        else:
            stretch = start * _RATIO ** np.arange(50)
        nodes.append(stretch)
        values.append(_mean(weights, mus, stretch, far))
        start = float(stretch[-1]) + max(_NEAR * deviation, (_RATIO - 1) * float(stretch[-1]))
    epsilons, deltas = np.concatenate(nodes), np.concatenate(values)
    last = int(np.argmax(deltas <= smallest))
    return epsilons[: last + 1], deltas[: last + 1]


def _mean(
    weights: np.ndarray, mus: np.ndarray, epsilons: np.ndarray, far: float | None
) -> np.ndarray:
    """At the epsilons, rounded up where a Gaussian is not looked at because it is `far` away."""
    if far is None:
        return weights @ deltas_from_mu(mus[:, None], epsilons)
    left_out = float(special.ndtr(-far)) * float(weights.sum())
    return weights @ deltas_from_mu(mus[:, None], epsilons, far) + left_out
