r"""Exact conversion between mu-GDP and (epsilon, delta), in every range a double can hold.

.. math:: \delta(\varepsilon) = \Phi(a) - e^\varepsilon \Phi(a - \mu), \qquad
          a = \mu/2 - \varepsilon/\mu

(Balle & Wang 2018, arXiv 1805.06530 v2, Theorem 8). With m = Phi/phi this is
:math:`\varphi(a)\,(m(a) - m(a - \mu))`, and for small mu the difference is integrated from
:math:`m'(x) = 1 + x\,m(x) > 0`, so nothing cancels.
"""

from __future__ import annotations

import math

import numpy as np
from scipy import optimize, special

_LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)
_FAR = 40.0  # log Phi(-40) < log of the smallest double
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(24)


def _ratio(x: float) -> float:
    """m(x) = Phi(x)/phi(x), for x <= 0."""
    return math.sqrt(math.pi / 2) * float(special.erfcx(-x / math.sqrt(2)))


def _ratio_slope(x: np.ndarray) -> np.ndarray:
    """m'(x) = 1 + x m(x); its asymptotic series where that cancels."""
    direct = 1 + x * math.sqrt(math.pi / 2) * special.erfcx(-x / math.sqrt(2))
    inverse_square = 1 / np.maximum(np.abs(x), 1.0) ** 2
    series = np.zeros_like(x)
    for factor in (17, 15, 13, 11, 9, 7, 5, 3):
        series = factor * inverse_square * (1 - series)
    return np.where(x < -25, inverse_square * (1 - series), direct)


def log_delta_at(a: float, mu: float) -> float:
    """log delta where epsilon = mu * (mu/2 - a)."""
    log_density = -0.5 * a * a - _LOG_SQRT_2PI
    if mu < 1:
        x = a - mu * (_NODES + 1) / 2
        return log_density + math.log(mu / 2 * float(np.dot(_WEIGHTS, _ratio_slope(x))))
    if a <= 0:
        return log_density + math.log(_ratio(a) - _ratio(a - mu))
    return math.log(float(special.ndtr(a)) - math.exp(log_density) * _ratio(a - mu))


def delta_from_mu(mu: float, epsilon: float) -> float:
    """The smallest delta such that mu-GDP implies (epsilon, delta)-DP.

    Args:
        mu: >= 0; inf stands for no privacy.
        epsilon: >= 0, possibly inf.
    """
    if mu == math.inf:
        return 1.0
    if mu == 0 or epsilon / mu > mu / 2 + _FAR:
        return 0.0
    return min(1.0, math.exp(log_delta_at(mu / 2 - epsilon / mu, mu)))


def epsilon_from_mu(mu: float, delta: float) -> float:
    """The smallest epsilon (rounded up) such that mu-GDP implies (epsilon, delta)-DP.

    Args:
        mu: >= 0; inf stands for no privacy and gives inf for every delta.
        delta: In [0, 1].
    """
    if mu == math.inf:
        return math.inf
    if mu == 0 or delta >= delta_from_mu(mu, 0.0):
        return 0.0
    if delta == 0:
        return math.inf
    # delta(a) <= Phi(a), so a root lies between the delta-quantile and mu/2 (epsilon = 0).
    low = min(float(special.ndtri(delta)), mu / 2) - 1e-9
    root = optimize.brentq(
        lambda a: log_delta_at(a, mu) - math.log(delta), low, mu / 2, xtol=1e-15, rtol=1e-15
    )
    epsilon = max(0.0, mu * (mu / 2 - root))
    step = 2.0**-52
    while delta_from_mu(mu, epsilon) > delta:  # round towards more epsilon, never less
        epsilon += step * max(epsilon, mu)
        step *= 2
    return epsilon
