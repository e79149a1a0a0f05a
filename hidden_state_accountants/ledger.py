"""One budget for many releases of the same records, in this process and in its workers.

>>> import hidden_state_accountants as hsa
>>> from dp_accounting import GaussianDpEvent
>>> with hsa.budget(epsilon=1.0, delta=1e-5) as spent:
...     for _ in range(3):
...         number = spent.spend(GaussianDpEvent(10.0), "REPLACE_SPECIAL")
>>> spent.releases, round(spent.spent_epsilon, 3)
(3, 0.62)

The fits of `hidden_state_adapters.sklearn` inside of the block spend from it by themselves.

The ledger lies in the folder of temporary files, under a name that follows from the process whose
block it is. So a worker finds it, whenever it was started: its ancestors are asked for theirs.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import pickle
import shutil
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Iterator

from dp_accounting import DpEvent, NeighboringRelation

from hidden_state_accountants import validate
from hidden_state_accountants.accountants import LastIterateAccountant
from hidden_state_accountants.errors import UnsupportedRunError
from hidden_state_accountants.figures import fixed_up
from hidden_state_accountants.guarantee import Guarantee

_PATIENCE = 120.0  # seconds for a ledger that others write to
_Row = tuple[str, bytes]  # relation and event
_active: Budget | None = None  # of this process, or of one that it was forked from


class BudgetExceededError(ValueError):
    """A release would have taken a budget over its epsilon; it was refused and costs nothing."""


class Budget:
    """Releases made inside of a `with budget(...)` block. Processes share it by its ledger.

    Attributes:
        epsilon, delta: Of everything together.
        ledger: The file of the releases, an SQLite database; it is gone after the block.
    """

    def __init__(self, epsilon: float, delta: float, ledger: pathlib.Path):
        self.epsilon, self.delta, self.ledger = epsilon, delta, ledger
        self._closed: list[_Row] | None = None

    def spend(self, event: DpEvent, relation: NeighboringRelation | str) -> int:
        """Counts a release that is about to be made, and returns its number.

        Formal guarantees: whatever was counted composes to at most `epsilon` at `delta`, under the
        one relation that all of it has; adaptively chosen releases included.

        Raises:
            BudgetExceededError: It would go over; nothing was counted.
            UnsupportedRunError: No bound covers the event.
            ValueError: The relation is not that of the releases before, or the block has ended.
        """
        row = (validate.neighboring_relation(relation).name, pickle.dumps(event))
        if self._closed is not None:
            raise ValueError(
                "Expected a budget whose block goes on, got one whose block has ended."
            )
        with self._database() as database:
            database.execute("BEGIN IMMEDIATE")  # others wait
            rows = [*_rows(database), row]
            if rows[0][0] != row[0]:
                raise ValueError(
                    f"Expected neighboring_relation {rows[0][0]}, that of the releases before in "
                    f"this budget, got {row[0]}: epsilons of two relations do not add up."
                )
            together = self._epsilon(rows)
            if not together <= self.epsilon:
                before = self.spent_epsilon if len(rows) > 1 else 0.0
                raise BudgetExceededError(
                    f"Expected releases within epsilon {self.epsilon:g} at delta {self.delta:g}, "
                    f"got number {len(rows)}, which makes epsilon {fixed_up(together, 4)} of "
                    f"{fixed_up(before, 4)}. It was refused. Give each release a smaller epsilon, "
                    "make fewer, or raise the budget."
                )
            database.execute("INSERT INTO releases VALUES (?, ?)", row)
            database.execute("COMMIT")
        return len(rows)

    @property
    def releases(self) -> int:
        """Number of releases."""
        return len(self._read())

    @property
    def guarantee(self) -> Guarantee:
        """Guarantee of all releases together, with the assumptions of their theorems.

        What was checked or declared of a single fit stands in the report of that fit.

        Raises:
            ValueError: There was none.
        """
        rows = self._read()
        if not rows:
            raise ValueError("Expected at least one release in the budget, got none.")
        return _compose(rows)

    @property
    def spent_epsilon(self) -> float:
        """The epsilon of all releases together at `delta`."""
        rows = self._read()
        return self._epsilon(rows) if rows else 0.0

    def _epsilon(self, rows: list[_Row]) -> float:
        return _compose(rows).epsilon(self.delta)

    def __str__(self) -> str:
        rows = self._read()
        if not rows:
            return f"epsilon 0 of {self.epsilon:g} spent at delta {self.delta:g}: no release"
        one = max(self._epsilon([row]) for row in dict.fromkeys(rows))
        together = self._epsilon(rows)
        return "\n".join(
            [
                f"epsilon {fixed_up(together, 4)} of {self.epsilon:g} spent at delta "
                f"{self.delta:g} ({rows[0][0]}) by {len(rows)} releases",
                f"the costliest one alone: epsilon {fixed_up(one, 4)}; what choosing among them "
                f"costs: {fixed_up(together - one, 4)}",
                "not counted: scores on private records, held out or not. A choice by such a "
                "score is private only if the score is public or released with noise.",
            ]
        )

    @contextlib.contextmanager
    def _database(self) -> Iterator[sqlite3.Connection]:
        database = sqlite3.connect(self.ledger, timeout=_PATIENCE, isolation_level=None)
        try:
            yield database
        finally:
            database.close()  # rolls back what is not committed

    def _read(self) -> list[_Row]:
        if self._closed is not None:
            return self._closed
        with self._database() as database:
            return _rows(database)


@contextlib.contextmanager
def budget(epsilon: float, delta: float) -> Iterator[Budget]:
    """A block whose releases compose to at most (epsilon, delta); what goes over is refused.

    Counted, each before it starts, are the fits of the estimators and of `fit_head`, in all threads
    of this process, and in the processes that it started (before the block or in it). The training
    loops of Opacus and Keras are refused inside: what they release is known when they end.

    Args:
        epsilon: > 0, of everything inside.
        delta: In (0, 1).

    Yields:
        The budget. `print` it; it can be read after the block, too.

    Raises:
        TypeError, ValueError: An argument has an impossible value, or a block is inside another.
    """
    global _active
    validate.target_pair(epsilon, delta, ("epsilon", "delta"))
    validate.real("epsilon", epsilon, above=0)
    validate.real("delta", delta, above=0)
    if active_budget() is not None:
        raise ValueError("Expected one budget at a time, got a block inside of another's.")
    _active = found = Budget(epsilon, delta, _ledgers(os.getpid())[0][0])
    found.ledger.parent.mkdir(mode=0o700)
    try:
        with found._database() as database:
            database.execute("BEGIN")
            database.execute("CREATE TABLE releases (relation TEXT, event BLOB)")
            database.execute("CREATE TABLE target (epsilon REAL, delta REAL)")
            database.execute("INSERT INTO target VALUES (?, ?)", (epsilon, delta))
            database.execute("COMMIT")
        yield found
    finally:
        found._closed = found._read()
        shutil.rmtree(found.ledger.parent)


def active_budget() -> Budget | None:
    """That of the block that this process, or one that it descends from, is in."""
    ledgers, names = _ledgers(os.getpid())
    if not any([os.access(name, os.F_OK) for name in names]):  # asked in every step of a run
        return None
    for ledger in ledgers:
        if _is_own(ledger):
            return _active if _active and _active.ledger == ledger else budget_at(ledger)
    return None


def refuse_in_budget(what: str) -> None:
    """Raises UnsupportedRunError inside of a budget, which would not count `what`."""
    if active_budget() is not None:
        raise UnsupportedRunError(
            f"Expected no {what} inside of hidden_state_accountants.budget, got one: what it "
            "releases is known only when it ends, too late to refuse it. Train before the block, "
            "and count the run inside of it: spent.spend(privacy_event, relation)."
        )


def budget_at(ledger: pathlib.Path) -> Budget:
    """The budget of another process on this machine.

    Raises:
        ValueError: The ledger cannot be reached: the block has ended, or runs on another machine.
    """
    if not ledger.exists():
        raise ValueError(
            "Expected to reach the ledger of the budget that this estimator was sent from, got no "
            f"file {ledger}: its block has ended, or runs on another machine. Make a new "
            "estimator, and compose its privacy_event_ with what was spent."
        )
    with contextlib.closing(sqlite3.connect(ledger, timeout=_PATIENCE)) as database:
        epsilon, delta = database.execute("SELECT epsilon, delta FROM target").fetchone()
    return Budget(epsilon, delta, ledger)


@functools.lru_cache(maxsize=1)
def _ledgers(process: int) -> tuple[tuple[pathlib.Path, ...], tuple[str, ...]]:
    """Paths, and their names, where this process and those that it descends from keep the ledger.

    The name has the moment at which the process started: numbers of processes come again. Where the
    system does not tell (it has no /proc), the ancestors are the parent alone.
    """
    folder, found, parent = pathlib.Path(tempfile.gettempdir()), [], os.getppid()
    while process:
        started = ""
        with contextlib.suppress(OSError):
            # proc(5): after the name in brackets fields 3 (state), 4 (parent), ... 22 (started)
            stat = pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            parent, started = int(stat[1]), stat[19]
        found.append(folder / f"budget-{process}-{started}" / "ledger")
        process, parent = parent, 0
    return tuple(found), tuple(map(str, found))


def _is_own(ledger: pathlib.Path) -> bool:
    """Returns whether such a ledger lies in a folder that nobody else made: it holds pickles."""
    if not ledger.exists():
        return False
    return os.name == "nt" or ledger.parent.stat().st_uid == os.getuid()


def _rows(database: sqlite3.Connection) -> list[_Row]:
    return database.execute("SELECT relation, event FROM releases").fetchall()


def _compose(rows: list[_Row]) -> Guarantee:
    accountant = LastIterateAccountant(NeighboringRelation[rows[0][0]])
    for (_, event), count in Counter(rows).items():
        accountant.compose(pickle.loads(event), count)
    return accountant.guarantee
