"""What an optimizer that Opacus made adds up for a step, piece by piece."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from opacus.optimizers import DPOptimizer

from hidden_state_adapters.opacus.gradients.norms import opacus_clip_factors
from hidden_state_adapters.opacus.gradients.sums import (
    add_weighted_sums,
    gradient_norms,
    sample_of,
)
from hidden_state_adapters.opacus.guards.base import Piece
from hidden_state_adapters.opacus.guards.gradients import SumsGuard
from hidden_state_adapters.opacus.stock.checks import hides_rows


class PieceWatch:
    """Counts the rows whose gradients are added up, and notices sums that somebody else wrote.

    Opacus calls its hook once per step. All that is left to see then is the last piece that
    BatchMemoryManager made of a batch or, with ghost clipping, nothing. So the method of the
    optimizer that adds up a piece becomes one of ours, which counts and then calls it.

    Where that method is DPOptimizer's own, the norms that it would compute for its clip are
    computed here, kept for the check against a declared bound, and the clipped sum is made of them:
    the same sum up to rounding, and norms of long gradients that float32 does not shorten.

    Args:
        optimizer: That Opacus made; before its first step, or between two.
        refusing: A context in which a step may be refused.
        look: Is shown the optimizer and the norms of the gradients, if they are known, at every
            piece that is not the last of its batch.
    """

    def __init__(
        self,
        optimizer: DPOptimizer,
        refusing: Callable[[], AbstractContextManager[None]],
        look: Callable[[DPOptimizer, torch.Tensor | None], None],
    ):
        self._optimizer, self._refusing, self._look = optimizer, refusing, look
        self._sums = SumsGuard(optimizer.params)
        self._rows: int | None = None
        self._norms: torch.Tensor | None = None
        self._steps, self._ends_batch = 0, True
        name = _name_of_sum(optimizer)
        self._add_up = getattr(optimizer, name)
        known = DPOptimizer.clip_and_accumulate
        self._is_known = getattr(self._add_up, "__func__", None) is known
        setattr(optimizer, name, self)

    @property
    def watched(self) -> Any:
        """The method that it stands in for."""
        return self._add_up

    def __call__(self) -> None:
        """Adds up a piece."""
        with self._refusing():
            if self._ends_batch:
                self._sums.after(self._steps)
                self._rows, self._steps = 0, self._steps + 1
            self._ends_batch = not self._optimizer._check_skip_next_step(pop_next=False)
            piece = Piece(step=self._steps, params=self._optimizer.params)
            self._sums.before(piece)
            self._rows = (self._rows or 0) + _rows(self._optimizer, piece)
            self._norms = self._norms_of(piece)
            if not self._ends_batch:
                self._look(self._optimizer, self._norms)
        if self._norms is None:
            self._add_up()
        else:
            clip_norm = float(self._optimizer.max_grad_norm)
            add_weighted_sums(piece.params, opacus_clip_factors(self._norms, clip_norm))
        self._sums.used(piece)

    def _norms_of(self, piece: Piece) -> torch.Tensor | None:
        """The norms of the gradients of one batch; None where Opacus clips, or would raise."""
        if not self._is_known or not all(map(_is_of_one_batch, piece.params)):
            return None
        are_alike = len({len(sample_of(p)) for p in piece.params}) == 1
        return gradient_norms(piece.params) if are_alike else None

    def take(self) -> tuple[int | None, torch.Tensor | None]:
        """The rows of the step at hand, and the norms of its last piece.

        None where no piece was seen, or of the norms where Opacus clips.
        """
        found, self._rows, self._norms = (self._rows, self._norms), None, None
        return found


def summing_method(optimizer: DPOptimizer) -> Any:
    """What adds up the clipped gradients of a piece, behind the watches of it."""
    method = getattr(optimizer, _name_of_sum(optimizer))
    while isinstance(method, PieceWatch):
        method = method.watched
    return method


def _name_of_sum(optimizer: DPOptimizer) -> str:
    return "accumulate" if hides_rows(optimizer) else "clip_and_accumulate"


def _rows(optimizer: DPOptimizer, piece: Piece) -> int:
    """The most rows that a parameter has: Opacus clips each by itself."""
    name = "_norm_sample" if hides_rows(optimizer) else "grad_sample"
    found: list[Any] = [getattr(p, name, None) for p in piece.params]
    return max((_length(value) for value in found if value is not None), default=0)


def _is_of_one_batch(param: Any) -> bool:
    sample = sample_of(param)
    is_plain = isinstance(sample, torch.Tensor) and sample.dtype in (torch.float32, torch.float64)
    return is_plain and not hasattr(sample, "_processed")


def _length(value: Any) -> int:
    return sum(map(len, value)) if isinstance(value, list) else len(value)
