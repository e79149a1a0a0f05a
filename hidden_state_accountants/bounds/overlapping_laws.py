r"""Theorem D: a small domain, by what the laws of the two runs have in common before a window.

Two runs enter a window with laws P and Q of the state. Where the laws overlap, both start from the
SAME state and differ by what the record does inside of the window; the rest starts anywhere in the
domain. For a measure :math:`M \le P` that is matched with a part of Q at the ratio
:math:`e^{\ell(x)}`, and what is left over, of masses u and v,

.. math:: H_\varepsilon \le \int A(\varepsilon - \ell)\, dM + u\, B(\varepsilon + \log(v / u))

A the profile of the window from one state, B that from any two (docs/theory/bounded_domains.md).
"""

from __future__ import annotations

import functools
import math

import attrs
import numpy as np
from dp_accounting import NeighboringRelation

from hidden_state_accountants.bounds.base import Citation, HiddenStateBound, Proof
from hidden_state_accountants.bounds.solvers.shifts import least_mu_squared
from hidden_state_accountants.curves.base import Curve, GaussianCurve
from hidden_state_accountants.curves.by_profile import ProfileCurve, lower_hull, polygon_curve
from hidden_state_accountants.curves.gaussian import deltas_from_mu
from hidden_state_accountants.curves.losses import UNIT
from hidden_state_accountants.curves.profiles import Deltas, polygon
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.process import conditions
from hidden_state_accountants.process.conditions import UnmetCondition
from hidden_state_accountants.process.noisy_process import (
    NoisyProcess,
    noisy_process,
    unmet_conditions,
)

_WIDEST = 100.0  # diameter in standard deviations of a step's noise: beyond it nothing is gained
_LONGEST = 2**13  # steps of a window
_MOST_WINDOWS = 24  # that one profile goes through
_LARGEST_MU = 16.0  # beyond it the laws have next to nothing in common
_DELTA = 1e-6  # windows are chosen by epsilon there
_NODES = 128  # of a profile
_CANDIDATES = 16  # levels at which the matching may be cut, on either side of a loss of 0
_ENOUGH = 0.995  # of epsilon: nothing more is gained
_SHORTEST = 1e-6  # of the epsilons of the last node, unless it was less
_SMALLEST = 1e-20  # deltas that need no further epsilon
_ROUNDED_UP = 1 + 1e-9  # more than what sums of a few hundred positive terms lose


@attrs.frozen
class OverlappingLaws(HiddenStateBound):
    """Theorem D for FULL and CYCLIC runs on a small set.

    Formal guarantees:
      - Relation: as for `ShiftedInterpolation`.
      - Released: the last iterate alone. Steps that differ all count as the worst one: the largest
        modulus, the largest sensitivity, the least noise. Steps of learning rate 0 do not count: at
        both ends of a run; with full batches anywhere.
      - The figure does not depend on the number of steps: no longer run has a larger one.
      - (epsilon, delta) only: no Renyi divergences, no mu-GDP.
      - Assumptions: those of `ShiftedInterpolation`.

    Source: this project (docs/theory/bounded_domains.md), with the windows of Theorem A.
    """

    key = "overlapping_laws"
    needs_domain = True
    paper = Citation(
        "Bok, Su, Altschuler 2024",
        "shifted interpolation, from what the laws before a window have in common",
        "2403.00278",
    )

    def conditions(
        self, event: LastIterateDpEvent, relation: NeighboringRelation
    ) -> tuple[UnmetCondition, ...]:
        """A contractive process on a bounded domain that the noise fills, and no releases."""
        unmet = (
            *unmet_conditions(event, relation),
            *conditions.last_iterate_alone(event),
            *conditions.bounded_domain(event),
        )
        if unmet:
            return unmet
        width = _Steps.of(noisy_process(event, relation)).distance
        needed = f"at most {_WIDEST:g} standard deviations of the noise of a step"
        return tuple(conditions.unless(width <= _WIDEST, "domain_diameter", needed, f"{width:.3g}"))

    def prove(self, event: LastIterateDpEvent, relation: NeighboringRelation) -> Proof:
        """The profile after windows of falling length."""
        return Proof(
            curve=_curve(_Steps.of(noisy_process(event, relation))),
            theorem=self.cited("Theorem D"),
        )


@attrs.frozen
class _Steps:
    """Steps of which none is worse than this one; lengths in units of the noise.

    No two states are farther apart than `distance`, the domain's diameter. The distance of two runs
    with the same noise does not matter: states that are left over when the laws are matched are no
    such runs, and may be at opposite ends. The record takes part once in `period` steps.
    """

    contraction: float
    sensitivity: float
    distance: float
    period: int

    @classmethod
    def of(cls, process: NoisyProcess) -> _Steps:
        steps = _steps_that_count(process)
        if not len(process.contraction[steps]):
            return cls(1.0, 0.0, 0.0, process.period)
        c = float(process.contraction[steps].max())
        s = float(process.sensitivity[steps].max())
        sigma = float(process.noise_std[steps].min())
        if not sigma:
            return cls(c, math.inf if s else 0.0, math.inf if s else 0.0, process.period)
        return cls(c, s / sigma, process.domain_diameter / sigma, process.period)

    def mus(self, stretches: list[tuple[int, bool]]) -> tuple[float, float]:
        """mu of a window from one state, and from any two; inf where numbers overflow.

        Args:
            stretches: Numbers of steps, and whether the record is in the first one of them. It is
                in no other: all noise of a stretch is that of one step.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            c, s, sigma = values = np.array([self._stretch(*stretch) for stretch in stretches]).T
        if not np.isfinite(values).all():  # an expanding update over a long epoch
            return math.inf, math.inf
        of_two = least_mu_squared(c, s, sigma, initial_shift=self.distance)
        return math.sqrt(least_mu_squared(c, s, sigma)), math.sqrt(of_two)

    def _stretch(self, steps: int, has_record: bool) -> tuple[float, float, float]:
        """Modulus, sensitivity and noise, as seen after the last of its steps."""
        powers = np.float64(self.contraction) ** np.arange(steps)
        sensitivity = self.sensitivity * powers[-1] if has_record else 0.0
        return self.contraction * powers[-1], sensitivity, math.sqrt(powers @ powers)

    def epochs(self, number: int, *, first: bool) -> tuple[float, float]:
        """`mus` of some epochs, the record in the first step of each or in the last one."""
        whole, others = (self.period, True), self.period - 1
        if first or not others:
            return self.mus([whole] * number)
        return self.mus([(others, False), *[whole] * (number - 1), (1, True)])


def _steps_that_count(process: NoisyProcess) -> slice | np.ndarray:
    """All steps but those of learning rate 0, if the others are a run of the same period."""
    if process.is_constant:
        return slice(1)
    is_idle = (process.sensitivity == 0) & (process.noise_std == 0) & (process.contraction <= 1)
    count = np.flatnonzero(~is_idle)
    if process.period == 1 or not len(count):
        return count
    return slice(count[0], count[-1] + 1)


@functools.lru_cache(maxsize=16)  # a run is asked about after every epoch, and nothing has changed
def _curve(steps: _Steps) -> Curve:
    """Windows that end with a participation, or begin with one and are followed by one more."""
    if not steps.sensitivity:
        return GaussianCurve(0.0)
    firsts = [False] if steps.period == 1 else [False, True]
    return min((_of_windows(steps, first) for first in firsts), key=lambda c: c.epsilon(_DELTA))


def _of_windows(steps: _Steps, first: bool) -> Curve:
    """Windows one after the other, each as long as the last one or half as long."""
    mus = functools.cache(functools.partial(steps.epochs, first=first))
    length = 1
    while 2 * length <= _LONGEST and mus(2 * length)[1] < mus(length)[1]:
        length *= 2
    apart = mus(length)[1]
    if apart > _LARGEST_MU:
        return GaussianCurve(math.inf if first else apart)
    profile = StateProfile.of(_gaussian(apart), _reach(apart))
    now = profile.curve.epsilon(_DELTA)

    def after(same: float, two: float) -> tuple[float, StateProfile]:
        following = profile.after(_gaussian(same), _gaussian(two), _reach(same))
        return following.curve.epsilon(_DELTA), following

    for _ in range(_MOST_WINDOWS):
        if now == 0:
            break
        before = now
        epsilon, following = after(*mus(length))
        if length > 1:
            shorter, other = after(*mus(length // 2))
            if not epsilon < shorter:
                length, epsilon, following = length // 2, shorter, other
        if epsilon < before:
            profile, now = following, epsilon
        if not epsilon < _ENOUGH * before:
            if length == 1:
                break
            length //= 2
    if first:
        profile = after(*steps.mus([(1, True)]))[1]
    return profile.curve


@attrs.frozen(eq=False)
class StateProfile:
    """Upper bounds on sup_S P(S) - e^epsilon Q(S) of two laws in both directions; a convex polygon.

    Its nodes, `epsilons`, ascend from 0.
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
        """The curve of the two laws."""
        return polygon_curve(self.epsilons, self.deltas)

    def after(self, same: Deltas, apart: Deltas, reach: float = 0.0) -> StateProfile:
        """The profile after a window.

        Args:
            same: The profile of the window from one state, at any real epsilon below `reach`.
            apart: The profile from any two states of the domain; nowhere below `same`.
            reach: The epsilon from which `same` is negligible.
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
        """Losses and masses, rounded up, under both laws of the symmetric pair."""
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
    hull = lower_hull(x, values)
    return np.asarray(np.interp(x, x[hull], values[hull]) * (1 + 64 * UNIT))


def _shortened(epsilons: np.ndarray, deltas: np.ndarray) -> StateProfile:
    """The same polygon on nodes that end where delta is negligible."""
    enough = np.flatnonzero(deltas <= _SMALLEST)
    last = float(epsilons[enough[0] if len(enough) else -1])
    last = min(max(last, _SHORTEST), float(epsilons[-1]))
    nodes = np.linspace(0.0, last, _NODES)
    values = polygon(epsilons, deltas)(nodes)
    return StateProfile(nodes, _convex(nodes, values))


def _reach(mu: float) -> float:
    return max(mu * (mu / 2 + 10), 1e-6)  # delta is below 1e-20 beyond


def _gaussian(mu: float) -> Deltas:
    """The profile at any real epsilon."""

    def deltas(epsilon: np.ndarray) -> np.ndarray:
        found = deltas_from_mu(mu, np.abs(epsilon))
        below = np.minimum(epsilon, 0.0)
        return np.where(epsilon < 0, -np.expm1(below) + np.exp(below) * found, found)

    return deltas
