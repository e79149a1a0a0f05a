"""The steps of a run as standard dp-accounting events: see `LastIterateDpEvent.as_composition`.

`noise` is everywhere the standard deviation of a step's noise over the sensitivity of its sum, of
shape (num_steps,), and infinite where a step releases nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import dp_accounting
import numpy as np

from hidden_state_accountants.events.schedule import values_and_counts


def fixed_batches(
    noise: np.ndarray,
    *,
    period: int,
    position: int | None,
    is_reshuffled: bool,
    is_constant: bool,
) -> dp_accounting.DpEvent:
    """The steps that hold one record, which every epoch deals to one of its batches.

    Args:
        noise: See above.
        period: The number of batches of an epoch.
        position: The index, within the epoch, of the record's batch; None is the worst.
        is_reshuffled: The record may have another position in every epoch.
        is_constant: The steps that hold the record are counted, rather than added up.
    """
    num_steps = len(noise)
    if is_constant:
        # The worst position is the first one; a record that is reshuffled can have it always.
        participations = max(0, -(-(num_steps - (position or 0)) // period))
        if not participations or noise[0] == math.inf:
            return dp_accounting.NoOpDpEvent()
        step = dp_accounting.GaussianDpEvent(float(noise[0]))
        return dp_accounting.SelfComposedDpEvent(step, participations)
    period = min(period, max(num_steps, (position or 0) + 1))
    with np.errstate(divide="ignore"):
        cost = noise**-2.0
    padded = np.zeros(-(-num_steps // period) * period)
    padded[:num_steps] = cost
    epochs = padded.reshape(-1, period)
    if is_reshuffled:
        mu_squared = float(epochs.max(axis=1).sum())
    else:
        by_position = epochs.sum(axis=0)
        mu_squared = float(by_position.max() if position is None else by_position[position])
    if mu_squared == 0:
        return dp_accounting.NoOpDpEvent()
    return dp_accounting.GaussianDpEvent(1 / math.sqrt(mu_squared))


def random_batches(
    noise: np.ndarray, sampled: Callable[[dp_accounting.DpEvent], dp_accounting.DpEvent]
) -> dp_accounting.DpEvent:
    """Steps whose batches are drawn independently of each other.

    Args:
        noise: See above.
        sampled: The event of a step from that of its Gaussian mechanism.
    """
    values, counts = values_and_counts(noise)
    events = [
        dp_accounting.SelfComposedDpEvent(
            sampled(dp_accounting.GaussianDpEvent(float(value))), int(count)
        )
        for value, count in zip(values, counts, strict=True)
        if np.isfinite(value)
    ]
    if not events:
        return dp_accounting.NoOpDpEvent()
    return events[0] if len(events) == 1 else dp_accounting.ComposedDpEvent(events)
