"""What one record can do to the released iterates of a run whose gradients are constant."""

from __future__ import annotations

import numpy as np

from hidden_state_accountants.events.batch_order import BatchOrder
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent


def released_shifts(event: LastIterateDpEvent) -> tuple[np.ndarray, np.ndarray]:
    r"""How far a gradient as long as the bound, in step t, moves the next released iterate.

    Given the release before, the release that ends a segment is Gaussian; with
    :math:`W_t = \prod_{u > t} (1 - \eta_u w_u)` over the later steps of the segment the shift is
    :math:`W_t \eta_t G_t / b`, in units of :math:`\sqrt{\sum W_u^2 \sigma_u^2}`.

    Returns:
        The shifts, inf where there is no noise, and the segment of every step; shape (num_steps,).
    """
    eta, bound = event.per_step("learning_rate"), event.gradient_bound()
    ends = np.array([*event.release_steps, event.num_steps])
    segment = np.searchsorted(ends, np.arange(1, event.num_steps + 1))
    log_decay = np.cumsum(np.log1p(-eta * event.per_step("weight_decay")))
    log_weight = log_decay[ends - 1][segment] - log_decay
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        # In logarithms, because the products of extreme but legal parameters leave a double.
        log_noise = log_weight + np.log(eta) + np.log(event.noise_std_on_sum())
        log_shift = log_weight + np.log(eta) + np.log(bound)
        unit = np.full(len(ends), -np.inf)
        np.maximum.at(unit, segment, log_noise)
        noise = np.where(np.isfinite(log_noise), np.exp(log_noise - unit[segment]), 0.0)
        std = np.sqrt(np.bincount(segment, noise**2))
        shift = np.exp(log_shift - unit[segment]) / std[segment]
    return np.where(np.isneginf(log_shift), 0.0, shift), segment


def mu_by_position(event: LastIterateDpEvent) -> np.ndarray:
    """The mu of all releases of a FULL or CYCLIC run, per position of the record.

    For a record that contributes the gradient bound to every batch that holds it, against none.
    """
    shift, segment = released_shifts(event)
    period = 1 if event.batch_order is BatchOrder.FULL else event.batches_per_epoch
    key = segment * period + np.arange(event.num_steps) % period
    cells, index = np.unique(key, return_inverse=True)
    sums = np.bincount(index, shift)
    return np.sqrt(np.bincount(cells % period, sums**2, minlength=period))


def worst_position(event: LastIterateDpEvent) -> int:
    """The declared position of the record, or the one with the largest mu."""
    if event.record_position is not None:
        return event.record_position
    return int(np.argmax(mu_by_position(event)))
