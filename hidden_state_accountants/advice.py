"""Which single change of a run would lower its epsilon most."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import attrs
import numpy as np

from hidden_state_accountants.errors import UnsupportedRunError
from hidden_state_accountants.events.batch_order import BatchOrder
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.events.loss_geometry import LossKind
from hidden_state_accountants.events.schedule import Schedule

_UNKNOWN_CURVATURE = (LossKind.LINEAR, LossKind.HOELDER)


def single_changes(
    event: LastIterateDpEvent, epsilon: Callable[[LastIterateDpEvent], float]
) -> tuple[tuple[str, float], ...]:
    """(description, epsilon) of the run with one thing changed, the most helpful first.

    Args:
        event: The run.
        epsilon: Evaluates a run; may raise UnsupportedRunError.

    Returns:
        The changes that lower epsilon.
    """
    now = epsilon(event)
    found = []
    for description, changed in _changes(event):
        try:
            value = epsilon(changed)
        except UnsupportedRunError:
            continue
        if value < now * (1 - 1e-6):
            found.append((description, value))
    return tuple(sorted(found, key=lambda change: change[1]))


def _changes(event: LastIterateDpEvent) -> Iterator[tuple[str, LastIterateDpEvent]]:
    if event.release_steps:
        count = len(event.release_steps)
        yield (
            f"release the last iterate only, not {count} more",
            attrs.evolve(event, release_steps=()),
        )
    if event.batch_order is BatchOrder.CYCLIC:
        yield (
            "keep the order of the batches secret (shuffled once, uniformly)",
            attrs.evolve(event, batch_order=BatchOrder.SHUFFLED_ONCE, record_position=None),
        )
    halved, doubled = _scaled(event.learning_rate, 0.5), _scaled(event.learning_rate, 2.0)
    yield "halve the learning rate", attrs.evolve(event, learning_rate=halved)
    if float(np.max(event.per_step("weight_decay") * event.per_step("learning_rate"))) < 0.5:
        yield "double the learning rate", attrs.evolve(event, learning_rate=doubled)
    loss = event.loss
    if loss is None:
        return
    if loss.kind not in _UNKNOWN_CURVATURE:
        decay = _more_decay(event, loss.smoothness)
        yield (
            f"weight decay {decay:g} instead of {_text(event.weight_decay)}",
            attrs.evolve(event, weight_decay=decay),
        )
    if event.clip_norm is not None and loss.lipschitz is not None:
        if float(np.min(event.per_step("clip_norm"))) < loss.lipschitz:
            yield (
                f"clip norm {loss.lipschitz:g} instead of {_text(event.clip_norm)}, at the same "
                "noise multiplier: clipping then never acts",
                attrs.evolve(event, clip_norm=loss.lipschitz),
            )


def _more_decay(event: LastIterateDpEvent, smoothness: float) -> float:
    """Twice the decay; a quarter of the smoothness, enough to contract, if that is more."""
    largest = float(np.max(event.per_step("weight_decay")))
    limit = 0.5 / (float(np.max(event.per_step("learning_rate"))) or math.inf)
    return max(largest, min(max(2 * largest, smoothness / 4), limit))


def _scaled(value: float | Schedule, factor: float) -> float | Schedule:
    if isinstance(value, Schedule):
        return Schedule([factor * v for v in value.values], value.lengths)
    return factor * value


def _text(value: float | Schedule) -> str:
    return "the schedule" if isinstance(value, Schedule) else f"{value:g}"
