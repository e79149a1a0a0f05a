"""Privacy losses of dp-accounting's events: our own where small deltas have to be right."""

from __future__ import annotations

import functools
import math

import dp_accounting
from dp_accounting import NeighboringRelation, pld
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

from hidden_state_accountants.curves import profiles
from hidden_state_accountants.curves.losses import Losses, PrivacyLoss, losses_of, stock_loss
from hidden_state_accountants.curves.sampled_pairs import (
    ReplacedInPoissonBatchCurve,
    ZeroedWithoutReplacementCurve,
)

# PLDAccountant (0.5.0 to 0.6.0) composes these once, whatever the count.
_PLD_IGNORES_THE_COUNT = ("RandomizedResponseDpEvent",)


class _PldAccountant(pld.PLDAccountant):
    @property
    def privacy_loss(self) -> PrivacyLossDistribution:
        """What is composed so far."""
        return self._pld


def pair_curve(
    event: dp_accounting.DpEvent, relation: NeighboringRelation
) -> ZeroedWithoutReplacementCurve | ReplacedInPoissonBatchCurve | None:
    """The curve of a sampled Gaussian in which both data sets move; None for all others.

    No stock accountant knows these: a record that is zeroed in a batch of fixed size, and one that
    is replaced in a Poisson batch. The noise multiplier is one over the largest contribution of a
    record. Where the pair is not symmetric, the data set that has the record comes first.
    """
    if relation is NeighboringRelation.REPLACE_SPECIAL:
        if isinstance(event, dp_accounting.SampledWithoutReplacementDpEvent):
            mu, rate = _gaussian_mu(event.event), _share_of_records(event)
            if 0 < mu < math.inf and 0 < rate <= 1:
                return ZeroedWithoutReplacementCurve(mu, rate)
    if relation is NeighboringRelation.REPLACE_ONE:
        if isinstance(event, dp_accounting.PoissonSampledDpEvent):
            mu, rate = _gaussian_mu(event.event), event.sampling_probability
            if 0 < mu < math.inf and 0 < rate <= 1:
                return ReplacedInPoissonBatchCurve(mu, rate)
    return None


def event_profile(
    event: dp_accounting.DpEvent, relation: NeighboringRelation
) -> profiles.Profile | None:
    """The privacy profile of a sampled Gaussian or of a Laplace mechanism; None for all others.

    Exact under ADD_OR_REMOVE_ONE for Laplace noise and Poisson sampling, where the data set that
    has the record is P, and under REPLACE_ONE for sampling without replacement; an upper bound for
    a `pair_curve`. The noise multiplier is one over the sensitivity under that relation.
    """
    pair = pair_curve(event, relation)
    if pair is not None:
        return pair.profile
    if relation is NeighboringRelation.ADD_OR_REMOVE_ONE:
        if isinstance(event, dp_accounting.LaplaceDpEvent) and event.noise_multiplier > 0:
            return profiles.laplace(event.noise_multiplier)
        if isinstance(event, dp_accounting.PoissonSampledDpEvent):
            whole = event_profile(event.event, relation) or _gaussian_profile(event.event)
            rate = event.sampling_probability
            if whole is not None and whole.is_symmetric and 0 < rate <= 1:
                return profiles.poisson(whole, rate)
    if relation is NeighboringRelation.REPLACE_ONE:
        if isinstance(event, dp_accounting.SampledWithoutReplacementDpEvent):
            whole = _gaussian_profile(event.event)
            rate = _share_of_records(event)
            if whole is not None and 0 < rate <= 1:
                return profiles.without_replacement(whole, rate)
    return None


def _share_of_records(event: dp_accounting.SampledWithoutReplacementDpEvent) -> float:
    return float(event.sample_size / event.source_dataset_size)


def _gaussian_profile(event: dp_accounting.DpEvent) -> profiles.Profile | None:
    mu = _gaussian_mu(event)
    return profiles.gaussian(mu) if 0 < mu < math.inf else None


def _gaussian_mu(event: dp_accounting.DpEvent) -> float:
    """The mu of Gaussian events that are composed; inf if there is anything else, or no noise."""
    if isinstance(event, dp_accounting.GaussianDpEvent):
        return 1 / event.noise_multiplier if event.noise_multiplier > 0 else math.inf
    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        return math.sqrt(event.count) * _gaussian_mu(event.event)
    if isinstance(event, dp_accounting.ComposedDpEvent):
        return math.hypot(*map(_gaussian_mu, event.events))
    return math.inf


def stock_pld_supports(
    event: dp_accounting.DpEvent, count: int, relation: NeighboringRelation
) -> bool:
    """Whether PLDAccountant composes the event `count` times."""
    ignores_the_count = type(event).__name__ in _PLD_IGNORES_THE_COUNT
    return pld.PLDAccountant(relation).supports(event) and (count <= 1 or not ignores_the_count)


def stock_pld_error(count: int) -> float:
    """What PLDAccountant's deltas may be too small by after `count` compositions.

    Not proven: a hundred times the errors of its Fourier transforms that have been observed, which
    were up to 6e-14 after 1000 compositions.
    """
    return 1e-14 * (count + 100)


def event_losses(
    event: dp_accounting.DpEvent, count: int, relation: NeighboringRelation
) -> Losses | None:
    """The loss of an event that runs `count` times; None if it would take gigabytes.

    What has no `event_profile` is composed by PLDAccountant, whose error is added.
    """
    profile = event_profile(event, relation)
    if profile is not None and is_sampled_gaussian(event):
        loss = _sampled_gaussian_loss(event, relation)
        return None if loss is None else ((loss, count),)
    if profile is not None:
        return losses_of(profile, count)
    stock = _PldAccountant(relation).compose(event, count).privacy_loss
    return ((stock_loss(stock, stock_pld_error(count)), 1),)


def is_sampled_gaussian(event: dp_accounting.DpEvent) -> bool:
    """Whether an event is one step of DP-SGD on a Poisson batch; such events can be hashed."""
    is_poisson = type(event) is dp_accounting.PoissonSampledDpEvent
    return is_poisson and type(event.event) is dp_accounting.GaussianDpEvent


@functools.lru_cache(maxsize=4)  # a run that goes on repeats its steps; a loss can take 40 MB
def _sampled_gaussian_loss(
    event: dp_accounting.DpEvent, relation: NeighboringRelation
) -> PrivacyLoss | None:
    profile = event_profile(event, relation)
    return None if profile is None else PrivacyLoss.of(profile)
