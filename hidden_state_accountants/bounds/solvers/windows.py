"""The search of Theorem C: where the window starts, which steps hide the shift, the split.

Windows are compared by composed privacy losses, quickly and roughly: good enough to choose one,
never to claim. The characteristic function of the sum of independent losses is a product, which a
transform of a few thousand numbers turns into the law of the sum.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence

import attrs
import numpy as np
from scipy import fft, signal, special

from hidden_state_accountants.bounds.solvers.distance_law import (
    DistanceLaw,
    fewer_levels,
    law_of_sum,
    rough_levels,
)
from hidden_state_accountants.curves.profiles import Deltas, Profile
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
_FORGOTTEN = 1e-4  # the share of the distance that steps long ago may have
_CELLS = 2048
_FINER = 32  # cells of a single mechanism in one cell of the sum: its losses are much smaller
_SMALLEST = 1e-300  # delta has a logarithm
_VANISHED = -32.0  # logarithm of a characteristic function: less than its transform's error
_NODE_RATIO = 1.02  # of neighbouring losses of a single mechanism
# The losses that are looked at, by the epsilon: what is 20 above it counts as if it were infinite.
_REACH, _FAR, _ABOVE = 16.0, 3.0, 20.0


@attrs.frozen(eq=False)
class SampledSteps:
    """The steps of a segment that starts from a shared state, or the last ones of many equal ones.

    Attributes:
        stretching: Bounds on products of moduli.
        distance: D_tau, a bound on |X_tau - X'_tau| whatever the coins are, shape (T + 1,); the
            first one is 0 if no steps are before.
        sensitivity: s_t, the distance that a step adds if its batch holds the record, (T,).
        noise_std: sigma_t, shape (T,).
        step_mu: The parameter of `profile_of` of each step, shape (T,); few values.
        rate: q, the probability that a batch holds the record.
        is_constant: True if all steps are equal.
        before: Number of equal steps before.
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
    """A window of `length` steps, the last ones of which carry shifts; any choice is valid.

    The share `beta` of the noise variance of these `shifted` steps hides the record.
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

    Windows are compared at `delta`, or a smaller one if the best epsilon is 0 there, composed
    `count` times.
    """
    windows, plan, epsilon = Windows(steps), None, math.inf
    if windows.total < 2 and not steps.before:
        return None
    quick_at = functools.partial(QuickLosses, profile_of, delta, count=count)
    whole = scale = _scale_of(windows.whole(), quick_at)
    while scale > 0:
        search = _Search(windows, quick_at(scale))
        epsilon, plan = search.on_grid(math.inf if plan is None else search.epsilon(plan), plan)
        if plan is None or epsilon > _PROMISING * scale:
            break
        if epsilon > scale / 3:
            epsilon, plan = search.refined(epsilon, plan)
        if epsilon == 0 or epsilon > scale / 3:
            break
        scale = max(epsilon, scale / _STEP)  # what is far below the scale is not read off well
    if plan and epsilon == 0 and delta > _SMALLEST_DELTA:  # many windows are as good there
        return best_plan(steps, profile_of, delta * _SMALLER, count) or plan
    return plan if epsilon < whole else None


def moved(
    plan: Plan,
    steps: SampledSteps,
    profile_of: Callable[[float], Profile],
    delta: float,
    count: int = 1,
) -> Plan:
    """A plan, for these steps or others, after short moves; arguments as for `best_plan`."""
    windows = Windows(steps)
    quick_at = functools.partial(QuickLosses, profile_of, delta, count=count)
    scale = _scale_of(windows.rough(plan), quick_at)
    if not scale:
        return plan
    search = _Search(windows, quick_at(scale))
    return search.moved(search.epsilon(plan), plan, _SHORT_MOVES)[1]


def window_of(steps: SampledSteps, plan: Plan) -> Window:
    """A pair that dominates a segment, given a plan for it or for another one."""
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
        """The best plan of a grid; given are the epsilon to beat and the plan that has it."""
        total = self._windows.total
        number = 2 + int(_LENGTHS * math.log(total, 4))
        lengths = np.unique(np.geomspace(1, total - 1, number).round().astype(int)).tolist()
        for length, share, odds in itertools.product(lengths, _SHARES, _SPLITS):
            candidate = Plan(length, max(1, round(share * length)), split(odds))
            found = self.epsilon(candidate)
            if found < epsilon:
                epsilon, plan = found, candidate
        return epsilon if plan else math.inf, plan

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
        """The plan after ever smaller moves."""
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
        """One coordinate, or two that may make up for each other, up or down."""
        moves = []
        for f, n in ((factor, splits), (1 / factor, -splits)):
            beta = split(_number_of(plan.beta) + n)
            length, shifted = _times(plan.length, f), _times(plan.shifted, f)
            moves += [
                attrs.evolve(plan, beta=beta),
                attrs.evolve(plan, shifted=shifted),
                attrs.evolve(plan, shifted=shifted, beta=beta),
                attrs.evolve(plan, length=length, shifted=min(plan.shifted, length)),
            ]
        total = self._windows.total
        return [m for m in moves if m.shifted <= m.length < total and 0 < m.beta < 1]

    def epsilon(self, plan: Plan) -> float:
        """Rough epsilon of one window."""
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
            weights, largest, certain = self._coins(start)
            law = law_of_sum(weights, self._steps.rate, largest, _ROUGH, certain)
            self._rough_laws[start] = rough_levels(law, _FEW_LEVELS, 1 - _SHARE_UP / _ROUGH)
        return self._window(plan, self._rough_laws[start])

    def window(self, plan: Plan, precision: int, levels: int) -> Window:
        """A pair that dominates the segment; `precision` and `levels` are those of its law."""
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

    def _coins(self, start: int) -> tuple[np.ndarray, float, float]:
        """The distance that each coin adds after `start` steps, the largest, and the first one."""
        stops = range(1, start + 1)
        with np.errstate(over="ignore"):
            weights = np.exp(
                self._log_sensitivity[:start] + self._steps.stretching.log_product(stops, start)
            )
            kept = np.exp(self._steps.stretching.log_product(0, start))
        certain = float(self._steps.distance[0] * kept) if self._steps.before else 0.0
        return weights, float(self._steps.distance[start]), certain

    @functools.cached_property
    def _memory(self) -> int:
        """The number of equal steps that leave nearly all of the distance that any number does."""
        stops = range(1, self.total + 1)
        with np.errstate(over="ignore"):
            sums = np.cumsum(np.exp(self._steps.stretching.log_product(0, stops)))
        return 1 + int(np.searchsorted(sums, (1 - _FORGOTTEN) * sums[-1]))


# Rough privacy losses


@attrs.frozen(eq=False)
class Window:
    """Pairs that together dominate a segment: of sampled mechanisms, and of a mixture of Gaussians.

    `sampled_mus` are pairs (mu, count). The coins before the window choose one of the `shift_mus`,
    which ascend, with the probabilities `shift_weights`, or none, with probability `rare`.
    """

    sampled_mus: tuple[tuple[float, int], ...]
    shift_mus: np.ndarray
    shift_weights: np.ndarray
    rare: float = 0.0


class QuickLosses:
    """Approximate epsilons at a delta, of compositions of sampled mechanisms and Gaussian mixtures.

    Args:
        profile_of: Maps a mu to the pair of a step whose batch holds the record with it.
        delta: Delta at which epsilon is read.
        scale: Rough size of the epsilon that is looked for: larger ones are read off less well, and
            those that are several times as large not at all.
        count: Number of times that a window is composed.
    """

    def __init__(
        self, profile_of: Callable[[float], Profile], delta: float, scale: float, count: int = 1
    ):
        self._profile_of, self._delta, self._count = profile_of, delta, count
        reach = min(_REACH * scale, _FAR * scale + _ABOVE)
        self._steps: dict[float, np.ndarray] = {}
        self.width = 2 * reach / _CELLS
        self._frequencies = math.pi / reach * np.arange(_CELLS // 2 + 1)
        self._losses = self.width * np.arange(_CELLS // 2)

    def epsilon(self, window: Window) -> float:
        """Epsilon of a pair that dominates a segment, `count` times; inf beyond the reach."""
        return self._crossing(self.deltas(window))

    def deltas(self, window: Window) -> np.ndarray:
        """At the epsilons 0, width, 2 width, ..."""
        total = np.zeros(len(self._frequencies), dtype=complex)
        for mu, count in window.sampled_mus:
            total += self._count * count * self._step(mu)
        alive = np.flatnonzero(total.real > _VANISHED)
        # The phase of the first frequency is pi times the mean loss over the reach. Losses beyond
        # the reach would come back from its other end, as small ones.
        near = self._is_near(window.shift_mus)
        shift = self._count * float(window.shift_weights[near] @ window.shift_mus[near] ** 2 / 2)
        if not len(alive) or shift * self._frequencies[1] - total[1].imag > math.pi:
            return np.ones(len(self._losses))  # nothing is left of the losses within the reach
        kept = 1 + int(alive[-1])
        spectrum = np.zeros(len(total), dtype=complex)
        spectrum[:kept] = np.exp(total[:kept])
        spectrum[:kept] *= (
            self._mixture(window.shift_mus, window.shift_weights, kept) ** self._count
        )
        # A law with atoms is smoothed, by few cells: a transform that is cut off would ring.
        last = math.log(max(abs(spectrum[-1]), _SMALLEST))
        spectrum *= np.exp(-max(0.0, last - _VANISHED) * np.linspace(0, 1, len(spectrum)) ** 2)
        law = fft.irfft(spectrum, _CELLS)[: _CELLS // 2]
        infinite = 1 - float(spectrum[0].real)
        above = np.cumsum(law[::-1])[::-1]
        # sum over x > epsilon of p(x) exp(epsilon - x), from the last loss on
        discounted = signal.lfilter([1.0], [1.0, -math.exp(-self.width)], law[::-1])[::-1]
        return np.asarray(np.maximum(infinite + above - discounted, _SMALLEST))

    def _crossing(self, deltas: np.ndarray) -> float:
        first = int(np.argmax(deltas <= self._delta))
        if deltas[first] > self._delta:
            return math.inf
        if first == 0:
            return 0.0
        low, high = np.log(deltas[first - 1 : first + 1]).tolist()
        share = (low - math.log(self._delta)) / (low - high) if low > high else 1.0
        return (first - 1 + share) * self.width

    def _step(self, mu: float) -> np.ndarray:
        """The logarithm of the characteristic function of one step, without infinite losses."""
        if mu not in self._steps:
            fine = self.width / _FINER
            profile = self._profile_of(mu)
            last = min(_CELLS // 2 * _FINER, math.ceil(profile.largest / fine) + 1)
            nodes = np.unique(
                np.geomspace(1, last, 2 + int(math.log(last) / math.log(_NODE_RATIO))).astype(int)
            )
            above = _masses(profile.forward, nodes * fine)
            below = _masses(profile.backward, nodes * fine)
            law = np.zeros(_CELLS * _FINER)
            np.add.at(law, nodes, above)
            np.add.at(law, -nodes, below * np.exp(-nodes * fine))
            infinite = float(profile.forward(np.array(nodes[-1] * fine)))
            law[0] += max(0.0, 1 - infinite - law.sum())
            transform = fft.rfft(law)[: len(self._frequencies)]
            self._steps[mu] = np.log(np.where(transform == 0, _SMALLEST, transform))
        return self._steps[mu]

    def _mixture(self, mus: np.ndarray, weights: np.ndarray, number: int) -> np.ndarray:
        """The characteristic function of the shift, at the first frequencies."""
        frequencies, near = self._frequencies[:number], self._is_near(mus)
        squares = mus[near, None] ** 2 / 2
        turns = np.repeat(np.exp(-1j * squares * self._frequencies[1]), number, axis=1)
        turns[:, 0] = 1.0
        np.cumprod(turns, axis=1, out=turns)  # the frequencies are multiples of one
        turns *= np.exp(-squares * frequencies**2)
        return np.asarray(weights[near] @ turns)

    def _is_near(self, mus: np.ndarray) -> np.ndarray:
        """Says where mu**2 / 2 + 6 mu is within the reach; other losses are infinite."""
        return np.asarray(mus < math.sqrt(36 + 2 * self._losses[-1]) - 6)


def _masses(deltas: Deltas, losses: np.ndarray) -> np.ndarray:
    """Masses around each loss > 0, by the polygon through the divergences."""
    known = deltas(np.concatenate([[0.0], losses]))
    steps = np.diff(np.concatenate([[0.0], losses]))
    falls = known[:-1] - known[1:]
    masses = falls / -np.expm1(-steps)
    with np.errstate(over="ignore"):  # far above all losses that are looked at
        masses[:-1] -= falls[1:] / np.expm1(steps[1:])
    return np.maximum(masses, 0.0)
