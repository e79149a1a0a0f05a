"""The part of a model that is not trained, in the mode in which it is a fixed map."""

from __future__ import annotations

import logging
import operator
from collections.abc import Mapping
from typing import Any

import torch
from opacus.layers.dp_rnn import DPRNNBase
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.utils.rnn import PackedSequence

from hidden_state_accountants import UnsupportedRunError

_logger = logging.getLogger("hidden_state_accountants")

# Modules of torch.nn whose forward pass is the same in train() and eval() mode.
_SAME_IN_BOTH_MODES = {
    "activation", "container", "conv", "flatten", "linear", "normalization", "padding", "pooling",
    "sparse",
}  # fmt: skip
_EXCEPT = (nn.RReLU, nn.MultiheadAttention)
_IN_TRAINING = operator.attrgetter("training")
_NAMED = 4  # modules in a line of the log


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
        frozen: dict[nn.Module, str] = {}
        for name, part in module.named_modules():
            is_before = head is not None and all(inner is not head for inner in part.modules())
            if is_before or _is_frozen(part):
                frozen.update((p, n) for n, p in part.named_modules(prefix=name) if p not in frozen)
        if is_composed:
            frozen = {part: n for part, n in frozen.items() if isinstance(part, _NormBase)}
        self._parts = {part: name for part, name in frozen.items() if not _is_stateless(part)}
        self._checked: list[nn.Module] = []
        self._checked_in: object = None

    def check_batch_norm(self, modules: tuple[tuple[str, nn.Module], ...]) -> None:
        """Raises UnsupportedRunError if a layer mixes the records of a batch.

        What is frozen will not, if it has statistics to use instead. Layers that were fine are
        looked at again if one of them is in train() mode, or `modules` is another tuple.
        """
        if modules is self._checked_in and not any(map(_IN_TRAINING, self._checked)):
            return
        found = [(name, part) for name, part in modules if isinstance(part, _BatchNorm)]
        for name, part in found:
            is_held = part in self._parts
            if part.running_mean is None or (part.training and not is_held):
                how = "in train() mode"
                if part.running_mean is None:
                    how = "without running statistics"
                raise UnsupportedRunError(
                    f"Expected no batch statistics, got {type(part).__name__} {name!r} {how}: one "
                    "record then changes the gradients of all others, and the statistics are "
                    "stored without noise. Freeze the layer with requires_grad_(False) (it then "
                    "uses the statistics that it has), call .eval() on it after every "
                    "model.train(), or use nn.GroupNorm."
                )
        self._checked, self._checked_in = [part for _, part in found], modules

    def hold(self, *, tells: bool = False) -> None:
        """Switches the frozen part to eval() mode; `tells` logs what was in another mode."""
        if not any(map(_IN_TRAINING, self._parts)):
            return
        switched = [part for part in self._parts if part.training]
        for part in switched:
            part.training = False
        if tells and switched:
            names = [f"{self._parts[part]} ({type(part).__name__})" for part in switched]
            rest = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            _logger.warning(
                "Frozen layers are kept in eval() mode, whatever model.train() says: no dropout in "
                "them, and batch normalisation with the statistics that it has. Switched: %s%s.",
                ", ".join(names[:_NAMED]),
                rest,
            )

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
    longest first (Opacus 1.6), those of all other layers in that of the batch: no clip bounds what
    one record does. Sequences that the model itself sorted are not told apart from others.
    """
    for layer in module.modules():
        is_trained = any(p.requires_grad for p in layer.parameters())
        if isinstance(layer, DPRNNBase) and is_trained and not _is_checked(layer):
            layer.register_forward_pre_hook(_check, with_kwargs=True)


def _is_checked(layer: nn.Module) -> bool:
    return _check in layer._forward_pre_hooks.values()


def _check(layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    if not (layer.training and torch.is_grad_enabled()):
        return
    if any(isinstance(value, PackedSequence) for value in (*args, *kwargs.values())):
        raise UnsupportedRunError(
            f"Expected a padded batch at {type(layer).__name__}, got a PackedSequence: Opacus "
            "leaves the per-example gradients of a packed batch in the order in which it was "
            "packed, longest first, and those of other layers in the order of the batch. Its rows "
            "are then of different records, and no clip bounds what one of them does. Pass the "
            "padded batch, and read the output at the last position of every record "
            "(output[torch.arange(len(lengths)), lengths - 1])."
        )
