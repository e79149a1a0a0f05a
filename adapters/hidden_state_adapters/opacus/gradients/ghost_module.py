"""Ghost clipping: a module that keeps what per-example gradients follow from, not the gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from opacus.grad_sample import GradSampleModule
from opacus.grad_sample.functorch import ft_compute_per_sample_gradient
from opacus.grad_sample.grad_sample_module import promote_current_grad_sample
from opacus.utils.module_utils import trainable_parameters
from torch import nn

from hidden_state_accountants import UnsupportedRunError
from hidden_state_adapters.opacus.gradients.ghost import (
    LayerGradients,
    LayerUse,
    Sampler,
    gradients_of,
)
from hidden_state_adapters.opacus.gradients.linear_pass import LinearPass


class GhostSample:
    """What a parameter holds in `grad_sample` in place of its per-example gradients.

    Args:
        uses: The uses of the parameter in one batch.
    """

    def __init__(self, uses: Sequence[LayerGradients]):
        single = len(uses) == 1
        self._gradients: LayerGradients | None = (
            uses[0] if single else LayerGradients([u for gradients in uses for u in gradients.uses])
        )
        self.dtype = uses[0].uses[0].backprops.dtype
        self.norms: torch.Tensor | None = None
        self._rows = self._gradients.rows

    @property
    def gradients(self) -> LayerGradients:
        """Where norms and sums come from; parameters of one layer share it.

        Raises:
            UnsupportedRunError: They were used.
        """
        if self._gradients is None:
            raise UnsupportedRunError(
                "got per-example gradients that were used before. Call optimizer.zero_grad() and "
                "backward() before every step."
            )
        return self._gradients

    @property
    def is_released(self) -> bool:
        """Whether its sums were taken."""
        return self._gradients is None

    def release(self) -> None:
        """Forgets the batch after its sums were taken."""
        self._gradients = None

    def __len__(self) -> int:
        return self._rows

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"p.grad_sample has no {name}: with ghost clipping, the default for a linear head, "
            "there are no per-example gradients. Pass "
            'grad_sample_mode="hooks" to make_private to have them.'
        )


class GhostGradSampleModule(GradSampleModule):
    r"""Opacus' GradSampleModule without the memory for per-example gradients.

    A backward pass keeps the inputs of every trainable layer and the gradients in its outputs.
    From these `optimizer.step()` computes the norms of the per-example gradients g_i and then the
    sums that it needs, with factors w_i that depend on the norms:

    .. math:: \sum_i w_i g_i, \qquad w_i = \min(1, C / |g_i|)

    for a layer at a time: linear layers on one vector per record and embeddings without forming
    any g_i, other layers for some records at a time. The loop is that of "hooks": the plain
    criterion, one backward pass, and `HiddenStateOptimizer`, `DiceSGDOptimizer` or
    `DiceAdamOptimizer` (no optimizer of Opacus).

    Opacus' own ghost clipping takes the sum from a second backward pass. What reaches a parameter
    there past the layers' hooks (a penalty, a forward hook, a loss of shape (n, 1)) is in the sum,
    but not in the norms, so no clip bounds it. Here it is not in the sum, as with "hooks".

    Args:
        m: See GradSampleModule, as for all arguments.
        **kwargs: batch_first, loss_reduction, strict, force_functorch.

    Source: one backward pass and a weighted sum ("book-keeping"): Bu, Wang, Zha, Karypis 2023
        (arXiv 2210.00038).
    """

    def add_hooks(self, **arguments: Any) -> None:
        """Adds Opacus' hooks; linear layers keep what is needed themselves, see `LinearPass`."""
        super().add_hooks(**arguments)
        self._is_mean = arguments.get("loss_reduction", "mean") == "mean"
        self._records_dim = 0 if arguments.get("batch_first", True) else 1
        self._linear = [
            layer
            for layer in self.iterate_submodules(self._module)
            if type(layer) is nn.Linear and "forward" not in vars(layer)
        ]
        for layer in self._linear:
            own = LinearPass(layer, self._keeps_gradients, self._keep_linear)
            layer.forward = own  # type: ignore[method-assign]
        replaced = [hooks for x in self._linear for hooks in (x._forward_hooks, x._backward_hooks)]
        for handle in self.autograd_grad_sample_hooks:
            if any(handle.hooks_dict_ref() is hooks for hooks in replaced):
                handle.remove()

    def remove_hooks(self) -> None:
        """Leaves the layers as they were."""
        super().remove_hooks()
        for layer in self._linear:
            del layer.forward  # the method of the class is there again
        self._linear = []

    def _keeps_gradients(self) -> bool:
        return bool(self.hooks_enabled)

    def capture_backprops_hook(  # type: ignore[no-untyped-def]
        self,
        module: nn.Module,
        _forward_input: torch.Tensor,
        forward_output: tuple[torch.Tensor, ...],
        loss_reduction: str,
        batch_first: bool,
    ):
        """Keeps what the gradients of `module` follow from; called in the backward pass."""
        if not self.hooks_enabled:
            return
        activations, backprops = self.rearrange_grad_samples(
            module=module,
            backprops=forward_output[0].detach(),
            loss_reduction=loss_reduction,
            batch_first=batch_first,
        )
        self._keep(module, activations, backprops)
        if not module.activations and hasattr(module, "max_batch_len"):
            del module.max_batch_len

    def _keep_linear(self, layer: nn.Linear, inputs: torch.Tensor, backprops: torch.Tensor) -> None:
        """As `capture_backprops_hook`, of what a `LinearPass` saw."""
        dim = self._records_dim
        if self._is_mean:
            backprops = backprops * inputs.shape[dim]
        if dim:
            inputs, backprops = inputs.movedim(dim, 0), backprops.movedim(dim, 0)
        self._keep(layer, [inputs], backprops)

    def _keep(
        self, module: nn.Module, activations: list[torch.Tensor], backprops: torch.Tensor
    ) -> None:
        gradients = gradients_of(LayerUse(module, activations, backprops, self._rule(module)))
        for _, p in trainable_parameters(module):
            p._current_grad_sample = [*getattr(p, "_current_grad_sample", ()), gradients]
            p._forward_counter -= 1
            if p._forward_counter == 0:
                p._current_grad_sample = GhostSample(p._current_grad_sample)
                promote_current_grad_sample(p)

    def _rule(self, layer: nn.Module) -> Sampler:
        """Opacus' rule for the per-example gradients of a layer."""
        if self.force_functorch:
            return ft_compute_per_sample_gradient
        return self.GRAD_SAMPLERS.get(type(layer), ft_compute_per_sample_gradient)


def pass_that_keeps(layer: nn.Module) -> LinearPass | None:
    """What keeps the input of a training pass through `layer` for ghost clipping, if it does."""
    own = vars(layer).get("forward")
    return own if isinstance(own, LinearPass) and own.is_private() else None


def captured_input_norms(layer: nn.Module) -> torch.Tensor | None:
    """The norms of the rows that went into a linear layer, shape (uses * rows,).

    None unless ghost clipping kept them since the last step.
    """
    for param in layer.parameters(recurse=False):
        sample = getattr(param, "grad_sample", None)
        sample = sample[0] if isinstance(sample, list) and len(sample) == 1 else sample
        if isinstance(sample, GhostSample) and not sample.is_released:
            return sample.gradients.input_norms
    return None
