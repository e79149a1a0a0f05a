"""Whether a model takes every record by itself: one look at one batch."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_leaves, tree_map

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a call."""

_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
_COARSE = 5e-2  # of what was computed in half precision, or may have been in TF32
_FACTORS = (1000, -1)  # of other records

Version = tuple[Callable[[], Call], int, range]
"""Makes a call with other records; their number; those of the batch that are among them.

These are in their own places, or alone.
"""


def records_are_apart(
    module: nn.Module,
    compute: Callable[[Call], Sequence[torch.Tensor]],
    call: Call,
    rows: int,
    dim: int = 0,
    further: Sequence[Version] = (),
) -> bool | None:
    """Whether half of a batch gives the same alone, and beside other records.

    Dropout is switched off for the look, and all else that eval() switches off where that does not
    make the model repeat itself.

    Args:
        module: The model.
        compute: What it computes, tensors with an entry for every record; it may draw random
            numbers and write buffers, which are then as before.
        call: What the model was called with.
        rows: Records of the batch, at least two.
        dim: The dimension that counts them.
        further: Versions of the call that should give the same, too.

    Returns:
        None where nobody can tell: the model raises on other batches, draws random numbers, or
        computes nothing that has an entry for every record.
    """
    parts = list(module.modules())
    dropouts = [part for part in parts if isinstance(part, _DropoutNd)]
    versions = [*_versions(call, rows, dim), *further]
    looks = (_Look(module, compute, dim, off).at(call, rows, versions) for off in (dropouts, parts))
    return next((found for found in looks if found is not None), None)


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def outputs_of(
    module: nn.Module,
    compute: Callable[[Call], Sequence[torch.Tensor]],
    call: Call,
    rows: int,
    dim: int = 0,
) -> list[torch.Tensor]:
    """What a model computes for the records; see `records_are_apart`."""
    return _Look(module, compute, dim, ()).computed(call, rows)


class _Look:
    """Computes what a model makes of a batch, and leaves it as it was.

    Args:
        module: The model.
        compute: See `records_are_apart`.
        dim: The dimension that counts the records.
        off: The parts that are in eval() mode for the look.
    """

    _after: torch.Tensor  # the state of torch's generator when it was done

    def __init__(self, module: nn.Module, compute: Any, dim: int, off: Sequence[nn.Module]):
        self._module, self._compute, self._dim, self._off = module, compute, dim, off
        params = list(module.parameters())
        coarse = (torch.float16, torch.bfloat16)
        self._is_coarse = any(x.dtype in coarse or x.is_cuda for x in params)

    def at(self, call: Call, rows: int, versions: Sequence[Version]) -> bool | None:
        """See `records_are_apart`."""
        try:
            whole = self.computed(call, rows)
        except Exception:  # whatever a model may raise that is called again
            return None
        has_seen_all, after = bool(whole), self._after
        for make, size, kept in versions:
            expected = [x.narrow(self._dim, kept.start, len(kept)) for x in whole]
            try:
                start = kept.start if size == rows else 0
                found = self.computed(make(), size)
                found = [x.narrow(self._dim, start, len(kept)) for x in found]
                if [x.shape for x in found] != [x.shape for x in expected]:
                    has_seen_all = False  # a container that is not looked into, other lengths
                    continue
                if self._are_near(found, expected):
                    continue
                # Those of the first half were drawn before the numbers of the others.
                draws_alike = size == rows and not kept.start and torch.equal(after, self._after)
                is_mixed = self._repeats(call, rows, whole, draws_alike=draws_alike)
            except Exception:  # whatever a model may raise on records that are not in the data
                has_seen_all = False
                continue
            if is_mixed:
                return False
            has_seen_all = False
        return True if has_seen_all else None

    def _repeats(
        self, call: Call, rows: int, whole: Sequence[torch.Tensor], *, draws_alike: bool
    ) -> bool:
        """Whether the model computes the same again: with other random numbers, or with these."""
        with random_numbers_as_before(tree_leaves(call)):
            for _ in range(2):
                again = self.computed(call, rows, is_random=True)
        return self._are_near(again, whole) or (
            draws_alike and self._are_near(self.computed(call, rows), whole)
        )

    def computed(self, call: Call, rows: int, *, is_random: bool = False) -> list[torch.Tensor]:
        """What has an entry for every record."""
        buffers = [(buffer, buffer.clone()) for buffer in self._module.buffers()]
        modes = [(part, part.training) for part in self._off]
        repeats = random_numbers_as_before(tree_leaves(call))
        try:
            for part, _ in modes:
                part.training = False
            with torch.no_grad(), contextlib.nullcontext() if is_random else repeats:
                found = self._compute(tree_map(_copy, call))  # a model may write to its input
                self._after = torch.get_rng_state()
        finally:
            for part, mode in modes:
                part.training = mode
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)
        return [x for x in found if x.dim() > self._dim and x.shape[self._dim] == rows]

    def _are_near(self, found: Sequence[torch.Tensor], own: Sequence[torch.Tensor]) -> bool:
        """Whether two results are equal, up to rounding."""
        return all(map(self._is_near, found, own))

    def _is_near(self, found: torch.Tensor, own: torch.Tensor) -> bool:
        limit = _COARSE if self._is_coarse else _TOLERANCE.get(own.dtype, _COARSE)
        off = torch.linalg.vector_norm(found - own)
        return bool(off <= limit * torch.linalg.vector_norm(own))


def _versions(call: Call, rows: int, dim: int) -> Iterator[Version]:
    """Each half of the records alone, and beside others in the places of the rest."""
    for kept in halves(rows):
        yield functools.partial(_changed, call, rows, dim, kept, None), len(kept), kept
        for factor in _FACTORS:
            yield functools.partial(_changed, call, rows, dim, kept, factor), rows, kept


def halves(rows: int) -> tuple[range, range]:
    """The records of each half of a batch."""
    return range(rows // 2), range(rows // 2, rows)


def _changed(call: Call, rows: int, dim: int, kept: range, factor: int | None) -> Call:
    """The records that are kept, alone or beside others."""
    first = next((x for x in tree_leaves(call) if isinstance(x, torch.Tensor)), None)

    def one(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dim() <= dim or value.shape[dim] != rows:
            return value
        if value.shape == (rows, rows) and value is not first:
            return value  # a mask of positions, of a sequence as long as the batch
        parts = [value.detach().narrow(dim, half.start, len(half)) for half in halves(rows)]
        own = 0 if kept.start == 0 else 1
        if factor is None:
            return parts[own]
        parts[1 - own] = _other(parts[1 - own], dim, factor)
        return torch.cat(parts, dim=dim)

    changed: Call = tree_map(one, call)
    return changed


def _other(part: torch.Tensor, dim: int, factor: int) -> torch.Tensor:
    """Records scaled, or in another order where they are integers.

    Those may be indices, in floating point, too: a model may know no others.
    """
    flipped = part.flip(dim)
    if not part.is_floating_point():
        return flipped
    is_whole = (part == part.round()).all(dim=dim, keepdim=True)
    return torch.where(is_whole, flipped, factor * part)


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
