r"""Theorem A's optimal shifts where the modulus of the update is not linear: optimal control.

.. math:: \mu^2 = \min_{\tau, z} \sum_{t > \tau} \Big(\frac{f_t(z_{t-1}) - z_t}{\sigma_t}\Big)^2
          \quad\text{with}\quad z_\tau = D_\tau,\; 0 \le z_t \le f_t(z_{t-1}),\; z_T = 0

The f_t are concave, so this is not a convex problem: dynamic programming on a coarse grid finds a
plan (z_t), Newton's method refines it, and what is reported is the cost of the refined plan,
evaluated upwards. Whatever the search did, that cost is a valid bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import attrs
import numpy as np
from scipy import linalg

_GRID = 40  # distances of the coarse plan: Newton's method makes up for few of them
_SEARCHES = 3  # each on a grid that ends at twice what the plan before needed
_ROUNDS, _TRIALS = 60, 12  # of Newton's method, which needs about ten; of its damping
_UP = 1 + 1e-14  # more than the rounding of one f_t, or of one cost


@attrs.frozen(eq=False)
class ShiftProblem:
    r"""Steps with :math:`|\phi_t(x) - \phi'_t(y)| \le f_t(|x - y|)`; arrays of shape (T,).

    .. math:: f_t(z) = \kappa_t z + \min(\ell_t z^\lambda, \text{cap}_t) + s_t

    kappa_t is `decay`, l_t `coefficient`. No two iterates are further apart than `diameter`. With
    `own_at_once` every step pays its own s_t, as Chien & Li ask: z_t <= f_t - s_t.
    """

    decay: np.ndarray
    coefficient: np.ndarray
    cap: np.ndarray
    sensitivity: np.ndarray
    noise_std: np.ndarray
    exponent: float
    diameter: float
    own_at_once: bool = False

    @property
    def num_steps(self) -> int:
        """T."""
        return len(self.decay)

    def reach(self, step: int, distance: float) -> float:
        """f_t of the step with index `step`, rounded up."""
        power = float(self.coefficient[step]) * distance**self.exponent
        bend = min(power, float(self.cap[step]))
        return _UP * (float(self.decay[step]) * distance + bend + float(self.sensitivity[step]))

    def reach_all(self, step: int | slice, distances: np.ndarray, powers: np.ndarray) -> np.ndarray:
        """f_t of many distances, or of one for each step of a slice, given their powers."""
        bend = np.minimum(self.coefficient[step] * powers, self.cap[step])
        return np.asarray(self.decay[step] * distances + bend + self.sensitivity[step])

    def least_shift(self, step: int) -> float:
        """The least shift that a step pays."""
        return float(self.sensitivity[step]) if self.own_at_once else 0.0

    def tracked_distance(self) -> np.ndarray:
        """D_0 = 0, D_t = min(f_t(D_{t-1}), R): bounds on |X_t - X'_t|, shape (T + 1,)."""
        distances = [0.0]
        for step in range(self.num_steps):
            distances.append(min(self.reach(step, distances[-1]), self.diameter))
        return np.array(distances)

    def mu_of(self, start: int, distance: float, plan: np.ndarray) -> tuple[float, np.ndarray]:
        """An upper bound of mu for z_start = `distance`, and the feasible plan."""
        wanted = np.nan_to_num(np.maximum(plan, 0.0), nan=0.0)
        wanted[-1] = 0.0
        before = np.concatenate([[distance], wanted[:-1]])
        reached = _UP * self.reach_all(slice(start, None), before, before**self.exponent)
        least = self.sensitivity[start:] if self.own_at_once else 0.0
        if (wanted > np.maximum(reached - least, 0.0)).any():
            z = distance
            for i, want in enumerate(wanted.tolist()):
                reached[i] = self.reach(start + i, z)
                z = wanted[i] = min(want, max(reached[i] - self.least_shift(start + i), 0.0))
        # Bok, Su, Altschuler 2024, shifted interpolation, arXiv 2403.00278
        shifts = reached - wanted
        sigma = self.noise_std[start:]
        with np.errstate(divide="ignore", over="ignore"):
            ratios = np.divide(shifts, sigma, out=np.zeros_like(shifts), where=shifts > 0)
        top = float(ratios.max())
        if top in (0.0, math.inf):
            return top, wanted
        rounding = _UP + len(shifts) * 2.0**-53
        mu = top * math.sqrt(float(np.sum((ratios / top) ** 2))) * rounding
        return mu, wanted


def least_mu(problem: ShiftProblem, distances: np.ndarray | None = None) -> float:
    """The least mu that the search finds; composition (z = 0 throughout) is one of the plans.

    `distances` are D_0..D_T, if they are tracked otherwise than by f_t. All noise is 1 then, and
    the first step holds the record.
    """
    trimmed = _trimmed(problem)
    if trimmed is None:
        return 0.0
    unit = float(np.max(trimmed.noise_std))
    if unit == 0 or trimmed.noise_std[-1] == 0:
        return math.inf  # something is left, and the last step hides nothing
    trimmed = _in_units(trimmed, unit)
    distances = trimmed.tracked_distance() if distances is None else distances
    best, _ = trimmed.mu_of(0, 0.0, np.zeros(trimmed.num_steps))
    top = float(distances.max())
    with np.errstate(all="ignore"):
        for _ in range(_SEARCHES):
            search = _GridSearch(trimmed, distances, top)
            start = search.best_start()
            distance = float(distances[start])
            mu, plan = trimmed.mu_of(start, distance, search.plan(start, distance))
            if (trimmed.noise_std[start:] > 0).all():
                mu = _refined(trimmed, start, distance, plan, mu)
            best = min(best, mu)
            needed = 2 * max(float(plan.max()), distance)
            if not 1e-9 * top < needed < top / 4:
                break
            top = needed  # most of the grid was beyond the plan
    return best


def _trimmed(problem: ShiftProblem) -> ShiftProblem | None:
    """Without the steps that do nothing, those before the record and the noiseless end."""
    does_something = (
        (problem.sensitivity > 0)
        | (problem.noise_std > 0)
        | (problem.coefficient > 0)
        | (problem.decay != 1)
    )
    keep = does_something & (np.cumsum(problem.sensitivity > 0) > 0)
    # With z = 0 before it, a step without record and noise leaves z = 0.
    matters = np.flatnonzero(keep & ((problem.sensitivity > 0) | (problem.noise_std > 0)))
    if not len(matters):
        return None
    keep[matters[-1] + 1 :] = False
    return _map_arrays(problem, lambda array: array[keep])


def _in_units(problem: ShiftProblem, unit: float) -> ShiftProblem:
    return attrs.evolve(
        problem,
        coefficient=problem.coefficient * (unit ** (problem.exponent - 1) * _UP),
        cap=problem.cap / unit * _UP,
        sensitivity=problem.sensitivity / unit * _UP,
        noise_std=problem.noise_std / unit / _UP,
        diameter=problem.diameter / unit * _UP,
    )


def _map_arrays(
    problem: ShiftProblem, function: Callable[[np.ndarray], np.ndarray]
) -> ShiftProblem:
    return attrs.evolve(
        problem,
        decay=function(problem.decay),
        coefficient=function(problem.coefficient),
        cap=function(problem.cap),
        sensitivity=function(problem.sensitivity),
        noise_std=function(problem.noise_std),
    )


class _GridSearch:
    """Dynamic programming backwards: U_t(z), the least mu of the steps after t from z_t = z.

    U_t is interpolated linearly: for a linear modulus it is nearly linear, and the best z_{t+1}
    inside a cell has a closed form.
    """

    def __init__(self, problem: ShiftProblem, distances: np.ndarray, top: float):
        self._problem, self._distances = problem, distances
        typical = float(np.median(problem.sensitivity[problem.sensitivity > 0]))
        low = min(1e-3 * typical, 1e-2 * top)
        self._z = np.concatenate([[0.0], np.geomspace(low, top, _GRID - 1)])
        self._left, self._width = self._z[:-1], np.diff(self._z)
        self._values: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # and slopes of the cells

    def best_start(self) -> int:
        """The start with the least value: step 0, or where the domain cuts the distance."""
        problem, z = self._problem, self._z
        powers = z**problem.exponent
        best, start = math.inf, 0
        for t in range(problem.num_steps - 1, -1, -1):
            reached = problem.reach_all(t, z, powers)
            sigma = float(problem.noise_std[t])
            if t == problem.num_steps - 1:
                value = reached / sigma
            elif sigma == 0:
                value = np.interp(reached, z, self._values[t + 1][0])
            else:
                costs, _ = self._costs(t, reached[:, None])
                value = np.maximum.accumulate(np.sqrt(costs.min(axis=1)))
            self._values[t] = value, (value[1:] - value[:-1]) / self._width
            # Where own shifts can be put off, a start before them is no worse unless D is cut.
            if t == 0 or problem.own_at_once or self._distances[t] >= problem.diameter:
                here = float(np.interp(self._distances[t], z, value))
                if here < best:
                    best, start = here, t
            if value[0] >= best:  # more steps only cost more
                break
        return start

    def _costs(self, t: int, reached: np.ndarray | float) -> tuple[np.ndarray, np.ndarray]:
        """Per cell the least (f - z)^2/sigma^2 + U_{t+1}(z)^2, and z - left there."""
        (value, slope), variance = self._values[t + 1], float(self._problem.noise_std[t]) ** 2
        value, gap, least = value[:-1], reached - self._left, self._problem.least_shift(t)
        weighed = variance * slope
        inside = (gap - weighed * value) / (1 + weighed * slope)
        room = np.maximum(gap - least, 0.0)
        inside = np.maximum(np.minimum(inside, np.minimum(room, self._width)), 0.0)
        costs = np.maximum(gap - inside, least) ** 2 / variance + (value + slope * inside) ** 2
        return costs, inside

    def plan(self, start: int, distance: float) -> np.ndarray:
        """z_(start+1)..z_T, forwards, by the values found."""
        problem, z = self._problem, distance
        plan = np.zeros(problem.num_steps - start)
        for t in range(start, problem.num_steps - 1):
            reached = problem.reach(t, z)
            if problem.noise_std[t] == 0:
                z = reached
            else:
                costs, inside = self._costs(t, reached)
                cell = int(np.argmin(costs))
                z = min(float(self._left[cell] + inside[cell]), reached - problem.least_shift(t))
            plan[t - start] = z
        return plan


def _refined(
    problem: ShiftProblem, start: int, distance: float, plan: np.ndarray, mu: float
) -> float:
    """Newton's method, damped, on the distances that are not 0; the matrix is tridiagonal."""
    tail = _map_arrays(problem, lambda array: array[start:])
    sigma, damping = tail.noise_std, 1e-6
    for _ in range(_ROUNDS):
        free = plan > 0  # z_T = 0 is not
        if not free.any():
            return mu
        before = np.concatenate([[distance], plan[:-1]])
        power = tail.coefficient * before**tail.exponent
        bends = power < tail.cap
        reached = tail.decay * before + np.minimum(power, tail.cap) + tail.sensitivity
        shifts = (reached - plan) / sigma
        first = tail.decay + np.where(bends, tail.exponent * power / before, 0.0)
        second = np.where(bends, tail.exponent * (tail.exponent - 1) * power / before**2, 0.0)
        # How z_t moves the shift after it, and the shift of its own step.
        rises = np.where(free, np.append((first / sigma)[1:], 0.0), 0.0)
        falls = np.where(free, -1 / sigma, 0.0)
        gradient = falls * shifts + rises * np.append(shifts[1:], 0.0)
        squares = np.where(free, falls * falls + rises * rises, 1.0)
        bend = np.append((second / sigma * shifts)[1:], 0.0)
        diagonal = squares + np.where(free, bend, 0.0)
        beside = np.concatenate([[0.0], falls[1:] * rises[:-1]])
        found = None
        for _ in range(_TRIALS):
            try:
                bands = np.stack([beside, diagonal + damping * squares])
                move = linalg.solveh_banded(bands, -gradient, check_finite=False)
            except linalg.LinAlgError:  # not convex here
                damping = max(10 * damping, 1e-6)
                continue
            # Never to 0: a distance of 0 would stay there.
            trial = problem.mu_of(start, distance, np.maximum(plan + move, 0.1 * plan))
            if trial[0] < mu:
                found, damping = trial, max(0.1 * damping, 1e-14)
                break
            damping = max(10 * damping, 1e-6)
        if found is None:
            return mu
        is_done = found[0] > mu * (1 - 1e-10)
        mu, plan = found
        if is_done:
            return mu
    return mu
