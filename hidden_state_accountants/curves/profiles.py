r"""Privacy profiles: hockey-stick divergences of one mechanism as functions of epsilon >= 0.

Every function here is accurate to a relative error of `RELATIVE_ERROR`, however small delta is: the
differences that cancel are taken apart on paper (docs/theory/numerical_error.md). A profile is a
convex function of :math:`e^\varepsilon`: it lies below the polygon through its values, or through
values above it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import attrs
import numpy as np
from scipy import special

from hidden_state_accountants.curves.gaussian import deltas_from_mu

Deltas = Callable[[np.ndarray], np.ndarray]
"""Maps an array of epsilons >= 0 to the divergences there, of the same shape."""

RELATIVE_ERROR = 1e-12
"""No profile of this module is smaller than (1 - RELATIVE_ERROR) times the exact one."""
_FAR = 15.0  # a Gaussian has less than 1e-50 of its mass beyond
_LARGE_EPSILON = 30.0  # beyond it exp(-epsilon) is below the roundoff
_ROUNDING = 2.0**-50  # relative, of a difference to 1
_LARGEST_EXPONENT = 700.0  # whose exponential is a double
_ROUNDING_OF_POLYGONS = 2.0**-49  # of an interpolated value, in units of the value to its left
_RATIO = 1.01  # of neighbouring nodes
_SMALL = 1e-3  # first node, in standard deviations of the privacy loss
_NEAR = 3e-3  # distance of the nodes at least, in the same unit
_FAR_NODES, _TINY = 12.0, 1e-25  # a Gaussian has 2e-33 beyond _FAR_NODES: nothing beside _TINY


@attrs.frozen(eq=False)
class Profile:
    """The divergences of a pair (P, Q) of outputs on neighbouring data sets.

    Both are functions of a module, or partial ones of those, so that a curve can be pickled; they
    are the same object if the pair is symmetric.

    Attributes:
        forward: epsilon to sup_S P(S) - e^epsilon Q(S).
        backward: epsilon to sup_S Q(S) - e^epsilon P(S).
        largest: Epsilon at which both are 0 or below 1e-50: no need to look further.
    """

    forward: Deltas
    backward: Deltas
    largest: float

    @property
    def is_symmetric(self) -> bool:
        """True if P and Q may be exchanged."""
        return self.forward is self.backward


def gaussian(mu: float) -> Profile:
    """N(mu, 1) against N(0, 1)."""
    deltas = functools.partial(deltas_from_mu, mu)
    return Profile(deltas, deltas, mu * (mu / 2 + _FAR))


def gaussian_mixture(weights: np.ndarray, mus: np.ndarray) -> Profile:
    """One of several Gaussian pairs, drawn with the weights as probabilities, and revealed."""
    deltas = functools.partial(_mixture_deltas, weights, mus)
    return Profile(deltas, deltas, float(mus.max() * (mus.max() / 2 + _FAR)))


def _mixture_deltas(weights: np.ndarray, mus: np.ndarray, epsilon: np.ndarray) -> np.ndarray:
    parts = (w * deltas_from_mu(mu, epsilon) for w, mu in zip(weights, mus, strict=True))
    return sum(parts, np.zeros(epsilon.shape))


def laplace(scale: float) -> Profile:
    """Laplace noise of this scale on a value that moves by 1."""
    deltas = functools.partial(_laplace_deltas, scale)
    return Profile(deltas, deltas, 1 / scale)


def _laplace_deltas(scale: float, epsilon: np.ndarray) -> np.ndarray:
    return -np.expm1(np.minimum(epsilon - 1 / scale, 0.0) / 2)


def sampled_deltas(whole: Deltas, rate: float, epsilon: np.ndarray) -> np.ndarray:
    r"""Divergence that is left if the record takes part with probability `rate`.

    .. math:: \delta_q\big(\log(1 + q(e^\varepsilon - 1))\big) = q\,\delta(\varepsilon)

    (Balle, Barthe, Gaboardi 2018, arXiv 1807.01647 v2, Theorem 2.)
    """
    # log(1 + (e^epsilon - 1)/q); the second form where e^epsilon / q could overflow
    near = np.log1p(np.expm1(np.minimum(epsilon, _LARGE_EPSILON)) / rate)
    far = epsilon - math.log(rate) + np.log1p((rate - 1) * np.exp(-epsilon))
    return rate * whole(np.where(epsilon < _LARGE_EPSILON, near, far))


def without_replacement(whole: Profile, rate: float) -> Profile:
    """C_q of Dong, Roth, Su (2022): a uniform batch of fixed size, one record replaced.

    Symmetric by definition: it covers both directions of the pair, also where they change from one
    step to the next.
    """
    deltas = functools.partial(sampled_deltas, whole.forward, rate)
    return Profile(deltas, deltas, _sampled_epsilon(whole.largest, rate))


def poisson(whole: Profile, rate: float) -> Profile:
    r"""A record that joins the batch with probability q (`forward`) against one that is not there.

    With :math:`\gamma = 1 - (1 - e^{-\varepsilon})/q` the other direction is

    .. math:: \sup_S Q(S) - e^\varepsilon P(S) =
              q\,\gamma\,e^\varepsilon\,\delta(-\log\gamma), \qquad 0 \text{ if } \gamma \le 0.
    """
    forward = functools.partial(sampled_deltas, whole.forward, rate)
    backward = functools.partial(_without_the_record, whole.forward, rate)
    return Profile(forward, backward, _sampled_epsilon(whole.largest, rate))


def _without_the_record(whole: Deltas, rate: float, epsilon: np.ndarray) -> np.ndarray:
    epsilon = np.minimum(epsilon, _LARGEST_EXPONENT)  # delta falls: no smaller there
    # rounded up: where gamma is next to 0 it has no digits left
    gamma = np.clip(1 + np.expm1(-epsilon) / rate + _ROUNDING, 0.0, 1.0)
    result = np.zeros(epsilon.shape)
    inside = gamma > 0
    factor = rate * gamma[inside] * np.exp(epsilon[inside])
    result[inside] = factor * whole(-np.log(gamma[inside]))
    return result


def _sampled_epsilon(epsilon: float, rate: float) -> float:
    """log(1 + q (e^epsilon - 1))."""
    if epsilon > _LARGE_EPSILON:
        return max(0.0, epsilon + math.log(rate + (1 - rate) * math.exp(-epsilon)))
    return math.log1p(rate * math.expm1(epsilon))


def polygon(epsilons: np.ndarray, values: np.ndarray) -> Deltas:
    """The polygon through nodes that ascend from 0, rounded up; beyond the last one it is level."""
    return functools.partial(_polygon_deltas, epsilons, values)


def _polygon_deltas(nodes: np.ndarray, values: np.ndarray, epsilon: np.ndarray) -> np.ndarray:
    epsilon = np.minimum(epsilon, nodes[-1])
    right = np.searchsorted(nodes[1:-1], epsilon) + 1
    left, right = right - 1, np.minimum(right, len(nodes) - 1)
    # The share of the way in e^epsilon, which may overflow.
    start, end = nodes[left], nodes[right]
    length = np.minimum(np.expm1(start - end), -_TINY)  # of nothing beyond the last node
    share = np.exp(epsilon - end) * np.expm1(start - epsilon) / length
    inside = values[left] + share * (values[right] - values[left])
    # Where the values fall steeply the interpolation cancels.
    return np.asarray(np.maximum(inside, values[right]) + _ROUNDING_OF_POLYGONS * values[left])


def many_gaussians(weights: np.ndarray, mus: np.ndarray, smallest: float) -> Profile:
    """Gaussian pairs, one of which is chosen, and revealed, with a probability that is its weight.

    The polygon through its values, down to `smallest`, at nodes that are one per cent apart, and
    0.3 % of a standard deviation at least: the variance of the loss grows by a few
    hundred-thousandths.
    """
    finite = mus < math.inf
    nodes, values = _nodes_of_mixture(weights[finite], mus[finite], smallest)
    values = values + float(weights[~finite].sum())
    deltas = polygon(nodes, values)
    return Profile(deltas, deltas, float(nodes[-1]))


def _nodes_of_mixture(
    weights: np.ndarray, mus: np.ndarray, smallest: float
) -> tuple[np.ndarray, np.ndarray]:
    """Epsilons, the first of which is 0, and divergences there, until they are small."""
    deviation = math.sqrt(float(weights @ mus**2))
    if not deviation:
        return np.array([0.0, 1.0]), np.zeros(2)
    far = _FAR_NODES if smallest >= _TINY else None
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
