r"""Curves that are known by their privacy profiles.

Sampled Gaussian mechanisms in which both data sets have the record, or what became of it.

With probability 1 - q both outputs are drawn from P0, else the one from P1 and the other from Q1,
three Gaussians of one variance. With :math:`e^{\varepsilon'} = 1 + q(e^\varepsilon - 1)`, beta =
:math:`(1-q) e^{-\varepsilon} + q` (Balle, Barthe, Gaboardi 2018, arXiv 1807.01647 v2, Theorem 2)
and any shares that sum to 1

.. math::
    \delta(\varepsilon') = q\,H_\varepsilon\big(P_1 \,|\, (1-\beta) P_0 + \beta Q_1\big)
    \le q\,\big[\lambda\,\delta_{|P_1 - P_0|}(\varepsilon_0) + (1-\lambda)\,\delta_{|P_1 - Q_1|}
    (\varepsilon_1)\big],\qquad \lambda e^{\varepsilon_0} = (1-\beta) e^\varepsilon,\;
    (1-\lambda) e^{\varepsilon_1} = \beta e^\varepsilon.

The best share makes this the divergence of three Gaussians on one line. Where the distances differ,
the two directions do: the pair is ordered, and composes with others of the same order
(docs/theory/random_distance.md).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import attrs
import numpy as np
from scipy import special

from hidden_state_accountants.curves import profiles
from hidden_state_accountants.curves.base import Curve, GaussianCurve
from hidden_state_accountants.curves.gaussian import deltas_from_mu
from hidden_state_accountants.curves.losses import Losses, losses_of
from hidden_state_accountants.curves.profiles import Profile

_RATIO, _COUNT = 1.01, 1600  # of neighbouring nodes of divergences, and their number
_ROUNDING = 2.0**-50  # of the logarithms of shares
_FAR = 36.0  # standard deviations of a Gaussian: 1e-283 of its mass is beyond
_NEGLIGIBLE = 25.0  # nats: how much less the last term of a sum has to be
_READ_RATIO = 1.01  # of neighbouring epsilons at which a curve is read
_SMALL = 1e-3  # the first of them, in epsilons at a delta of 1e-6
LARGEST = 200.0  # and the last one at most
_SMALLEST = 1e-15  # deltas that need no further epsilon
_POINTS = np.linspace(0.0, 1.0, 65)  # at which an epsilon is looked for, again and again


@attrs.frozen(eq=False)
class ProfileCurve(Curve):
    """The larger divergence of the two orders of a pair.

    Attributes:
        profile: Divergences; where the directions differ, the data set with the record comes first.
        infinite: The mass of infinite losses.
        divergences: The Renyi divergences of both directions, if they are known.
        largest_mu: See `Curve`.
    """

    profile: Profile
    infinite: float = 0.0
    divergences: Callable[[np.ndarray], np.ndarray] | None = None
    largest_mu: float = math.inf

    def _deltas(self, epsilon: np.ndarray) -> np.ndarray:
        found = self.profile.forward(epsilon)
        if not self.profile.is_symmetric:
            found = np.maximum(found, self.profile.backward(epsilon))
        return np.minimum(found, 1.0)

    def delta(self, epsilon: float) -> float:
        if epsilon == math.inf:
            return self.infinite
        return float(self._deltas(np.array([min(epsilon, self.profile.largest)]))[0])

    def epsilon(self, delta: float) -> float:
        low, high = 0.0, self.profile.largest
        if self.delta(0.0) <= delta:
            return 0.0
        if delta == 0 or self.delta(high) > delta:  # small deltas of Gaussians underflow
            return math.inf
        while high - low > 1e-12 * high:  # high is always enough
            points = low + (high - low) * _POINTS
            place = int(np.argmax(self._deltas(points) <= delta))
            if not place:  # rounding: only the last one is enough
                place = len(points) - 1
            low, high = float(points[place - 1]), min(float(points[place]), high)
        return high

    def rdp(self, orders: np.ndarray) -> np.ndarray:
        return super().rdp(orders) if self.divergences is None else self.divergences(orders)

    def privacy_losses(self) -> Losses | None:
        return losses_of(self.profile)


def polygon_curve(epsilons: np.ndarray, deltas: np.ndarray) -> ProfileCurve:
    """The polygon through bounds on delta, in both directions, as a function of e^epsilon.

    The nodes ascend from 0, the deltas fall. Beyond the last node nothing smaller is known.
    """
    values = profiles.polygon(epsilons, deltas)
    return ProfileCurve(Profile(values, values, float(epsilons[-1])), float(deltas[-1]))


def read(curve: Curve, smallest: float = _SMALLEST) -> tuple[np.ndarray, np.ndarray]:
    """Epsilons, the first of which is 0, and the deltas of the curve there, down to `smallest`.

    Raises:
        ValueError: The curve has no finite epsilon at any delta that matters.
    """
    curve = curve.quick
    scale = next((e for e in map(curve.epsilon, (1e-6, 1e-3, 0.1)) if e < math.inf), math.inf)
    if scale == math.inf:
        raise ValueError("Expected a guarantee with a finite epsilon, got one without. Add noise.")
    beyond = curve.delta(math.inf)
    epsilons, deltas = [0.0], [curve.delta(0.0)]
    step = _SMALL * (scale or 1e-3)
    while deltas[-1] > beyond * (1 + 1e-6) + smallest and step < LARGEST:
        epsilons.append(step)
        deltas.append(curve.delta(step))
        step *= _READ_RATIO
    return np.array(epsilons), np.minimum.accumulate(deltas)


def profile_above(curve: Curve) -> Profile:
    """The profile of a symmetric pair that dominates a mechanism in both orders."""
    return hull_profile(read(curve))


def hull_profile(*orders: tuple[np.ndarray, np.ndarray]) -> Profile:
    """The hulls of bounds on delta at epsilons that ascend from 0, in one order or in both."""
    together, polygons = min(float(deltas[0]) for _, deltas in orders), []  # the total variation
    for epsilons, deltas in orders:
        falling = np.minimum.accumulate(np.append(together, deltas[1:]))
        with np.errstate(over="ignore"):  # any of the points may go
            kept = lower_hull(np.expm1(epsilons), falling)
        polygons.append(profiles.polygon(epsilons[kept], falling[kept]))
    return Profile(polygons[0], polygons[-1], max(float(epsilons[-1]) for epsilons, _ in orders))


def lower_hull(x: np.ndarray, y: np.ndarray) -> list[int]:
    """The points of a polygon that lie below all others, of ascending x."""
    kept: list[int] = []
    points = list(zip(x.tolist(), y.tolist(), strict=True))
    for i, (right, height) in enumerate(points):
        while len(kept) > 1:
            (start, first), (middle, second) = points[kept[-2]], points[kept[-1]]
            if (second - first) * (right - middle) <= (height - second) * (middle - start):
                break
            kept.pop()
        kept.append(i)
    return kept


# Sampled Gaussian mechanisms


@functools.lru_cache(maxsize=64)  # equal steps are one mechanism
def sampled_curve(pair: Callable[[float, float], Profile], record_mu: float, rate: float) -> Curve:
    r"""A Gaussian step on a batch drawn at random, in which the record counts on both data sets.

    Sampling never hurts: outputs on batches without the record are the same, P0, so that

    .. math:: H_\varepsilon\big((1-q) P_0 + q P_1 \,|\, (1-q) P_0 + q Q_1\big)
              \le q\,H_\varepsilon(P_1 | Q_1), \qquad \varepsilon \ge 0

    (joint convexity), and what dominates each step dominates their composition. The pair is one of
    those below; `record_mu` is the gradient bound over the noise, of every record.
    """
    apart = record_mu if pair is zeroed_without_replacement else 2 * record_mu  # if it does
    if rate == 1 or record_mu in (0, math.inf):
        return GaussianCurve(apart)
    profile = pair(record_mu, rate)
    divergences = functools.partial(_sampled_divergences, profile, record_mu, apart, rate)
    return ProfileCurve(profile, divergences=divergences, largest_mu=apart)


def replaced_without_replacement(mu: float, rate: float) -> Profile:
    r"""C_q(G_{2 mu}): a batch of fixed size, and a record that is replaced by any other one.

    .. math:: \delta\big(\log(1 + q(e^\varepsilon - 1))\big) = q\,\delta_{2\mu}(\varepsilon),
              \qquad \varepsilon \ge 0

    (Balle, Barthe, Gaboardi 2018, arXiv 1807.01647 v2, Theorem 9; Dong, Roth, Su 2022, arXiv
    1905.02383 v3, Theorem 4.2: the pair is symmetric.) Stock accountants have its Renyi
    divergences only. The record takes a stand-in's place, and so does the other record: all are
    2 mu apart.
    """
    return profiles.without_replacement(profiles.gaussian(2 * mu), rate)


def zeroed_without_replacement(mu: float, rate: float) -> Profile:
    """A record that takes a stand-in's place in a batch (`forward`), and one without gradient."""
    between = functools.partial(_between, mu, rate, True)
    forward = functools.partial(profiles.sampled_deltas, between, rate)
    backward = functools.partial(profiles.sampled_deltas, profiles.gaussian(mu).forward, rate)
    return Profile(forward, backward, replaced_without_replacement(mu, rate).largest)


def replaced_in_poisson_batch(mu: float, rate: float) -> Profile:
    """A record that joins a batch or not, against another record that does."""
    between = functools.partial(_between, mu, rate, False)
    deltas = functools.partial(profiles.sampled_deltas, between, rate)
    return Profile(deltas, deltas, replaced_without_replacement(mu, rate).largest)


def _between(mu: float, rate: float, base_is_far: bool, epsilon: np.ndarray) -> np.ndarray:
    r"""The difference of the record's Gaussian and a mixture of one at mu and one at 2 mu from it.

    All three are on one line, so that the largest difference is that of a half-line. With y the
    likelihood ratio of neighbours at its end, up to a constant,
    :math:`w_{far} y^2 + w_{near} e^{\mu^2/2} y = e^{-\varepsilon}`, and the shares are the two
    terms times :math:`e^\varepsilon`. A y that is not exact gives other shares, as valid. The
    outputs without the record are at 2 mu, and the others at mu, if `base_is_far`.
    """
    base = np.minimum((rate - 1) * np.expm1(-epsilon), 1.0)  # 1 - beta
    with np.errstate(divide="ignore"):
        far, near = np.log(base), np.log1p(-base)
    if not base_is_far:
        far, near = near, far
    linear = near + mu * mu / 2
    root = np.logaddexp(2 * linear, math.log(4) + far - epsilon) / 2
    log_y = math.log(2) - epsilon - np.logaddexp(linear, root)
    share = np.minimum(np.exp(far + epsilon + 2 * log_y), 1.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        at_far = epsilon + far - np.log(share)
        at_near = epsilon + near - np.log1p(-share)
    return _share_of(share, 2 * mu, at_far) + _share_of(1 - share, mu, at_near)


def _share_of(share: np.ndarray, mu: float, epsilon: np.ndarray) -> np.ndarray:
    """A share of the divergence of a Gaussian mechanism at any epsilon; 0 without a share."""
    epsilon = np.where(share > 0, epsilon, 0.0) - _ROUNDING
    of_mu = deltas_from_mu(mu, np.abs(epsilon))
    below_zero = -np.expm1(np.minimum(epsilon, 0.0)) + np.exp(np.minimum(epsilon, 0.0)) * of_mu
    return np.asarray(share * np.where(epsilon < 0, below_zero, of_mu))


def _sampled_divergences(
    profile: Profile, mu: float, apart: float, rate: float, orders: np.ndarray
) -> np.ndarray:
    r"""Upper bounds on the Renyi divergences of both directions.

    With the profiles f of (P, Q) and b of (Q, P)

    .. math::
        E_Q (P/Q)^\alpha = 1 + \alpha(\alpha-1) \Big[ \int_0^\infty e^{(\alpha-1)x} f(x)\,dx
        + \int_0^\infty e^{-\alpha x} b(x)\,dx \Big],

    and f, b lie below their polygons in :math:`e^x`. Where the first integral has not converged
    before f underflows, and where it is smaller, the mean over a coin that is revealed:
    :math:`1 - q + q e^{\alpha(\alpha-1)\mu^2/2}` (joint convexity).
    """
    flat = np.asarray(orders, dtype=np.float64).ravel()
    absent, joins = math.log1p(-rate), math.log(rate)
    exponents = flat * (flat - 1) * apart**2 / 2
    revealed = np.logaddexp(absent, joins + exponents) / (flat - 1)
    # The loss at which nothing is left that a double can hold.
    reach = float(np.logaddexp(absent, joins + 2 * mu * (mu + _FAR)))
    # As many for every mechanism, so that figures are smooth functions of its parameters.
    nodes = np.append(0.0, reach * _RATIO ** np.arange(-_COUNT, 1.0))
    forward = profile.forward(nodes)
    backward = forward if profile.is_symmetric else profile.backward(nodes)
    found = np.maximum(
        _divergences(flat, nodes, forward, backward), _divergences(flat, nodes, backward, forward)
    )
    return np.minimum(found, revealed).reshape(np.shape(orders))


def _divergences(
    orders: np.ndarray, nodes: np.ndarray, above: np.ndarray, below: np.ndarray
) -> np.ndarray:
    """Divergences of one direction, shape as `orders`; inf where the first integral diverges."""
    steps, order = np.diff(nodes), orders[:, None]
    power = order - 1
    with np.errstate(divide="ignore"):
        means, starts = np.log((above[:-1] + above[1:]) / 2), np.log(below[:-1])
    # Chebyshev's inequality: the polygon falls, e^((order - 2) x) rises if the order is at least 2.
    rising = power * nodes[1:] + np.log(-np.expm1(-power * steps) / power)
    rising += means + np.maximum(0.0, 2 - order) * steps
    falling = starts - order * nodes[:-1] + np.log(-np.expm1(-order * steps) / order)
    total = special.logsumexp(np.concatenate([rising, falling], axis=1), axis=1)
    # A double holds no more of the profile than about 38 standard deviations.
    last = rising[:, np.flatnonzero(np.isfinite(means))[-1]]
    moments = np.logaddexp(0.0, np.log(orders * (orders - 1)) + total) / (orders - 1)
    return np.asarray(np.where(last > total - _NEGLIGIBLE, math.inf, moments))
