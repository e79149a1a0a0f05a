"""What the records of each batch of an epoch pay."""

from __future__ import annotations

import attrs
import dp_accounting
import numpy as np
from dp_accounting import NeighboringRelation

from hidden_state_accountants import validate
from hidden_state_accountants.best_bound import best_guarantee
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent


def position_profile(
    event: dp_accounting.DpEvent,
    delta: float = 1e-5,
    neighboring_relation: NeighboringRelation | str = NeighboringRelation.REPLACE_SPECIAL,
) -> np.ndarray:
    """The smallest proven epsilon of the records of each batch of an epoch.

    Noise that comes after a record's last participation hides it: the last batches of an epoch pay
    most. The epsilon of the run is the largest entry, and the one to publish.

    Formal guarantees: entry k is an epsilon for the records of batch k of every epoch, and for no
    others; which batch a record is in must not depend on the data.

    Args:
        event: A run over CYCLIC batches; its own `record_position` is ignored.
        delta: In [0, 1].
        neighboring_relation: REPLACE_SPECIAL or REPLACE_ONE.

    Returns:
        Shape (batches of an epoch,).

    Raises:
        TypeError: `event` is no `LastIterateDpEvent`.
        ValueError: Its batches are not CYCLIC.
        UnsupportedRunError: No bound covers the run.
    """
    if not isinstance(event, LastIterateDpEvent):
        raise TypeError(f"Expected event to be a LastIterateDpEvent, got {event!r}.")
    delta = validate.target_delta(delta)
    relation = validate.neighboring_relation(neighboring_relation)
    positions = [
        attrs.evolve(event, record_position=position) for position in range(event.batches_per_epoch)
    ]
    return np.array([best_guarantee(run, relation).epsilon(delta) for run in positions])
