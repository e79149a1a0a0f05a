"""The loader of a run: it deals the batches of a plan, and knows which one the loop works on."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from opacus.data_loader import CollateFnWithEmpty
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    Subset,
    TensorDataset,
    default_collate,
)

from hidden_state_accountants import UnsupportedRunError
from hidden_state_accountants.events.batch_order import OF_RANDOM_SIZE
from hidden_state_adapters.batch_plans import BatchPlan


def leaves_of(value: Any) -> Iterator[Any]:
    """Yields the leaves of nested lists, tuples and mappings; other objects are not looked into."""
    if isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from leaves_of(part)
    else:
        yield value


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors among `leaves_of`."""
    return (leaf for leaf in leaves_of(value) if isinstance(leaf, torch.Tensor))


class Delivery:
    """A batch that the loader handed to the loop: its index in the record, its tensors."""

    def __init__(self, index: int, tensors: tuple[torch.Tensor, ...]):
        self.index, self.tensors = index, tensors
        self._writes = list(map(_writes_to, tensors))

    @property
    def unwritten(self) -> tuple[torch.Tensor, ...]:
        """The tensors that torch counted no write to since then."""
        counts = zip(self.tensors, map(_writes_to, self.tensors), self._writes, strict=True)
        return tuple(tensor for tensor, now, then in counts if now == then)


def _writes_to(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class BatchCursor:
    """The batch that the loop is working on; written by the loader, read by the optimizer.

    Every iterator over the loader starts at the batch of the next step, and a batch is the same
    whenever it is dealt. So a loop may look at batches, leave an epoch early, or fetch one batch
    ahead of its steps. Where another batch than that of the step was handed over last, the loop may
    have used it, and what goes into the model has to be compared from then on.

    Opacus' BatchMemoryManager builds a loader of its own around the batch sampler and announces
    every physical piece with `signal`. Announcements queue up, as many as its workers prefetch.

    Attributes:
        steps_taken: Number of logical steps of the run.
        taken: Batch of the latest `take`; None for a piece, and where nothing was delivered.
        was_fetched_ahead: True if the loop may have used another batch than `taken`.

    Args:
        num_batches: Batches per pass. A single fixed batch may be stepped on again and again.
        prefetched: Number of batches that the loader's workers fetch in advance.
        counts_steps: True if the index of a batch is the number of its step (batches that are drawn
            for every step), not its place in the epoch.
    """

    def __init__(self, num_batches: int, prefetched: int = 0, *, counts_steps: bool = False):
        self._num_batches, self._prefetched = num_batches, prefetched
        self._counts_steps, self._is_kept = counts_steps, num_batches == 1 and not counts_steps
        self.resume_at(0)

    def resume_at(self, step: int) -> None:
        """The next pass starts where a run after `step` steps goes on."""
        self.steps_taken, self._first_batch = step, step % self._num_batches
        self.taken: Delivery | None = None
        self._fetches_ahead = self.was_fetched_ahead = False
        self._forget_pass()

    def _forget_pass(self) -> None:
        self._begun_at, self._is_exhausted = self.steps_taken, False
        self._emitted: int | None = None
        self._newest: int | None = None
        self._waiting: dict[int, Delivery] = {}  # by the step
        self._pieces: collections.deque[tuple[int | None, bool]] = collections.deque()

    @property
    def expected_index(self) -> int:
        """The index that the next batch must have."""
        return self._index_of(self.steps_taken)

    def _index_of(self, step: int) -> int:
        return step if self._counts_steps else step % self._num_batches

    @property
    def batches_left(self) -> int:
        """The batches of a pass that starts now: the rest of an epoch that was left early.

        Batches that are drawn for every step have no epochs, but where a checkpoint goes on.
        """
        begun = self._first_batch if self._counts_steps else self.expected_index
        return self._num_batches - begun

    # The loader's side

    def start_pass(self) -> None:
        """An iterator over the batches starts."""
        self.check_finished()
        # In passes of one batch nothing else tells a loop that fetches ahead.
        self._fetches_ahead |= self._num_batches == 1 and bool(self._waiting)
        self._forget_pass()

    def emit(self, step: int | None) -> None:
        """The batch sampler is about to yield the batch of a step; None at the end of its pass."""
        self._is_exhausted = step is None
        self._emitted = self._emitted if step is None else self._index_of(step)

    def deliver(self, step: int, tensors: tuple[torch.Tensor, ...]) -> None:
        """The loader hands the batch of a step to the loop."""
        self._newest = step
        if step <= self.steps_taken + 1:  # others are fetched too far ahead to be held
            self._waiting[step] = Delivery(self._index_of(step), tensors)

    def signal(self, do_skip: bool) -> None:
        """The next piece belongs to the current batch and, if `do_skip`, is not its last."""
        waiting = self.waiting
        self._pieces.append((waiting[-1].index if waiting else self._emitted, do_skip))

    # The optimizer's side

    @property
    def waiting(self) -> tuple[Delivery, ...]:
        """The batches that were delivered and not taken."""
        return tuple(self._waiting.values())

    def take(self) -> tuple[int | None, bool]:
        """Consumes the next piece: returns the index of its batch, and whether more pieces follow.

        The index is None if the batch whose turn it is was not delivered.

        Raises:
            UnsupportedRunError: The loop left a piece out.
        """
        self.taken, self.was_fetched_ahead, self._first_batch = None, False, 0
        step, index, do_skip = self.steps_taken, None, False
        if self._pieces:
            # Whoever gets a piece has asked for those that are prefetched, and for one more.
            self._refuse_left_out(len(self._pieces) > self._prefetched + 1)
            index, do_skip = self._pieces.popleft()
        elif self._is_kept:
            self.taken = next(iter(self._waiting.values()), None)
        else:
            self.taken = self._waiting.get(step)
            self._fetches_ahead |= bool(self._waiting) and self._newest != step
            self.was_fetched_ahead = self._fetches_ahead
        if not (do_skip or self._is_kept):
            self._waiting = {s: batch for s, batch in self._waiting.items() if s > step}
        return (index if self.taken is None else self.taken.index), do_skip

    def check_finished(self) -> None:
        """Raises UnsupportedRunError if pieces were left out at the end of a pass."""
        has_taken = self._begun_at < self.steps_taken
        self._refuse_left_out(self._is_exhausted and bool(self._pieces) and has_taken)

    def _refuse_left_out(self, is_left_out: bool) -> None:
        if is_left_out:
            raise UnsupportedRunError(
                "a piece of a batch was delivered, but no step was taken on it. Step once per "
                "piece that BatchMemoryManager delivers, empty ones included; with workers, ask "
                "for epsilon at the end of an epoch."
            )

    @property
    def is_bypassed(self) -> bool:
        """True if a loader that is not the private one asked for the batches of this pass."""
        return self._emitted is not None and self._newest is None

    def forget(self) -> None:
        """The step is over, and the tensors of its batch are no longer needed."""
        self.taken = None


class OrderedBatchSampler(BatchSampler):
    """Yields the batches of a plan, from the step that the run has come to.

    A BatchSampler, so that Opacus' BatchMemoryManager splits its batches and knows its length.
    """

    def __init__(self, plan: BatchPlan, cursor: BatchCursor):
        super().__init__(range(len(plan.records)), plan.batch_size, drop_last=False)
        self.plan, self.cursor = plan, cursor

    def __len__(self) -> int:
        return self.plan.num_batches

    def __iter__(self) -> Iterator[list[int]]:
        self.cursor.start_pass()
        first, count = self.cursor.steps_taken, self.cursor.batches_left
        self.plan.start_pass(first)
        return self._batches(range(first, first + count))

    def _batches(self, steps: range) -> Iterator[list[int]]:
        for step in steps:
            if step < self.cursor.steps_taken:
                raise UnsupportedRunError(
                    f"This iterator over the private loader is at batch {step}, which step "
                    f"{step + 1} of {self.cursor.steps_taken} used. Iterate the loader anew."
                )
            self.cursor.emit(step)
            yield list(self.plan.own_batch(step))
        self.cursor.emit(None)


class OrderedDataLoader(DataLoader):
    """A DataLoader that tells the cursor, in the main process, which batch it hands over."""

    batch_sampler: OrderedBatchSampler
    rows: _Rows | None = None
    # Accelerator.prepare would build another loader around the batch sampler, whose batches could
    # not be told apart; what carries this mark it returns as it is. (The loop moves the batches.)
    _is_accelerate_prepared = True

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        first = self.batch_sampler.cursor.steps_taken
        iterator = super().__iter__() if self.rows is None else iter(self._at_once())
        return self._deliver(iterator, first)

    def _at_once(self) -> DataLoader:
        return DataLoader(
            self.rows,  # type: ignore[arg-type]
            batch_sampler=self.batch_sampler,
            collate_fn=lambda batch: batch,
            pin_memory=self.pin_memory,
            generator=self.generator,
        )

    def _deliver(self, iterator: Iterator[Any], first: int) -> Iterator[Any]:
        for step, batch in enumerate(iterator, first):
            self.batch_sampler.cursor.deliver(step, tuple(tensors_of(batch)))
            yield batch


_KEPT = (
    "num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
    "generator", "prefetch_factor", "persistent_workers", "pin_memory_device",
)  # fmt: skip


def private_loader(
    data_loader: DataLoader, plan: BatchPlan, cursor: BatchCursor, *, batch_first: bool = True
) -> OrderedDataLoader:
    """Returns a loader of the same data set by `plan`, with the user's workers and collate_fn."""
    dataset, collate = data_loader.dataset, data_loader.collate_fn
    if plan.order in OF_RANDOM_SIZE and not isinstance(collate, CollateFnWithEmpty):
        # The wrapper learns the form from the first batch that it sees, in every worker.
        collate = CollateFnWithEmpty(collate, batch_first=batch_first)
        collate([dataset[plan.records[0]]])
    made = OrderedDataLoader(
        dataset,
        batch_sampler=OrderedBatchSampler(plan, cursor),
        collate_fn=collate,
        **{name: getattr(data_loader, name) for name in _KEPT},
    )
    if not made.num_workers and plain_collate(data_loader) is default_collate:
        made.rows = _Rows.of(dataset)
    return made


def plain_collate(data_loader: DataLoader) -> Any:
    """Returns the user's collate_fn, without Opacus' wrapper for empty batches."""
    collate = data_loader.collate_fn
    return collate.wrapped_collator_fn if isinstance(collate, CollateFnWithEmpty) else collate


class _Rows(Dataset):
    """The rows of a TensorDataset, or of a Subset of one, which torch asks for whole batches.

    default_collate stacks rows one by one: for 256 records that takes longer than a step.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], places: np.ndarray | None):
        self._tensors, self._places = tensors, places

    @classmethod
    def of(cls, dataset: Any) -> _Rows | None:
        """Returns None unless the records are the rows of ordinary tensors."""
        places: np.ndarray | None = None
        while type(dataset) is Subset:
            own = np.asarray(dataset.indices)
            places = own if places is None else own[places]
            dataset = dataset.dataset
        if type(dataset) is not TensorDataset or not all(map(_is_plain, dataset.tensors)):
            return None
        return cls(dataset.tensors, None if places is None else places % len(dataset))

    def norms(self) -> np.ndarray:
        """Returns the norm of the first tensor of every record."""
        first = self._tensors[0].detach().reshape(len(self._tensors[0]), -1)
        found = torch.linalg.vector_norm(first.float(), dim=1).cpu().numpy()
        return found if self._places is None else found[self._places]

    def are_equal(self) -> bool:
        """Tells whether two records are the same in every tensor."""
        rows = [tensor.detach().cpu().reshape(len(tensor), -1) for tensor in self._tensors]
        parts = [part.view(torch.uint8).numpy() for part in rows]
        places = range(len(parts[0])) if self._places is None else self._places
        found = {hash(b"".join(part[place].tobytes() for part in parts)) for place in places}
        return len(found) < len(places)

    def __getitems__(self, indices: Sequence[int]) -> list[torch.Tensor]:
        places = np.asarray(indices, dtype=np.int64)
        rows = torch.from_numpy(places if self._places is None else self._places[places])
        return [
            tensor.index_select(0, rows.to(tensor.device, non_blocking=True))
            for tensor in self._tensors
        ]


def _is_plain(tensor: torch.Tensor) -> bool:
    is_dense = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    return is_dense and tensor.is_contiguous() and not tensor.requires_grad
