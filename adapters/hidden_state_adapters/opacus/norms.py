"""Norms of gradients, and the factors made from them, that float32 does not spoil."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import nn

from hidden_state_accountants import UnsupportedRunError

_BLOCK = 256

# Opacus clips with the factor min(1, C / (norm + 1e-6)).
OPACUS_CLIP_OFFSET = 1e-6

# Rounding in float32 of a norm that is exactly at its bound.
ROUNDING = 1e-6


def row_norms(rows: torch.Tensor) -> torch.Tensor:
    """The norms of the rows of a matrix, in its precision.

    On a CPU torch adds up the squares of a row one after the other: in float32 the norm of ten
    million numbers can be 0.8 per cent too small, and what is clipped by it as much too long. Here
    the sums are short, and sums of sums.
    """
    length = rows.shape[1]
    if length <= _BLOCK:
        return torch.linalg.vector_norm(rows, dim=1)
    count, rest = divmod(length, _BLOCK)
    whole = rows[:, : length - rest] if rest else rows
    blocks = torch.linalg.vector_norm(whole.reshape(len(rows), count, _BLOCK), dim=2)
    if rest:
        last = torch.linalg.vector_norm(rows[:, length - rest :], dim=1, keepdim=True)
        blocks = torch.cat([blocks, last], dim=1)
    return row_norms(blocks)


def joint_norms(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Norms of vectors whose parts, one tensor per parameter, have shape (vectors, ...)."""
    # The shape in full: an empty batch has nothing that -1 could be computed from.
    rows = [part.reshape(len(part), math.prod(part.shape[1:])) for part in parts]
    norms = [row_norms(part) for part in rows]
    if len({(norm.device, norm.dtype) for norm in norms}) > 1:
        dtype = functools.reduce(torch.promote_types, (norm.dtype for norm in norms))
        norms = [norm.to(device=norms[0].device, dtype=dtype) for norm in norms]
    return norms_of_norms(norms)


def norms_of_norms(norms: Sequence[torch.Tensor]) -> torch.Tensor:
    """Norms of vectors from those of their parts, each of shape (vectors,), of one type."""
    if len(norms) == 2:  # weight and bias of one layer
        return torch.hypot(norms[0], norms[1])
    return torch.linalg.vector_norm(torch.stack(list(norms), dim=1), dim=1)


def joint_norm(params: Sequence[nn.Parameter]) -> torch.Tensor:
    """The L2 norm of all parameters as one vector, computed in float64 (0-dim)."""
    parts = [torch.linalg.vector_norm(p.detach(), dtype=torch.float64) for p in params]
    return torch.stack([part.to(parts[0].device) for part in parts]).norm()


def smallest_norm(params: Sequence[nn.Parameter]) -> float:
    """The smallest norm that is computed reliably in the coarsest precision of `params`.

    Squares of coordinates underflow: below sqrt(tiny) a computed norm can be far too small, and a
    factor made from it far too large. At 1e8 times that the squares that are lost cannot matter.
    """
    tiny = max(torch.finfo(p.dtype).tiny for p in params)
    return 1e8 * math.sqrt(tiny)


def check_clip_norms(params: Sequence[nn.Parameter], **clip_norms: float) -> None:
    """Raises ValueError for clip norms so small that norms near them are not reliable."""
    smallest = smallest_norm(params)
    for name, value in clip_norms.items():
        if value < smallest:
            raise ValueError(
                f"Expected {name} >= {smallest:.3g} in this precision, got {value:g}: squares of "
                "shorter vectors underflow. Use float64 parameters, or scale the loss up."
            )


def opacus_clip_factors(norms: torch.Tensor, clip_norm: float) -> torch.Tensor:
    r"""What DPOptimizer multiplies gradients of length `norms` with.

    .. math:: \min(1, C / (|v| + 10^{-6}))
    """
    # Opacus 1.6, optimizers/optimizer.py
    return (norms + OPACUS_CLIP_OFFSET).reciprocal_().mul_(clip_norm).clamp_(max=1.0)


def clip_factors(
    norms: torch.Tensor, bound: float, *, automatic: bool = False, smallest: float = 0.0
) -> torch.Tensor:
    r"""What vectors of length `norms` are multiplied with.

    .. math:: \min(1, C/|v|), \qquad \text{automatic: } C/|v|, \text{ and 0 at 0}

    Without Opacus' 1e-6 beside the norm: with it e - clip(e) would not vanish at short e.

    Args:
        norms: Any shape.
        bound: C.
        automatic: Whether to normalise.
        smallest: Where automatic clipping takes a vector for 0. The result is no longer than C.
    """
    # ZBWH24, Section 2.1 and Appendix C.4, arXiv 2311.14632
    factors = bound / norms
    if automatic:
        return torch.where(norms >= smallest, factors, torch.zeros_like(norms))
    return factors.clamp(max=1.0)


def to_precision(factors: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Clip factors in `dtype`; 0 where it has few digits left, and could round to twice as much."""
    return nn.functional.hardshrink(factors.to(dtype), torch.finfo(dtype).tiny)


_SLACK = ROUNDING + torch.finfo(torch.float32).eps  # of a norm that is exactly at its bound


def check_features(step: int, largest: float, bound: float) -> None:
    """Raises UnsupportedRunError if features are longer than declared."""
    if not largest <= bound * (1 + ROUNDING):
        raise UnsupportedRunError(
            f"step {step} used features of norm {largest:.8g}, expected at most "
            f"feature_norm = {bound:.8g}. The step was not taken. Scale every record "
            "down to the declared norm, after all augmentation."
        )


def check_gradients(step: int, largest: float, lipschitz: float | None) -> None:
    """Raises UnsupportedRunError if gradients are longer than declared, or not finite."""
    if lipschitz is not None and not largest <= lipschitz * (1 + _SLACK):
        raise UnsupportedRunError(
            f"step {step} has a per-example gradient of norm {largest:.8g}, expected at most "
            f"the declared lipschitz = {lipschitz:.8g}. The loss is not the declared one (sum "
            "instead of mean? class weights? a scaled loss?) or the features are longer than "
            "declared. The step was not taken. Declare the loss that the loop computes, and "
            "scale every record down to the declared norm."
        )
    if not math.isfinite(largest):
        raise UnsupportedRunError(
            f"step {step} has a per-example gradient whose norm is not finite (or a square "
            "overflows): no clip bounds it. The step was not taken. Look for a division by 0, "
            "or scale the loss down."
        )


def check_clip_margin(clip_norm: float, lipschitz: float | None) -> None:
    """Refuses a clip norm so close above `lipschitz` that Opacus' clip still acts.

    Opacus multiplies with min(1, C / (norm + 1e-6)), so gradients that are as long as the bound are
    left alone only if C exceeds it by that much.
    """
    if lipschitz is None or clip_norm < lipschitz:
        return
    needed = lipschitz * (1 + 2 * ROUNDING) + OPACUS_CLIP_OFFSET
    if clip_norm < needed:
        raise UnsupportedRunError(
            f"Expected max_grad_norm >= {needed:.9g} or below lipschitz = {lipschitz:.9g}, got "
            f"{clip_norm:.9g}: Opacus clips with min(1, C / (norm + 1e-6)), which still shortens "
            "gradients that are as long as the bound. Raise max_grad_norm a little: "
            f"{needed * (1 + 1e-5):.6g} will do."
        )
