r"""Exponentially tilted privacy losses: the law of a total loss, seen where it is rare.

Under a tilt :math:`\theta \ge 0` the masses p(x) become :math:`p(x) e^{\theta x} / M` with
:math:`M = \sum_x p(x) e^{\theta x}`. Independent losses stay independent, their log M add up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import numpy as np

from hidden_state_accountants.curves.losses import GRID, UNIT, LossMasses
from hidden_state_accountants.curves.profiles import RELATIVE_ERROR

_TAIL = 60.0  # the logarithm of the tilted probability of what a window leaves out, without sign
_STEP = 6.0  # relative entropy between a tilt and the next, in nats
_SUMS = 256 * UNIT  # more than the relative error of the sum of all masses, wrapped to a window


@attrs.frozen
class Tilt:
    """A total loss under a tilt.

    Attributes:
        theta: The tilt.
        log_mass: log M.
        rounding: A bound on the error of the logarithms of the masses times M.
        mean: Of the tilted law.
        variance: Of the tilted law.
    """

    theta: float
    log_mass: float
    rounding: float
    mean: float
    variance: float


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
        self.highest = masses.lower + len(masses.masses) - 1
        self.infinite = masses.infinite
        self.log_total = math.log(max(1.0, float(masses.masses.sum()) + masses.infinite))
        self._losses = np.arange(self.lowest, self.highest + 1) * GRID
        with np.errstate(divide="ignore"):
            self._log_masses = np.log(masses.masses)
        self._largest_log = float(np.abs(self._log_masses[masses.masses > 0]).max())

    def tilted(self, theta: float) -> tuple[np.ndarray, Tilt]:
        """The masses of the tilted law, whose sum is at most 1, and its moments."""
        exponents = self._log_masses + theta * self._losses
        top = float(exponents.max())
        masses = np.exp(exponents - top)
        total = float(masses.sum())
        masses /= total * (1 + _SUMS)
        log_mass = top + math.log(total) + _SUMS
        largest = self._largest_log + theta * max(-self.lowest, self.highest) * GRID
        rounding = (8 * (largest + abs(top) + abs(log_mass)) + 1000) * UNIT + RELATIVE_ERROR
        mean = float(masses @ self._losses)
        variance = float(masses @ (self._losses - mean) ** 2)
        return masses, Tilt(theta, log_mass, rounding, mean, variance)


class Parts:
    """Independent losses.

    Attributes:
        all: The parts.
        count: How many losses there are.
        lowest: The smallest total loss, in cells of the grid.
        highest: The largest finite total loss, in cells of the grid.
        infinite: The mass of the total loss at infinity, at most.
    """

    def __init__(self, parts: Sequence[tuple[LossMasses, int]]):
        self.all = [Part(masses, count) for masses, count in parts]
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
        tilts = [(part.count, part.tilted(theta)[1]) for part in self.all]
        return Tilt(
            theta,
            math.fsum(count * tilt.log_mass for count, tilt in tilts),
            math.fsum(count * tilt.rounding for count, tilt in tilts),
            math.fsum(count * tilt.mean for count, tilt in tilts),
            math.fsum(count * tilt.variance for count, tilt in tilts),
        )

    def next_tilt(self, tilt: Tilt) -> Tilt:
        """A larger tilt whose law is about 6 nats away; the same if nothing is left to tilt."""
        if tilt.variance <= 0:
            return tilt
        found = self.tilt(tilt.theta + math.sqrt(2 * _STEP / tilt.variance))
        for _ in range(20):
            away = found.log_mass - tilt.log_mass - (found.theta - tilt.theta) * tilt.mean
            if _STEP / 2 <= away <= 2 * _STEP or found.mean <= tilt.mean:
                break
            theta = found.theta + (_STEP - away) / (found.mean - tilt.mean)  # Newton's
            found = self.tilt(max(theta, (found.theta + tilt.theta) / 2))
        return found

    def window(self, tilt: Tilt, first: int, last: int) -> tuple[int, int]:
        """Cells between which a loss lies with a tilted probability of 1 - 2 exp(-60).

        Args:
            tilt: The tilt.
            first: A cell that the window has to hold.
            last: Another, at least as large.
        """
        low = high = tilt.mean
        if tilt.variance > 0:
            move = math.sqrt(2 * _TAIL / tilt.variance)  # the best one of a Gaussian
            high = self._smallest_chernoff(tilt, move)
            low = -self._smallest_chernoff(tilt, -move)
        return (
            max(self.lowest, min(first, math.floor(low / GRID) - 1)),
            min(self.highest, max(last, math.ceil(high / GRID) + 1)),
        )

    def _smallest_chernoff(self, tilt: Tilt, move: float) -> float:
        """The best bound of 7 moves towards none, of a loss in the direction of the move.

        The logarithm of M is convex in the tilt, so that the bound falls with the size of the move
        and then rises: what is worse than the one before ends the search.
        """
        sign = math.copysign(1.0, move)
        best = math.inf
        for k in range(7):
            bound = sign * self._chernoff(tilt, move / 2**k)
            if bound >= best:
                break
            best = bound
        return best

    def _chernoff(self, tilt: Tilt, move: float) -> float:
        """What the tilted law exceeds (undercuts, if the move is negative) with exp(-60) only."""
        moved = self.tilt(tilt.theta + move)
        return (moved.log_mass - tilt.log_mass + _TAIL) / move
