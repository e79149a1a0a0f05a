r"""Distances of two runs at the ends of the epochs, if every epoch has an order of its own.

Theorem A for orders that are drawn anew (docs/theory/hidden_place.md). For numbers
:math:`Z_0 = Z_E = 0, Z_e \ge 0`, the *carries*, an epoch e in which the record is at position j
costs

.. math:: v_e(j) = \min_{a \ge 0} \sum_t (a_t/\sigma_t)^2, \quad z_t = c_t z_{t-1} + s_t [t = j]
          - a_t \ge 0, \quad z = Z_{e-1} \text{ before and } \le Z_e \text{ after it},

and the run costs the sum over its epochs. Any carries are valid. Those of a search are used: the
sum is convex in them, and every term depends on two neighbours, so that Newton's method takes a
few passes over the steps.
"""

from __future__ import annotations

from typing import NamedTuple

import attrs
import numpy as np
from scipy import linalg

from hidden_state_accountants.bounds.solvers.rounding import fewer
from hidden_state_accountants.curves.base import GaussianMixtureCurve
from hidden_state_accountants.process.noisy_process import NoisyProcess

_WEIGHT = 10.0  # how much costly positions count: about log(1/delta) for a delta of 1e-5
_ROUNDS = 3  # of the weight, which is relative to the cost
_MOST_STEPS = 100  # of Newton's method; a few are enough but for schedules with jumps
_ENOUGH = 1e-6  # relative decrease that a further step promises
_SMALLEST_STEP = 1e-9  # share of Newton's step below which a line search gives up
_CELLS = 2**14  # of the law of the cost of a run
_LEVELS = 400  # of the curve
_TAIL = 1e-16  # probability of costs that need no resolution
_TINY = 1e-300  # keeps quotients finite
_ROUNDING = 1e-9  # relative; more than all rounding errors together


@attrs.frozen(eq=False)
class EpochCosts:
    """The costs of the epochs as functions of the carries; lengths in units of their own.

    Steps are seen from the end of their epoch: C_t is the product of the contractions after t.

    Attributes:
        whole: The product of all contractions of an epoch, shape (epochs,).
        mass: s_t C_t, shape (epochs, positions); 0 at positions that are never reached.
        total: The sum of (C_t sigma_t)**2 over all steps, shape (epochs, 1).
        weight_before: One over this sum over the steps i < t, shape (epochs, positions); inf if
            there are none.
        weight_after: One over the sum over the steps from t on.
        is_released: True where the iterate after the epoch is released, shape (epochs,).
        scale: The unit of all costs.
    """

    whole: np.ndarray
    mass: np.ndarray
    total: np.ndarray
    weight_before: np.ndarray
    weight_after: np.ndarray
    is_released: np.ndarray
    scale: float

    @classmethod
    def of(cls, process: NoisyProcess) -> EpochCosts | None:
        """None if a number is out of range, or nothing hides an epoch."""
        period, steps = process.period, process.num_steps
        epochs = -(-steps // period)
        shift_unit = float(process.sensitivity.max()) or 1.0
        noise_unit = float(process.noise_std.max()) or 1.0

        def by_epoch(values: np.ndarray, rest: float) -> np.ndarray:
            return np.append(values, np.full(epochs * period - steps, rest)).reshape(epochs, -1)

        contraction = by_epoch(process.contraction, 1.0)
        sensitivity = by_epoch(process.sensitivity / shift_unit, 0.0)
        noise = by_epoch(process.noise_std / noise_unit, 0.0)
        with np.errstate(over="ignore", invalid="ignore"):
            later = np.ones_like(contraction)
            later[:, :-1] = np.cumprod(contraction[:, :0:-1], axis=1)[:, ::-1]
            weights = (later * noise) ** 2
            sums = np.cumsum(weights, axis=1)
            mass = np.where(sensitivity > 0, np.maximum(sensitivity * later, _TINY), 0.0)
        before = np.zeros_like(sums)
        before[:, 1:] = np.where(sums[:, :-1] < _TINY, 0.0, sums[:, :-1])
        whole = later[:, 0] * contraction[:, 0]
        if not (np.isfinite(sums).all() and np.isfinite(mass).all() and (sums[:, -1] > 0).all()):
            return None
        released = np.zeros(epochs, dtype=bool)
        released[[step // period - 1 for step in process.release_steps]] = True
        released[-1] = True
        scale = (shift_unit / noise_unit) ** 2
        total = sums[:, -1:]
        with np.errstate(divide="ignore"):
            weight_before = 1 / before
            weight_after = 1 / np.cumsum(weights[:, ::-1], axis=1)[:, ::-1]
        return cls(whole, mass, total, weight_before, weight_after, released, scale)

    def costs(self, carries: np.ndarray) -> np.ndarray:
        """v_e(j) in units of `scale`, shape (epochs, positions), of the carries Z_0, ..., Z_E.

        The shifts are proportional to (C_t sigma_t)**2 / C_t: over the whole epoch where what was
        carried into it is enough until the record comes, otherwise in two parts.
        """
        return self._costs_of(self._parts(carries))

    def _parts(self, carries: np.ndarray) -> _Parts:
        own = self.mass - carries[1:, None]
        with np.errstate(over="ignore", invalid="ignore"):
            carried = (carries[:-1] * self.whole)[:, None]
            # Not by their sums, in which a record may be far below the rounding.
            early, late = carried * self.weight_before, own * self.weight_after
        falls = (early >= late) & (late < np.inf)
        is_line = (own <= 0) | (self.weight_before == np.inf) | falls
        return _Parts(carried, own, np.maximum(carried + own, 0.0), is_line)

    def _costs_of(self, parts: _Parts) -> np.ndarray:
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            line = parts.shifted**2 / self.total
            two = parts.carried**2 * self.weight_before + parts.own**2 * self.weight_after
        return np.where(parts.is_line, line, two)

    def objective(self, carries: np.ndarray, weight: float) -> float:
        r"""Sum over the epochs of :math:`\log(\text{mean}_j e^{w v_e(j)})/w`."""
        costs = weight * self.costs(carries)
        largest = costs.max(axis=1)
        with np.errstate(invalid="ignore"):
            means = np.exp(costs - largest[:, None]).mean(axis=1)
        return float((largest + np.log(means)).sum()) / weight

    def newton_step(
        self, carries: np.ndarray, is_free: np.ndarray, weight: float
    ) -> tuple[np.ndarray, float]:
        """The step of Newton's method to subtract from the carries, and its promised decrease."""
        parts, total = self._parts(carries), self.total
        costs = weight * self._costs_of(parts)
        shares = np.exp(costs - costs.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        # Derivatives of v_e(j) by what was carried into the epoch (x) and out of it (y).
        with np.errstate(invalid="ignore", over="ignore"):
            slope = 2 * parts.shifted / total
            by_x = np.where(parts.is_line, slope, 2 * parts.carried * self.weight_before)
            by_y = -np.where(parts.is_line, slope, 2 * parts.own * self.weight_after)
            bends = np.where(parts.shifted > 0, 2 / total, 0.0)
            by_xx = np.where(parts.is_line, bends, 2 * self.weight_before)
            by_yy = np.where(parts.is_line, bends, 2 * self.weight_after)
            by_xy = np.where(parts.is_line, -bends, 0.0)

        def mean(values: np.ndarray) -> np.ndarray:
            return np.asarray((shares * values).sum(axis=1))

        of_x, of_y = mean(by_x), mean(by_y)
        gradient, diagonal = np.zeros_like(carries), np.zeros_like(carries)
        gradient[:-1] += of_x * self.whole
        gradient[1:] += of_y
        diagonal[:-1] += (mean(by_xx + weight * by_x**2) - weight * of_x**2) * self.whole**2
        diagonal[1:] += mean(by_yy + weight * by_y**2) - weight * of_y**2
        beside = (mean(by_xy + weight * by_x * by_y) - weight * of_x * of_y) * self.whole
        moves = is_free & ((carries > 0) | (gradient < 0))
        gradient = np.where(moves, gradient, 0.0)
        diagonal = np.where(moves, diagonal * (1 + _ROUNDING) + _TINY, 1.0)
        beside = np.where(moves[:-1] & moves[1:], beside, 0.0)
        bands = np.stack([np.append(0.0, beside), diagonal])
        step = linalg.solveh_banded(bands, gradient, check_finite=False)
        return step, float(gradient @ step)


class _Parts(NamedTuple):
    """Masses to be shifted in every epoch, for every position; shapes as for the costs."""

    carried: np.ndarray  # into the epoch, seen from its end, shape (epochs, 1)
    own: np.ndarray  # what is left to be shifted after it
    shifted: np.ndarray  # both together, at least 0
    is_line: np.ndarray  # whether the shifts may be proportional over the whole epoch


def best_carries(epochs: EpochCosts) -> np.ndarray:
    """Carries with a small cost, shape (epochs + 1,); 0 where an iterate is released."""
    free = np.append(False, ~epochs.is_released)
    everything = np.where(free, np.append(0.0, epochs.mass.max(axis=1)), 0.0)
    # What is carried into an epoch that expands costs more than what is not.
    carries = min((everything, 0 * everything), key=lambda c: float(epochs.costs(c).sum()))
    for _ in range(_ROUNDS):
        cost = float(epochs.costs(carries).mean(axis=1).sum())
        if not 0 < cost < np.inf:
            break
        carries = _minimised(epochs, carries, free, _WEIGHT / cost)
    return carries


def _minimised(
    epochs: EpochCosts, carries: np.ndarray, is_free: np.ndarray, weight: float
) -> np.ndarray:
    value = epochs.objective(carries, weight)
    for _ in range(_MOST_STEPS):
        step, promised = epochs.newton_step(carries, is_free, weight)
        if not promised > _ENOUGH * value:
            break
        length = 1.0
        while length > _SMALLEST_STEP:
            found = np.maximum(carries - length * step, 0.0)
            lower = epochs.objective(found, weight)
            if lower <= value - 1e-4 * length * promised:
                break
            length /= 2
        else:
            break
        carries, value = found, lower
    return carries


def carried_curve(epochs: EpochCosts, carries: np.ndarray) -> GaussianMixtureCurve:
    """The mean over the positions in all epochs, which are independent and uniform.

    The law of the cost is computed on a grid, every cost rounded up. Any carries are valid that are
    >= 0, and 0 at the start and where an iterate is released.
    """
    costs = epochs.costs(carries)
    lowest, highest = costs.min(axis=1), costs.max(axis=1)
    width = float((highest - lowest).sum()) / _CELLS
    varies = highest - lowest > width
    start = float(lowest[varies].sum() + highest[~varies].sum())
    law = np.ones(1)
    for row, low in zip(costs[varies], lowest[varies], strict=True):
        cells = np.ceil((row - low) / width * (1 - _ROUNDING)).astype(int)
        law = np.convolve(law, np.bincount(cells) / len(row))
    above = np.cumsum(law[::-1])[::-1]
    end = int(np.searchsorted(-above, -_TAIL))  # what follows has less mass than that
    edges = np.append(np.linspace(0, end, _LEVELS), len(law) - 1)
    edges = np.unique(np.minimum(np.ceil(edges), len(law) - 1))
    cells, weights = fewer(np.arange(len(law)), law, edges)
    mu_squared = (start + width * cells) * epochs.scale * (1 + _ROUNDING)
    return GaussianMixtureCurve(weights / weights.sum(), np.sqrt(mu_squared))
