"""Forward passes of linear layers whose backward pass leaves the sum of the gradients out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional


class LinearPass:
    """Stands in for the forward method of a linear layer, and computes the same.

    Autograd would compute the sum of all per-example gradients, a product as large as the one that
    ghost clipping needs; a private step does not use it. Here the parameters get no gradient from
    the layer: `grad` stays None until the step.

    Args:
        layer: An nn.Linear.
        is_private: Whether its per-example gradients are kept in passes with gradients.
    """

    def __init__(self, layer: nn.Linear, is_private: Callable[[], bool]):
        self._layer, self._is_private = layer, is_private

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """The output of the layer; the argument has the name that nn.Linear gives it."""
        layer = self._layer
        # A hook of the user's on a parameter wants a gradient.
        has_hooks = any(p is not None and p._backward_hooks for p in (layer.weight, layer.bias))
        is_private = layer.training and torch.is_grad_enabled() and self._is_private()
        if is_private and not has_hooks:
            output: torch.Tensor = _Linear.apply(input, layer.weight, layer.bias)
            return output
        return functional.linear(input, layer.weight, layer.bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return functional.linear(inputs, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        (weight,) = ctx.saved_tensors
        return gradient @ weight if ctx.needs_input_grad[0] else None, None, None
