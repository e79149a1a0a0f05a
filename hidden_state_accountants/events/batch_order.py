"""How the records are dealt to the steps, and what one record can do to a batch."""

from __future__ import annotations

import enum
from typing import Any

from dp_accounting import NeighboringRelation


class BatchOrder(enum.Enum):
    """How the records are dealt to the steps.

    A seed that the user passes makes an order public: one order for all epochs is then CYCLIC, and
    no bound covers a public sequence of different ones.
    """

    FULL = "full"  # every record in every step
    CYCLIC = "cyclic"  # fixed batches in a fixed, possibly public, order
    SHUFFLED_ONCE = "shuffled_once"  # one uniform order, secret, used in every epoch
    RESHUFFLED = "reshuffled"  # a fresh uniform order in every epoch, all secret
    WITHOUT_REPLACEMENT = "without_replacement"  # a fresh uniform batch in every step
    POISSON = "poisson"  # every record joins every batch independently


_FIXED_SIZE = (
    BatchOrder.CYCLIC,
    BatchOrder.SHUFFLED_ONCE,
    BatchOrder.RESHUFFLED,
    BatchOrder.WITHOUT_REPLACEMENT,
)
EPOCH_ORDERS = (BatchOrder.CYCLIC, BatchOrder.SHUFFLED_ONCE, BatchOrder.RESHUFFLED)


def sensitivity_in_clip_norms(order: BatchOrder, relation: NeighboringRelation) -> int:
    """How many clip norms one record can move the sum of a batch that is known to hold it.

    Without replacement the sampled record replaces a stand-in, so the answer is 2 under both
    replace relations. `unmet_relation` says which pairs make sense at all.
    """
    if relation is NeighboringRelation.REPLACE_ONE or order is BatchOrder.WITHOUT_REPLACEMENT:
        return 2
    return 1


def unmet_relation(order: BatchOrder, relation: NeighboringRelation) -> str | None:
    """The reason why no theorem covers `relation` with `order`, or None."""
    if relation is NeighboringRelation.ADD_OR_REMOVE_ONE and order in _FIXED_SIZE:
        return (
            f"{order.name} batches of a fixed size cannot add or remove a record without moving "
            "the others: use NeighboringRelation.REPLACE_SPECIAL (the record is replaced by one "
            "whose gradient is zero) or REPLACE_ONE."
        )
    return None


def parse_batch_order(value: Any) -> BatchOrder:
    """A `BatchOrder` from itself or its value, in any case."""
    try:
        return BatchOrder(value.lower() if isinstance(value, str) else value)
    except ValueError:
        known = ", ".join(order.value for order in BatchOrder)
        raise ValueError(f"Expected batch_order to be one of {known}, got {value!r}.") from None
