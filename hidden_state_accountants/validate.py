"""Every argument check of the package, in one form: ``Expected name >= 0, got -1.0.``"""

from __future__ import annotations

import difflib
import enum
import math
import numbers
import operator
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import attrs
import numpy as np
from dp_accounting import NeighboringRelation


def _hint(remedy: str) -> str:
    return f" {remedy}" if remedy else ""


def did_you_mean(given: Any, known: Iterable[str]) -> str:
    """The sentence " Did you mean 'cyclic'?", or nothing if no name is near."""
    begun, names = str(given).lower().replace("-", "_"), list(known)
    near = difflib.get_close_matches(begun, names, n=1)
    near = near or [name for name in names if begun and name.startswith(begun)]
    return f" Did you mean {near[0]!r}?" if near else ""


def unknown_keys(where: str, given: Iterable[Any], known: Iterable[str]) -> None:
    """Raises ValueError if a key of a table is not one that it has."""
    names = list(known)
    unknown = sorted({str(key) for key in given} - set(names))
    if unknown:
        hints = "".join(did_you_mean(key, names) for key in unknown)
        raise ValueError(f"Unknown key in {where}: {', '.join(unknown)}.{hints}")


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


_Member = TypeVar("_Member", bound=enum.Enum)


def member(kind: type[_Member], name: str, value: Any) -> _Member:
    """Returns a member of an enumeration of texts, given as itself or its value, in any case."""
    try:
        return kind(value.lower() if isinstance(value, str) else value)
    except ValueError:
        known = [each.value for each in kind]
        raise ValueError(
            f"Expected {name} to be one of {', '.join(known)}, got {value!r}."
            f"{did_you_mean(value, known)}"
        ) from None


def checked(check: Callable[..., Any], **options: Any) -> Callable[[Any, Any, Any], None]:
    """An attrs validator that replaces a value by what a check of its name and itself returns.

    A field whose default is None may be None.
    """

    def replace(owner: Any, field: attrs.Attribute[Any], value: Any) -> None:
        if value is not None or field.default is not None:
            object.__setattr__(owner, field.name, check(field.name, value, **options))

    return replace


def flag(name: str, value: Any) -> bool:
    """Returns `value`, or raises TypeError that names the argument."""
    if not isinstance(value, bool):
        raise TypeError(f"Expected {name} to be True or False, got {value!r}.")
    return value


LARGEST = 1e75
"""Hyper-parameters lie in [1/LARGEST, LARGEST] or are 0, so that no product leaves a double."""


def magnitude(name: str, value: Any, *, positive: bool = False, allow_inf: bool = False) -> float:
    """Returns a hyper-parameter whose products with others neither under- nor overflow."""
    minimum, above = (None, 0) if positive else (0, None)
    number = real(name, value, minimum=minimum, above=above, allow_inf=allow_inf)
    if 0 < number < math.inf and not 1 / LARGEST <= number <= LARGEST:
        raise ValueError(
            f"Expected {name} between {1 / LARGEST:g} and {LARGEST:g}"
            f"{'' if positive else ', or 0'}, got {number!r}."
        )
    return number


# Validators of fields.
FLAG = checked(flag)
COUNT = checked(integer, minimum=1)
MAGNITUDE = checked(magnitude)
POSITIVE = checked(magnitude, positive=True)


def real_array(name: str, value: Any) -> np.ndarray:
    """Returns `value` as a one-dimensional float64 array of finite numbers >= 0."""
    array = np.asarray(value)
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "fiu":
        raise TypeError(
            f"Expected {name} to be a non-empty one-dimensional sequence of real numbers, "
            f"got shape {array.shape} and dtype {array.dtype}."
        )
    array = array.astype(np.float64)
    bad = ~((array >= 0) & (array < np.inf))
    if bad.any():
        index = int(np.argmax(bad))
        raise ValueError(
            f"Expected finite {name} >= 0 at every step, got {float(array[index])!r} at index "
            f"{index}."
        )
    return array


def neighboring_relation(value: Any) -> NeighboringRelation:
    """Returns a relation, which may be given by its name, in any case and with - or _."""
    if isinstance(value, NeighboringRelation):
        return value
    names = ", ".join(NeighboringRelation.__members__)
    expected = f"Expected neighboring_relation to be one of {names}, or its name"
    if not isinstance(value, str):
        raise TypeError(f"{expected}, got {value!r}.")
    name = value.strip().upper().replace("-", "_")
    if name not in NeighboringRelation.__members__:
        hint = did_you_mean(name, map(str.lower, NeighboringRelation.__members__))
        raise ValueError(f"{expected}, got {value!r}.{hint}")
    return NeighboringRelation[name]


_SMALL_EPSILON, _LARGE_DELTA = 0.001, 0.01
_SWAPPED = "Epsilon comes first: were epsilon and delta swapped?"


def target_pair(epsilon: Any, delta: Any, names: tuple[str, str]) -> tuple[float, float]:
    """Returns an epsilon in [0, inf] and a delta in [0, 1) that are not swapped.

    Refused is what nobody can mean. Any algorithm is (epsilon, 1)-DP. And (epsilon, delta) with
    0 < epsilon <= delta/100 says no more than (0, 1.01 delta), because it implies
    (0, delta + exp(epsilon) - 1): where the epsilon is at most 0.001 as well, and the delta at
    least 0.01, each is where the other was meant to be. A bound on total variation is asked for
    with an epsilon of 0.

    Args:
        epsilon: The first of the pair.
        delta: The second of the pair.
        names: Names of the two arguments.
    """
    e = real(names[0], epsilon, minimum=0, allow_inf=True)
    d = real(names[1], delta, minimum=0, maximum=1, remedy=_SWAPPED)
    if d == 1:
        raise ValueError(
            f"Expected {names[1]} < 1, got 1.0 with {names[0]} = {e!r}: any algorithm meets that. "
            f"{_SWAPPED}"
        )
    if 0 < e <= min(d / 100, _SMALL_EPSILON) and d >= _LARGE_DELTA:
        raise ValueError(
            f"Expected {names[1]} < {_LARGE_DELTA:g} for {names[0]} = {e!r}, got {d!r}: beside "
            f"such a delta so small an epsilon says nothing. {_SWAPPED} For a bound on total "
            f"variation, {names[0]} is 0."
        )
    return e, d


def target_delta(value: Any) -> float:
    """Returns a delta in [0, 1]."""
    return real("target_delta", value, minimum=0, maximum=1)


def target_epsilon(value: Any) -> float:
    """Returns an epsilon in [0, inf]."""
    return real("target_epsilon", value, minimum=0, allow_inf=True)
