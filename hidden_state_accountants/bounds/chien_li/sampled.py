r"""Chien & Li's Theorem 3.12 (without replacement), as published: NOT a valid bound.

.. math:: \varepsilon(\alpha) = \min \sum_{t > \tau} S_\alpha(q, \beta_t \sigma/s)
          + \frac{\alpha a_t^2}{2 \sigma^2 (1 - \beta_t)}, \\
          S_\alpha(q, \sigma) = D_\alpha(N(0, \sigma^2) \| (1-q) N(0, \sigma^2) + q N(1, \sigma^2))

The divergence of the other direction is larger, so that :math:`S_\alpha` alone under-reports.
"""

from __future__ import annotations

import attrs
import numpy as np
from scipy import special

from hidden_state_accountants.bounds.chien_li.hoelder import HoelderModulus

_NODES = 401
_SPLITS = np.concatenate([np.linspace(0.05, 0.95, 19), 1 - np.geomspace(0.03, 1e-4, 6)])
_WINDOWS = 60
_GRID = 200


def sampled_gaussian_divergence(
    orders: np.ndarray, sampling_rate: float, noise: np.ndarray | float
) -> np.ndarray:
    """S_alpha(q, sigma) of Definition 3.11; orders > 1 and noise > 0 broadcast."""
    orders, noise = np.broadcast_arrays(np.asarray(orders, float), np.asarray(noise, float))
    power = orders - 1
    log_out = np.log1p(-sampling_rate) if sampling_rate < 1 else -np.inf

    def mixture(u: np.ndarray, sigma: np.ndarray) -> np.ndarray:
        return np.logaddexp(log_out, np.log(sampling_rate) + u / sigma - 0.5 / sigma**2)

    def share(u: np.ndarray, sigma: np.ndarray) -> np.ndarray:
        log_in = np.log(sampling_rate) + u / sigma - 0.5 / sigma**2
        return np.exp(log_in - mixture(u, sigma))

    # The logarithm of the integrand -u^2/2 - (alpha - 1) log mixture(u) is concave: find its peak.
    low, high = -power / noise - 1, np.zeros_like(power)
    for _ in range(200):
        middle = (low + high) / 2
        rising = -middle - power * share(middle, noise) / noise > 0
        low, high = np.where(rising, middle, low), np.where(rising, high, middle)
    peak = (low + high) / 2
    weight = share(peak, noise)
    width = 1 / np.sqrt(1 + power * weight * (1 - weight) / noise**2)
    reach = np.arcsinh(12 / width)[..., None]
    v = reach * np.linspace(-1, 1, _NODES)
    u = peak[..., None] + width[..., None] * np.sinh(v)
    log_terms = (
        -(u**2) / 2
        - 0.5 * np.log(2 * np.pi)
        - power[..., None] * mixture(u, noise[..., None])
        + np.log(width[..., None] * np.cosh(v) * 2 * reach / (_NODES - 1))
    )
    return np.maximum(special.logsumexp(log_terms, axis=-1) / power, 0.0)


def shift_costs(modulus: HoelderModulus, distance: np.ndarray) -> np.ndarray:
    """Per tau in 0..T-1 a feasible sum of a_t^2 that absorbs D_tau; infinite if none was found."""
    num_steps = len(distance) - 1
    costs = np.where(distance[:-1] > 0, np.inf, 0.0)
    if modulus.exponent == 1:
        factor = modulus.decay + modulus.coefficient
        with np.errstate(under="ignore"):
            weights = np.cumsum(factor ** (-2.0 * np.arange(1, num_steps + 1)))
        return distance[:-1] ** 2 / weights[::-1]
    p = float(modulus(distance.max())) * np.logspace(-8, 0, _GRID)
    z, cost = np.zeros(_GRID), np.zeros(_GRID)
    for step in range(num_steps - 1, -1, -1):
        first = np.maximum(modulus(distance[step]) - z, 0.0)
        costs[step] = min(costs[step], float((cost + first * first).min()))
        before = modulus.inverse(z + p)
        cost = cost + p * p
        with np.errstate(over="ignore"):
            p = p * modulus.slope(before)
        keep = before < distance[step]
        if not keep.any():
            break
        z, p, cost = before[keep], p[keep], cost[keep]
    return costs


@attrs.frozen(eq=False)
class Theorem312:
    """epsilon(alpha) with one beta for all steps after tau: a feasible point per order.

    Attributes:
        num_steps: T.
        sensitivity: s, in units of the noise.
        sampling_rate: q.
        starts: The values of tau to try.
        costs: A sum of a_t^2 that absorbs D_tau, for each of them.
    """

    num_steps: int
    sensitivity: float
    sampling_rate: float
    starts: np.ndarray
    costs: np.ndarray

    @classmethod
    def of(
        cls, modulus: HoelderModulus, sensitivity: float, distance: np.ndarray, rate: float
    ) -> Theorem312:
        """The theorem for distances D_0..D_T."""
        num_steps = len(distance) - 1
        costs = shift_costs(modulus, distance)
        windows = np.unique(np.geomspace(1, num_steps, _WINDOWS).astype(int))
        finite = np.flatnonzero(np.isfinite(costs))
        starts = np.union1d(num_steps - windows, finite[:: max(1, len(finite) // _WINDOWS)])
        return cls(num_steps, sensitivity, rate, starts, costs[starts])

    def __call__(self, orders: np.ndarray) -> np.ndarray:
        """epsilon of orders > 1."""
        orders = np.asarray(orders, dtype=np.float64)
        if self.sensitivity == 0:
            return np.zeros(orders.shape)

        def step(beta: float) -> np.ndarray:
            noise = beta / self.sensitivity
            return sampled_gaussian_divergence(orders, self.sampling_rate, noise)

        best = self.num_steps * step(1.0)  # tau = 0
        for beta in _SPLITS:
            # Chien & Li 2024, Theorem 3.12, arXiv 2410.01068 (beta * sigma, as printed)
            own = step(beta)[..., None] * (self.num_steps - self.starts)
            total = own + orders[..., None] * self.costs / (2 * (1 - beta))
            best = np.minimum(best, total.min(axis=-1))
        return best
