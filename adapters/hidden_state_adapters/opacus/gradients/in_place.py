"""Per-example gradients as Opacus keeps them, without a copy of each."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from opacus.grad_sample import GradSampleHooks
from torch import nn

from hidden_state_adapters.opacus.gradients.ghost import Sampler


def keep_in_place(model: Any) -> None:
    """Lets a model of Opacus' keep the per-example gradients where the rule of a layer puts them.

    Opacus copies them into zeros, so that those of a layer that is used several times, or on
    shorter and shorter batches (packed sequences), can be added up. A layer that is used once on
    the whole batch needs neither. In linear layers the copies take a third of a step.

    Does nothing to models that keep something else than per-example gradients, or in another way.

    Args:
        model: What make_private returned; any object.
    """
    hook = getattr(type(model), "capture_backprops_hook", None)
    if hook is not GradSampleHooks.capture_backprops_hook:
        return
    if not isinstance(model.GRAD_SAMPLERS, _RulesInPlace):
        model.GRAD_SAMPLERS = _RulesInPlace(model.GRAD_SAMPLERS)


class _RulesInPlace(Mapping[type[nn.Module], Sampler]):
    """Rules of which each puts the gradients where Opacus would have copied them to."""

    def __init__(self, rules: Mapping[type[nn.Module], Sampler]):
        self._rules = rules

    def __getitem__(self, kind: type[nn.Module]) -> Sampler:
        return functools.partial(_put, self._rules[kind])

    def __iter__(self) -> Iterator[type[nn.Module]]:
        return iter(self._rules)

    def __len__(self) -> int:
        return len(self._rules)


def _put(
    rule: Sampler, layer: nn.Module, activations: list[torch.Tensor], backprops: torch.Tensor
) -> dict[nn.Parameter, torch.Tensor]:
    """Puts gradients in their place; returns those that have to be copied and added up."""
    left = {}
    for param, gradients in rule(layer, activations, backprops).items():
        place: Any = param
        is_whole = len(gradients) == layer.max_batch_len
        is_first = not hasattr(param, "_current_grad_sample")
        if param.requires_grad and is_first and is_whole and place._forward_counter == 1:
            place._current_grad_sample = gradients
        else:
            left[param] = gradients
    return left
