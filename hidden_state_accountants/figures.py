"""Printed figures: an epsilon never looks smaller than it is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def round_up(value: float, digits: int) -> float:
    """The next larger number with so many significant digits."""
    if value == 0 or not math.isfinite(value):
        return value
    rounded = float(f"{value:.{digits - 1}e}")
    if rounded < value:
        step = 10.0 ** (math.floor(math.log10(abs(value))) - digits + 1)
        rounded = float(f"{rounded + step:.{digits - 1}e}")
    return rounded


def large_delta(delta: float, records: int) -> str:
    """Returns what is said of a delta that protects nobody; "" for one below 1/n, n `records`."""
    if not delta * records >= 1:
        return ""
    return (
        f"delta = {delta:g} is not below 1/n for n = {records} records: publishing one record, "
        "drawn at random, would have this delta and epsilon 0. Choose delta far below 1/n."
    )


def text_up(value: float, digits: int = 5) -> str:
    """A figure with so many significant digits, rounded up."""
    return f"{round_up(value, digits):.{digits}g}"


def text_down(value: float, digits: int = 6) -> str:
    """A lower bound with so many significant digits, rounded down."""
    return f"{-round_up(-value, digits):.{digits}g}"


def fixed_up(value: float, decimals: int) -> str:
    """A figure with so many decimals, rounded up."""
    text = f"{value:.{decimals}f}"
    if math.isfinite(value) and float(text) < value:
        text = f"{float(text) + 10.0**-decimals:.{decimals}f}"
    return text


def table(rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of rows of texts, in columns that are flush right."""
    cells = list(rows)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(map(str.rjust, row, widths)) for row in cells]


def finite(value: Any) -> Any:
    """Returns plain types with a text in place of every number that is not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return value
