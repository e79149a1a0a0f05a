"""A run with every iterate released, as a standard dp-accounting event."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import dp_accounting
import numpy as np
from dp_accounting import NeighboringRelation
from scipy import stats

from hidden_state_accountants.errors import UnsupportedRunError
from hidden_state_accountants.events.batch_order import (
    EPOCH_ORDERS,
    BatchOrder,
    sensitivity_in_clip_norms,
    unmet_relation,
)

if TYPE_CHECKING:
    from hidden_state_accountants.events.last_iterate import LastIterateDpEvent


def composed_event(
    event: LastIterateDpEvent, relation: NeighboringRelation
) -> dp_accounting.DpEvent:
    """See `LastIterateDpEvent.as_composition`."""
    order = event.batch_order
    reason = unmet_relation(order, relation)
    if reason:
        raise UnsupportedRunError(reason)
    if order in EPOCH_ORDERS and event.dataset_size % event.batch_size:
        raise UnsupportedRunError(indivisible_batches(event))
    if order in (BatchOrder.POISSON, BatchOrder.WITHOUT_REPLACEMENT):
        return _sampled_composition(event, relation)
    return _fixed_composition(event, relation)


def indivisible_batches(event: LastIterateDpEvent) -> str:
    """The error text for a batch size that does not divide the data set."""
    n, b = event.dataset_size, event.batch_size
    used = n // b * b
    return (
        f"{event.batch_order.name} batches need a batch_size that divides dataset_size: got "
        f"{b} and {n}, which leaves {n - used} records over. Drop them (dataset_size={used})."
    )


def _effective_noise(event: LastIterateDpEvent, relation: NeighboringRelation) -> np.ndarray:
    """Noise std over sensitivity of the steps; infinite where the gradient bound is 0."""
    sensitivity = sensitivity_in_clip_norms(event.batch_order, relation) * event.gradient_bound()
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(sensitivity > 0, event.noise_std_on_sum() / sensitivity, np.inf)


def _fixed_composition(
    event: LastIterateDpEvent, relation: NeighboringRelation
) -> dp_accounting.DpEvent:
    noise = _effective_noise(event, relation)
    with np.errstate(divide="ignore"):
        cost = np.where(event.per_step("learning_rate") > 0, noise**-2.0, 0.0)
    period = 1 if event.batch_order is BatchOrder.FULL else event.batches_per_epoch
    period = min(period, max(event.num_steps, (event.record_position or 0) + 1))
    padded = np.zeros(-(-event.num_steps // period) * period)
    padded[: event.num_steps] = cost
    epochs = padded.reshape(-1, period)
    if event.batch_order is BatchOrder.RESHUFFLED:  # a different position in every epoch
        mu_squared = float(epochs.max(axis=1).sum())
    else:
        by_position = epochs.sum(axis=0)
        position = event.record_position
        mu_squared = float(by_position.max() if position is None else by_position[position])
    if mu_squared == 0:
        return dp_accounting.NoOpDpEvent()
    if event.has_schedules:
        return dp_accounting.GaussianDpEvent(1 / math.sqrt(mu_squared))
    step = dp_accounting.GaussianDpEvent(float(noise[0]))
    participations = len(epochs)
    if event.record_position is not None:
        participations = -(-(event.num_steps - event.record_position) // period)
    return dp_accounting.SelfComposedDpEvent(step, participations)


def _sampled_composition(
    event: LastIterateDpEvent, relation: NeighboringRelation
) -> dp_accounting.DpEvent:
    if event.batch_order is BatchOrder.POISSON:
        if cap_delta(event, relation) > 0:
            raise UnsupportedRunError(
                f"No standard event covers batches that are cut at max_batch_size = "
                f"{event.max_batch_size}: there a record can displace another one."
            )
        if relation is NeighboringRelation.REPLACE_ONE:
            raise UnsupportedRunError(
                "No standard event that every dp-accounting version evaluates is proven to "
                "dominate POISSON batches under REPLACE_ONE: use "
                "NeighboringRelation.REPLACE_SPECIAL or ADD_OR_REMOVE_ONE."
            )

        def sampled(noise: float) -> dp_accounting.DpEvent:
            return dp_accounting.PoissonSampledDpEvent(
                event.batch_size / event.dataset_size, dp_accounting.GaussianDpEvent(noise)
            )
    else:

        def sampled(noise: float) -> dp_accounting.DpEvent:
            return dp_accounting.SampledWithoutReplacementDpEvent(
                event.dataset_size, event.batch_size, dp_accounting.GaussianDpEvent(noise)
            )

    noise = _effective_noise(event, relation)[event.per_step("learning_rate") > 0]
    values, counts = np.unique(noise[np.isfinite(noise)], return_counts=True)
    events = [
        dp_accounting.SelfComposedDpEvent(sampled(float(value)), int(count))
        for value, count in zip(values, counts, strict=True)
    ]
    if not events:
        return dp_accounting.NoOpDpEvent()
    return events[0] if len(events) == 1 else dp_accounting.ComposedDpEvent(events)


def cap_delta(event: LastIterateDpEvent, relation: NeighboringRelation) -> float:
    """Bound on the probability that the cap on POISSON batches ever acts: an additional delta.

    T * P(Binomial(n - 1, q) >= max_batch_size), n the size of the larger data set; 0 without a
    cap. While the cap does not act the run is one without a cap.
    """
    if event.max_batch_size is None:
        return 0.0
    return overfull_delta(event, relation, event.max_batch_size)


def overfull_delta(
    event: LastIterateDpEvent, relation: NeighboringRelation, most_terms: int
) -> float:
    """Bound on the probability that a POISSON batch with the record ever exceeds `most_terms`."""
    others = event.dataset_size - (relation is not NeighboringRelation.ADD_OR_REMOVE_ONE)
    tail = stats.binom.sf(most_terms - 1, others, event.batch_size / event.dataset_size)
    return min(1.0, event.num_steps * float(tail))
