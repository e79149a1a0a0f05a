"""How the loop computes its loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hidden_state_accountants import Assumption, UnsupportedRunError
from hidden_state_adapters.opacus.criteria import KnownCriterion, SquaredCriterion
from hidden_state_adapters.opacus.gradients import figures
from hidden_state_adapters.opacus.gradients.figures import Figure, any_of, differ
from hidden_state_adapters.opacus.guards.base import Guard, Piece
from hidden_state_adapters.opacus.guards.forward import ForwardGuard
from hidden_state_adapters.opacus.guards.head import HeadWatch


class LossGradient:
    """What the backward pass sends to the output of the linear head.

    Where the loop calls the criterion that it passed, the gradient that arrives has to be the one
    that the criterion sends back. They differ if the value of the criterion is scaled, weighted or
    wrapped before backward(), if another loss uses the output as well, or if the criterion is
    called for the log only. In an honest loop both are the same memory, so that nothing is computed
    but one comparison with 1.

    Where the loop computes the loss in another way (a function, or inside of the model), the
    gradient that arrives has to be that of the criterion at the output, for some label of every
    record.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets the last pass."""
        self.output: tuple[torch.Tensor, int] | None = None
        self._own: torch.Tensor | None = None
        self._total: torch.Tensor | None = None
        self._seen = {"value": 0, "own": 0, "total": 0}
        self._version: int | None = None
        self._is_other: Figure = False

    def follow_output(self, output: torch.Tensor) -> None:
        """`output` is what the head returned in a training pass."""
        self.output = output, output._version

    def follow_input(self, passed: torch.Tensor) -> torch.Tensor:
        """What the criterion is to be called with instead of `passed`, the head's output."""
        own = passed.view_as(passed)
        own.register_hook(self._note_own)
        return own

    def follow_value(self, value: torch.Tensor) -> None:
        """`value` is what the criterion returned."""
        value.register_hook(self._note_value)

    def follow_gradient(self, gradient: torch.Tensor) -> None:
        """`gradient` is what the backward pass sent to the output."""
        self._seen["total"] += 1
        self._total = gradient

    def __reduce__(self) -> Any:
        return LossGradient, ()  # a copy of the model follows nothing

    @property
    def is_complete(self) -> bool:
        """Whether one backward pass went from the value of the criterion to the output."""
        return set(self._seen.values()) == {1}

    def is_of_another_value(self) -> Figure:
        """Whether the output got something else than the value of the criterion sent back."""
        own, total = self._own, self._total
        if own is None or total is None or own.numel() != total.numel() or self._was_written:
            return True
        if own.data_ptr() == total.data_ptr():
            return self._is_other
        return any_of([self._is_other, differ(own.reshape(total.shape), total)])

    def is_of_another_loss(
        self, criterion: KnownCriterion, factor: float, targets: Iterable[torch.Tensor]
    ) -> Figure:
        """Whether the output got something else than the gradient of `criterion`.

        Args:
            criterion: What the gradient has to be of.
            factor: What makes it the gradient of the loss of every record.
            targets: What the targets may be, beside hard labels.
        """
        if self.output is None or self._total is None or self._seen["total"] != 1:
            return True
        output, version = self.output
        if output._version != version:
            return True
        with torch.no_grad():
            return criterion.is_other(output.detach(), factor * self._total, targets)

    @property
    def _was_written(self) -> bool:
        """Whether a hook on the output changed in place what the criterion sent back."""
        return self._own is not None and self._own._version != self._version

    def _note_value(self, gradient: torch.Tensor) -> None:
        self._seen["value"] += 1
        self._is_other = any_of([self._is_other, _is_not_one(gradient)])

    def _note_own(self, gradient: torch.Tensor) -> None:
        self._seen["own"] += 1
        # The reference keeps autograd from adding other gradients in place.
        self._own, self._version = gradient, gradient._version


class CriterionGuard(Guard):
    """Checks that the loop computes its loss with the criterion whose constants are accounted.

    If the loop calls the criterion, it does so once, on the output of the linear head as it is, and
    the gradient that reaches that output is the one of the criterion and no other. If it does not,
    the gradient that reaches the output is compared with the formula of the criterion. Calls
    without gradients, in eval() mode and on another model do not count.

    Args:
        known: What is known of the criterion.
        forward: The guard of the model's training passes.
        head: The watch of the linear head, whose output is followed.
        delivered: The tensors of the batch that the loader delivered.
        divides: Whether the loss of a batch is divided by its number of rows.
    """

    def __init__(
        self,
        known: KnownCriterion,
        forward: ForwardGuard,
        head: HeadWatch,
        delivered: Callable[[], Sequence[torch.Tensor]],
        *,
        divides: bool,
    ):
        self.known, self._forward = known, forward
        self._delivered, self._divides = delivered, divides
        self._criterion: Any = known.criterion
        self._settings = [_copied(self._setting(name)) for name in known.settings]
        self._handles = [
            self._criterion.register_forward_pre_hook(self._check, with_kwargs=True),
            self._criterion.register_forward_hook(self._follow),
        ]
        self.gradient = LossGradient()
        head.follow_output = self.gradient.follow_output
        head.follow_gradient = self.gradient.follow_gradient
        self._was_called = self._was_computed = False  # in some step of the run
        self._reset()

    def _reset(self) -> None:
        self.calls, self._rows = 0, 0
        self._is_followed = self._has_output = False
        self._has_bad_target: Figure = False
        self._has_other_settings: Figure = False
        self.gradient.reset()

    @property
    def assumptions(self) -> Iterable[Assumption]:
        """What is verified at every step."""
        if self._was_called or not self._was_computed:
            yield Assumption.checked(
                "the criterion called once on all outputs, a target for each; no other loss"
            )
        if self._was_computed:
            yield Assumption.checked(
                f"the gradient at the outputs that of {type(self._criterion).__name__}, for some "
                "target of every record; no other loss"
            )

    def before(self, piece: Piece) -> None:
        """Raises UnsupportedRunError unless the loss of the batch came from one call."""
        if self.calls:  # which looked at the settings
            self._check_call(piece.step, piece.rows)
        else:
            self._check_settings(f"step {piece.step}: ")

    def figures(self, piece: Piece) -> Mapping[str, Figure]:
        """Whether a target rescales the gradients of other records, or the weights are others."""
        return {
            "bad_target": self._has_bad_target,
            "other_settings": self._has_other_settings,
        }

    def judge(self, piece: Piece, values: Mapping[str, float]) -> None:
        """Raises UnsupportedRunError if one does, or they are."""
        if values["other_settings"]:
            raise self._other_settings(f"step {piece.step}: ")
        if not values["bad_target"]:
            return
        raise UnsupportedRunError(
            f"step {piece.step} has a target {self.known.about_targets}. The step was not taken. "
            "Remove those records beforehand."
        )

    def is_another_loss(self, piece: Piece) -> Figure:
        """Whether the gradient at the output is not that of the criterion."""
        if not piece.rows:
            return False
        if self.calls:
            return self.gradient.is_of_another_value()
        factor = float(piece.rows) if self._divides else 1.0
        return self.gradient.is_of_another_loss(self.known, factor, self._delivered())

    def used(self, piece: Piece) -> None:
        """Starts counting for the next piece."""
        if piece.rows:
            self._was_called |= self.calls > 0
            self._was_computed |= self.calls == 0
        self._reset()

    def resume(self, steps: int) -> None:
        """Starts counting anew."""
        self._reset()

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()

    def __reduce__(self) -> Any:
        return _idle_watch, ()  # a copy of the criterion belongs to no run

    def _setting(self, name: str) -> Any:
        return getattr(self._criterion, name, None)

    def _check_settings(self, where: str) -> None:
        """Raises UnsupportedRunError if they are others; of a device the step says so."""
        now = [self._setting(name) for name in self.known.settings]
        differs = any_of(map(_differs, now, self._settings))
        if differs is True:
            raise self._other_settings(where)
        self._has_other_settings = any_of([self._has_other_settings, differs])

    def _other_settings(self, where: str) -> UnsupportedRunError:
        return UnsupportedRunError(
            f"{where}Expected the criterion as it was at make_private, got {self._criterion}: "
            "its constants were taken then. Call make_private again for another criterion."
        )

    def _check(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self._is_followed = False
        if not self._forward.is_in_training_pass:
            return None
        output, target = (*args, *(kwargs[k] for k in ("input", "target") if k in kwargs))
        if not (isinstance(output, torch.Tensor) and output.requires_grad):
            return None
        self._check_settings("")
        if self.known.is_elementwise:
            _check_equal_shapes(output, target)
        self._has_bad_target = self.known.has_bad_target(target)
        self.calls += 1
        self._rows = len(output) if output.dim() else 1
        left = self.gradient.output
        self._has_output = left is not None and _is_same_numbers(output, *left)
        if not self._has_output:
            return None
        self._is_followed = True
        return (self.gradient.follow_input(output), target), {}

    def _follow(self, module: nn.Module, args: Any, value: torch.Tensor) -> None:
        if self._is_followed:
            self.gradient.follow_value(value)
        self._is_followed = False

    def _check_call(self, step: int, rows: int) -> None:
        if (self.calls, self._rows) != (1, rows):
            raise UnsupportedRunError(
                f"step {step} follows {self.calls} calls of the criterion, the last one on "
                f"{self._rows} rows, expected 1 call on all {rows} rows of the batch. Compute "
                "other losses under torch.no_grad()."
            )
        if not self._has_output:
            raise UnsupportedRunError(
                f"step {step}: the criterion was called with something else than the output of the "
                "linear head as it is (a temperature, a sum of outputs, some of its columns?), so "
                "the loss has unknown constants. Pass the output itself, or declare a LossGeometry."
            )
        if rows and not self.gradient.is_complete:
            raise _other_gradient(step)


def _idle_watch() -> CriterionGuard:
    head, forward = nn.Linear(1, 1), ForwardGuard(nn.Identity())
    known = SquaredCriterion(nn.MSELoss())
    watch = CriterionGuard(known, forward, HeadWatch(head, False), tuple, divides=False)
    for guard in (forward, watch):
        guard.close()
    return watch


class LossGradientGuard(Guard):
    """Notices that the head's output got another gradient than that of the criterion.

    It is asked after the gradients' norms were looked at, because they say more about the cause.

    Args:
        criterion: The guard of the criterion.
    """

    def __init__(self, criterion: CriterionGuard):
        self._criterion = criterion

    def figures(self, piece: Piece) -> Mapping[str, Figure]:
        """Whether the gradients differ."""
        return {"other_loss": self._criterion.is_another_loss(piece)}

    def judge(self, piece: Piece, values: Mapping[str, float]) -> None:
        """Raises UnsupportedRunError if they do."""
        if not values["other_loss"]:
            return
        if self._criterion.calls:
            raise _other_gradient(piece.step)
        known = self._criterion.known
        raise UnsupportedRunError(
            f"step {piece.step} has gradients of another loss than {known.criterion}: the "
            "criterion passed to make_private was not called, so that the gradient at the output "
            "of the linear head was compared with its formula, and it fits no label and no tensor "
            "of the batch as the loader delivered it. (A scaled, weighted, second or divided loss, "
            "a temperature, ignored or transformed targets?) Pass the loss that the loop computes; "
            "for targets that the loop transforms call the criterion object itself, on the output "
            "as it is; or declare a LossGeometry."
        )


def _other_gradient(step: int) -> UnsupportedRunError:
    return UnsupportedRunError(
        f"step {step} has gradients of another loss than the value of the criterion: it was "
        "scaled, weighted or wrapped before backward(), or another loss uses the output of the "
        "model. The constants of the criterion say nothing about that. Call backward() on the "
        "value of the criterion (a scale belongs into the learning rate), or declare the whole "
        "loss as a LossGeometry."
    )


def _is_not_one(gradient: torch.Tensor) -> Figure:
    if gradient.dim() == 0 and figures.is_on_host(gradient):
        return bool(gradient.item() != 1)
    return differ(gradient, torch.ones_like(gradient))


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


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _differs(value: Any, then: Any) -> Figure:
    """Whether a setting is not what it was; nobody waits for weights on a device."""
    if not (isinstance(value, torch.Tensor) and isinstance(then, torch.Tensor)):
        return isinstance(value, torch.Tensor) or bool(value != then)
    if value.shape != then.shape:
        return True
    return differ(value.detach().to(then.dtype), then.to(value.device))
