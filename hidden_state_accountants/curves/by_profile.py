"""A curve that is known by bounds on its divergences at some epsilons."""

from __future__ import annotations

import functools
import math

import attrs
import numpy as np

from hidden_state_accountants.curves.losses import Losses, losses_of
from hidden_state_accountants.curves.polygons import polygon
from hidden_state_accountants.curves.profiles import Deltas, Profile


@attrs.frozen(eq=False, slots=False)
class ProfileCurve:
    """The polygon through bounds on delta, in both directions, as a function of e^epsilon.

    Attributes:
        epsilons: The nodes, ascending from 0.
        deltas: The bounds there, falling. Beyond the last node nothing smaller is known.
    """

    epsilons: np.ndarray
    deltas: np.ndarray

    @property
    def mu(self) -> None:
        """Not Gaussian."""
        return None

    @functools.cached_property
    def _polygon(self) -> Deltas:
        rounded_up = polygon(self.epsilons, self.deltas)
        return lambda epsilon: np.minimum(rounded_up(epsilon), 1.0)

    def delta(self, epsilon: float) -> float:
        return float(self._polygon(np.array([epsilon]))[0])

    def epsilon(self, delta: float) -> float:
        found = np.flatnonzero(self._polygon(self.epsilons) <= delta)
        if not len(found):
            return math.inf
        low, high = float(self.epsilons[max(found[0] - 1, 0)]), float(self.epsilons[found[0]])
        while high - low > 1e-12 * high:  # high is always enough
            middle = (low + high) / 2
            low, high = (middle, high) if self.delta(middle) > delta else (low, middle)
        return high

    def rdp(self, orders: np.ndarray) -> np.ndarray:
        return np.full(orders.shape, math.inf)

    def privacy_losses(self) -> Losses | None:
        return losses_of(Profile(self._polygon, self._polygon, float(self.epsilons[-1])))

    def to_dpevent(self) -> None:
        return None
