"""Which piece of which batch the gradients at hand are of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from hidden_state_accountants import Assumption, BatchOrder, UnsupportedRunError
from hidden_state_adapters.batch_plans import BatchPlan
from hidden_state_adapters.opacus.data.loader import BatchCursor
from hidden_state_adapters.opacus.gradients.figures import Figure, all_of, any_of, differ
from hidden_state_adapters.opacus.guards.base import Guard, Piece, at_step
from hidden_state_adapters.opacus.guards.gradients import gradient_rows


class RowsGuard(Guard):
    """Counts the rows of a batch, for an optimizer that does not see the loader.

    Attributes:
        index: Of the batch within the epoch; None where nobody knows it.
        rows: Records of the pieces of the current batch so far.
        skips_step: Whether more pieces follow the last one.
        next_is_skipped: Whether more pieces follow the next one.
    """

    index: int | None = None
    rows = 0
    skips_step = False

    def __init__(self) -> None:
        self._pieces: list[bool] = []

    def signal(self, do_skip: bool) -> None:
        """The next piece belongs to the current batch and, if `do_skip`, is not its last."""
        self._pieces.append(do_skip)

    @property
    def next_is_skipped(self) -> bool:
        """Whether more pieces follow the next one."""
        return bool(self._pieces) and self._pieces[0]

    def before(self, piece: Piece) -> None:
        """Raises UnsupportedRunError unless there are per-example gradients of one batch."""
        piece.rows = self._count(piece)
        if piece.block == 0:
            self._take(piece)
            self.rows += piece.rows
        self._check_rows(piece)

    def _count(self, piece: Piece) -> int:
        return at_step(piece.step, lambda: gradient_rows(piece.params))

    def _take(self, piece: Piece) -> None:
        self.skips_step = self._pieces.pop(0) if self._pieces else False

    def _check_rows(self, piece: Piece) -> None:
        """The rows of the piece are known now."""

    def after(self, step: int) -> None:
        """The next piece is the first of a batch."""
        self.index, self.rows, self.skips_step = None, 0, False

    def resume(self, steps: int) -> None:
        """The next piece is the first of a batch."""
        self.after(steps)


class EqualRowsGuard(RowsGuard):
    """As `RowsGuard`, of batches that all have the same number of rows.

    Args:
        batch_size: Their number.
    """

    def __init__(self, batch_size: int):
        super().__init__()
        self._batch_size = batch_size

    def _check_rows(self, piece: Piece) -> None:
        if piece.rows != self._batch_size:
            raise UnsupportedRunError(
                f"step {piece.step} has {piece.rows} rows, expected expected_batch_size = "
                f"{self._batch_size}: all batches are equal. Leave the rest of the data set out "
                "(drop_last=True)."
            )


class BatchGuard(RowsGuard):
    """Checks, piece by piece, that a logical step uses the batch that the plan has for it.

    A loop that fetches one batch ahead holds two when it steps. Every tensor that goes into the
    model then has to be one of the batch whose turn it is: the same numbers, wherever they were
    moved to and in whatever shape and type. In a loop that fetches and steps in turn there is
    nothing to tell apart, and the loop may transform what the loader delivered.

    Args:
        plan: The batches.
        cursor: Says which batch the loop is working on.
        inputs: The tensors that went into the model in the latest training pass.
        count: The number of rows of a piece; None to count per-example gradients.
        divisor_is_public: Whether the sampling probability has to be declared a public constant.
    """

    def __init__(
        self,
        plan: BatchPlan,
        cursor: BatchCursor,
        inputs: Callable[[], Sequence[torch.Tensor]],
        *,
        count: Callable[[Piece], int] | None = None,
        divisor_is_public: bool = False,
    ):
        super().__init__()
        self._plan, self._cursor, self._inputs = plan, cursor, inputs
        self._counts, self._divisor_is_public = count, divisor_is_public

    @property
    def assumptions(self) -> Iterable[Assumption]:
        """What is verified and what is taken on trust about the batches."""
        plan = self._plan
        yield Assumption.checked(plan.description)
        if plan.is_shared:
            yield Assumption.checked(
                "orders from 256 bits that one process drew from the operating system, by "
                "SHAKE-128, which is taken for random"
            )
        if not plan.is_secret:
            yield Assumption.public("order of the batches")
        if plan.is_secret and plan.is_seeded:
            yield Assumption.declared("order_seed is random, and nobody else ever knows it")
        if plan.order is BatchOrder.POISSON:
            yield Assumption.declared("the sizes of the batches are shown to nobody")
            if self._divisor_is_public:
                yield Assumption.declared("the sampling probability b/n is a public constant")

    def _count(self, piece: Piece) -> int:
        return super()._count(piece) if self._counts is None else self._counts(piece)

    def signal(self, do_skip: bool) -> None:
        """The next piece belongs to the current batch and, if `do_skip`, is not its last."""
        self._cursor.signal(do_skip)

    @property
    def next_is_skipped(self) -> bool:
        """Whether more pieces follow the next one."""
        return self._cursor.next_is_skipped

    def _take(self, piece: Piece) -> None:
        expected = self._cursor.expected_index
        index, self.skips_step = at_step(piece.step, self._cursor.take)
        if self._cursor.was_fetched_ahead and index != expected:
            index = self._batch_of_the_pass()
        if index != expected:
            raise self._other_batch(piece.step, index, expected)
        self.index = index

    def _other_batch(
        self, step: int, index: int | None, expected: int | None
    ) -> UnsupportedRunError:
        used = "no new batch" if index is None else f"batch {index}"
        empty = " (an empty batch is a step, too)" if self._plan.order is BatchOrder.POISSON else ""
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
        if piece.block > 0 or not self._cursor.was_fetched_ahead or self._cursor.taken is None:
            return {"other_batch": False}
        return {"other_batch": holds_others(self._inputs(), self._cursor.taken.tensors)}

    def judge(self, piece: Piece, values: Mapping[str, float]) -> None:
        """Raises UnsupportedRunError if it was."""
        if values["other_batch"]:
            raise self._other_batch(piece.step, self._batch_of_the_pass(), self.index)

    def _batch_of_the_pass(self) -> int | None:
        """Which of the delivered batches went into the model, for an error."""
        taken = self._cursor.taken
        for batch in (*([] if taken is None else [taken]), *self._cursor.waiting):
            if not holds_others(self._inputs(), batch.tensors):
                return batch.index
        return None

    def _check_rows(self, piece: Piece) -> None:
        size = self._plan.own_rows(piece.step - 1)
        rows = self.rows if piece.block == 0 else piece.rows
        if rows > size or not (self.skips_step or rows == size):
            if self._cursor.was_fetched_ahead and self._batch_of_the_pass() != self.index:
                raise self._other_batch(piece.step, self._batch_of_the_pass(), self.index)
            is_whole = size == self._plan.batch_size
            what = "batch_size =" if is_whole else f"the records of its {self._plan.share.part},"
            raise UnsupportedRunError(
                f"step {piece.step} used {rows} rows, expected {what} {size}."
            )

    def after(self, step: int) -> None:
        """The next batch is the one after step `step`."""
        super().after(step)
        self._cursor.steps_taken = step
        self._cursor.forget()

    def resume(self, steps: int) -> None:
        """The loader goes on after `steps` steps."""
        super().resume(steps)
        self._cursor.resume_at(steps)

    def judge_iterate(self, steps: int, values: object) -> None:
        """Raises UnsupportedRunError if pieces may have been left out at the end of a pass."""
        self._cursor.check_finished()


def holds_others(inputs: Sequence[torch.Tensor], batch: Sequence[torch.Tensor]) -> Figure:
    """Whether `inputs` are none, or one of them is not a tensor of `batch`."""
    if not inputs:
        return True
    return any_of([all_of([_differ(x, part) for part in batch]) for x in inputs])


def _differ(value: torch.Tensor, part: torch.Tensor) -> Figure:
    """Whether `value` is not `part`, moved to another device, cast or reshaped."""
    if value is part:
        return False
    if value.numel() != part.numel() or value.shape[:1] != part.shape[:1]:
        return True
    part = part.detach().to(device=value.device, dtype=value.dtype)
    return differ(value.detach().flatten(), part.flatten())
