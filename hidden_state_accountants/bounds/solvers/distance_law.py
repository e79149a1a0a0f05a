r"""The law of a sum of weights, each of which counts if its coin shows heads, rounded up.

.. math:: S = \sum_j w_j\, b_j, \qquad b_j \sim \mathrm{Bernoulli}(q) \text{ independent}

Theorem C (docs/theory/random_distance.md) may use any law that is stochastically larger. Only
positive numbers are added and multiplied, so that nothing cancels. The largest errors are those of
the logarithms of binomial coefficients, 1e-16 times log n! for n coins: below 1e-7 for n up to 1e7.
"""

from __future__ import annotations

import math

import attrs
import numpy as np
from scipy import special

_ROUNDING = 1e-7  # relative; more than all rounding errors of probabilities and levels together
_NEGLIGIBLE = 1e-19  # probability that is moved to the largest level, per class of weights
_REST = 1e-3  # of the mean or the largest weight: weights that are added as if they all counted
_FINER = 1 / 2  # weights below the largest one by a factor f are rounded f**_FINER times as much
_LEAST = 1e-4  # share of the largest level that smaller ones are rounded up to
_BULK, _TAIL = 1e-6, 1e-16  # survival probabilities where the bulk ends, and where the levels do


@attrs.frozen(eq=False)
class DistanceLaw:
    """A law that is stochastically larger than another one; `rare` is the probability of more."""

    levels: np.ndarray
    probabilities: np.ndarray
    rare: float = 0.0

    @classmethod
    def certain(cls, level: float) -> DistanceLaw:
        """All mass at one level."""
        return cls(np.array([level]), np.ones(1))

    def on_geometric_levels(self, ratio: float) -> DistanceLaw:
        """The same law with positive levels rounded up to powers of a ratio times the largest."""
        top, levels = float(self.levels[-1]), self.levels
        if not top > 0:
            return self
        powers = np.floor(np.log(top / np.maximum(levels, _LEAST * top)) / math.log(ratio))
        used, index = np.unique(np.where(levels > 0, powers, np.inf), return_inverse=True)
        rounded = np.maximum(top * ratio ** -used[::-1], 0.0)
        probabilities = np.bincount(index, self.probabilities)[::-1]
        return DistanceLaw(rounded * (1 + _ROUNDING), probabilities, self.rare)


def law_of_sum(
    weights: np.ndarray, rate: float, largest: float, precision: int, certain: float = 0.0
) -> DistanceLaw:
    """A law that is stochastically larger than that of min(certain + S, largest)."""
    weights = np.minimum(weights[weights > 0], largest)
    total = float(weights.sum())
    if not len(weights) or rate == 1 or certain + total * rate >= largest:
        return DistanceLaw.certain(min(certain + total, largest) * (1 + _ROUNDING))
    sizes, counts, offset = _classes(np.sort(weights), rate, precision)
    offset += certain
    room = (largest - offset) * (1 + _ROUNDING)
    width = sizes[0] / precision
    law, beyond = np.ones(1), 0.0
    for size, count in zip(sizes.tolist(), counts.tolist(), strict=True):
        while width * 2 <= size * max(1.0, rate * count) / precision:
            law, width = _coarser(law), 2 * width
        law, lost = _convolved(law, size / width, count, rate, int(room / width) + 1)
        beyond += lost
    levels = np.minimum(offset + width * np.arange(len(law)), largest)
    levels = np.append(levels, largest) * (1 + _ROUNDING)
    return DistanceLaw(levels, _rounded_up(np.append(law, beyond)))


def fewer_levels(law: DistanceLaw, number: int) -> DistanceLaw:
    """About `number` levels, rounded up: most for the bulk of the law, the others for its tail."""
    above = np.cumsum(law.probabilities[::-1])[::-1] + law.rare
    below = np.cumsum(law.probabilities)
    first = float(law.levels[np.flatnonzero(below > _BULK)[0]])
    end, last = (float(law.levels[np.flatnonzero(above > p)[-1]]) for p in (_BULK, _TAIL))
    bulk = first + (end - first) * np.linspace(0, 1, 3 * number // 4) ** 2
    edges = np.unique(np.concatenate([bulk, np.linspace(end, last, number // 4)]))
    index = np.searchsorted(edges, law.levels)  # the smallest edge that is not below
    probabilities = np.bincount(index, law.probabilities, minlength=len(edges) + 1)
    kept = np.flatnonzero(probabilities[:-1])
    return DistanceLaw(edges[kept], probabilities[kept], law.rare + float(probabilities[-1]))


def rough_levels(law: DistanceLaw, number: int, scale: float) -> DistanceLaw:
    """At most `number` levels, good enough to choose a window: root mean squares of many."""
    above = np.cumsum(law.probabilities[::-1])[::-1]
    if len(law.levels) <= number or not above[0] > _BULK:
        return law
    first, last = float(law.levels[0]), float(law.levels[-1])
    end = float(law.levels[np.flatnonzero(above > _BULK)[-1]])
    bulk = first + (end - first) * np.linspace(0, 1, 3 * number // 4) ** 2
    edges = np.unique(np.concatenate([bulk, np.linspace(end, last, number // 4)]))
    index = np.searchsorted(edges, law.levels)
    masses = np.bincount(index, law.probabilities)
    squares = np.bincount(index, law.probabilities * law.levels**2)
    used = masses > 0
    return DistanceLaw(scale * np.sqrt(squares[used] / masses[used]), masses[used])


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
        step = (top / edges[-1]) ** _FINER / precision
        edges.append(edges[-1] / (1 + step))
    sizes = np.array(edges[::-1])
    index = np.searchsorted(sizes, weights[rest:])
    counts = np.bincount(index, minlength=len(sizes))
    offset = float(sums[rest - 1]) if rest else 0.0
    return sizes[counts > 0], counts[counts > 0], offset


def _coarser(law: np.ndarray) -> np.ndarray:
    """The law on a grid of twice the width: odd cells move up."""
    padded = np.concatenate([[0.0], law, np.zeros(1 - len(law) % 2)])
    return np.asarray(padded.reshape(-1, 2).sum(axis=1))


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
    if kept < len(total):
        lost += float(beyond[kept])
    return total[:kept], lost


def _number_of_heads(count: int, rate: float) -> tuple[np.ndarray, float]:
    """The first binomial probabilities, and a bound on the sum of the others."""
    mean = count * rate
    reach = min(count, math.ceil(mean + 10 * math.sqrt(mean) + 20))
    number = np.arange(reach + 1)
    ways = special.gammaln(count + 1) - special.gammaln(number + 1)
    log_heads = ways - special.gammaln(count - number + 1)
    log_heads += number * math.log(rate) + (count - number) * math.log1p(-rate)
    heads = np.exp(log_heads)
    # Neighbouring probabilities fall by this factor at least from the last one on.
    factor = (count - reach) * rate / ((reach + 1) * (1 - rate))
    rest = heads[-1] * factor / (1 - factor)
    beyond = np.cumsum(heads[::-1])[::-1] + rest
    kept = max(1, int(np.searchsorted(-beyond, -_NEGLIGIBLE)))
    return heads[:kept], float(beyond[kept]) if kept < len(heads) else float(rest)
