"""Whether a model takes every record by itself: one look at one batch."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from hidden_state_adapters.opacus.sources.base import Call

_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
_COARSE = 2e-2  # of what was computed in half precision


def records_are_apart(
    module: nn.Module,
    compute: Callable[[Call], Sequence[torch.Tensor]],
    call: Call,
    rows: int,
    dim: int = 0,
) -> bool | None:
    """Whether half of a batch gives the same alone, and beside other records.

    Args:
        module: The model.
        compute: What it computes, tensors with an entry for every record; it may draw random
            numbers and write buffers, which are then as before.
        call: What the model was called with.
        rows: Records of the batch, at least two.
        dim: The dimension that counts them.

    Returns:
        None where nobody can tell: the model raises on other batches, draws random numbers, or
        computes nothing that has an entry for every record.
    """
    look = _Look(module, compute, dim)
    try:
        whole = look.computed(call, rows)
    except Exception:  # whatever a model may raise that is called again
        return None
    has_seen_all = bool(whole)
    for other, size, kept in _versions(call, rows, dim):
        expected = [x.narrow(dim, kept.start, len(kept)) for x in whole]
        try:
            found = [x.narrow(dim, 0, len(kept)) for x in look.computed(other, size)]
            if look.is_near(found, expected):
                continue
            first, again = (look.computed(call, rows, is_random=True) for _ in range(2))
        except Exception:  # whatever a model may raise on records that are not in the data
            has_seen_all = False
            continue
        return False if look.is_near(first, again) else None
    return True if has_seen_all else None


class _Look:
    """Computes what a model makes of a batch, and leaves it as it was."""

    def __init__(self, module: nn.Module, compute: Any, dim: int):
        self._module, self._compute, self._dim = module, compute, dim
        coarse = (torch.float16, torch.bfloat16)
        self._is_coarse = any(x.dtype in coarse for x in module.parameters())

    def computed(self, call: Call, rows: int, *, is_random: bool = False) -> list[torch.Tensor]:
        """What has an entry for every record."""
        buffers = [(buffer, buffer.clone()) for buffer in self._module.buffers()]
        repeats = random_numbers_as_before(tree_leaves(call))
        try:
            with torch.no_grad(), contextlib.nullcontext() if is_random else repeats:
                found = self._compute(call)
        finally:
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)
        return [x for x in found if x.dim() > self._dim and x.shape[self._dim] == rows]

    def is_near(self, found: Sequence[torch.Tensor], own: Sequence[torch.Tensor]) -> bool:
        """Whether two results are equal, up to rounding."""
        return len(found) == len(own) and all(map(self._are_near, found, own))

    def _are_near(self, found: torch.Tensor, own: torch.Tensor) -> bool:
        limit = _COARSE if self._is_coarse else _TOLERANCE.get(own.dtype, _COARSE)
        off = torch.linalg.vector_norm(found - own)
        return bool(off <= limit * torch.linalg.vector_norm(own))


def _versions(call: Call, rows: int, dim: int) -> Iterator[tuple[Call, int, range]]:
    """Batches that start with one half of the records, their sizes, and which records these are."""
    middle = rows // 2
    for kept, rest in ((range(middle), range(middle, rows)), (range(middle, rows), range(middle))):
        yield _changed(call, rows, dim, kept), len(kept), kept
        for factor in (2, -1):
            yield _changed(call, rows, dim, kept, rest, factor), rows, kept


def _other(part: torch.Tensor, dim: int, factor: int) -> torch.Tensor:
    """Other records, of integers in another order: a model may know no others."""
    return factor * part if part.is_floating_point() else part.flip(dim)


def _changed(
    call: Call, rows: int, dim: int, kept: range, rest: range = range(0), factor: int = 1
) -> Call:
    """The records that are kept, and others made of the rest."""

    def one(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dim() <= dim or value.shape[dim] != rows:
            return value
        own, others = (value.detach().narrow(dim, x.start, len(x)) for x in (kept, rest))
        return torch.cat([own, _other(others, dim, factor)], dim=dim)

    changed: Call = tree_map(one, call)
    return changed


@contextlib.contextmanager
def random_numbers_as_before(values: Iterable[Any] = ()) -> Iterator[None]:
    """Afterwards torch, numpy and Python draw what they would have drawn anyway.

    Args:
        values: Tensors among these say which GPUs may draw some.
    """
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    devices = {x.device.index for x in tensors if x.device.type == "cuda"}
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng(devices=list(devices)):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
