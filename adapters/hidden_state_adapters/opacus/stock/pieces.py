"""What an optimizer that Opacus made adds up for a step, piece by piece."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from opacus.optimizers import DPOptimizer

from hidden_state_adapters.opacus.guards.base import Piece
from hidden_state_adapters.opacus.guards.gradients import SumsGuard
from hidden_state_adapters.opacus.stock.checks import hides_rows


class PieceWatch:
    """Counts the rows whose gradients are added up, and notices sums that somebody else wrote.

    Opacus calls its hook once per step. All that is left to see then is the last piece that
    BatchMemoryManager made of a batch or, with ghost clipping, nothing. So the method of the
    optimizer that adds up a piece becomes one of ours, which counts and then calls it.

    Args:
        optimizer: That Opacus made; before its first step, or between two.
        refusing: A context in which a step may be refused.
        look: Is shown the optimizer at every piece that is not the last of its batch.
    """

    def __init__(
        self,
        optimizer: DPOptimizer,
        refusing: Callable[[], AbstractContextManager[None]],
        look: Callable[[DPOptimizer], None],
    ):
        self._optimizer, self._refusing, self._look = optimizer, refusing, look
        self._sums = SumsGuard(optimizer.params)
        self._rows: int | None = None
        self._steps, self._ends_batch = 0, True
        name = "accumulate" if hides_rows(optimizer) else "clip_and_accumulate"
        self._add_up = getattr(optimizer, name)
        setattr(optimizer, name, self)

    def __call__(self) -> None:
        """Adds up a piece."""
        with self._refusing():
            if self._ends_batch:
                self._sums.after(self._steps)
                self._rows, self._steps = 0, self._steps + 1
            self._ends_batch = not self._optimizer._check_skip_next_step(pop_next=False)
            piece = Piece(step=self._steps, params=self._optimizer.params)
            self._sums.before(piece)
            self._rows = (self._rows or 0) + _rows(self._optimizer)
            if not self._ends_batch:
                self._look(self._optimizer)
        self._add_up()
        self._sums.used(piece)

    def take_rows(self) -> int | None:
        """The rows of the step at hand; None where no piece of it was seen."""
        rows, self._rows = self._rows, None
        return rows


def _rows(optimizer: DPOptimizer) -> int:
    """The most rows that a parameter has: Opacus clips each by itself."""
    name = "_norm_sample" if hides_rows(optimizer) else "grad_sample"
    found: list[Any] = [getattr(p, name, None) for p in optimizer.params]
    return max((_length(value) for value in found if value is not None), default=0)


def _length(value: Any) -> int:
    return sum(map(len, value)) if isinstance(value, list) else len(value)
