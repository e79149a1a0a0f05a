"""Events of dp-accounting beside ours, by privacy losses or by Renyi divergences."""

from __future__ import annotations

import functools
import itertools
import math

import attrs
import dp_accounting
import numpy as np
from dp_accounting import NeighboringRelation, rdp

from hidden_state_accountants import validate
from hidden_state_accountants.curves import profiles
from hidden_state_accountants.curves.event_losses import (
    event_losses,
    event_profile,
    is_sampled_gaussian,
    pair_curve,
    stock_pld_supports,
)
from hidden_state_accountants.curves.losses import Losses, losses_of
from hidden_state_accountants.curves.renyi import STOCK_ORDERS
from hidden_state_accountants.curves.renyi_or_loss import RenyiOrLoss, power_of_two_below

_ADD_OR_REMOVE = NeighboringRelation.ADD_OR_REMOVE_ONE
_REPLACE_ONE = NeighboringRelation.REPLACE_ONE
_REPLACE_SPECIAL = NeighboringRelation.REPLACE_SPECIAL


@attrs.frozen
class StockEvent:
    """A standard event, how often it runs, and the relation of the accountant that reads it."""

    event: dp_accounting.DpEvent
    count: int
    relation: NeighboringRelation


@attrs.frozen(slots=False)
class StandardCurve(RenyiOrLoss):
    """Standard events composed with mu-GDP: by privacy losses or by RDP, whichever gives less.

    Attributes:
        events: At least one; the divergences of all are known, or the loss of each is.
        gaussian_mu: The mu of a mechanism that runs as well.

    Raises:
        ValueError: Neither is true.
    """

    events: tuple[StockEvent, ...]
    gaussian_mu: float = 0.0

    def __attrs_post_init__(self) -> None:
        if not (self._rdp_supports() or self._losses_are_known()):
            raise ValueError(
                "neither dp-accounting's PLD nor its RDP accountant supports all the events"
            )

    @property
    def mu(self) -> None:
        """Not Gaussian."""
        return None

    @property
    def orders(self) -> np.ndarray:
        return STOCK_ORDERS

    def _rdp_supports(self) -> bool:
        return all(
            pair_curve(part.event, part.relation) is not None
            or rdp.RdpAccountant([2.0], part.relation).supports(part.event)
            for part in self.events
        )

    def _losses_are_known(self) -> bool:
        # Pairs that are not symmetric compose in one order, that of a common relation. A record
        # that is zeroed and one that is removed have one order: the data set that has it is first.
        relations = set()
        for part in self.events:
            profile = event_profile(part.event, part.relation)
            if profile is None and not stock_pld_supports(part.event, part.count, part.relation):
                return False
            if profile is None or not profile.is_symmetric:
                zeroed = part.relation is _REPLACE_SPECIAL
                relations.add(_ADD_OR_REMOVE if zeroed else part.relation)
        return len(relations) <= 1

    def privacy_losses(self) -> Losses | None:
        if not self._losses_are_known():
            return None
        found = [event_losses(part.event, part.count, part.relation) for part in self.events]
        if self.gaussian_mu:
            found.append(losses_of(profiles.gaussian(self.gaussian_mu)))
        known = [losses for losses in found if losses is not None]
        return tuple(itertools.chain.from_iterable(known)) if len(known) == len(found) else None

    def rdp(self, orders: np.ndarray) -> np.ndarray:
        if not self._rdp_supports():
            return np.full(orders.shape, math.inf)
        total = orders * self.gaussian_mu**2 / 2
        for part in self.events:
            pair = pair_curve(part.event, part.relation)
            if pair is not None:
                total = total + part.count * pair.rdp(orders)
                continue
            if is_sampled_gaussian(part.event):  # a run that goes on repeats its steps
                once = _divergences_of_a_step(part.event, part.relation, tuple(orders.ravel()))
                total = total + (part.count * once).reshape(orders.shape)
                continue
            accountant = rdp.RdpAccountant(orders.ravel().tolist(), part.relation)
            accountant.compose(part.event, part.count)
            total = total + accountant.rdp.reshape(orders.shape)
        return total

    def fewer_runs(self) -> StandardCurve | None:
        """A part of the composition, the same one for many counts; None if there are few runs."""
        events = [part for part in self.events if is_sampled_gaussian(part.event)]
        counts = [power_of_two_below(part.count) for part in events]
        kept = [attrs.evolve(e, count=n) for e, n in zip(events, counts, strict=True) if n]
        return _fewer_runs(tuple(kept)) if kept else None

    def to_dpevent(self) -> dp_accounting.DpEvent | None:
        if any(part.relation is not _ADD_OR_REMOVE for part in self.events):
            return None
        parts = [
            part.event
            if part.count == 1
            else dp_accounting.SelfComposedDpEvent(part.event, part.count)
            for part in self.events
        ]
        if self.gaussian_mu:
            parts.append(dp_accounting.GaussianDpEvent(1 / self.gaussian_mu))
        return parts[0] if len(parts) == 1 else dp_accounting.ComposedDpEvent(parts)


@functools.lru_cache(maxsize=4)
def _fewer_runs(events: tuple[StockEvent, ...]) -> StandardCurve:
    return StandardCurve(events)


@functools.lru_cache(maxsize=64)
def _divergences_of_a_step(
    event: dp_accounting.DpEvent, relation: NeighboringRelation, orders: tuple[float, ...]
) -> np.ndarray:
    accountant = rdp.RdpAccountant(orders, relation)
    accountant.compose(event)
    return np.asarray(accountant.rdp)


def gaussian_event_mu(event: dp_accounting.GaussianDpEvent, relation: NeighboringRelation) -> float:
    """mu of a user's Gaussian event, whose noise multiplier is std / clip norm of a sum.

    Under REPLACE_ONE the sum moves by two clip norms. (PLDAccountant agrees from 0.5.0 on,
    RdpAccountant does not; google/differential-privacy issue 378.)

    Raises:
        TypeError, ValueError: The noise multiplier is not a number >= 0.
    """
    noise = validate.real("noise_multiplier", event.noise_multiplier, minimum=0, allow_inf=True)
    if noise == 0:
        return math.inf
    return (2.0 if relation is _REPLACE_ONE else 1.0) / noise


def read_standard_event(
    event: dp_accounting.DpEvent, count: int, relation: NeighboringRelation
) -> StockEvent | str:
    """Translates a user's event under `relation` for a stock accountant, or says why not.

    Zeroing a record is adding or removing it where the event is additive noise on a sum. Under
    REPLACE_ONE the sensitivity doubles, which not every stock accountant does by itself: its noise
    is halved here, or the event refused. In a batch of fixed size a zeroed record still takes the
    place of another one, so that it counts as a replacement where it has no curve of its own.
    """
    event = _with_noise(event, 1.0)
    name = type(event).__name__
    if pair_curve(event, relation) is not None:
        return StockEvent(event, count, relation)
    if isinstance(event, dp_accounting.SampledWithoutReplacementDpEvent):
        if relation is _ADD_OR_REMOVE:
            return (
                f"{name} under ADD_OR_REMOVE_ONE: its number of records is fixed. "
                "Use REPLACE_SPECIAL or REPLACE_ONE."
            )
        part = StockEvent(_with_noise(event, 0.5), count, _REPLACE_ONE)
    elif relation is _REPLACE_SPECIAL and name in _ADDITIVE_NOISE:
        part = StockEvent(event, count, _ADD_OR_REMOVE)
    elif relation is not _REPLACE_ONE or name in _READ_RIGHT_UNDER_REPLACE_ONE:
        part = StockEvent(event, count, relation)
    elif isinstance(event, dp_accounting.LaplaceDpEvent):
        part = StockEvent(_with_noise(event, 0.5), count, _ADD_OR_REMOVE)
    else:
        return (
            f"{name} under REPLACE_ONE: unknown, or the stock accountants do not agree on its "
            "sensitivity. Use REPLACE_SPECIAL."
        )
    try:
        StandardCurve((part,))
    except ValueError as error:
        return f"Unsupported event: {error}."
    return part


_ADDITIVE_NOISE = ("LaplaceDpEvent", "PoissonSampledDpEvent")
# Types (some exist from dp-accounting 0.5.0 on) whose stock accounting takes REPLACE_ONE itself.
_READ_RIGHT_UNDER_REPLACE_ONE = (
    "PoissonSampledDpEvent",
    "RandomizedResponseDpEvent",
    "TruncatedSubsampledGaussianDpEvent",
    "ZCDpEvent",
)


def nested_events(event: dp_accounting.DpEvent) -> list[dp_accounting.DpEvent]:
    """The events inside: those of a composition, or the one that is sampled or repeated."""
    if isinstance(event, dp_accounting.ComposedDpEvent):
        return list(event.events)
    inner = getattr(event, "event", None)
    return [inner] if isinstance(inner, dp_accounting.DpEvent) else []


def has_zero_noise(event: dp_accounting.DpEvent) -> bool:
    """Whether a Gaussian or Laplace event somewhere inside adds no noise."""
    is_silent = getattr(event, "noise_multiplier", None) == 0
    return is_silent or any(map(has_zero_noise, nested_events(event)))


def _with_noise(event: dp_accounting.DpEvent, factor: float) -> dp_accounting.DpEvent:
    """The event with the noise of its Gaussian and Laplace parts scaled, as a float.

    Stock accountants lose the composition inside a sampled event if a multiplier is an int.
    """
    if isinstance(event, dp_accounting.GaussianDpEvent | dp_accounting.LaplaceDpEvent):
        return type(event)(float(event.noise_multiplier) * factor)
    if isinstance(event, dp_accounting.ComposedDpEvent):
        return dp_accounting.ComposedDpEvent([_with_noise(e, factor) for e in event.events])
    if nested_events(event):
        return attrs.evolve(event, event=_with_noise(event.event, factor))
    return event
