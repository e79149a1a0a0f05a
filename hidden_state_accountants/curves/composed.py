"""Composition of curves of every kind."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import attrs
import numpy as np
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

from hidden_state_accountants.curves.base import (
    ORDERS,
    BestOfCurves,
    Curve,
    CurveWithDelta,
    GaussianCurve,
    GaussianMixtureCurve,
    RdpCurve,
    delta_from_rdp,
    epsilon_from_rdp,
)
from hidden_state_accountants.curves.standard import (
    LARGEST_PLD_EPSILON,
    STOCK_ORDERS,
    StandardCurve,
    StockEvent,
)

_QUICK = (GaussianCurve, GaussianMixtureCurve, RdpCurve)


def compose_curves(curves: Sequence[tuple[Curve, int]]) -> Curve:
    """The curve of independent mechanisms, each run `count` times.

    Gaussian curves add exactly, standard events stay together in one stock accountant, additive
    deltas add up; the rest is composed by privacy loss distributions and Renyi divergences.

    Raises:
        ValueError: The standard events have no stock accountant in common.
    """
    mu_squared, extra = 0.0, 0.0
    events: list[StockEvent] = []
    others: list[tuple[Curve, int]] = []
    curves = [(curve, count) for curve, count in curves if count and curve.mu != 0]
    for curve, count in curves:
        if isinstance(curve, BestOfCurves) and (len(curves) > 1 or count > 1):
            curve = curve.best()
        if isinstance(curve, CurveWithDelta):
            extra += count * curve.extra
            curve = curve.curve
        if isinstance(curve, StandardCurve):
            mu_squared += count * curve.gaussian_mu**2
            events += [attrs.evolve(part, count=count * part.count) for part in curve.events]
        elif isinstance(curve, ComposedCurve):
            others += [(part, count * times) for part, times in curve.parts]
        elif curve.mu is not None:
            mu_squared += count * curve.mu**2
        else:
            others.append((curve, count))
    mu = math.sqrt(mu_squared)
    total: Curve = GaussianCurve(mu)
    if mu < math.inf:
        if events:
            total = StandardCurve(tuple(events), gaussian_mu=mu)
        if others and others[0][1] == len(others) == 1 and not (mu or events):
            total = others[0][0]
        elif others:
            total = ComposedCurve((*others, *([(total, 1)] if mu or events else [])))
        if extra:
            total = CurveWithDelta(total, extra)
    return total


@attrs.frozen(slots=False, eq=False)
class ComposedCurve:
    """Curves composed by privacy loss distributions or Renyi divergences, whichever gives less.

    Attributes:
        parts: (curve, count) pairs.
    """

    parts: tuple[tuple[Curve, int], ...]

    @property
    def mu(self) -> None:
        """Not Gaussian."""
        return None

    @functools.cached_property
    def _orders(self) -> np.ndarray:
        # A sampled event takes seconds at an order that is large or not an integer.
        known_in_closed_form = all(isinstance(curve, _QUICK) for curve, _ in self.parts)
        return ORDERS if known_in_closed_form else STOCK_ORDERS

    @functools.cached_property
    def _divergences(self) -> np.ndarray:
        return self.rdp(self._orders)

    @functools.cached_property
    def _privacy_loss(self) -> PrivacyLossDistribution | None:
        if epsilon_from_rdp(self._orders, self._divergences, 1e-5) > LARGEST_PLD_EPSILON:
            if np.isfinite(self._divergences).any():
                return None
        total = None
        for curve, count in self.parts:
            part = curve.privacy_loss()
            if part is None:
                return None
            part = part.self_compose(count) if count > 1 else part
            total = part if total is None else total.compose(part)
        return total

    def epsilon(self, delta: float) -> float:
        epsilon = epsilon_from_rdp(self._orders, self._divergences, delta)
        if self._privacy_loss is not None:
            epsilon = min(epsilon, float(self._privacy_loss.get_epsilon_for_delta(delta)))
        return epsilon

    def delta(self, epsilon: float) -> float:
        delta = delta_from_rdp(self._orders, self._divergences, epsilon)
        if self._privacy_loss is not None:
            loss = self._privacy_loss
            delta = min(delta, float(loss.get_delta_for_epsilon(min(epsilon, 700.0))))
        return delta

    def rdp(self, orders: np.ndarray) -> np.ndarray:
        return sum(
            (count * curve.rdp(orders) for curve, count in self.parts), np.zeros(orders.shape)
        )

    def privacy_loss(self) -> PrivacyLossDistribution | None:
        """The composed privacy loss distribution, if every part has one."""
        return self._privacy_loss

    def to_dpevent(self) -> None:
        return None
