"""The engine's own copy of the last private iterate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from hidden_state_adapters.opacus.gradients.figures import Figure, any_of, differ


class Iterate:
    """The weights that the last private step left, whatever somebody did to those of the model.

    Args:
        head: The linear layer that is trained.
        params: Its parameters, by their names in the model.
    """

    def __init__(self, head: nn.Linear, params: Mapping[str, nn.Parameter]):
        self._head = head
        self.params = list(params.values())
        self._names = list(params)
        self.take()

    def take(self) -> None:
        """Takes the weights of the model for those that the last step left."""
        self._values = [p.detach().clone() for p in self.params]

    def put_back(self) -> None:
        """Writes the last iterate into the model."""
        with torch.no_grad():
            for param, value in zip(self.params, self._values, strict=True):
                param.copy_(value)

    def keep(self) -> None:
        """A step has changed the weights that `put_back` wrote."""
        for index, (param, value) in enumerate(zip(self.params, self._values, strict=True)):
            if value.device == param.device and value.dtype == param.dtype:
                value.copy_(param.detach())
            else:
                self._values[index] = param.detach().clone()

    def outputs(self, features: torch.Tensor) -> torch.Tensor:
        """What the head computes with these weights."""
        own = dict(zip(map(id, self.params), self._values, strict=True))
        weight, bias = (own.get(id(p), p) for p in (self._head.weight, self._head.bias))
        assert weight is not None
        bias = None if bias is None else bias.to(features.device)
        return F.linear(features.to(weight.dtype), weight.to(features.device), bias)

    def moved(self, params: Sequence[torch.Tensor] | None = None) -> Figure:
        """Whether `params` (those of the model) hold other numbers."""
        pairs = zip(self.params if params is None else params, self._values, strict=True)
        return any_of([_differ(param.detach(), value) for param, value in pairs])

    def is_released(self, module: nn.Module) -> Figure:
        """Whether `module` holds other numbers, also where other objects are in their places."""
        now = dict(module.named_parameters())
        if not all(name in now for name in self._names):
            return True
        return self.moved([now[name] for name in self._names])


def _differ(value: torch.Tensor, own: torch.Tensor) -> Figure:
    if value.shape != own.shape or value.dtype != own.dtype:
        return True
    return differ(value, own.to(value.device))
