r"""Theorem D: how a window of steps changes the privacy profile of the state before it.

Two runs enter a window with laws P and Q of the state. Where the laws overlap, both start from the
SAME state and differ by what the record does inside of the window; the rest starts anywhere in the
domain. For a measure :math:`M \le P` that is matched with a part of Q at the ratio
:math:`e^{\ell(x)}`, and what is left over, of masses u and v,

.. math:: H_\varepsilon \le \int A(\varepsilon - \ell)\, dM + u\, B(\varepsilon + \log(v / u))

A the profile of the window from one state, B that from any two (docs/theory/bounded_domains.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import attrs
import numpy as np

from hidden_state_accountants.curves.by_profile import ProfileCurve, polygon_curve
from hidden_state_accountants.curves.losses import UNIT
from hidden_state_accountants.curves.profiles import Deltas, polygon

_NODES = 128
_CANDIDATES = 16  # levels at which the matching may be cut, on either side of a loss of 0
_ENOUGH = 0.995  # of epsilon: nothing more is gained
_SHORTEST = 1e-6  # of the epsilons of the last node, unless it was less
_SMALLEST = 1e-20  # deltas that need no further epsilon
_ROUNDED_UP = 1 + 1e-9  # more than what sums of a few hundred positive terms lose


@attrs.frozen(eq=False)
class StateProfile:
    """Upper bounds on the divergences of two laws, in both directions; a convex polygon.

    Attributes:
        epsilons: The nodes, ascending from 0.
        deltas: sup_S P(S) - e^epsilon Q(S) there, falling.
    """

    epsilons: np.ndarray
    deltas: np.ndarray

    @classmethod
    def of(cls, deltas: Deltas, largest: float) -> StateProfile:
        """The polygon through a profile up to `largest`, shortened to what matters."""
        epsilons = np.linspace(0.0, largest, _NODES)
        return _shortened(epsilons, _convex(epsilons, deltas(epsilons)))

    @property
    def curve(self) -> ProfileCurve:
        """What it says of the two laws."""
        return polygon_curve(self.epsilons, self.deltas)

    def after(self, same: Deltas, apart: Deltas, reach: float = 0.0) -> StateProfile:
        """The profile after a window.

        Args:
            same: The profile of the window from one state, at any real epsilon.
            apart: The profile from any two states of the domain; nowhere below `same`.
            reach: Where `same` is negligible.
        """
        at = np.linspace(0.0, self.epsilons[-1] + reach, _NODES)
        losses, first, second = self._masses()
        zero = len(losses) // 2
        below = np.cumsum(first)
        after_all = np.append(np.cumsum(second[::-1])[::-1], 0.0)
        # own: those that are matched at their own ratio, summed over losses up to a level
        own = np.cumsum(same(at[:, None] - losses) * first, axis=1)
        offsets = np.unique(np.round(np.linspace(0, zero, _CANDIDATES)).astype(int))
        lows = np.unique(np.concatenate([zero - offsets, zero + offsets]))
        # Losses below a level r are matched at r, which leaves Q-mass over: H_{-r}(Q|P).
        levels = losses[lows]
        left_over = self.deltas[np.abs(lows - zero)]
        positive = np.maximum(levels, 0.0)
        left_over = np.where(
            levels > 0, -np.expm1(-positive) + np.exp(-positive) * left_over, left_over
        )
        raised = below[lows] * same(at[:, None] - levels) - own[:, lows]
        best = np.minimum(apart(at), 1.0)
        for offset in offsets:  # losses above this level are matched at it: mass u is left over
            level, unmatched = float(self.epsilons[offset]), float(self.deltas[offset])
            cut = after_all[zero + offset + 1] * math.exp(min(level, 700.0)) * same(at - level)
            allowed = lows <= zero + offset
            rest = np.zeros((len(at), int(allowed.sum())))
            if unmatched > 0:
                with np.errstate(divide="ignore"):
                    more = np.log(left_over[allowed]) - math.log(unmatched)
                rest = unmatched * _extended(apart, at[:, None] + more)
            total = own[:, zero + offset] + cut + (raised[:, allowed] + rest).min(axis=1)
            best = np.minimum(best, total)
        return _shortened(at, _convex(at, best * _ROUNDED_UP))

    def _masses(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Losses, and their masses under both laws of the symmetric pair with this profile.

        The mass of the first law at infinity is the last delta; masses are rounded up.
        """
        corners = np.expm1(self.epsilons)
        slopes = np.append(-np.diff(self.deltas) / np.diff(corners), 0.0)
        rounding = 4 * UNIT * (slopes[:-1] + slopes[1:])
        lighter = np.maximum(slopes[:-1] - slopes[1:], 0.0) + rounding
        heavier = lighter * np.exp(self.epsilons[1:])
        at_zero = max(0.0, 1.0 - lighter.sum() - heavier.sum() - self.deltas[-1])
        middle = [at_zero + 16 * UNIT]
        losses = self.epsilons[1:]
        return (
            np.concatenate([-losses[::-1], [0.0], losses]),
            np.concatenate([lighter[::-1], middle, heavier]),
            np.concatenate([heavier[::-1], middle, lighter]),
        )


def _extended(profile: Deltas, epsilon: np.ndarray) -> np.ndarray:
    """A profile at any epsilon, also where that is -inf: nothing of the other law is left."""
    return np.where(epsilon == -math.inf, 1.0, profile(np.maximum(epsilon, -700.0)))


def _convex(epsilons: np.ndarray, deltas: np.ndarray) -> np.ndarray:
    """The convex hull, in e^epsilon, of bounds that hold in both directions, at the same nodes.

    H at e^-epsilon is 1 - e^-epsilon + e^-epsilon H at e^epsilon: the chord between the two bounds
    the divergence at 0.
    """
    x = np.expm1(epsilons)
    values = np.minimum(deltas, 1.0)
    values[0] = min(values[0], float(np.min((x + 2 * values) / (x + 2))))
    values = np.minimum.accumulate(values)
    corners: list[tuple[float, float]] = []
    for point in zip(x.tolist(), values.tolist(), strict=True):
        while len(corners) >= 2 and not _turns_up(corners[-2], corners[-1], point):
            corners.pop()
        corners.append(point)
    hull = np.array(corners)
    return np.asarray(np.interp(x, hull[:, 0], hull[:, 1]) * (1 + 64 * UNIT))


def _turns_up(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> bool:
    return (b[1] - a[1]) * (c[0] - b[0]) < (c[1] - b[1]) * (b[0] - a[0])


def _shortened(epsilons: np.ndarray, deltas: np.ndarray) -> StateProfile:
    """The same polygon on nodes that end where delta is negligible."""
    enough = np.flatnonzero(deltas <= _SMALLEST)
    last = float(epsilons[enough[0] if len(enough) else -1])
    last = min(max(last, _SHORTEST), float(epsilons[-1]))
    nodes = np.linspace(0.0, last, _NODES)
    values = polygon(epsilons, deltas)(nodes)
    return StateProfile(nodes, _convex(nodes, values))


Window = tuple[Deltas, Deltas, float]
"""The profiles of a window: from one state, and from any two; where the first one is negligible."""


def best_profile(
    windows: Callable[[int], Window],
    start: StateProfile,
    first: int,
    delta: float,
    most: int = 24,
) -> StateProfile:
    """Windows one after the other, each as long as the one before or half as long.

    Args:
        windows: The window of a length >= 1.
        start: The profile before them.
        first: The first length.
        delta: What is compared is epsilon there.
        most: Windows.
    """
    profile, length, now = start, first, start.curve.epsilon(delta)
    for _ in range(most):
        if now == 0:
            break
        before = now
        after = profile.after(*windows(length))
        epsilon = after.curve.epsilon(delta)
        if length > 1:
            shorter = profile.after(*windows(length // 2))
            of_shorter = shorter.curve.epsilon(delta)
            if not epsilon < of_shorter:
                length, after, epsilon = length // 2, shorter, of_shorter
        if epsilon < before:
            profile, now = after, epsilon
        if not epsilon < _ENOUGH * before:
            if length == 1:
                break
            length //= 2
    return profile
