"""Events of dp-accounting beside ours, evaluated by its own PLD and RDP accountants."""

from __future__ import annotations

import functools
import math

import attrs
import dp_accounting
import numpy as np
from dp_accounting import NeighboringRelation, pld, rdp
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.rdp import rdp_privacy_accountant

from hidden_state_accountants import validate

_ADD_OR_REMOVE = NeighboringRelation.ADD_OR_REMOVE_ONE
_REPLACE_ONE = NeighboringRelation.REPLACE_ONE
_REPLACE_SPECIAL = NeighboringRelation.REPLACE_SPECIAL

STOCK_ORDERS = np.asarray(rdp_privacy_accountant.DEFAULT_RDP_ORDERS, dtype=np.float64)
# PLDAccountant (0.5.0 to 0.6.0) composes these once, whatever the count.
_PLD_IGNORES_THE_COUNT = ("RandomizedResponseDpEvent",)
# Beyond this epsilon the RDP figure is good enough and a PLD takes gigabytes.
LARGEST_PLD_EPSILON = 200.0


@attrs.frozen
class StockEvent:
    """A standard event, how often it runs, and the relation of the accountant that reads it."""

    event: dp_accounting.DpEvent
    count: int
    relation: NeighboringRelation


class _PldAccountant(pld.PLDAccountant):
    @property
    def privacy_loss(self) -> privacy_loss_distribution.PrivacyLossDistribution:
        """What is composed so far."""
        return self._pld


@attrs.frozen(slots=False)
class StandardCurve:
    """Standard events composed with mu-GDP: PLD or RDP, whichever gives less.

    Attributes:
        events: At least one; together they need one stock accountant that supports them all.
        gaussian_mu: The mu of a mechanism that runs as well.

    Raises:
        ValueError: No stock accountant evaluates all the events.
    """

    events: tuple[StockEvent, ...]
    gaussian_mu: float = 0.0

    def __attrs_post_init__(self) -> None:
        if not (self._rdp_supports() or self._pld_supports()):
            raise ValueError(
                "neither dp-accounting's PLD nor its RDP accountant supports all the events"
            )

    @property
    def mu(self) -> None:
        """Not Gaussian."""
        return None

    def _rdp_supports(self) -> bool:
        return all(
            rdp.RdpAccountant([2.0], part.relation).supports(part.event) for part in self.events
        )

    def _pld_supports(self) -> bool:
        relations = {part.relation for part in self.events}
        return len(relations) == 1 and all(
            pld.PLDAccountant(part.relation).supports(part.event)
            and (part.count <= 1 or type(part.event).__name__ not in _PLD_IGNORES_THE_COUNT)
            for part in self.events
        )

    @functools.cached_property
    def _renyi(self) -> np.ndarray | None:
        return self.rdp(STOCK_ORDERS) if self._rdp_supports() else None

    def privacy_loss(self) -> privacy_loss_distribution.PrivacyLossDistribution | None:
        """The composed privacy loss distribution, None where PLDAccountant does not apply."""
        return None if self._pld_accountant is None else self._pld_accountant.privacy_loss

    @functools.cached_property
    def _pld_accountant(self) -> _PldAccountant | None:
        if not self._pld_supports():
            return None
        if self._renyi is not None:
            if rdp.compute_epsilon(STOCK_ORDERS, self._renyi, 1e-5)[0] > LARGEST_PLD_EPSILON:
                return None
        relation = self.events[0].relation
        accountant = _PldAccountant(relation)
        for part in self.events:
            accountant.compose(part.event, part.count)
        if self.gaussian_mu:
            doubled = 2 if relation is _REPLACE_ONE and pld_doubles_gaussians() else 1
            accountant.compose(dp_accounting.GaussianDpEvent(doubled / self.gaussian_mu))
        return accountant

    def epsilon(self, delta: float) -> float:
        candidates = [math.inf]
        if self._renyi is not None:
            candidates.append(float(rdp.compute_epsilon(STOCK_ORDERS, self._renyi, delta)[0]))
        if self._pld_accountant is not None:
            candidates.append(float(self._pld_accountant.get_epsilon(delta)))
        return min(candidates)

    def delta(self, epsilon: float) -> float:
        if epsilon == math.inf:
            if self._renyi is not None and np.isfinite(self._renyi).any():
                return 0.0  # a finite divergence leaves no mass at infinity
            epsilon = 700.0  # delta only falls from there on
        candidates = [1.0]
        if self._renyi is not None:
            compute = rdp_privacy_accountant.compute_delta
            candidates.append(float(compute(STOCK_ORDERS, self._renyi, epsilon)[0]))
        if self._pld_accountant is not None:
            candidates.append(float(self._pld_accountant.get_delta(epsilon)))
        return min(candidates)

    def rdp(self, orders: np.ndarray) -> np.ndarray:
        if not self._rdp_supports():
            return np.full(orders.shape, math.inf)
        total = orders * self.gaussian_mu**2 / 2
        for part in self.events:
            accountant = rdp.RdpAccountant(orders.ravel().tolist(), part.relation)
            accountant.compose(part.event, part.count)
            total = total + accountant.rdp.reshape(orders.shape)
        return total

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


@functools.cache
def pld_doubles_gaussians() -> bool:
    """Whether PLDAccountant reads a Gaussian under REPLACE_ONE as sensitivity 2 (0.5.0 on)."""
    epsilons = [
        pld.PLDAccountant(relation, 1e-2)
        .compose(dp_accounting.GaussianDpEvent(1.0))
        .get_epsilon(1e-3)
        for relation in (_ADD_OR_REMOVE, _REPLACE_ONE)
    ]
    return epsilons[1] > 1.5 * epsilons[0]


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
    is halved here, or the event refused.
    """
    event = _with_noise(event, 1.0)
    name = type(event).__name__
    if relation is _REPLACE_SPECIAL and name in _ADDITIVE_NOISE:
        part = StockEvent(event, count, _ADD_OR_REMOVE)
    elif relation is not _REPLACE_ONE or name in _READ_RIGHT_UNDER_REPLACE_ONE:
        part = StockEvent(event, count, relation)
    elif isinstance(event, dp_accounting.LaplaceDpEvent):
        part = StockEvent(_with_noise(event, 0.5), count, _ADD_OR_REMOVE)
    elif isinstance(event, dp_accounting.SampledWithoutReplacementDpEvent):
        part = StockEvent(_with_noise(event, 0.5), count, relation)
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


def _nested(event: dp_accounting.DpEvent) -> list[dp_accounting.DpEvent]:
    """The events inside: those of a composition, or the one that is sampled or repeated."""
    if isinstance(event, dp_accounting.ComposedDpEvent):
        return list(event.events)
    inner = getattr(event, "event", None)
    return [inner] if isinstance(inner, dp_accounting.DpEvent) else []


def has_zero_noise(event: dp_accounting.DpEvent) -> bool:
    """Whether a Gaussian or Laplace event somewhere inside adds no noise."""
    return getattr(event, "noise_multiplier", None) == 0 or any(map(has_zero_noise, _nested(event)))


def _with_noise(event: dp_accounting.DpEvent, factor: float) -> dp_accounting.DpEvent:
    """The event with the noise of its Gaussian and Laplace parts scaled, as a float.

    Stock accountants lose the composition inside a sampled event if a multiplier is an int.
    """
    if isinstance(event, dp_accounting.GaussianDpEvent | dp_accounting.LaplaceDpEvent):
        return type(event)(float(event.noise_multiplier) * factor)
    if isinstance(event, dp_accounting.ComposedDpEvent):
        return dp_accounting.ComposedDpEvent([_with_noise(e, factor) for e in event.events])
    if _nested(event):
        return attrs.evolve(event, event=_with_noise(event.event, factor))
    return event
