"""A mechanism on a cohort, which every record joins with some probability."""

from __future__ import annotations

import functools
import math

import attrs
import dp_accounting
import numpy as np
from dp_accounting import NeighboringRelation

from hidden_state_accountants.curves import profiles
from hidden_state_accountants.curves.base import (
    Curve,
    GaussianCurve,
    alternatives,
    best_curve,
    with_delta,
)
from hidden_state_accountants.curves.composed_loss import ComposedLoss
from hidden_state_accountants.curves.losses import Losses, losses_of
from hidden_state_accountants.curves.profiles import Profile
from hidden_state_accountants.curves.standard import StandardCurve, StockEvent
from hidden_state_accountants.curves.transformed import profile_above


def of_cohort(curve: Curve, rate: float) -> Curve:
    """The curve of a mechanism on a cohort that a record joins with probability `rate`.

    Args:
        curve: Of the mechanism, whoever else is in the cohort.
        rate: q in [0, 1].
    """
    if rate == 1 or curve.mu == 0:
        return curve
    if rate == 0:
        return GaussianCurve(0.0)
    if curve.mu == math.inf:
        return curve
    known = alternatives(curve)
    if len(known) > 1 or known[0][1]:  # whoever joins, joins what may fail as well
        return best_curve([with_delta(of_cohort(single, rate), rate * p) for single, p in known])
    if curve.mu is not None:
        once = dp_accounting.GaussianDpEvent(1 / curve.mu)
        event = dp_accounting.PoissonSampledDpEvent(rate, once)
        return StandardCurve((StockEvent(event, 1, NeighboringRelation.ADD_OR_REMOVE_ONE),))
    return CohortCurve(curve, rate)


@attrs.frozen(eq=False, slots=False)
class CohortCurve:
    """Amplification by sampling of a curve that is not Gaussian (docs/theory/cohorts.md).

    The pair is ordered: the data set that has the record comes first.
    """

    curve: Curve
    rate: float

    @property
    def mu(self) -> None:
        """Not Gaussian."""
        return None

    @functools.cached_property
    def _profile(self) -> Profile:
        return profiles.poisson(profile_above(self.curve), self.rate)

    @functools.cached_property
    def _loss(self) -> ComposedLoss | None:
        losses = self.privacy_losses()
        return None if losses is None else ComposedLoss(losses)

    def delta(self, epsilon: float) -> float:
        if epsilon == math.inf:
            return min(1.0, self.rate * self.curve.delta(math.inf))
        at = np.array([epsilon])
        found = max(self._profile.forward(at)[0], self._profile.backward(at)[0])
        return min(1.0, float(found))

    def epsilon(self, delta: float) -> float:
        if delta >= 1:
            return 0.0
        return math.inf if self._loss is None else self._loss.epsilon(delta)

    def rdp(self, orders: np.ndarray) -> np.ndarray:
        return np.full(orders.shape, math.inf)

    def privacy_losses(self) -> Losses | None:
        return losses_of(self._profile)

    def to_dpevent(self) -> dp_accounting.DpEvent | None:
        event = self.curve.to_dpevent()
        if not isinstance(event, dp_accounting.GaussianDpEvent):
            return None  # stock accountants read no other events inside a sampled one
        return dp_accounting.PoissonSampledDpEvent(self.rate, event)
