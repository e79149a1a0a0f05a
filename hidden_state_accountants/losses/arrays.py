"""The few operations on arrays that the losses need, so that every framework computes the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np

Array = Any
"""An array of one framework, float64."""

TINY = 1e-300
"""Keeps logarithms and quotients finite; far below every number that matters."""


@attrs.frozen
class Arrays:
    """The operations of one framework.

    Attributes:
        exp, log, sqrt, abs: Of every entry.
        where: Condition, value where it holds, value elsewhere.
        maximum, minimum: Of an array and an array or a number.
        total: The sum over axis 0.
        largest: The maximum over axis 0.
        when: Condition on the whole array, function, array: what the function returns if the
            condition holds anywhere, else the array. A graph may call the function in any case.
    """

    exp: Callable[..., Array]
    log: Callable[..., Array]
    sqrt: Callable[..., Array]
    abs: Callable[..., Array]
    where: Callable[..., Array]
    maximum: Callable[..., Array]
    minimum: Callable[..., Array]
    total: Callable[..., Array]
    largest: Callable[..., Array]
    when: Callable[..., Array]


NUMPY = Arrays(
    exp=np.exp,
    log=np.log,
    sqrt=np.sqrt,
    abs=np.abs,
    where=np.where,
    maximum=np.maximum,
    minimum=np.minimum,
    total=lambda array: array.sum(axis=0),
    largest=lambda array: array.max(axis=0),
    when=lambda holds, function, array: function() if holds.any() else array,
)
