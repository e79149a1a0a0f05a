r"""Exponentially tilted privacy losses: the law of a total loss, seen where it is rare.

Under a tilt :math:`\theta \ge 0` the masses p(x) become :math:`p(x) e^{\theta x} / M` with
:math:`M = \sum_x p(x) e^{\theta x}`. Independent losses stay independent, their log M add up.

A tilt is chosen, and tails are bounded, by the coarse laws of the parts (`LossMasses.coarse`),
whose M is no smaller; the masses of the one tilt that is used are exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import numpy as np

from hidden_state_accountants.curves.losses import UNIT, LossMasses
from hidden_state_accountants.curves.profiles import RELATIVE_ERROR

_TAIL = 45.0  # the logarithm of the tilted probability of what a window leaves out, without sign
_FIRST, _STEP = 15.0, 5.0  # relative entropy between no tilt and the first, and so on, in nats
_DROPPED = 1e-22  # tilted probability of the losses that are left out of a composition
_UNDERFLOW = 1e-200  # of a sum whose largest term may have underflowed
_LARGEST_EXPONENT = 700.0
_MOST_MOVES = 40  # each half of the one before
_SUMS = 256 * UNIT  # more than the relative error of the sum of all masses, wrapped to a window


@attrs.frozen
class RoughTilt:
    """A total loss under a tilt, by the coarse laws of its parts.

    Attributes:
        theta: The tilt.
        log_mass: log M, at least.
        mean: About that of the tilted law.
        variance: About that of the tilted law.
    """

    theta: float
    log_mass: float
    mean: float
    variance: float


@attrs.frozen(eq=False)
class TiltedPart:
    """One loss under a tilt.

    Attributes:
        lowest: The first cell.
        masses: Of the tilted law, from the first cell on; their sum is at most 1.
        log_mass: log M.
        rounding: A bound on the error of the logarithms of the masses times M.
    """

    lowest: int
    masses: np.ndarray
    log_mass: float
    rounding: float


@attrs.frozen(eq=False)
class Tilt:
    """A total loss under a tilt.

    Attributes:
        theta: The tilt.
        log_mass: log M.
        rounding: A bound on the error of the logarithms of the masses times M.
        parts: The losses, and how often each runs.
    """

    theta: float
    log_mass: float
    rounding: float
    parts: tuple[tuple[TiltedPart, int], ...]


class Part:
    """The loss of one mechanism, and how often it runs.

    Attributes:
        count: How often.
        lowest: The smallest loss, in cells of the grid.
        highest: The largest finite loss, in cells of the grid.
        infinite: The mass at infinity.
        log_total: The logarithm of all mass, which is rounded up to more than 1.
    """

    def __init__(self, masses: LossMasses, count: int):
        self.count = count
        self.lowest = masses.lower
        self.highest = masses.highest
        self.infinite = masses.infinite
        self.log_total = math.log(max(1.0, float(masses.masses.sum()) + masses.infinite))
        self._masses = masses

    def rough(self, theta: float) -> tuple[float, float, float]:
        """log M, mean and variance of the coarse law under a tilt."""
        tilted, log_mass = self._coarse(theta)
        losses = self._masses.coarse[0]
        mean = float(tilted @ losses)
        return log_mass, mean, float(tilted @ (losses - mean) ** 2)

    def _coarse(self, theta: float) -> tuple[np.ndarray, float]:
        """The tilted coarse law, and its log M."""
        losses, masses = self._masses.coarse
        exponents = theta * losses
        top = max(float(exponents[0]), float(exponents[-1]))
        tilted = masses * np.exp(exponents - top)
        total = float(tilted.sum())
        if total < _UNDERFLOW:
            with np.errstate(divide="ignore"):
                exponents += np.log(masses)
            top = float(exponents.max())
            tilted = np.exp(exponents - top)
            total = float(tilted.sum())
        return tilted / total, top + math.log(total)

    def tilted(self, theta: float, negligible: float) -> TiltedPart:
        """The tilted law without the cells at either end that have a negligible probability."""
        rough, log_mass = self._coarse(theta)
        # What lies beyond a node has a coarse law on that node and those beyond it.
        nodes = np.rint(self._masses.coarse[0] / self._masses.grid).astype(int)
        first = max(0, int(np.searchsorted(np.cumsum(rough), negligible)) - 1)
        last = len(nodes) - int(np.searchsorted(np.cumsum(rough[::-1]), negligible))
        cells = np.arange(nodes[first], nodes[min(last, len(nodes) - 1)] + 1)
        start = int(cells[0])
        law = self._masses.masses[start - self.lowest : start - self.lowest + len(cells)]
        # A tilted mass is at most 1: what is cut had one that underflowed (_SMALLEST covers it).
        exponents = np.minimum((theta * self._masses.grid) * cells - log_mass, _LARGEST_EXPONENT)
        masses = law * np.exp(exponents)
        total = float(masses.sum())
        masses /= total * (1 + _SUMS)
        found = log_mass + math.log(total) + _SUMS
        largest = abs(math.log(float(law[law > 0].min())))
        largest += theta * max(-self.lowest, self.highest) * self._masses.grid
        rounding = (8 * (largest + abs(log_mass) + abs(found)) + 1000) * UNIT + RELATIVE_ERROR
        return TiltedPart(start, masses, found, rounding)


class Parts:
    """Independent losses.

    Args:
        parts: Their laws, and how often each runs.
        grid: That of all of them in here, no finer than any of theirs.

    Attributes:
        grid: The spacing of the losses.
        all: The parts.
        count: How many losses there are.
        lowest: The smallest total loss, in cells of the grid.
        highest: The largest finite total loss, in cells of the grid.
        infinite: The mass of the total loss at infinity, at most.
    """

    def __init__(self, parts: Sequence[tuple[LossMasses, int]], grid: float):
        self.grid = grid
        self.all = [Part(masses.on_grid(grid), count) for masses, count in parts]
        self.count = sum(part.count for part in self.all)
        self.lowest = sum(part.count * part.lowest for part in self.all)
        self.highest = sum(part.count * part.highest for part in self.all)
        log_finite = math.fsum(
            part.count * math.log1p(-part.infinite) if part.infinite < 1 else -math.inf
            for part in self.all
        )
        log_total = math.fsum(part.count * part.log_total for part in self.all)
        self.infinite = min(1.0, abs(math.expm1(log_finite)) * math.exp(log_total + 64 * UNIT))

    def tilt(self, theta: float) -> Tilt:
        """The total loss under a tilt."""
        parts = tuple((part.tilted(theta, _DROPPED / self.count), part.count) for part in self.all)
        return Tilt(
            theta,
            math.fsum(count * part.log_mass for part, count in parts),
            math.fsum(count * part.rounding for part, count in parts),
            parts,
        )

    def rough_tilt(self, theta: float) -> RoughTilt:
        """The total loss under a tilt, by the coarse laws of the parts."""
        found = np.array([part.rough(theta) for part in self.all])
        log_mass, mean, variance = (np.array([part.count for part in self.all]) @ found).tolist()
        return RoughTilt(theta, log_mass, mean, variance)

    def moments(self, tilt: Tilt) -> tuple[float, float]:
        """Mean and variance of the total loss under a tilt."""
        means, variances = [], []
        for part, count in tilt.parts:
            losses = (part.lowest + np.arange(len(part.masses))) * self.grid
            mean = float(part.masses @ losses)
            means.append(count * mean)
            variances.append(count * float(part.masses @ (losses - mean) ** 2))
        return math.fsum(means), math.fsum(variances)

    def next_tilt(self, tilt: RoughTilt) -> RoughTilt:
        """A larger tilt whose law is a few nats away; the same if nothing is left to tilt.

        That is, by both relative entropies: where a law has a far second peak, the tilt that moves
        to it is near in one direction only, and a bad one for the losses between the peaks.
        """
        if tilt.variance <= 0:
            return tilt
        near, far = tilt.theta, math.inf
        step = _STEP if tilt.theta else _FIRST
        theta = tilt.theta + math.sqrt(2 * step / tilt.variance)
        for _ in range(60):
            found = self.rough_tilt(theta)
            gap = found.log_mass - tilt.log_mass
            moved = theta - tilt.theta
            away = max(gap - moved * tilt.mean, moved * found.mean - gap)
            if away > 1.3 * step:
                far = theta
            elif away < 0.7 * step and found.mean > tilt.mean:
                near = theta
            else:
                break
            theta = (near + far) / 2 if far < math.inf else 2 * theta - tilt.theta
        return found

    def window(self, tilt: Tilt, first: int, last: int) -> tuple[int, int]:
        """Cells between which a loss lies with a tilted probability of 1 - 2 exp(-45).

        Args:
            tilt: The tilt.
            first: A cell that the window has to hold.
            last: Another, at least as large.
        """
        rough = self.rough_tilt(tilt.theta)
        low = high = rough.mean
        if rough.variance > 0:
            move = math.sqrt(2 * _TAIL / rough.variance)  # the best one of a Gaussian
            high = self._smallest_chernoff(tilt, move)
            low = -self._smallest_chernoff(tilt, -move)
        return (
            max(self.lowest, min(first, math.floor(low / self.grid) - 1)),
            min(self.highest, max(last, math.ceil(high / self.grid) + 1)),
        )

    def _smallest_chernoff(self, tilt: Tilt, move: float) -> float:
        """The best bound of moves towards none, of a loss in the direction of the move.

        The logarithm of M is convex in the tilt, so that the bound falls with the size of the move
        and then rises: what is worse than the one before ends the search.
        """
        sign = math.copysign(1.0, move)
        best = math.inf
        for k in range(_MOST_MOVES):
            bound = sign * self._chernoff(tilt, move / 2**k)
            if bound >= best:
                break
            best = bound
        return best

    def _chernoff(self, tilt: Tilt, move: float) -> float:
        """What the tilted law exceeds (undercuts, if the move is negative) with exp(-45) only."""
        moved = self.rough_tilt(tilt.theta + move)
        return (moved.log_mass - tilt.log_mass + _TAIL) / move
