"""Data loaders that deal the batches of a plan and say which one they hand over."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from opacus.data_loader import CollateFnWithEmpty
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, Subset

from hidden_state_accountants import BatchOrder, UnsupportedRunError
from hidden_state_adapters.batch_plans import BatchPlan
from hidden_state_adapters.opacus.data.contents import tensors_of
from hidden_state_adapters.opacus.data.cursor import BatchCursor
from hidden_state_adapters.opacus.data.whole_batches import reads_at_once


class OrderedBatchSampler(BatchSampler):
    """Yields the batches of a plan, from the step that the run has come to.

    A BatchSampler, so that Opacus' BatchMemoryManager splits its batches and knows its length.

    Args:
        plan: The batches.
        cursor: Told about every batch.
    """

    def __init__(self, plan: BatchPlan, cursor: BatchCursor):
        super().__init__(range(len(plan.records)), plan.batch_size, drop_last=False)
        self.plan, self.cursor = plan, cursor

    def __len__(self) -> int:
        return self.plan.num_batches

    def __iter__(self) -> Iterator[list[int]]:
        cursor = self.cursor
        pass_id, step, index = cursor.start_pass(), cursor.steps_taken, cursor.expected_index
        self.plan.start_pass(step)
        return self._batches(pass_id, step, index, cursor.batches_left)

    def _batches(self, pass_id: int, step: int, index: int, count: int) -> Iterator[list[int]]:
        try:
            for offset in range(count):
                self.cursor.check_pass(pass_id)
                self.cursor.emit(index + offset)
                yield list(self.plan.own_batch(step + offset))
        except GeneratorExit:
            self.cursor.end_pass(pass_id)
            raise
        if self.cursor.pass_id == pass_id:
            self.cursor.exhaust()


class OrderedDataLoader(DataLoader):
    """A DataLoader that tells the cursor which batch it hands over, when it hands it over.

    Workers fetch batches in advance; the cursor moves in the main process, on yield. Where it makes
    no other difference, a batch is read at once, not record by record; see `reads_at_once`.
    """

    batch_sampler: OrderedBatchSampler
    # Accelerator.prepare would build another loader around the batch sampler, whose batches could
    # not be told apart; what carries this mark it returns as it is. (The loop moves the batches.)
    _is_accelerate_prepared = True

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "collate_fn" and name in vars(self):  # torch refuses another sampler likewise
            raise UnsupportedRunError(
                "Expected the loader to keep its collate_fn, got another one, at which nobody "
                "looked whether it takes every record by itself. Pass it to the DataLoader before "
                "make_private."
            )
        super().__setattr__(name, value)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        first = self.batch_sampler.cursor.expected_index
        at_once = reads_at_once(self)
        iterator = super().__iter__() if at_once is None else iter(at_once)
        return self._deliver(iterator, self.batch_sampler.cursor.pass_id, first)

    def _deliver(self, iterator: Iterator[Any], pass_id: int, first: int) -> Iterator[Any]:
        cursor = self.batch_sampler.cursor
        try:
            for index, batch in enumerate(iterator, first):
                cursor.check_pass(pass_id)
                cursor.deliver(index, tensors_of(batch))
                yield batch
            if cursor.pass_id == pass_id:
                cursor.deliver(None)
        finally:
            cursor.end_pass(pass_id)


def private_loader(
    data_loader: DataLoader, plan: BatchPlan, cursor: BatchCursor, *, batch_first: bool = True
) -> OrderedDataLoader:
    """A loader of the same data set by `plan`, with the user's workers and collate_fn."""
    return OrderedDataLoader(
        _with_own_indices(data_loader.dataset),
        batch_sampler=OrderedBatchSampler(plan, cursor),
        num_workers=data_loader.num_workers,
        collate_fn=_collate(data_loader, plan, batch_first),
        pin_memory=data_loader.pin_memory,
        timeout=data_loader.timeout,
        worker_init_fn=data_loader.worker_init_fn,
        multiprocessing_context=data_loader.multiprocessing_context,
        generator=data_loader.generator,
        prefetch_factor=data_loader.prefetch_factor,
        persistent_workers=data_loader.persistent_workers,
        pin_memory_device=data_loader.pin_memory_device,
    )


def _with_own_indices(dataset: Any) -> Any:
    """The same records, whatever happens to the indices of torch.utils.data.Subset later."""
    if type(dataset) is Subset:
        indices: Any = dataset.indices
        kept = indices.clone() if isinstance(indices, torch.Tensor) else copy.copy(indices)
        return Subset(_with_own_indices(dataset.dataset), kept)
    if type(dataset) is ConcatDataset and any(type(part) is Subset for part in dataset.datasets):
        return ConcatDataset([_with_own_indices(part) for part in dataset.datasets])
    return dataset


def _collate(data_loader: DataLoader, plan: BatchPlan, batch_first: bool) -> Any:
    """The user's collate_fn; for batches that may be empty Opacus' wrapper, which knows the form.

    The wrapper learns the form from the first batch that it sees, in every worker: it sees one
    record right here.
    """
    collate = data_loader.collate_fn
    if plan.order is not BatchOrder.POISSON or isinstance(collate, CollateFnWithEmpty):
        return collate
    wrapped = CollateFnWithEmpty(collate, batch_first=batch_first)
    wrapped([data_loader.dataset[plan.records[0]]])
    return wrapped
