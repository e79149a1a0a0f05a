"""Batches of fewer records, as the loader would deal them: its collate_fn may mix records, too."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, default_collate

from hidden_state_adapters.batch_plans import BatchPlan
from hidden_state_adapters.opacus.data.loader import plain_collate, tensors_of
from hidden_state_adapters.opacus.gradients.piece import Piece
from hidden_state_adapters.opacus.sources.apart import (
    Call,
    Version,
    halves,
    random_numbers_as_before,
)


class Collated:
    """Hands parts of a batch to the loader's collate_fn, each by itself.

    Attributes:
        is_custom: Whether the collate_fn is not torch's, which takes every record by itself.

    Args:
        plan: The batches.
        loader: As it was passed.
    """

    def __init__(self, plan: BatchPlan, loader: DataLoader):
        self._plan, self._dataset, self._collate = plan, loader.dataset, plain_collate(loader)
        self.is_custom = self._collate is not default_collate

    def versions(self, call: Call, piece: Piece) -> Sequence[Version]:
        """Calls with each half of its records, and with the shortest one of them twice.

        Both halves may hold a record of the largest length, and be padded alike. None are made
        where the loop made tensors of its own.

        Args:
            call: What the model was called with.
            piece: The records of the call, the first ones of their batch.
        """
        if not self.is_custom:
            return []
        try:
            with random_numbers_as_before():
                indices = self._plan.own_batch(piece.step - 1)[: piece.rows]
                records = [self._dataset[i] for i in indices]
                sizes = [sum(x.numel() for x in self._tensors([one, one])) for one in records]
                shortest = sizes.index(min(sizes))
                chosen = [*halves(piece.rows), [shortest, shortest]]
                whole, *parts = (
                    self._tensors([records[i] for i in some])
                    for some in (range(piece.rows), *chosen)
                )
                _replaced(call, whole, whole)
        except Exception:  # whatever data set or collate_fn may raise, or other tensors
            return []
        kept = [*halves(piece.rows), range(shortest, shortest + 1)]
        return [
            (functools.partial(_replaced, call, whole, part), len(some), own)
            for part, some, own in zip(parts, chosen, kept, strict=True)
        ]

    def tensors(self, piece: Piece) -> list[torch.Tensor]:
        """What the loader deals of a piece.

        Args:
            piece: The first records of their batch.
        """
        with random_numbers_as_before():
            indices = self._plan.own_batch(piece.step - 1)[: piece.rows]
            return self._tensors([self._dataset[i] for i in indices])

    def _tensors(self, records: Sequence[Any]) -> list[torch.Tensor]:
        return list(tensors_of(self._collate(records)))


def _replaced(call: Call, whole: Sequence[torch.Tensor], half: Sequence[torch.Tensor]) -> Call:
    """A call with tensors of half of a batch in the places of those of the whole one.

    Raises:
        ValueError: A tensor is none of the batch.
    """

    def one(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        for own, other in zip(whole, half, strict=True):
            if own.shape == value.shape and torch.equal(own.to(value), value):
                return other.to(value)
        raise ValueError("The loop made a tensor of its own.")

    replaced: Call = tree_map(one, call)
    return replaced
