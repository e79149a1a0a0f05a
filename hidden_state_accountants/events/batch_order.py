"""Batch orders, and what one record can do to a batch."""

from __future__ import annotations

import enum
import math
from typing import Any

from dp_accounting import NeighboringRelation

from hidden_state_accountants import validate
from hidden_state_accountants.events.plain_types import PlainEvent


class BatchOrder(enum.Enum):
    """Order in which steps draw the records.

    A seed that the user passes makes an order public: one order for all epochs is then CYCLIC, and
    no bound covers a public sequence of different ones.
    """

    FULL = "full"  # every record in every step
    CYCLIC = "cyclic"  # fixed batches in a fixed, possibly public, order
    SHUFFLED_ONCE = "shuffled_once"  # one uniform order, secret, used in every epoch
    RESHUFFLED = "reshuffled"  # a fresh uniform order in every epoch, all secret
    WITHOUT_REPLACEMENT = "without_replacement"  # a fresh uniform batch in every step
    POISSON = "poisson"  # every record joins every batch independently
    # Every record draws one of the batches of an epoch: once for all epochs, or anew for each.
    BALLS_IN_BINS = "balls_in_bins"
    BALLS_IN_BINS_REDRAWN = "balls_in_bins_redrawn"


EPOCH_ORDERS = (BatchOrder.CYCLIC, BatchOrder.SHUFFLED_ONCE, BatchOrder.RESHUFFLED)
"""Batches of one size, each record in one of every epoch."""
BINS = (BatchOrder.BALLS_IN_BINS, BatchOrder.BALLS_IN_BINS_REDRAWN)
"""Batches of random sizes, each record in one of every epoch."""
OF_RANDOM_SIZE = (BatchOrder.POISSON, *BINS)
_OF_ANY_SIZE = (BatchOrder.FULL, *OF_RANDOM_SIZE)


def sensitivity_in_clip_norms(order: BatchOrder, relation: NeighboringRelation) -> int:
    """Number of clip norms by which one record can move the sum of a batch that holds it.

    Without replacement the sampled record replaces a stand-in, so the answer is 2 under both
    replace relations. `unmet_relation` says which pairs make sense at all.
    """
    if relation is NeighboringRelation.REPLACE_ONE or order is BatchOrder.WITHOUT_REPLACEMENT:
        return 2
    return 1


def unmet_relation(order: BatchOrder, relation: NeighboringRelation) -> str | None:
    """The reason why no theorem covers `relation` with `order`, or None."""
    if relation is NeighboringRelation.ADD_OR_REMOVE_ONE and order not in _OF_ANY_SIZE:
        return (
            f"{order.name} batches of a fixed size cannot add or remove a record without moving "
            "the others: use NeighboringRelation.REPLACE_SPECIAL (the record is replaced by one "
            "whose gradient is zero) or REPLACE_ONE."
        )
    return None


def parse_sampling_rate(order: BatchOrder, rate: Any) -> float | None:
    """The declared sampling rate of a run, checked.

    Raises:
        TypeError: It is no number.
        ValueError: It is no probability above 0, or the batches are not of random sizes, or bins
            of which there is no whole number.
    """
    if rate is None:
        return None
    if order not in OF_RANDOM_SIZE:
        raise ValueError(
            f"Expected sampling_rate = None for {order.name} batches, got {rate!r}. Only POISSON "
            "batches and balls in bins are drawn at a rate that batch_size and dataset_size do not "
            "say."
        )
    rate = validate.real(
        "sampling_rate",
        rate,
        above=0,
        maximum=1,
        remedy="It is the probability with which every record joins every batch.",
    )
    if order in BINS and abs(round(1 / rate) * rate - 1) > 1e-12:
        raise ValueError(
            f"Expected sampling_rate to be one over the number of bins, got {rate!r}: every record "
            f"is in one of them. Use 1/{round(1 / rate)}."
        )
    return rate


def batches_per_pass(batch_size: int, dataset_size: int, sampling_rate: float | None) -> int:
    """The batches of one pass over the data; at a rate, what holds a record once on average."""
    if sampling_rate is None:
        return -(-dataset_size // batch_size)
    return math.ceil((1 - 1e-12) / sampling_rate)  # 1 / (1 / 49) is a little less than 49


def rate_text(sampling_rate: float | None) -> str:
    """Text that follows "b of n records" of batches drawn at a rate other than b/n."""
    return "" if sampling_rate is None else f", each drawn at a rate of {sampling_rate:.8g}"


def parse_batch_order(value: Any) -> BatchOrder:
    """A `BatchOrder` from itself or its value, in any case."""
    return validate.member(BatchOrder, "batch_order", value)


class DealtEvent(PlainEvent):
    """An event of a run whose records are dealt in a `BatchOrder`; a base of attrs classes."""

    batch_size: int
    dataset_size: int
    batch_order: BatchOrder
    sampling_rate: float | None

    def _check_dealing(self) -> None:
        """Raises ValueError unless order and sizes of the batches fit together."""
        if self.batch_size > self.dataset_size:
            raise ValueError(
                f"Expected batch_size <= dataset_size = {self.dataset_size}, got {self.batch_size}."
            )
        if self.batch_order is BatchOrder.FULL and self.batch_size != self.dataset_size:
            raise ValueError(
                f"Expected batch_size = dataset_size = {self.dataset_size} for FULL batches, "
                f"got {self.batch_size}. Use BatchOrder.CYCLIC."
            )
        if self.sampling_rate is not None:
            rate = parse_sampling_rate(self.batch_order, self.sampling_rate)
            object.__setattr__(self, "sampling_rate", rate)

    @property
    def sampling_probability(self) -> float:
        """q: the probability that a batch drawn at random holds a given record."""
        if self.batch_order in BINS:
            return 1 / self.batches_per_epoch
        if self.sampling_rate is not None:
            return self.sampling_rate
        return self.batch_size / self.dataset_size

    @property
    def batches_per_epoch(self) -> int:
        """The number of batches of one pass over the data (1 for FULL)."""
        return batches_per_pass(self.batch_size, self.dataset_size, self.sampling_rate)

    def unmet_relation(self, relation: NeighboringRelation) -> str | None:
        """The reason why no theorem covers the run under `relation`, or None."""
        return unmet_relation(self.batch_order, relation)

    def unequal_batches(self) -> str | None:
        """The reason why no theorem covers batches that the order cannot deal equal, or None."""
        rest = self.dataset_size % self.batch_size
        if not rest or self.batch_order not in EPOCH_ORDERS:
            return None
        return (
            f"{self.batch_order.name} batches need a batch_size that divides dataset_size: got "
            f"{self.batch_size} and {self.dataset_size}, which leaves {rest} records over. To drop "
            f"{rest} records declare dataset_size={self.dataset_size - rest}."
        )
