"""Privacy profiles that are the mean of many Gaussian ones."""

from __future__ import annotations

import math

import numpy as np

from hidden_state_accountants.curves.gaussian import deltas_from_mu
from hidden_state_accountants.curves.polygons import polygon
from hidden_state_accountants.curves.profiles import Profile

_RATIO = 1.01  # of neighbouring nodes
_SMALL = 1e-3  # first node, in standard deviations of the privacy loss


def many_gaussians(weights: np.ndarray, mus: np.ndarray, smallest: float) -> Profile:
    r"""Gaussian pairs, one of which is chosen, and revealed, with a probability that is its weight.

    What is returned is the polygon through its values at nodes that are one per cent apart: the
    variance of the loss grows by a few hundred-thousandths.

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
    nodes, values = [np.zeros(1)], [_mean(weights, mus, np.zeros(1))]
    start = _SMALL * deviation
    while values[-1][-1] > smallest:
        stretch = start * _RATIO ** np.arange(50)
        nodes.append(stretch)
        values.append(_mean(weights, mus, stretch))
        start = float(stretch[-1]) * _RATIO
    epsilons, deltas = np.concatenate(nodes), np.concatenate(values)
    last = int(np.argmax(deltas <= smallest))
    return epsilons[: last + 1], deltas[: last + 1]


def _mean(weights: np.ndarray, mus: np.ndarray, epsilons: np.ndarray) -> np.ndarray:
    return weights @ deltas_from_mu(mus[:, None], epsilons)
