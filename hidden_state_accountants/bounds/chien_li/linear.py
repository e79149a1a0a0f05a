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

import attrs
import numpy as np

_FIRST_CHUNK = 512


@attrs.frozen(eq=False)
class FeasiblePoint:
    """A start, a split of the noise of the steps after it, and the formula's value there.

    Attributes:
        value: 2 D_alpha/alpha.
        start: tau.
        beta: Shape (T - tau,); the share of the variance that pays for the step's own sensitivity.
    """

    value: float
    start: int
    beta: np.ndarray


def formula(
    contraction: float, distance: float, sensitivity: np.ndarray, beta: np.ndarray
) -> float:
    """2 D_alpha/alpha for given tau and beta, with the best shifts.

    Args:
        contraction: c.
        distance: D_tau.
        sensitivity: s_t of the steps after tau.
        beta: In [0, 1], same shape; 0 only where s_t = 0.
    """
    steps = np.arange(1, len(beta) + 1)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore", under="ignore"):
        own = np.where(sensitivity > 0, sensitivity**2 / beta, 0.0).sum()
        if distance == 0:
            return float(own)
        # Chien & Li 2024, Theorem 3.1, arXiv 2410.01068; c^(2k) for c < 1 so that nothing overflows
        if contraction >= 1:
            budget = ((1 - beta) * contraction ** (-2.0 * steps)).sum()
        else:
            distance = distance * contraction ** len(beta)
            budget = ((1 - beta) * contraction ** (2.0 * (len(beta) - steps))).sum()
        if distance == 0:
            return float(own)
        return float(own + (distance / budget) * distance) if budget > 0 else math.inf


def least_value(
    contraction: float,
    sensitivity: float,
    distance: np.ndarray,
    *,
    period: int,
    position: int,
) -> FeasiblePoint:
    """The minimum of Theorem 3.1 (period 1) or A.1 over tau and beta.

    Args:
        contraction: c >= 0.
        sensitivity: s, finite.
        distance: D_0..D_T, finite.
        period: The record takes part in every period-th step,
        position: from step position + 1 on.
    """
    num_steps = len(distance) - 1
    best, start, level = math.inf, 0, 0.0
    stop, chunk = num_steps, _FIRST_CHUNK
    while stop > 0:  # from the last tau backwards: each own participation costs s^2
        taus = np.arange(max(0, stop - chunk), stop)
        values, levels = _values(contraction, sensitivity, distance, taus, period, position)
        index = int(np.argmin(values))
        if values[index] < best:
            best, start, level = float(values[index]), int(taus[index]), float(levels[index])
        own = _participations(taus[:1], num_steps, period, position)[0]
        if own * sensitivity**2 >= best:
            break
        stop, chunk = stop - chunk, 2 * chunk
    # tau = 0 is ordinary composition, D_0 = 0
    everything = _participations(np.array([0]), num_steps, period, position)[0] * sensitivity**2
    if everything <= best:
        start, level = 0, 0.0
    steps = np.arange(start, num_steps)
    own_steps = np.where((steps - position) % period == 0, sensitivity, 0.0) * (steps >= position)
    beta = _split(contraction, own_steps, level)
    return FeasiblePoint(formula(contraction, float(distance[start]), own_steps, beta), start, beta)


def least_value_of_any(contraction: float, own: np.ndarray, distance: np.ndarray) -> FeasiblePoint:
    """The same for any s_t, shape (T,), in O(T^2 log T)."""
    best = FeasiblePoint(float((own**2).sum()), 0, np.where(own > 0, 1.0, 0.0))
    for start in range(1, len(own)):
        rest, target = own[start:], float(distance[start])
        weights = _weights(contraction, len(rest))
        with np.errstate(divide="ignore", invalid="ignore", under="ignore"):
            if contraction < 1:
                target *= contraction ** len(rest)
            raised_at = np.where(weights > 0, rest / weights, math.inf)
            order = np.argsort(raised_at)
            levels = (target + np.cumsum((weights * rest)[order])) / np.cumsum(weights[order] ** 2)
        above = np.flatnonzero(levels > raised_at[order])
        level = float(levels[above[-1]]) if target > 0 and len(above) else 0.0
        beta = _split(contraction, rest, level)
        value = formula(contraction, float(distance[start]), rest, beta)
        if value < best.value:
            best = FeasiblePoint(value, start, beta)
    return best


def _participations(taus: np.ndarray, num_steps: int, period: int, position: int) -> np.ndarray:
    """How many of the steps tau+1..T hold the record."""

    def before(step: np.ndarray | int) -> np.ndarray:
        return np.maximum(0, -((position - np.asarray(step)) // period))

    return before(num_steps) - before(taus)


def _split(contraction: float, own: np.ndarray, level: float) -> np.ndarray:
    """beta for s_t + a_t = max(s_t, level * weight), weights as in `_values`."""
    raised = np.maximum(own, level * _weights(contraction, len(own)))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(raised > 0, own / raised, 0.0)


def _weights(contraction: float, steps: int) -> np.ndarray:
    """c^-k for k = 1..steps; for c < 1 times c^steps, so that nothing overflows."""
    k = np.arange(1, steps + 1, dtype=np.float64)
    with np.errstate(under="ignore"):
        return contraction**-k if contraction >= 1 else contraction ** (steps - k)


def _values(
    contraction: float,
    sensitivity: float,
    distance: np.ndarray,
    taus: np.ndarray,
    period: int,
    position: int,
) -> tuple[np.ndarray, np.ndarray]:
    """The minimum over beta and the water level, per tau.

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
        level = np.where(budget > 0, (budget + own) / squares, 0.0)
        shifted = level * level * squares + (count - low) * sensitivity**2
    values = np.where(budget > 0, shifted, count * sensitivity**2)
    return np.where(np.isnan(values), math.inf, values), level
