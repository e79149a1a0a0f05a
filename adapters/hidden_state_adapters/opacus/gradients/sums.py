"""Norms and weighted sums of the per-example gradients that parameters hold after backward().

The gradients are stored (`GradSampleModule`) or follow from what a `GhostGradSampleModule` kept.
Either way the norms come first, the weights are made from them, and the sums use up the batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from opacus.optimizers.optimizer import _check_processed_flag, _mark_as_processed
from torch import nn

from hidden_state_accountants import UnsupportedRunError
from hidden_state_adapters.opacus.gradients.ghost import LayerGradients
from hidden_state_adapters.opacus.gradients.ghost_module import GhostSample
from hidden_state_adapters.opacus.gradients.norms import (
    joint_norms,
    norms_of_norms,
    to_precision,
)


def gradient_norms(params: Sequence[nn.Parameter]) -> torch.Tensor:
    """The norms of the gradients for all `params` together, shape (rows,), of one batch."""
    if is_ghost(params):
        return ghost_norms(params)
    return joint_norms([_stored(param) for param in params])


def add_weighted_sums(
    params: Sequence[nn.Parameter], weights: torch.Tensor, *others: torch.Tensor
) -> list[list[torch.Tensor]]:
    """Adds the sums of the gradients, each times its weight, to `summed_grad`; uses up the batch.

    Args:
        params: With the gradients of one batch, which nobody changed since `gradient_norms`.
        weights: Shape (rows,), made from the norms.
        *others: Further weights.

    Returns:
        For each of `params` the sums with each of `others`.
    """
    rests = []
    for param, (total, *rest) in zip(params, _sums(params, (weights, *others)), strict=True):
        holder: Any = param
        if holder.summed_grad is None:
            holder.summed_grad = total
        else:
            holder.summed_grad += total
        rests.append(rest)
    return rests


def _sums(
    params: Sequence[nn.Parameter], weights: Sequence[torch.Tensor]
) -> Iterator[list[torch.Tensor]]:
    if is_ghost(params):
        yield from take_ghost_sums(params, *weights)
        return
    known: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for param in params:
        holder: Any = param
        _check_processed_flag(holder.grad_sample)
        sample = _stored(param).to(param.dtype)
        kind = sample.dtype, sample.device
        if kind not in known:
            known[kind] = [to_precision(w, sample.dtype).to(sample.device) for w in weights]
        yield [_weighted_sum(weight, sample) for weight in known[kind]]
        _mark_as_processed(holder.grad_sample)


def _weighted_sum(weights: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
    # einsum("i,i...") does the same by way of a batched product, slower for short rows.
    shape = sample.shape[1:]
    return (weights @ sample.reshape(len(sample), shape.numel())).reshape(shape)


def _stored(param: nn.Parameter) -> torch.Tensor:
    """The per-example gradients of the one batch that `param` holds."""
    sample = sample_of(param)
    assert isinstance(sample, torch.Tensor)
    return sample


def sample_of(param: nn.Parameter) -> Any:
    """What it holds as per-example gradients; the only one of a list of them."""
    sample = getattr(param, "grad_sample", None)
    return sample[0] if isinstance(sample, list) and len(sample) == 1 else sample


def were_used(params: Sequence[nn.Parameter]) -> bool:
    """Whether the gradients that `params` hold are in a sum already."""
    samples = [sample_of(p) for p in params]
    return any(
        sample.is_released if isinstance(sample, GhostSample) else hasattr(sample, "_processed")
        for sample in samples
    )


def is_ghost(params: Sequence[nn.Parameter]) -> bool:
    """Whether the batch that `params` hold was kept by a `GhostGradSampleModule`.

    Raises:
        UnsupportedRunError: Only that of some of them was.
    """
    kinds = {isinstance(sample_of(p), GhostSample) for p in params}
    if len(kinds) > 1:
        raise UnsupportedRunError(
            "got per-example gradients in some parameters and ghost clipping in others. Make one "
            "GradSampleModule or GhostGradSampleModule of the whole model."
        )
    return kinds == {True}


@torch.no_grad()
def ghost_norms(params: Sequence[nn.Parameter]) -> torch.Tensor:
    """The norms of the per-example gradients for all `params` together, shape (rows,).

    inf where the gradient does not fit into the precision of the parameters.
    """
    layers = _by_layer(params)
    for gradients, group in layers:
        if any(sample_of(p).norms is None for p in group):
            for p, norms in zip(group, gradients.norms(group), strict=True):
                sample_of(p).norms = norms
    parts = [sample_of(p).norms for p in params]
    parts = [part.to(device=parts[0].device, dtype=torch.float64) for part in parts]
    norms = norms_of_norms(parts)
    if all(gradients.are_moderate for gradients, _ in layers):
        return norms
    # The gradient of a linear layer can overflow where neither of its factors does.
    largest = min(torch.finfo(p.dtype).max for p in params)
    return torch.where(norms > largest, math.inf, norms)


@torch.no_grad()
def take_ghost_sums(
    params: Sequence[nn.Parameter], *weights: torch.Tensor
) -> list[list[torch.Tensor]]:
    """For each of `params` the sums of per-example gradients with each of `weights`, (rows,).

    Follows `ghost_norms`, from which the weights are made. The batch is used up.
    """
    sums: dict[int, list[torch.Tensor]] = {}
    for gradients, group in _by_layer(params):
        totals = gradients.sums(group, weights, [sample_of(p).norms for p in group])
        sums.update(zip(map(id, group), totals, strict=True))
    for p in params:
        sample_of(p).release()
    return [sums[id(p)] for p in params]


def _by_layer(
    params: Sequence[nn.Parameter],
) -> list[tuple[LayerGradients, list[nn.Parameter]]]:
    """The parameters of each layer.

    Raises:
        UnsupportedRunError: The batch was used, or changed.
    """
    groups: dict[int, tuple[LayerGradients, list[nn.Parameter]]] = {}
    for p in params:
        gradients = sample_of(p).gradients
        groups.setdefault(id(gradients), (gradients, []))[1].append(p)
    for gradients, _ in groups.values():
        for use in gradients.uses:
            use.check()
    return list(groups.values())
