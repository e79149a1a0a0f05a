r"""The windows of Theorem C: the distance before one, what hides it, and the search of the best.

The distance before a window is a sum of weights w_j of the steps before, each of which counts if a
coin shows heads:

.. math:: S = \sum_j w_j\, b_j, \qquad b_j \sim \mathrm{Bernoulli}(q) \text{ independent}

and any law that is stochastically larger will do (docs/theory/random_distance.md). Only positive
numbers are added and multiplied, so that nothing cancels. The largest errors are those of the
logarithms of binomial coefficients, 1e-16 times log n! for n coins: below 1e-7 for n up to 1e7.

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

from hidden_state_accountants.bounds.solvers.rounding import fewer
from hidden_state_accountants.curves.profiles import Deltas, Profile
from hidden_state_accountants.process.stretching import Stretching

FINE, _ROUGH = (160, 400), (40, 48)
"""Precision and number of levels of a law that is claimed; of one for a comparison."""
_NEAR = 1.03  # pasts of nearly the same length share a rough law
_FORGOTTEN = 1e-4  # the share of the distance that steps long ago may have

# Of a law: more than all rounding errors of probabilities and levels together; what is moved to the
# largest level, per class of weights; of the mean or the largest weight, what is added as if it all
# counted; weights below the largest one by f are rounded f**_FINER times as much; survival
# probabilities where the bulk ends, and where the levels do.
_ROUNDING, _NEGLIGIBLE, _REST, _FINER = 1e-7, 1e-19, 1e-3, 1 / 2
_BULK, _TAIL = 1e-6, 1e-16

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

_CELLS = 2048  # of a transform
_FINER_CELLS = 32  # of a single mechanism in one of the sum: its losses are much smaller
_NODE_RATIO = 1.02  # of neighbouring losses of a single mechanism
_SMALLEST = 1e-300  # delta has a logarithm
_VANISHED = -32.0  # logarithm of a characteristic function: less than its transform's error
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


class Windows:
    """All windows of a segment."""

    def __init__(self, steps: SampledSteps):
        self.total = len(steps.step_mu)
        self._steps = steps
        self._mus = np.unique(steps.step_mu)
        # _counts[i, k]: how many of the last k steps have mu = _mus[i]
        is_level = steps.step_mu[::-1] == self._mus[:, None]
        self._counts = np.pad(np.cumsum(is_level, axis=1), ((0, 0), (1, 0)))
        self._log_weights: dict[int, float] = {}
        self._laws: dict[tuple[int, int, int], DistanceLaw] = {}

    def whole(self) -> Window:
        """All steps, which start from a shared state: nothing but the record has to be hidden."""
        sampled = self._sampled(Plan(self.total, 0, 1.0))
        if self._steps.before:
            sampled = tuple((mu, count + self._steps.before) for mu, count in sampled)
        return Window(sampled, np.zeros(1), np.ones(1))

    def rough(self, plan: Plan) -> Window:
        """About what dominates the segment: good enough to choose."""
        start = int(_NEAR ** math.ceil(math.log(self.total - plan.length, _NEAR)))
        return self._after(start, plan, *_ROUGH)

    def window(self, plan: Plan, precision: int, levels: int) -> Window:
        """A pair that dominates the segment; `precision` and `levels` are those of its law."""
        return self._after(self.total - plan.length, plan, precision, levels)

    def _after(self, start: int, plan: Plan, precision: int, levels: int) -> Window:
        if start >= (self._memory if self._steps.is_constant else self.total):
            start = self.total  # more equal steps never leave a smaller distance
        law = self._law(start, precision, levels)
        log_unit = self._log_mu_of_unit(plan) - 0.5 * math.log1p(-plan.beta)
        mus = law.levels * math.exp(min(log_unit, 600.0))
        if not mus[-1]:  # nothing to hide: no step needs to be split
            plan = attrs.evolve(plan, beta=1.0)
        return Window(self._sampled(plan), mus, law.probabilities, law.rare)

    def _law(self, start: int, precision: int, levels: int) -> DistanceLaw:
        """The law of the distance after `start` steps."""
        key = start, precision, levels
        if key not in self._laws:
            weights, largest, certain = self._coins(start)
            law = law_of_sum(weights, self._steps.rate, largest, precision, certain)
            self._laws[key] = fewer_levels(law, levels)
        return self._laws[key]

    def _sampled(self, plan: Plan) -> tuple[tuple[float, int], ...]:
        sampled: dict[float, int] = {}
        shifted, whole = self._counts[:, plan.shifted], self._counts[:, plan.length]
        for mu, last, all_of_them in zip(self._mus.tolist(), shifted, whole, strict=True):
            for size, count in ((mu, all_of_them - last), (mu / plan.beta**0.5, last)):
                if count and mu:
                    sampled[size] = sampled.get(size, 0) + int(count)
        return tuple(sampled.items())

    def _log_mu_of_unit(self, plan: Plan) -> float:
        """log mu of hiding a distance of 1 at the start of the window, with all of the noise.

        One pool hides everything: mu**2 = z**2 / sum_t (sigma_t / (c_{m+1} ... c_t))**2, z the
        distance before the first of these steps, m + 1.
        """
        first = self.total - plan.shifted
        if plan.shifted not in self._log_weights:
            stretched = self._steps.stretching.log_product(first, range(first + 1, self.total + 1))
            with np.errstate(divide="ignore"):
                logs = np.log(self._steps.noise_std[first:]) - stretched
            self._log_weights[plan.shifted] = float(special.logsumexp(2 * logs))
        before = self._steps.stretching.log_product(self.total - plan.length, first)
        return float(before) - self._log_weights[plan.shifted] / 2

    def _coins(self, start: int) -> tuple[np.ndarray, float, float]:
        """The distance that each coin adds after `start` steps, the largest, and the first one."""
        later = self._steps.stretching.log_product(range(1, start + 1), start)
        with np.errstate(over="ignore", divide="ignore"):
            weights = np.exp(np.log(self._steps.sensitivity[:start]) + later)
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


# The law of the distance


@attrs.frozen(eq=False)
class DistanceLaw:
    """A law that is stochastically larger than another one; `rare` is the probability of more."""

    levels: np.ndarray
    probabilities: np.ndarray
    rare: float = 0.0


def law_of_sum(
    weights: np.ndarray, rate: float, largest: float, precision: int, certain: float = 0.0
) -> DistanceLaw:
    """A law that is stochastically larger than that of min(certain + S, largest)."""
    weights = np.sort(np.minimum(weights[weights > 0], largest))
    total = float(weights.sum())
    if not len(weights) or rate == 1 or certain + total * rate >= largest:
        level = min(certain + total, largest) * (1 + _ROUNDING)
        return DistanceLaw(np.array([level]), np.ones(1))
    sizes, counts, offset = _classes(weights, rate, precision)
    offset += certain
    room = (largest - offset) * (1 + _ROUNDING)
    width = sizes[0] / precision
    law, beyond = np.ones(1), 0.0
    for size, count in zip(sizes.tolist(), counts.tolist(), strict=True):
        while width * 2 <= size * max(1.0, rate * count) / precision:
            padded = np.concatenate([[0.0], law, np.zeros(1 - len(law) % 2)])
            law, width = padded.reshape(-1, 2).sum(axis=1), 2 * width  # odd cells move up
        law, lost = _convolved(law, size / width, count, rate, int(room / width) + 1)
        beyond += lost
    levels = np.minimum(offset + width * np.arange(len(law)), largest)
    levels = np.append(levels, largest) * (1 + _ROUNDING)
    return DistanceLaw(levels, _rounded_up(np.append(law, beyond)))


def fewer_levels(law: DistanceLaw, number: int) -> DistanceLaw:
    """About `number` levels, rounded up: most for the bulk of the law, the others for its tail."""
    levels, probabilities = law.levels, law.probabilities
    above = np.cumsum(probabilities[::-1])[::-1] + law.rare
    first = float(levels[np.argmax(np.cumsum(probabilities) > _BULK)])
    end, last = (float(levels[np.flatnonzero(above > p)[-1]]) for p in (_BULK, _TAIL))
    bulk = first + (end - first) * np.linspace(0, 1, 3 * number // 4) ** 2
    edges = np.unique(np.concatenate([bulk, np.linspace(end, last, number // 4)]))
    kept = levels <= last
    found = fewer(levels[kept], probabilities[kept], edges)
    return DistanceLaw(*found, law.rare + float(probabilities[~kept].sum()))


def _rounded_up(probabilities: np.ndarray) -> np.ndarray:
    """Larger probabilities for all but the smallest levels, which make up for it."""
    larger = probabilities * (1 + _ROUNDING)
    excess = float(larger.sum()) - 1
    sums = np.cumsum(larger)
    first = int(np.searchsorted(sums, excess, side="right"))
    larger[first] = sums[first] - excess
    larger[:first] = 0.0
    return larger


def _classes(
    weights: np.ndarray, rate: float, precision: int
) -> tuple[np.ndarray, np.ndarray, float]:
    """Ascending weights, rounded up to few sizes; how many have each; and the sum of the rest."""
    top, sums = float(weights[-1]), np.cumsum(weights)
    rest = int(np.searchsorted(sums, _REST * max(top, rate * float(sums[-1]))))
    edges = [top]
    while edges[-1] > weights[rest]:
        edges.append(edges[-1] / (1 + (top / edges[-1]) ** _FINER / precision))
    sizes, counts = fewer(weights[rest:], np.ones(len(weights) - rest), np.array(edges[::-1]))
    return sizes, counts.astype(int), float(sums[rest - 1]) if rest else 0.0


def _convolved(
    law: np.ndarray, size: float, count: int, rate: float, most_cells: int
) -> tuple[np.ndarray, float]:
    """The law plus `count` coins of one size, in cells, and the mass that leaves the grid."""
    heads, lost = _number_of_heads(count, rate)
    moves = np.ceil(size * np.arange(len(heads)) * (1 - _ROUNDING / 2)).astype(int)
    total = np.zeros(len(law) + int(moves[-1]))
    for move, probability in zip(moves.tolist(), heads.tolist(), strict=True):
        total[move : move + len(law)] += probability * law
    beyond = np.cumsum(total[::-1])[::-1]
    kept = int(np.searchsorted(-beyond, -_NEGLIGIBLE))  # what follows has less mass than that
    kept = max(1, min(kept, most_cells))
    return total[:kept], lost + (float(beyond[kept]) if kept < len(total) else 0.0)


def _number_of_heads(count: int, rate: float) -> tuple[np.ndarray, float]:
    """The first binomial probabilities, and a bound on the sum of the others."""
    mean = count * rate
    reach = min(count, math.ceil(mean + 10 * math.sqrt(mean) + 20))
    number = np.arange(reach + 1)
    ways = special.gammaln(count + 1) - special.gammaln(number + 1)
    ways -= special.gammaln(count - number + 1)
    heads = np.exp(ways + number * math.log(rate) + (count - number) * math.log1p(-rate))
    # Neighbouring probabilities fall by this factor at least from the last one on.
    factor = (count - reach) * rate / ((reach + 1) * (1 - rate))
    rest = heads[-1] * factor / (1 - factor)
    beyond = np.cumsum(heads[::-1])[::-1] + rest
    kept = max(1, int(np.searchsorted(-beyond, -_NEGLIGIBLE)))
    return heads[:kept], float(beyond[kept]) if kept < len(heads) else float(rest)


# The search


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
        epsilon, plan = search.on_grid(plan)
        if plan is None or epsilon > _PROMISING * scale:
            break
        if epsilon > scale / 3:
            epsilon, plan = search.refined(plan)
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
    return _Search(windows, quick_at(scale)).moved(plan, _SHORT_MOVES)[1] if scale else plan


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
    """Rough epsilons of the windows of a segment."""

    def __init__(self, windows: Windows, quick: QuickLosses):
        self._windows, self._quick = windows, quick
        self._known: dict[Plan, float] = {}

    def epsilon(self, plan: Plan) -> float:
        if plan not in self._known:
            self._known[plan] = self._quick.epsilon(self._windows.rough(plan))
        return self._known[plan]

    def on_grid(self, plan: Plan | None) -> tuple[float, Plan | None]:
        """The best plan of a grid, or the given one if that is as good."""
        best = math.inf if plan is None else self.epsilon(plan), plan
        number = 2 + int(_LENGTHS * math.log(self._windows.total, 4))
        lengths = np.geomspace(1, self._windows.total - 1, number).round().astype(int)
        for length, share, odds in itertools.product(np.unique(lengths).tolist(), _SHARES, _SPLITS):
            candidate = Plan(length, max(1, round(share * length)), _split(odds))
            if self.epsilon(candidate) < best[0]:
                best = self.epsilon(candidate), candidate
        return best

    def refined(self, plan: Plan) -> tuple[float, Plan]:
        """Long moves, from a plan and from the best known one of another length."""
        others = [other for other in self._known if other.length != plan.length]
        starts = [plan, *([min(others, key=self.epsilon)] if others else [])]
        return min((self.moved(p, _LONG_MOVES) for p in starts), key=lambda found: found[0])

    def moved(self, plan: Plan, moves: Sequence[tuple[float, int]]) -> tuple[float, Plan]:
        """The plan after ever smaller moves."""
        for factor, splits in moves:
            better: Plan | None = plan
            while better:
                plan, enough = better, self.epsilon(better) * (1 - _ENOUGH)
                tried = self._moves(plan, factor, splits)
                better = next((p for p in tried if self.epsilon(p) < enough), None)
        return self.epsilon(plan), plan

    def _moves(self, plan: Plan, factor: float, splits: int) -> list[Plan]:
        """One coordinate, or two that may make up for each other, up or down."""
        number = round(_SPLITS_PER_DOUBLING * math.log2(plan.beta / (1 - plan.beta)))
        moves = []
        for f, n in ((factor, splits), (1 / factor, -splits)):
            beta = _split(number + n)
            length, shifted = _times(plan.length, f), _times(plan.shifted, f)
            moves += [
                attrs.evolve(plan, beta=beta),
                attrs.evolve(plan, shifted=shifted),
                attrs.evolve(plan, shifted=shifted, beta=beta),
                attrs.evolve(plan, length=length, shifted=min(plan.shifted, length)),
            ]
        total = self._windows.total
        return [m for m in moves if m.shifted <= m.length < total and 0 < m.beta < 1]


def _split(number: int) -> float:
    """One of the values of beta that are tried."""
    odds = 2.0 ** (number / _SPLITS_PER_DOUBLING)
    return odds / (1 + odds)


def _times(number: int, factor: float) -> int:
    """A product, at least one more or one less, but never below 1."""
    product = round(number * factor)
    return max(1, product if product != number else number + (1 if factor > 1 else -1))


# Rough privacy losses


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
        deltas = self.deltas(window)
        first = int(np.argmax(deltas <= self._delta))
        if deltas[first] > self._delta:
            return math.inf
        if first == 0:
            return 0.0
        low, high = np.log(deltas[first - 1 : first + 1]).tolist()
        share = (low - math.log(self._delta)) / (low - high) if low > high else 1.0
        return (first - 1 + share) * self.width

    def deltas(self, window: Window) -> np.ndarray:
        """At the epsilons 0, width, 2 width, ..."""
        total = np.zeros(len(self._frequencies), dtype=complex)
        for mu, count in window.sampled_mus:
            total += self._count * count * self._step(mu)
        alive = np.flatnonzero(total.real > _VANISHED)
        # Where mu**2 / 2 + 6 mu is within the reach; other losses are infinite.
        near = window.shift_mus < math.sqrt(36 + 2 * self._losses[-1]) - 6
        weights, means = window.shift_weights[near], window.shift_mus[near] ** 2 / 2
        # The phase of the first frequency is pi times the mean loss over the reach. Losses beyond
        # the reach would come back from its other end, as small ones.
        shift = self._count * float(weights @ means)
        if not len(alive) or shift * self._frequencies[1] - total[1].imag > math.pi:
            return np.ones(len(self._losses))  # nothing is left of the losses within the reach
        kept = 1 + int(alive[-1])
        spectrum = np.zeros(len(total), dtype=complex)
        spectrum[:kept] = np.exp(total[:kept])
        spectrum[:kept] *= self._mixture(weights, means[:, None], kept) ** self._count
        # A law with atoms is smoothed, by few cells: a transform that is cut off would ring.
        last = math.log(max(abs(spectrum[-1]), _SMALLEST))
        spectrum *= np.exp(-max(0.0, last - _VANISHED) * np.linspace(0, 1, len(spectrum)) ** 2)
        law = fft.irfft(spectrum, _CELLS)[: _CELLS // 2]
        infinite = 1 - float(spectrum[0].real)
        above = np.cumsum(law[::-1])[::-1]
        # sum over x > epsilon of p(x) exp(epsilon - x), from the last loss on
        discounted = signal.lfilter([1.0], [1.0, -math.exp(-self.width)], law[::-1])[::-1]
        return np.asarray(np.maximum(infinite + above - discounted, _SMALLEST))

    def _step(self, mu: float) -> np.ndarray:
        """The logarithm of the characteristic function of one step, without infinite losses."""
        if mu not in self._steps:
            fine = self.width / _FINER_CELLS
            profile = self._profile_of(mu)
            last = min(_CELLS // 2 * _FINER_CELLS, math.ceil(profile.largest / fine) + 1)
            number = 2 + int(math.log(last) / math.log(_NODE_RATIO))
            nodes = np.unique(np.geomspace(1, last, number).astype(int))
            law = np.zeros(_CELLS * _FINER_CELLS)
            law[nodes] += _masses(profile.forward, nodes * fine)
            law[-nodes] += _masses(profile.backward, nodes * fine) * np.exp(-nodes * fine)
            infinite = float(profile.forward(np.array(nodes[-1] * fine)))
            law[0] += max(0.0, 1 - infinite - law.sum())
            transform = fft.rfft(law)[: len(self._frequencies)]
            self._steps[mu] = np.log(np.where(transform == 0, _SMALLEST, transform))
        return self._steps[mu]

    def _mixture(self, weights: np.ndarray, means: np.ndarray, number: int) -> np.ndarray:
        """The characteristic function of losses N(m, 2 m), at the first frequencies."""
        turns = np.repeat(np.exp(-1j * means * self._frequencies[1]), number, axis=1)
        turns[:, 0] = 1.0
        np.cumprod(turns, axis=1, out=turns)  # the frequencies are multiples of one
        turns *= np.exp(-means * self._frequencies[:number] ** 2)
        return np.asarray(weights @ turns)


def _masses(deltas: Deltas, losses: np.ndarray) -> np.ndarray:
    """Masses around each loss > 0, by the polygon through the divergences."""
    known = deltas(np.append(0.0, losses))
    steps, falls = np.diff(losses, prepend=0.0), -np.diff(known)
    masses = falls / -np.expm1(-steps)
    with np.errstate(over="ignore"):  # far above all losses that are looked at
        masses[:-1] -= falls[1:] / np.expm1(steps[1:])
    return np.maximum(masses, 0.0)
