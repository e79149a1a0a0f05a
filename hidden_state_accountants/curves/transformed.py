"""What a privacy curve says in other words: trade-off, privacy loss, groups, selection."""

from __future__ import annotations

import math

import attrs
import dp_accounting
import numpy as np
from dp_accounting.pld import pld_pmf, privacy_loss_distribution
from scipy import optimize, special

from hidden_state_accountants.curves import profiles
from hidden_state_accountants.curves.base import BestOfCurves, Curve, GaussianCurve, RdpCurve
from hidden_state_accountants.curves.losses import GRID, PrivacyLoss
from hidden_state_accountants.curves.polygons import polygon
from hidden_state_accountants.curves.profiles import Profile
from hidden_state_accountants.curves.renyi import ORDERS

_RATIO = 1.01  # of neighbouring epsilons at which a curve is read
_SMALL = 1e-3  # the first of them, in epsilons at a delta of 1e-6
_LARGEST = 200.0  # and the last one at most
_SMALLEST = 1e-15  # deltas that need no further epsilon


def read(curve: Curve) -> tuple[np.ndarray, np.ndarray]:
    """Epsilons, the first of which is 0, and the deltas of the curve there.

    Raises:
        ValueError: The curve has no finite epsilon at any delta that matters.
    """
    scale = next((e for e in map(curve.epsilon, (1e-6, 1e-3, 0.1)) if e < math.inf), math.inf)
    if scale == math.inf:
        raise ValueError("Expected a guarantee with a finite epsilon, got one without. Add noise.")
    beyond = curve.delta(math.inf)
    epsilons, deltas = [0.0], [curve.delta(0.0)]
    step = _SMALL * (scale or 1e-3)
    while deltas[-1] > beyond * (1 + 1e-6) + _SMALLEST and step < _LARGEST:
        epsilons.append(step)
        deltas.append(curve.delta(step))
        step *= _RATIO
    return np.array(epsilons), np.minimum.accumulate(deltas)


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
        epsilons, deltas = read(curve)
        kept = _lower_hull(np.expm1(epsilons), deltas)
        values = polygon(epsilons[kept], deltas[kept])
        profile = Profile(values, values, float(epsilons[-1]))
    loss = PrivacyLoss.of(profile)
    if loss is None:
        raise ValueError(
            f"Expected privacy losses below 500, got {profile.largest:.0f}: a distribution of them "
            "would take gigabytes. Add noise."
        )
    masses = loss.forward
    return privacy_loss_distribution.PrivacyLossDistribution(
        pld_pmf.DensePLDPmf(GRID, masses.lower, masses.masses, masses.infinite, True)
    )


def _lower_hull(x: np.ndarray, y: np.ndarray) -> list[int]:
    kept: list[int] = []
    for i in range(len(x)):
        while len(kept) > 1:
            a, b = kept[-2:]
            if (y[b] - y[a]) * (x[i] - x[b]) <= (y[i] - y[b]) * (x[b] - x[a]):
                break
            kept.pop()
        kept.append(i)
    return kept


def of_groups(curve: Curve, size: int) -> Curve:
    """The curve of data sets that differ in up to `size` records, one after the other."""
    if curve.mu is not None:  # Dong, Roth, Su 2022, arXiv 1905.02383 v3, Theorem 2.14
        return GaussianCurve(size * curve.mu)
    if isinstance(curve, BestOfCurves):
        return BestOfCurves(tuple(of_groups(part, size) for part in curve.curves))
    return GroupCurve(curve, size)


@attrs.frozen(eq=False)
class GroupCurve:
    r"""A chain of k neighbours: (epsilon, delta) becomes

    .. math:: \Big(k\varepsilon,\; \delta \sum_{i < k} e^{i \varepsilon}\Big)

    (Vadhan 2017, The complexity of differential privacy, Lemma 2.2.)
    """

    curve: Curve
    size: int

    @property
    def mu(self) -> None:
        """Not Gaussian."""
        return None

    def delta(self, epsilon: float) -> float:
        each = epsilon / self.size
        delta = self.curve.delta(each)
        if delta == 0 or epsilon == math.inf:
            return 0.0 if delta == 0 else 1.0
        log_sum = float(special.logsumexp(each * np.arange(self.size)))
        return min(1.0, math.exp(min(0.0, math.log(delta) + log_sum)) * (1 + 1e-12))

    def epsilon(self, delta: float) -> float:
        if delta >= 1 or self.delta(0.0) <= delta:
            return 0.0
        low = self.size * self.curve.epsilon(delta)  # no group is better off than a record
        if low == math.inf:
            return math.inf
        high = max(low, 1e-12)
        while self.delta(high) > delta:
            low, high = high, 1.2 * high
            if high > 1e4:
                return math.inf
        while high - low > 1e-9 * high:
            middle = (low + high) / 2
            low, high = (low, middle) if self.delta(middle) <= delta else (middle, high)
        return high

    def rdp(self, orders: np.ndarray) -> np.ndarray:
        return np.full(orders.shape, math.inf)

    def privacy_losses(self) -> None:
        return None

    def to_dpevent(self) -> dp_accounting.DpEvent | None:
        return None


def after_selection(curve: Curve, mean: float, shape: float) -> RdpCurve:
    r"""The best of K runs, K drawn in secret; Papernot & Steinke 2022, arXiv 2110.03620 v2.

    With E[K] = m, Theorem 6 for a Poisson number (`shape` = inf),

    .. math:: D_\lambda + m\,\hat\delta + \frac{\log m}{\lambda - 1}, \qquad
              \hat\delta = \delta(\log(1 + 1/(\lambda - 1))),

    and Theorem 2 for a truncated negative binomial one, for any :math:`\hat\lambda`

    .. math:: D_\lambda + (1 + \eta)\Big(1 - \frac{1}{\hat\lambda}\Big) D_{\hat\lambda}
              + \frac{(1 + \eta) \log(1/\gamma)}{\hat\lambda} + \frac{\log m}{\lambda - 1}.
    """
    if shape == math.inf:

        def poisson(orders: np.ndarray) -> np.ndarray:
            deltas = [curve.delta(math.log1p(1 / (order - 1))) for order in orders.ravel()]
            extra = mean * np.reshape(deltas, orders.shape)
            return np.asarray(curve.rdp(orders) + extra + math.log(mean) / (orders - 1))

        return RdpCurve(poisson)
    log_inverse = -math.log(_gamma(mean, shape))
    others = (1 - 1 / ORDERS) * curve.rdp(ORDERS) + log_inverse / ORDERS
    fixed = (1 + shape) * float(np.min(others))
    return RdpCurve(lambda orders: curve.rdp(orders) + fixed + math.log(mean) / (orders - 1))


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
