"""What is done to the parameters between the steps."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from hidden_state_accountants import Assumption, UnsupportedRunError
from hidden_state_adapters.opacus.gradients.figures import Figure, any_of, differ
from hidden_state_adapters.opacus.guards.base import Guard, Piece
from hidden_state_adapters.opacus.guards.parts import ModelParts
from hidden_state_adapters.opacus.guards.precision import check_precision
from hidden_state_adapters.opacus.guards.records import counted_writes, counts_of_writes

# Odd constants of splitmix64 (Steele, Lea & Flood 2014), as signed 64-bit integers.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX = 0xBF58476D1CE4E5B9 - 2**64
_IS_TRAINED = operator.attrgetter("requires_grad")
_CHUNK = 2**22  # numbers at a time
_BY_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


def check_parameters(module: nn.Module, optimizer: Optimizer) -> None:
    """Raises UnsupportedRunError unless `optimizer` trains exactly the trainable parameters."""
    own = dict(module.named_parameters())
    known = {id(p) for p in own.values()}
    managed = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if managed - known:
        raise UnsupportedRunError(
            "Expected the optimizer to hold parameters of the module only, got "
            f"{len(managed - known)} others (Module parameters are different than optimizer "
            "Parameters). Construct it with module.parameters()."
        )
    if not any(p.requires_grad for p in own.values()):
        raise UnsupportedRunError("Expected a module with trainable parameters, got none.")
    for name, param in own.items():
        if not param.requires_grad:
            continue
        check_precision(f"parameter {name}", param)
        if id(param) not in managed:
            raise UnsupportedRunError(
                f"Expected every trainable parameter in the optimizer, {name} is missing: other "
                "code could train it unaccounted. Add it, or freeze it with requires_grad_(False)."
            )


class ParameterGuard(Guard):
    """Notices when parameters change in another way than through the private optimizer.

    A copy of the trainable parameters is kept after every step and compared bit by bit before the
    next one; this sees every way to write them (`load_state_dict`, `.data`, another optimizer).
    `ForwardGuard` compares them in every training pass, too: a gradient taken at perturbed
    parameters that are restored before the step (Nesterov by hand, sharpness-aware training) is not
    the gradient of the theorems. Values that are changed and restored with neither in between
    (evaluation with averaged weights) do no harm. Buffers and frozen parameters must not change at
    all during a run. Their values (of frozen parameters a fingerprint) are compared before a step
    if torch counted a write, and for every epsilon. Whether other objects are in the places of all
    these is looked at in every training pass (by `ForwardGuard`) and for every epsilon: only a pass
    uses what it finds there.

    It cannot see a model that was copied out, trained elsewhere and released, nor values that were
    changed through `.data` between forward and backward pass and restored.

    Args:
        module: The module itself, not Opacus' wrapper.
        optimizer: The wrapped optimizer.

    Attributes:
        params: The trainable parameters.
        parts: All parts of the module.
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer):
        self._optimizer = optimizer
        self.parts = ModelParts(module)
        self._take_structure()
        self._names = self._trainable()
        self.params = [param for _, param in self._names]
        self._managed = [p for group in optimizer.param_groups for p in group["params"]]
        self._known: list[_Known] = []
        self._buffers: dict[str, tuple[torch.Tensor, tuple[int, int], torch.Tensor]] = {}
        self._frozen: dict[str, tuple[torch.Tensor, tuple[int, int], int]] = {}
        self._remember()
        self._remember_fixed()

    @property
    def assumptions(self) -> Iterable[Assumption]:
        """What is verified at every step."""
        yield Assumption.checked(
            "parameters in float32 or float64, changed by the private optimizer only; no batch "
            "statistics, buffers unchanged"
        )

    def before(self, piece: Piece) -> None:
        """Raises UnsupportedRunError if parameters were added, replaced, frozen or unfrozen."""
        self._check_structure(piece.step)

    def figures(self, piece: Piece) -> Mapping[str, Figure]:
        """Whether a parameter or a buffer was written."""
        return {"changed": self.changed(), "buffers": self._buffers_changed()}

    def judge(self, piece: Piece, values: Mapping[str, float]) -> None:
        """Raises UnsupportedRunError if one was."""
        self._judge(piece.step - 1, values)

    def iterate_figures(self) -> Mapping[str, Figure]:
        """Whether a parameter or a buffer holds other values, also where no write was counted."""
        self.parts.refresh()
        changed = any_of([self.changed(), self._replaced()])
        return {"changed": changed, "buffers": self._buffers_changed(is_thorough=True)}

    def judge_iterate(self, steps: int, values: Mapping[str, float]) -> None:
        """Raises UnsupportedRunError if one was, or a frozen parameter."""
        self._judge(steps, values)
        self._check_frozen(f"The model after step {steps} has", is_thorough=True)

    def _judge(self, steps: int, values: Mapping[str, float]) -> None:
        if values["changed"]:
            raise another_iterate(steps)
        if values["buffers"]:
            raise UnsupportedRunError(
                "A buffer of the module was changed during the run (running statistics, counters, "
                "caches): it carries data of the records past the noise. Put the layer that writes "
                "it in eval() mode, or replace it."
            )

    def moved(self, piece: Piece) -> None:
        """Takes the current values for those that the last step left."""
        self._remember()

    def resume(self, steps: int) -> None:
        """Takes the loaded values, buffers and frozen parameters for those of the run."""
        self._remember()
        self._remember_fixed()

    def close(self) -> None:
        """Drops the copies."""
        self._known = []
        self._buffers, self._frozen = {}, {}
        self._buffer_writes = self._frozen_writes = _Writes(())

    def _take_structure(self) -> None:
        """Takes the current parameters, trainable and frozen ones, for those of the run."""
        self._structure = self.parts.parameters
        self._held = [param for _, param in self._structure]
        self._flags = list(map(_IS_TRAINED, self._held))

    def _trainable(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.parts.parameters if p.requires_grad]

    def _remember_fixed(self) -> None:
        """Takes the current buffers and frozen parameters of the module for those of the run."""
        self.parts.refresh()
        self._frozen = {
            name: (p, _writes(p), fingerprint(p))
            for name, p in self.parts.parameters
            if not p.requires_grad
        }
        self._frozen_writes = _Writes(p for p, *_ in self._frozen.values())
        self._frozen_in = self.parts.parameters
        self._buffers = {
            name: (b, _writes(b), b.detach().clone()) for name, b in self.parts.buffers
        }
        self._buffer_writes = _Writes(b for b, *_ in self._buffers.values())
        self._buffers_in = self.parts.buffers

    def _buffers_changed(self, *, is_thorough: bool = False) -> Figure:
        """Whether a buffer was added, removed or written during the run.

        Args:
            is_thorough: Reads all values, and not only those whose count of writes has changed: a
                frozen network has hundreds of buffers.
        """
        are_there = self.parts.buffers is self._buffers_in
        if are_there and not is_thorough and self._buffer_writes.are_the_same():
            return False
        buffers = dict(self.parts.buffers)
        if buffers.keys() != self._buffers.keys():
            return True
        return any_of(
            _differ(buffers[name], copy)
            for name, (old, writes, copy) in self._buffers.items()
            if is_thorough or buffers[name] is not old or _writes(old) != writes
        )

    def _remember(self) -> None:
        """Takes the current values for those that the last step left."""
        if len(self._known) != len(self.params):
            self._known = [_Known(param) for param in self.params]
            return
        for index, known in enumerate(self._known):
            if not known.take():
                self._known[index] = _Known(self.params[index])

    def _check_structure(self, step: int) -> None:
        """Raises UnsupportedRunError if parameters were added, replaced, frozen or unfrozen."""
        is_same = self.parts.parameters is self._structure
        if not is_same:
            self.parts.refresh()  # a pass may put others in their places and restore them
        if not is_same or list(map(_IS_TRAINED, self._held)) != self._flags:
            self._check_trainable(step)
            self._take_structure()
        params = [p for group in self._optimizer.param_groups for p in group["params"]]
        if not _are_the_same(params, self._managed) and {*params} != {*self._managed}:
            raise UnsupportedRunError(
                f"step {step} optimizes {len(params)} parameters, expected the "
                f"{len(self._managed)} of the start: parameter groups are fixed for a run."
            )
        _check_precision(self.params)
        self._check_frozen(f"step {step} starts with")
        _refuse_moving_frozen(step, params)

    def _check_trainable(self, step: int) -> None:
        names = self._trainable()
        if len(names) != len(self._names) or any(
            name != old_name or param is not old
            for (name, param), (old_name, old) in zip(names, self._names, strict=True)
        ):
            raise UnsupportedRunError(
                f"step {step} trains {[name for name, _ in names]}, expected "
                f"{[name for name, _ in self._names]} as at the start: the set of trainable "
                "parameters is fixed for a run. Start another run for another set."
            )

    def _check_frozen(self, when: str, *, is_thorough: bool = False) -> None:
        """Raises UnsupportedRunError if the frozen part of the model is another one.

        Args:
            when: Where that was found.
            is_thorough: Reads all values, and not only those whose count of writes or memory has
                changed; what `.data` gives is written without being counted.
        """
        are_there = self.parts.parameters is self._frozen_in
        if are_there and not is_thorough and self._frozen_writes.are_the_same():
            return
        now = dict(self.parts.parameters)
        for name, (old, writes, known) in self._frozen.items():
            frozen = now.get(name)
            if frozen is old and _writes(old) == writes and not is_thorough:
                continue
            if frozen is None or fingerprint(frozen) != known:
                raise UnsupportedRunError(
                    f"{when} another value of the frozen parameter {name} than at the start: the "
                    "frozen part of the model is public and stays as it is. Start another run for "
                    "another one."
                )
            self._frozen[name] = frozen, _writes(frozen), known  # swapped and restored
        self._frozen_writes = _Writes(p for p, *_ in self._frozen.values())
        self._frozen_in = self.parts.parameters

    def changed(self) -> Figure:
        """Whether a value differs from what the last step left."""
        return any_of([known.changed() for known in self._known])

    def _replaced(self) -> Figure:
        """Whether the model has another value in the place of a parameter, or lost one."""
        now = dict(self.parts.parameters)
        return any_of(
            name not in now or _differ(now[name], known.copy)
            for (name, param), known in zip(self._names, self._known, strict=True)
            if now.get(name) is not param
        )


class _Known:
    """The value that a parameter has after a step, and whether it still has it.

    Both are looked at as integers: NaN equals itself, and 0 is not -0.

    Args:
        param: With its current value.
    """

    def __init__(self, param: nn.Parameter):
        self._param, self._alias = param, param.detach()
        self.copy = self._alias.clone()
        self._bits, self._copied_bits = _as_integers(self._alias), _as_integers(self.copy)

    @property
    def _is_where_it_was(self) -> bool:
        """Whether nobody gave the parameter other memory (`.data`, another device)."""
        param, alias = self._param, self._alias
        return param.dtype == alias.dtype and alias.is_set_to(param)

    def take(self) -> bool:
        """Takes the current value; false if it is elsewhere, and nothing was taken."""
        if not self._is_where_it_was:
            return False
        self.copy.copy_(self._alias)
        return True

    def changed(self) -> Figure:
        """Whether the parameter has another value than the one that was taken."""
        if self._is_where_it_was:
            return differ(self._bits, self._copied_bits)
        return _differ(self._param, self.copy)


class _Writes:
    """Tensors, how often torch counted a write to each, and where they lie.

    Args:
        tensors: As they are now.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]):
        self._tensors = list(tensors)
        self._places, self._counts = self._now()

    def are_the_same(self) -> bool:
        """Whether none was written, nor assigned a `.data`."""
        return self._now() == (self._places, self._counts)

    def _now(self) -> tuple[list[int], list[int]]:
        return list(map(torch.Tensor.data_ptr, self._tensors)), counts_of_writes(self._tensors)


def _writes(value: torch.Tensor) -> tuple[int, int]:
    """Changes with every write that torch counts, and where `.data` is assigned."""
    return counted_writes(value), value.data_ptr()


def _are_the_same(values: Sequence[object], others: Sequence[object]) -> bool:
    """Whether these are the same objects in the same order."""
    return len(values) == len(others) and all(map(operator.is_, values, others))


def _check_precision(params: Sequence[nn.Parameter]) -> None:
    for param in params:
        if param.requires_grad:
            check_precision("parameters", param)


def _refuse_moving_frozen(step: int, params: Sequence[nn.Parameter]) -> None:
    with_gradients = (param for param in params if param.grad is not None)
    if not all(map(_IS_TRAINED, with_gradients)):
        raise UnsupportedRunError(
            f"step {step} would move a frozen parameter by its old gradient, without noise. Set "
            "its .grad to None."
        )


def _differ(value: torch.Tensor, copy: torch.Tensor) -> Figure:
    if value.shape != copy.shape or value.dtype != copy.dtype:
        return True
    return differ(_as_integers(value.detach().to(copy.device)), _as_integers(copy))


def _as_integers(value: torch.Tensor) -> torch.Tensor:
    """The bits of float32 or float64 numbers, in the same memory; others as they are."""
    return value.view(_INTEGERS[value.dtype]) if value.dtype in _INTEGERS else value


def another_iterate(steps: int) -> UnsupportedRunError:
    """The refusal of a model that is not what the last of `steps` steps left."""
    return UnsupportedRunError(
        f"The parameters were changed outside the private optimizer after step {steps}, so the "
        "model is not the iterate that was accounted (load_state_dict, an average of weights, "
        "another optimizer?). Load weights before make_private, or a run with "
        "engine.load_checkpoint, and leave them alone then. To end with an earlier iterate (or an "
        "average), call engine.release() where it is the current one, and ask for epsilon before "
        "it is put in."
    )


def fingerprint(value: torch.Tensor) -> int:
    """A number that changes with any bit, and with the places of the numbers."""
    kind = _BY_SIZE.get(value.element_size(), torch.uint8)
    flat = value.detach().contiguous().flatten().view(kind)
    total = 0
    for start in range(0, len(flat), _CHUNK):
        part = flat[start : start + _CHUNK].to(torch.int64)
        places = torch.arange(start, start + len(part), device=flat.device)
        mixed = (part + places * _GOLDEN) * _MIX  # integers wrap
        mixed = (mixed ^ (mixed >> 29)) * _GOLDEN
        total += int((mixed ^ (mixed >> 32)).sum())
    return total


class ParameterSetGuard(Guard):
    """The same parameters in every step, for an optimizer that was not shown the module.

    Args:
        optimizer: The wrapped optimizer.
    """

    def __init__(self, optimizer: Optimizer):
        self._optimizer = optimizer
        self._params = self._trained()

    def _managed(self) -> list[nn.Parameter]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def _trained(self) -> list[nn.Parameter]:
        return [p for p in self._managed() if p.requires_grad]

    def before(self, piece: Piece) -> None:
        """Raises UnsupportedRunError if parameters were added, removed, frozen or unfrozen."""
        now, step = self._trained(), piece.step
        if len(now) != len(self._params) or any(
            p is not then for p, then in zip(now, self._params, strict=True)
        ):
            raise UnsupportedRunError(
                f"step {step} trains {len(now)} parameters, expected the {len(self._params)} of "
                "the construction: what the optimizer keeps belongs to them. Construct another "
                "optimizer for another set."
            )
        _check_precision(self._managed())
        _refuse_moving_frozen(step, self._managed())
