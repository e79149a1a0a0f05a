r"""The privacy loss of one mechanism on a grid, rounded so that no divergence gets smaller.

"Connect the dots" (Doroshenko et al. 2022, arXiv 2207.04380 v1, Algorithm 1): the privacy profile
is a convex function of :math:`e^\varepsilon`, so that the polygon through its values on a grid
lies above it. The polygon is the profile of a pair whose privacy loss takes values of the grid.
"""

from __future__ import annotations

import functools
import math

import attrs
import numpy as np
from dp_accounting.pld import privacy_loss_distribution

from hidden_state_accountants.curves.profiles import Deltas, Profile

GRID = 1e-4
"""Spacing of the losses; that of long or small ones is wider or finer, by a power of two."""
STEP = 4
"""Between the grids finer than `GRID`."""
_WIDEST_GRID = 2**18 * GRID  # 26
_MOST_CELLS = 2**21  # arrays of 16 MB
_ENOUGH_CELLS = 2**18  # of a loss that reaches far, on a grid well below half of its mean:
_WIDE = 4  # cells at least in that; a composition with such a loss has a large epsilon
# Cells at most of losses on a finer grid, and in half of their mean: with 64 of those the variance
# of a small loss grows by 1 or 2 %, with 8 by a tenth.
_FINER_GRIDS = ((200_000, 64), (2**19, 8))
_FINEST = 1e-9  # span that has a grid of its own
_TINY = 1e-290  # divergences that are no smaller have all their digits
_WIDEST = 0.02  # between two nodes of a coarse law
_FEWEST = 8  # cells, if these are wider than that
_AT_ONCE = 2**15  # losses: arrays that a cache of the machine holds
UNIT = 2.0**-53
"""The unit roundoff of a double."""


@attrs.frozen(eq=False, slots=False)
class LossMasses:
    """The law of a privacy loss: masses at the losses (lower + i) * grid, and at infinity."""

    lower: int
    masses: np.ndarray
    infinite: float
    grid: float = GRID

    @property
    def highest(self) -> int:
        """The last finite loss, in cells of the grid."""
        return self.lower + len(self.masses) - 1

    @functools.cached_property
    def coarse(self) -> tuple[np.ndarray, np.ndarray]:
        """A law on few losses that is larger in convex order: losses, and finite masses.

        What lies between two neighbouring nodes is moved to both, its mass and its mean kept, so
        that the mean of no convex function of the loss, such as an exponential, gets smaller.
        """
        widest = max(_FEWEST, round(_WIDEST / self.grid))
        nodes = _nodes(self.lower, self.highest, widest)
        widths = np.diff(nodes)
        if not len(widths):
            return nodes * self.grid, self.masses
        starts = nodes[:-1] - self.lower
        inside = self.masses[:-1]
        offsets = np.arange(len(inside)) - np.repeat(starts, widths)
        to_the_right = np.add.reduceat(inside * offsets, starts) / widths
        coarse = np.append(np.add.reduceat(inside, starts) - to_the_right, self.masses[-1])
        coarse[1:] += to_the_right
        return nodes * self.grid, np.maximum(coarse, 0.0)

    def on_grid(self, grid: float) -> LossMasses:
        """A law on a wider grid with a larger profile: every loss connects the dots beside it.

        A mass at x between two losses a < b of the wider grid is moved to both so that its sum and
        its mean of :math:`e^{-x}` stay: a divergence is the mean of a convex function of that.
        """
        factor = round(grid / self.grid)
        if factor == 1:
            return self
        lower, offset = divmod(self.lower, factor)
        rows = -(-(offset + len(self.masses)) // factor)
        inside = np.zeros(rows * factor)
        inside[offset : offset + len(self.masses)] = self.masses
        inside = inside.reshape(rows, factor)
        places = np.arange(factor) * self.grid
        left_over = np.arange(factor, 0, -1) * self.grid  # grid - places would cancel
        to_the_right = np.expm1(-places) / math.expm1(-grid)
        to_the_left = np.exp(-places) * np.expm1(-left_over) / math.expm1(-grid)
        masses = np.append((inside * to_the_left).sum(axis=1), 0.0)
        masses[1:] += (inside * to_the_right).sum(axis=1)
        return LossMasses(lower, masses * (1 + (factor + 64) * UNIT), self.infinite, grid)


def _nodes(lowest: int, highest: int, widest: int) -> np.ndarray:
    """Cells, ends included: all near 0, then 1 % apart, but never more than `widest` cells."""
    above = _nodes_above_zero(max(-lowest, highest, 1), widest)
    cells = np.concatenate([-above[::-1], above, [lowest, highest]])
    return np.unique(cells[(lowest <= cells) & (cells <= highest)])


@functools.lru_cache(maxsize=16)
def _nodes_above_zero(last: int, widest: int) -> np.ndarray:
    number = math.ceil(math.log(widest) / math.log(1.01)) + 1
    growing = np.rint(100 * 1.01 ** np.arange(number)).astype(int)
    wide = np.arange(growing[-1], last + widest, widest)
    return np.concatenate([np.arange(100), growing, wide])


@attrs.frozen(eq=False)
class PrivacyLoss:
    """The privacy losses of a pair that dominates a mechanism; one object if it is symmetric."""

    forward: LossMasses
    backward: LossMasses

    @property
    def is_symmetric(self) -> bool:
        """True if P and Q may be exchanged."""
        return self.forward is self.backward

    @classmethod
    def of(cls, profile: Profile, grid: float | None = None) -> PrivacyLoss | None:
        """A loss whose divergences lie just above those of the profile; None if it is too long."""
        grid = grid or _grid_of(profile)
        if grid is None:
            return None
        cells = math.ceil(profile.largest / grid) + 1
        forward = _falling(profile.forward, cells, grid)
        if profile.is_symmetric:
            masses = _connect_the_dots(forward, forward, grid)
            return cls(masses, masses)
        backward = _falling(profile.backward, cells, grid)
        # Both begin at the total variation: rounding apart, the smaller one would lose mass.
        forward[0] = backward[0] = max(forward[0], backward[0])
        return cls(
            _connect_the_dots(forward, backward, grid), _connect_the_dots(backward, forward, grid)
        )


def _grid_of(profile: Profile) -> float | None:
    """`GRID`, wider for long losses, and finer for small ones: a grid adds to their variance."""
    long = grid_for(profile.largest, _MOST_CELLS)
    enough = grid_for(profile.largest, _ENOUGH_CELLS)
    if long is None or enough is None:
        return None
    half_of_mean = float(profile.forward(np.zeros(1))[0])
    wide = GRID * 2.0 ** math.floor(math.log2(max(half_of_mean, _FINEST) / (_WIDE * GRID)))
    if min(enough, wide) > GRID:
        return max(long, min(enough, wide))
    small = min(
        max(grid_for(profile.largest, cells) or GRID, grid_for(half_of_mean, in_mean) or GRID)
        for cells, in_mean in _FINER_GRIDS
    )
    grid = GRID
    while grid / STEP >= small:
        grid /= STEP
    return max(long, grid)


def grid_for(span: float, cells: int) -> float | None:
    """The finest grid on which so many cells reach from 0 to a loss; None if there is none."""
    if not span <= _WIDEST_GRID * cells:
        return None
    return float(GRID * 2.0 ** math.ceil(math.log2(max(span, _FINEST) / (GRID * cells))))


Losses = tuple[tuple[PrivacyLoss, int], ...]
"""Privacy losses of independent mechanisms, and how often each runs."""


def losses_of(profile: Profile, count: int = 1) -> Losses | None:
    """The loss of one mechanism that runs `count` times; None if it would take gigabytes."""
    loss = PrivacyLoss.of(profile)
    return None if loss is None else ((loss, count),)


def stock_loss(
    stock: privacy_loss_distribution.PrivacyLossDistribution, error: float
) -> PrivacyLoss:
    """A loss of dp-accounting on `GRID`; the error of its divergences becomes mass at infinity."""

    def masses(pmf: privacy_loss_distribution.pld_pmf.PLDPmf) -> LossMasses:
        dense = pmf.to_dense_pmf()
        infinite = min(1.0, max(dense._infinity_mass, 0.0) + error)
        return LossMasses(dense._lower_loss, np.maximum(dense._probs, 0.0), infinite)

    forward = masses(stock._pmf_remove)
    return PrivacyLoss(forward, forward if stock._symmetric else masses(stock._pmf_add))


def _falling(profile: Deltas, cells: int, grid: float) -> np.ndarray:
    """Divergences at 0, grid, 2 grid, ...: what rises by rounding is cut to the value before.

    Where they underflow they end at `_TINY`, which becomes mass at infinity: only a divergence
    that jumps to 0 is 0.
    """
    starts = range(0, cells + 1, _AT_ONCE)
    parts = [profile(np.arange(i, min(i + _AT_ONCE, cells + 1)) * grid) for i in starts]
    deltas = np.minimum.accumulate(np.clip(np.concatenate(parts), 0.0, 1.0))
    underflow = ((deltas > 0) & (deltas < _TINY)).any()
    return np.maximum(deltas, _TINY) if underflow else deltas


def _connect_the_dots(deltas: np.ndarray, opposite: np.ndarray, grid: float) -> LossMasses:
    """The masses of the polygon through the divergences at epsilon = 0, grid, 2 grid, ...

    Those at losses -x < 0 are :math:`e^{-x}` times the opposite direction's at x: no divergence at
    a negative epsilon is needed, where 1 - delta would have no digits left.
    """
    above = _masses_above_zero(deltas, grid)
    below = _masses_above_zero(opposite, grid)
    below = below * np.exp(-np.arange(1, len(below) + 1) * grid)
    slopes = ((deltas[0] - deltas[1]) + (deltas[0] - opposite[1])) / math.expm1(grid)
    at_zero = max(0.0, 1 - deltas[0] - slopes) + 16 * UNIT
    masses = np.concatenate([below[::-1], [at_zero], above])
    return LossMasses(-len(below), masses, float(deltas[-1]), grid)


def _masses_above_zero(deltas: np.ndarray, grid: float) -> np.ndarray:
    """The masses at grid, 2 grid, ...; each is rounded up."""
    falls = deltas[:-1] - deltas[1:]
    rises = falls / -math.expm1(-grid)
    left = np.append(falls[1:], 0.0) / math.expm1(grid)
    masses = np.maximum(rises - left, 0.0) + 4 * UNIT * (rises + left)
    return masses[: 1 + int(np.max(np.flatnonzero(masses), initial=-1))]
