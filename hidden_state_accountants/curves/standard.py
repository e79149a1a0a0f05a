"""Events of dp-accounting beside ours, by privacy losses or by Renyi divergences."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import attrs
import dp_accounting
import numpy as np
from dp_accounting import NeighboringRelation, pld, rdp
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

from hidden_state_accountants import validate
from hidden_state_accountants.curves import profiles
from hidden_state_accountants.curves.base import Curve, GaussianCurve, LossCurve
from hidden_state_accountants.curves.by_profile import (
    replaced_in_poisson_batch,
    sampled_curve,
    zeroed_without_replacement,
)
from hidden_state_accountants.curves.losses import Losses, losses_of, stock_loss

_ADD_OR_REMOVE = NeighboringRelation.ADD_OR_REMOVE_ONE
_REPLACE_ONE = NeighboringRelation.REPLACE_ONE
_REPLACE_SPECIAL = NeighboringRelation.REPLACE_SPECIAL


def _hashable(event: dp_accounting.DpEvent) -> Any:
    """The event; its id if it cannot be hashed: a composition has a list of events."""
    try:
        hash(event)
    except TypeError:
        return id(event)
    return event


@attrs.frozen(slots=False)
class EventCurve(LossCurve):
    """A standard event, read under a relation: by privacy losses, or by RDP where none is known."""

    event: dp_accounting.DpEvent = attrs.field(eq=_hashable)
    relation: NeighboringRelation

    @functools.cached_property
    def profile(self) -> profiles.Profile | None:
        """Its privacy profile, if it is known."""
        return _profile(self.event, self.relation)

    @property
    def largest_mu(self) -> float:
        """That of a sampled Gaussian if nothing is drawn (`sampled_curve`)."""
        pair = _sampled_pair(self.event, self.relation)
        if pair is not None:
            return sampled_curve(*pair).largest_mu
        return _gaussian_mu(getattr(self.event, "event", None)) if self.profile else math.inf

    @property
    def rdp_is_known(self) -> bool:
        """True if there are divergences."""
        if _sampled_pair(self.event, self.relation) is not None:
            return True
        return bool(rdp.RdpAccountant([2.0], self.relation).supports(self.event))

    def privacy_losses(self) -> Losses | None:
        if not losses_compose([(self, 1)]):
            return None
        return self.stock_losses(1) if self.profile is None else losses_of(self.profile)

    def stock_losses(self, count: int) -> Losses:
        """By PLDAccountant, whose error is added, of `count` runs."""
        stock = _PldAccountant(self.relation).compose(self.event, count).privacy_loss
        return ((stock_loss(stock, stock_pld_error(count)), 1),)

    def rdp(self, orders: np.ndarray) -> np.ndarray:
        pair = _sampled_pair(self.event, self.relation)
        if pair is not None:
            return sampled_curve(*pair).rdp(orders)
        if not self.rdp_is_known:
            return np.full(orders.shape, math.inf)
        accountant = rdp.RdpAccountant(orders.ravel().tolist(), self.relation)
        accountant.compose(self.event)
        return np.asarray(accountant.rdp).reshape(orders.shape)

    def to_dpevent(self) -> dp_accounting.DpEvent | None:
        return self.event if self.relation is _ADD_OR_REMOVE else None


def losses_compose(curves: Iterable[tuple[Curve, int]]) -> bool:
    """Returns whether all events among (curve, count) pairs have losses that compose.

    Pairs that are not symmetric compose in one order, that of a common relation. A record that is
    zeroed and one that is removed have one order: the data set that has it is first.

    Raises:
        ValueError: The losses do not compose, and not all have divergences.
    """
    events = [(curve, count) for curve, count in curves if isinstance(curve, EventCurve)]
    are_known, orders = True, set()
    for part, count in events:
        if part.profile is None:
            are_known &= _stock_pld_supports(part.event, count, part.relation)
        if part.profile is None or not part.profile.is_symmetric:
            orders.add(_ADD_OR_REMOVE if part.relation is _REPLACE_SPECIAL else part.relation)
    if are_known and len(orders) <= 1:
        return True
    if not all(part.rdp_is_known for part, _ in events):
        raise ValueError(
            "neither dp-accounting's PLD nor its RDP accountant supports all the events"
        )
    return False


def standard_curve(
    event: dp_accounting.DpEvent, count: int, relation: NeighboringRelation
) -> Curve:
    """The curve of a user's event that is no composition, under `relation`, each time it runs.

    Raises:
        TypeError, ValueError: It cannot be read under the relation; the text says why.
    """
    if isinstance(event, dp_accounting.NoOpDpEvent):
        return GaussianCurve(0.0)
    if isinstance(event, dp_accounting.GaussianDpEvent):
        # The noise multiplier is std / clip norm of a sum, which a replacement moves by two clip
        # norms. (PLDAccountant agrees from 0.5.0 on, RdpAccountant does not;
        # google/differential-privacy issue 378.)
        noise = validate.real("noise_multiplier", event.noise_multiplier, minimum=0, allow_inf=True)
        if noise:
            return GaussianCurve((2.0 if relation is _REPLACE_ONE else 1.0) / noise)
    if isinstance(event, dp_accounting.NonPrivateDpEvent) or has_zero_noise(event):
        return GaussianCurve(math.inf)
    curve = _event_curve(event, relation)
    losses_compose([(curve, count)])
    return curve


def _event_curve(event: dp_accounting.DpEvent, relation: NeighboringRelation) -> EventCurve:
    """Translates a user's event under `relation` for a stock accountant.

    Zeroing a record is adding or removing it where the event is additive noise on a sum. Under
    REPLACE_ONE the sensitivity doubles, which not every stock accountant does by itself: its noise
    is halved here, or the event refused. In a batch of fixed size a zeroed record still takes the
    place of another one, so that it counts as a replacement where it has no curve of its own.
    """
    event = _with_noise(event, 1.0)
    name = type(event).__name__
    if _sampled_pair(event, relation) is not None:
        return EventCurve(event, relation)
    if isinstance(event, dp_accounting.SampledWithoutReplacementDpEvent):
        if relation is _ADD_OR_REMOVE:
            raise ValueError(
                f"{name} under ADD_OR_REMOVE_ONE: its number of records is fixed. "
                "Use REPLACE_SPECIAL or REPLACE_ONE."
            )
        return EventCurve(_with_noise(event, 0.5), _REPLACE_ONE)
    if relation is _REPLACE_SPECIAL and name in ("LaplaceDpEvent", "PoissonSampledDpEvent"):
        return EventCurve(event, _ADD_OR_REMOVE)
    if relation is not _REPLACE_ONE or name in _READ_RIGHT_UNDER_REPLACE_ONE:
        return EventCurve(event, relation)
    if isinstance(event, dp_accounting.LaplaceDpEvent):
        return EventCurve(_with_noise(event, 0.5), _ADD_OR_REMOVE)
    raise ValueError(
        f"{name} under REPLACE_ONE: unknown, or the stock accountants do not agree on its "
        "sensitivity. Use REPLACE_SPECIAL."
    )


# Types (some exist from dp-accounting 0.5.0 on) whose stock accounting takes REPLACE_ONE itself.
_READ_RIGHT_UNDER_REPLACE_ONE = (
    "PoissonSampledDpEvent",
    "RandomizedResponseDpEvent",
    "TruncatedSubsampledGaussianDpEvent",
    "ZCDpEvent",
)


def _nested_events(event: dp_accounting.DpEvent) -> list[dp_accounting.DpEvent]:
    """The events inside: those of a composition, or the one that is sampled or repeated."""
    if isinstance(event, dp_accounting.ComposedDpEvent):
        return list(event.events)
    inner = getattr(event, "event", None)
    return [inner] if isinstance(inner, dp_accounting.DpEvent) else []


def has_zero_noise(event: dp_accounting.DpEvent) -> bool:
    """Returns whether a Gaussian or Laplace event somewhere inside adds no noise."""
    is_silent = getattr(event, "noise_multiplier", None) == 0
    return is_silent or any(map(has_zero_noise, _nested_events(event)))


def _with_noise(event: dp_accounting.DpEvent, factor: float) -> dp_accounting.DpEvent:
    """The event with its noise scaled, as a float: an int costs stock accountants a composition."""
    if isinstance(event, dp_accounting.GaussianDpEvent | dp_accounting.LaplaceDpEvent):
        return type(event)(float(event.noise_multiplier) * factor)
    if isinstance(event, dp_accounting.ComposedDpEvent):
        return dp_accounting.ComposedDpEvent([_with_noise(e, factor) for e in event.events])
    if _nested_events(event):
        return attrs.evolve(event, event=_with_noise(event.event, factor))
    return event


def _sampled_pair(
    event: dp_accounting.DpEvent, relation: NeighboringRelation
) -> tuple[Callable[[float, float], profiles.Profile], float, float] | None:
    """Pair of `sampled_curve` for a sampled Gaussian in which both data sets move; None for others.

    No stock accountant knows these: a record that is zeroed in a batch of fixed size, and one that
    is replaced in a Poisson batch. The noise multiplier is one over the largest contribution of a
    record. Where the pair is not symmetric, the data set that has the record comes first.
    """
    has_fixed_size = isinstance(event, dp_accounting.SampledWithoutReplacementDpEvent)
    is_poisson = isinstance(event, dp_accounting.PoissonSampledDpEvent)
    if not (has_fixed_size and relation is _REPLACE_SPECIAL) and not (
        is_poisson and relation is _REPLACE_ONE
    ):
        return None
    mu, rate = _gaussian_mu(event.event), _rate(event)
    if not (0 < mu < math.inf and 0 < rate <= 1):
        return None
    return (zeroed_without_replacement if has_fixed_size else replaced_in_poisson_batch), mu, rate


def _profile(
    event: dp_accounting.DpEvent, relation: NeighboringRelation
) -> profiles.Profile | None:
    """The privacy profile of a sampled Gaussian or of a Laplace mechanism; None for all others.

    Exact under ADD_OR_REMOVE_ONE for Laplace noise and Poisson sampling, where the data set that
    has the record is P, and under REPLACE_ONE for sampling without replacement; an upper bound for
    a `sampled_curve`. The noise multiplier is one over the sensitivity under that relation.
    """
    pair = _sampled_pair(event, relation)
    if pair is not None:
        of, mu, rate = pair
        return of(mu, rate)
    if isinstance(event, dp_accounting.LaplaceDpEvent) and relation is _ADD_OR_REMOVE:
        return profiles.laplace(event.noise_multiplier) if event.noise_multiplier > 0 else None
    is_poisson = isinstance(event, dp_accounting.PoissonSampledDpEvent)
    if is_poisson and relation is _ADD_OR_REMOVE:
        whole, sampled = _profile(event.event, relation), profiles.poisson
    elif relation is _REPLACE_ONE and isinstance(
        event, dp_accounting.SampledWithoutReplacementDpEvent
    ):
        whole, sampled = None, profiles.without_replacement
    else:
        return None
    mu, rate = _gaussian_mu(event.event), _rate(event)
    if whole is None and 0 < mu < math.inf:
        whole = profiles.gaussian(mu)
    return sampled(whole, rate) if whole and whole.is_symmetric and 0 < rate <= 1 else None


def _rate(event: dp_accounting.DpEvent) -> float:
    """The probability that a batch holds a record."""
    if isinstance(event, dp_accounting.PoissonSampledDpEvent):
        return float(event.sampling_probability)
    return float(event.sample_size / event.source_dataset_size)


def _gaussian_mu(event: dp_accounting.DpEvent | None) -> float:
    """The mu of Gaussian events that are composed; inf if there is anything else, or no noise."""
    if isinstance(event, dp_accounting.GaussianDpEvent):
        return 1 / event.noise_multiplier if event.noise_multiplier > 0 else math.inf
    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        return math.sqrt(event.count) * _gaussian_mu(event.event)
    if isinstance(event, dp_accounting.ComposedDpEvent):
        return math.hypot(*map(_gaussian_mu, event.events))
    return math.inf


class _PldAccountant(pld.PLDAccountant):
    @property
    def privacy_loss(self) -> PrivacyLossDistribution:
        """Privacy loss of what is composed so far."""
        return self._pld


def _stock_pld_supports(
    event: dp_accounting.DpEvent, count: int, relation: NeighboringRelation
) -> bool:
    # PLDAccountant (0.5.0 to 0.6.0) composes randomised response once, whatever the count.
    ignores_the_count = type(event).__name__ == "RandomizedResponseDpEvent"
    return pld.PLDAccountant(relation).supports(event) and (count <= 1 or not ignores_the_count)


def stock_pld_error(count: int) -> float:
    """Bound on the error of PLDAccountant's deltas after `count` compositions.

    Not proven: a hundred times the errors of its Fourier transforms that have been observed, which
    were up to 6e-14 after 1000 compositions.
    """
    return 1e-14 * (count + 100)
