"""Opacus' flat clip with norms of per-example gradients that are known already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from opacus.optimizers.optimizer import _check_processed_flag, _mark_as_processed
from torch import nn

from hidden_state_adapters.opacus.dice_state import joint_norms
from hidden_state_adapters.opacus.ghost_clipping import ghost_norms, is_ghost
from hidden_state_adapters.opacus.norms import to_precision

# Opacus clips with the factor min(1, C / (norm + 1e-6)).
OPACUS_CLIP_OFFSET = 1e-6


def gradient_norms(params: Sequence[nn.Parameter]) -> torch.Tensor:
    """The norms of the gradients for all `params` together, shape (rows,), of one batch."""
    if is_ghost(params):
        return ghost_norms(params)
    return joint_norms([batch_of(param) for param in params])


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
        sample = batch_of(param).to(param.dtype)
        total = weighted_sum(factors, sample)
        if holder.summed_grad is None:
            holder.summed_grad = total
        else:
            holder.summed_grad += total
        _mark_as_processed(holder.grad_sample)


def weighted_sum(weights: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
    """The sum over the rows of `sample`, each times its weight."""
    # einsum("i,i...") does the same by way of a batched product, slower for short rows.
    shape = sample.shape[1:]
    weights = to_precision(weights, sample.dtype)
    return (weights @ sample.reshape(len(sample), shape.numel())).reshape(shape)


def batch_of(param: nn.Parameter) -> torch.Tensor:
    """The per-example gradients of the one batch that `param` holds."""
    sample: Any = param.grad_sample  # type: ignore[attr-defined]
    if isinstance(sample, list):
        (sample,) = sample
    assert isinstance(sample, torch.Tensor)
    return sample
