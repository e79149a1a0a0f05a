"""What went into a linear head, and the leaf that was handed to the loop for what came out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import nn

from hidden_state_accountants import UnsupportedRunError
from hidden_state_adapters.opacus.gradients.figures import Figure, counted_writes
from hidden_state_adapters.opacus.gradients.precision import check_arithmetic, exact_products
from hidden_state_adapters.opacus.sources.apart import Call
from hidden_state_adapters.opacus.sources.base import Hooks, remove_all
from hidden_state_adapters.opacus.sources.frozen import FrozenPart
from hidden_state_adapters.opacus.sources.iterate import Iterate

_uncompiled = torch.compiler.disable  # a compiled model would write what hooks keep into its graph


@attrs.frozen(eq=False)
class HeadPass:
    """One pass of a batch through the head.

    Attributes:
        features: What went in.
        outputs: What the loop got: its backward pass leaves the slopes there, and no gradient at
            the parameters of the head.
        moved: Whether the weights of the pass were not those of the last step.
        call: What the model was called with; None where the loop called the head by itself.
    """

    features: torch.Tensor
    outputs: torch.Tensor
    moved: Figure
    call: Call | None
    _writes: int = attrs.field(init=False)

    @_writes.default
    def _count(self) -> int:
        return counted_writes(self.features) + counted_writes(self.outputs)

    @property
    def was_written(self) -> bool:
        """Whether the loop changed features or outputs in place."""
        return counted_writes(self.features) + counted_writes(self.outputs) != self._writes


class HeadPasses:
    """Follows a linear head. The loop gets outputs that do not lead to the head's parameters.

    Attributes:
        handles: Its hooks.

    Args:
        module: The module itself, not Opacus' wrapper.
        head: Its linear layer.
        iterate: The weights that the last step left.
        frozen: What is kept in eval() mode.
        is_flat: Whether a record has to be one row.
        has_loss: Whether the loop's gradients have to be those of a declared loss.
        is_composed: Whether gradients go on to what comes before the module, as in Opacus, and
            hooks may be registered on the model during the run.
    """

    # Opacus and users copy models with their hooks; a copy trains nothing here.
    _is_idle = True

    def __init__(
        self,
        module: nn.Module,
        head: nn.Linear,
        iterate: Iterate,
        frozen: FrozenPart,
        *,
        is_flat: bool,
        has_loss: bool,
        is_composed: bool,
    ):
        self._iterate, self._frozen, self._is_flat = iterate, frozen, is_flat
        self._has_loss, self._is_composed = has_loss, is_composed
        self._modules = tuple(module.named_modules())
        self._passes: list[HeadPass] = []
        self._call: Call | None = None
        self._hooks = None if is_composed else Hooks(self._modules)
        self._weight, self._bias = head.weight, head.bias
        self._is_idle = False
        self.handles = [
            module.register_forward_pre_hook(self._begin, with_kwargs=True),
            head.register_forward_hook(self._note, with_kwargs=True, prepend=True),
            module.register_forward_hook(self._end, always_call=True),
        ]

    @_uncompiled
    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled() and not self._is_idle:
            self._frozen.hold()
            self._frozen.check_batch_norm(self._modules)
            if self._has_loss:
                check_arithmetic(self._iterate.params)
            self._call = args, kwargs

    @_uncompiled
    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._call = None

    @_uncompiled
    def _note(
        self, head: nn.Linear, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
    ) -> torch.Tensor | None:
        if self._is_idle or not output.requires_grad:
            return None
        attached = args[0] if args else kwargs["input"]
        features = attached.detach()
        if self._is_flat and features.dim() != 2:
            raise UnsupportedRunError(
                f"Expected features of shape (records, {head.in_features}) at the linear layer, "
                f"got {tuple(features.shape[1:])} for each: several rows per record are not one "
                "linear prediction. Flatten them, or leave out criterion= and feature_norm=: "
                "every step then counts."
            )
        if self._hooks is not None:
            self._hooks.check()
            if attached.requires_grad and any(one.call is self._call for one in self._passes):
                raise UnsupportedRunError(
                    "Expected features that do not depend on the linear head, got those of a pass "
                    "in which the model called it before (shared weights?): no loss is known to be "
                    "convex in its weights then. Leave out criterion=, feature_norm= and "
                    "loss_geometry=: every step then counts."
                )
        is_other = head.weight is not self._weight or head.bias is not self._bias
        moved = is_other or self._iterate.moved()
        is_attached = self._is_composed and attached.requires_grad
        with exact_products(output.device.type), torch.set_grad_enabled(is_attached):
            leaf = self._outputs(attached if is_attached else features)
        if is_attached:
            leaf.retain_grad()
        else:
            leaf.requires_grad_()
        self._passes.append(HeadPass(features, leaf, moved, self._call))
        return leaf

    def _outputs(self, features: torch.Tensor) -> torch.Tensor:
        """What the head computes with the weights of the last step, whatever it holds."""
        weight = self._iterate.value(self._weight)
        bias = None if self._bias is None else self._iterate.value(self._bias).to(features.device)
        return F.linear(features.to(weight.dtype), weight.to(features.device), bias)

    def used(self) -> list[HeadPass]:
        """The passes whose outputs a backward pass reached; a look at others has no effect."""
        return [one for one in self._passes if one.outputs.grad is not None]

    def cleared(self) -> None:
        """Forgets the passes that a backward pass reached; the others may still wait for theirs."""
        self._passes = [one for one in self._passes if one.outputs.grad is None]

    def forget(self) -> None:
        """The next passes are of another piece."""
        self._passes = []

    def close(self) -> None:
        """Removes the hooks."""
        remove_all(self.handles)
        self.forget()

    def __reduce__(self) -> Any:
        return object.__new__, (type(self),)
