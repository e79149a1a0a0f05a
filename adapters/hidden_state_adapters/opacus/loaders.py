"""Data loaders that deal the same batches in the same order in every epoch."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
)

from hidden_state_accountants import BatchOrder, UnsupportedRunError
from hidden_state_adapters.opacus.cursor import BatchCursor

_logger = logging.getLogger("hidden_state_accountants")

_FIXED_ORDER = (
    "Pass a DataLoader(dataset, batch_size=b, shuffle=False); for another order use "
    "torch.utils.data.Subset(dataset, order) with an order that does not depend on the records. "
    "It counts as public."
)


class FixedOrderBatchSampler(BatchSampler):
    """Batch k of every epoch holds the indices order[k*b : (k+1)*b].

    A BatchSampler, so that Opacus' BatchMemoryManager splits its batches and knows its length.

    Every pass checks, when it starts and when it ends, that the records behind these indices are
    still the same as far as torch.utils.data.Subset says.

    Args:
        order: The indices of the records; its length is a multiple of `batch_size`. Copied.
        batch_size: b.
        cursor: Told about every batch.
        dataset: What the indices point into.
    """

    def __init__(
        self, order: Sequence[int], batch_size: int, cursor: BatchCursor, dataset: Any = None
    ):
        order = _copy(order)
        super().__init__(order, batch_size, drop_last=False)
        self.order = order
        self.cursor = cursor
        self._subsets = [(part, _indices(part)) for part in _subsets(dataset)]

    def __iter__(self) -> Iterator[list[int]]:
        self._check_subsets()
        return self._batches(self.cursor.start_pass())

    def _batches(self, pass_id: int) -> Iterator[list[int]]:
        for index in range(self.cursor.first_batch, len(self)):
            self.cursor.check_pass(pass_id)
            self.cursor.emit(index)
            start = index * self.batch_size
            yield list(self.order[start : start + self.batch_size])
        self._check_subsets()
        if self.cursor.pass_id == pass_id:
            self.cursor.exhaust()

    def _check_subsets(self) -> None:
        for part, indices in self._subsets:
            if not np.array_equal(_indices(part), indices):
                raise UnsupportedRunError(
                    "Expected the indices of torch.utils.data.Subset as they were at make_private, "
                    "got others: the batches of the run are no longer those that are accounted. "
                    "Build a new Subset and call make_private again for another order."
                )


class FixedOrderDataLoader(DataLoader):
    """A DataLoader that tells the cursor which batch it hands over, when it hands it over.

    Workers fetch batches in advance; the cursor moves in the main process, on yield.
    """

    batch_sampler: FixedOrderBatchSampler

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        first = self.batch_sampler.cursor.first_batch
        iterator = super().__iter__()
        return self._deliver(iterator, self.batch_sampler.cursor.pass_id, first)

    def _deliver(self, iterator: Iterator[Any], pass_id: int, first: int) -> Iterator[Any]:
        cursor = self.batch_sampler.cursor
        for index, batch in enumerate(iterator, first):
            cursor.check_pass(pass_id)
            cursor.deliver(index)
            yield batch
        if cursor.pass_id == pass_id and len(self) > 1:
            cursor.deliver(None)


def fixed_order(data_loader: DataLoader, batch_order: BatchOrder) -> tuple[Sequence[int], int]:
    """The order of the records and the batch size that `data_loader` asks for.

    Args:
        data_loader: The user's loader. CYCLIC takes its batch size and order; FULL puts every
            record into one batch, whatever the batch size.
        batch_order: CYCLIC or FULL.

    Returns:
        The indices (all visited once per epoch) and b, which divides their number.

    Raises:
        UnsupportedRunError: The loader shuffles, samples, streams or repeats records, or b does not
            divide the number of records and the loader does not say ``drop_last=True``.
    """
    order = _record_order(data_loader, batch_order)
    _refuse_repeated_records(data_loader.dataset)
    size = len(order)
    if size == 0:
        raise UnsupportedRunError("Expected at least one record, got an empty data set.")
    batch_size = data_loader.batch_sampler.batch_size
    if batch_order is BatchOrder.FULL:
        if batch_size != size:
            _logger.info("full batches: every batch holds all %d records", size)
        return order, size
    used = size // batch_size * batch_size
    if used == size:
        return order, batch_size
    drops = data_loader.drop_last or getattr(data_loader.batch_sampler, "drop_last", False)
    if not drops or used == 0:
        remedy = (
            f"Choose a batch size that divides {size}, or pass DataLoader(..., drop_last=True) to "
            f"use only the first {used} records."
            if used
            else "Lower the batch size."
        )
        raise UnsupportedRunError(
            f"Expected a batch_size that divides the {size} records, got {batch_size}: cyclic "
            f"batches must all have the same size. {remedy}"
        )
    _logger.info(
        "drop_last=True: batches of %d use the first %d of %d records; dataset_size is %d",
        batch_size, used, size, used,
    )  # fmt: skip
    return order[:used], batch_size


def _record_order(data_loader: DataLoader, batch_order: BatchOrder) -> Sequence[int]:
    if isinstance(data_loader.dataset, IterableDataset):
        raise UnsupportedRunError(
            "Expected a data set with an index, got an IterableDataset: its order cannot be "
            f"checked. Load it into a map-style data set. {_FIXED_ORDER}"
        )
    batches, sampler = data_loader.batch_sampler, data_loader.sampler
    if isinstance(batches, FixedOrderBatchSampler):
        return batches.order
    if batches is None:
        raise UnsupportedRunError(
            "Expected a DataLoader with a batch_size, got batch_size=None: without batches there "
            f"is no step to account. {_FIXED_ORDER}"
        )
    if type(batches) is not BatchSampler:
        raise UnsupportedRunError(
            f"Expected a DataLoader with a batch_size, got batch_sampler={_name(batches)}, whose "
            f"batches may overlap or vary in size. {_FIXED_ORDER}"
        )
    sampler = batches.sampler
    size = len(data_loader.dataset)  # type: ignore[arg-type]
    if type(sampler) is SequentialSampler and sampler.data_source is data_loader.dataset:
        return range(size)
    if type(sampler) is RandomSampler and batch_order is BatchOrder.FULL:
        if not sampler.replacement and sampler.num_samples == size:
            return range(size)  # one batch of everything: the order does not matter
    if isinstance(sampler, list | tuple | range):
        _refuse_repeated_indices(sampler, "the sampler")
        return _copy(sampler)
    shuffles = (
        "shuffle=True draws a new order in every epoch"
        if (type(sampler) is RandomSampler)
        else "a sampler may repeat, leave out or reorder records"
    )
    raise UnsupportedRunError(
        f"Expected records in the fixed order of the data set, got sampler={_name(sampler)}: "
        f"{shuffles}. {_FIXED_ORDER}"
    )


def _copy(order: Sequence[int]) -> Sequence[int]:
    return order if isinstance(order, range) else tuple(int(index) for index in order)


def _indices(part: Subset) -> np.ndarray:
    """A copy, from a sequence, an array or a tensor."""
    indices = part.indices
    return np.array(indices.tolist() if hasattr(indices, "tolist") else indices)


def _subsets(dataset: Any) -> Iterator[Subset]:
    if isinstance(dataset, Subset):
        yield dataset
        yield from _subsets(dataset.dataset)
    elif isinstance(dataset, ConcatDataset):
        for part in dataset.datasets:
            yield from _subsets(part)


def _refuse_repeated_records(dataset: Any) -> None:
    if isinstance(dataset, Subset):
        _refuse_repeated_indices(dataset.indices, "torch.utils.data.Subset")
        _refuse_repeated_records(dataset.dataset)
    elif isinstance(dataset, ConcatDataset):
        if len({id(part) for part in dataset.datasets}) < len(dataset.datasets):
            raise UnsupportedRunError(
                "Expected every record once per epoch, got a ConcatDataset that holds the same "
                "data set twice: one person would count once but act twice. Remove the copy."
            )
        for part in dataset.datasets:
            _refuse_repeated_records(part)


def _refuse_repeated_indices(indices: Sequence[int], where: str) -> None:
    if len({int(index) for index in indices}) < len(indices):
        raise UnsupportedRunError(
            f"Expected every record once per epoch, got an index twice in {where}: the record "
            "would act twice and be accounted once. Remove the repetition."
        )


def private_loader(
    data_loader: DataLoader, order: Sequence[int], batch_size: int, cursor: BatchCursor
) -> FixedOrderDataLoader:
    """A loader of the same data set in a fixed order, with the user's workers and collate_fn."""
    return FixedOrderDataLoader(
        data_loader.dataset,
        batch_sampler=FixedOrderBatchSampler(order, batch_size, cursor, data_loader.dataset),
        num_workers=data_loader.num_workers,
        collate_fn=data_loader.collate_fn,
        pin_memory=data_loader.pin_memory,
        timeout=data_loader.timeout,
        worker_init_fn=data_loader.worker_init_fn,
        multiprocessing_context=data_loader.multiprocessing_context,
        generator=data_loader.generator,
        prefetch_factor=data_loader.prefetch_factor,
        persistent_workers=data_loader.persistent_workers,
        pin_memory_device=data_loader.pin_memory_device,
    )


def _name(sampler: Any) -> str:
    return type(sampler).__name__
