"""Other forms of a privacy curve: privacy loss and groups."""

from __future__ import annotations

import functools
import math

import attrs
import dp_accounting
import numpy as np
from dp_accounting.pld import pld_pmf, privacy_loss_distribution

from hidden_state_accountants.curves import profiles
from hidden_state_accountants.curves.base import Curve, GaussianCurve, best_curve, with_delta
from hidden_state_accountants.curves.by_profile import LARGEST, lower_hull, profile_above, read
from hidden_state_accountants.curves.losses import GRID, Losses, PrivacyLoss, losses_of

_SMALLEST_LEVEL = 1e-60  # of tests: groups multiply small deltas
_LEVELS = 60_000  # of tests, 0.2 % apart
_LONGEST = 500.0  # privacy losses of which there is a distribution


def loss_distribution(curve: Curve) -> privacy_loss_distribution.PrivacyLossDistribution:
    """dp-accounting's form of a symmetric pair that dominates the mechanism in both directions.

    The true profile is a convex function of e^epsilon below the values of the curve, so it is
    below the polygon through the lower convex hull of any of them.
    """
    if curve.mu == 0:
        return privacy_loss_distribution.identity(GRID)
    is_gaussian = curve.mu is not None and curve.mu < math.inf
    profile = profiles.gaussian(curve.largest_mu) if is_gaussian else profile_above(curve)
    loss = PrivacyLoss.of(profile, GRID) if profile.largest <= _LONGEST else None
    if loss is None:
        raise ValueError(
            f"Expected privacy losses below {_LONGEST:g}, got {profile.largest:.0f}: a "
            "distribution of them would take gigabytes. Add noise."
        )
    masses = loss.forward
    return privacy_loss_distribution.PrivacyLossDistribution(
        pld_pmf.DensePLDPmf(GRID, masses.lower, masses.masses, masses.infinite, True)
    )


def of_groups(curve: Curve, size: int) -> Curve:
    """The curve of data sets that differ in up to `size` > 1 records, one after the other."""
    if curve.mu is not None:  # Dong, Roth, Su 2022, arXiv 1905.02383 v3, Theorem 2.14
        return GaussianCurve(size * curve.mu)
    known = curve.alternatives()
    if len(known) > 1:
        return best_curve([of_groups(with_delta(*single), size) for single in known])
    return GroupCurve(curve, size)


@attrs.frozen(eq=False, slots=False)
class GroupCurve(Curve):
    r"""A chain of k neighbours: a test of level alpha has a power of at most

    .. math:: p(p(\dots p(\alpha))), \qquad
              p(\alpha) = \min_{\varepsilon \ge 0} \min\big(\delta(\varepsilon) + e^{\varepsilon}
              \alpha,\; 1 - e^{-\varepsilon} (1 - \delta(\varepsilon) - \alpha)\big)

    (Dong, Roth, Su 2022, arXiv 1905.02383 v3, Theorem 2.14), whatever epsilons p is made of. p and
    its powers are concave and grow, so that between two levels the power at the larger one counts.
    """

    curve: Curve
    size: int

    @functools.cached_property
    def _powers(self) -> tuple[np.ndarray, np.ndarray]:
        """Levels, the first of which is 0, and the powers of the group at the next ones."""
        powers = np.append(np.geomspace(_SMALLEST_LEVEL, 1.0, _LEVELS), 1.0)
        levels = np.append(0.0, powers[:-1])
        epsilons, deltas = read(self.curve, _SMALLEST_LEVEL)
        # Intercepts and slopes of lines that no power exceeds, the flattest one first.
        steep = np.exp(epsilons)
        intercepts = np.append((1 - (1 - deltas) / steep)[::-1], deltas)
        slopes = np.append((1 / steep)[::-1], steep)
        for _ in range(self.size):
            powers = _lowest(intercepts, slopes, powers)
        return levels, powers

    def delta(self, epsilon: float) -> float:
        if self.curve.delta(0.0) == 0:
            return 0.0
        if epsilon == math.inf:  # what is left beyond all epsilons is multiplied by more than any
            return 0.0 if self.curve.delta(math.inf) == 0 else 1.0
        levels, powers = self._powers
        with np.errstate(over="ignore"):
            return float(min(1.0, max(0.0, np.max(powers - np.exp(epsilon) * levels))))

    def epsilon(self, delta: float) -> float:
        if delta >= 1 or self.delta(0.0) <= delta:
            return 0.0
        low = self.curve.epsilon(delta)  # no group is better off than a record
        high = max(low, 1e-12)
        while high <= LARGEST and self.delta(high) > delta:
            low, high = high, 1.2 * high
        if high > LARGEST:
            return math.inf
        while high - low > 1e-9 * high:
            middle = (low + high) / 2
            low, high = (low, middle) if self.delta(middle) <= delta else (middle, high)
        return high

    def privacy_losses(self) -> Losses | None:
        return losses_of(profile_above(self))

    def to_dpevent(self) -> dp_accounting.DpEvent | None:
        event = self.curve.to_dpevent()
        if not isinstance(event, dp_accounting.GaussianDpEvent):
            return None
        return dp_accounting.GaussianDpEvent(event.noise_multiplier / self.size)


def _lowest(intercepts: np.ndarray, slopes: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The smallest of all lines at ascending x, rounded up."""
    index = np.array(lower_hull(slopes, intercepts)[::-1])  # the steepest line is the first one
    c, s = intercepts[index], slopes[index]
    corners = np.diff(c) / np.maximum(-np.diff(s), 1e-300)
    place = np.searchsorted(np.maximum.accumulate(corners), x)
    return np.asarray(np.minimum(1.0, (c[place] + s[place] * x) * (1 + 1e-12)))
