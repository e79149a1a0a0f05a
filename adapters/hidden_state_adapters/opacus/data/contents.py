"""The tensors that a batch consists of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested lists, tuples and mappings (a BatchEncoding is one).

    Other objects are not looked into.
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_of(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_of(part)
