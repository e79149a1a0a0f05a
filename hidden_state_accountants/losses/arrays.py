"""The few operations on arrays that the losses need, so that every framework computes the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
from scipy import special

Array = Any
"""An array of one framework, float64."""

TINY = 1e-300
"""Keeps logarithms and quotients finite; far below every number that matters."""


@attrs.frozen
class Arrays:
    """The operations of one framework.

    Attributes:
        exp, log, sqrt, abs, sigmoid, tanh: Of every entry.
        where: Condition, value where it holds, value elsewhere.
        maximum, minimum: Of an array and an array or a number.
        total: The sum over axis 0.
        largest: The maximum over axis 0.
        softmax: Over axis 1.
        like: Numbers in NumPy and an array; the numbers in the array's type and on its device.
        when: Condition on the whole array, function, array: what the function returns if the
            condition holds anywhere, else the array. A graph may call the function in any case.
    """

    exp: Callable[..., Array]
    log: Callable[..., Array]
    sqrt: Callable[..., Array]
    abs: Callable[..., Array]
    sigmoid: Callable[..., Array]
    tanh: Callable[..., Array]
    where: Callable[..., Array]
    maximum: Callable[..., Array]
    minimum: Callable[..., Array]
    total: Callable[..., Array]
    largest: Callable[..., Array]
    softmax: Callable[..., Array]
    like: Callable[..., Array]
    when: Callable[..., Array]


NUMPY = Arrays(
    exp=np.exp,
    log=np.log,
    sqrt=np.sqrt,
    abs=np.abs,
    sigmoid=special.expit,
    tanh=np.tanh,
    where=np.where,
    maximum=np.maximum,
    minimum=np.minimum,
    total=lambda array: array.sum(axis=0),
    largest=lambda array: array.max(axis=0),
    softmax=lambda array: special.softmax(array, axis=1),
    like=lambda numbers, array: numbers.astype(array.dtype),
    when=lambda holds, function, array: function() if holds.any() else array,
)
