"""How the loop computes its loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hidden_state_accountants import UnsupportedRunError
from hidden_state_adapters.opacus.forward_watch import ForwardWatch

_PROBABILITY_SLACK = 1e-5  # rounding of a sum of probabilities
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
