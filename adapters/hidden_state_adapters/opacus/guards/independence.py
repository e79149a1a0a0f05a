"""Whether the records of a batch act on each other."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from torch import nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map

from hidden_state_accountants import Assumption, UnsupportedRunError
from hidden_state_adapters.opacus.gradients.figures import Figure, any_of
from hidden_state_adapters.opacus.guards.base import Guard, Piece
from hidden_state_adapters.opacus.guards.forward import ForwardGuard

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""


class Exchange:
    """Two versions of a batch that agree in half of its records.

    The other half, drawn at random, is replaced by other rows of the batch. So that rows which
    are equal in some respect (of norm 1, say) differ in it, numbers are scaled: by 1/2 in the rows
    that are kept, in both versions, and by 1/4 in those that are replaced. Whole numbers stay: they
    may be codes of categories, and an unknown code can stop a GPU for good. Every value of the new
    rows is one that the batch holds, or lies between it and 0.

    Args:
        rows: Records of the batch, at least two.
        dim: The dimension that counts them, in every tensor that has one entry for each.
    """

    def __init__(self, rows: int, dim: int):
        self._rows, self._dim = rows, dim
        places = np.random.default_rng(0).permutation(rows)
        self._is_kept = torch.from_numpy(places >= rows // 2)
        self._kept = torch.from_numpy(np.flatnonzero(places >= rows // 2))

    def holds_records(self, value: Any) -> bool:
        """Whether `value` is a tensor with an entry for every record."""
        has_dim = isinstance(value, torch.Tensor) and value.dim() > self._dim
        return has_dim and value.shape[self._dim] == self._rows

    def versions(self, call: Call) -> tuple[Call, Call]:
        """The arguments of a call, before and after the exchange."""
        before: Call = tree_map(lambda value: self._version(value, is_new=False), call)
        after: Call = tree_map(lambda value: self._version(value, is_new=True), call)
        return before, after

    def _version(self, value: Any, *, is_new: bool) -> Any:
        if not self.holds_records(value):
            return value
        shape = [1] * value.dim()
        shape[self._dim] = self._rows
        rows = value.detach()
        others = _scaled(rows.roll(1, self._dim), 0.25) if is_new else rows
        mask = self._is_kept.to(value.device).reshape(shape)
        version = torch.where(mask, _scaled(rows, 0.5), others)
        return version.requires_grad_(value.requires_grad)

    def differ(self, before: Call, after: Call) -> Figure:
        """Whether the versions differ at all: with equal rows there is nothing to see."""
        return any_of((a != b).any() for a, b in self._pairs(before, after))

    def moved(self, before: Any, after: Any) -> Figure:
        """Whether results for records that were kept differ, by more than rounding.

        Raises:
            ValueError: No result has an entry for every record.
        """
        pairs = [(a, b) for a, b in self._pairs(before, after) if a.is_floating_point()]
        if not pairs:
            raise ValueError("Expected a result with an entry for every record, got none.")
        return any_of(_are_apart(self._rows_kept(a), self._rows_kept(b)) for a, b in pairs)

    def _rows_kept(self, value: torch.Tensor) -> torch.Tensor:
        return value.index_select(self._dim, self._kept.to(value.device))

    def _pairs(self, before: Any, after: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for a, b in zip(tree_leaves(before), tree_leaves(after), strict=True):
            if self.holds_records(a):
                yield a, b


def _scaled(value: torch.Tensor, factor: float) -> torch.Tensor:
    if not value.is_floating_point():
        return value
    return torch.where(value == value.round(), value, factor * value)


def _are_apart(a: torch.Tensor, b: torch.Tensor) -> Figure:
    """Whether two results of one computation differ by more than rounding.

    Rows that do not act on each other go through the same sums in both, so that they agree in every
    bit; only where a layer cuts its input to the longest record of the batch are sums of other
    lengths. eps^(2/3) of the largest result, 2e-5 in float32, is far above what that changes, and
    far below what half of a batch changes in its statistics.
    """
    if not a.numel():
        return False
    size = torch.nan_to_num(a.abs(), nan=0.0, posinf=0.0).max()
    limit = torch.finfo(a.dtype).eps ** (2 / 3) * size
    agree = (a == b) | (a.isnan() & b.isnan()) | ((a - b).abs() <= limit)
    return ~agree.all()


@attrs.define(eq=False)
class Probe:
    """One thing that is computed from a batch, and whether it takes every record by itself.

    Attributes:
        name: Of the thing.
        compute: What has one entry for every record, from the arguments of a call.
        remedy: What to do if it mixes them.
        call: The arguments of the last call.
        is_open: Whether it may still be found out.
        is_passed: Whether it does.
    """

    name: str
    compute: Callable[[Call], Any]
    remedy: str
    call: Call | None = None
    is_open: bool = True
    is_passed: bool = False
    _found: tuple[Exchange, tuple[Call, Call], tuple[Any, Any]] | None = None

    def figures(self, rows: int, dim: int) -> Mapping[str, Figure]:
        """Whether results moved that belong to records that were kept."""
        if self.call is None:
            return {}
        exchange = Exchange(rows, dim)
        try:
            before, after = exchange.versions(self.call)
            results = self._computed(before), self._computed(after)
            moved, differ = exchange.moved(*results), exchange.differ(before, after)
        except Exception:  # whatever a model may raise on records that are not in the data
            self.is_open = False
            return {}
        self._found = exchange, (before, after), results
        return {f"{self.name} moved": moved, f"{self.name} was shown other records": differ}

    def judge(self, values: Mapping[str, float]) -> bool:
        """Whether records act on each other; reads what `figures` returned."""
        if self._found is None:
            return False
        found, self._found = self._found, None
        if values[f"{self.name} moved"]:
            self.is_open = False
            return self._is_the_same_again(*found)
        self.is_passed = bool(values[f"{self.name} was shown other records"])
        self.is_open = not self.is_passed
        return False

    def _is_the_same_again(
        self, exchange: Exchange, versions: tuple[Call, Call], results: tuple[Any, Any]
    ) -> bool:
        """Whether it is no accident (random numbers of its own, sums in any order on a GPU)."""
        again = [(results[k], self._computed(versions[k])) for k in (1, 0)]
        return not any(bool(exchange.moved(*pair)) for pair in again)

    def _computed(self, call: Call) -> Any:
        devices = {x.device.index for x in tree_leaves(call) if _is_on_cuda(x)}
        with _random_numbers_as_before(devices):
            return self.compute(call)


class IndependenceGuard(Guard):
    """Notices a model or a criterion that mixes the records of a batch.

    Clips and theorems are about gradients of which each depends on one record. Statistics of the
    batch (in a functional call, which no validator of modules sees) or a scale by its largest
    record make each depend on all.

    In the first step with two records the model is run twice more, without gradients, on two
    versions of the batch that agree in half of its records (see `Exchange`): their outputs must not
    move. Of a criterion that the engine knows the gradients at its input are looked at. Random
    numbers are repeated and then as before, buffers are copies. It is one look at one batch: what
    mixes records in rare cases only is not seen. Where it cannot be looked at (the model raises, is
    random in a way of its own, returns nothing that has a row for each record) it is an assumption.

    Args:
        module: The module itself, not Opacus' wrapper.
        forward: The guard of its training passes, already attached.
        criterion: Of the loop, or None.
        dim: The dimension that counts the records.
    """

    def __init__(
        self, module: nn.Module, forward: ForwardGuard, *, criterion: Any = None, dim: int = 0
    ):
        self._forward, self._dim = forward, dim
        self._probes = {
            module: Probe(
                "model",
                lambda call: _outputs(module, call),
                "Compute the output of every record from that record alone (nn.GroupNorm or "
                "nn.LayerNorm in place of statistics of the batch, constants in place of its mean "
                "or its largest norm). A mask that has by chance as many rows as the batch belongs "
                "into a buffer of the model.",
            )
        }
        if isinstance(criterion, nn.Module):
            self._probes[criterion] = Probe(
                "criterion",
                lambda call: _gradients(criterion, call),
                "Use a loss that is a mean or a sum over the records (class weights divide by the "
                "weights of the batch, contrastive losses compare its records).",
            )
        self._handles = [
            part.register_forward_pre_hook(self._note, with_kwargs=True) for part in self._probes
        ]

    def _note(self, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._forward.is_in_training_pass:
            self._probes[part].call = args, kwargs

    @property
    def assumptions(self) -> Iterable[Assumption]:
        """Whether it was looked at."""
        model, *others = self._probes.values()
        if model.is_passed:
            names = " and ".join(f"the {p.name}" for p in (model, *others) if p.is_passed)
            yield Assumption.checked(
                f"{names} took every record by itself: half of the first batch was exchanged, and "
                "nothing moved for the other half"
            )
        else:
            yield Assumption.declared("the model takes every record of a batch by itself")

    def figures(self, piece: Piece) -> Mapping[str, Figure]:
        """Whether something moved, until it was seen once."""
        if not self._handles or piece.rows < 2:
            return {}
        open_probes = [probe for probe in self._probes.values() if probe.is_open]
        found = [probe.figures(piece.rows, self._dim) for probe in open_probes]
        return {name: figure for figures in found for name, figure in figures.items()}

    def judge(self, piece: Piece, values: Mapping[str, float]) -> None:
        """Raises UnsupportedRunError if records act on each other."""
        if not self._handles:
            return
        for probe in self._probes.values():
            if probe.judge(values):
                raise UnsupportedRunError(
                    f"step {piece.step}: the {probe.name} mixes the records of a batch. Half of "
                    "them were exchanged, and what it computes for the other half moved: every "
                    "per-example gradient then depends on all records, and no clip bounds what "
                    f"one of them does. {probe.remedy}"
                )
            probe.call = None
        model, *_ = self._probes.values()
        if not model.is_open:
            self.close()

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def __reduce__(self) -> Any:
        return _idle_guard, ()  # a copy of the module trains nothing here


def _idle_guard() -> IndependenceGuard:
    module = nn.Identity()
    guard = IndependenceGuard(module, ForwardGuard(module))
    guard.close()
    return guard


def _outputs(module: nn.Module, call: Call) -> Any:
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    with torch.no_grad():
        return functional_call(module, buffers, *call)


def _gradients(criterion: nn.Module, call: Call) -> Sequence[torch.Tensor]:
    """Those of the sum of the losses, at what the model computed."""
    inputs = [x for x in tree_leaves(call) if isinstance(x, torch.Tensor) and x.requires_grad]
    args, kwargs = call
    with torch.enable_grad():
        loss = criterion.forward(*args, **kwargs)  # past the hooks of other guards
        return torch.autograd.grad(loss.sum(), inputs)


def _is_on_cuda(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cuda"


@contextlib.contextmanager
def _random_numbers_as_before(devices: Iterable[int]) -> Iterator[None]:
    """Afterwards torch, numpy and Python draw what they would have drawn anyway."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng(devices=list(devices)):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
