"""A linear layer whose backward pass keeps what ghost clipping needs, and leaves the sum out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from hidden_state_accountants import UnsupportedRunError

Keep = Callable[[nn.Linear, torch.Tensor, torch.Tensor], None]
"""Told a layer, what went in and the gradient in what came out."""


class LinearPass:
    """Stands in for the forward method of a linear layer, and computes the same.

    Autograd would compute the sum of all per-example gradients, a product as large as the one that
    ghost clipping needs; a private step does not use it. Here the parameters get no gradient from
    the layer, unless somebody hung a hook on one: `grad` stays None until the step.

    What the per-example gradients follow from is kept right here, in place of Opacus' hooks on the
    layer: a full backward hook puts two functions more around a layer, which cost more than a
    small layer does.

    Attributes:
        is_private: Whether the per-example gradients of a pass are kept.

    Args:
        layer: An nn.Linear.
        is_private: Whether its per-example gradients are kept in passes with gradients.
        keep: Keeps them, in the backward pass.
    """

    def __init__(self, layer: nn.Linear, is_private: Callable[[], bool], keep: Keep):
        self._layer, self.is_private, self._keep = layer, is_private, keep

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """The output of the layer; the argument has the name that nn.Linear gives it."""
        layer = self._layer
        weight, bias = layer.weight, layer.bias
        if not (layer.training and torch.is_grad_enabled() and self.is_private()):
            return functional.linear(input, weight, bias)
        for param in layer._parameters.values():
            if param is not None and param.requires_grad:
                param._forward_counter += 1  # type: ignore[attr-defined]
        output: torch.Tensor = _Linear.apply(input, weight, bias, self)
        return output

    def note(self, inputs: torch.Tensor, gradient: torch.Tensor) -> None:
        """Keeps a use of the layer, unless the hooks of the module were disabled meanwhile."""
        if self.is_private():
            self._keep(self._layer, inputs, gradient)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        use: LinearPass,
    ) -> torch.Tensor:
        ctx.save_for_backward(weight, inputs)  # torch notices if somebody writes them
        ctx.use = use
        # A hook of the user's on a parameter wants a gradient.
        ctx.is_hooked = [p is not None and bool(p._backward_hooks) for p in (weight, bias)]
        return functional.linear(inputs, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight, inputs = ctx.saved_tensors
        use, ctx.use = ctx.use, None
        if use is None:
            raise UnsupportedRunError(
                "Expected one backward pass through what a training pass computed, got a second "
                "one (retain_graph=True?): the gradients of the records would count twice."
            )
        inputs = inputs.detach()
        use.note(inputs, gradient)
        rows = gradient.flatten(0, -2) if any(ctx.is_hooked) else gradient
        return (
            gradient @ weight if ctx.needs_input_grad[0] else None,
            rows.T @ inputs.flatten(0, -2) if ctx.is_hooked[0] else None,
            rows.sum(dim=0) if ctx.is_hooked[1] else None,
            None,
        )
