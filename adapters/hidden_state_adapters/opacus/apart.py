"""One look at one batch: do model, collate_fn and criterion take every record by itself?"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, default_collate

from hidden_state_adapters.batch_plans import BatchPlan
from hidden_state_adapters.opacus.loader import plain_collate, tensors_of
from hidden_state_adapters.opacus.precision import is_half

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a call."""

_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
_COARSE = 5e-2  # of what was computed in half precision, or may have been in TF32
_ROUNDING = 1e-5  # of the mean of a batch
_OF_REPEATS = 1e-2  # of the tolerance: what computes the same again differs by no more
_FACTORS = (1000, -1)  # of other records
_FAR = 1e-3  # of the length of gradients of a criterion
_ALONE = 4  # records that are looked at one by one, beside both halves

Version = tuple[Callable[[], Call], int, range]
"""Makes a call with other records; their number; those of the batch that are among them.

These are in their own places, or alone.
"""


def records_are_apart(
    module: nn.Module,
    compute: Callable[[Call], Sequence[torch.Tensor]],
    call: Call,
    rows: int,
    further: Sequence[Version] = (),
) -> bool | None:
    """Tells whether half of a batch gives the same alone, and beside other records.

    Dropout is switched off for the look, and all else that eval() switches off where that does not
    make the model repeat itself. None where nobody can tell: the model raises on other batches,
    draws random numbers, or computes nothing that has an entry for every record.

    Args:
        module: The model.
        compute: Function of a call that returns tensors; it may draw random numbers and write
            buffers, which are then as before.
        call: Arguments of the model.
        rows: Records of the batch, at least two.
        further: Versions of the call that should give the same, too.
    """
    parts = list(module.modules())
    dropouts = [part for part in parts if isinstance(part, _DropoutNd)]
    versions = [*_versions(call, rows), *further]
    looks = (_Look(module, compute, off).at(call, rows, versions) for off in (dropouts, parts))
    return next((found for found in looks if found is not None), None)


def records_first(
    compute: Callable[[Call], Sequence[torch.Tensor]],
    call: Call,
    rows: int,
    further: Sequence[Version] = (),
) -> tuple[Callable[[Call], Sequence[torch.Tensor]], Call, Sequence[Version]]:
    """Returns the same for a call in which the second dimension of inputs counts the records."""
    tensors = [x for x in tree_leaves(call) if isinstance(x, torch.Tensor)]
    flags = [x.dim() > 1 and x.shape[1] == rows for x in tensors]

    def swapped(call: Call) -> Call:
        places = iter(flags)
        return _of_tensors(lambda x: x.transpose(0, 1) if next(places) else x, call)

    def computed(call: Call) -> list[torch.Tensor]:
        moved = swapped(call)
        inputs = [x for x in tree_leaves(moved) if isinstance(x, torch.Tensor)]
        count = next((x.shape[1] for x, is_moved in zip(inputs, flags, strict=True) if is_moved), 0)
        found = [x for x in compute(moved) if x.shape[:2] != (count, count)]  # either may be first
        return [x.transpose(0, 1) if x.shape[1:2] == (count,) else x for x in found]

    versions = [(lambda make=make: swapped(make()), *rest) for make, *rest in further]
    return computed, swapped(call), versions  # type: ignore[return-value]


def losses_add_up(
    module: nn.Module, compute: Callable[[Call], Sequence[torch.Tensor]], call: Call, rows: int
) -> bool | None:
    """Tells whether every number of a batch is the mean, or the sum, of those of its two halves.

    Losses of records add up so: a mean over all tokens, with class weights, or of pairs does not.
    None where there is no such number, or nobody can tell.
    """
    dropouts = [part for part in module.modules() if isinstance(part, _DropoutNd)]
    look = _Look(module, compute, dropouts)
    parts = [_changed(call, rows, kept, None) for kept in halves(rows)]
    try:
        with random_numbers_as_before(tree_leaves(call)):
            for _ in range(2):
                other = look.numbers(call, is_random=True)
        whole = look.numbers(call)
        first, second = (look.numbers(part) for part in parts)
    except Exception:  # whatever a model may raise that is called again
        return None
    if not len(whole) or not len(whole) == len(first) == len(second):
        return None
    mean = (rows // 2 * first + (rows - rows // 2) * second) / rows
    limit = _COARSE if look.is_coarse else _ROUNDING
    found = (torch.isclose(x, whole, rtol=limit, atol=limit) for x in (mean, first + second))
    return bool(torch.stack(list(found)).any(0).all()) if torch.equal(whole, other) else None


def outputs_of(
    module: nn.Module, compute: Callable[[Call], Sequence[torch.Tensor]], call: Call, rows: int
) -> list[torch.Tensor]:
    """Returns what a model computes for the records; see `records_are_apart`."""
    return _Look(module, compute, ()).computed(call, rows)


class _Look:
    """Computes with parts in eval() mode, and leaves the model as it was."""

    _after: torch.Tensor  # the state of torch's generator when it was done

    def __init__(self, module: nn.Module, compute: Any, off: Sequence[nn.Module]):
        self._module, self._compute, self._off = module, compute, off
        self.is_coarse = any(is_half(x) or x.is_cuda for x in module.parameters())

    def at(self, call: Call, rows: int, versions: Sequence[Version]) -> bool | None:
        """See `records_are_apart`."""
        try:
            whole = self.computed(call, rows)
        except Exception:  # whatever a model may raise that is called again
            return None
        has_seen_all, after = bool(whole), self._after
        for make, size, kept in versions:
            expected = [x[kept.start : kept.stop] for x in whole]
            try:
                start = kept.start if size == rows else 0
                found = [x[start : start + len(kept)] for x in self.computed(make(), size)]
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
        """Tells whether the model computes the same again: with other random numbers, or these."""
        with random_numbers_as_before(tree_leaves(call)):
            for _ in range(2):
                again = self.computed(call, rows, is_random=True)
        return self._are_near(again, whole, _OF_REPEATS) or (
            draws_alike and self._are_near(self.computed(call, rows), whole)
        )

    def computed(self, call: Call, rows: int, *, is_random: bool = False) -> list[torch.Tensor]:
        """Returns the results that have an entry for every record."""
        found = self._of(call, is_random)
        return [x for x in found if x.dim() and len(x) == rows]

    def numbers(self, call: Call, *, is_random: bool = False) -> torch.Tensor:
        """Returns the results that are one number for a batch."""
        found = [x.double().cpu() for x in self._of(call, is_random) if x.dim() == 0]
        return torch.stack(found) if found else torch.empty(0)

    def _of(self, call: Call, is_random: bool) -> Sequence[torch.Tensor]:
        buffers = [(buffer, buffer.clone()) for buffer in self._module.buffers()]
        modes = [(part, part.training) for part in self._off]
        repeats = random_numbers_as_before(tree_leaves(call))
        try:
            for part, _ in modes:
                part.training = False
            with torch.no_grad(), contextlib.nullcontext() if is_random else repeats:
                found = list(self._compute(_of_tensors(torch.clone, call)))  # it may write to it
                self._after = torch.get_rng_state()
        finally:
            for part, mode in modes:
                part.training = mode
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)
        return found

    def _are_near(
        self, found: Sequence[torch.Tensor], own: Sequence[torch.Tensor], share: float = 1.0
    ) -> bool:
        """Tells whether two results are equal, up to rounding, or a share of what that may be."""
        for x, y in zip(found, own, strict=False):
            limit = _COARSE if self.is_coarse else _TOLERANCE.get(y.dtype, _COARSE)
            if not (x - y).norm() <= share * limit * y.norm():
                return False
        return True


def _versions(call: Call, rows: int) -> Iterator[Version]:
    """Yields each half of the records alone, and beside others in the places of the rest."""
    for kept in halves(rows):
        yield functools.partial(_changed, call, rows, kept, None), len(kept), kept
        for factor in _FACTORS:
            yield functools.partial(_changed, call, rows, kept, factor), rows, kept


def halves(rows: int) -> tuple[range, range]:
    """Returns the records of each half of a batch."""
    return range(rows // 2), range(rows // 2, rows)


def _changed(call: Call, rows: int, kept: range, factor: int | None) -> Call:
    """Returns the records that are kept, alone or beside others."""
    seen: list[torch.Tensor] = []

    def one(value: torch.Tensor) -> torch.Tensor:
        seen.append(value)
        if not value.dim() or len(value) != rows:
            return value
        if value.shape == (rows, rows) and len(seen) > 1:
            return value  # a mask of positions, of a sequence as long as the batch
        parts = [value[half.start : half.stop] for half in halves(rows)]
        own = int(kept.start > 0)
        if factor is None:
            return parts[own]
        parts[1 - own] = _other(parts[1 - own], factor)
        return torch.cat(parts)

    return _of_tensors(one, call)


def _of_tensors(function: Callable[[torch.Tensor], torch.Tensor], call: Call) -> Call:
    """Returns a call with `function` of every tensor."""
    changed: Call = tree_map(
        lambda value: function(value.detach()) if isinstance(value, torch.Tensor) else value, call
    )
    return changed


def _other(part: torch.Tensor, factor: int) -> torch.Tensor:
    """Returns records scaled, or in another order.

    Another order is that of integers (indices, maybe, as floating point, too), of which a model may
    know no others.
    """
    if not part.is_floating_point():
        return part.flip(0)
    is_whole = (part == part.round()).all(dim=0, keepdim=True)
    return torch.where(is_whole, part.flip(0), factor * part)


@contextlib.contextmanager
def random_numbers_as_before(values: Iterable[Any] = ()) -> Iterator[None]:
    """Restores what torch (and GPUs of `values`), numpy and Python draw next."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    devices = {x.device.index for x in tensors if x.device.type == "cuda"}
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng(devices=list(devices)):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002


class Collated:
    """Hands parts of a batch to the loader's collate_fn, unless it is torch's, each by itself."""

    def __init__(self, plan: BatchPlan, loader: DataLoader):
        self._plan, self._dataset, self._collate = plan, loader.dataset, plain_collate(loader)
        self.is_custom = self._collate is not default_collate

    def versions(self, call: Call, step: int, rows: int) -> Sequence[Version]:
        """Returns calls with each half of the first records of a step's batch, and with the
        shortest one of them twice.

        Both halves may hold a record of the largest length, and be padded alike. None are made
        where the loop made tensors of its own.
        """
        if not self.is_custom:
            return []
        try:
            with random_numbers_as_before():
                records = self._records(step, rows)
                sizes = [sum(x.numel() for x in self._tensors([one, one])) for one in records]
                shortest = sizes.index(min(sizes))
                chosen = [*halves(rows), [shortest, shortest]]
                whole, *parts = (
                    self._tensors([records[i] for i in some]) for some in (range(rows), *chosen)
                )
                _replaced(call, whole, whole)
        except Exception:  # whatever data set or collate_fn may raise, or other tensors
            return []
        kept = [*halves(rows), range(shortest, shortest + 1)]
        return [
            (functools.partial(_replaced, call, whole, part), len(some), own)
            for part, some, own in zip(parts, chosen, kept, strict=True)
        ]

    def tensors(self, step: int, rows: int) -> list[torch.Tensor]:
        """Returns what the loader deals of the first records of a step's batch."""
        with random_numbers_as_before():
            return self._tensors(self._records(step, rows))

    def _records(self, step: int, rows: int) -> list[Any]:
        return [self._dataset[i] for i in self._plan.own_batch(step - 1)[:rows]]

    def _tensors(self, records: Sequence[Any]) -> list[torch.Tensor]:
        return list(tensors_of(self._collate(records)))


def _replaced(call: Call, whole: Sequence[torch.Tensor], half: Sequence[torch.Tensor]) -> Call:
    """Returns a call with tensors of a part of the batch; ValueError if a tensor is none of it."""

    def one(value: torch.Tensor) -> torch.Tensor:
        for own, other in zip(whole, half, strict=True):
            if own.shape == value.shape and torch.equal(own.to(value), value):
                return other.to(value)
        raise ValueError("The loop made a tensor of its own.")

    return _of_tensors(one, call)


def losses_are_apart(
    criterion: Any, outputs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], divides: bool
) -> bool | None:
    """Tells whether the gradient of every record is the same in a part of the batch.

    None where the criterion takes none of the outputs and tensors; the last tensor that it takes is
    the targets. `divides` says that the loss of a batch is the mean over its records, not the sum.
    """
    if isinstance(criterion, nn.Module):
        criterion = copy.deepcopy(criterion).cpu()  # where no label is fatal
    for output, target in itertools.product(outputs, reversed(tensors)):
        own = output.float() if is_half(output) else output
        found = []
        for form in _FORMS:
            try:
                found.append(_are_apart(criterion, form, own.cpu(), target.cpu(), divides))
            except Exception:  # whatever a criterion may raise that is given something else
                continue
        if found:
            return any(found)  # in another form targets may be broadcast
    return None


_FORMS: tuple[Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]], ...] = (
    lambda output, target: (output, target),
    lambda output, target: (output, target.reshape(output.shape).to(output)),
    lambda output, target: (output.flatten(0, -2), target.flatten()),  # classes at every position
)
"""Forms of outputs and targets that a criterion may take."""


def _are_apart(
    criterion: Any, form: Any, output: torch.Tensor, target: torch.Tensor, divides: bool
) -> bool:
    """Compares the gradient of the losses of the records in their outputs, all and some of them."""

    def gradient(rows: slice) -> torch.Tensor:
        own = output[rows].detach().clone().requires_grad_()
        with torch.enable_grad(), torch.autocast("cpu", enabled=False):
            value = criterion(*form(own, target[rows]))
            (found,) = torch.autograd.grad(value.sum(), own)
        return found * len(own) if divides and value.dim() == 0 else found

    whole, count = gradient(slice(None)), len(output)
    if not torch.equal(whole, gradient(slice(None))):
        raise ValueError("The criterion draws random numbers.")
    alone = (range(row, row + 1) for row in range(min(count, _ALONE)))
    for part in (*halves(count), *alone):
        rows = slice(part.start, part.stop)
        limit = _FAR * torch.linalg.vector_norm(whole[rows])
        if not torch.linalg.vector_norm(gradient(rows) - whole[rows]) <= limit:
            return False
    return True
