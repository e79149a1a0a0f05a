"""The engine's own copy of the last private iterate, and of what else the model holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from hidden_state_accountants import UnsupportedRunError
from hidden_state_adapters.opacus.gradients import Figure, any_of, differ, read
from hidden_state_adapters.opacus.precision import check_precision, is_half

# Odd constants of splitmix64 (Steele, Lea & Flood 2014), as signed 64-bit integers.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX = 0xBF58476D1CE4E5B9 - 2**64
_CHUNK = 2**22  # numbers at a time
_BY_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Iterate:
    """The weights that the last private step left, whatever somebody did to those of the model.

    What is not trained, and the buffers, stay as they were at the start; that is looked at where
    somebody asks about the model.

    Args:
        module: The module itself, not Opacus' wrapper.
    """

    def __init__(self, module: nn.Module):
        self._module = module
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.params: list[nn.Parameter] = list(trained.values())
        self._names = list(trained)
        self.take()

    def take(self) -> None:
        """Takes what the model holds for what the last step left."""
        self._values = [p.detach().clone() for p in self.params]
        self._fixed = self._fixed_part()

    def keep(self) -> None:
        """Takes what a step left."""
        for index, (param, value) in enumerate(zip(self.params, self._values, strict=True)):
            if value.device == param.device and value.dtype == param.dtype:
                value.copy_(param.detach())
            else:
                self._values[index] = param.detach().clone()

    def value(self, param: nn.Parameter) -> torch.Tensor:
        """What the last step left in a parameter; of one that is not trained what it holds."""
        return next(
            (v for p, v in zip(self.params, self._values, strict=True) if p is param), param
        )

    def moved(self) -> Figure:
        """Whether the model holds other numbers."""
        return self._differ(self.params)

    def _differ(self, params: Sequence[torch.Tensor]) -> Figure:
        pairs = zip(params, self._values, strict=True)
        return any_of([_differ(param, value) for param, value in pairs])

    def check(self, steps: int) -> None:
        """Raises UnsupportedRunError unless the model is what `steps` steps left.

        Also where other objects are in the places of its parameters.
        """
        now = dict(self._module.named_parameters())
        is_there = all(name in now for name in self._names)
        moved = self._differ([now[name] for name in self._names]) if is_there else True
        if read({"moved": moved})["moved"]:
            raise UnsupportedRunError(
                f"The parameters were changed outside the private optimizer after step {steps}, so "
                "the model is not the iterate that was accounted (load_state_dict, an average of "
                "weights, another optimizer?). Load public weights before make_private, go on "
                "with a run by engine.load_checkpoint, and leave the weights alone then. Weights "
                "of another private run are never loaded: train its model itself (the engine "
                "composes its runs), or compose its event by hand, "
                "LastIterateAccountant().compose(event). To end with an earlier iterate "
                "(or an average), call engine.release() where it is the current one, and ask for "
                "epsilon before it is put in."
            )
        self._check_fixed(steps)

    def _check_fixed(self, steps: int) -> None:
        now = self._fixed_part()
        for name in now.keys() - self._fixed.keys():
            raise UnsupportedRunError(
                f"The model after step {steps} has {name}, which was not there at the start: it "
                "was not accounted, and a buffer may carry data of the records past the noise. "
                "Add parameters and buffers before make_private."
            )
        for name, (known, is_buffer) in self._fixed.items():
            if now.get(name) == (known, is_buffer):
                continue
            if not is_buffer:
                raise UnsupportedRunError(
                    f"The model after step {steps} has another value of the frozen parameter "
                    f"{name} than at the start: the frozen part of the model is public and stays "
                    "as it is. Start another run for another one."
                )
            raise UnsupportedRunError(
                f"A buffer of the module was changed during the run ({name}: running statistics, "
                "counters, caches?): it carries data of the records past the noise. Put the layer "
                "that writes it in eval() mode, or replace it."
            )

    def _fixed_part(self) -> dict[str, tuple[int, bool]]:
        """Fingerprints of buffers and of what is not trained, and whether it is a buffer."""
        found = {name: (fingerprint(b), True) for name, b in self._module.named_buffers()}
        for name, param in self._module.named_parameters():
            if name not in self._names:
                found[name] = fingerprint(param), False
        return found


def _differ(value: torch.Tensor, own: torch.Tensor) -> Figure:
    if value.shape != own.shape or value.dtype != own.dtype:
        return True
    return differ(value, own if own.device == value.device else own.to(value.device))


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


def check_parameters(module: nn.Module, optimizer: Optimizer, *, allows_half: bool) -> None:
    """Raises UnsupportedRunError unless `optimizer` trains exactly the trainable parameters."""
    own: Mapping[str, nn.Parameter] = dict(module.named_parameters())
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
        if not (allows_half and is_half(param)):
            check_precision(f"parameter {name}", param)
        if id(param) not in managed:
            raise UnsupportedRunError(
                f"Expected every trainable parameter in the optimizer, {name} is missing: other "
                "code could train it unaccounted. Add it, or freeze it with requires_grad_(False)."
            )
