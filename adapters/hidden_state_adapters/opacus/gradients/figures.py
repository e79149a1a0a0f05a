"""Figures that are computed on the parameters' device and read in one transfer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

import torch

Figure: TypeAlias = torch.Tensor | float
"""A number or truth value that is known, or a 0-dim tensor that nobody has waited for."""


def differ(value: torch.Tensor, other: torch.Tensor) -> Figure:
    """Whether two tensors of one type, shape and device differ in some element."""
    if is_on_host(value):
        return not torch.equal(value, other)  # leaves no mask behind, and stops early
    return (value != other).any()


def is_on_host(value: torch.Tensor) -> bool:
    """Whether nobody has to wait for the values of `value`."""
    return value.device.type == "cpu"


def any_of(flags: Iterable[Figure]) -> Figure:
    """Whether one of `flags` is true."""
    tensors = []
    for flag in flags:
        if isinstance(flag, torch.Tensor):
            tensors.append(flag)
        elif flag:
            return True
    if len(tensors) < 2:
        return tensors[0] if tensors else False
    return torch.stack([flag.to(tensors[0].device) for flag in tensors]).any()


def all_of(flags: Iterable[Figure]) -> Figure:
    """Whether all of `flags` are true."""
    flags = list(flags)
    if any(not flag for flag in flags if not isinstance(flag, torch.Tensor)):
        return False
    tensors = [flag for flag in flags if isinstance(flag, torch.Tensor)]
    if len(tensors) < 2:
        return tensors[0] if tensors else True
    return torch.stack([flag.to(tensors[0].device) for flag in tensors]).all()


def read(figures: Mapping[str, Figure]) -> dict[str, float]:
    """The values of all `figures`; one transfer from each device that has some."""
    values: dict[str, float] = {}
    tensors: dict[str, torch.Tensor] = {}
    for name, figure in figures.items():
        if not isinstance(figure, torch.Tensor):
            values[name] = figure
        elif is_on_host(figure):
            values[name] = figure.item()
        else:
            tensors[name] = figure
    for device in {v.device for v in tensors.values()}:
        names = [k for k, v in tensors.items() if v.device == device]
        together = torch.stack([tensors[k].to(torch.float64) for k in names])
        values.update(zip(names, together.tolist(), strict=True))
    return values


def counted_writes(tensor: torch.Tensor) -> int:
    """How often torch counted a write to a tensor.

    What was computed under inference_mode() has no count, and cannot be written outside of it.
    """
    return 0 if tensor.is_inference() else tensor._version
