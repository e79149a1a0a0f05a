"""Data sets of which many records have changed: the run whose guarantee holds for all of them.

A guarantee says something about two data sets that differ in one record. Group privacy needs it for
every two neighbours on the way from one data set to another, and on that way lie data sets with
several records replaced, zeroed, added or removed (docs/theory/theorem_a.md).
"""

from __future__ import annotations

import attrs
import dp_accounting
from dp_accounting import NeighboringRelation

from hidden_state_accountants.errors import UnsupportedRunError
from hidden_state_accountants.events.batch_order import OF_RANDOM_SIZE, BatchOrder
from hidden_state_accountants.events.block_coordinate import BlockCoordinateDpEvent
from hidden_state_accountants.events.dice_sgd import DiceSgdDpEvent
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.events.loss_geometry import LossGeometry, LossKind
from hidden_state_accountants.events.schedule import mapped

_ADD_OR_REMOVE = NeighboringRelation.ADD_OR_REMOVE_ONE
_REPLACE_ONE = NeighboringRelation.REPLACE_ONE
_REPLACE_SPECIAL = NeighboringRelation.REPLACE_SPECIAL


def run_of_groups(
    event: dp_accounting.DpEvent, relation: NeighboringRelation, size: int
) -> dp_accounting.DpEvent:
    """A run whose guarantee between neighbours is one for every two neighbours on the way.

    Args:
        event: The run on one of the two data sets.
        relation: What one record may do.
        size: Number of records in which the two data sets may differ, >= 1.

    Raises:
        UnsupportedRunError: None is known; the text says why.
    """
    if size == 1:
        return event
    if isinstance(event, LastIterateDpEvent):
        if relation is _ADD_OR_REMOVE:
            event = _of_largest_data_set(event, size)
        if event.loss is None:
            return event
        return attrs.evolve(event, loss=_loss_between(event, event.loss, relation, size))
    if isinstance(event, DiceSgdDpEvent) or relation is _REPLACE_ONE:
        return event  # nothing is asked of the records but the length of a gradient
    if isinstance(event, BlockCoordinateDpEvent):
        raise UnsupportedRunError(
            f"group_size = {size} under {relation.name}: what is declared about the block need not "
            "hold for data sets with several records without gradient. Use REPLACE_ONE."
        )
    return event


def _loss_between(
    event: LastIterateDpEvent, loss: LossGeometry, relation: NeighboringRelation, size: int
) -> LossGeometry:
    """Geometry of every batch of one of two neighbours: up to size - 1 records have changed."""
    changed = (size - 1) / event.batch_size
    if loss.kind is not LossKind.STRONGLY_CONVEX or relation is _REPLACE_ONE:
        return loss
    # A record without gradient is convex, and not strongly; the mean of a batch is less so.
    has_fixed_size = relation is _REPLACE_SPECIAL and event.batch_order not in OF_RANDOM_SIZE
    left = (1 - changed) * loss.strong_convexity if has_fixed_size else 0.0
    if left > 0:
        return attrs.evolve(loss, strong_convexity=left)
    return attrs.evolve(loss, kind=LossKind.CONVEX, strong_convexity=0.0)


def _of_largest_data_set(event: LastIterateDpEvent, size: int) -> LastIterateDpEvent:
    """The same mechanism, said of a data set with up to size - 1 records more."""
    records = event.dataset_size + size - 1
    if event.batch_order in OF_RANDOM_SIZE:
        return attrs.evolve(event, dataset_size=records, sampling_rate=event.sampling_probability)
    if event.batch_order is not BatchOrder.FULL:
        return event  # which every bound refuses under this relation, by name
    # Sums are divided by the same number as before, of which the learning rate keeps a part.
    longer = records / event.batch_size
    return attrs.evolve(
        event,
        dataset_size=records,
        batch_size=records,
        learning_rate=mapped(lambda rate: rate * longer, event.learning_rate),
        weight_decay=mapped(lambda decay: decay * (1 / longer), event.weight_decay),
        prox_strong_convexity=event.prox_strong_convexity / longer,
    )
