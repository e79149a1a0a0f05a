r"""Privacy profiles: hockey-stick divergences of one mechanism as functions of epsilon >= 0.

Every function here is accurate to a relative error of `RELATIVE_ERROR`, however small delta is: the
differences that cancel are taken apart on paper (docs/theory/numerical_error.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import attrs
import numpy as np

from hidden_state_accountants.curves.gaussian import deltas_from_mu

Deltas = Callable[[np.ndarray], np.ndarray]
"""Maps an array of epsilons >= 0 to the divergences there, of the same shape."""

RELATIVE_ERROR = 1e-12
"""No profile of this module is smaller than (1 - RELATIVE_ERROR) times the exact one."""
_FAR = 15.0  # a Gaussian has less than 1e-50 of its mass beyond
_LARGE_EPSILON = 30.0
_ROUNDING = 2.0**-50
_LARGEST_EXPONENT = 700.0


@attrs.frozen(eq=False)
class Profile:
    """The divergences of a pair (P, Q) of outputs on neighbouring data sets.

    Attributes:
        forward: epsilon to sup_S P(S) - e^epsilon Q(S).
        backward: epsilon to sup_S Q(S) - e^epsilon P(S); the same object if the pair is symmetric.
        largest: Where both are 0 or below 1e-50: no need to look further.
    """

    forward: Deltas
    backward: Deltas
    largest: float

    @property
    def is_symmetric(self) -> bool:
        """Whether P and Q may be exchanged."""
        return self.forward is self.backward


def gaussian(mu: float) -> Profile:
    """N(mu, 1) against N(0, 1)."""

    def deltas(epsilon: np.ndarray) -> np.ndarray:
        return deltas_from_mu(mu, epsilon)

    return Profile(deltas, deltas, mu * (mu / 2 + _FAR))


def gaussian_mixture(weights: np.ndarray, mus: np.ndarray) -> Profile:
    """One of several Gaussian pairs, drawn with the weights as probabilities, and revealed."""

    def deltas(epsilon: np.ndarray) -> np.ndarray:
        parts = (w * deltas_from_mu(mu, epsilon) for w, mu in zip(weights, mus, strict=True))
        return sum(parts, np.zeros(epsilon.shape))

    return Profile(deltas, deltas, float(mus.max() * (mus.max() / 2 + _FAR)))


def laplace(scale: float) -> Profile:
    """Laplace noise of this scale on a value that moves by 1."""

    def deltas(epsilon: np.ndarray) -> np.ndarray:
        return -np.expm1(np.minimum(epsilon - 1 / scale, 0.0) / 2)

    return Profile(deltas, deltas, 1 / scale)


def sampled_deltas(whole: Deltas, rate: float, epsilon: np.ndarray) -> np.ndarray:
    r"""What is left of a divergence if the record takes part with probability `rate`.

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

    def deltas(epsilon: np.ndarray) -> np.ndarray:
        return sampled_deltas(whole.forward, rate, epsilon)

    return Profile(deltas, deltas, _sampled_epsilon(whole.largest, rate))


def poisson(whole: Profile, rate: float) -> Profile:
    r"""A record that joins the batch with probability q (`forward`) against one that is not there.

    With :math:`\gamma = 1 - (1 - e^{-\varepsilon})/q` the other direction is

    .. math:: \sup_S Q(S) - e^\varepsilon P(S) =
              q\,\gamma\,e^\varepsilon\,\delta(-\log\gamma), \qquad 0 \text{ if } \gamma \le 0.
    """

    def forward(epsilon: np.ndarray) -> np.ndarray:
        return sampled_deltas(whole.forward, rate, epsilon)

    def backward(epsilon: np.ndarray) -> np.ndarray:
        epsilon = np.minimum(epsilon, _LARGEST_EXPONENT)  # delta falls: no smaller there
        # rounded up: where gamma is next to 0 it has no digits left
        gamma = np.clip(1 + np.expm1(-epsilon) / rate + _ROUNDING, 0.0, 1.0)
        result = np.zeros(epsilon.shape)
        inside = gamma > 0
        factor = rate * gamma[inside] * np.exp(epsilon[inside])
        result[inside] = factor * whole.forward(-np.log(gamma[inside]))
        return result

    return Profile(forward, backward, _sampled_epsilon(whole.largest, rate))


def _sampled_epsilon(epsilon: float, rate: float) -> float:
    """log(1 + q (e^epsilon - 1))."""
    if epsilon > _LARGE_EPSILON:
        return max(0.0, epsilon + math.log(rate + (1 - rate) * math.exp(-epsilon)))
    return math.log1p(rate * math.expm1(epsilon))
