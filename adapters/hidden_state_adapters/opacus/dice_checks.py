"""What a DiceSGD optimizer must be given, and what must not change under it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from opacus.optimizers import DPOptimizer
from torch import nn
from torch.optim import Optimizer

from hidden_state_accountants import UnsupportedRunError
from hidden_state_adapters.opacus.optimizer_checks import check_precision

Sums = list[tuple[torch.Tensor, int] | None]
"""The sums of clipped gradients that a piece of a batch left, with their versions."""


def check_base(name: str, optimizer: Any, allowed: tuple[type[Optimizer], ...]) -> None:
    """Raises UnsupportedRunError unless `optimizer` is exactly of an `allowed` type."""
    if type(optimizer) in allowed:
        return
    if isinstance(optimizer, DPOptimizer):
        remedy = "Pass its original_optimizer."
    else:
        remedy = (
            "The noisy update may go through any rule that sees nothing else of the records, but "
            "only these were read."
        )
    raise UnsupportedRunError(
        f"Expected {' or '.join(f'torch.optim.{t.__name__}' for t in allowed)} in {name}, got "
        f"{type(optimizer).__name__}. {remedy}"
    )


def check_options(loss_reduction: Any, generator: Any, secure_mode: Any) -> None:
    """Checks the arguments that Opacus takes as they come; one process only.

    Raises:
        TypeError, ValueError: An argument has an impossible value.
        UnsupportedRunError: There are several processes.
    """
    if loss_reduction not in ("mean", "sum"):
        raise ValueError(f"Expected loss_reduction = 'mean' or 'sum', got {loss_reduction!r}.")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(
            f"Expected generator to be a torch.Generator or None, got {type(generator).__name__}."
        )
    if not isinstance(secure_mode, bool):
        raise TypeError(f"Expected secure_mode to be True or False, got {secure_mode!r}.")
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if distributed and torch.distributed.get_world_size() > 1:
        raise UnsupportedRunError(
            f"Expected one process, got {torch.distributed.get_world_size()}: the error and the "
            "noise across processes are not checked yet. Train in a single process."
        )


def holds_tensors(state: Mapping[Any, Mapping[str, Any]]) -> bool:
    """Whether the state of an optimizer, by parameter, holds momentum or moments."""
    return any(isinstance(v, torch.Tensor) for part in state.values() for v in part.values())


def moments_of(optimizer: Optimizer) -> list[tuple[torch.Tensor, int]]:
    """Momentum or moments, with their versions."""
    parts = optimizer.state.values()
    tensors = [v for part in parts for v in part.values() if isinstance(v, torch.Tensor)]
    return [(tensor, tensor._version) for tensor in tensors]


def check_moments(
    step: int, optimizer: Optimizer, expected: list[tuple[torch.Tensor, int]]
) -> None:
    """Raises UnsupportedRunError unless momentum or moments are what the last step left."""
    now = moments_of(optimizer)
    if len(now) != len(expected) or any(
        tensor is not old or version != old_version
        for (tensor, version), (old, old_version) in zip(now, expected, strict=True)
    ):
        raise UnsupportedRunError(
            f"step {step} starts with momentum or moments that the last step did not leave: they "
            "may hold gradients without noise. Call step() of the private optimizer only, and "
            "load a state with its load_state_dict."
        )


def refuse_per_layer(**norms: Any) -> None:
    """Raises UnsupportedRunError for lists of clip norms."""
    for name, value in norms.items():
        if isinstance(value, list | tuple):
            raise UnsupportedRunError(
                f"Expected {name} to be one number, got {value!r}: all parameters are clipped as "
                "one vector. Pass the norm of the whole gradient of a record."
            )


def check_parameters(params: list[nn.Parameter]) -> None:
    """Raises UnsupportedRunError unless `params` can be trained, not in Opacus' ghost mode."""
    if not params:
        raise UnsupportedRunError("Expected trainable parameters, got none.")
    for param in params:
        check_precision("parameters", param)
    refuse_ghost_clipping(params)


def refuse_ghost_clipping(params: list[nn.Parameter]) -> None:
    """Raises UnsupportedRunError if the model clips as Opacus does in its ghost mode."""
    if any(hasattr(param, "_norm_sample") for param in params):
        raise UnsupportedRunError(
            "Expected GradSampleModule or GhostGradSampleModule, got Opacus' ghost clipping: its "
            "second backward pass leaves only a sum clipped with min(1, C / (norm + 1e-6)), and "
            "the error also needs the sum of what the clip cuts off. Wrap the model in "
            "hidden_state_adapters.opacus.GhostGradSampleModule and use the plain criterion."
        )


def check_clip_norms(smallest: float, clip_norm: float, error_clip_norm: float) -> None:
    """Raises ValueError for clip norms so small that norms near them are not reliable."""
    for name, value in (("max_grad_norm", clip_norm), ("error_max_grad_norm", error_clip_norm)):
        if value < smallest:
            raise ValueError(
                f"Expected {name} >= {smallest:.3g} in this precision, got {value:g}: squares of "
                "shorter vectors underflow. Use float64 parameters, or scale the loss up."
            )


def check_same_parameters(step: int, optimizer: Optimizer, params: list[nn.Parameter]) -> None:
    """Raises UnsupportedRunError if parameters were added, removed, frozen or unfrozen."""
    managed = [p for group in optimizer.param_groups for p in group["params"]]
    trained = [p for p in managed if p.requires_grad]
    if len(trained) != len(params) or any(
        now is not then for now, then in zip(trained, params, strict=True)
    ):
        raise UnsupportedRunError(
            f"step {step} trains {len(trained)} parameters, expected the {len(params)} of the "
            "construction: the error belongs to them. Construct another optimizer for another set."
        )
    if any(p.grad is not None for p in managed if not p.requires_grad):
        raise UnsupportedRunError(
            f"step {step} would move a frozen parameter by its old gradient, without noise. Set "
            "its .grad to None."
        )
    check_parameters(params)


def no_sums(params: list[nn.Parameter]) -> Sums:
    """What `check_sums` expects at the start of a batch."""
    return [None] * len(params)


def sums_of(params: list[nn.Parameter]) -> Sums:
    """What `check_sums` expects after a piece of a batch."""
    return [None if (s := p.summed_grad) is None else (s, s._version) for p in params]  # type: ignore[attr-defined]


def check_sums(step: int, params: list[nn.Parameter], expected: Sums) -> None:
    """Raises UnsupportedRunError if the sums are not those that the last piece left.

    The error is that of the same records as the sum: one without the other is not DiceSGD.
    """
    for now, then in zip(sums_of(params), expected, strict=True):
        if (now is None) != (then is None) or (
            now and then and (now[0] is not then[0] or now[1] != then[1])
        ):
            raise UnsupportedRunError(
                f"step {step} starts with a sum of clipped gradients that does not come from the "
                "pieces of its batch. Call optimizer.zero_grad() after every step, and leave "
                "summed_grad alone."
            )
