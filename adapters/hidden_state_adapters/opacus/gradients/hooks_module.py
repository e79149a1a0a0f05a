"""Per-example gradients as Opacus keeps them, without a copy of each."""

from __future__ import annotations

import torch
from opacus.grad_sample import GradSampleModule
from opacus.grad_sample.functorch import ft_compute_per_sample_gradient
from opacus.grad_sample.grad_sample_module import (
    create_or_accumulate_grad_sample,
    promote_current_grad_sample,
)
from opacus.utils.module_utils import trainable_parameters
from torch import nn

from hidden_state_adapters.opacus.gradients.ghost import Sampler


def sampler_of(model: GradSampleModule, layer: nn.Module) -> Sampler:
    """Opacus' rule for the per-example gradients of a layer of `model`."""
    if model.force_functorch:
        return ft_compute_per_sample_gradient
    return model.GRAD_SAMPLERS.get(type(layer), ft_compute_per_sample_gradient)


class HooksGradSampleModule(GradSampleModule):
    """Opacus' GradSampleModule, which keeps the gradients that a layer gives where they are.

    Opacus copies them into zeros, so that those of a layer that is used several times, or on
    shorter and shorter batches (packed sequences), can be added up. A layer that is used once on
    the whole batch needs neither. In linear layers the copies take a third of a step.
    """

    def capture_backprops_hook(  # type: ignore[no-untyped-def]
        self,
        module: nn.Module,
        _forward_input: torch.Tensor,
        forward_output: tuple[torch.Tensor, ...],
        loss_reduction: str,
        batch_first: bool,
    ):
        """Keeps the per-example gradients of `module`; called in the backward pass."""
        if not self.hooks_enabled:
            return
        activations, backprops = self.rearrange_grad_samples(
            module=module,
            backprops=forward_output[0].detach(),
            loss_reduction=loss_reduction,
            batch_first=batch_first,
        )
        rows = module.max_batch_len
        for p, gradients in sampler_of(self, module)(module, activations, backprops).items():
            is_first = not hasattr(p, "_current_grad_sample")
            if p.requires_grad and is_first and p._forward_counter == 1 and len(gradients) == rows:
                p._current_grad_sample = gradients
            else:
                create_or_accumulate_grad_sample(param=p, grad_sample=gradients, max_batch_len=rows)
        for _, p in trainable_parameters(module):
            p._forward_counter -= 1
            if p._forward_counter == 0:
                promote_current_grad_sample(p)
            several = isinstance(p.grad_sample, list) and len(p.grad_sample) > 1
            if several and not self.grad_accumulation_allowed:
                raise ValueError(
                    "Poisson sampling is not compatible with grad accumulation. Call "
                    "optimizer.step() after every backward pass, or use BatchMemoryManager."
                )
        if not module.activations and hasattr(module, "max_batch_len"):
            del module.max_batch_len
