"""Every accountant on the same run, side by side.

>>> import hidden_state_accountants as hsa
>>> run = hsa.LastIterateDpEvent(
...     noise_multiplier=2.0, learning_rate=0.5, clip_norm=1.4143, batch_size=500,
...     dataset_size=50_000, num_steps=20_000, batch_order="cyclic",
...     loss=hsa.LossGeometry.softmax_cross_entropy(feature_norm=1.0), weight_decay=0.1)
>>> table = hsa.compare(run, delta=1e-5)
>>> best = table.best()
>>> print(best.accountant, round(best.epsilon, 4))
shifted_interpolation 1.993
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import dp_accounting
import numpy as np
from dp_accounting import NeighboringRelation, pld, rdp

from hidden_state_accountants import validate
from hidden_state_accountants.accountants import LastIterateAccountant
from hidden_state_accountants.best_bound import RUN_EVENTS, best_guarantee, bound_guarantee
from hidden_state_accountants.bounds import BOUNDS, Bound
from hidden_state_accountants.bounds.shifted_interpolation import position_mus
from hidden_state_accountants.curves.gaussian import epsilon_from_mu
from hidden_state_accountants.curves.standard import stock_pld_error
from hidden_state_accountants.errors import UnsupportedRunError
from hidden_state_accountants.events.batch_order import BatchOrder
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.events.schedule import Schedule
from hidden_state_accountants.figures import text_up

Progress = Callable[[str], None]
"""Receives one line of text at each stage of long work."""

_COMBINED = "LastIterateAccountant"
_PROVEN, _PUBLISHED = "proven", "published, NOT proven"
_OTHER_ALGORITHM, _UNMET = "ANOTHER ALGORITHM", "does not apply"
_STYLES = {_PROVEN: "-", _PUBLISHED: "--", _OTHER_ALGORITHM: ":"}
# A privacy loss distribution beyond this epsilon takes gigabytes; RDP is good enough there.
_LARGEST_PLD_EPSILON = 200.0
_MOST_NOISE_LEVELS = 100  # each costs a stock accountant up to seconds
_MOST_POINTS = 10  # of a line of a picture
_ROUNDING = 1 + 1e-9  # of equal figures: the first bound in BOUNDS has the name


@attrs.frozen
class Row:
    """Statement of one accountant about one run at one delta.

    Attributes:
        run: The label of the run.
        accountant: The name of the bound in `BOUNDS`, or of the accountant.
        delta: The delta that epsilon is for.
        epsilon: None if the accountant does not apply.
        theorem: The theorem that proves it.
        status: "proven", "published, NOT proven", "ANOTHER ALGORITHM" or "does not apply".
        note: The condition that fails, or what to know about the row.
    """

    run: str
    accountant: str
    delta: float
    epsilon: float | None
    theorem: str
    status: str
    note: str


@attrs.frozen(eq=False)
class Comparison:
    """The table that `compare` returns; `print` it.

    Attributes:
        runs: (label, event) pairs.
        deltas: The deltas, in the order given.
        neighboring_relation: The relation of every row.
        rows: One `Row` for each run, accountant and delta.
    """

    runs: tuple[tuple[str, dp_accounting.DpEvent], ...]
    deltas: tuple[float, ...]
    neighboring_relation: NeighboringRelation
    rows: tuple[Row, ...]

    def rows_of(self, run: str) -> dict[str, list[Row]]:
        """The rows of a run by accountant, one for each delta."""
        found: dict[str, list[Row]] = {}
        for row in self.rows:
            if row.run == run:
                found.setdefault(row.accountant, []).append(row)
        return found

    def best(self, run: str | None = None, delta: float | None = None) -> Row | None:
        """The row with the smallest proven epsilon of a run at a delta (default: the first).

        Rows about another algorithm and published formulas without a proof do not take part. None
        if no accountant applies.
        """
        run = self.runs[0][0] if run is None else run
        delta = self.deltas[0] if delta is None else delta
        rows = {
            row: row.epsilon
            for row in self.rows
            if row.run == run and row.delta == delta and row.status == _PROVEN
            if row.epsilon is not None and row.accountant != _COMBINED
        }
        smallest = min(rows.values(), default=math.inf)
        return next((row for row in rows if rows[row] <= smallest * _ROUNDING), None)

    def summary(self) -> str:
        """A line for each run and delta: the best accountant and how far ahead it is."""
        return "\n".join(
            f"{label}, delta {delta:g}: {self._summary(label, delta)}"
            for label, _ in self.runs
            for delta in self.deltas
        )

    def _summary(self, label: str, delta: float) -> str:
        best = self.best(label, delta)
        if best is None or best.epsilon is None:
            return "no accountant applies."
        line = f"the best is {best.accountant}, epsilon {text_up(best.epsilon)}"
        for row in self.rows_of(label).get("composition", ()):
            if row.delta == delta and row.epsilon is not None and 0 < best.epsilon < row.epsilon:
                times = f"{row.epsilon / best.epsilon:.3g} times less than composition"
                line += f", {times} ({text_up(row.epsilon)})"
        return f"{line}. {best.theorem}."

    def to_dict(self) -> dict[str, Any]:
        """Plain types; an epsilon is a float (perhaps inf), or None where a row does not apply."""
        return {
            "neighboring_relation": self.neighboring_relation.name,
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
        head = ["accountant", *(f"epsilon (delta {d:g})" for d in self.deltas)]
        head += ["status", "theorem", "note"]
        parts = []
        for label, event in self.runs:
            table = [head, ["---"] * len(head)]
            for name, group in self.rows_of(label).items():
                epsilons = ["-" if r.epsilon is None else text_up(r.epsilon) for r in group]
                table.append([name, *epsilons, group[0].status, group[0].theorem, group[0].note])
            parts += [f"**{label}**: `{event!r}`, {self.neighboring_relation.name}", ""]
            parts += ["| " + " | ".join(map(_cell, line)) + " |" for line in table] + [""]
        return "\n".join([*parts, self.summary()])

    def __str__(self) -> str:
        return self.to_markdown()

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws epsilon at the first delta against epochs, a line a row and a panel a run.

        Args:
            path: Where to write the picture; the ending chooses the format. Needs matplotlib.

        Raises:
            ImportError: matplotlib is missing.
            ValueError: matplotlib does not know the ending.
        """
        figure, delta = new_figure(10.5, 5.0 * len(self.runs)), self.deltas[0]
        figure.suptitle(
            f"delta = {delta:g}, {self.neighboring_relation.name}; dashed: NOT PROVEN; dotted: "
            "ANOTHER ALGORITHM"
        )
        axes = figure.subplots(len(self.runs), squeeze=False).flat
        for (label, event), axis in zip(self.runs, axes, strict=True):
            lines: dict[tuple[str, str], list[tuple[int, float]]] = {}
            total = -(-int(event.num_steps) // int(event.batches_per_epoch))
            for epochs in sorted({round(n) for n in np.geomspace(1, total, _MOST_POINTS)}):
                part = first_epochs(event, epochs)
                for row in _rows(label, part, (delta,), self.neighboring_relation):
                    if row.epsilon is not None and row.accountant != _COMBINED:
                        points = lines.setdefault((row.accountant, row.status), [])
                        points.append((epochs, row.epsilon or math.nan))
            for (name, status), points in lines.items():
                axis.plot(*zip(*points, strict=True), _STYLES[status], marker="o", label=name)
            axis.set(title=label, xscale="log", yscale="log", ylabel="epsilon")
            axis.set_xlabel("epochs (the run is cut off there and its iterate released)")
            axis.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
        figure.savefig(path, dpi=150)


def compare(
    event: dp_accounting.DpEvent
    | Sequence[dp_accounting.DpEvent]
    | Mapping[str, dp_accounting.DpEvent],
    delta: float | Sequence[float] = 1e-5,
    neighboring_relation: NeighboringRelation | str = NeighboringRelation.REPLACE_SPECIAL,
    *,
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
        neighboring_relation: Relation of every row.
        progress: Receives a line of text for every run and every accountant.

    Returns:
        A `Comparison`: `.rows`, `.best()`, `.to_markdown()`, `.to_dict()`, `.plot(path)`.

    Raises:
        TypeError: `event` is not a run, or an argument has the wrong type.
        ValueError: No run or no delta is given, or a delta is not in [0, 1].
    """
    runs = _labelled(event)
    given: Any = [delta] if np.ndim(delta) == 0 else delta
    deltas = tuple(dict.fromkeys(map(validate.target_delta, given)))
    if not deltas:
        raise ValueError("Expected at least one delta, got none.")
    relation = validate.neighboring_relation(neighboring_relation)
    tell = progress or (lambda line: None)
    rows: list[Row] = []
    for index, (label, run) in enumerate(runs, start=1):
        rows += _rows(label, run, deltas, relation, tell)
        tell(f"compare: run {index} of {len(runs)}")
    return Comparison(runs, deltas, relation, tuple(rows))


def _labelled(event: Any) -> tuple[tuple[str, dp_accounting.DpEvent], ...]:
    if isinstance(event, list | tuple):
        event = {f"run {index}": run for index, run in enumerate(event, start=1)}
    runs = event.items() if isinstance(event, Mapping) else [("run", event)]
    if not runs:
        raise ValueError("Expected at least one run, got none.")
    for _, run in runs:
        if not isinstance(run, RUN_EVENTS):
            known = ", ".join(kind.__name__ for kind in RUN_EVENTS)
            raise TypeError(f"Expected event to be one of {known}, or several, got {run!r}.")
    return tuple((str(label), run) for label, run in runs)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


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
        event: A run over CYCLIC batches.
        delta: In [0, 1].
        neighboring_relation: REPLACE_SPECIAL or REPLACE_ONE.

    Returns:
        Shape (batches of an epoch,).

    Raises:
        TypeError: `event` is no `LastIterateDpEvent`.
        ValueError: The batches are not CYCLIC.
        UnsupportedRunError: No bound covers the run.
    """
    if not isinstance(event, LastIterateDpEvent):
        raise TypeError(f"Expected event to be a LastIterateDpEvent, got {event!r}.")
    if event.batch_order is not BatchOrder.CYCLIC:
        raise ValueError(
            f"Expected CYCLIC batches for a profile, got {event.batch_order.name}. Only a CYCLIC "
            "order has positions: in any other all records have the epsilon of the run."
        )
    delta = validate.target_delta(delta)
    relation = validate.neighboring_relation(neighboring_relation)
    whole = best_guarantee(event, relation).epsilon(delta)
    mus = position_mus(event, relation)
    return np.array([min(whole, epsilon_from_mu(mu, delta)) for mu in mus.tolist()])


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


def new_figure(width: float, height: float) -> Any:
    """A matplotlib figure that needs no display; ImportError says how to install matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError(
            "Plots need matplotlib: pip install 'hidden-state-accountants[plot]'"
        ) from None
    return Figure(figsize=(width, height), layout="constrained")


# What one accountant says about one run


@attrs.frozen
class _Result:
    epsilon: Callable[[float], float] | None  # None: does not apply
    theorem: str
    status: str = _PROVEN
    note: str = ""


def _rows(
    label: str,
    event: Any,
    deltas: Sequence[float],
    relation: NeighboringRelation,
    tell: Progress = lambda line: None,
) -> Iterator[Row]:
    """A row for each accountant and delta; `tell` hears of each accountant before it is asked."""
    methods = list(_methods(event, relation))
    for index, (name, evaluate) in enumerate(methods, start=1):
        tell(f"compare: {label}, accountant {index} of {len(methods)}: {name}")
        try:
            found = evaluate()
        except UnsupportedRunError as error:
            found = _Result(None, "", _UNMET, str(error))
        for delta in deltas:
            epsilon = None if found.epsilon is None else float(found.epsilon(delta))
            yield Row(label, name, delta, epsilon, found.theorem, found.status, found.note)


def _methods(
    event: Any, relation: NeighboringRelation
) -> Iterator[tuple[str, Callable[[], _Result]]]:
    """Every way to account for the run: grows with `BOUNDS`."""
    for bound in BOUNDS:
        if isinstance(event, bound.event_type):
            yield bound.name, functools.partial(_bound, bound, event, relation)
    yield _COMBINED, functools.partial(_combined, event, relation)
    for kind in (rdp.RdpAccountant, pld.PLDAccountant):
        yield kind.__name__, functools.partial(_stock, kind, event, relation)
    if isinstance(event, LastIterateDpEvent):
        if event.batch_order not in (BatchOrder.FULL, BatchOrder.POISSON):
            yield "Poisson batches, PLDAccountant", functools.partial(_poisson, event, relation)


def _bound(bound: Bound, event: Any, relation: NeighboringRelation) -> _Result:
    unmet = bound.check(event, relation)
    if unmet:
        raise UnsupportedRunError("; ".join(map(str, unmet)))
    found = bound_guarantee(bound, event, relation)
    status = _PROVEN if bound.sound and not found.caveat else _PUBLISHED
    return _Result(found.epsilon, found.theorem, status, found.caveat)


def _combined(event: Any, relation: NeighboringRelation) -> _Result:
    found = LastIterateAccountant(relation).compose(event).guarantee
    return _Result(found.epsilon, found.theorem, note="the smallest proven")


def _stock(kind: Any, event: Any, relation: NeighboringRelation) -> _Result:
    """The result of an accountant of dp-accounting, for any record if every iterate is released."""
    if not isinstance(event, LastIterateDpEvent):
        raise UnsupportedRunError(f"no standard event expresses a {type(event).__name__}")
    extra = event.cap_delta(relation)
    every = attrs.evolve(event, max_batch_size=None)
    composed = every.as_composition(relation)
    parts = getattr(composed, "events", [composed])
    if len(parts) > _MOST_NOISE_LEVELS:
        raise UnsupportedRunError(
            f"{len(parts)} noise levels: stock accountants take seconds for each"
        )
    reads, error = NeighboringRelation.ADD_OR_REMOVE_ONE, 0.0
    if kind is rdp.RdpAccountant and event.batch_order is BatchOrder.WITHOUT_REPLACEMENT:
        reads = NeighboringRelation.REPLACE_ONE  # the only relation that evaluates the event
    accountant = kind(neighboring_relation=reads)
    if not accountant.supports(composed):
        raise UnsupportedRunError(f"{kind.__name__} does not evaluate this run")
    if kind is pld.PLDAccountant:
        rough = rdp.RdpAccountant().compose(composed).get_epsilon(1e-5)
        if rough > _LARGEST_PLD_EPSILON:
            raise UnsupportedRunError(
                f"epsilon around {rough:.3g}: its privacy loss distribution takes gigabytes"
            )
        error = stock_pld_error(sum(getattr(part, "count", 1) for part in parts))
    accountant.compose(composed)

    def epsilon(delta: float) -> float:
        left = delta - extra - error
        return float(accountant.get_epsilon(left)) if left > 0 else math.inf

    note = "every iterate may be released"
    if extra:
        note += f"; delta {extra:.3g} of it pays for the cap on the batches"
    return _Result(epsilon, "dp-accounting, on event.as_composition", note=note)


def _poisson(event: LastIterateDpEvent, relation: NeighboringRelation) -> _Result:
    sampled = attrs.evolve(event, batch_order=BatchOrder.POISSON)
    return attrs.evolve(
        _stock(pld.PLDAccountant, sampled, relation),
        status=_OTHER_ALGORITHM,
        note="the same noise, but every record joins every batch independently with probability "
        f"{event.batch_size}/{event.dataset_size}; every iterate may be released",
    )
