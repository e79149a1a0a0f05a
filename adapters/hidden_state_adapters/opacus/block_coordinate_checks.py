"""What a block-coordinate optimizer must be given, and the batch that all blocks share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from opacus.grad_sample import AbstractGradSampleModule, GradSampleModuleFastGradientClipping
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from hidden_state_accountants import UnsupportedRunError
from hidden_state_adapters.opacus import optimizer_checks as checks
from hidden_state_adapters.opacus.forward_watch import ForwardWatch


def plain_module(module: Any) -> nn.Module:
    """The module that Opacus wrapped.

    Raises:
        UnsupportedRunError: It is not wrapped, or clips by a second backward pass.
    """
    if not isinstance(module, AbstractGradSampleModule):
        raise UnsupportedRunError(
            f"Expected module = GradSampleModule(model), got {type(module).__name__}: the gradient "
            "of every record is needed."
        )
    if isinstance(module, GradSampleModuleFastGradientClipping):
        raise UnsupportedRunError(
            "Expected GradSampleModule or GhostGradSampleModule, got Opacus' ghost clipping: it "
            "clips all parameters as one vector, and every block needs a clip of its own."
        )
    return module._module


def blocks_of(optimizer: Optimizer) -> list[list[nn.Parameter]]:
    """The trainable parameters of every parameter group.

    Raises:
        UnsupportedRunError: A group has none.
    """
    blocks = [[p for p in g["params"] if p.requires_grad] for g in optimizer.param_groups]
    for index, block in enumerate(blocks):
        if not block:
            raise UnsupportedRunError(
                f"Expected trainable parameters in every group, got none in group {index}: a group "
                "is a block. Leave the group out."
            )
    return blocks


def learning_rate(optimizer: Optimizer) -> float:
    """The learning rate of a plain SGD optimizer.

    Raises:
        UnsupportedRunError: It has other options, or weight decay.
    """
    options = checks.sgd_options(optimizer)
    if options["weight_decay"]:
        raise UnsupportedRunError(
            f"Expected weight_decay = 0, got {options['weight_decay']!r}: the event of DP-MBCD has "
            "no decay before the noise. Use l2, whose prox divides by 1 + step size * l2."
        )
    return options["lr"]


@torch.no_grad()
def apply_prox(
    block: list[nn.Parameter], step_size: float, l1: float, l2: float, nonnegative: bool
) -> None:
    r"""The proximal map of :math:`l_1|x|_1 + l_2|x|^2/2`, for x >= 0 if `nonnegative`, in place.

    .. math:: \mathrm{sign}(x) \max(|x| - \eta\,l_1, 0) / (1 + \eta\,l_2)

    and then max(., 0).
    """
    for p in block:
        if l1:
            p.copy_(torch.nn.functional.softshrink(p, step_size * l1))
        if l2:
            p.div_(1 + step_size * l2)
        if nonnegative:
            p.clamp_(min=0)


class BatchWatch:
    """Notices that the blocks of a step are updated on different inputs.

    Args:
        module: The module itself, not Opacus' wrapper.
        forward: The watch of its training passes, already attached.
    """

    def __init__(self, module: nn.Module, forward: ForwardWatch):
        self._forward = forward
        self._first: list[tuple[torch.Tensor, int]] | None = None
        self.differs = False
        module.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not self._forward.is_in_training_pass:
            return
        tensors = [x for x in tree_leaves((args, dict(kwargs))) if isinstance(x, torch.Tensor)]
        if self._first is None:
            self._first = [(x, x._version) for x in tensors]
        elif len(tensors) != len(self._first):
            self.differs = True
        else:
            pairs = zip(tensors, self._first, strict=True)
            self.differs |= not all(_same(x, old, version) for x, (old, version) in pairs)

    def reset(self) -> None:
        """Starts the next step."""
        self._first, self.differs = None, False

    def __reduce__(self) -> Any:
        return _idle_watch, ()  # a copy of the module trains nothing here


def _idle_watch() -> BatchWatch:
    module = nn.Identity()
    return BatchWatch(module, ForwardWatch(module))


def _same(tensor: torch.Tensor, old: torch.Tensor, version: int) -> bool:
    if old._version != version:
        return False
    return tensor is old or (tensor.dtype == old.dtype and torch.equal(tensor, old))
