"""What a privacy curve says in other words: trade-off, privacy loss, groups, selection."""

from __future__ import annotations

import functools
import math

import attrs
import dp_accounting
import numpy as np
from dp_accounting import NeighboringRelation
from dp_accounting.pld import pld_pmf, privacy_loss_distribution
from scipy import optimize, special

from hidden_state_accountants.curves import profiles
from hidden_state_accountants.curves.base import (
    ComposableCurve,
    Curve,
    GaussianCurve,
    RdpCurve,
    alternatives,
    best_curve,
    with_delta,
)
from hidden_state_accountants.curves.by_profile import (
    LARGEST,
    cohort_curve,
    lower_hull,
    profile_above,
    read,
)
from hidden_state_accountants.curves.losses import GRID, Losses, PrivacyLoss, losses_of
from hidden_state_accountants.curves.renyi import ORDERS
from hidden_state_accountants.curves.standard import EventCurve

_SMALLEST_LEVEL = 1e-60  # of tests: groups multiply small deltas
_LEVELS = 60_000
_LONGEST = 500.0  # privacy losses of which there is a distribution


def trade_off(curve: Curve, alpha: np.ndarray) -> np.ndarray:
    r"""The smallest type II errors of tests between neighbours, of type I errors alpha.

    .. math:: f(\alpha) = \max_{\varepsilon \ge 0} \max\big(0,\; 1 - \delta(\varepsilon)
              - e^{\varepsilon}\alpha,\; e^{-\varepsilon}(1 - \delta(\varepsilon) - \alpha)\big)

    (Wasserman & Zhou 2010; section 2 of Dong, Roth, Su 2022, arXiv 1905.02383 v3.) Every
    epsilon gives a valid line, so a grid of them gives a trade-off that is not too large.
    """
    if curve.mu == math.inf:
        return np.zeros(alpha.shape)
    if curve.mu is not None:
        return np.asarray(special.ndtr(-special.ndtri(alpha) - curve.mu))
    epsilons, deltas = read(curve)
    e, d, a = epsilons[:, None], deltas[:, None], alpha.ravel()[None, :]
    lines = np.maximum(1 - d - np.exp(e) * a, np.exp(-e) * (1 - d - a))
    return np.maximum(0.0, lines.max(axis=0)).reshape(alpha.shape)


def loss_distribution(curve: Curve) -> privacy_loss_distribution.PrivacyLossDistribution:
    """dp-accounting's form of a symmetric pair that dominates the mechanism in both directions.

    The true profile is a convex function of e^epsilon below the values of the curve, so it is
    below the polygon through the lower convex hull of any of them.
    """
    if curve.mu == 0:
        return privacy_loss_distribution.identity(GRID)
    if curve.mu is not None and curve.mu < math.inf:
        profile = profiles.gaussian(curve.mu)
    else:
        profile = profile_above(curve)
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
    known = alternatives(curve)
    if len(known) > 1:
        return best_curve([of_groups(with_delta(*single), size) for single in known])
    return GroupCurve(curve, size)


@attrs.frozen(eq=False, slots=False)
class GroupCurve(ComposableCurve):
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
        lines = _power_lines(self.curve)
        for _ in range(self.size):
            powers = _lowest(*lines, powers)
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
        if low == math.inf:
            return math.inf
        high = max(low, 1e-12)
        while self.delta(high) > delta:
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


def _power_lines(curve: Curve) -> tuple[np.ndarray, np.ndarray]:
    """Intercepts and slopes of lines that no power of a test exceeds, the flattest one first."""
    epsilons, deltas = read(curve, _SMALLEST_LEVEL)
    slopes = np.exp(epsilons)
    intercepts = np.append((1 - (1 - deltas) / slopes)[::-1], deltas)
    return intercepts, np.append((1 / slopes)[::-1], slopes)


def _lowest(intercepts: np.ndarray, slopes: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The smallest of all lines at ascending x, rounded up."""
    index = np.array(lower_hull(slopes, intercepts)[::-1])  # the steepest line is the first one
    c, s = intercepts[index], slopes[index]
    corners = np.diff(c) / np.maximum(-np.diff(s), 1e-300)
    place = np.searchsorted(np.maximum.accumulate(corners), x)
    return np.asarray(np.minimum(1.0, (c[place] + s[place] * x) * (1 + 1e-12)))


def after_selection(curve: Curve, mean: float, shape: float) -> RdpCurve:
    r"""The best of K runs, K drawn in secret; Papernot & Steinke 2022, arXiv 2110.03620 v2.

    With E[K] = m, Theorem 6 for a Poisson number (`shape` = inf),

    .. math:: D_\lambda + m\,\hat\delta + \frac{\log m}{\lambda - 1}, \qquad
              \hat\delta = \delta(\log(1 + 1/(\lambda - 1))),

    and Theorem 2 for a truncated negative binomial one, for any :math:`\hat\lambda`

    .. math:: D_\lambda + (1 + \eta)\Big(1 - \frac{1}{\hat\lambda}\Big) D_{\hat\lambda}
              + \frac{(1 + \eta) \log(1/\gamma)}{\hat\lambda} + \frac{\log m}{\lambda - 1}.
    """
    orders = _orders_of(curve)
    if shape == math.inf:
        return RdpCurve(functools.partial(_best_of_poisson_number, curve, mean), orders)
    log_inverse = -math.log(_gamma(mean, shape))
    others = (1 - 1 / orders) * curve.rdp(orders) + log_inverse / orders
    fixed = (1 + shape) * float(np.min(others))
    return RdpCurve(functools.partial(_best_of_number, curve, mean, fixed), orders)


def _best_of_poisson_number(curve: Curve, mean: float, orders: np.ndarray) -> np.ndarray:
    deltas = [curve.delta(math.log1p(1 / (order - 1))) for order in orders.ravel()]
    return _best_of_number(curve, mean, mean * np.reshape(deltas, orders.shape), orders)


def _best_of_number(
    curve: Curve, mean: float, extra: np.ndarray | float, orders: np.ndarray
) -> np.ndarray:
    return np.asarray(curve.rdp(orders) + extra + math.log(mean) / (orders - 1))


def _orders_of(curve: Curve) -> np.ndarray:
    """Where the divergences of a curve are read: a sampled event has few orders that are quick."""
    orders = (getattr(single, "orders", ORDERS) for single, _ in alternatives(curve))
    return functools.reduce(np.intersect1d, orders)


def _gamma(mean: float, shape: float) -> float:
    """The parameter of the truncated negative binomial distribution of a mean > 1, rounded down."""

    def excess(log_gamma: float) -> float:
        inverse = math.expm1(-log_gamma)  # 1/gamma - 1
        if shape == 0:
            return math.log(inverse / -log_gamma) - math.log(mean)
        return math.log(shape * inverse / -math.expm1(shape * log_gamma)) - math.log(mean)

    low = -math.log(mean) - 2.0
    while excess(low) < 0:
        low *= 2
    return math.exp(float(optimize.brentq(excess, low, -1e-9, xtol=1e-14)) - 1e-9)


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
        return EventCurve(event, NeighboringRelation.ADD_OR_REMOVE_ONE)
    return cohort_curve(curve, rate)
