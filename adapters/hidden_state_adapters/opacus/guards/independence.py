"""Whether the records of a batch act on each other."""

from __future__ import annotations

import collections
import contextlib
import fractions
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from opacus.utils.module_utils import trainable_modules
from torch import nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map

from hidden_state_accountants import Assumption, UnsupportedRunError
from hidden_state_adapters.opacus.gradients.figures import Figure, any_of
from hidden_state_adapters.opacus.gradients.linear_pass import LinearPass
from hidden_state_adapters.opacus.guards.base import Guard, Piece
from hidden_state_adapters.opacus.guards.exchange import (
    Call,
    Half,
    are_apart,
    halves,
    holds_records,
)
from hidden_state_adapters.opacus.guards.forward import ForwardGuard
from hidden_state_adapters.opacus.guards.random_numbers import random_numbers_as_before


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
        done: What was done to half of the records.
        has_entries: Whether it is called on entries of records, such as tokens, in later steps too.
    """

    name: str
    compute: Callable[[Call], Any]
    remedy: str
    call: Call | None = None
    is_open: bool = True
    is_passed: bool = False
    done: str = "exchanged"
    has_entries: bool = False
    _found: list[_Comparison] = attrs.field(factory=list)

    def figures(self, rows: int, dim: int) -> Mapping[str, Figure]:
        """Whether results moved that belong to records that were kept."""
        if self.call is None:
            return {}
        for keeps_whole in (False, True):  # some models know every code that they accept
            try:
                self._found = list(
                    self._compared(halves(self.call, rows, dim, keeps_whole=keeps_whole))
                )
            except Exception:  # whatever a model may raise on records that are not in the data
                continue
            return {
                f"{self.name} moved": any_of(found.moved for found in self._found),
                f"{self.name} was shown other records": any_of(f.differ for f in self._found),
            }
        self.is_open = False
        return {}

    def _compared(self, parts: Iterable[Half]) -> Iterator[_Comparison]:
        for half in parts:
            # One version at a time: each is as large as the batch.
            result = self._computed(half.version(0))
            for number in half.numbers:
                moved = half.moved(result, self._computed(half.version(number)))
                yield _Comparison(half, number, moved, half.differs(number))

    def judge(self, values: Mapping[str, float]) -> bool:
        """Whether records act on each other; reads what `figures` returned."""
        found, self._found = self._found, []
        if not found:
            return False
        if values[f"{self.name} moved"]:
            self.is_open = False
            return any(bool(one.moved) and self._is_the_same_again(one) for one in found)
        self.is_passed = bool(values[f"{self.name} was shown other records"])
        self.is_open = not self.is_passed
        return False

    def _is_the_same_again(self, found: _Comparison) -> bool:
        """Whether it is no accident (random numbers of its own, sums in any order on a GPU)."""
        half = found.half
        calls = [half.version(number) for number in (found.number, 0)]
        twice = [[self._computed(call) for _ in range(2)] for call in calls]
        return not any(bool(half.moved(*results)) for results in twice)

    def _computed(self, call: Call) -> Any:
        with random_numbers_as_before(tree_leaves(call)):
            return self.compute(call)


@attrs.define(eq=False)
class CriterionProbe(Probe):
    """Of a criterion, which may get several entries of each record (tokens) in one dimension.

    Their number, for each record, is then the same in all batches, or the criterion does not divide
    by it. Of entries of which nobody knows whose they are (those under a mask) it does not either.
    """

    _of_entries: Callable[[Call], Sequence[torch.Tensor]] | None = None
    _ratio: fractions.Fraction | None = None  # entries for each record in the batch before

    def figures(self, rows: int, dim: int) -> Mapping[str, Figure]:
        """Whether gradients moved at entries of records that were kept."""
        call = self.call
        output = None if call is None else _output(call)
        if call is None or output is None or not output.dim() or holds_records(output, rows, dim):
            return super().figures(rows, dim) if self.is_open else {}
        compute = self._of_entries = self._of_entries or self.compute
        ratio, before = fractions.Fraction(len(output), rows), self._ratio
        self._ratio, self.has_entries = ratio, True
        if before not in (None, ratio) or 1 not in ratio.as_integer_ratio():
            self.compute = compute
            return self._of_a_half(len(output))
        if not self.is_open or ratio.denominator != 1:
            return {}
        shape = (rows, ratio.numerator) if dim == 0 else (ratio.numerator, rows)
        self.call = _changed(call, (len(output),), lambda x: x.unflatten(0, shape))
        self.compute = lambda call: [
            x.unflatten(0, shape) for x in compute(_changed(call, shape, lambda x: x.flatten(0, 1)))
        ]
        return super().figures(rows, dim)

    def _of_a_half(self, entries: int) -> Mapping[str, Figure]:
        """Whether gradients move at half of the entries if the others are left out."""
        kept, call = entries // 2, self.call
        assert call is not None
        try:
            alone = self._computed(_changed(call, (entries,), lambda x: x[:kept]))
            pairs = zip(self._computed(call), alone, strict=True)
            moved = any_of(are_apart(whole[:kept], half) for whole, half in pairs)
        except Exception:  # whatever a criterion may raise on fewer entries
            return {}
        return {f"{self.name} divides": moved}

    def judge(self, values: Mapping[str, float]) -> bool:
        """Whether records act on each other; reads what `figures` returned."""
        if values.get(f"{self.name} divides"):
            self.done = "left out"
            return True
        return super().judge(values)


def _output(call: Call) -> torch.Tensor | None:
    """What the model computed, among the arguments of a criterion."""
    return next(filter(_is_differentiable, tree_leaves(call)), None)


def _changed(
    call: Call, sizes: tuple[int, ...], change: Callable[[torch.Tensor], torch.Tensor]
) -> Call:
    """The arguments, with `change` applied to the tensors whose first dimensions are `sizes`."""

    def of(value: Any) -> Any:
        is_one = isinstance(value, torch.Tensor) and value.shape[: len(sizes)] == sizes
        return change(value) if is_one else value

    found: Call = tree_map(of, call)
    return found


@attrs.frozen(eq=False)
class _Comparison:
    """What was computed from two versions of a batch, and whether it moved."""

    half: Half
    number: int
    moved: Figure
    differ: Figure


class IndependenceGuard(Guard):
    """Notices a model or a criterion that mixes the records of a batch.

    Clips and theorems are about gradients of which each depends on one record. Statistics of the
    batch (in a functional call, which no validator of modules sees) or a scale by its largest
    record make each depend on all.

    In the first step with two records the model is run again, forward and backward, on versions of
    the batch that agree in half of its records (see `exchange`): the outputs of these, and the
    gradients in the outputs of the trainable layers, must not move. Of a criterion that the engine
    knows the gradients at its input are looked at. Random numbers are repeated and then as before,
    buffers are copies, gradients of parameters are not touched. It is one look at one batch: what
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
                lambda call: _responses(module, call),
                "Compute the output of every record from that record alone (nn.GroupNorm or "
                "nn.LayerNorm in place of statistics of the batch, constants in place of its mean "
                "or its largest norm). A mask that has by chance as many rows as the batch belongs "
                "into a buffer of the model.",
            )
        }
        if isinstance(criterion, nn.Module):
            self._probes[criterion] = CriterionProbe(
                "criterion",
                lambda call: _gradients(criterion, call),
                "Use a loss that is a mean or a sum over the records (class weights divide by the "
                "weights of the batch, a mean over tokens of which some are ignored by the others, "
                "contrastive losses compare its records): divide by what is fixed, such as the "
                "tokens of a record.",
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
                f"{names} took every record by itself: each half of the first batch was "
                "exchanged, and nothing moved for the other half"
            )
        else:
            yield Assumption.declared("the model takes every record of a batch by itself")

    def figures(self, piece: Piece) -> Mapping[str, Figure]:
        """Whether something moved, until it was seen once."""
        if not self._handles or piece.rows < 2:
            return {}
        open_probes = [p for p in self._probes.values() if p.is_open or p.has_entries]
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
                    f"them were {probe.done}, and what it computes for the other half moved: every "
                    "per-example gradient then depends on all records, and no clip bounds what "
                    f"one of them does. {probe.remedy}"
                )
            probe.call = None
        model, *_ = self._probes.values()
        if not model.is_open and not any(probe.has_entries for probe in self._probes.values()):
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


def _responses(module: nn.Module, call: Call) -> Any:
    """The outputs, and the gradients of a sum of them in the outputs of the trainable layers.

    A loss inside the model has no row for every record. The gradients do.
    """
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    layers: list[torch.Tensor] = []

    def note(part: nn.Module, args: Any, output: Any) -> None:
        layers.extend(x for x in tree_leaves(output) if _is_differentiable(x))

    with _without_our_hooks(module), torch.enable_grad():
        handles = [part.register_forward_hook(note) for _, part in trainable_modules(module)]
        try:
            outputs = functional_call(module, buffers, *call)
        finally:
            for handle in handles:
                handle.remove()
        totals = [
            (x * _gradient_in(x)).sum() for x in tree_leaves(outputs) if _is_differentiable(x)
        ]
        gradients = ()
        if totals and layers:
            gradients = torch.autograd.grad(sum(totals), layers, allow_unused=True)
    return tree_map(_detached, (outputs, gradients))


def _is_differentiable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _gradient_in(output: torch.Tensor) -> torch.Tensor:
    """Of a loss: 1. Otherwise other numbers everywhere, in every row a function of the output."""
    if output.numel() == 1:
        return torch.ones_like(output)
    places = torch.arange(output.numel(), device=output.device, dtype=output.dtype)
    return torch.cos(places).reshape(output.shape) + output.detach()


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@contextlib.contextmanager
def _without_our_hooks(module: nn.Module) -> Iterator[None]:
    """Hooks of Opacus and of the guards rest, so that nothing is recorded; those of users act."""
    resting = [(part, name, getattr(part, name)) for part in module.modules() for name in _HOOKS]
    own = ((part, vars(part).get("forward")) for part in module.modules())
    passes = [(part, one) for part, one in own if isinstance(one, LinearPass)]
    try:
        for part, _ in passes:
            del part.forward
        for part, name, hooks in resting:
            users = {k: hook for k, hook in hooks.items() if not _is_ours(hook)}
            setattr(part, name, collections.OrderedDict(users))
        yield
    finally:
        for part, name, hooks in resting:
            setattr(part, name, hooks)
        for part, one in passes:
            part.forward = one  # type: ignore[method-assign]


def _is_ours(hook: Any) -> bool:
    hook = hook.func if isinstance(hook, functools.partial) else hook
    package = str(getattr(hook, "__module__", "")).partition(".")[0]
    return package in ("opacus", "hidden_state_adapters")


def _gradients(criterion: nn.Module, call: Call) -> Sequence[torch.Tensor]:
    """Those of the sum of the losses, at what the model computed."""
    inputs = [x for x in tree_leaves(call) if isinstance(x, torch.Tensor) and x.requires_grad]
    args, kwargs = call
    with torch.enable_grad():
        loss = criterion.forward(*args, **kwargs)  # past the hooks of other guards
        return torch.autograd.grad(loss.sum(), inputs)
