"""Whether the features of a record are computed from that record alone: one look at one batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from hidden_state_adapters.opacus.guards.random_numbers import random_numbers_as_before
from hidden_state_adapters.opacus.head.passes import Call

_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
_COARSE = 2e-2  # of features that were computed in half precision


def features_are_apart(
    module: nn.Module, head: nn.Linear, call: Call, features: torch.Tensor
) -> bool | None:
    """Whether half of a batch has the same features alone, and beside other records.

    Args:
        module: The model.
        head: Its linear layer, which the features reach.
        call: What the model was called with.
        features: What reached the head then, shape (rows, features).

    Returns:
        None where nobody can tell: the model raises on other batches, or draws random numbers.
    """
    limit = _TOLERANCE.get(features.dtype, _COARSE)
    if any(x.dtype in (torch.float16, torch.bfloat16) for x in module.parameters()):
        limit = _COARSE
    try:
        for other, kept in _versions(call, len(features)):
            found = _features(module, head, other)[: kept.stop - kept.start]
            if _is_near(found, features[kept], limit):
                continue
            first, again = (_features(module, head, call, is_random=True) for _ in range(2))
            return False if _is_near(first, again, limit) else None
    except Exception:  # whatever a model may raise on records that are not in the data
        return None
    return True


def _versions(call: Call, rows: int) -> Iterator[tuple[Call, slice]]:
    """Batches that start with one half of the records, and where these are in the whole batch."""
    middle = rows // 2
    for kept, rest in (
        (slice(0, middle), slice(middle, rows)),
        (slice(middle, rows), slice(middle)),
    ):
        yield _changed(call, rows, lambda x, kept=kept: x[kept]), kept
        yield _changed(call, rows, lambda x, k=kept, r=rest: torch.cat([x[k], _other(x[r])])), kept


def _other(part: torch.Tensor) -> torch.Tensor:
    """Other records, of integers in another order: a model may know no others."""
    return 2 * part if part.is_floating_point() else part.flip(0)


def _changed(call: Call, rows: int, change: Any) -> Call:
    def one(value: Any) -> Any:
        is_batch = isinstance(value, torch.Tensor) and value.dim() and len(value) == rows
        return change(value.detach()) if is_batch else value

    changed: Call = tree_map(one, call)
    return changed


def _features(
    module: nn.Module, head: nn.Linear, call: Call, *, is_random: bool = False
) -> torch.Tensor:
    kept: list[torch.Tensor] = []

    def note(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kept.append((args[0] if args else kwargs["input"]).detach())

    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    handle = head.register_forward_pre_hook(note, with_kwargs=True)
    try:
        with torch.no_grad():
            if is_random:
                module(*call[0], **call[1])
            else:
                with random_numbers_as_before(tree_leaves(call)):
                    module(*call[0], **call[1])
    finally:
        handle.remove()
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
    return kept[0]


def _is_near(found: torch.Tensor, own: torch.Tensor, limit: float) -> bool:
    off = torch.linalg.vector_norm(found - own)
    return bool(off <= limit * torch.linalg.vector_norm(own))
