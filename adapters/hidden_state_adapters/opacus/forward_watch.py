"""What passes through the model in training."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from hidden_state_accountants import UnsupportedRunError
from hidden_state_adapters.opacus import device_figures, precision_checks
from hidden_state_adapters.opacus.device_figures import Figure
from hidden_state_adapters.opacus.head_watch import HeadWatch
from hidden_state_adapters.opacus.parameter_watch import ParameterWatch


def check_batch_norm(module: nn.Module) -> None:
    """Raises UnsupportedRunError if a layer of `module` mixes the records of a batch."""
    for name, part in module.named_modules():
        if not isinstance(part, _BatchNorm):
            continue
        if part.training or part.running_mean is None:
            raise UnsupportedRunError(
                f"Expected no batch statistics, got {type(part).__name__} {name!r} "
                f"{'in train() mode' if part.training else 'without running statistics'}, frozen "
                "or not: one record then changes the gradients of all others, and the statistics "
                "are stored without noise. Call .eval() on this part of the model after every "
                "model.train(), or use nn.GroupNorm."
            )


class ForwardWatch:
    """Checks the training passes of a module.

    A pass is one call of the module, or a call of one of its trainable layers by itself. Every pass
    uses the parameters that the last step left, no batch statistics, and in the trainable layers
    the arithmetic of float32 (a frozen backbone may round as it likes: it is a fixed map).

    Args:
        module: The module itself, not Opacus' wrapper.
        head: Measures the features of a linear layer, or None.
        parameters: The watch of the module's parameters.
        checks_convolutions: Whether convolutions and recurrent layers have to be exact, too.

    Attributes:
        keeps_output: Whether `output` is set.
        output: What the last training pass returned, and its version then.
    """

    def __init__(
        self,
        module: nn.Module,
        head: HeadWatch | None = None,
        parameters: ParameterWatch | None = None,
        *,
        checks_convolutions: bool = False,
    ):
        self._parameters = parameters
        self.passes = 0
        self._head = head
        self.has_other_parameters: Figure = False
        self.keeps_output = False
        self.output: tuple[torch.Tensor, int] | None = None
        self._owners = [
            part
            for part in module.modules()
            if any(p.requires_grad for p in part.parameters(recurse=False))
        ]
        self._trainable = [p for p in module.parameters() if p.requires_grad]
        self._names = {part: _trainable_names(part) for part in self._owners}
        self._checks_convolutions = checks_convolutions
        self.has_frozen_backbone = any(not p.requires_grad for p in module.parameters())
        self._is_inside = False
        self._handles = [
            module.register_forward_pre_hook(self._count),
            module.register_forward_hook(self._leave, always_call=True),
        ]
        for part in self._owners:
            if part is not module:
                self._handles.append(part.register_forward_pre_hook(self._count_layer))

    def _is_training(self) -> bool:
        return torch.is_grad_enabled() and any(part.training for part in self._owners)

    @property
    def is_in_training_pass(self) -> bool:
        """Whether what is computed now may belong to the next step."""
        return self.passes > 0 and self._is_training()

    def _count(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not self._is_training():
            return
        check_batch_norm(module)
        self._check_unfrozen(module)
        precision_checks.check_arithmetic(self._trainable)
        if self._checks_convolutions:
            precision_checks.check_convolutions(self._trainable)
        if self._head is not None:
            self._head.start_pass()
        self._is_inside = True
        self.passes += 1
        if self._parameters is not None:
            self.has_other_parameters = device_figures.any_of(
                [self.has_other_parameters, self._parameters.changed()]
            )

    def _check_unfrozen(self, layer: nn.Module) -> None:
        names = self._names.get(layer)
        now = _trainable_names(layer)
        if names is not None and not set(now) <= set(names):  # Opacus' hook on the layer would fail
            raise UnsupportedRunError(
                f"{type(layer).__name__} trains {now}, expected {names} as at the start: the set "
                "of trainable parameters is fixed for a run. Freeze the others again, or start "
                "another run for another set."
            )

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._is_inside and self._head is not None:
            self._head.end_pass(output)
        if self._is_inside and self.keeps_output and isinstance(output, torch.Tensor):
            self.output = output, output._version
        self._is_inside = False

    def _count_layer(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not self._is_training():
            return
        self._check_unfrozen(module)
        precision_checks.check_arithmetic(module.parameters(recurse=False))
        if not self._is_inside:
            self.passes += 1  # the loop calls a layer by itself

    @property
    def largest_feature_norm(self) -> torch.Tensor | None:
        """Of the records since the last reset; None without a measurement."""
        return None if self._head is None else self._head.largest_feature_norm

    def reset(self) -> None:
        """Starts counting for the next batch."""
        self.passes, self.output = 0, None
        if self._head is not None:
            self._head.reset()
        self.has_other_parameters = False

    def remove(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()
        if self._head is not None:
            self._head.remove()

    def __reduce__(self) -> Any:
        return _idle_watch, ()  # a copy of the module trains nothing here


def _trainable_names(layer: nn.Module) -> list[str]:
    parameters = layer.named_parameters(recurse=False)
    # "ew" puts tensors in their place that know no attributes.
    return [name for name, p in parameters if type(p) is nn.Parameter and p.requires_grad]


def _idle_watch() -> ForwardWatch:
    watch = ForwardWatch(nn.Identity())
    watch.remove()
    return watch
