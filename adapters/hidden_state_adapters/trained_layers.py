"""The layers that a declared loss can be convex in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hidden_state_accountants import LossGeometry


def why_not_convex(loss: LossGeometry | None, blocks: Iterable[Sequence[str]]) -> str:
    """Returns the reason why a loss is not as convex as it is declared, or "".

    Two layers in a row multiply their weights, and a product is convex in one factor alone. Each
    block has the names of the layers that are moved together.
    """
    if loss is None or not loss.is_convex:
        return ""
    for layers in blocks:
        if len(layers) > 1:
            return (
                f"Expected one trained layer with {loss!r}, got {', '.join(layers)}: no "
                "loss is convex in the weights of layers that follow each other. Leave out what "
                "says something of the loss (loss_geometry, feature_norm, criterion): every step "
                "then counts. Layers side by side are one layer, of their inputs or outputs "
                "together."
            )
    return ""
