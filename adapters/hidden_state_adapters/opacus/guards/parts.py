"""The modules, parameters and buffers of a model, looked up once."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

_OF = operator.attrgetter("__dict__")
_HELD = operator.itemgetter("_modules", "_parameters", "_buffers")
_WALKS = (
    "named_modules", "named_parameters", "named_buffers", "_named_members", "named_children",
)  # fmt: skip


class ModelParts:
    """What a model consists of; looked for again only where something is another object.

    torch finds parameters and buffers by walking through all modules, and a frozen network has
    hundreds. Whether the walk would find the same is seen in the dictionaries that it reads.

    Attributes:
        modules: Names and modules; another tuple after every look for them, as the others.
        parameters: Names and parameters.
        buffers: Names and buffers.

    Args:
        module: The model.
    """

    modules: tuple[tuple[str, nn.Module], ...]
    parameters: tuple[tuple[str, nn.Parameter], ...]
    buffers: tuple[tuple[str, torch.Tensor], ...]

    def __init__(self, module: nn.Module):
        self._module = module
        self._find()

    def _find(self) -> None:
        module = self._module
        self.modules = tuple(module.named_modules())
        self.parameters = tuple(module.named_parameters())
        self.buffers = tuple(module.named_buffers())
        self._parts = [part for _, part in self.modules]
        self._types = [type(part) for part in self._parts]
        self._dicts: list[Any] = list(self._dicts_now())
        # A walk of a module's own, or of TorchScript, may find anything else the next time.
        self._is_plain = all(type(one) is dict for one in self._dicts) and all(
            getattr(kind, name) is getattr(nn.Module, name)
            for kind in set(self._types)
            for name in _WALKS
        )
        if self._is_plain:
            self._sizes = list(map(len, self._dicts))
            self._filled = [one for one in self._dicts if one]
            self._names = list(itertools.chain.from_iterable(self._filled))
            self._held = list(self._held_now())

    def _dicts_now(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(map(_HELD, map(_OF, self._parts)))

    def _held_now(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(map(dict.values, self._filled))

    def refresh(self) -> None:
        """Looks for the parts again unless all of them are the same objects in the same places."""
        if not self._are_found():
            self._find()

    def _are_found(self) -> bool:
        # In this order: the dictionaries are the same, then they have as many entries, then which.
        return (
            self._is_plain
            and list(map(type, self._parts)) == self._types
            and all(map(operator.is_, self._dicts_now(), self._dicts))
            and list(map(len, self._dicts)) == self._sizes
            and list(itertools.chain.from_iterable(self._filled)) == self._names
            and all(map(operator.is_, self._held_now(), self._held))
        )
