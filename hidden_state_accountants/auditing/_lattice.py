"""Measures on a lattice, and the two things a noisy step does to them: move and blur."""

from __future__ import annotations

import math

import attrs
import numpy as np
from scipy import special

REACH = 16.0
"""Noise beyond this many standard deviations is cut off, and counted as missing mass."""
NEGLIGIBLE = 1e-60
"""Mass that may be cut off at each end of a measure after each step; counted as well."""

_MOST_NODES = 500_000
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(12)
_NODES, _WEIGHTS = (_NODES + 1) / 2, _WEIGHTS / 2  # on [0, 1]


@attrs.frozen(eq=False)
class Measure:
    """Mass on the lattice points first, first + 1, ..."""

    first: int
    mass: np.ndarray

    @property
    def index(self) -> np.ndarray:
        """The lattice points."""
        return self.first + np.arange(len(self.mass))

    def blurred(self, kernel: Measure) -> Measure:
        """Convolution. Sums of positive terms only: tails keep their relative precision."""
        return Measure(self.first + kernel.first, np.convolve(self.mass, kernel.mass))

    def folded(self, low: float, high: float) -> Measure:
        """Projection on [low, high]: the mass outside goes to the ends."""
        index = np.clip(self.index, low, high).astype(np.int64)
        first = int(index[0])
        return Measure(first, np.bincount(index - first, self.mass))

    def trimmed(
        self, low: float, high: float, negligible: float = NEGLIGIBLE
    ) -> tuple[Measure, float]:
        """Without the ends that hold no mass to speak of, and the mass that may have gone astray.

        That is the mass cut off and, where the measure does not end at `low` or `high`, the mass
        on its last node, which stands for a cell that reaches beyond.
        """
        mass = self.mass
        left = int(np.searchsorted(np.cumsum(mass), negligible))
        right = len(mass) - int(np.searchsorted(np.cumsum(mass[::-1]), negligible))
        if left >= right:
            return Measure(self.first, mass[:1]), float(mass.sum())
        kept = Measure(self.first + left, mass[left:right])
        astray = float(mass[:left].sum() + mass[right:].sum())
        if kept.first > low:
            astray += float(kept.mass[0])
        if kept.index[-1] < high:
            astray += float(kept.mass[-1])
        return kept, astray


def split(position: np.ndarray, mass: np.ndarray) -> Measure:
    """Splits mass at real positions (in lattice units) onto the two nodes next to each.

    The mean is kept exactly: this is a random rounding whose error has mean zero.
    """
    low, high = math.floor(position.min()), math.floor(position.max()) + 1
    if high - low >= _MOST_NODES:
        raise ValueError(
            f"Expected a run that fits on {_MOST_NODES} nodes, got {high - low:g}. Lower "
            "cells_per_std, or bound the domain or the learning rate."
        )
    below = np.floor(position)
    above = position - below
    node = below.astype(np.int64) - low
    left = np.bincount(node, mass * (1 - above), minlength=high - low + 1)
    right = np.bincount(node + 1, mass * above, minlength=high - low + 1)
    return Measure(low, left + right)


def node_kernel(std: float, reach: float = REACH) -> Measure:
    """N(0, std**2), in lattice units, rounded randomly to the nodes without moving the mean."""
    end = math.ceil(reach * std) + 1
    index = np.arange(end + 1)
    mass = np.zeros(end + 1)
    for side in (-1, 1):
        x = index[:, None] + side * _NODES
        mass += np.exp(-0.5 * (x / std) ** 2) @ (_WEIGHTS * (1 - _NODES))
    mass /= std * math.sqrt(2 * math.pi)
    return Measure(-end, np.concatenate([mass[:0:-1], mass]))


def cell_kernel(std: float, reach: float = REACH) -> Measure:
    """N(0, std**2): the exact mass of the cells [k, k + 1]."""
    end = math.ceil(reach * std)
    tails = special.ndtr(-np.arange(end + 1) / std)
    half = tails[:-1] - tails[1:]
    return Measure(-end, np.concatenate([half[::-1], half]))
