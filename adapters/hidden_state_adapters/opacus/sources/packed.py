"""Packed sequences, of which Opacus keeps per-example gradients in another order than elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from opacus.layers.dp_rnn import DPRNNBase
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from hidden_state_accountants import UnsupportedRunError


def refuse_packed_sequences(module: nn.Module) -> None:
    """Hangs a check on Opacus' recurrent layers that train, once, for good.

    A sequence is packed longest first, and the rows of per-example gradients of a recurrent layer
    stay in that order, those of all other layers in the order of the batch. A row is then the
    gradient of two records, and which two they are changes with the length of a third one: no clip
    bounds what one record does. So it is in Opacus 1.6. Sequences that the model itself sorted are
    not told apart from others, so that all are refused.
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
