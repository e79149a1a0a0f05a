r"""Chien & Li's optimisation for a Hölder gradient: one-parameter shooting.

With the modulus :math:`g(z) = \kappa z + \ell z^\lambda` Theorems 3.7 and A.1 ask for the least

.. math:: \sum_{t > \tau} (s_t + a_t)^2 \quad\text{with}\quad
          z_\tau = D_\tau,\; z_t = g(z_{t-1}) - a_t,\; a_t \ge 0,\; z_T = 0

(the best beta is already in it). g is concave, so this is not a convex problem. A stationary point
has :math:`s_t + a_t = \max(s_t, p_t)` with :math:`p_{t-1} = p_t\, g'(z_{t-1})`: going backwards
from T, the last p fixes everything, for every tau at once. A grid over p, refined where it is
lowest, is a search; what is returned is feasible whatever the search did, because it is recomputed
from the distances z it found.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import attrs
import numpy as np

_GRID = 96
_REFINED = 24
_ROUNDS = 4
_VALLEYS = 3
_SLACK = 1.1
_DECADES = 8


@attrs.frozen
class HoelderModulus:
    """g(z) = decay * z + coefficient * z**exponent; lengths in units of the noise."""

    decay: float
    coefficient: float
    exponent: float

    def __call__(self, distance: np.ndarray | float) -> np.ndarray:
        """g."""
        z = np.asarray(distance, dtype=np.float64)
        return self.decay * z + self.coefficient * z**self.exponent

    def slope(self, distance: np.ndarray) -> np.ndarray:
        """g', infinite at 0."""
        with np.errstate(divide="ignore", over="ignore"):
            power = self.exponent * self.coefficient * distance ** (self.exponent - 1)
        return self.decay + power

    def inverse(self, value: np.ndarray) -> np.ndarray:
        """h: Newton's method in u = z**exponent, where g is convex; it never undershoots."""
        if self.coefficient == 0 or self.exponent == 1:
            with np.errstate(divide="ignore", invalid="ignore"):
                return value / (self.decay + self.coefficient)
        power = 1 / self.exponent
        u = np.minimum(value / self.coefficient, (value / self.decay) ** self.exponent)
        for _ in range(60):
            tail = self.decay * u ** (power - 1)
            step = (tail * u + self.coefficient * u - value) / (power * tail + self.coefficient)
            u = np.maximum(u - step, 0.0)
            if (step <= 1e-14 * u).all():
                break
        return u**power


@attrs.frozen(eq=False)
class HoelderProblem:
    """One problem per possible order of the batches ("row").

    Attributes:
        modulus: g.
        sensitivity: s, finite.
        num_steps: T.
        participations: Shape (J,): in how many steps the record takes part.
        holds: (rows, step) -> booleans: whether step + 1 uses the record.
        distance: (rows, step) -> D_step, finite.
        largest_distance: max D.
    """

    modulus: HoelderModulus
    sensitivity: float
    num_steps: int
    participations: np.ndarray
    holds: Callable[[np.ndarray, int], np.ndarray]
    distance: Callable[[np.ndarray, int], np.ndarray]
    largest_distance: float

    @classmethod
    def periodic(
        cls,
        modulus: HoelderModulus,
        sensitivity: float,
        distance: np.ndarray,
        period: int,
        positions: np.ndarray,
    ) -> HoelderProblem:
        """Row j takes part in every period-th step from positions[j] + 1 on.

        `distance` is D_0..D_T of position 0; for position j everything happens j steps later.
        """
        num_steps = len(distance) - 1
        return cls(
            modulus,
            sensitivity,
            num_steps,
            np.maximum(0, -((positions - num_steps) // period)),
            lambda rows, step: (step >= positions[rows]) & ((step - positions[rows]) % period == 0),
            lambda rows, step: distance[np.maximum(step - positions[rows], 0)],
            float(distance.max()),
        )

    @classmethod
    def tabulated(
        cls,
        modulus: HoelderModulus,
        sensitivity: float,
        present: np.ndarray,
        distance: np.ndarray,
    ) -> HoelderProblem:
        """Any participations, shape (J, T), with their distances, shape (J, T + 1)."""
        return cls(
            modulus,
            sensitivity,
            present.shape[1],
            present.sum(axis=1),
            lambda rows, step: present[rows, step],
            lambda rows, step: distance[rows, step],
            float(distance.max()),
        )

    def least_values(self) -> np.ndarray:
        """2 D_alpha/alpha per row: feasible, hence valid, points."""
        result = self.participations * self.sensitivity**2  # tau = 0
        top = float(self.modulus(self.largest_distance)) + self.sensitivity
        if top == 0:
            return result
        shifts = top * np.logspace(-_DECADES, 0, _GRID)
        # The last shift is in a step with the record, or in one without.
        grid = np.sort(np.concatenate([shifts, self.sensitivity + shifts]))
        costates = np.tile(grid, (len(result), 1))
        values = self._search(np.arange(len(result)), costates, result)
        rows, found = _lowest_valleys(values, result)
        costates = costates[rows]
        for _ in range(_ROUNDS if len(rows) else 0):
            costates = _refined(costates, found)
            found = self._search(rows, costates, np.full(len(rows), np.inf)).argmin(axis=1)
        for row, costate in zip(rows.tolist(), costates[np.arange(len(rows)), found], strict=True):
            result[row] = min(result[row], self._plan(row, float(costate)))
        return result

    def _search(self, problems: np.ndarray, costates: np.ndarray, limit: np.ndarray) -> np.ndarray:
        """The least value of every costate; one that cannot be close to the row's best is left."""
        best, values = limit.astype(np.float64), np.full(costates.shape, np.inf)
        at, columns = (index.ravel() for index in np.indices(costates.shape))
        p, z, cost = costates.ravel(), np.zeros(costates.size), np.zeros(costates.size)
        for step in range(self.num_steps - 1, -1, -1):  # from x_step to x_(step+1)
            rows = problems[at]
            start = self.distance(rows, step)
            value = self._start(rows, step, start, z, cost)
            values[at, columns] = np.minimum(values[at, columns], value)
            np.minimum.at(best, at, value)
            z, p, cost = self._back(rows, step, z, p, cost)
            keep = (z < start) & (cost < _SLACK * best[at])  # more steps only cost more
            if not keep.any():
                break
            if not keep.all():
                at, columns, p, z, cost = (v[keep] for v in (at, columns, p, z, cost))
        return values

    def _start(
        self, rows: np.ndarray, step: int, start: np.ndarray, z: np.ndarray, cost: np.ndarray
    ) -> np.ndarray:
        """The sum if tau = step: the first shift takes D_tau straight to z, whatever p says."""
        own = np.where(self.holds(rows, step), self.sensitivity, 0.0)
        return cost + (own + np.maximum(self.modulus(start) - z, 0.0)) ** 2

    def _back(
        self, rows: np.ndarray, step: int, z: np.ndarray, p: np.ndarray, cost: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        own = np.where(self.holds(rows, step), self.sensitivity, 0.0)
        total = np.maximum(own, p)
        before = self.modulus.inverse(z + (total - own))
        with np.errstate(over="ignore", invalid="ignore"):
            p = np.where(before > 0, p * self.modulus.slope(before), p)
            return before, p, cost + total * total

    def _plan(self, row: int, costate: float) -> float:
        """The least cost of a costate's plans, from distances that make them feasible."""
        rows = np.array([row])
        z, p, cost = np.zeros(1), np.array([costate]), np.zeros(1)
        distances, best, best_start = [0.0], math.inf, self.num_steps  # z_T, z_(T-1), ...
        for step in range(self.num_steps - 1, -1, -1):
            start = self.distance(rows, step)
            value = float(self._start(rows, step, start, z, cost)[0])
            if value < best:
                best, best_start = value, step
            z, p, cost = self._back(rows, step, z, p, cost)
            if z[0] >= start[0] or cost[0] >= best:
                break
            distances.append(float(z[0]))
        planned = distances[: self.num_steps - best_start][::-1]
        return self._cost(rows, best_start, float(self.distance(rows, best_start)[0]), planned)

    def _cost(self, rows: np.ndarray, start: int, z: float, distances: list[float]) -> float:
        """The sum for z_start = z and then, where g reaches them, the planned distances."""
        total = 0.0
        for step, planned in enumerate(distances, start=start):
            reached = float(self.modulus(z))
            after = min(planned, reached)
            own = self.sensitivity if self.holds(rows, step)[0] else 0.0
            # Chien & Li 2024, Theorems 3.7 and A.1 with beta = s/(s + a), arXiv 2410.01068
            total += (own + (reached - after)) ** 2
            z = after
        return total


def _lowest_valleys(values: np.ndarray, limit: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of the lowest local minima of every row, if not far above its limit."""
    padded = np.pad(values, ((0, 0), (1, 1)), constant_values=np.inf)
    is_valley = (values <= padded[:, :-2]) & (values < padded[:, 2:])
    depth = np.where(is_valley & (values < _SLACK * limit[:, None]), values, np.inf)
    columns = np.argsort(depth, axis=1)[:, :_VALLEYS]
    rows, rank = np.nonzero(np.isfinite(np.take_along_axis(depth, columns, axis=1)))
    return rows, columns[rows, rank]


def _refined(costates: np.ndarray, found: np.ndarray) -> np.ndarray:
    """A finer grid per row, around and with the costate that was found."""
    rows, last = np.arange(len(found)), costates.shape[1] - 1
    middle = costates[rows, found][:, None]
    left = costates[rows, np.maximum(found - 1, 0)][:, None]
    right = costates[rows, np.minimum(found + 1, last)][:, None]
    fractions = np.linspace(0, 1, _REFINED)
    return np.hstack(
        [left + (middle - left) * fractions, middle + (right - middle) * fractions[1:]]
    )
