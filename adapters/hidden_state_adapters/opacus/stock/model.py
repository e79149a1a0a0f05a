"""What a model and a loader must not do behind a stock engine; seen before the first step."""

from __future__ import annotations

from typing import Any

from torch import nn

from hidden_state_accountants import UnsupportedRunError
from hidden_state_adapters.opacus.guards.packed import refuse_packed_sequences_for_good


def check_model(module: Any) -> None:
    """Raises UnsupportedRunError for layers that write to their parameters in a forward pass.

    Recurrent layers raise it from then on when they are called with packed sequences.
    """
    inner = getattr(module, "_module", module)  # behind Opacus' wrapper, or its hooks
    if not isinstance(inner, nn.Module):
        return
    for name, layer in inner.named_modules():
        if getattr(layer, "max_norm", None) is not None and isinstance(
            layer, nn.Embedding | nn.EmbeddingBag
        ):
            raise UnsupportedRunError(
                f"Expected layers that leave their parameters alone, got {type(layer).__name__} "
                f"{name} with max_norm = {layer.max_norm:g}: it shortens the rows that a batch "
                "uses, without noise. Leave max_norm out; max_grad_norm bounds what a record does."
            )
    refuse_packed_sequences_for_good(inner)


def check_collate(data_loader: Any) -> None:
    """Raises UnsupportedRunError for loaders that put a made-up record into an empty batch."""
    if getattr(getattr(data_loader, "collate_fn", None), "rand_on_empty", False):
        raise UnsupportedRunError(
            "Expected rand_on_empty = False, got True: it puts a made-up record into an empty "
            "batch, so that one record more or less changes the sum by two clip norms. Leave it "
            "out: empty batches are steps like others."
        )
