"""How the loop computes its loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hidden_state_accountants import UnsupportedRunError
from hidden_state_adapters.opacus.device_figures import Figure
from hidden_state_adapters.opacus.forward_watch import ForwardWatch
from hidden_state_adapters.opacus.loss_gradient import LossGradient, is_same_numbers

_PROBABILITY_SLACK = 1e-5  # rounding of a sum of probabilities
_ELEMENTWISE = (nn.MSELoss, nn.HuberLoss, nn.SmoothL1Loss, nn.BCEWithLogitsLoss)
_SETTINGS = (
    "reduction", "ignore_index", "label_smoothing", "delta", "beta", "weight", "pos_weight",
)  # fmt: skip


class CriterionWatch:
    """Checks that the loop computes its loss with the criterion whose constants are accounted.

    The criterion is called once, on the output of the model as it is, and the gradient that reaches
    that output is the one of the criterion and no other. Calls without gradients, in eval() mode
    and on another model do not count.

    Args:
        criterion: One that `geometry.auto_loss_geometry` knows.
        forward: The watch of the model.
    """

    def __init__(self, criterion: nn.Module, forward: ForwardWatch):
        self._criterion, self._forward = criterion, forward
        self._settings = self._current_settings()
        self._handles = [
            criterion.register_forward_pre_hook(self._check, with_kwargs=True),
            criterion.register_forward_hook(self._follow),
        ]
        self._gradient = LossGradient()
        forward.keeps_output = True
        self.reset()

    def reset(self) -> None:
        """Starts counting for the next batch."""
        self._calls, self._rows = 0, 0
        self._is_followed = self._has_output = False
        self.has_bad_target: Figure = False
        self._gradient.reset()

    @property
    def has_other_gradient(self) -> Figure:
        """Whether the model's output got another gradient than that of the criterion."""
        return self._gradient.is_other

    def remove(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()

    def _current_settings(self) -> list[Any]:
        return [getattr(self._criterion, name, None) for name in _SETTINGS]

    def _check(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self._is_followed = False
        if not self._forward.is_in_training_pass:
            return None
        output, target = (*args, *(kwargs[k] for k in ("input", "target") if k in kwargs))
        if not output.requires_grad:
            return None
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
        left = self._forward.output
        self._has_output = left is not None and is_same_numbers(output, *left)
        if left is None or not self._has_output:
            return None
        self._is_followed = True
        return (self._gradient.follow_input(left[0], output), target), {}

    def _follow(self, module: nn.Module, args: Any, value: torch.Tensor) -> None:
        if self._is_followed:
            self._gradient.follow_value(value)
        self._is_followed = False

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
        if not self._has_output:
            raise UnsupportedRunError(
                f"step {step}: the criterion was called with something else than the output of the "
                "model as it is (a temperature, a sum of outputs, some of its columns?), so the "
                "loss has unknown constants. Pass the output itself, or declare a LossGeometry."
            )
        if rows and not self._gradient.is_complete:
            self.raise_other_gradient(step)

    def raise_other_gradient(self, step: int) -> None:
        """Raises the UnsupportedRunError that `has_other_gradient` stands for."""
        raise UnsupportedRunError(
            f"step {step} has gradients of another loss than the value of the criterion: it was "
            "scaled, weighted or wrapped before backward(), or another loss uses the output of the "
            "model. The constants of the criterion say nothing about that. Call backward() on the "
            "value of the criterion (a scale belongs into the learning rate), or declare the whole "
            "loss as a LossGeometry."
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
