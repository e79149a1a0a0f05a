"""What `make_private` returns in the place of Opacus' own wrappers of a model and a criterion."""

from __future__ import annotations

from typing import Any

from opacus.grad_sample import AbstractGradSampleModule
from opacus.utils.fast_gradient_clipping_utils import (
    DPLossFastGradientClipping,
    DPTensorFastGradientClipping,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hidden_state_accountants import UnsupportedRunError


class HeadModule(AbstractGradSampleModule):
    """A linear head, whose gradients need no hooks and are not kept in its parameters."""

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


class RowLosses(DPLossFastGradientClipping):
    """The criterion of ghost clipping, which multiplies the losses of records with clip factors.

    Losses of shape (records, 1) would be broadcast to all pairs of records, and nothing be clipped.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> DPTensorFastGradientClipping:
        """The losses of a batch; `backward()` makes both passes.

        Raises:
            UnsupportedRunError: There is not one loss for each record.
        """
        made = super().__call__(*args, **kwargs)
        shape = tuple(made.loss_per_sample.shape)
        if len(shape) != 1:
            raise UnsupportedRunError(
                f"Expected one loss for each record, shape (records,), got {shape[1:]} for each: "
                "the clip factors of all records would multiply each of them. Flatten outputs and "
                'targets (outputs.squeeze(1)), or use grad_sample_mode="hooks".'
            )
        return made
