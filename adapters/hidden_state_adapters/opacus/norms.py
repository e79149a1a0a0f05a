"""Norms of rows, and the factors made from them, that float32 does not spoil."""

from __future__ import annotations

import torch

_BLOCK = 256


def row_norms(rows: torch.Tensor) -> torch.Tensor:
    """The norms of the rows of a matrix, in its precision.

    On a CPU torch adds up the squares of a row one after the other: in float32 the norm of ten
    million numbers can be 0.8 per cent too small, and what is clipped by it as much too long. Here
    the sums are short, and sums of sums.
    """
    length = rows.shape[1]
    if length <= _BLOCK:
        return torch.linalg.vector_norm(rows, dim=1)
    whole = length - length % _BLOCK
    blocks = torch.linalg.vector_norm(rows[:, :whole].unflatten(1, (-1, _BLOCK)), dim=2)
    if whole < length:
        rest = torch.linalg.vector_norm(rows[:, whole:], dim=1, keepdim=True)
        blocks = torch.cat([blocks, rest], dim=1)
    return row_norms(blocks)


def to_precision(factors: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Clip factors in `dtype`; 0 where it has few digits left, and could round to twice as much."""
    factors = factors.to(dtype)
    return torch.where(factors.abs() < torch.finfo(dtype).tiny, 0.0, factors)
