r"""The law of Theorem A's distance for equal steps with c = 1 and coins of one probability.

The walk of what the coins add has exchangeable steps, so that the faces of its majorant have the
lengths of the cycles of a uniform random permutation and, given these, independent heights (Sparre
Andersen 1954; Abramson, Pitman, Ross, Uribe Bravo 2011):

.. math:: \mu^2 = \frac{s^2}{\sigma^2} \sum_{\text{cycles}} \frac{B(L, q)^2}{L}, \qquad
          \text{law}(n) = \frac1n \sum_{L=1}^n \Big[\frac{B(L, q)^2}{L}\Big] * \text{law}(n - L),

as the cycle of the first step has a uniform length. Laws grow with n, so that n - L is rounded up
to few numbers, and costs to a grid (docs/theory/hidden_coins.md).
"""

from __future__ import annotations

import itertools
import math

import attrs
import numpy as np
from scipy import optimize, stats

_EXACT, _RUNGS = 40, 150  # numbers of steps that others are rounded up to
_PARTS = 8  # of the lengths of cycles between two of these
_GIVEN_UP = 1e-26  # probability of a number of heads
_CELLS = 2048  # of a grid of costs
_SMALLEST = 1e-17  # survival probability where the law ends
_TILT = 0.6  # of the exponent at which it does
_LOG_EXPONENTS, _TRIES = (-5.0, 6.0), 12  # where the best one is looked for
_BODIES = (3e-3, 3e-7)  # survival probabilities where finer grids end
_WRAPPED = 1e-12  # what is left of a probability beyond two grids
_UNIT = 2.0**-53  # unit roundoff
_FFT = 64  # units of roundoff of a transform, a product and its inverse, of the largest norm
_ROUNDING = 1e-9  # relative; more than all rounding errors of probabilities together
_LARGEST = 600.0  # logarithm
_MOST_HEADS = 4000.0  # expected participations, beyond which the numbers of heads take seconds


@attrs.frozen(eq=False)
class _Cycles:
    """Costs of cycles, by the group of their length, and where the recursion goes.

    Numbers of steps are rounded up to `numbers`, ascending from 0. A cost, B**2 / L rounded up, has
    a `group` and a mass: the sum of its probabilities over the lengths that the group stands for.
    `rare` is the probability of numbers of heads that are left out, in all cycles together.
    """

    numbers: np.ndarray
    group: np.ndarray
    costs: np.ndarray
    masses: np.ndarray
    rare: float

    @classmethod
    def of(cls, num_steps: int, rate: float) -> _Cycles:
        """All cycles of a permutation of the steps."""
        first = np.arange(min(num_steps, _EXACT))
        others = np.geomspace(len(first), num_steps, _RUNGS).astype(int)
        numbers = np.unique(np.concatenate([first, others, [num_steps]])).tolist()
        found = []
        for group, (before, end) in enumerate(itertools.pairwise(numbers)):
            parts = min(end - before, _PARTS)
            edges = np.unique(np.linspace(before, end, parts + 1).astype(int))
            for low, high in itertools.pairwise(edges.tolist()):
                heads = _heads(high, rate)
                found.append(np.broadcast_arrays(group, low, high, heads))
        group, low, high, heads = np.concatenate(found, axis=1)
        masses = (high - low) * stats.binom.pmf(heads, high, rate)
        kept = masses > 0
        costs = heads**2 / (low + 1)
        rare = _GIVEN_UP * num_steps * len(numbers)
        return cls(np.array(numbers), group[kept], costs[kept], masses[kept], rare)

    def from_which(self, rung: int) -> tuple[np.ndarray, np.ndarray]:
        """Groups at which another number of steps is left, and these numbers' places."""
        first = self.numbers[:rung] + 1  # shortest cycles of the groups
        left = np.minimum(np.searchsorted(self.numbers, self.numbers[rung] - first), rung)
        starts = np.flatnonzero(np.append(True, np.diff(left) != 0))
        return starts, left[starts]

    def moments(self, weights: np.ndarray, sources: np.ndarray) -> np.ndarray:
        """The recursion of the law in numbers, by place; inf if they do not converge.

        `weights` take the place of the laws of the groups; `sources` are added at every place.
        """
        result = sources.copy()
        for rung in range(1, len(self.numbers)):
            starts, left = self.from_which(rung)
            sums = np.add.reduceat(weights[:rung], starts) / self.numbers[rung]
            own = float(sums[left == rung].sum())
            if not own < 1:
                return np.full(len(sources), math.inf)
            others = left < rung
            result[rung] += float(sums[others] @ result[left[others]])
            result[rung] /= 1 - own
        return result

    def log_moment(self, exponent: float, width: float = 0.0) -> float:
        """A bound on log E exp(exponent * cost), every cost rounded up by `width`."""
        largest = exponent * (float(self.costs.max()) + width)
        if largest > _LARGEST:
            return math.inf
        grown = np.exp(exponent * (self.costs + width * (self.costs > 0)))
        weights = np.bincount(self.group, self.masses * grown)
        sources = np.zeros(len(self.numbers))
        sources[0] = 1.0
        found = float(self.moments(weights, sources)[-1])
        return math.log(found) if found < math.inf else math.inf


def tails(num_steps: int, rate: float) -> list[tuple[np.ndarray, np.ndarray]]:
    """Levels of (sigma/s)**2 mu**2, ascending from 0, and bounds on the probability of more.

    One pair is about the whole law of T steps at rate q, one about each part of it that a finer
    grid looks at; there is none if more than 4,000 participations are expected.
    """
    if num_steps * rate > _MOST_HEADS:
        return []
    cycles = _Cycles.of(num_steps, rate)

    def end(log_exponent: float) -> float:
        """A cost that is exceeded with probability `_SMALLEST` at most, by Chernoff's bound."""
        exponent = math.exp(log_exponent)
        log_moment = cycles.log_moment(exponent)
        return min(1e300, (log_moment - math.log(_SMALLEST)) / exponent)

    low, high = _LOG_EXPONENTS
    high = min(high, math.log(_LARGEST / float(cycles.costs.max())))
    found = optimize.minimize_scalar(
        end, bounds=(low, high), method="bounded", options={"maxiter": _TRIES}
    )
    exponent, top = math.exp(found.x), 1.02 * float(found.fun)  # costs are rounded up
    if not top < 1e300:
        return []
    width = top / (_CELLS - 1)
    log_moment = cycles.log_moment(exponent, width)
    beyond = math.exp(min(0.0, log_moment - exponent * top)) + cycles.rare
    law, error = _law(cycles, width, _TILT * exponent)
    above = np.append(np.cumsum((law + error)[:0:-1])[::-1], 0.0) + beyond
    result = [(np.arange(_CELLS) * width, np.minimum(above * (1 + _ROUNDING), 1.0))]
    for level in _BODIES:
        width = float(result[0][0][np.argmax(above <= level)]) / (_CELLS - 1)
        if not width:  # the record is hardly ever in a batch
            break
        # Damped, so that what leaves the grid does not come back.
        law, error = _law(cycles, width, math.log(_WRAPPED) / (2 * _CELLS * width))
        below = np.cumsum(law * (1 - _ROUNDING) - error)
        tail = np.minimum(1.0, 1 - below + cycles.rare)
        result.append((np.arange(_CELLS) * width, np.minimum.accumulate(tail)))
    return result


def _law(cycles: _Cycles, width: float, tilt: float) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities of multiples of `width`, and bounds on their numerical errors.

    Probabilities are multiplied with exp(tilt * cost) while they are transformed. The errors of the
    transforms go through the recursion as probabilities do. What leaves the grid may come back as
    mass of some cell, which is an error where the tilt is negative.
    """
    groups, size = len(cycles.numbers) - 1, 2 * _CELLS
    cells = np.ceil(cycles.costs / width).astype(np.int64)
    inside = cells < _CELLS
    index = cycles.group[inside] * _CELLS + cells[inside]
    tilted = np.exp(tilt * width * np.arange(_CELLS))
    laws = np.bincount(index, cycles.masses[inside], groups * _CELLS).reshape(groups, _CELLS)
    laws = laws * tilted
    transforms = np.fft.rfft(laws, size, axis=1)
    shortest = np.cumsum(transforms, axis=0)
    found = np.zeros((groups + 1, _CELLS + 1), dtype=complex)
    found[0] = 1.0
    errors = np.zeros(groups + 1)
    law = np.zeros(_CELLS)
    law[0] = 1.0
    wrapped = math.exp(tilt * size * width) if tilt < 0 else 0.0
    for rung in range(1, groups + 1):
        starts, left = cycles.from_which(rung)
        own = int(left[0] == rung)
        first = int(starts[own])  # the shorter ones leave as many steps, rounded up
        sums = np.add.reduceat(transforms[first:rung], starts[own:] - first, axis=0)
        total = np.einsum("gk,gk->k", sums, found[left[own:]])
        total /= cycles.numbers[rung] - (shortest[first - 1] if own else 0.0)
        law = np.maximum(np.fft.irfft(total, size)[:_CELLS], 0.0)
        found[rung] = np.fft.rfft(law, size)
        errors[rung] = _UNIT * (_FFT * float(np.linalg.norm(law)) + float(law.sum())) + wrapped
    error = cycles.moments(laws.sum(axis=1), errors)[-1]
    return law / tilted, error / tilted


def _heads(number: int, rate: float) -> np.ndarray:
    """Numbers of heads of so many coins, all but those of probability `_GIVEN_UP`."""
    mean, wide = number * rate, math.sqrt(number * rate)
    first = max(0, math.floor(mean - 12 * wide))
    last = min(number, math.ceil(mean + 12 * wide + 30))
    return np.arange(first, last + 1)
