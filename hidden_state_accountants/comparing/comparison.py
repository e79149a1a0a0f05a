"""The table of all accountants on all runs, and its picture."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import dp_accounting
import numpy as np
from dp_accounting import NeighboringRelation

from hidden_state_accountants import validate
from hidden_state_accountants.best_bound import RUN_EVENTS, best_guarantee
from hidden_state_accountants.comparing.methods import (
    COMBINED,
    OTHER_ALGORITHM,
    PROVEN,
    Row,
    rows_of,
)
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.events.schedule import Schedule
from hidden_state_accountants.figures import text_up
from hidden_state_accountants.plotting import Panel, Series, check_path, plot_comparison

Progress = Callable[[str], None]
"""Receives one line of text at each stage of long work."""


@attrs.frozen(eq=False)
class Comparison:
    """The table that `compare` returns; `print` it.

    Attributes:
        runs: (label, event) pairs.
        deltas: The deltas, in the order given.
        neighboring_relation: The relation of every row.
        rows: One `Row` for each run, accountant and delta.
        group_size: In how many records two data sets may differ.
    """

    runs: tuple[tuple[str, dp_accounting.DpEvent], ...]
    deltas: tuple[float, ...]
    neighboring_relation: NeighboringRelation
    rows: tuple[Row, ...]
    group_size: int = 1

    @property
    def relation(self) -> str:
        """The relation of every row in words, with the size of groups."""
        groups = f", groups of {self.group_size}" if self.group_size > 1 else ""
        return f"{self.neighboring_relation.name}{groups}"

    def best(self, run: str | None = None, delta: float | None = None) -> Row | None:
        """The row with the smallest proven epsilon of a run at a delta (default: the first).

        Rows about another algorithm and published formulas without a proof do not take part. None
        if no accountant applies.
        """
        run = self.runs[0][0] if run is None else run
        delta = self.deltas[0] if delta is None else delta
        rows = [r for r in self._proven(run, delta) if r.accountant != COMBINED]
        smallest = min(map(_epsilon, rows), default=math.inf)
        # equal figures differ by rounding: the first bound in BOUNDS has the name
        return next((row for row in rows if _epsilon(row) <= smallest * (1 + 1e-9)), None)

    def _proven(self, run: str, delta: float) -> list[Row]:
        return [
            row
            for row in self.rows
            if row.run == run and row.delta == delta and row.status == PROVEN
        ]

    def summary(self) -> str:
        """A line for each run and delta: the best accountant and how far ahead it is."""
        return "\n".join(
            self._summary(label, delta) for label, _ in self.runs for delta in self.deltas
        )

    def _summary(self, label: str, delta: float) -> str:
        best = self.best(label, delta)
        if best is None or best.epsilon is None:
            return f"{label}, delta {delta:g}: no accountant applies."
        line = f"{label}, delta {delta:g}: the best is {best.accountant}, "
        line += f"epsilon {text_up(best.epsilon)}"
        everything = [r for r in self._proven(label, delta) if r.accountant == "composition"]
        if everything and best.accountant != "composition" and best.epsilon > 0:
            plain = _epsilon(everything[0])
            line += f", {plain / best.epsilon:.3g} times less than composition ({text_up(plain)})"
        scope = f" ONLY FOR {best.scope}." if best.scope else ""
        return f"{line}.{scope} {best.theorem}."

    def to_dict(self) -> dict[str, Any]:
        """Plain types; an epsilon is a float (perhaps inf), or None where a row does not apply."""
        return {
            "neighboring_relation": self.neighboring_relation.name,
            "group_size": self.group_size,
            "deltas": list(self.deltas),
            "runs": [
                {
                    "label": label,
                    "event": event.to_dict() if hasattr(event, "to_dict") else repr(event),
                    "rows": [
                        {k: v for k, v in attrs.asdict(row).items() if k != "run"}
                        for row in self.rows
                        if row.run == label
                    ],
                }
                for label, event in self.runs
            ],
        }

    def to_markdown(self) -> str:
        """One table for each run, a column of epsilons for each delta."""
        parts = []
        for label, event in self.runs:
            rows = [row for row in self.rows if row.run == label]
            by_name: dict[str, list[Row]] = {}
            for row in rows:
                by_name.setdefault(row.accountant, []).append(row)
            header = ["accountant", *(f"epsilon (delta {d:g})" for d in self.deltas)]
            header += ["status", "theorem", "seconds", "note"]
            table = [header, ["---"] * len(header)]
            for name, group in by_name.items():
                epsilons = ["-" if r.epsilon is None else text_up(r.epsilon) for r in group]
                seconds = f"{sum(r.seconds for r in group):.3f}"
                first = group[0]
                table.append([name, *epsilons, first.status, first.theorem, seconds, first.remark])
            lines = ["| " + " | ".join(_cell(c) for c in line) + " |" for line in table]
            title = f"**{label}**: `{event!r}`, {self.relation}"
            parts.append("\n".join([title, "", *lines]))
        return "\n\n".join([*parts, self.summary()])

    def __str__(self) -> str:
        return self.to_markdown()

    def to_pandas(self) -> Any:
        """A pandas.DataFrame with a line for each row."""
        try:
            import pandas
        except ImportError:
            raise ImportError("to_pandas needs pandas: pip install pandas") from None
        return pandas.DataFrame([attrs.asdict(row) for row in self.rows])

    def plot(
        self,
        path: str | os.PathLike[str],
        *,
        delta: float | None = None,
        jobs: int = 1,
        progress: Progress | None = None,
    ) -> None:
        """Draws epsilon against epochs for every row, one panel for each run.

        Args:
            path: Where to write the picture; the ending chooses the format. Needs matplotlib.
            delta: The delta of the epsilons; the first by default.
            jobs: Worker processes, with joblib.
            progress: Receives a line of text at each stage.

        Raises:
            ImportError: matplotlib, or joblib for several jobs, is missing.
            ValueError: The path is not that of a picture.
        """
        check_path(path)
        delta = self.deltas[0] if delta is None else validate.target_delta(delta)
        relation, size = self.neighboring_relation, self.group_size
        lengths = {label: plotted_epochs(event) for label, event in self.runs}
        work = [
            (f"{epochs:g}", first_epochs(event, epochs), (delta,), relation, size)
            for label, event in self.runs
            for epochs in lengths[label]
        ]
        found = iter(_evaluate(work, jobs, progress, "plot: point"))
        panels = []
        for label, event in self.runs:
            points: dict[str, list[tuple[float, float]]] = {}
            status: dict[str, str] = {}
            for epochs in lengths[label]:
                for row in next(found):
                    if row.epsilon is not None and row.accountant != COMBINED:
                        points.setdefault(row.accountant, []).append((epochs, row.epsilon))
                        status[row.accountant] = row.status
            panels.append(
                Panel(
                    title=_title(label, event, len(self.runs) > 1),
                    series=tuple(
                        Series(
                            name=name,
                            points=tuple(values),
                            is_proven=status[name] == PROVEN,
                            is_other_algorithm=status[name] == OTHER_ALGORITHM,
                        )
                        for name, values in points.items()
                    ),
                )
            )
        plot_comparison(panels, path, delta=delta, relation=self.relation)


def compare(
    event: dp_accounting.DpEvent
    | Sequence[dp_accounting.DpEvent]
    | Mapping[str, dp_accounting.DpEvent],
    delta: float | Sequence[float] = 1e-5,
    neighboring_relation: NeighboringRelation | str = NeighboringRelation.REPLACE_SPECIAL,
    *,
    group_size: int = 1,
    jobs: int = 1,
    progress: Progress | None = None,
) -> Comparison:
    """Accounts for runs in every way there is: each bound of this package, and stock accountants.

    A row for each bound in `BOUNDS`, published formulas included; for `LastIterateAccountant`,
    which is the smallest proven bound; for dp-accounting's RDP and PLD accountants on
    `event.as_composition`; and, marked as ANOTHER ALGORITHM, for the run with Poisson batches at
    the same noise. Rows that do not apply say which condition fails.

    Formal guarantees: those of each row's theorem; rows "published, NOT proven" have none.

    Args:
        event: A run, several, or labels with runs.
        delta: One or several, in [0, 1].
        neighboring_relation: Of every row.
        group_size: How many records one person has at most (docs/theory/groups.md). Stock
            accountants are then left out: they are about one record.
        jobs: Worker processes for several runs, with joblib.
        progress: Receives a line of text for every run, and for every accountant unless other
            processes do the work.

    Returns:
        A `Comparison`: `.rows`, `.best()`, `.to_markdown()`, `.to_dict()`, `.plot(path)`.

    Raises:
        TypeError: `event` is not a run, or an argument has the wrong type.
        ValueError: No run or no delta is given, or a delta is not in [0, 1].
    """
    runs = _labelled(event)
    deltas = tuple(
        dict.fromkeys(validate.target_delta(d) for d in np.atleast_1d(delta).tolist())
        if not isinstance(delta, str)
        else (validate.target_delta(delta),)
    )
    if not deltas:
        raise ValueError("Expected at least one delta, got none.")
    relation = validate.neighboring_relation(neighboring_relation)
    size = validate.integer("group_size", group_size, minimum=1)
    work: list[tuple[Any, ...]] = [(label, run, deltas, relation, size) for label, run in runs]
    if progress is not None and (jobs == 1 or len(work) == 1):
        work = [(*item, progress) for item in work]  # other processes cannot tell
    rows = [row for part in _evaluate(work, jobs, progress, "compare: run") for row in part]
    return Comparison(runs, deltas, relation, tuple(rows), size)


def _labelled(event: Any) -> tuple[tuple[str, dp_accounting.DpEvent], ...]:
    if isinstance(event, dp_accounting.DpEvent):
        runs = [("run", event)]
    elif isinstance(event, Mapping):
        runs = [(str(label), run) for label, run in event.items()]
    elif isinstance(event, Sequence) and not isinstance(event, str):
        runs = [(f"run {index}", run) for index, run in enumerate(event, start=1)]
    else:
        raise TypeError(f"Expected event to be a run or several, got {event!r}.")
    if not runs:
        raise ValueError("Expected at least one run, got none.")
    for _, run in runs:
        if not isinstance(run, RUN_EVENTS):
            known = ", ".join(kind.__name__ for kind in RUN_EVENTS)
            raise TypeError(f"Expected event to be one of {known}, got {run!r}.")
    return tuple(runs)


def _evaluate(
    work: Sequence[tuple[Any, ...]],
    jobs: int,
    progress: Progress | None,
    what: str,
) -> list[list[Row]]:
    """`rows_of` for the arguments of each piece of work, in order."""
    jobs = validate.integer("jobs", jobs, minimum=1)
    results: Any
    if jobs == 1 or len(work) == 1:
        results = (rows_of(*item) for item in work)
    else:
        try:
            from joblib import Parallel, delayed
        except ImportError:
            raise ImportError(f"jobs={jobs} needs joblib: pip install joblib") from None
        results = Parallel(n_jobs=jobs, return_as="generator")(delayed(rows_of)(*w) for w in work)
    found = []
    for index, rows in enumerate(results, start=1):
        found.append(rows)
        if progress is not None:
            progress(f"{what} {index} of {len(work)}")
    return found


def _epsilon(row: Row) -> float:
    return math.inf if row.epsilon is None else row.epsilon


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _title(label: str, event: Any, several: bool) -> str:
    order = getattr(event, "batch_order", None)
    parts = [f"{label}:"] if several else []
    parts.append(f"{order.value.replace('_', ' ')} batches," if order else "blocks,")
    parts.append(f"{event.batch_size:,} of {event.dataset_size:,} records")
    noise = getattr(event, "noise_multiplier", None)
    if isinstance(noise, float):
        parts[-1] += f", noise multiplier {noise:g}"
    if getattr(event, "record_position", None) is not None:
        parts[-1] += f", ONLY FOR {event.records}"
    return " ".join(parts)


def position_profile(
    event: dp_accounting.DpEvent,
    delta: float = 1e-5,
    neighboring_relation: NeighboringRelation | str = NeighboringRelation.REPLACE_SPECIAL,
) -> np.ndarray:
    """The smallest proven epsilon of the records of each batch of an epoch.

    Noise that comes after a record's last participation hides it: the last batches of an epoch pay
    most. The epsilon of the run is the largest entry, and the one to publish.

    Formal guarantees: entry k is an epsilon for the records of batch k of every epoch, and for no
    others; which batch a record is in must not depend on the data.

    Args:
        event: A run over CYCLIC batches; its own `record_position` is ignored.
        delta: In [0, 1].
        neighboring_relation: REPLACE_SPECIAL or REPLACE_ONE.

    Returns:
        Shape (batches of an epoch,).

    Raises:
        TypeError: `event` is no `LastIterateDpEvent`.
        ValueError: Its batches are not CYCLIC.
        UnsupportedRunError: No bound covers the run.
    """
    if not isinstance(event, LastIterateDpEvent):
        raise TypeError(f"Expected event to be a LastIterateDpEvent, got {event!r}.")
    delta = validate.target_delta(delta)
    relation = validate.neighboring_relation(neighboring_relation)
    positions = [
        attrs.evolve(event, record_position=position) for position in range(event.batches_per_epoch)
    ]
    return np.array([best_guarantee(run, relation).epsilon(delta) for run in positions])


_MOST_POINTS = 10


def _epochs(event: Any) -> int:
    return -(-int(event.num_steps) // int(event.batches_per_epoch))


def plotted_epochs(event: Any) -> list[int]:
    """Numbers of epochs from 1 to all, evenly spaced on a logarithmic axis."""
    total = _epochs(event)
    if total <= _MOST_POINTS:
        return list(range(1, total + 1))
    grid = np.geomspace(1, total, _MOST_POINTS)
    return sorted({round(value) for value in grid})


def first_epochs(event: Any, epochs: int) -> Any:
    """The run cut off after its first epochs."""
    steps = min(event.num_steps, epochs * event.batches_per_epoch)
    changes: dict[str, Any] = {"num_steps": steps}
    if hasattr(event, "num_epochs"):
        changes = {"num_epochs": epochs}
    for field in attrs.fields(type(event)):
        value = getattr(event, field.name)
        if isinstance(value, Schedule):
            changes[field.name] = Schedule.from_sequence(value.to_array()[:steps])
    if isinstance(event, LastIterateDpEvent):
        changes["release_steps"] = tuple(step for step in event.release_steps if step < steps)
    return attrs.evolve(event, **changes)
