"""The search of Theorem C: where the window starts, which steps hide the shift, the split."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence

import attrs
import numpy as np
from scipy import special

from hidden_state_accountants.bounds.solvers.distance_law import (
    DistanceLaw,
    fewer_levels,
    law_of_sum,
    rough_levels,
)
from hidden_state_accountants.bounds.solvers.quick_losses import QuickLosses, Window
from hidden_state_accountants.curves.profiles import Profile
from hidden_state_accountants.process.stretching import Stretching

_SPLITS = (12, 4, -2)  # of beta
_SPLITS_PER_DOUBLING = 4  # of beta / (1 - beta): few values, so that steps repeat their losses
_SHARES = (1.0, 0.2)  # of the steps of a window, how many carry shifts
_LENGTHS = 3  # of windows, per factor of 4
# Factors of a coordinate, and moves of the split at the same time: of a search, and after it.
_LONG_MOVES, _SHORT_MOVES = ((1.4, 2), (1.2, 1)), ((1.1, 1), (1.03, 1))
_ENOUGH = 2e-4  # relative: what a move has to gain
_PROMISING = 1.15  # times the epsilon of the whole segment: moves may still win
_STEP = 8.0  # between the scales of epsilon that are tried
_SMALLER, _SMALLEST_DELTA = 1e-3, 1e-11  # deltas to compare at where the best epsilon is 0
_FINE = (160, 400)  # precision and number of levels of the law of the distance
_ROUGH, _FEW_LEVELS = 20, 24  # of a rough one
_SHARE_UP = 0.25  # of a cell, by which levels of a rough one are too large on average
_NEAR = 1.03  # pasts of nearly the same length share a rough law
_LATE = 2**11  # coins that are looked at first
_FORGOTTEN = 1e-4  # the share of the distance that steps long ago may have


@attrs.frozen(eq=False)
class SampledSteps:
    """The steps of a segment that starts from a shared state, or the last ones of many equal ones.

    Attributes:
        stretching: Bounds on products of moduli.
        distance: D_tau, a bound on |X_tau - X'_tau| whatever the coins are, shape (T + 1,); the
            first one is 0 if no steps are before.
        sensitivity: s_t, what a step adds to the distance if its batch holds the record, (T,).
        noise_std: sigma_t, shape (T,).
        step_mu: The parameter of `profile_of` of each step, shape (T,); few values.
        rate: q, the probability that a batch holds the record.
        is_constant: Whether all steps are equal.
        before: How many equal steps are before.
    """

    stretching: Stretching
    distance: np.ndarray
    sensitivity: np.ndarray
    noise_std: np.ndarray
    step_mu: np.ndarray
    rate: float
    is_constant: bool
    before: int = 0


@attrs.frozen
class Plan:
    """A choice of parameters; any choice is valid.

    Attributes:
        length: Steps of the window.
        shifted: Its last steps, which carry shifts.
        beta: The share of their noise variance that hides the record.
    """

    length: int
    shifted: int
    beta: float


def split(number: int) -> float:
    """One of the values of beta that are tried."""
    odds = 2.0 ** (number / _SPLITS_PER_DOUBLING)
    return odds / (1 + odds)


def _number_of(beta: float) -> int:
    return round(_SPLITS_PER_DOUBLING * math.log2(beta / (1 - beta)))


def best_plan(
    steps: SampledSteps, profile_of: Callable[[float], Profile], delta: float, count: int = 1
) -> Plan | None:
    """The window with about the smallest epsilon; None if the whole segment is better.

    Args:
        steps: The segment.
        profile_of: The sampled mechanism of a step, by its mu.
        delta: Where the candidates are compared, or a smaller one if the best epsilon is 0 there.
        count: How many such segments are composed.
    """
    windows = Windows(attrs.evolve(steps, stretching=steps.stretching.rough()))
    if windows.total < 2 and not steps.before:
        return None
    return _best_plan(windows, steps.before, profile_of, delta, count)


def _best_plan(
    windows: Windows,
    before: int,
    profile_of: Callable[[float], Profile],
    delta: float,
    count: int,
) -> Plan | None:
    """As `best_plan`, of windows whose laws are kept from one delta to the next."""
    plan: Plan | None = None
    quick_at = functools.partial(QuickLosses, profile_of, delta, count=count)
    whole = scale = _scale_of(windows.whole(), quick_at)
    if whole and before:  # that of any window is nearer to the smallest one
        late = windows.rough(Plan(windows.total - 1, windows.total - 1, split(_SPLITS[0])))
        scale = min(whole, _scale_of(late, quick_at) or whole)
    epsilon = math.inf
    while scale > 0:
        search = _Search(windows, quick_at(scale))
        epsilon, plan = search.on_grid(math.inf if plan is None else search.epsilon(plan), plan)
        if plan is None and scale < whole:  # all windows are far above the scale
            scale = min(whole, scale * _STEP)
            continue
        if plan is None or epsilon > _PROMISING * scale:
            break
        if epsilon > scale / 3:
            epsilon, plan = search.refined(epsilon, plan)
        if epsilon == 0 or epsilon > scale / 3:
            break
        scale = max(epsilon, scale / _STEP)  # what is far below the scale is not read off well
    if plan and epsilon == 0 and delta > _SMALLEST_DELTA:  # many windows are as good there
        return _best_plan(windows, before, profile_of, delta * _SMALLER, count) or plan
    return plan if epsilon < whole else None


def moved(
    plan: Plan,
    steps: SampledSteps,
    profile_of: Callable[[float], Profile],
    delta: float,
    count: int = 1,
) -> Plan:
    """What short moves make of a plan for these steps or others; arguments as for `best_plan`."""
    windows = Windows(steps)
    quick_at = functools.partial(QuickLosses, profile_of, delta, count=count)
    scale = _scale_of(windows.rough(plan), quick_at)
    if not scale:
        return plan
    search = _Search(windows, quick_at(scale))
    return search.moved(search.epsilon(plan), plan, _SHORT_MOVES)[1]


def window_of(steps: SampledSteps, plan: Plan) -> Window:
    """What dominates a segment, given a plan for it or for another one."""
    return Windows(steps).window(plan, *_FINE)


def _scale_of(window: Window, quick_at: Callable[[float], QuickLosses]) -> float:
    """Epsilon of a window; at least right to a factor of 3, or 0."""
    scale = 1.0
    for _ in range(40):
        epsilon = quick_at(scale).epsilon(window)
        if epsilon == 0 or scale / 3 < epsilon < scale * 3:
            return epsilon
        scale = min(max(epsilon, scale / _STEP), scale * _STEP)
    return scale


class _Search:
    """Epsilon of the windows of a segment."""

    def __init__(self, windows: Windows, quick: QuickLosses):
        self._windows, self._quick = windows, quick
        self._known: dict[Plan, float] = {}

    def on_grid(self, epsilon: float, plan: Plan | None) -> tuple[float, Plan | None]:
        """The best plan of a grid; given are the epsilon to beat and what has it.

        Every second length is tried with one share, with all of them if none of these is better,
        and then the best one and those beside it with all.
        """
        total = self._windows.total
        number = 2 + int(_LENGTHS * math.log(total, 4))
        lengths = np.unique(np.geomspace(1, total - 1, number).round().astype(int))
        every_second = lengths[::-2].tolist()  # the longest one too
        epsilon, plan = self._best_of(every_second, _SHARES[:1], epsilon, plan)
        if plan is None:
            epsilon, plan = self._best_of(every_second, _SHARES, epsilon, plan)
        if plan is None:
            return math.inf, None
        place = int(np.searchsorted(lengths, plan.length))
        near = lengths[max(0, place - 1) : place + 2].tolist()
        return self._best_of(near, _SHARES, epsilon, plan)

    def _best_of(
        self,
        lengths: list[int],
        shares: tuple[float, ...],
        epsilon: float,
        plan: Plan | None,
    ) -> tuple[float, Plan | None]:
        for length, share, number in itertools.product(lengths, shares, _SPLITS):
            candidate = Plan(length, max(1, round(share * length)), split(number))
            found = self.epsilon(candidate)
            if found < epsilon:
                epsilon, plan = found, candidate
        return epsilon, plan

    def refined(self, epsilon: float, plan: Plan) -> tuple[float, Plan]:
        """Long moves, from a plan and from the best known one of another length."""
        starts = [(epsilon, plan)]
        others = [(e, p) for p, e in self._known.items() if p.length != plan.length]
        if others:
            starts.append(min(others, key=lambda known: known[0]))
        return min((self.moved(*s, _LONG_MOVES) for s in starts), key=lambda found: found[0])

    def moved(
        self, epsilon: float, plan: Plan, moves: Sequence[tuple[float, int]]
    ) -> tuple[float, Plan]:
        """What ever smaller moves make of a plan."""
        for factor, splits in moves:
            while better := self._first_better(epsilon, self._moves(plan, factor, splits)):
                epsilon, plan = better
        return epsilon, plan

    def _first_better(self, epsilon: float, plans: list[Plan]) -> tuple[float, Plan] | None:
        for plan in plans:
            found = self.epsilon(plan)
            if found < epsilon * (1 - _ENOUGH):
                return found, plan
        return None

    def _moves(self, plan: Plan, factor: float, splits: int) -> list[Plan]:
        """One coordinate, or several that may make up for each other, up or down."""
        number, moves = _number_of(plan.beta), []
        for f, n in ((factor, splits), (1 / factor, -splits)):
            length, shifted, fewer = (
                _times(plan.length, f),
                _times(plan.shifted, f),
                _times(plan.shifted, 1 / f),
            )
            beta = split(number + n)
            # Steps are whole: few of them change by more, and the split has to make up for more.
            more = n * max(1, round(math.log(length / plan.length) / math.log(f)))
            longer, opposite = split(number + more), split(number - more)
            moves += [
                attrs.evolve(plan, beta=beta),
                attrs.evolve(plan, shifted=shifted),
                attrs.evolve(plan, shifted=shifted, beta=beta),
                Plan(length, min(shifted, length), longer),
                attrs.evolve(plan, length=length, shifted=min(plan.shifted, length)),
                attrs.evolve(plan, length=length, shifted=min(fewer, length)),
                attrs.evolve(plan, length=length, beta=opposite),
                Plan(length, min(fewer, length), opposite),
            ]
        return [
            move
            for move in moves
            if move.shifted <= move.length < self._windows.total and 0 < move.beta < 1
        ]

    def epsilon(self, plan: Plan) -> float:
        """Of one window, roughly."""
        if plan not in self._known:
            self._known[plan] = self._quick.epsilon(self._windows.rough(plan))
        return self._known[plan]


def _times(number: int, factor: float) -> int:
    """A product, at least one more or one less, but never below 1."""
    moved = round(number * factor)
    return max(1, moved if moved != number else number + (1 if factor > 1 else -1))


class Windows:
    """All windows of a segment."""

    def __init__(self, steps: SampledSteps):
        self.total = len(steps.step_mu)
        self._steps = steps
        self._levels = np.unique(steps.step_mu)
        backwards = steps.step_mu[::-1]
        # _counts[i, k]: how many of the last k steps have mu = levels[i]
        self._counts = np.stack(
            [np.append(0, np.cumsum(backwards == level)) for level in self._levels]
        )
        with np.errstate(divide="ignore"):
            self._log_noise = 2 * np.log(steps.noise_std)
            self._log_sensitivity = np.log(steps.sensitivity)
        self._log_weights: dict[int, float] = {}
        self._laws: dict[tuple[int, int], DistanceLaw] = {}
        self._rough_laws: dict[int, DistanceLaw] = {}

    def whole(self) -> Window:
        """All steps, which start from a shared state: nothing but the record has to be hidden."""
        sampled = self._sampled(Plan(self.total, 0, 1.0))
        if self._steps.before:
            sampled = tuple((mu, count + self._steps.before) for mu, count in sampled)
        return Window(sampled, np.zeros(1), np.ones(1))

    def rough(self, plan: Plan) -> Window:
        """About what dominates the segment: good enough to choose."""
        start = self.total - plan.length
        # Pasts of nearly the same length share a law.
        start = min(self.total, int(_NEAR ** math.ceil(math.log(start, _NEAR))))
        if self._steps.is_constant and start >= self._memory:
            start = self.total
        if start not in self._rough_laws:
            weights, largest, certain = self._late_coins(start)
            law = law_of_sum(weights, self._steps.rate, largest, _ROUGH, certain)
            self._rough_laws[start] = rough_levels(law, _FEW_LEVELS, 1 - _SHARE_UP / _ROUGH)
        return self._window(plan, self._rough_laws[start])

    def window(self, plan: Plan, precision: int, levels: int) -> Window:
        """What dominates the segment.

        Args:
            plan: The parameters.
            precision: Of the law of the distance; see `law_of_sum`.
            levels: Of the law of the distance.
        """
        start = self.total - plan.length
        if self._steps.is_constant and start >= self._memory:
            start = self.total  # more equal steps never leave a smaller distance
        key = start, precision
        if key not in self._laws:
            weights, largest, certain = self._coins(start)
            law = law_of_sum(weights, self._steps.rate, largest, precision, certain)
            self._laws[key] = fewer_levels(law, levels)
        return self._window(plan, self._laws[key])

    def _window(self, plan: Plan, law: DistanceLaw) -> Window:
        log_unit = self._log_mu_of_unit(plan) - 0.5 * math.log1p(-plan.beta)
        mus = law.levels * math.exp(min(log_unit, 600.0))
        if not mus[-1]:  # nothing to hide: no step needs to be split
            plan = attrs.evolve(plan, beta=1.0)
        return Window(self._sampled(plan), mus, law.probabilities, law.rare)

    def _sampled(self, plan: Plan) -> tuple[tuple[float, int], ...]:
        sampled: dict[float, int] = {}
        for level, row in zip(self._levels.tolist(), self._counts, strict=True):
            for mu, count in (
                (level, int(row[plan.length] - row[plan.shifted])),
                (level / plan.beta**0.5, int(row[plan.shifted])),
            ):
                if count and mu:
                    sampled[mu] = sampled.get(mu, 0) + count
        return tuple(sampled.items())

    def _log_mu_of_unit(self, plan: Plan) -> float:
        """log mu of hiding a distance of 1 at the start of the window, with all of the noise.

        One pool hides everything: mu**2 = z**2 / sum_t (sigma_t / (c_{m+1} ... c_t))**2, z the
        distance before the first of these steps, m + 1.
        """
        first = self.total - plan.shifted
        if plan.shifted not in self._log_weights:
            stops = range(first + 1, self.total + 1)
            stretched = self._steps.stretching.log_product(first, stops)
            self._log_weights[plan.shifted] = float(
                special.logsumexp(self._log_noise[first:] - 2 * stretched)
            )
        before = self._steps.stretching.log_product(self.total - plan.length, first)
        return float(before) - self._log_weights[plan.shifted] / 2

    def _coins(self, start: int, first: int = 0) -> tuple[np.ndarray, float, float]:
        """What each coin adds to the distance after `start` steps, the largest one, and a start.

        Args:
            start: Steps before the window.
            first: Of them, how many have coins that are left out.
        """
        stops = range(first + 1, start + 1)
        with np.errstate(over="ignore"):
            weights = np.exp(
                self._log_sensitivity[first:start]
                + self._steps.stretching.log_product(stops, start)
            )
            kept = np.exp(self._steps.stretching.log_product(0, start))
        certain = float(self._steps.distance[0] * kept) if self._steps.before else 0.0
        return weights, float(self._steps.distance[start]), certain

    def _late_coins(self, start: int) -> tuple[np.ndarray, float, float]:
        """About the same of the coins that matter: good enough to choose."""
        number = _LATE
        while number < start:
            found = self._coins(start, start - number)
            weights = found[0]
            if weights[: number // 2].max() <= _FORGOTTEN / number * weights.max():
                return found
            number *= 4
        return self._coins(start)

    @functools.cached_property
    def _memory(self) -> int:
        """The number of equal steps that leave nearly all of the distance that any number does."""
        stops = range(1, self.total + 1)
        with np.errstate(over="ignore"):
            sums = np.cumsum(np.exp(self._steps.stretching.log_product(0, stops)))
        return 1 + int(np.searchsorted(sums, (1 - _FORGOTTEN) * sums[-1]))
