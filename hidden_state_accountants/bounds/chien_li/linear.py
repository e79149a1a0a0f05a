r"""Chien & Li's optimisation for an update with a Lipschitz constant: water-filling.

For a start :math:`\tau`, with :math:`\sigma = 1`, steps :math:`t = \tau+1..T`,
:math:`w_t = c^{-(t-\tau)}` and :math:`s_t = s` where the batch holds the record, 0 elsewhere,
Theorems 3.1 and A.1 ask for the least

.. math:: \sum_t \frac{s_t^2}{\beta_t} + \frac{a_t^2}{1 - \beta_t}
          \quad\text{with}\quad \sum_t w_t a_t \ge D_\tau,\; a_t \ge 0.

The best split is :math:`\beta_t = s_t/(s_t + a_t)`, which leaves :math:`\sum (s_t + a_t)^2`: a
quadratic program solved by :math:`s_t + a_t = \max(s_t, \xi w_t)`. The steps with the largest
weights are raised, so that a bisection over their number finds xi, for all tau at once.
"""

from __future__ import annotations

import math

import numpy as np

_FIRST_CHUNK = 512


def least_value(
    contraction: float,
    sensitivity: float,
    distance: np.ndarray,
    *,
    period: int,
    position: int,
) -> float:
    """2 D_alpha/alpha: the minimum of Theorem 3.1 (period 1) or A.1 over tau and beta.

    Args:
        contraction: c >= 0.
        sensitivity: s, finite.
        distance: D_0..D_T, finite.
        period: The record takes part in every period-th step,
        position: from step position + 1 on.
    """
    num_steps = len(distance) - 1

    def composed(start: int) -> float:
        return float(_participations(np.array([start]), num_steps, period, position)[0]) * (
            sensitivity**2
        )

    best = composed(0)  # tau = 0 is ordinary composition, D_0 = 0
    stop, chunk = num_steps, _FIRST_CHUNK
    while stop > 0:  # from the last tau backwards: each own participation costs s^2
        taus = np.arange(max(0, stop - chunk), stop)
        values = _values(contraction, sensitivity, distance, taus, period, position)
        best = min(best, float(values.min()))
        if composed(int(taus[0])) >= best:
            break
        stop, chunk = stop - chunk, 2 * chunk
    return best


def _participations(taus: np.ndarray, num_steps: int, period: int, position: int) -> np.ndarray:
    """How many of the steps tau+1..T hold the record."""

    def before(step: np.ndarray | int) -> np.ndarray:
        return np.maximum(0, -((position - np.asarray(step)) // period))

    return before(num_steps) - before(taus)


def _values(
    contraction: float,
    sensitivity: float,
    distance: np.ndarray,
    taus: np.ndarray,
    period: int,
    position: int,
) -> np.ndarray:
    """The minimum over beta, per tau.

    Weights are r^o with r <= 1: r = 1/c and o = 1..k counted from tau, or for c < 1, multiplied by
    c^k, r = c and o = 0..k-1 counted from the end. Participations have o = first + period * e.
    """
    num_steps = len(distance) - 1
    k = num_steps - taus
    count = _participations(taus, num_steps, period, position)
    if contraction >= 1:
        ratio, lowest, budget = 1 / contraction, 1.0, distance[taus]
        first = (np.maximum(taus, position) - taus) + 1.0
        first += np.where(taus > position, (position - taus) % period, 0)
    else:
        ratio, lowest = contraction, 0.0
        with np.errstate(under="ignore"):
            budget = distance[taus] * contraction ** k.astype(np.float64)
        first = np.full(len(taus), float((num_steps - 1 - position) % period))
    log = math.log(ratio) if ratio > 0 else -math.inf

    def power(exponent: np.ndarray | float) -> np.ndarray:
        with np.errstate(invalid="ignore", under="ignore"):
            return np.where(np.asarray(exponent) == 0, 1.0, np.exp(log * np.asarray(exponent)))

    def sums(order: int, number: np.ndarray, stride: float) -> np.ndarray:
        """Sum of r^(order * stride * e) over e < number."""
        if log == 0:
            return number.astype(np.float64)
        with np.errstate(invalid="ignore", under="ignore"):
            total = np.expm1(order * stride * log * number) / math.expm1(order * stride * log)
        return np.where(number > 0, total, 0.0)

    def covered(q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Sums of w s and w^2 over the raised steps, the first q participations among them."""
        own = power(first) * sums(1, q, period) * sensitivity
        squares = power(2 * first) * sums(2, q, period)
        if period > 1:
            others = power(2 * lowest) * sums(2, k, 1.0)
            others = others - power(2 * first) * sums(2, count, period)
            squares = squares + np.maximum(others, 0.0)
        return own, squares

    low, high = np.zeros_like(count), count.copy()
    while (low < high).any():  # the largest q whose last participation is still raised
        q = (low + high + 1) // 2
        own, squares = covered(q - 1)
        weight = power(first + period * np.maximum(q - 1.0, 0.0))
        raised = (budget + own) * weight > sensitivity * squares
        active = low < high
        low = np.where(active & raised, q, low)
        high = np.where(active & ~raised, q - 1, high)
    own, squares = covered(low)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        # Chien & Li 2024, Theorems 3.1 and A.1 at the best beta, arXiv 2410.01068
        level = np.where(budget > 0, (budget + own) / squares, 0.0)
        shifted = level * level * squares + (count - low) * sensitivity**2
    values = np.where(budget > 0, shifted, count * sensitivity**2)
    return np.where(np.isnan(values), math.inf, values)
