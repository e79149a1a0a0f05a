"""Theorem D: a bounded domain, by what the laws of the two runs have in common before a window."""

from __future__ import annotations

import functools
import math

import attrs
import numpy as np
from dp_accounting import NeighboringRelation

from hidden_state_accountants.bounds.base import Citation, HiddenStateBound, Proof
from hidden_state_accountants.bounds.solvers.state_windows import (
    StateProfile,
    Window,
    best_profile,
)
from hidden_state_accountants.bounds.solvers.taut_string import least_mu_squared
from hidden_state_accountants.curves.base import Curve, GaussianCurve
from hidden_state_accountants.curves.gaussian import deltas_from_mu
from hidden_state_accountants.curves.profiles import Deltas
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.process import conditions
from hidden_state_accountants.process.conditions import UnmetCondition
from hidden_state_accountants.process.noisy_process import (
    NoisyProcess,
    noisy_process,
    unmet_conditions,
)

_LONGEST = 2**13  # epochs of a window
_LARGEST_MU = 16.0  # beyond it the laws have next to nothing in common
_DELTA = 1e-6  # windows are chosen by epsilon there


@attrs.frozen
class OverlappingLaws(HiddenStateBound):
    """Theorem D for FULL and CYCLIC runs on a bounded domain.

    Formal guarantees:
      - Relation: as for `ShiftedInterpolation`.
      - Released: the last iterate alone. Steps that differ all count as the worst one: the largest
        modulus, the largest sensitivity, the least noise.
      - Steps of learning rate 0 do not count: at both ends of a run; with full batches anywhere.
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
        """A contractive process on a bounded domain, and no releases."""
        return (
            *unmet_conditions(event, relation),
            *conditions.last_iterate_alone(event),
            *conditions.bounded_domain(event),
        )

    def prove(self, event: LastIterateDpEvent, relation: NeighboringRelation) -> Proof:
        """The profile after windows of falling length."""
        return Proof(
            curve=_curve(_Steps.of(noisy_process(event, relation))),
            theorem=self.cited("Theorem D"),
        )


@attrs.frozen
class _Steps:
    """Steps of which none is worse than this one; lengths in units of the noise.

    Attributes:
        contraction: At least c of every step.
        sensitivity: At least s of a step whose batch holds the record, every `period`-th one.
        distance: No two states are farther apart: the domain's diameter. How far apart two runs
            with the same noise are does not matter here. States that are left over when the laws
            are matched are no such runs, and may be at opposite ends.
        period: Steps from one participation to the next.
    """

    contraction: float
    sensitivity: float
    distance: float
    period: int

    @classmethod
    def of(cls, process: NoisyProcess) -> _Steps:
        steps = _steps_that_count(process)
        c = float(process.contraction[steps].max())
        s = float(process.sensitivity[steps].max())
        sigma = float(process.noise_std[steps].min())
        if not sigma:
            return cls(c, math.inf if s else 0.0, math.inf, process.period)
        return cls(c, s / sigma, process.domain_diameter / sigma, process.period)

    def mus(self, stretches: list[tuple[int, bool]]) -> tuple[float, float]:
        """mu of a window from one state, and from any two; inf where numbers overflow.

        Args:
            stretches: Numbers of steps, and whether the record is in the first one of them. It is
                in no other: all noise of a stretch is that of one step.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            c, s, sigma = values = np.array([self._stretch(*stretch) for stretch in stretches]).T
        if not np.isfinite(values).all():  # an expanding update over a long epoch: nothing is known
            return math.inf, math.inf
        of_one = least_mu_squared(c, s, sigma)
        of_two = least_mu_squared(c, s, sigma, initial_shift=self.distance)
        return math.sqrt(of_one), math.sqrt(of_two)

    def _stretch(self, steps: int, has_record: bool) -> tuple[float, float, float]:
        """Modulus, sensitivity and noise, as seen after the last of its steps."""
        c = self.contraction
        powers = np.float64(c) ** np.arange(steps)
        sensitivity = self.sensitivity * powers[-1] if has_record else 0.0
        return c * powers[-1], sensitivity, math.sqrt(powers @ powers)

    def epochs(self, number: int, *, first: bool) -> list[tuple[int, bool]]:
        """Stretches of some epochs, the record in the first step of each or in the last one."""
        whole, others = (self.period, True), self.period - 1
        if first or not others:
            return [whole] * number
        return [(others, False), *[whole] * (number - 1), (1, True)]


def _steps_that_count(process: NoisyProcess) -> slice | np.ndarray:
    """All but those of learning rate 0, if the others are a run of the same period.

    Such a step is one map for both data sets, which brings no two states farther apart.
    """
    if process.is_constant:
        return slice(1)
    is_idle = (process.sensitivity == 0) & (process.noise_std == 0) & (process.contraction <= 1)
    count = np.flatnonzero(~is_idle)
    if not len(count):
        return slice(None)
    if process.period == 1:
        return count
    return slice(count[0], count[-1] + 1)


@functools.lru_cache(maxsize=16)  # a run is asked about after every epoch, and nothing has changed
def _curve(steps: _Steps) -> Curve:
    if not steps.sensitivity:
        return GaussianCurve(0.0)
    if math.inf in (steps.sensitivity, steps.distance):
        return GaussianCurve(math.inf)
    windows = [_Windows(steps, False)]  # the record in the last step of each
    if steps.period > 1:
        windows.append(_Windows(steps, True))
    found = [w.profile() for w in windows if w.apart <= _LARGEST_MU]
    if not found:
        return GaussianCurve(windows[0].apart)
    return min((profile.curve for profile in found), key=lambda curve: curve.epsilon(_DELTA))


class _Windows:
    """Epochs that end with a participation, or begin with one and are followed by one more."""

    def __init__(self, steps: _Steps, first: bool):
        self._steps, self._first = steps, first
        self._mus = functools.cache(self._evaluate)
        self._length = 1
        while 2 * self._length <= _LONGEST and self._is_better(2 * self._length):
            self._length *= 2
        self.apart = self._mus(self._length)[1]

    def _evaluate(self, epochs: int) -> tuple[float, float]:
        return self._steps.mus(self._steps.epochs(epochs, first=self._first))

    def _is_better(self, epochs: int) -> bool:
        return self._mus(epochs)[1] < self._mus(epochs // 2)[1]

    def profile(self) -> StateProfile:
        """After windows of falling length."""
        start = StateProfile.of(_gaussian(self.apart), _reach(self.apart))
        profile = best_profile(lambda n: _window(*self._mus(n)), start, self._length, _DELTA)
        if self._first:
            return profile.after(*_window(*self._steps.mus([(1, True)])))
        return profile


def _window(same: float, apart: float) -> Window:
    return _gaussian(same), _gaussian(apart), _reach(same)


def _reach(mu: float) -> float:
    return max(mu * (mu / 2 + 10), 1e-6)  # delta is below 1e-20 beyond


def _gaussian(mu: float) -> Deltas:
    """The profile at any real epsilon."""

    def deltas(epsilon: np.ndarray) -> np.ndarray:
        found = deltas_from_mu(mu, np.abs(epsilon))
        below = np.minimum(epsilon, 0.0)
        return np.where(epsilon < 0, -np.expm1(below) + np.exp(below) * found, found)

    return deltas
