"""Batches of a TensorDataset that are read at once, instead of record by record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from opacus.data_loader import CollateFnWithEmpty
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate


def reads_at_once(loader: DataLoader) -> DataLoader | None:
    """A loader of the same batches in the same order that reads each of them at once.

    A record of a TensorDataset is a row of its tensors, and torch's default_collate stacks the
    rows again: with 256 records per batch that takes longer than a step of a linear model. The
    tensors that come out are the same to the last bit, and copies, as those of the loader are.

    Args:
        loader: With batches of its own. Nothing of it is changed.

    Returns:
        None unless the data set is exactly torch's TensorDataset or a Subset of one, collate_fn is
        torch's own (with or without Opacus' wrapper for empty batches), there are no workers, and
        two records come out the same both ways.
    """
    subsets, dataset = [], loader.dataset
    while type(dataset) is Subset:
        subsets.append(dataset)
        dataset = dataset.dataset
    collate = loader.collate_fn
    if type(collate) is CollateFnWithEmpty:
        collate = collate.wrapped_collator_fn
    if loader.num_workers or collate is not default_collate or not _holds_rows(dataset):
        return None
    batches = _Batches(subsets, dataset, loader.collate_fn)
    if not _are_the_same(loader, batches):
        return None
    return DataLoader(
        batches,
        batch_sampler=loader.batch_sampler,
        collate_fn=_as_it_is,
        pin_memory=loader.pin_memory,
        generator=loader.generator,
        pin_memory_device=loader.pin_memory_device,
    )


class _Batches(Dataset):
    """What torch asks for whole batches.

    Args:
        subsets: From the outermost one to the one that holds `dataset`.
        dataset: Holds the tensors.
        collate: For batches without records, and places that are no whole numbers from 0 on.
    """

    def __init__(self, subsets: Sequence[Subset], dataset: TensorDataset, collate: Any):
        self._subsets, self._dataset, self._collate = subsets, dataset, collate

    def __getitems__(self, indices: Sequence[Any]) -> Any:
        for subset in self._subsets:
            indices = [subset.indices[index] for index in indices]
        places = np.asarray(indices)
        if not places.size or places.dtype.kind != "i" or places.min() < 0:
            return self._collate([self._dataset[index] for index in indices])
        rows = torch.from_numpy(places.astype(np.int64, copy=False))
        return [
            tensor.index_select(0, rows.to(tensor.device, non_blocking=True))
            for tensor in self._dataset.tensors
        ]


def _holds_rows(dataset: Any) -> bool:
    """Whether the records are the rows of ordinary tensors, as torch's own class deals them."""
    return type(dataset) is TensorDataset and all(
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.requires_grad
        for tensor in dataset.tensors
    )


def _are_the_same(loader: DataLoader, batches: _Batches) -> bool:
    """Whether the first and last record come out the same both ways.

    They do not where a program has put something in the place of a function of torch.
    """
    size = len(loader.dataset)  # type: ignore[arg-type]
    if size == 0:
        return False
    places = [0, size - 1]
    expected = loader.collate_fn([loader.dataset[place] for place in places])
    found = batches.__getitems__(places)
    return type(expected) is type(found) is list and all(
        isinstance(a, torch.Tensor)
        and (a.dtype, a.device, a.stride()) == (b.dtype, b.device, b.stride())
        and torch.equal(a, b)
        for a, b in zip(expected, found, strict=True)
    )


def _as_it_is(batch: Any) -> Any:
    return batch
