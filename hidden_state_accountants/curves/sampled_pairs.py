r"""Sampled Gaussian mechanisms in which both data sets have the record, or what became of it.

With probability 1 - q both outputs are drawn from P0, else the one from P1 and the other from Q1,
three Gaussians of one variance. By advanced joint convexity (Balle, Barthe, Gaboardi 2018, arXiv
1807.01647 v2, Theorem 2)

.. math::
    \delta\big(\log(1 + q(e^\varepsilon - 1))\big) \le q\,\big[(1-\beta)\,\delta_{|P_1 - P_0|}
    (\varepsilon) + \beta\,\delta_{|P_1 - Q_1|}(\varepsilon)\big], \qquad
    \beta = (1-q) e^{-\varepsilon} + q.

Where the distances differ, the two directions do: the pair is ordered, and composes with others of
the same order (docs/theory/random_distance.md).
"""

from __future__ import annotations

import functools
import math
from typing import ClassVar

import attrs
import numpy as np
from scipy import special

from hidden_state_accountants.curves import profiles
from hidden_state_accountants.curves.gaussian import deltas_from_mu
from hidden_state_accountants.curves.losses import Losses, losses_of
from hidden_state_accountants.curves.polygons import polygon
from hidden_state_accountants.curves.profiles import Deltas, Profile
from hidden_state_accountants.curves.renyi import STOCK_ORDERS
from hidden_state_accountants.curves.renyi_or_loss import RenyiOrLoss

_RATIO = 1.01  # of neighbouring nodes
_COUNT = 1600  # of nodes
_LARGEST_EXPONENT = 600.0  # a double holds exp(709)
_FAR = 36.0  # standard deviations of a Gaussian: 1e-283 of its mass is beyond
_NEGLIGIBLE = 25.0  # nats: how much less the last term of a sum has to be


def zeroed_without_replacement(mu: float, rate: float) -> Profile:
    """A record that takes a stand-in's place in a batch (`forward`), against one without gradient.

    Args:
        mu: The gradient bound over the noise: of the record, and of the stand-in.
        rate: The probability that the batch holds the record.
    """

    def smaller(epsilon: np.ndarray) -> np.ndarray:
        # The second one is that of a coin which is revealed: joint convexity, no more.
        joint = _joint(2 * mu, mu, rate, epsilon)
        return np.minimum(joint, rate * deltas_from_mu(mu, epsilon))

    forward = _hull(smaller, _reach(2 * mu, rate))
    backward = functools.partial(_joint, mu, mu, rate)
    return Profile(forward, backward, _largest(2 * mu, rate))


def replaced_in_poisson_batch(mu: float, rate: float) -> Profile:
    """A record that joins a batch or not, against another record that does.

    Args:
        mu: The gradient bound over the noise, of both records.
        rate: The probability that the record joins.
    """
    deltas = functools.partial(_joint, mu, 2 * mu, rate)
    return Profile(deltas, deltas, _largest(2 * mu, rate))


def _joint(to_base: float, apart: float, rate: float, epsilon: np.ndarray) -> np.ndarray:
    """The bound of the module's head; the mus |P1 - P0| and |P1 - Q1|."""

    def whole(inner: np.ndarray) -> np.ndarray:
        other = (rate - 1) * np.expm1(-inner)  # 1 - beta
        return np.asarray(
            other * deltas_from_mu(to_base, inner) + (1 - other) * deltas_from_mu(apart, inner)
        )

    return profiles.sampled_deltas(whole, rate, epsilon)


def _largest(mu: float, rate: float) -> float:
    return profiles.without_replacement(profiles.gaussian(mu), rate).largest


def _reach(mu: float, rate: float) -> float:
    """The loss at which nothing is left that a double can hold."""
    with np.errstate(divide="ignore"):
        rest = np.log1p(-rate)
    return float(np.logaddexp(rest, math.log(rate) + mu * (mu / 2 + _FAR)))


def _nodes(largest: float) -> np.ndarray:
    """As many for every mechanism, so that figures are smooth functions of its parameters."""
    return np.append(0.0, largest * _RATIO ** np.arange(-_COUNT, 1.0))


def _hull(deltas: Deltas, largest: float) -> Deltas:
    r"""The largest convex function of :math:`e^\varepsilon` below the values at some nodes.

    A profile is convex in it: one that lies below the values lies below their convex hull. The
    values themselves stand beyond the last node.
    """
    last = min(largest, _LARGEST_EXPONENT)
    nodes = _nodes(last)
    x, y = np.expm1(nodes), deltas(nodes)
    kept: list[int] = []
    for i in range(len(x)):
        while len(kept) > 1:
            a, b = kept[-2:]
            if (y[b] - y[a]) * (x[i] - x[b]) <= (y[i] - y[b]) * (x[b] - x[a]):
                break
            kept.pop()
        kept.append(i)
    on_hull = polygon(nodes[kept], y[kept])

    def below(epsilon: np.ndarray) -> np.ndarray:
        return np.where(epsilon < last, on_hull(epsilon), deltas(epsilon))

    return below


def sampled_rdp(
    profile: Profile, rate: float, apart: float, largest: float, orders: np.ndarray
) -> np.ndarray:
    r"""Upper bounds on the Renyi divergences of both directions of a sampled mechanism.

    With the profiles f of (P, Q) and b of (Q, P)

    .. math::
        E_Q (P/Q)^\alpha = 1 + \alpha(\alpha-1) \Big[ \int_0^\infty e^{(\alpha-1)x} f(x)\,dx
        + \int_0^\infty e^{-\alpha x} b(x)\,dx \Big],

    and f, b lie below their polygons in :math:`e^x`. Where the first integral has not converged
    before f underflows, and where it is smaller, the mean over a coin that is revealed:
    :math:`1 - q + q e^{\alpha(\alpha-1)\mu^2/2}` (joint convexity).

    Args:
        profile: Of the pair.
        rate: q, the probability that the record takes part.
        apart: mu, the distance of the outputs if it does.
        largest: The largest mu that the profile is made of.
        orders: > 1.
    """
    flat = np.asarray(orders, dtype=np.float64).ravel()
    exponents = flat * (flat - 1) * apart**2 / 2
    with np.errstate(divide="ignore"):
        revealed = np.logaddexp(np.log1p(-rate), math.log(rate) + exponents) / (flat - 1)
    nodes = _nodes(_reach(largest, rate))
    directions = [profile.forward(nodes)]
    directions.append(directions[0] if profile.is_symmetric else profile.backward(nodes))
    found = [
        [_divergence(order, nodes, above, below) for order in flat.tolist()]
        for above, below in (directions, directions[::-1])
    ]
    return np.minimum(np.max(found, axis=0), revealed).reshape(np.shape(orders))


def _divergence(order: float, nodes: np.ndarray, above: np.ndarray, below: np.ndarray) -> float:
    steps, power = np.diff(nodes), order - 1
    with np.errstate(divide="ignore"):
        means = np.log((above[:-1] + above[1:]) / 2)
        starts = np.log(below[:-1])
    # Chebyshev's inequality: the polygon falls, e^((order - 2) x) rises if the order is at least 2.
    rising = power * nodes[1:] + np.log(-np.expm1(-power * steps) / power)
    rising += means + max(0.0, 2 - order) * steps
    falling = starts - order * nodes[:-1] + np.log(-np.expm1(-order * steps) / order)
    total = special.logsumexp(np.concatenate([rising, falling]))
    # A double holds no more of the profile than about 38 standard deviations.
    last = rising[np.isfinite(rising)][-1]
    if last > total - _NEGLIGIBLE:
        return math.inf
    return float(np.logaddexp(0.0, math.log(order * power) + total)) / power


class _PairCurve(RenyiOrLoss):
    """One sampled mechanism.

    Attributes:
        record_mu: The gradient bound over the noise.
        rate: The probability that the record takes part.
    """

    record_mu: float
    rate: float
    apart: ClassVar[int]
    """How many `record_mu` the outputs are apart if the record takes part."""

    @property
    def mu(self) -> float | None:
        """If the record certainly takes part, or nothing private is left."""
        plain = self.rate == 1 or self.record_mu in (0, math.inf)
        return self.apart * self.record_mu if plain else None

    @property
    def profile(self) -> Profile:
        """Its privacy profile."""
        raise NotImplementedError

    @property
    def orders(self) -> np.ndarray:
        return STOCK_ORDERS

    def rdp(self, orders: np.ndarray) -> np.ndarray:
        mu = self.record_mu
        return sampled_rdp(self.profile, self.rate, self.apart * mu, 2 * mu, orders)

    def privacy_losses(self) -> Losses | None:
        return losses_of(self.profile)

    def to_dpevent(self) -> None:
        return None


@attrs.frozen(slots=False)
class ZeroedWithoutReplacementCurve(_PairCurve):
    """See `zeroed_without_replacement`."""

    record_mu: float
    rate: float
    apart = 1

    @property
    def profile(self) -> Profile:
        return zeroed_without_replacement(self.record_mu, self.rate)


@attrs.frozen(slots=False)
class ReplacedInPoissonBatchCurve(_PairCurve):
    """See `replaced_in_poisson_batch`."""

    record_mu: float
    rate: float
    apart = 2

    @property
    def profile(self) -> Profile:
        return replaced_in_poisson_batch(self.record_mu, self.rate)
