"""Opacus' flat clip with norms of per-example gradients that are known already."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from opacus.optimizers.optimizer import _check_processed_flag, _mark_as_processed
from torch import nn

from hidden_state_adapters.opacus.ghost_clipping import ghost_norms, is_ghost

# Opacus clips with the factor min(1, C / (norm + 1e-6)).
OPACUS_CLIP_OFFSET = 1e-6


def gradient_norms(params: Sequence[nn.Parameter]) -> torch.Tensor:
    """The norms of the gradients for all `params` together, shape (rows,), of one batch."""
    if is_ghost(params):
        return ghost_norms(params)
    samples = [_sample(param) for param in params]
    # The shape in full: an empty batch has nothing that -1 could be computed from.
    norms = [
        torch.linalg.vector_norm(g.reshape(len(g), math.prod(g.shape[1:])), dim=1) for g in samples
    ]
    stacked = torch.stack([norm.to(norms[0].device) for norm in norms], dim=1)
    return torch.linalg.vector_norm(stacked, dim=1)


def add_clipped(params: Sequence[nn.Parameter], norms: torch.Tensor, clip_norm: float) -> None:
    """Does what DPOptimizer.clip_and_accumulate does, without computing `norms` again.

    Args:
        params: With per-example gradients of one batch, which nobody changed since.
        norms: Their `gradient_norms`.
        clip_norm: C.
    """
    # Opacus 1.6, optimizers/optimizer.py
    factors = (clip_norm / (norms + OPACUS_CLIP_OFFSET)).clamp(max=1.0)
    for param in params:
        holder: Any = param
        _check_processed_flag(holder.grad_sample)
        sample = _sample(param).to(param.dtype)
        total = torch.einsum("i,i...", factors.to(sample), sample)
        if holder.summed_grad is None:
            holder.summed_grad = total
        else:
            holder.summed_grad += total
        _mark_as_processed(holder.grad_sample)


def _sample(param: nn.Parameter) -> torch.Tensor:
    sample: Any = param.grad_sample  # type: ignore[attr-defined]
    if isinstance(sample, list):
        (sample,) = sample
    assert isinstance(sample, torch.Tensor)
    return sample
