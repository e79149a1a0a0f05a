"""How curved the mean loss of every batch of a linear head is."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hidden_state_accountants import Assumption, BatchOrder, LossGeometry, UnsupportedRunError
from hidden_state_accountants.events.batch_order import OF_RANDOM_SIZE
from hidden_state_adapters.curved_batches import (
    ROUNDING,
    checked_curvature,
    curvature_matters,
    remedy,
)
from hidden_state_adapters.opacus.gradients import Piece


def uses_curvature(loss: LossGeometry | None, order: BatchOrder) -> bool:
    """Whether a theorem uses that batches are less curved than records (not of POISSON ones)."""
    return curvature_matters(loss) and order not in OF_RANDOM_SIZE


class BatchCurvature:
    """Refuses batches of a linear head whose mean loss is more curved than declared.

    For M-smooth losses of records of norm at most B the mean loss of a batch is K-smooth with
    K = M lambda_max(X^T X)/(b B^2), X the features of the batch (docs/theory/curvature.md). The
    bound holds if and only if a matrix has a Cholesky factor, which costs less than an eigenvalue.

    Args:
        loss: Declared, with a curvature.
        square: B^2, with 1 added for a bias.
        bias: Whether a bias is trained.
        batch_size: b, the divisor.
    """

    def __init__(self, loss: LossGeometry, square: float, bias: bool, batch_size: int):
        assert loss.curvature is not None
        self._loss = loss
        self._largest = loss.curvature / loss.smoothness * square * batch_size
        self._unit = loss.smoothness / (square * batch_size)
        self._bias = bias
        self._batch: list[torch.Tensor] = []

    @property
    def assumption(self) -> Assumption:
        """What is verified at every step."""
        return checked_curvature(self._loss)

    def take(self, features: Sequence[torch.Tensor]) -> None:
        """Keeps what went into the head for a piece until the batch is complete."""
        self._batch.extend(features)

    def check(self, piece: Piece) -> None:
        """Raises UnsupportedRunError if the batch is more curved than declared."""
        batch, self._batch = self._batch, []
        rows = torch.cat([part.double() for part in batch]) if batch else torch.zeros(0, 1)
        if self._bias:
            rows = torch.cat([rows, rows.new_ones(len(rows), 1)], dim=1)
        gram = rows @ rows.T if len(rows) < rows.shape[1] else rows.T @ rows
        bound = self._largest * (1 + ROUNDING)
        rest = torch.eye(len(gram), dtype=gram.dtype, device=gram.device) * bound - gram
        if int(torch.linalg.cholesky_ex(rest).info) == 0:
            return
        found = float(torch.linalg.eigvalsh(gram)[-1]) * self._unit
        raise UnsupportedRunError(
            f"step {piece.step} used a batch whose mean loss is {found:.6g}-smooth, expected at "
            f"most curvature = {self._loss.curvature:.6g}. The step was not taken. "
            f"{remedy(self._loss)}"
        )
