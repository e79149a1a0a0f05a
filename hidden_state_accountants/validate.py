"""Every argument check of the package, in one form: ``Expected name >= 0, got -1.0.``"""

from __future__ import annotations

import math
import numbers
import operator
from typing import Any

import numpy as np
from dp_accounting import NeighboringRelation


def _hint(remedy: str) -> str:
    return f" {remedy}" if remedy else ""


def real(
    name: str,
    value: Any,
    *,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    allow_inf: bool = False,
    remedy: str = "",
) -> float:
    """Returns `value` as a float, or raises TypeError / ValueError that names the argument."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Real):
        raise TypeError(f"Expected {name} to be a real number, got {value!r}.{_hint(remedy)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if minimum is not None:
        rule, holds = f"{name} >= {minimum:g}", number >= minimum
    elif above is not None:
        rule, holds = f"{name} > {above:g}", number > above
    else:
        rule, holds = f"a number {name}", True
    if maximum is not None:
        rule, holds = f"{rule} and {name} <= {maximum:g}", holds and number <= maximum
    if not allow_inf:
        rule, holds = f"finite {rule}", holds and math.isfinite(number)
    if not holds or math.isnan(number):
        raise ValueError(f"Expected {rule}, got {number!r}.{_hint(remedy)}")
    return number


def integer(
    name: str,
    value: Any,
    *,
    minimum: int | None = None,
    maximum: int | None = None,
    remedy: str = "",
) -> int:
    """Returns `value` as an int, or raises TypeError / ValueError that names the argument."""
    if isinstance(value, bool | np.bool_):
        raise TypeError(f"Expected {name} to be an integer, got {value!r}.{_hint(remedy)}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(
            f"Expected {name} to be an integer, got {value!r}.{_hint(remedy)}"
        ) from None
    if minimum is not None and number < minimum:
        raise ValueError(f"Expected {name} >= {minimum}, got {number}.{_hint(remedy)}")
    if maximum is not None and number > maximum:
        raise ValueError(f"Expected {name} <= {maximum}, got {number}.{_hint(remedy)}")
    return number


LARGEST = 1e75
"""Hyper-parameters lie in [1/LARGEST, LARGEST] or are 0, so that no product leaves a double."""


def magnitude(name: str, value: Any, *, positive: bool = False) -> float:
    """Returns a hyper-parameter whose products with others neither under- nor overflow."""
    number = real(name, value, above=0) if positive else real(name, value, minimum=0)
    if number != 0 and not 1 / LARGEST <= number <= LARGEST:
        raise ValueError(
            f"Expected {name} between {1 / LARGEST:g} and {LARGEST:g}"
            f"{'' if positive else ', or 0'}, got {number!r}."
        )
    return number


def real_array(name: str, value: Any, *, minimum: float, allow_inf: bool = False) -> np.ndarray:
    """Returns `value` as a one-dimensional float64 array with every entry in range."""
    array = np.asarray(value)
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "fiu":
        raise TypeError(
            f"Expected {name} to be a non-empty one-dimensional sequence of real numbers, "
            f"got shape {array.shape} and dtype {array.dtype}."
        )
    array = array.astype(np.float64)
    bad = ~(array >= minimum) if allow_inf else ~((array >= minimum) & (array < np.inf))
    if bad.any():
        index = int(np.argmax(bad))
        kind = "" if allow_inf else "finite "
        raise ValueError(
            f"Expected {kind}{name} >= {minimum:g} at every step, "
            f"got {float(array[index])!r} at index {index}."
        )
    return array


def neighboring_relation(value: Any) -> NeighboringRelation:
    """Returns `value` if it is a dp_accounting.NeighboringRelation."""
    if not isinstance(value, NeighboringRelation):
        raise TypeError(
            "Expected neighboring_relation to be a dp_accounting.NeighboringRelation, "
            f"got {value!r}."
        )
    return value


def target_delta(value: Any) -> float:
    """Returns a delta in [0, 1]."""
    return real("target_delta", value, minimum=0, maximum=1)


def target_epsilon(value: Any) -> float:
    """Returns an epsilon in [0, inf]."""
    return real("target_epsilon", value, minimum=0, allow_inf=True)
