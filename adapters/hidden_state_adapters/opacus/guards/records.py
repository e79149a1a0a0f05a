"""Whether the records stay what they are."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from hidden_state_accountants import Assumption, UnsupportedRunError
from hidden_state_adapters.opacus.guards.base import Guard, Piece

_VERSION = operator.attrgetter("_version")
_Written = list[tuple[torch.Tensor, int]]
"""Tensors, and how often each was written."""


class RecordsGuard(Guard):
    """Notices that the tensors of the data set were written during the run.

    A record that changes on the way, or moves to another place, is another record: neighbouring
    data sets would differ in more than one.

    torch counts the writes to a tensor; what is written past it (through numpy, or `.data`) is not
    seen. Where the memory of a tensor lies says nothing: workers that are spawned move it. Other
    tensors of the same values (on another device) are the same records.

    Args:
        dataset: Of the run.
    """

    def __init__(self, dataset: Any):
        leaves = list(_leaves(dataset))
        self._has_others = not all(isinstance(leaf, TensorDataset) for leaf in leaves)
        self._known = [
            (leaf, _written(leaf.tensors)) for leaf in leaves if isinstance(leaf, TensorDataset)
        ]

    @property
    def assumptions(self) -> Iterable[Assumption]:
        """What is verified at every step, and what a data set does not show."""
        if self._known:
            yield Assumption.checked("tensors of the data set without writes that torch counts")
        if self._has_others:
            yield Assumption.declared("the data set holds the same records during the whole run")

    def before(self, piece: Piece) -> None:
        """Raises UnsupportedRunError if the records are not those of the start."""
        for place, (leaf, known) in enumerate(self._known):
            if _is_untouched(leaf.tensors, known):
                continue
            if not _holds_the_same(leaf.tensors, known):
                raise UnsupportedRunError(
                    f"step {piece.step} follows a write to the tensors of the data set: the "
                    "records are no longer those of the start, which are accounted. Change copies "
                    "(batch = batch.clone()), or change the data before make_private and call it "
                    "again."
                )
            self._known[place] = leaf, _written(leaf.tensors)


def _leaves(dataset: Any) -> Iterator[Any]:
    if isinstance(dataset, Subset):
        yield from _leaves(dataset.dataset)
    elif isinstance(dataset, ConcatDataset):
        for part in dataset.datasets:
            yield from _leaves(part)
    else:
        yield dataset


def _written(tensors: Iterable[torch.Tensor]) -> _Written:
    return [(tensor, counted_writes(tensor)) for tensor in tensors]


def counted_writes(tensor: torch.Tensor) -> int:
    """How often torch counted a write to a tensor.

    What was computed under inference_mode() has no count, and cannot be written outside of it.
    """
    return 0 if tensor.is_inference() else tensor._version


def counts_of_writes(tensors: Sequence[torch.Tensor]) -> list[int]:
    """`counted_writes` of each."""
    try:
        return list(map(_VERSION, tensors))
    except RuntimeError:  # one has no count
        return list(map(counted_writes, tensors))


def _is_untouched(tensors: tuple[torch.Tensor, ...], known: _Written) -> bool:
    return len(tensors) == len(known) and all(
        tensor is old and counted_writes(tensor) == version
        for tensor, (old, version) in zip(tensors, known, strict=True)
    )


def _holds_the_same(tensors: tuple[torch.Tensor, ...], known: _Written) -> bool:
    """Whether tensors were put in the place of others that nobody wrote and that are equal."""
    return len(tensors) == len(known) and all(
        counted_writes(old) == version
        and (tensor.shape, tensor.dtype) == (old.shape, old.dtype)
        and torch.equal(tensor.to(old.device), old)
        for tensor, (old, version) in zip(tensors, known, strict=True)
    )
