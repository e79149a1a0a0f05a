"""Which piece of which batch the gradients at hand are of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from dp_accounting import NeighboringRelation
from torch.utils.data import default_collate

from hidden_state_accountants import Assumption, UnsupportedRunError
from hidden_state_accountants.events.batch_order import OF_RANDOM_SIZE
from hidden_state_adapters.batch_plans import BatchPlan
from hidden_state_adapters.opacus.gradients import Figure, Piece, all_of, any_of, differ
from hidden_state_adapters.opacus.loader import BatchCursor, leaves_of, tensors_of

_SIMPLE = (torch.Tensor, bool, int, str, type(None))  # lengths, names and switches may change


class Taken:
    """Checks, piece by piece, that a logical step uses the batch that the plan has for it.

    Every tensor that goes into the model has to be one of the batch whose turn it is: the same
    numbers, wherever they were moved to and in whatever shape and type. A float may be a statistic
    of the batch, and another object may hold one: both stay those of the first pass. Where the loop
    may map records tensors are compared only if it fetches ahead, and so holds two batches when it
    steps.

    Attributes:
        index: Of the batch within the epoch.
        rows: Records of the pieces of the current batch so far.
        skips_step: Whether more pieces follow the last one.

    Args:
        plan: The batches.
        cursor: Says which batch the loop is working on.
        loader: The user's, whose data set and collate_fn make the pieces of BatchMemoryManager.
        inputs: The tensors that went into the model in the latest training pass.
        call: What the model was called with.
        dim: The dimension that counts their records.
        is_composed: Whether every step counts, so that the loop may do what Opacus lets it do.
        maps_records: Whether the loop maps records before the model, which was declared.
    """

    index: int | None = None
    rows = 0
    skips_step = False
    _piece: Piece
    _of_piece: tuple[torch.Tensor, ...] | None = None

    def __init__(
        self,
        plan: BatchPlan,
        cursor: BatchCursor,
        loader: Any,
        inputs: Callable[[], Sequence[torch.Tensor]],
        call: Callable[[], Any],
        *,
        dim: int,
        is_composed: bool,
        maps_records: bool,
    ):
        self._plan, self._cursor, self._loader, self._inputs = plan, cursor, loader, inputs
        self._call, self._dim = call, dim
        self._constants: list[Any] | None = None  # of the first pass
        self._compares = not (is_composed or maps_records)
        self._is_mapped = maps_records and not is_composed

    def assumptions(self, collate: Any, relation: NeighboringRelation) -> Iterable[Assumption]:
        """What is verified and what is taken on trust about the batches.

        Args:
            collate: The loader's collate_fn.
            relation: Of the guarantee.
        """
        plan = self._plan
        yield Assumption.checked(plan.description)
        if self._compares:
            yield Assumption.checked(
                "every tensor that went into the model is one of the batch that the loader drew, "
                "moved, cast or reshaped"
            )
        if self._is_mapped:
            yield Assumption.declared(
                "loop_maps_records=True: what the loop does to records before the model it does to "
                "every record by itself (no mixup, no mean or largest norm of the batch), and the "
                "records are those of the batch that the loader drew"
            )
        if plan.is_shared:
            yield Assumption.checked(
                "orders from 256 bits that one process drew from the operating system, by "
                "SHAKE-128, which is taken for random"
            )
        if not plan.is_secret:
            yield Assumption.public("order of the batches")
        if plan.is_secret and plan.is_seeded:
            yield Assumption.declared("seed of the order: random, and nobody else ever knows it")
        if plan.order in OF_RANDOM_SIZE:
            yield Assumption.declared("the sizes of the batches are shown to nobody")
            if relation is NeighboringRelation.ADD_OR_REMOVE_ONE:
                yield Assumption.declared(
                    "sampling_rate and batch_size of Batches are public constants that were not "
                    "computed from the records or their number, and neither is the number of steps"
                )
        if collate is not default_collate:
            yield Assumption.declared("collate_fn takes every record of a batch by itself")

    def take(self, piece: Piece) -> None:
        """Raises UnsupportedRunError unless the piece is of the batch whose turn it is."""
        if piece.block == 0:
            self._take(piece)
            self.rows += piece.rows
        self._piece, self._of_piece = piece, None
        self._check_rows(piece)

    @property
    def unwritten(self) -> tuple[torch.Tensor, ...]:
        """The tensors of the batch or piece at hand that the loop did not change in place."""
        taken = self._cursor.taken
        return self.tensors if taken is None else taken.unwritten

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors of the batch or piece at hand.

        BatchMemoryManager has a loader of its own: the records of a piece are read once more.
        """
        if self._cursor.taken is not None:
            return self._cursor.taken.tensors
        if self._of_piece is None:
            piece, dataset = self._piece, self._loader.dataset
            places = self._plan.own_batch(piece.step - 1)[self.rows - piece.rows : self.rows]
            self._of_piece = tuple(
                tensors_of(self._loader.collate_fn([dataset[i] for i in places]))
            )
        return self._of_piece

    def _take(self, piece: Piece) -> None:
        expected = self._cursor.expected_index
        try:
            index, self.skips_step = self._cursor.take()
        except UnsupportedRunError as error:
            raise UnsupportedRunError(f"step {piece.step}: {error}") from None
        if self._cursor.was_fetched_ahead and index != expected:
            index = self._batch_of_the_pass()
        if index != expected:
            raise self._other_batch(piece.step, index, expected)
        self.index = index

    def _other_batch(
        self, step: int, index: int | None, expected: int | None
    ) -> UnsupportedRunError:
        used = "no new batch" if index is None else f"batch {index}"
        empty = " (an empty batch is a step, too)" if self._plan.order in OF_RANDOM_SIZE else ""
        ahead = (
            " This loop fetches ahead, or looked at other batches before this step: what goes into "
            "the model then has to be what the loader delivered, moved, cast or reshaped. "
            "Transform the records in the data set, the collate_fn or the model, and fetch at most "
            "one batch ahead, within a pass."
        )
        bypass = (
            " Here another loader was built around the private batches, as a Trainer does that "
            "replaces samplers: give it the private loader in a way that leaves it alone."
        )
        hint = ahead if self._cursor.was_fetched_ahead else ""
        if self._cursor.is_bypassed:
            hint = bypass
        return UnsupportedRunError(
            f"step {step} used {used}, expected batch {expected}: every batch of the private "
            f"loader is used in order, exactly once per epoch{empty}. Iterate the loader that "
            f"make_private returned to its end and step once per batch.{hint}"
        )

    def figures(self, piece: Piece) -> Mapping[str, Figure]:
        """Whether the training pass was on something else than the batch whose turn it is."""
        if not piece.rows or not (self._compares or self._cursor.was_fetched_ahead):
            return {"other_batch": False}
        if self._compares:
            self._check_constants(piece.step)
        return {"other_batch": holds_others(self._inputs(), self.unwritten, self._dim)}

    def _check_constants(self, step: int) -> None:
        found = [leaf for leaf in leaves_of(self._call()) if not isinstance(leaf, _SIMPLE)]
        if self._constants is None:
            self._constants = found
        if len(found) != len(self._constants) or not all(map(_is_same, found, self._constants)):
            kinds = ", ".join(sorted({type(leaf).__name__ for leaf in (*found, *self._constants)}))
            raise UnsupportedRunError(
                f"step {step}: the model was called with another value of {kinds} than in the "
                "first pass. It may come from the whole batch (its mean, its largest norm), which "
                "no clip bounds. Compute it in the data set, the collate_fn or the model, from one "
                "record. If it is public (a rate that falls with the epochs), declare that with "
                "loop_maps_records=True."
            )

    def judge(self, piece: Piece, values: Mapping[str, float]) -> None:
        """Raises UnsupportedRunError if it was."""
        if not values["other_batch"]:
            return
        used = self._batch_of_the_pass()
        if self._cursor.was_fetched_ahead and used != self.index:  # else it was changed in place
            raise self._other_batch(piece.step, used, self.index)
        again = ""
        if self._cursor.taken is None:
            again = (
                " (Pieces of BatchMemoryManager are read once more to be compared: a data set that "
                "draws random numbers has others then.)"
            )
        raise UnsupportedRunError(
            f"step {piece.step}: what went into the model is not what the loader drew, moved, "
            "cast or reshaped, or was changed in place. Whether the loop mixes records (mixup, "
            "statistics of the batch) nobody can see: map the records, and make masks and initial "
            "states, in the data set, the collate_fn or the model (call the private model, with "
            "its backbone inside). Or declare with loop_maps_records=True that the loop maps every "
            "record by itself."
            f"{again}"
        )

    def _batch_of_the_pass(self) -> int | None:
        """Which of the delivered batches went into the model, for an error."""
        taken = self._cursor.taken
        for batch in (*([] if taken is None else [taken]), *self._cursor.waiting):
            if not holds_others(self._inputs(), batch.tensors, self._dim):
                return batch.index
        return None

    def _check_rows(self, piece: Piece) -> None:
        size = self._plan.own_rows(piece.step - 1)
        rows = self.rows if piece.block == 0 else piece.rows
        if rows > size or not (self.skips_step or rows == size):
            if self._cursor.was_fetched_ahead and self._batch_of_the_pass() != self.index:
                raise self._other_batch(piece.step, self._batch_of_the_pass(), self.index)
            if self._plan.order in OF_RANDOM_SIZE:  # how many is as secret as which ones
                raise UnsupportedRunError(
                    f"step {piece.step} used another number of rows than its batch has. Call the "
                    "model on the batch as the loader made it."
                )
            is_whole = size == self._plan.batch_size
            what = "batch_size =" if is_whole else f"the records of its {self._plan.share.part},"
            raise UnsupportedRunError(
                f"step {piece.step} used {rows} rows, expected {what} {size}."
            )

    def after(self, step: int) -> None:
        """The next batch is the one after step `step`."""
        self.index, self.rows, self.skips_step = None, 0, False
        self._cursor.steps_taken = step
        self._cursor.forget()

    def resume(self, steps: int) -> None:
        """The loader goes on after `steps` steps."""
        self.index, self.rows, self.skips_step = None, 0, False
        self._cursor.resume_at(steps)


def _is_same(value: Any, first: Any) -> bool:
    return value is first or (isinstance(value, float) and value == first)


def holds_others(
    inputs: Sequence[torch.Tensor], batch: Sequence[torch.Tensor], dim: int = 0
) -> Figure:
    """Whether `inputs` are none, or one of them is not a tensor of `batch`.

    The loader may have the records, which `dim` counts in the inputs, in the first dimension.
    """
    if not inputs:
        return True
    if all(any(x is part for part in batch) for x in inputs):
        return False
    views = [[x, x.movedim(dim, 0)] if 0 < dim < x.dim() else [x] for x in inputs]
    return any_of([all_of([_differ(x, part) for x in own for part in batch]) for own in views])


def _differ(value: torch.Tensor, part: torch.Tensor) -> Figure:
    """Whether `value` is not `part`, moved to another device, cast or reshaped."""
    if value is part:
        return False
    if value.numel() != part.numel() or value.shape[:1] != part.shape[:1]:
        return True
    part = part.detach().to(device=value.device, dtype=value.dtype)
    return differ(value.detach().flatten(), part.flatten())
