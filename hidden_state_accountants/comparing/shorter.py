"""A run cut off after some epochs: the points of a plot against epochs."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.events.schedule import Schedule

_MOST_POINTS = 10


def _epochs(event: Any) -> int:
    return -(-int(event.num_steps) // int(event.batches_per_epoch))


def plotted_epochs(event: Any) -> list[int]:
    """Numbers of epochs from 1 to all, evenly spaced on a logarithmic axis."""
    total = _epochs(event)
    if total <= _MOST_POINTS:
        return list(range(1, total + 1))
    grid = np.geomspace(1, total, _MOST_POINTS)
    return sorted({round(value) for value in grid})


def first_epochs(event: Any, epochs: int) -> Any:
    """The run cut off after its first epochs."""
    steps = min(event.num_steps, epochs * event.batches_per_epoch)
    changes: dict[str, Any] = {"num_steps": steps}
    if hasattr(event, "num_epochs"):
        changes = {"num_epochs": epochs}
    for field in attrs.fields(type(event)):
        value = getattr(event, field.name)
        if isinstance(value, Schedule):
            changes[field.name] = Schedule.from_sequence(value.to_array()[:steps])
    if isinstance(event, LastIterateDpEvent):
        changes["release_steps"] = tuple(step for step in event.release_steps if step < steps)
    return attrs.evolve(event, **changes)
