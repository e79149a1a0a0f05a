"""`grad_sample_mode="ghost"`: what the engine makes of it."""

from __future__ import annotations

from typing import Any

from opacus import PrivacyEngine
from opacus.grad_sample import AbstractGradSampleModule
from torch import nn

from hidden_state_accountants import UnsupportedRunError
from hidden_state_adapters.opacus.ghost_module import GhostGradSampleModule


def check_ghost_arguments(arguments: dict[str, Any], criterion: Any) -> None:
    """Refuses arguments of make_private that ghost clipping cannot work with.

    Raises:
        UnsupportedRunError: There is no criterion, or the model is not to be wrapped.
    """
    if arguments.get("grad_sample_mode") != "ghost":
        return
    if not callable(criterion):
        raise UnsupportedRunError(
            f'Expected a criterion with grad_sample_mode="ghost", got {criterion!r}: make_private '
            "returns it as third of four, as Opacus does. Pass criterion=."
        )
    if not arguments.get("wrap_model", True):
        raise UnsupportedRunError(
            'Expected wrap_model = True with grad_sample_mode="ghost", got False: only the wrapper '
            "GhostGradSampleModule keeps what the sums follow from. Leave it out."
        )


class GhostEngine(PrivacyEngine):
    """Makes a `GhostGradSampleModule` where Opacus makes its own module and criterion."""

    def _prepare_model(
        self,
        module: nn.Module,
        *,
        grad_sample_mode: str = "hooks",
        batch_first: bool = True,
        loss_reduction: str = "mean",
        **kwargs: Any,
    ) -> Any:
        options = {"batch_first": batch_first, "loss_reduction": loss_reduction}
        if grad_sample_mode != "ghost":
            mode = {"grad_sample_mode": grad_sample_mode}
            return super()._prepare_model(module, **mode, **options, **kwargs)
        if not isinstance(module, AbstractGradSampleModule):
            self.validate(module=module, optimizer=None, data_loader=None)
            return GhostGradSampleModule(module, **options)
        given = {name: getattr(module, name) for name in options}
        if type(module) is not GhostGradSampleModule or given != options:
            raise ValueError(
                f"Expected a plain module or a GhostGradSampleModule with {options}, got "
                f"{type(module).__name__} with {given}. Pass the plain module."
            )
        return module

    def _prepare_criterion(self, *, criterion: Any, **kwargs: Any) -> Any:
        return criterion  # one backward pass, from which everything follows
