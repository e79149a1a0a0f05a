"""Whether the records of a batch act on each other before they reach the model."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from opacus.data_loader import CollateFnWithEmpty
from torch.utils.data import DataLoader, default_collate

from hidden_state_accountants import Assumption, UnsupportedRunError
from hidden_state_adapters.opacus.data.loader import tensors_of
from hidden_state_adapters.opacus.guards.base import Guard
from hidden_state_adapters.opacus.guards.random_numbers import random_numbers_as_before

_SHOWN = 12  # records, at most


class CollationGuard(Guard):
    """Looks once whether a `collate_fn` takes every record by itself.

    Some records are put beside others, and then beside other ones: nothing of them may change. How
    far they are padded may, and then it is an assumption that this is all that changes, and that
    the model does not notice it. Where nothing can be looked at, the whole is an assumption.

    Args:
        data_loader: With the `collate_fn` of the loop.

    Raises:
        UnsupportedRunError: What is made of a record depends on the others.
    """

    def __init__(self, data_loader: DataLoader):
        collate = data_loader.collate_fn
        if isinstance(collate, CollateFnWithEmpty):
            collate = collate.wrapped_collator_fn
        self._line: Assumption | None = None
        if collate is not None and collate is not default_collate:
            self._line = _look(collate, data_loader.dataset)

    @property
    def assumptions(self) -> Iterable[Assumption]:
        """What was seen, and what is taken on trust."""
        if self._line is not None:
            yield self._line


_UNKNOWN = Assumption.declared("collate_fn takes every record of a batch by itself")
_CHECKED = Assumption.checked(
    "collate_fn made the same of some records beside others and beside other ones"
)
_PADS = Assumption.declared(
    "the model computes the same for a record however far collate_fn pads it, which depends on the "
    "other records of the batch (padding is masked; no mean over positions)"
)


def _look(collate: Any, dataset: Any) -> Assumption:
    try:
        third = min(len(dataset), _SHOWN) // 3
        places = np.linspace(0, len(dataset) - 1, 3 * third).astype(int).tolist()
        with random_numbers_as_before():
            records = [dataset[place] for place in places]
        kept, one, other = records[::3], records[1::3], records[2::3]
        batches = [_collated(collate, [*kept, *beside]) for beside in (one, other, one)]
        once = _kept_of(batches[0], batches[2], third)
        again = _kept_of(batches[0], batches[1], third)
    except Exception:  # whatever the data set or collate_fn may raise
        return _UNKNOWN
    if third < 2 or not again or not all(a.shape == b.shape and _are_equal(a, b) for a, b in once):
        return _UNKNOWN
    same_length = [(a, b) for a, b in again if a.shape == b.shape]
    if not all(_are_equal(a, b) for a, b in same_length):
        raise UnsupportedRunError(
            "Expected a collate_fn that takes every record by itself, got one that makes something "
            "else of a record beside other ones (a scale by the largest of the batch, its mean, a "
            "draw from all?): every per-example gradient then depends on all records, and no clip "
            "bounds what one of them does. Do this in the data set, record by record, with "
            "constants."
        )
    return _CHECKED if len(same_length) == len(again) else _PADS


def _collated(collate: Any, records: list[Any]) -> list[torch.Tensor]:
    with random_numbers_as_before():
        return list(tensors_of(collate(copy.deepcopy(records))))


def _kept_of(
    one: Sequence[torch.Tensor], other: Sequence[torch.Tensor], kept: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The first records in all tensors; raises ValueError if one has no entry for each record."""
    pairs = []
    for a, b in zip(one, other, strict=True):
        sizes = list(zip(a.shape, b.shape, strict=True))
        dim = sizes.index((2 * kept, 2 * kept))
        pairs.append((a.narrow(dim, 0, kept), b.narrow(dim, 0, kept)))
    return pairs


def _are_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())
