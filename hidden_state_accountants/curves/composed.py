"""Composition of curves of every kind."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence

import attrs
import dp_accounting
import numpy as np

from hidden_state_accountants.curves.base import (
    ORDERS,
    STOCK_ORDERS,
    Curve,
    GaussianCurve,
    GaussianMixtureCurve,
    Known,
    LossCurve,
    RdpCurve,
    best_curve,
    smallest,
    with_delta,
)
from hidden_state_accountants.curves.losses import Losses, PrivacyLoss
from hidden_state_accountants.curves.standard import EventCurve, losses_compose

_DELTAS = (1e-3, 1e-6, 1e-9, 1e-12, 1e-15, 1e-30)  # at which the curves to compose are chosen
MOST = 30
"""Mixtures that are composed as they are."""

Mixtures = Sequence[tuple[GaussianMixtureCurve, int]]
"""(mixture, count) pairs."""


def compose_curves(curves: Sequence[tuple[Curve, int]]) -> Curve:
    """The curve of independent mechanisms, each run `count` times.

    Gaussian curves add exactly, standard events stay together in one stock accountant,
    probabilities of failure add up; the rest is composed by privacy losses, where what is given
    several times is one mechanism that runs more often. Of several curves of a mechanism those are
    composed that are the smallest at one of a few deltas: the best of these compositions counts.

    Raises:
        ValueError: The standard events have no stock accountant in common.
    """
    curves = [(curve, count) for curve, count in curves if count and curve.mu != 0]
    if len(curves) == 1 and curves[0][1] == 1:
        return curves[0][0]
    known, counts = [c.alternatives() for c, _ in curves], [count for _, count in curves]
    choices = [[_choice(single, delta) for single in known] for delta in _DELTAS]
    distinct = {tuple(id(curve) for curve, _ in choice): choice for choice in choices}
    composed = []
    for choice in distinct.values():
        failure = sum(count * p for (_, p), count in zip(choice, counts, strict=True))
        chosen = [(curve, count) for (curve, _), count in zip(choice, counts, strict=True)]
        composed.append(with_delta(_composed(chosen), failure))
    return best_curve(composed)


def _choice(known: Known, delta: float) -> tuple[Curve, float]:
    """The curve to compose with others, and its failure: the smallest at a delta, or likeliest."""
    telling = tuple(single for single in known if single[1] < delta)
    if not telling:
        return min(known, key=lambda single: single[1])
    return telling[0] if len(telling) == 1 else telling[smallest(telling, delta)[1]]


def _composed(curves: Sequence[tuple[Curve, int]]) -> Curve:
    """Does the work of `compose_curves`, for one curve for each mechanism."""
    mu_squared = 0.0
    counts: dict[Curve, int] = {}  # every curve once, with all of its runs
    for curve, count in _inside(curves):
        if curve.mu is not None:
            mu_squared += count * curve.mu**2
        else:
            counts[curve] = counts.get(curve, 0) + count
    gaussian = GaussianCurve(math.sqrt(mu_squared))
    if gaussian.mu == math.inf:
        return gaussian
    losses_compose(counts.items())
    mixtures = [(c, count) for c, count in counts.items() if isinstance(c, GaussianMixtureCurve)]
    parts = [part for part in counts.items() if not isinstance(part[0], GaussianMixtureCurve)]
    parts += fewer_mixtures(mixtures)
    parts += [(gaussian, 1)] if mu_squared or not parts else []
    return parts[0][0] if parts[0][1] == len(parts) == 1 else ComposedCurve(tuple(parts))


def _inside(curves: Iterable[tuple[Curve, int]]) -> Iterator[tuple[Curve, int]]:
    """Curves of the parts."""
    for curve, count in curves:
        if isinstance(curve, ComposedCurve):
            yield from ((part, count * times) for part, times in curve.parts)
        else:
            yield curve, count


@functools.lru_cache(maxsize=3)  # the steps of a run that goes on, and those of its window
def _losses_once(curve: Curve) -> Losses | None:
    return curve.privacy_losses()


def _losses(curve: Curve, count: int) -> Losses | None:
    if isinstance(curve, EventCurve) and curve.profile is None:
        return curve.stock_losses(count)
    once = _losses_once(curve)
    return None if once is None else tuple((loss, count * times) for loss, times in once)


@attrs.frozen(slots=False, eq=False)
class ComposedCurve(LossCurve):
    """(curve, count) pairs composed by privacy losses, or by Renyi divergences without one."""

    parts: tuple[tuple[Curve, int], ...]

    @property
    def largest_mu(self) -> float:
        return math.hypot(*(math.sqrt(count) * curve.largest_mu for curve, count in self.parts))

    @property
    def orders(self) -> np.ndarray:
        """Many where all divergences are quick."""
        are_quick = all(
            isinstance(curve, GaussianCurve | GaussianMixtureCurve)
            or (isinstance(curve, RdpCurve) and np.array_equal(curve.orders, ORDERS))
            for curve, _ in self.parts
        )
        return ORDERS if are_quick else STOCK_ORDERS

    def privacy_losses(self) -> Losses | None:
        if not losses_compose(self.parts):
            return None
        composed: list[tuple[PrivacyLoss, int]] = []
        for curve, count in self.parts:
            losses = _losses(curve, count)
            if losses is None:
                return None
            composed += losses
        return tuple(composed)

    def rdp(self, orders: np.ndarray) -> np.ndarray:
        parts = (count * curve.rdp(orders) for curve, count in self.parts)
        return np.asarray(sum(parts, np.zeros(np.shape(orders))))

    def to_dpevent(self) -> dp_accounting.DpEvent | None:
        events = []
        for curve, count in self.parts:
            event = curve.to_dpevent()
            if event is None:
                return None
            events.append(event if count == 1 else dp_accounting.SelfComposedDpEvent(event, count))
        return dp_accounting.ComposedDpEvent(events) if len(events) > 1 else events[0]


def fewer_mixtures(parts: Mixtures) -> list[tuple[GaussianMixtureCurve, int]]:
    """At most `MOST` mixtures, with counts, whose composition dominates that of `parts`.

    A mixture gets no less private if its quantile function u -> mu(u) grows anywhere, as the
    Gaussian pair of a smaller mu is a garbling of that of a larger one. Similar ones in size, the
    mean of mu**2, are grouped: half of the groups are about as wide in size, the other half about
    as frequent.
    """
    if len(parts) <= MOST:
        return list(parts)
    sizes = np.array([float(curve.weights @ curve.mus**2) for curve, _ in parts])
    if not (np.isfinite(sizes) & (sizes > 0)).all():
        return list(parts)
    ranks = np.argsort(np.argsort(sizes)) / len(sizes)
    spread = np.log(sizes / sizes.min())
    places = (ranks + spread / (spread.max() or 1.0)) / 2
    groups = np.minimum((places * MOST).astype(int), MOST - 1)
    return [_largest([parts[i] for i in np.flatnonzero(groups == g)]) for g in np.unique(groups)]


def _largest(parts: Mixtures) -> tuple[GaussianMixtureCurve, int]:
    """The mixture of the largest quantile function, as often as all of them together."""
    sums = [np.cumsum(curve.weights) for curve, _ in parts]
    levels = np.unique(np.concatenate(sums))
    mus = np.zeros(len(levels))
    for (curve, _), below in zip(parts, sums, strict=True):
        index = np.minimum(np.searchsorted(below, levels), len(below) - 1)
        np.maximum(mus, curve.mus[index], out=mus)
    smallest = min(curve.smallest_delta for curve, _ in parts)
    count = sum(count for _, count in parts)
    return GaussianMixtureCurve(np.diff(levels, prepend=0.0), mus, smallest), count
