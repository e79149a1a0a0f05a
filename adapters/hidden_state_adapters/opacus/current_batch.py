"""Which piece of which batch the gradients at hand are of."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from hidden_state_accountants import UnsupportedRunError
from hidden_state_adapters.opacus.run_context import RunContext

_T = TypeVar("_T")


class CurrentBatch:
    """Checks, piece by piece, that a logical step uses the batch that the plan has for it.

    Attributes:
        index: Of the batch; None before its first piece.
        rows: Records of its pieces so far.
        skips_step: Whether more pieces follow the last one.

    Args:
        context: Of the run.
    """

    def __init__(self, context: RunContext):
        self._context = context
        self.start()

    def start(self) -> None:
        """The next piece is the first of a batch."""
        self.rows, self.skips_step = 0, False
        self.index: int | None = None

    def take(self, step: int, count_rows: Callable[[], int]) -> int:
        """Checks the piece of the batch that the gradients are of; returns its rows.

        Args:
            step: The number of the step, from 1 on.
            count_rows: Says how many per-example gradients there are.

        Raises:
            UnsupportedRunError: It is another batch, or not exactly its records, once each.
        """
        cursor, plan, forward = self._context.cursor, self._context.plan, self._context.forward
        expected = cursor.expected_index
        index, self.skips_step = at_step(step, cursor.take)
        if index != expected:
            raise UnsupportedRunError(
                f"step {step} used {'no new batch' if index is None else f'batch {index}'}, "
                f"expected batch {expected}: every batch of the private loader is used in order, "
                "exactly once per epoch. Iterate the loader that make_private returned to its end "
                "and step once per batch."
            )
        self.index = index
        rows = at_step(step, count_rows)
        self.rows += rows
        size = plan.num_rows(step - 1)
        if self.rows > size or not (self.skips_step or self.rows == size):
            what = "batch_size =" if size == plan.batch_size else "the records of its batch,"
            raise UnsupportedRunError(f"step {step} used {self.rows} rows, expected {what} {size}.")
        if forward.passes != 1:
            raise UnsupportedRunError(
                f"step {step} follows {forward.passes} training passes through the model or a "
                "layer of it, expected 1: every record passes once, in its own row. Evaluate in "
                "eval() mode or under torch.no_grad()."
            )
        if self._context.criterion is not None:
            self._context.criterion.check_calls(step, rows)
        return rows


def at_step(step: int, check: Callable[[], _T]) -> _T:
    """Puts the number of the step in front of what `check` raises."""
    try:
        return check()
    except UnsupportedRunError as error:
        raise UnsupportedRunError(f"step {step}: {error}") from None
