"""What the model is, and what is done to it between the steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from hidden_state_accountants import UnsupportedRunError
from hidden_state_adapters.opacus.optimizer_checks import check_precision

_PROBABILITY_SLACK = 1e-5  # rounding of a sum of probabilities
_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


def _trainable(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in module.named_parameters() if p.requires_grad]


def check_parameters(module: nn.Module, optimizer: Optimizer) -> None:
    """Raises UnsupportedRunError unless `optimizer` trains exactly the trainable parameters."""
    own = dict(module.named_parameters())
    known = {id(p) for p in own.values()}
    managed = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if managed - known:
        raise UnsupportedRunError(
            f"Expected the optimizer to hold parameters of the module only, got "
            f"{len(managed - known)} others. Construct it with module.parameters()."
        )
    if not any(p.requires_grad for p in own.values()):
        raise UnsupportedRunError("Expected a module with trainable parameters, got none.")
    for name, param in own.items():
        if not param.requires_grad:
            continue
        check_precision(f"parameter {name}", param)
        if id(param) not in managed:
            raise UnsupportedRunError(
                f"Expected every trainable parameter in the optimizer, {name} is missing: other "
                "code could train it unaccounted. Add it, or freeze it with requires_grad_(False)."
            )


class ParameterWatch:
    """Notices when parameters change in another way than through the private optimizer.

    A copy of the trainable parameters is kept after every step and compared bit by bit before the
    next one; this sees every way to write them (`load_state_dict`, `.data`, another optimizer).
    `ForwardWatch` compares them in every training pass, too: a gradient taken at perturbed
    parameters that are restored before the step (Nesterov by hand, sharpness-aware training) is not
    the gradient of the theorems. Values that are changed and restored with neither in between
    (evaluation with averaged weights) do no harm. Buffers must not change at all during a run.

    It cannot see a model that was copied out, trained elsewhere and released, nor values that were
    changed through `.data` between forward and backward pass and restored.

    Args:
        module: The module itself, not Opacus' wrapper.
        optimizer: The wrapped optimizer.
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer):
        self._module = module
        self._optimizer = optimizer
        self._names = _trainable(module)
        self.params = [param for _, param in self._names]
        self._managed = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._copies: list[torch.Tensor] = []
        self._buffers: dict[str, torch.Tensor] = {}
        self.remember()
        self.remember_buffers()

    def remember_buffers(self) -> None:
        """Takes the current buffers of the module for those of the run."""
        self._buffers = {name: b.detach().clone() for name, b in self._module.named_buffers()}

    def buffers_changed(self) -> torch.Tensor:
        """A 0-dim boolean: whether a buffer was added, removed or written during the run."""
        buffers = dict(self._module.named_buffers())
        if buffers.keys() != self._buffers.keys():
            return torch.tensor(True)
        device = self._copies[0].device
        flags = [_differ(buffers[name], old).to(device) for name, old in self._buffers.items()]
        return torch.stack(flags).any() if flags else torch.tensor(False, device=device)

    def remember(self) -> None:
        """Takes the current values for those that the last step left."""
        self._copies = [param.detach().clone() for param in self.params]

    def check_structure(self, step: int) -> None:
        """Raises UnsupportedRunError if parameters were added, replaced, frozen or unfrozen."""
        names = _trainable(self._module)
        if len(names) != len(self._names) or any(
            name != old_name or param is not old
            for (name, param), (old_name, old) in zip(names, self._names, strict=True)
        ):
            raise UnsupportedRunError(
                f"step {step} trains {[name for name, _ in names]}, expected "
                f"{[name for name, _ in self._names]} as at make_private: the set of trainable "
                "parameters is fixed for a run. Call make_private again for another set."
            )
        params = [p for group in self._optimizer.param_groups for p in group["params"]]
        if {id(p) for p in params} != self._managed:
            raise UnsupportedRunError(
                f"step {step} optimizes {len(params)} parameters, expected the "
                f"{len(self._managed)} of make_private: parameter groups are fixed for a run."
            )
        for param in params:
            if not param.requires_grad and param.grad is not None:
                raise UnsupportedRunError(
                    f"step {step} would move a frozen parameter by its old gradient, without "
                    "noise. Set its .grad to None."
                )
            if param.requires_grad:
                check_precision("parameters", param)

    def changed(self) -> torch.Tensor:
        """A 0-dim boolean: whether a value differs from what the last step left."""
        device = self._copies[0].device
        flags = [
            _differ(param, copy).to(device)
            for param, copy in zip(self.params, self._copies, strict=True)
        ]
        return torch.stack(flags).any()

    def release_memory(self) -> None:
        """Drops the copies; the watch ends."""
        self._copies, self._buffers = [], {}


def _differ(value: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
    if value.shape != copy.shape or value.dtype != copy.dtype:
        return torch.tensor(True, device=copy.device)
    value = value.detach().to(copy.device)
    if copy.dtype in _INTEGERS:  # compares bits: NaN equals itself
        kind = _INTEGERS[copy.dtype]
        value, copy = value.view(kind), copy.view(kind)
    return (value != copy).any()


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
    """Checks the training passes of a module and measures the features of a linear layer.

    A pass is one call of the module, or a call of one of its trainable layers by itself. Every pass
    uses the parameters that the last step left, and no batch statistics.

    Args:
        module: The module itself, not Opacus' wrapper.
        head: Where to measure the norm of the inputs, or None.
        parameters: The watch of the module's parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        head: nn.Linear | None = None,
        parameters: ParameterWatch | None = None,
    ):
        self._parameters = parameters
        self.passes = 0
        self.largest_feature_norm: torch.Tensor | None = None
        self.has_other_parameters = torch.tensor(False)
        self._owners = [
            part
            for part in module.modules()
            if any(p.requires_grad for p in part.parameters(recurse=False))
        ]
        self._is_inside = False
        self._handles = [
            module.register_forward_pre_hook(self._count),
            module.register_forward_hook(self._leave, always_call=True),
        ]
        for part in self._owners:
            if part is not module:
                self._handles.append(part.register_forward_pre_hook(self._count_layer))
        if head is not None:
            self._handles.append(head.register_forward_pre_hook(self._measure, with_kwargs=True))

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
        self._is_inside = True
        self.passes += 1
        if self._parameters is not None:
            changed = self._parameters.changed()
            self.has_other_parameters = self.has_other_parameters.to(changed.device) | changed

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._is_inside = False

    def _count_layer(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not self._is_inside and self._is_training():
            self.passes += 1  # the loop calls a layer by itself

    def _measure(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._is_training():
            return
        features = args[0] if args else kwargs["input"]
        if features.dim() != 2:
            raise UnsupportedRunError(
                f"Expected features of shape (records, {module.in_features}) at the linear layer, "
                f"got {tuple(features.shape)}: several rows per record are not one linear "
                "prediction. Flatten them, or declare loss_geometry without feature_norm."
            )
        largest = features.detach().norm(2, dim=1).max() if len(features) else None
        if largest is not None and self.largest_feature_norm is not None:
            largest = torch.maximum(largest, self.largest_feature_norm)
        self.largest_feature_norm = largest

    def reset(self) -> None:
        """Starts counting for the next batch."""
        self.passes, self.largest_feature_norm = 0, None
        self.has_other_parameters = torch.tensor(False)

    def remove(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()

    def __reduce__(self) -> Any:
        return _idle_watch, ()  # a copy of the module trains nothing here


def _idle_watch() -> ForwardWatch:
    watch = ForwardWatch(nn.Identity())
    watch.remove()
    return watch


_ELEMENTWISE = (nn.MSELoss, nn.HuberLoss, nn.SmoothL1Loss, nn.BCEWithLogitsLoss)
_SETTINGS = (
    "reduction", "ignore_index", "label_smoothing", "delta", "beta", "weight", "pos_weight",
)  # fmt: skip


class CriterionWatch:
    """Checks that the loop computes its loss with the criterion whose constants are accounted.

    Calls without gradients, in eval() mode and on another model do not count.

    Args:
        criterion: One that `geometry.auto_loss_geometry` knows.
        forward: The watch of the model.
    """

    def __init__(self, criterion: nn.Module, forward: ForwardWatch):
        self._criterion, self._forward = criterion, forward
        self._settings = self._current_settings()
        self._handle = criterion.register_forward_pre_hook(self._check, with_kwargs=True)
        self._calls, self._rows = 0, 0
        self.has_bad_target = torch.tensor(False)

    def reset(self) -> None:
        """Starts counting for the next batch."""
        self._calls, self._rows = 0, 0
        self.has_bad_target = torch.tensor(False)

    def remove(self) -> None:
        """Removes the hook."""
        self._handle.remove()

    def _current_settings(self) -> list[Any]:
        return [getattr(self._criterion, name, None) for name in _SETTINGS]

    def _check(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._forward.is_in_training_pass:
            return
        output, target = (*args, *(kwargs[k] for k in ("input", "target") if k in kwargs))
        if not output.requires_grad:
            return
        if self._current_settings() != self._settings:
            raise UnsupportedRunError(
                f"Expected the criterion as it was at make_private, got {module}: its constants "
                "were taken then. Call make_private again for another criterion."
            )
        if isinstance(module, _ELEMENTWISE):
            _check_equal_shapes(output, target)
        else:
            self.has_bad_target = _has_bad_class(target, self._criterion.ignore_index)
        self._calls += 1
        self._rows = len(output) if output.dim() else 1

    def check_calls(self, step: int, rows: int) -> None:
        """Raises UnsupportedRunError unless the loss of the batch came from one call."""
        if self._calls == 0:
            raise UnsupportedRunError(
                f"step {step}: the criterion passed to make_private was not called, so the loss "
                'has unknown constants. Compute the loss with this object, or replace "auto" by a '
                "LossGeometry."
            )
        if (self._calls, self._rows) != (1, rows):
            raise UnsupportedRunError(
                f"step {step} follows {self._calls} calls of the criterion, the last one on "
                f"{self._rows} rows, expected 1 call on all {rows} rows of the batch. Compute "
                "other losses under torch.no_grad()."
            )

    def raise_bad_target(self, step: int) -> None:
        """Raises the UnsupportedRunError that `has_bad_target` stands for."""
        raise UnsupportedRunError(
            f"step {step} has a target that equals ignore_index = {self._criterion.ignore_index} "
            "or is no vector of probabilities: ignored records rescale the gradients of the "
            "others. The step was not taken. Remove those records beforehand."
        )


def _check_equal_shapes(output: torch.Tensor, target: torch.Tensor) -> None:
    if output.shape != target.shape:
        raise UnsupportedRunError(
            f"Expected a target of the shape {tuple(output.shape)} of the model's output, got "
            f"{tuple(target.shape)}: broadcasting would compare every record with the targets of "
            "all others. Use target.reshape(output.shape)."
        )


def _has_bad_class(target: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """A 0-dim boolean for targets of CrossEntropyLoss: class indices or probabilities."""
    if not target.is_floating_point():
        return (target == ignore_index).any()
    off = (target.detach().sum(dim=-1, dtype=torch.float64) - 1).abs()
    return ~((target >= 0).all() & (off <= _PROBABILITY_SLACK).all())
