"""Composition of curves of every kind."""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, TypeVar

import attrs
import dp_accounting
import numpy as np

from hidden_state_accountants.curves.base import (
    NEGLIGIBLE,
    BestOfCurves,
    Curve,
    CurveWithDelta,
    GaussianCurve,
    GaussianMixtureCurve,
    RdpCurve,
    failure,
)
from hidden_state_accountants.curves.fewer_mixtures import fewer_mixtures
from hidden_state_accountants.curves.losses import Losses, PrivacyLoss
from hidden_state_accountants.curves.renyi import ORDERS, STOCK_ORDERS
from hidden_state_accountants.curves.renyi_or_loss import RenyiOrLoss, power_of_two_below
from hidden_state_accountants.curves.standard import StandardCurve, StockEvent

_QUICK = (GaussianCurve, GaussianMixtureCurve, RdpCurve)
_SomeCurve = TypeVar("_SomeCurve", bound=Curve)


def compose_curves(curves: Sequence[tuple[Curve, int]]) -> Curve:
    """The curve of independent mechanisms, each run `count` times.

    Gaussian curves add exactly, standard events stay together in one stock accountant, additive
    deltas add up; the rest is composed by privacy loss distributions and Renyi divergences, where
    what is given several times is one mechanism that runs more often: a user composes a run again
    after each of its epochs.

    What may fail says nothing at a delta below its failure, where the rest that is proved counts.

    Raises:
        ValueError: The standard events have no stock accountant in common.
    """
    curves = [(curve, count) for curve, count in curves if count and curve.mu != 0]
    if len(curves) == 1 and curves[0][1] == 1:
        return _composed(curves)
    chosen = [(c.best() if isinstance(c, BestOfCurves) else c, count) for c, count in curves]
    total = _composed(chosen)
    if failure(total) <= NEGLIGIBLE:
        return total
    certain = [(c.certain() if isinstance(c, BestOfCurves) else c, count) for c, count in curves]
    known = [(c, count) for c, count in certain if c is not None and failure(c) <= NEGLIGIBLE]
    if len(known) < len(curves):  # what one of them may show is not bounded
        return total
    return BestOfCurves((total, _composed(known)))


def _composed(curves: Sequence[tuple[Curve, int]]) -> Curve:
    """As `compose_curves`, of one curve for each mechanism."""
    mu_squared, extra = 0.0, 0.0
    events: list[StockEvent] = []
    others: list[tuple[Curve, int]] = []
    mixtures: list[tuple[GaussianMixtureCurve, int]] = []
    for curve, count in curves:
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
        elif isinstance(curve, GaussianMixtureCurve):
            mixtures.append((curve, count))
        else:
            others.append((curve, count))
    others = [*_together(others), *fewer_mixtures(_together(mixtures))]
    events = _same_events(events)
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


def _together(parts: Iterable[tuple[_SomeCurve, int]]) -> list[tuple[_SomeCurve, int]]:
    """Every curve once, with all of its runs; curves are the same if they are one object."""
    counts: dict[int, tuple[_SomeCurve, int]] = {}
    for curve, count in parts:
        counts[id(curve)] = curve, counts.get(id(curve), (curve, 0))[1] + count
    return list(counts.values())


def _same_events(events: Iterable[StockEvent]) -> list[StockEvent]:
    """Equal events once, with all of their runs; one that cannot be hashed stays as it is."""
    found: dict[Hashable, StockEvent] = {}
    for part in events:
        key: Hashable = part.event, part.relation
        try:
            hash(key)
        except TypeError:  # a composition has a list of events
            key = id(part)
        count = found[key].count if key in found else 0
        found[key] = attrs.evolve(part, count=count + part.count)
    return list(found.values())


@functools.lru_cache(maxsize=8)  # a run that goes on repeats its steps; a loss can take 40 MB
def _losses(curve: Any) -> Losses | None:
    losses: Losses | None = curve.privacy_losses()
    return losses


@functools.lru_cache(maxsize=32)
def _divergences(curve: Any, orders: tuple[float, ...]) -> np.ndarray:
    return np.asarray(curve.rdp(np.array(orders)))


@functools.lru_cache(maxsize=4)
def _fewer_runs(parts: Any) -> ComposedCurve:
    return ComposedCurve(parts)


@attrs.frozen(slots=False, eq=False)
class ComposedCurve(RenyiOrLoss):
    """Curves composed by privacy losses or Renyi divergences, whichever gives less.

    Attributes:
        parts: (curve, count) pairs.
    """

    parts: tuple[tuple[Curve, int], ...]

    @property
    def mu(self) -> None:
        """Not Gaussian."""
        return None

    @property
    def orders(self) -> np.ndarray:
        known_in_closed_form = all(
            isinstance(curve, _QUICK) and np.array_equal(getattr(curve, "orders", ORDERS), ORDERS)
            for curve, _ in self.parts
        )
        return ORDERS if known_in_closed_form else STOCK_ORDERS

    def privacy_losses(self) -> Losses | None:
        composed: list[tuple[PrivacyLoss, int]] = []
        for curve, count in self.parts:
            part: Any = curve
            losses = _losses(part)
            if losses is None:
                return None
            composed += [(loss, count * times) for loss, times in losses]
        return tuple(composed)

    def fewer_runs(self) -> ComposedCurve | None:
        """A part of the composition, the same one for many counts; None if there are few runs."""
        counts = [(curve, power_of_two_below(count)) for curve, count in self.parts]
        parts = tuple((curve, count) for curve, count in counts if count)
        return _fewer_runs(parts) if parts else None

    def rdp(self, orders: np.ndarray) -> np.ndarray:
        flat = tuple(np.ravel(orders).tolist())
        parts: Any = self.parts
        total = sum(
            (count * _divergences(part, flat) for part, count in parts), np.zeros(len(flat))
        )
        return np.asarray(total).reshape(orders.shape)

    def to_dpevent(self) -> dp_accounting.DpEvent | None:
        events = [(curve.to_dpevent(), count) for curve, count in self.parts]
        known = [(event, count) for event, count in events if event is not None]
        if len(known) < len(events):
            return None
        return dp_accounting.ComposedDpEvent(
            [dp_accounting.SelfComposedDpEvent(event, count) for event, count in known]
        )
