"""Clipping with a `GhostGradSampleModule`: the part of Opacus' DPOptimizer that reads gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from opacus.optimizers import DPOptimizer
from torch import nn

from hidden_state_accountants import UnsupportedRunError
from hidden_state_adapters.opacus.ghost_gradients import LayerGradients
from hidden_state_adapters.opacus.ghost_module import GhostSample


def is_ghost(params: Sequence[nn.Parameter]) -> bool:
    """Whether the batch that `params` hold was kept by a `GhostGradSampleModule`.

    Raises:
        UnsupportedRunError: Only that of some of them was.
    """
    kinds = {isinstance(_sample(p), GhostSample) for p in params}
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
    for gradients, group in _by_layer(params):
        if any(_sample(p).norms is None for p in group):
            for p, norms in zip(group, gradients.norms(group), strict=True):
                _sample(p).norms = norms
    parts = [_sample(p).norms for p in params]
    parts = [part.to(device=parts[0].device, dtype=torch.float64) for part in parts]
    norms = torch.linalg.vector_norm(torch.stack(parts, dim=1), dim=1)
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
        totals = gradients.sums(group, weights, [_sample(p).norms for p in group])
        sums.update(zip(map(id, group), totals, strict=True))
    for p in params:
        _sample(p).release()
    return [sums[id(p)] for p in params]


def _sample(param: nn.Parameter) -> Any:
    sample = getattr(param, "grad_sample", None)
    return sample[0] if isinstance(sample, list) and len(sample) == 1 else sample


def _by_layer(
    params: Sequence[nn.Parameter],
) -> Iterator[tuple[LayerGradients, list[nn.Parameter]]]:
    groups: dict[int, tuple[LayerGradients, list[nn.Parameter]]] = {}
    for p in params:
        gradients = _sample(p).gradients
        groups.setdefault(id(gradients), (gradients, []))[1].append(p)
    return iter(groups.values())


class GhostClipping(DPOptimizer):
    """A DPOptimizer that also clips what a `GhostGradSampleModule` kept, with the same factors."""

    _is_ghost = False  # in the current step

    @property
    def grad_samples(self) -> list[Any]:
        """What the parameters hold in `grad_sample`."""
        samples = [p.grad_sample for p in self.params] if self._is_ghost else super().grad_samples
        return list(samples)

    @property
    def accumulated_iterations(self) -> int:
        """As in DPOptimizer; 1 with ghost clipping."""
        return 1 if self._is_ghost else int(super().accumulated_iterations)

    def pre_step(self, closure: Callable[[], float] | None = None) -> float | None:
        """As in DPOptimizer, for either kind of gradients."""
        self._is_ghost = is_ghost(self.params)
        proceeds: float | None = super().pre_step(closure)
        return proceeds

    def clip_and_accumulate(self) -> None:
        r"""Adds the clipped gradients of a piece to summed_grad.

        .. math:: \sum_i \min(1, C / (|g_i| + 10^{-6}))\, g_i
        """
        if not self._is_ghost:
            super().clip_and_accumulate()
            return
        # Opacus' factors, optimizer.py of 1.6
        factors = (float(self.max_grad_norm) / (ghost_norms(self.params) + 1e-6)).clamp(max=1.0)
        for p, (total,) in zip(self.params, take_ghost_sums(self.params, factors), strict=True):
            p.summed_grad = total if p.summed_grad is None else p.summed_grad.add_(total)
