"""The part of a model that is not trained, in the mode in which it is a fixed map."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from opacus.layers.dp_rnn import DPRNNBase
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.utils.rnn import PackedSequence

from hidden_state_accountants import UnsupportedRunError

# Modules of torch.nn whose forward pass is the same in train() and eval() mode.
_SAME_IN_BOTH_MODES = {
    "activation", "container", "conv", "flatten", "linear", "normalization", "padding", "pooling",
    "sparse",
}  # fmt: skip
_EXCEPT = (nn.RReLU, nn.MultiheadAttention)


class FrozenPart:
    """Keeps in eval() mode what is not trained, whatever model.train() says.

    In train() mode batch normalisation mixes the records of a batch, and dropout draws another
    feature map in every step. `hold` switches back before every training pass.

    Frozen is every module with parameters of which none is trained, with all that is inside it; of
    a model whose loss geometry was derived from its linear head everything before the head. Where
    every step counts only its layers with running statistics are kept: others draw as in Opacus.
    """

    def __init__(
        self, module: nn.Module, head: nn.Module | None = None, *, is_composed: bool = False
    ):
        self._parts: set[nn.Module] = set()
        for part in module.modules():
            is_before = head is not None and all(inner is not head for inner in part.modules())
            if is_before or _is_frozen(part):
                self._parts.update(p for p in part.modules() if not _is_stateless(p))
        if is_composed:
            self._parts = {part for part in self._parts if isinstance(part, _NormBase)}

    def check_batch_norm(self, modules: tuple[tuple[str, nn.Module], ...]) -> None:
        """Raises UnsupportedRunError if a layer mixes the records of a batch.

        What is frozen will not, if it has statistics to use instead.
        """
        for name, part in modules:
            if not isinstance(part, _BatchNorm):
                continue
            is_held = not part.training or part in self._parts
            if part.running_mean is None or not is_held:
                how = (
                    "in train() mode"
                    if part.running_mean is not None
                    else "without running statistics"
                )
                raise UnsupportedRunError(
                    f"Expected no batch statistics, got {type(part).__name__} {name!r} {how}: one "
                    "record then changes the gradients of all others. Freeze the layer with "
                    "requires_grad_(False), call .eval() on it after every model.train(), or use "
                    "nn.GroupNorm."
                )

    def hold(self) -> None:
        """Switches the frozen part to eval() mode."""
        for part in self._parts:
            if part.training:
                part.training = False

    def __bool__(self) -> bool:
        return bool(self._parts)


def _is_frozen(part: nn.Module) -> bool:
    parameters = list(part.parameters())
    return bool(parameters) and not any(p.requires_grad for p in parameters)


def _is_stateless(part: nn.Module) -> bool:
    package, _, name = type(part).__module__.rpartition(".")
    return (
        package == "torch.nn.modules"
        and name in _SAME_IN_BOTH_MODES
        and not isinstance(part, _EXCEPT)
    )


def refuse_packed_sequences(module: nn.Module) -> None:
    """Hangs a check on Opacus' recurrent layers that train, once, for good.

    The rows of per-example gradients of a packed batch stay in the order in which it was packed,
    longest first (Opacus 1.6). Sequences that the model itself sorted are not told apart.
    """
    for layer in module.modules():
        is_trained = any(p.requires_grad for p in layer.parameters())
        is_checked = _check in layer._forward_pre_hooks.values()
        if isinstance(layer, DPRNNBase) and is_trained and not is_checked:
            layer.register_forward_pre_hook(_check, with_kwargs=True)


def _check(layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    if not (layer.training and torch.is_grad_enabled()):
        return
    if any(isinstance(value, PackedSequence) for value in (*args, *kwargs.values())):
        raise UnsupportedRunError(
            f"Expected a padded batch at {type(layer).__name__}, got a PackedSequence: Opacus "
            "leaves its per-example gradients in another order than those of other layers, so that "
            "no clip bounds what a record does. Pass the padded batch, and read the output at the "
            "last position of every record (output[torch.arange(len(lengths)), lengths - 1])."
        )
