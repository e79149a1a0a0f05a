"""How the records are dealt to the steps, and what one record can do to a batch."""

from __future__ import annotations

import enum
from typing import Any

from dp_accounting import NeighboringRelation
from scipy import stats


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


def unequal_batches(order: BatchOrder, batch_size: int, dataset_size: int) -> str | None:
    """The reason why no theorem covers an order that cannot deal equal batches, or None."""
    rest = dataset_size % batch_size
    if not rest or order not in EPOCH_ORDERS:
        return None
    return (
        f"{order.name} batches need a batch_size that divides dataset_size: got {batch_size} and "
        f"{dataset_size}, which leaves {rest} records over. To drop {rest} records declare "
        f"dataset_size={dataset_size - rest}."
    )


def overfull_delta(
    relation: NeighboringRelation,
    batch_size: int,
    dataset_size: int,
    num_steps: int,
    most_terms: int,
) -> float:
    """Bound on the probability that a POISSON batch with the record ever exceeds `most_terms`.

    T * P(Binomial(n - 1, q) >= most_terms), n the size of the larger data set.
    """
    others = dataset_size - (relation is not NeighboringRelation.ADD_OR_REMOVE_ONE)
    tail = stats.binom.sf(most_terms - 1, others, batch_size / dataset_size)
    return min(1.0, num_steps * float(tail))


def parse_batch_order(value: Any) -> BatchOrder:
    """A `BatchOrder` from itself or its value, in any case."""
    try:
        return BatchOrder(value.lower() if isinstance(value, str) else value)
    except ValueError:
        known = ", ".join(order.value for order in BatchOrder)
        raise ValueError(f"Expected batch_order to be one of {known}, got {value!r}.") from None
