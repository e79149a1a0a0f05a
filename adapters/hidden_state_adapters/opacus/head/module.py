"""Opacus' wrapper of a model, around a linear head whose gradients need no hooks."""

from __future__ import annotations

from typing import Any

from opacus.grad_sample import AbstractGradSampleModule
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class HeadModule(AbstractGradSampleModule):
    """A model as Opacus returns it; no per-example gradients are kept in its parameters."""

    @classmethod
    def of(cls, module: Any, **options: Any) -> nn.Module:
        """`module` with this wrapper in the place of another one."""
        if isinstance(module, AbstractGradSampleModule):
            module.remove_hooks()
            module = module._module
        if isinstance(module, DistributedDataParallel):
            # It waits for gradients of parameters, which a head does not get.
            module.require_backward_grad_sync = False
        return cls(module, **options)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in Opacus; gradients of the parameters become None."""
        super().zero_grad(set_to_none=True)

    def remove_hooks(self) -> None:
        """There are none."""
