"""The parts of a statement that depend on the kind of the run."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
from dp_accounting import DpEvent, NeighboringRelation

UNPROTECTED = (
    "averages of iterates, optimizer state, or losses and metrics of the training data or of "
    "intermediate models."
)
RELEASED_MODEL = "Epsilon of the released model (last iterate):"


@attrs.frozen
class Other:
    """Another run, whose epsilon stands beside that of the run for comparison.

    Attributes:
        label: What the figure is, and of which run.
        event: The other run, of which every iterate is released; None if its epsilon is not known.
        relation: Its neighbouring relation.
    """

    label: str
    event: DpEvent | None
    relation: NeighboringRelation


@attrs.frozen(kw_only=True)
class Description:
    """The texts of one run.

    Attributes:
        title: What is private; the first of the lines.
        theory: The page that proves the theorem, if it is not the paper.
        facts: Label and text of the lines about this kind of run.
        run: One sentence: what ran.
        protects: What is protected, and what is not.
        released: The label of the guarantee's epsilon among the figures.
        others: Further figures.
        footnote: About the others.
    """

    title: str
    theory: str = ""
    facts: tuple[tuple[str, str], ...]
    run: str
    protects: str
    released: str = RELEASED_MODEL
    others: tuple[Other, ...] = ()
    footnote: str = ""


def range_of(values: Iterable[float]) -> str:
    """The value that all have, or the smallest and the largest one."""
    values = tuple(values)
    low, high = f"{min(values):.6g}", f"{max(values):.6g}"
    return low if low == high else f"{low} to {high}"
