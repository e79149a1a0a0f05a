"""How the loop computes its loss."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from hidden_state_accountants import Assumption, UnsupportedRunError
from hidden_state_adapters.opacus.gradients.figures import Figure, any_of, differ
from hidden_state_adapters.opacus.guards.base import Guard, Piece
from hidden_state_adapters.opacus.guards.forward import ForwardGuard

_PROBABILITY_SLACK = 1e-5  # rounding of a sum of probabilities
_ELEMENTWISE = (nn.MSELoss, nn.HuberLoss, nn.SmoothL1Loss, nn.BCEWithLogitsLoss)
_SETTINGS = (
    "reduction", "ignore_index", "label_smoothing", "delta", "beta", "weight", "pos_weight",
    "clip_norm", "smoothing", "scale",
)  # fmt: skip


class LossGradient:
    """Compares the gradient at the model's output with the one that the criterion sends back.

    They differ if the value of the criterion is scaled, weighted or wrapped before backward(), if
    another loss uses the output as well, or if the criterion is called for the log only. The
    constants of the criterion then say nothing about the loss that is trained.

    In an honest loop both are the same memory, so that nothing is computed but one comparison with
    1.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets the last backward pass."""
        self._own: torch.Tensor | None = None
        self._seen = {"value": 0, "own": 0, "total": 0}
        self.is_other: Figure = False

    def follow_input(self, output: torch.Tensor, passed: torch.Tensor) -> torch.Tensor:
        """What the criterion is to be called with instead of `passed`, the model's `output`."""
        own = passed.view_as(passed)
        own.register_hook(self._note_own)
        output.register_hook(self._note_total)
        return own

    def follow_value(self, value: torch.Tensor) -> None:
        """`value` is what the criterion returned."""
        value.register_hook(self._note_value)

    @property
    def is_complete(self) -> bool:
        """Whether one backward pass went from the value to the output."""
        return set(self._seen.values()) == {1}

    def _note_value(self, gradient: torch.Tensor) -> None:
        self._seen["value"] += 1
        self._add(differ(gradient, torch.ones_like(gradient)))

    def _note_own(self, gradient: torch.Tensor) -> None:
        self._seen["own"] += 1
        self._own = gradient  # keeps autograd from adding other gradients in place

    def _note_total(self, gradient: torch.Tensor) -> None:
        self._seen["total"] += 1
        own = self._own
        if own is None or own.numel() != gradient.numel():
            self.is_other = True
        elif own.data_ptr() != gradient.data_ptr():
            self._add(differ(own.reshape(gradient.shape), gradient))

    def _add(self, flag: Figure) -> None:
        self.is_other = any_of([self.is_other, flag])


class CriterionGuard(Guard):
    """Checks that the loop computes its loss with the criterion whose constants are accounted.

    The criterion is called once, on the output of the model as it is, and the gradient that reaches
    that output is the one of the criterion and no other. Calls without gradients, in eval() mode
    and on another model do not count.

    Args:
        criterion: One that `geometry.auto_loss_geometry` knows.
        forward: The guard of the model's training passes.
    """

    def __init__(self, criterion: nn.Module, forward: ForwardGuard):
        self._criterion, self._forward = criterion, forward
        self._settings = self._current_settings()
        self._handles = [
            criterion.register_forward_pre_hook(self._check, with_kwargs=True),
            criterion.register_forward_hook(self._follow),
        ]
        self.gradient = LossGradient()
        forward.keeps_output = True
        self._reset()

    def _reset(self) -> None:
        self._calls, self._rows = 0, 0
        self._is_followed = self._has_output = False
        self._has_bad_target: Figure = False
        self.gradient.reset()

    @property
    def assumptions(self) -> Iterable[Assumption]:
        """What is verified at every step."""
        yield Assumption.checked(
            "the criterion called once on all outputs, a target for each; no other loss"
        )

    def before(self, piece: Piece) -> None:
        """Raises UnsupportedRunError unless the loss of the batch came from one call."""
        self._check_calls(piece.step, piece.rows)

    def figures(self, piece: Piece) -> Mapping[str, Figure]:
        """Whether a target rescales the gradients of other records."""
        return {"bad_target": self._has_bad_target}

    def judge(self, piece: Piece, values: Mapping[str, float]) -> None:
        """Raises UnsupportedRunError if one does."""
        if values["bad_target"]:
            raise UnsupportedRunError(
                f"step {piece.step} has a target that equals ignore_index = "
                f"{self._criterion.ignore_index} or is no vector of probabilities: ignored records "
                "rescale the gradients of the others. The step was not taken. Remove those records "
                "beforehand."
            )

    def used(self, piece: Piece) -> None:
        """Starts counting for the next piece."""
        self._reset()

    def resume(self, steps: int) -> None:
        """Starts counting anew."""
        self._reset()

    def close(self) -> None:
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
        elif isinstance(module, nn.CrossEntropyLoss):
            self._has_bad_target = _has_bad_class(target, module.ignore_index)
        self._calls += 1
        self._rows = len(output) if output.dim() else 1
        left = self._forward.output
        self._has_output = left is not None and _is_same_numbers(output, *left)
        if left is None or not self._has_output:
            return None
        self._is_followed = True
        return (self.gradient.follow_input(left[0], output), target), {}

    def _follow(self, module: nn.Module, args: Any, value: torch.Tensor) -> None:
        if self._is_followed:
            self.gradient.follow_value(value)
        self._is_followed = False

    def _check_calls(self, step: int, rows: int) -> None:
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
        if rows and not self.gradient.is_complete:
            raise _other_gradient(step)


class LossGradientGuard(Guard):
    """Notices that the model's output got another gradient than that of the criterion.

    It is asked after the gradients' norms were looked at, because they say more about the cause.

    Args:
        criterion: The guard of the criterion.
    """

    def __init__(self, criterion: CriterionGuard):
        self._gradient = criterion.gradient

    def figures(self, piece: Piece) -> Mapping[str, Figure]:
        """Whether the gradients differ."""
        return {"other_loss": self._gradient.is_other}

    def judge(self, piece: Piece, values: Mapping[str, float]) -> None:
        """Raises UnsupportedRunError if they do."""
        if values["other_loss"]:
            raise _other_gradient(piece.step)


def _other_gradient(step: int) -> UnsupportedRunError:
    return UnsupportedRunError(
        f"step {step} has gradients of another loss than the value of the criterion: it was "
        "scaled, weighted or wrapped before backward(), or another loss uses the output of the "
        "model. The constants of the criterion say nothing about that. Call backward() on the "
        "value of the criterion (a scale belongs into the learning rate), or declare the whole "
        "loss as a LossGeometry."
    )


def _is_same_numbers(passed: torch.Tensor, output: torch.Tensor, version: int) -> bool:
    """Whether `passed` is `output`, as it was at `version`, up to dimensions of size one."""
    return (
        passed.data_ptr() == output.data_ptr()
        and passed.dtype == output.dtype
        and [n for n in passed.shape if n != 1] == [n for n in output.shape if n != 1]
        and passed.numel() == output.numel()
        and output._version == version
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
