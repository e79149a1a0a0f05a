r"""Laws of Theorem A's distance where the steps that hold the record are drawn by coins.

Seen from the end, step i = 0, 1, ... moves the record by a mass m_i if its coin says so, and has a
weight w_i (the variance of its noise), both in units of the last iterate. The distance mu of a
pattern is the least cost of shifts that are spent where or after they arise. So the cost of any
shifts serves, and where several are tried, the smallest tail at every point
(docs/theory/hidden_coins.md).

The shifts tried here spread the mass of step i over the steps j <= i in proportion to
:math:`w_j h_j`. With :math:`H_i = \sum_{j \le i} w_j h_j` and
:math:`Q_i = \sum_{j \le i} w_j h_j^2`

.. math:: \mu^2 \le \sum_i x_i^2 Q_i/H_i^2 + 2 x_i V_i/H_i, \qquad V_i = \sum_{j < i} x_j Q_j/H_j,

x_i the mass at i: a walk in two numbers, V and the cost, whose moves grow with V, so that both may
be rounded up. What is only known with a small probability is charged to every tail.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import attrs
import numpy as np

from hidden_state_accountants.bounds.solvers.windows import (
    DistanceLaw,
    fewer_levels,
    law_of_sum,
)

_POWER = 0.6  # of W_i / W_T that h is for each root of the participations, up to 1, that are
# expected in the time that the last iterate remembers
_FLATTEST = 1e-60  # h where it underflows
_EXACT, _GROWTH = 15, 0.06  # first steps one by one, then in chunks of a share of what is later,
_CHUNKS = 80  # or of a larger one, so that there are about as many
_NEAR = 0.97  # of all weight: the steps before it arise together
_FAR_PRECISION, _FAR_LEVELS = 64, 40
_CELLS, _ROWS = 1000, 100  # of the cost and of V
_ROUGH = 8  # times fewer cells, to find where the law ends
_FINER = 5.0  # ratio of the grids of the cost
_MOST_GRIDS = 6  # each finer than the one before
_MOST_TRIES = 8  # to find the cost where the law ends
_SMALLEST = 1e-17  # survival probability where the law ends
_BULK = 0.99  # survival probability at which no finer grid is asked
_GIVEN_UP = 1e-22  # probability of an outcome
_ROUNDING = 1e-9  # relative; more than all rounding errors of probabilities and costs together
_TINY = 1e-9  # share of the mass, or of the weight, before which steps are put together


@attrs.frozen(eq=False)
class CoinSteps:
    """The steps of a segment seen from the end, whose coins show heads with probability `rate`.

    Masses m_i >= 0 and weights w_i > 0, up to a common factor with m_i**2, have shape (steps,).
    `certain` is the mass of the steps before them, which counts whatever their coins say.
    """

    masses: np.ndarray
    weights: np.ndarray
    certain: float
    rate: float

    @classmethod
    def of(
        cls,
        contraction: np.ndarray,
        sensitivity: np.ndarray,
        noise_std: np.ndarray,
        rate: float,
        initial: float = 0.0,
    ) -> CoinSteps | None:
        """The steps of arrays in the order of time, c_t, s_t and sigma_t; None if out of range.

        `initial` is a distance before the first step, whatever the coins were.
        """
        unit = float(noise_std[-1])
        with np.errstate(divide="ignore"):
            logs = np.log(contraction[:0:-1])
        later = np.append(0.0, np.cumsum(logs))
        if not unit > 0 or float(later.max()) > 300:
            return None
        product = np.exp(later)
        masses = product * sensitivity[::-1] / unit
        weights = (product * noise_std[::-1] / unit) ** 2
        mass_before = np.append(np.cumsum(masses[:0:-1])[::-1], 0.0)
        # What is left of the oldest steps is less than what rounding adds.
        used = 1 + int(np.argmax(mass_before <= _TINY * float(masses.max())))
        certain = float(mass_before[used - 1] + product[-1] * contraction[0] * initial / unit)
        certain *= 1 + _ROUNDING
        return cls(masses[:used], weights[:used], certain, rate)


def tails(steps: CoinSteps) -> list[tuple[np.ndarray, np.ndarray]]:
    """Levels of mu**2, ascending from 0, and bounds on the probability of more, on some grids."""
    if not steps.masses.any():
        return [(np.zeros(1), np.zeros(1))]
    dense = steps.rate * float(steps.weights.sum() / steps.weights.max())
    return list(_on_grids(_Walk.of(steps, min(1.0, _POWER * math.sqrt(dense)))))


def law_of_tails(tails: Sequence[tuple[np.ndarray, np.ndarray]]) -> DistanceLaw:
    """The law of the root of what exceeds every level with the smallest of some probabilities."""
    levels = np.unique(np.concatenate([levels for levels, _ in tails]))
    above = np.ones(len(levels))
    for own, tail in tails:
        index = np.searchsorted(own, levels, side="right") - 1
        above = np.minimum(above, tail[index])
    above = np.minimum.accumulate(above)
    probabilities = -np.diff(above, prepend=1.0)
    kept = probabilities > 0
    mus = np.sqrt(levels[kept]) * (1 + _ROUNDING)
    return DistanceLaw(mus, probabilities[kept], float(above[-1]))


@attrs.frozen(eq=False)
class _Stage:
    """Masses that arise at one step, all of them independent of those of other stages.

    An outcome costs `cost` if V = 0, and `cost_of_v` more for each unit of V, which grows by
    `added`. V**2 is at most Q_i, `q`, times the cost after it.
    """

    probabilities: np.ndarray
    cost: np.ndarray
    cost_of_v: np.ndarray
    added: np.ndarray
    q: float


@attrs.frozen(eq=False)
class _Walk:
    """The stages in the order in which V grows, and the probability of outcomes that none has."""

    stages: list[_Stage]
    rare: float

    @classmethod
    def of(cls, steps: CoinSteps, power: float) -> _Walk:
        """Chunks that arise at their last step with their largest mass, and all far steps."""
        weights = np.cumsum(steps.weights)
        profile = np.maximum((weights / weights[-1]) ** power, _FLATTEST)
        h, q = np.cumsum(steps.weights * profile), np.cumsum(steps.weights * profile**2)
        near = min(len(weights), 1 + int(np.searchsorted(weights, _NEAR * weights[-1])))
        last = min(near, len(weights) - 1)  # where the far steps arise
        stages, rare = [], 0.0
        for start, stop in _chunks(steps.masses[:near]):
            each = np.full(stop - start, steps.masses[start:stop].max())
            law = law_of_sum(each, steps.rate, float(each.sum()), 1)
            stages.append(_stage(law, float(h[start]), float(q[start])))
            rare += law.rare
        if near < len(weights) or steps.certain:
            far = steps.masses[near:]
            largest = float(far.sum()) + steps.certain
            law = law_of_sum(far, steps.rate, largest, _FAR_PRECISION, steps.certain)
            law = fewer_levels(law, _FAR_LEVELS)
            stages.append(_stage(law, float(h[last]), float(q[last])))
            rare += law.rare
        return cls(stages, rare)

    @property
    def cost_of_one(self) -> float:
        """The largest cost of one outcome alone that is the smallest of its stage."""
        return max(
            float(stage.cost[stage.cost > 0].min()) for stage in self.stages if stage.cost.any()
        )


def _stage(law: DistanceLaw, h: float, q: float) -> _Stage:
    x = law.levels
    return _Stage(law.probabilities, x**2 * (q / h**2), x * (2 / h), x * (q / h), q)


def _chunks(masses: np.ndarray) -> Iterator[tuple[int, int]]:
    """Steps one by one, then chunks in which neither the time nor the mass grows by much."""
    start, number = 0, len(masses)
    growth = max(_GROWTH, math.log(max(1.0, number / _EXACT)) / _CHUNKS)
    while start < number:
        length = 1 + (int(start * growth) if start >= _EXACT else 0)
        while length > 1 and np.ptp(masses[start : start + length]) > growth * masses[start]:
            length = 1 + (length - 1) // 2
        yield start, min(start + length, number)
        start += length


def _on_grids(walk: _Walk) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Levels of the cost, and bounds on the probability of more, on finer and finer grids."""
    top, is_above = 1e3 * walk.cost_of_one, False
    for _ in range(_MOST_TRIES):  # where the law ends
        levels, tail = _survival(walk, top, _CELLS // _ROUGH, _ROWS // 2)
        if tail[-1] > walk.rare + _SMALLEST:
            if is_above:
                break
            top *= 8
            continue
        tried, is_above = top, True
        top = float(levels[np.argmax(tail <= walk.rare + _SMALLEST)])
        if top > tried / 2:
            break
    if not is_above:
        return
    top *= 1 + 2 / _CELLS  # costs are rounded up
    for _ in range(_MOST_GRIDS):
        levels, tail = _survival(walk, top, _CELLS, _ROWS)
        yield levels, tail
        top /= _FINER
        if tail[np.searchsorted(levels, top)] > _BULK:
            break


def _survival(walk: _Walk, top: float, cells: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Levels up to `top`, and bounds on the probability that the cost is larger."""
    width, largest_q = top / cells, walk.stages[-1].q
    law, beyond, used, height = np.zeros((rows, cells)), walk.rare, 1, 0.0
    law[0, 0] = 1.0
    for stage in walk.stages:
        # Rows twice as high when V may be twice as large.
        wanted = math.sqrt(top * largest_q) / (rows - 2)
        wanted /= 2 ** math.floor(math.log2(largest_q / stage.q) / 2)
        if height and wanted > height:
            starts = np.append(0, np.arange(1, used, round(wanted / height)))
            law[: len(starts)] = np.add.reduceat(law[:used], starts, axis=0)
            used = len(starts)
        height = wanted
        v = np.arange(rows) * height
        moved, reached = np.zeros((rows, cells)), 1
        # The mass in as many of the last cells of each row.
        last_cells = np.cumsum(law[:used, ::-1], axis=1)
        up = np.minimum(np.ceil(stage.added / height), rows).astype(int).tolist()
        for k, p in enumerate(stage.probabilities.tolist()):
            if p < _GIVEN_UP:
                beyond += p
                continue
            kept = min(used, rows - up[k])
            beyond += p * float(last_cells[kept:, -1].sum())
            if not kept:
                continue
            costs = stage.cost[k] + stage.cost_of_v[k] * v[:kept]
            right = np.minimum(np.ceil(costs / width), cells).astype(int)
            leaves = right > 0
            beyond += p * float(last_cells[:kept][leaves, right[leaves] - 1].sum())
            # Neighbouring rows that move by as many cells are moved together.
            edges = [0, *(np.flatnonzero(np.diff(right)) + 1).tolist(), kept]
            for first, last in itertools.pairwise(edges):
                cut = int(right[first])
                if cut == cells:
                    break
                moved[first + up[k] : last + up[k], cut:] += p * law[first:last, : cells - cut]
                reached = max(reached, last + up[k])
        law, used = moved, reached
    above = np.append(np.cumsum(law.sum(axis=0)[:0:-1])[::-1], 0.0) + beyond
    return np.arange(cells) * width, np.minimum(above * (1 + _ROUNDING), 1.0)
