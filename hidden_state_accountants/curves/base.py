"""Privacy curves: (epsilon, delta) pairs and Renyi divergences that hold together.

What a curve is, and the simple ones: Gaussian, a mean of Gaussian ones, by Renyi divergences, by
privacy losses, and the best of several.
"""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Callable, Iterable

import attrs
import dp_accounting
import numpy as np
from dp_accounting import rdp
from dp_accounting.rdp import rdp_privacy_accountant
from scipy import optimize, special

from hidden_state_accountants.curves import profiles
from hidden_state_accountants.curves.composed_loss import ComposedLoss
from hidden_state_accountants.curves.gaussian import delta_from_mu, deltas_from_mu, epsilon_from_mu
from hidden_state_accountants.curves.losses import Losses, losses_of

STOCK_ORDERS = np.asarray(rdp_privacy_accountant.DEFAULT_RDP_ORDERS, dtype=np.float64)
"""Those of dp-accounting: a sampled event takes seconds at others that are large or no integers."""
ORDERS = np.union1d(1 + np.geomspace(1e-3, 1e6, 400), STOCK_ORDERS)
"""The orders at which a curve that is known by its divergences alone is converted."""
_SMALLEST_DIVERGENCE = 1e-15  # dp-accounting takes the log of 1 - exp(-divergence)
_RELIABLE = 100.0  # times the mass of infinite losses: Renyi divergences are not below such deltas
_DELTA = 1e-6  # where curves of other kinds than Gaussian are compared
_MOST_EXACT = 8  # Gaussians that are evaluated at every loss of the grid


class Curve(abc.ABC):
    """A set of (epsilon, delta) pairs and Renyi divergences that hold together."""

    @property
    def mu(self) -> float | None:
        """The mu of mu-GDP, None if the curve is not Gaussian."""
        return None

    @property
    def largest_mu(self) -> float:
        """A mu whose Gaussian curve lies nowhere below this one; inf if none is known."""
        return math.inf if self.mu is None else self.mu

    @abc.abstractmethod
    def epsilon(self, delta: float) -> float:
        """Smallest known epsilon for delta in [0, 1]."""

    @abc.abstractmethod
    def delta(self, epsilon: float) -> float:
        """Smallest known delta for epsilon in [0, inf]."""

    def rdp(self, orders: np.ndarray) -> np.ndarray:
        """Upper bounds on the Renyi divergences of the orders; inf where none is known."""
        return np.full(np.shape(orders), math.inf)

    def privacy_losses(self) -> Losses | None:
        """Pessimistic privacy losses for composition, if the curve has some."""
        return None

    def to_dpevent(self) -> dp_accounting.DpEvent | None:
        """A standard event under ADD_OR_REMOVE_ONE whose curve is nowhere below this one, if any.

        The smallest that is known; it may be larger where no standard event has the curve.
        """
        return None

    def least_epsilon(self, delta: float) -> float:
        """A lower bound on `epsilon` that costs little."""
        return 0.0

    @property
    def quick(self) -> Curve:
        """A curve that is nowhere smaller, and little larger, for those who ask for many deltas."""
        return self

    def alternatives(self) -> Known:
        """Curves that hold of the mechanism at every delta: what may be composed."""
        return ((self, 0.0),)


Known = tuple[tuple[Curve, float], ...]
"""Curves of one mechanism, each with the probability that it does not hold, which adds to delta."""


@attrs.frozen
class GaussianCurve(Curve):
    """mu-GDP: the trade-off of one observation of N(0, 1) against N(mu, 1)."""

    mu: float

    def epsilon(self, delta: float) -> float:
        return epsilon_from_mu(self.mu, delta)

    def delta(self, epsilon: float) -> float:
        return delta_from_mu(self.mu, epsilon)

    def rdp(self, orders: np.ndarray) -> np.ndarray:
        return orders * self.mu**2 / 2

    def privacy_losses(self) -> Losses | None:
        return losses_of(profiles.gaussian(self.mu)) if 0 < self.mu < math.inf else None

    def to_dpevent(self) -> dp_accounting.DpEvent:
        if self.mu == 0:
            return dp_accounting.NoOpDpEvent()
        if self.mu == math.inf:
            return dp_accounting.NonPrivateDpEvent()
        return dp_accounting.GaussianDpEvent(1 / self.mu)


@attrs.frozen(eq=False, init=False)
class GaussianMixtureCurve(Curve):
    r"""The mean of Gaussian curves: a secret, data-independent choice decides which mu applies.

    .. math:: \delta(\varepsilon) = \sum_j p_j\, \delta_{\mu_j}(\varepsilon), \qquad
              D_\alpha = \frac{1}{\alpha - 1} \log \sum_j p_j\, e^{(\alpha-1)\alpha\mu_j^2/2}

    (joint convexity; the curve is that of the pair in which the choice j is revealed.)

    Args:
        weights: p_j >= 0 that sum to 1 up to rounding.
        mus: mu_j in [0, inf].
        smallest_delta: What its privacy loss takes for infinite; a smaller one makes it longer.
    """

    weights: np.ndarray
    mus: np.ndarray
    smallest_delta: float

    def __init__(self, weights: np.ndarray, mus: np.ndarray, smallest_delta: float = 1e-50):
        weights, mus = np.asarray(weights, dtype=np.float64), np.asarray(mus, dtype=np.float64)
        if not (abs(weights.sum() - 1) <= 1e-9 and (weights >= 0).all() and (mus >= 0).all()):
            raise ValueError(
                f"Expected weights >= 0 with sum 1 and mus >= 0, got sum {weights.sum()!r}."
            )
        mus, index = np.unique(mus[weights > 0], return_inverse=True)
        weights = np.bincount(index, weights=weights[weights > 0] / weights.sum())
        self.__attrs_init__(weights, mus, smallest_delta)

    @property
    def mu(self) -> float | None:
        """The common mu, if there is only one."""
        return self.largest_mu if len(self.mus) == 1 else None

    @property
    def largest_mu(self) -> float:
        """That of the worst choice."""
        return float(self.mus[-1])

    def epsilon(self, delta: float) -> float:
        if delta >= self.delta(0.0):
            return 0.0
        if delta == 0 or self.delta(math.inf) >= delta:
            return math.inf
        high = epsilon_from_mu(self.largest_mu, delta) if self.largest_mu < math.inf else 1.0
        while self.delta(high) > delta:
            high = 2 * high or 1e-15  # the weights may sum to a little more than 1

        def excess(epsilon: float) -> float:
            return math.log(max(self.delta(epsilon), 5e-324)) - math.log(delta)

        root = optimize.brentq(excess, 0.0, high, xtol=1e-13, rtol=1e-13)
        step = 1e-13
        while self.delta(root) > delta:  # round towards more epsilon, never less
            root += step * max(root, 1e-3)
            step *= 2
        return root

    def delta(self, epsilon: float) -> float:
        return min(1.0, float(self.weights @ deltas_from_mu(self.mus, epsilon)))

    def rdp(self, orders: np.ndarray) -> np.ndarray:
        orders = np.asarray(orders, dtype=np.float64)
        if self.largest_mu == math.inf:
            return np.full(orders.shape, math.inf)
        exponents = ((orders - 1) * orders / 2)[..., None] * self.mus**2
        direct = special.logsumexp(exponents, axis=-1, b=self.weights)
        with np.errstate(over="ignore"):  # the log of a sum next to 1 would cancel
            near_one = np.log1p(np.expm1(exponents) @ self.weights)
        return np.where(direct < 1, near_one, direct) / (orders - 1)

    def privacy_losses(self) -> Losses | None:
        if len(self.mus) > _MOST_EXACT or self.smallest_delta > 1e-50:
            return losses_of(profiles.many_gaussians(self.weights, self.mus, self.smallest_delta))
        if self.largest_mu == math.inf:
            return None
        return losses_of(profiles.gaussian_mixture(self.weights, self.mus))

    def to_dpevent(self) -> dp_accounting.DpEvent | None:
        return GaussianCurve(self.largest_mu).to_dpevent()  # that of the worst choice


# By Renyi divergences


def epsilon_from_rdp(orders: np.ndarray, divergences: np.ndarray, delta: float) -> float:
    """dp-accounting's conversion; inf where no divergence is finite."""
    finite = np.isfinite(divergences)
    if delta >= 1:
        return 0.0
    if not finite.any():
        return math.inf
    divergences = np.maximum(divergences[finite], _SMALLEST_DIVERGENCE)
    return float(rdp.compute_epsilon(orders[finite], divergences, delta)[0])


def delta_from_rdp(orders: np.ndarray, divergences: np.ndarray, epsilon: float) -> float:
    """dp-accounting's conversion; 1 where no divergence is finite."""
    finite = np.isfinite(divergences)
    if not finite.any():
        return 1.0
    if epsilon == math.inf:
        return 0.0  # a finite divergence leaves no mass at infinity
    divergences = np.maximum(divergences[finite], _SMALLEST_DIVERGENCE)
    return float(rdp_privacy_accountant.compute_delta(orders[finite], divergences, epsilon)[0])


@attrs.frozen(eq=False)
class RdpCurve(Curve):
    """A curve that is known by its Renyi divergences, `bound` of orders > 1, at the `orders`."""

    bound: Callable[[np.ndarray], np.ndarray]
    orders: np.ndarray = ORDERS

    def epsilon(self, delta: float) -> float:
        return epsilon_from_rdp(self.orders, self.rdp(self.orders), delta)

    def delta(self, epsilon: float) -> float:
        return delta_from_rdp(self.orders, self.rdp(self.orders), epsilon)

    def rdp(self, orders: np.ndarray) -> np.ndarray:
        return np.asarray(self.bound(np.asarray(orders, dtype=np.float64)), dtype=np.float64)


# By privacy losses


class LossCurve(Curve):
    """Epsilon and delta by composed privacy losses, which add the error of their arithmetic.

    Where no loss is known, or is of no use at so small a delta, by Renyi divergences; never above
    the Gaussian curve of `largest_mu`.
    """

    @property
    def orders(self) -> np.ndarray:
        """The Renyi orders to convert from."""
        return STOCK_ORDERS

    @functools.cached_property
    def _composed(self) -> ComposedLoss | None:
        parts = self.privacy_losses()
        return None if parts is None else ComposedLoss(parts)

    @functools.cached_property
    def _divergences(self) -> np.ndarray:
        return self.rdp(self.orders)

    def least_epsilon(self, delta: float) -> float:
        if self._composed is None or not delta > _RELIABLE * self._composed.infinite:
            return 0.0  # Renyi divergences may be smaller
        least = self._composed.least_epsilon(delta)
        return min(least, epsilon_from_mu(self.largest_mu, delta))

    def epsilon(self, delta: float) -> float:
        by_loss = math.inf if self._composed is None else self._composed.epsilon(delta)
        by_loss = min(by_loss, epsilon_from_mu(self.largest_mu, delta))
        if self._composed and by_loss < math.inf and delta > _RELIABLE * self._composed.infinite:
            return by_loss
        return min(by_loss, epsilon_from_rdp(self.orders, self._divergences, delta))

    def delta(self, epsilon: float) -> float:
        by_loss = 1.0 if self._composed is None else self._composed.delta(epsilon)
        by_loss = min(by_loss, delta_from_mu(self.largest_mu, epsilon))
        if self._composed and _RELIABLE * self._composed.infinite < by_loss < 1:
            return by_loss
        return min(by_loss, delta_from_rdp(self.orders, self._divergences, epsilon))


# The best of several


@attrs.frozen(eq=False)
class BestOfCurves(Curve):
    """Several curves of one mechanism, none of which is the best of others: the smallest counts."""

    known: Known

    def epsilon(self, delta: float) -> float:
        return smallest(self.known, delta)[0]

    def least_epsilon(self, delta: float) -> float:
        return min(_least_epsilons(self.known, delta), default=(math.inf, 0))[0]

    @property
    def quick(self) -> Curve:
        return _best_of((curve.quick, failure) for curve, failure in self.known)

    def delta(self, epsilon: float) -> float:
        return min(1.0, *(curve.delta(epsilon) + failure for curve, failure in self.known))

    def rdp(self, orders: np.ndarray) -> np.ndarray:
        sure = [curve.rdp(orders) for curve, failure in self.known if not failure]
        return np.min([*sure, np.full(np.shape(orders), math.inf)], axis=0)

    def to_dpevent(self) -> dp_accounting.DpEvent | None:
        sure = (curve for curve, failure in self.known if not failure)
        by_epsilon = sorted(sure, key=lambda curve: curve.epsilon(_DELTA))
        events = (curve.to_dpevent() for curve in by_epsilon)
        return next((event for event in events if event is not None), None)

    def alternatives(self) -> Known:
        inside = [(*own, failure) for curve, failure in self.known for own in curve.alternatives()]
        return known_of(_best_of((curve, own + failure) for curve, own, failure in inside))


def known_of(curve: Curve) -> Known:
    """The curves that hold of the mechanism of a curve."""
    return curve.known if isinstance(curve, BestOfCurves) else ((curve, 0.0),)


def best_curve(curves: Iterable[Curve]) -> Curve:
    """The best of curves of one mechanism, at least one."""
    return _best_of(single for curve in curves for single in known_of(curve))


def with_delta(curve: Curve, extra: float) -> Curve:
    """A curve that holds except with probability `extra`, which adds to every delta."""
    return _best_of((single, failure + extra) for single, failure in known_of(curve))


def _best_of(known: Iterable[tuple[Curve, float]]) -> Curve:
    """Every curve once, with its smallest failure."""
    found: dict[int, tuple[Curve, float]] = {}
    for single, failure in known:
        if id(single) not in found or failure < found[id(single)][1]:
            found[id(single)] = single, failure
    (first, failure), *others = found.values()
    return BestOfCurves(tuple(found.values())) if others or failure else first


def _least_epsilons(curves: Known, delta: float) -> list[tuple[float, int]]:
    """Lower bounds on the epsilons of those that say anything at a delta, with their places."""
    return [
        (curve.least_epsilon(delta - failure), place)
        for place, (curve, failure) in enumerate(curves)
        if delta > failure or not failure
    ]


def smallest(curves: Known, delta: float) -> tuple[float, int]:
    """The smallest epsilon, and the place of the first curve that has it.

    A curve that cannot be smaller than another one is not worked out.
    """
    best = math.inf, len(curves)
    for least, place in sorted(_least_epsilons(curves, delta)):
        if least <= best[0]:
            curve, failure = curves[place]
            best = min(best, (curve.epsilon(delta - failure), place))
    return best


def is_smaller(curve: Curve, other: Curve) -> bool:
    """Returns whether a curve's epsilon is smaller at a delta at which both of them say something.

    What may fail says nothing at a delta below its failure, and may still be smaller above.
    """
    failures = (min(failure for _, failure in known_of(either)) for either in (curve, other))
    delta = min(1.0, _DELTA + max(failures))
    return smallest(((other, 0.0), (curve, 0.0)), delta)[1] == 1
