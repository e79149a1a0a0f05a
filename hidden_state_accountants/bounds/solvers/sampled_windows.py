"""The search of Theorem B: where the window starts, which steps hide the shift, the split."""

from __future__ import annotations

import math
from collections.abc import Callable

import attrs
import numpy as np

from hidden_state_accountants.bounds.solvers.taut_string import least_mu_squared

_ORDERS = np.array([2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 256, 512.0])
"""Whole numbers: the divergence of a sampled mechanism takes long at others."""
_DELTA = 1e-6  # where the candidates are compared
_SPLITS = 1 - np.geomspace(0.003, 0.9, 12)


@attrs.frozen(eq=False)
class SampledSteps:
    """The steps of a segment that starts from a shared state.

    Attributes:
        contraction: c_t, shape (T,).
        distance: D_tau, a bound on |X_tau - X'_tau|, shape (T + 1,).
        noise_std: sigma_t, shape (T,).
        step_mu: mu of a step whose batch is known to hold the record, shape (T,); few values.
    """

    contraction: np.ndarray
    distance: np.ndarray
    noise_std: np.ndarray
    step_mu: np.ndarray


@attrs.frozen
class Window:
    """What dominates the segment.

    Attributes:
        sampled_mus: (mu, count): sampled Gaussian mechanisms.
        shift_mu: The mu of the Gaussian that hides the shift.
    """

    sampled_mus: tuple[tuple[float, int], ...]
    shift_mu: float


def best_window(
    steps: SampledSteps, sampled_rdp: Callable[[float, np.ndarray], np.ndarray]
) -> Window:
    """The window with the smallest epsilon by Renyi divergences; the whole segment is one.

    Args:
        steps: The segment.
        sampled_rdp: Renyi divergences, at an array of orders, of the sampled mechanism of a mu.
    """
    search = _Search(steps, sampled_rdp)
    total = len(steps.contraction)
    best = search.epsilon(total, 0, 1.0), total, 0, 1.0
    lengths = _grid(total)
    for length in lengths[:-1]:  # the whole segment starts from a shared state: nothing to hide
        shifted = np.array([k for k in lengths if k <= length])
        epsilons = search.epsilons(length, shifted, _SPLITS)
        index = np.unravel_index(np.argmin(epsilons), epsilons.shape)
        if epsilons[index] < best[0]:
            best = (
                float(epsilons[index]), length, int(shifted[index[0]]), float(_SPLITS[index[1]])
            )  # fmt: skip
    if best[2]:
        best = _refined(search, best)
    return search.window(*best[1:])


_Point = tuple[float, int, int, float]
"""epsilon, length of the window, steps that carry shifts, beta."""


def _refined(search: _Search, best: _Point) -> _Point:
    """Moves one coordinate at a time by ever smaller factors."""
    factor = 2.0**0.25
    while factor > 1.005:
        _, length, shifted, beta = best
        moves = [(length, shifted, 1 - (1 - beta) * f) for f in (factor, 1 / factor)]
        for f in (factor, 1 / factor):
            moves.append((length, round(shifted * f), beta))
            moves.append((round(length * f), shifted, beta))
        allowed = [m for m in moves if 1 <= m[1] <= m[0] < search.total and 0 < m[2] < 1]
        found = min(((search.epsilon(*move), *move) for move in allowed), default=best)
        if found[0] < best[0]:
            best = found
        else:
            factor **= 0.5
    return best


class _Search:
    """Epsilon of the windows of a segment, by Renyi divergences."""

    def __init__(self, steps: SampledSteps, sampled_rdp: Callable[[float, np.ndarray], np.ndarray]):
        self.total = len(steps.contraction)
        self._steps = steps
        self._sampled_rdp = sampled_rdp
        self._levels = np.unique(steps.step_mu)
        backwards = steps.step_mu[::-1]
        # _counts[i, k]: how many of the last k steps have mu = levels[i]
        self._counts = np.stack(
            [np.append(0, np.cumsum(backwards == level)) for level in self._levels]
        )
        self._log_shift = _LogShift(steps)
        self._divergences: dict[float, np.ndarray] = {}

    def _rdp(self, beta: float) -> np.ndarray:
        """Shape (levels, orders)."""
        if beta not in self._divergences:
            self._divergences[beta] = np.stack(
                [
                    self._sampled_rdp(float(level) / beta**0.5, _ORDERS)
                    if level > 0
                    else np.zeros(_ORDERS.shape)
                    for level in self._levels
                ]
            )
        return self._divergences[beta]

    def epsilons(self, length: int, shifted: np.ndarray, betas: np.ndarray) -> np.ndarray:
        """Shape (shifted, betas)."""
        split = np.stack([self._rdp(float(beta)) for beta in betas])
        with_shift = self._counts[:, shifted]
        without = (self._counts[:, [length]] - with_shift).T @ self._rdp(1.0)
        divergences = without[:, None, :] + np.einsum("ls,blo->sbo", with_shift, split)
        if shifted.any():
            log_shift = self._log_shift.mu_squared(length, shifted)
            mu_squared = np.exp(np.minimum(log_shift, 600.0))[:, None] / (1 - betas)
            divergences = divergences + mu_squared[:, :, None] * _ORDERS / 2
        # Canonne, Kamath, Steinke 2020 (arXiv 2004.00010 v5), Proposition 12
        shares = np.log1p(-1 / _ORDERS) - (math.log(_DELTA) + np.log(_ORDERS)) / (_ORDERS - 1)
        return np.maximum(0.0, np.min(divergences + shares, axis=-1))

    def epsilon(self, length: int, shifted: int, beta: float) -> float:
        """Of one window."""
        return float(self.epsilons(length, np.array([shifted]), np.array([beta]))[0, 0])

    def window(self, length: int, shifted: int, beta: float) -> Window:
        """What dominates the segment for this choice, exactly."""
        shift_mu = 0.0
        if shifted:
            shift_mu = (_shift_mu_squared(self._steps, length, shifted) / (1 - beta)) ** 0.5
        if not shift_mu:  # a contraction of 0 leaves nothing to hide
            beta = 1.0
        sampled: dict[float, int] = {}
        for level, row in zip(self._levels.tolist(), self._counts, strict=True):
            for mu, count in (
                (level, int(row[length] - row[shifted])),
                (level / beta**0.5, int(row[shifted])),
            ):
                if count:
                    sampled[mu] = sampled.get(mu, 0) + count
        return Window(tuple(sampled.items()), shift_mu)


class _LogShift:
    """`_shift_mu_squared` for many windows, in logarithms: good enough to choose one.

    One pool hides everything: mu**2 = z**2 / sum_t (sigma_t / (c_{m+1} ... c_t))**2, z the distance
    before the first of these steps, m + 1.
    """

    def __init__(self, steps: SampledSteps):
        with np.errstate(divide="ignore"):
            log_c = np.log(np.maximum(steps.contraction, 1e-300))
            log_noise = 2 * np.log(steps.noise_std)
            self._distance = np.log(steps.distance)
        self._product = np.append(0.0, np.cumsum(log_c))
        weights = (log_noise - 2 * self._product[1:])[::-1]
        self._weight = np.append(-np.inf, np.logaddexp.accumulate(weights))

    def mu_squared(self, length: int, shifted: np.ndarray) -> np.ndarray:
        """The log for windows of `length` steps whose last `shifted` hide the distance."""
        total = len(self._product) - 1
        at_start = 2 * (self._distance[total - length] - self._product[total - length])
        if at_start == -np.inf:
            return np.full(shifted.shape, -np.inf)
        return at_start - self._weight[shifted]


def _shift_mu_squared(steps: SampledSteps, length: int, shifted: int) -> float:
    """mu**2 of undoing the distance at the start of the window in its last `shifted` steps."""
    total = len(steps.contraction)
    distance = float(steps.distance[total - length])
    for c in steps.contraction[total - length : total - shifted].tolist():
        distance *= c
    inside = slice(total - shifted, total)
    return least_mu_squared(
        steps.contraction[inside],
        np.zeros(shifted),
        steps.noise_std[inside],
        initial_shift=distance,
    )


def _grid(largest: int) -> list[int]:
    """About four lengths per factor of two, from 1 to `largest`."""
    return sorted({int(v) for v in np.geomspace(1, largest, 2 + 4 * largest.bit_length()).round()})
