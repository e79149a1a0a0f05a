"""Texts of the commands: results on the standard output, everything else on stderr."""

from __future__ import annotations

import json as json_module
from collections.abc import Callable, Mapping
from typing import Any

import typer

from hidden_state_accountants.cli.run_file import RunDescription
from hidden_state_accountants.comparing import Comparison
from hidden_state_accountants.figures import finite, large_delta, table, text_up
from hidden_state_accountants.guarantee import Guarantee


def note(text: str) -> None:
    """One line on stderr."""
    typer.echo("hsa: " + " ".join(text.split()), err=True)


def progress(quiet: bool) -> Callable[[str], None]:
    """A function that shows one line at a time, or none."""
    return (lambda line: None) if quiet else note


def json(value: Any) -> None:
    """Standard JSON: what is not a finite number is a text."""
    typer.echo(json_module.dumps(finite(value), indent=2, allow_nan=False))


def result(value: Any, as_json: bool) -> None:
    """Prints what has a `to_dict` and a text."""
    if as_json:
        json(value.to_dict())
    else:
        typer.echo(str(value))


def guarantee(
    found: RunDescription, proved: Guarantee, figures: Mapping[str, Any], as_json: bool
) -> None:
    """The figures, the first of which is the answer, with theorem and relation."""
    records = getattr(found.event, "dataset_size", 0)
    if next(iter(figures)) != "delta" and (text := large_delta(found.delta, records)):
        note(text)
    if as_json:
        proof = {
            "neighboring_relation": proved.neighboring_relation.name,
            "theorem": proved.theorem,
            "is_proven": not proved.caveat,
            "caveat": proved.caveat,
            "mu": proved.mu,
            "assumptions": [str(assumption) for assumption in proved.assumptions],
            "not_used": [list(pair) for pair in proved.alternatives],
            "event": found.event.to_dict(),
        }
        json({**figures, **proof})
        return
    texts = [f"{name} = {_text(name, value)}" for name, value in figures.items()]
    typer.echo(f"{', '.join(texts)} ({proved.relation})")
    typer.echo(f"by {proved.theorem}")
    if proved.caveat:
        typer.echo(f"NOT PROVEN: {' '.join(proved.caveat.split())}")


def _text(name: str, value: Any) -> str:
    if isinstance(value, float):
        return text_up(value, 5 if name == "epsilon" else 8)
    return str(value)


def comparison(compared: Comparison) -> None:
    """For each run what applies, the smallest epsilon first, and why the rest does not."""
    for label, _ in compared.runs:
        groups = list(compared.rows_of(label).values())
        applied = [group for group in groups if group[0].epsilon is not None]
        applied.sort(key=lambda group: group[0].epsilon or 0.0)
        head = ["accountant", *(f"epsilon at {delta:g}" for delta in compared.deltas), "status"]
        rows = [
            [group[0].accountant, *(text_up(r.epsilon or 0.0) for r in group), group[0].status]
            for group in applied
        ]
        typer.echo(f"{label}, {compared.neighboring_relation.name}")
        typer.echo("\n".join(table([head, *rows])))
        for first, *_ in groups:
            if first.epsilon is None:
                typer.echo(f"does not apply: {first.accountant}: {' '.join(first.note.split())}")
    typer.echo(compared.summary())
