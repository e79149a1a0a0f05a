"""Texts of the commands: results on the standard output, everything else on stderr."""

from __future__ import annotations

import contextlib
import json as json_module
import re
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.progress import Progress as BarOfRich
from rich.table import Table
from rich.text import Text

from hidden_state_accountants.figures import finite, large_delta, text_up

if TYPE_CHECKING:  # the help needs nothing of this
    import numpy as np

    from hidden_state_accountants.cli.run_file import RunDescription
    from hidden_state_accountants.comparing import Comparison, Progress
    from hidden_state_accountants.guarantee import Guarantee

_WIDTH_OF_A_PIPE = 110  # columns, where no terminal has a width
_COUNTED = re.compile(r"\b(\d+) of (\d+)\b")


def note(text: str) -> None:
    """One line on stderr."""
    typer.echo("hsa: " + " ".join(text.split()), err=True)


@contextlib.contextmanager
def progress(quiet: bool) -> Iterator[Progress]:
    """A function that shows one line at a time with a bar, or plain lines if nobody looks."""
    if quiet:
        yield lambda line: None
    elif sys.stderr.isatty():
        with bar(Console(stderr=True)) as tell:
            yield tell
    else:
        yield note


@contextlib.contextmanager
def bar(console: Console) -> Iterator[Progress]:
    """Lines that say "3 of 12" move the bar; others leave it where it is."""
    columns = (
        SpinnerColumn(),
        BarColumn(20),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with BarOfRich(*columns, console=console, transient=True) as shown:
        task = shown.add_task("", total=None)

        def tell(line: str) -> None:
            shown.update(task, description=escape(line))
            if counted := _COUNTED.search(line):
                shown.update(task, completed=int(counted[1]) - 1, total=int(counted[2]))

        yield tell


def json(value: Any) -> None:
    """Standard JSON: what is not a finite number is a text."""
    typer.echo(json_module.dumps(finite(value), indent=2, allow_nan=False))


def guarantee(
    found: RunDescription, proved: Guarantee, figures: Mapping[str, Any], as_json: bool
) -> None:
    """The figures, the first of which is the answer, with theorem and relation."""
    records = getattr(found.event, "dataset_size", 0)
    if next(iter(figures)) != "delta" and (text := large_delta(found.delta, records)):
        note(text)
    if as_json:
        event: Any = found.event
        json(
            {
                **figures,
                "neighboring_relation": proved.neighboring_relation.name,
                "theorem": proved.theorem,
                "is_proven": not proved.caveat,
                "caveat": proved.caveat,
                "mu": proved.mu,
                "assumptions": [str(assumption) for assumption in proved.assumptions],
                "not_used": [list(pair) for pair in proved.alternatives],
                "event": event.to_dict(),
            }
        )
        return
    texts = [f"{name} = {_text(name, value)}" for name, value in figures.items()]
    typer.echo(f"{', '.join(texts)} ({proved.relation})")
    typer.echo(f"by {proved.theorem}")
    if proved.caveat:
        typer.echo(f"NOT PROVEN: {' '.join(proved.caveat.split())}")


def _text(name: str, value: Any) -> str:
    if name == "epsilon":
        return text_up(value)
    return text_up(value, 8) if isinstance(value, float) else str(value)


def profile(found: RunDescription, epsilons: np.ndarray, as_json: bool) -> None:
    """The epsilon of every position, and the largest, which is that of the run."""
    relation, largest = found.neighboring_relation.name, float(epsilons.max())
    if as_json:
        figures = {"epsilon": largest, "delta": found.delta, "neighboring_relation": relation}
        json({**figures, "epsilon_by_position": epsilons.tolist()})
        return
    typer.echo(f"epsilon = {text_up(largest)}, delta = {found.delta} ({relation})")
    for position, epsilon in enumerate(epsilons.tolist()):
        typer.echo(f"records of batch {position} of every epoch: {text_up(epsilon)}")


def comparison(table: Comparison) -> None:
    """For each run what applies, the smallest epsilon first, and why the rest does not."""
    console = Console(width=None if sys.stdout.isatty() else _WIDTH_OF_A_PIPE, highlight=False)
    for label, _ in table.runs:
        shown = Table(title=f"{label}, {table.neighboring_relation.name}", title_justify="left")
        shown.add_column("accountant", overflow="fold")
        for delta in table.deltas:
            shown.add_column(f"epsilon at {delta:g}", justify="right")
        for name in ("status", "theorem", "seconds"):
            shown.add_column(name)
        groups = table.rows_of(label).values()
        for first, *more in sorted(groups, key=lambda group: group[0].epsilon or 0.0):
            if first.epsilon is not None:
                epsilons = [text_up(r.epsilon or 0.0) for r in (first, *more)]
                why = "; ".join(filter(None, (first.theorem, first.note)))
                seconds = f"{first.seconds + sum(row.seconds for row in more):.2f}"
                cells = (first.accountant, *epsilons, first.status, why, seconds)
                shown.add_row(*map(Text, cells))  # brackets are no markup
        if shown.row_count:
            console.print(shown)
        for first, *_ in groups:
            if first.epsilon is None:
                note = " ".join(first.note.split())
                typer.echo(f"does not apply: {first.accountant}: {note}")
    typer.echo(table.summary())
