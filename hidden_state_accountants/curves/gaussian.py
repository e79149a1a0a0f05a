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
_SMALL = 0.1  # mu below which the difference would lose digits
_FAR = 40.0  # log Phi(-40) < log of the smallest double
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(10)  # 7 are enough for 1e-13


def _ratio(x: np.ndarray) -> np.ndarray:
    """m(x) = Phi(x)/phi(x), for x <= 0."""
    return math.sqrt(math.pi / 2) * special.erfcx(-x / math.sqrt(2))


def _ratio_slope(x: np.ndarray) -> np.ndarray:
    """m'(x) = 1 + x m(x); its asymptotic series where that cancels."""
    result = 1 + x * math.sqrt(math.pi / 2) * special.erfcx(-x / math.sqrt(2))
    far = x < -25
    inverse_square = 1 / x[far] ** 2
    series = np.zeros_like(inverse_square)
    for factor in (17, 15, 13, 11, 9, 7, 5, 3):
        series = factor * inverse_square * (1 - series)
    result[far] = inverse_square * (1 - series)
    return result


def log_delta_at(a: np.ndarray | float, mu: np.ndarray | float) -> np.ndarray:
    """log delta where epsilon = mu * (mu/2 - a) >= 0; the arrays broadcast."""
    a, mu = np.broadcast_arrays(np.asarray(a, dtype=np.float64), np.asarray(mu, dtype=np.float64))
    log_density = -0.5 * a * a - _LOG_SQRT_2PI
    result = np.empty(a.shape)
    small, left = mu < _SMALL, (mu >= _SMALL) & (a <= 0)
    right = ~small & ~left
    if small.any():
        x = a[small][..., None] - mu[small][..., None] * (_NODES + 1) / 2
        mean = _ratio_slope(x) @ _WEIGHTS / 2
        result[small] = log_density[small] + np.log(mu[small] * mean)
    if left.any():
        difference = _ratio(a[left]) - _ratio((a - mu)[left])
        result[left] = log_density[left] + np.log(difference)
    if right.any():
        # a <= mu/2 because epsilon >= 0, so a - mu < 0
        second = np.exp(log_density[right]) * _ratio((a - mu)[right])
        result[right] = np.log(special.ndtr(a[right]) - second)
    return result


def deltas_from_mu(
    mu: np.ndarray | float, epsilon: np.ndarray | float, far: float = _FAR
) -> np.ndarray:
    """The smallest deltas of mu-GDP (inf and nan: no privacy); those below Phi(-far) are 0."""
    mu, epsilon = np.broadcast_arrays(
        np.asarray(mu, dtype=np.float64), np.asarray(epsilon, dtype=np.float64)
    )
    result = np.where(mu < math.inf, 0.0, 1.0)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        inside = (mu > 0) & (mu < math.inf) & (epsilon / mu <= mu / 2 + far)
    mu, epsilon = mu[inside], epsilon[inside]
    result[inside] = np.minimum(1.0, np.exp(log_delta_at(mu / 2 - epsilon / mu, mu)))
    return result


def delta_from_mu(mu: float, epsilon: float) -> float:
    """`deltas_from_mu` of two numbers."""
    return float(deltas_from_mu(mu, epsilon))


def epsilon_from_mu(mu: float, delta: float) -> float:
    """The smallest epsilon of mu-GDP, rounded up; inf for mu = inf and nan at every delta."""
    if not mu < math.inf:
        return math.inf
    if mu == 0 or delta >= delta_from_mu(mu, 0.0):
        return 0.0
    if delta == 0:
        return math.inf
    # delta(a) <= Phi(a), so a root lies between the delta-quantile and mu/2 (epsilon = 0).
    low = min(float(special.ndtri(delta)), mu / 2) - 1e-9
    root = optimize.brentq(
        lambda a: float(log_delta_at(a, mu)) - math.log(delta), low, mu / 2, xtol=1e-15, rtol=1e-15
    )
    epsilon = max(0.0, mu * (mu / 2 - root))
    step = 2.0**-52
    while delta_from_mu(mu, epsilon) > delta:  # round towards more epsilon, never less
        epsilon += step * max(epsilon, mu)
        step *= 2
    return epsilon
