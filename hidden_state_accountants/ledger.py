"""One budget for many releases of the same records, in this process and in its workers.

>>> import hidden_state_accountants as hsa
>>> from dp_accounting import GaussianDpEvent
>>> with hsa.budget(epsilon=1.0, delta=1e-5) as spent:
...     for _ in range(3):
...         number = spent.spend(GaussianDpEvent(10.0), "REPLACE_SPECIAL")
>>> spent.releases, round(spent.spent_epsilon, 3)
(3, 0.62)

The fits of `hidden_state_adapters.sklearn` inside of the block spend from it by themselves.
"""

from __future__ import annotations

import contextlib
import math
import pathlib
import pickle
import sqlite3
import tempfile
from collections.abc import Iterator

from dp_accounting import DpEvent, GaussianDpEvent, NeighboringRelation

from hidden_state_accountants import validate
from hidden_state_accountants.accountants import LastIterateAccountant
from hidden_state_accountants.events.batch_order import BatchOrder, sensitivity_in_clip_norms
from hidden_state_accountants.figures import fixed_up
from hidden_state_accountants.guarantee import Guarantee

_ROUNDING = 1e-12  # of mu
_PATIENCE = 120.0  # seconds for a ledger that others write to
_Row = tuple[str, float | None, bytes | None]  # relation, mu, the event if it has no mu
_active: Budget | None = None


class BudgetExceededError(ValueError):
    """A release would have taken a budget over its epsilon; it was refused and costs nothing."""


class Budget:
    """What was released inside of a `with budget(...)` block. Processes share it by its ledger.

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
            ValueError: The relation is not that of the releases before, or the block has ended.
        """
        relation = validate.neighboring_relation(relation)
        mu = LastIterateAccountant(relation).compose(event).guarantee.mu
        row = (relation.name, mu, pickle.dumps(event) if mu is None else None)
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
            together = _compose(rows).epsilon(self.delta)
            if not together <= self.epsilon:
                before = self.spent_epsilon if len(rows) > 1 else 0.0
                raise BudgetExceededError(
                    f"Expected releases within epsilon {self.epsilon:g} at delta {self.delta:g}, "
                    f"got number {len(rows)}, which makes epsilon {fixed_up(together, 4)} of "
                    f"{fixed_up(before, 4)}. It was refused. Give each release a smaller epsilon, "
                    "make fewer, or raise the budget."
                )
            database.execute("INSERT INTO releases VALUES (?, ?, ?)", row)
            database.execute("COMMIT")
        return len(rows)

    @property
    def releases(self) -> int:
        """How many there were."""
        return len(self._read())

    @property
    def guarantee(self) -> Guarantee:
        """What is proved of all releases together.

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
        return self.guarantee.epsilon(self.delta) if self.releases else 0.0

    def __str__(self) -> str:
        rows = self._read()
        if not rows:
            return f"epsilon 0 of {self.epsilon:g} spent at delta {self.delta:g}: no release"
        one = max(_compose([row]).epsilon(self.delta) for row in dict.fromkeys(rows))
        together = _compose(rows).epsilon(self.delta)
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
    if _active is not None:
        raise ValueError("Expected one budget at a time, got a block inside of another's.")
    with tempfile.TemporaryDirectory(prefix="budget-") as folder:
        _active = found = Budget(epsilon, delta, pathlib.Path(folder) / "ledger")
        with found._database() as database:
            database.execute("CREATE TABLE releases (relation TEXT, mu REAL, event BLOB)")
            database.execute("CREATE TABLE target (epsilon REAL, delta REAL)")
            database.execute("INSERT INTO target VALUES (?, ?)", (epsilon, delta))
        try:
            yield found
        finally:
            _active = None
            found._closed = found._read()


def active_budget() -> Budget | None:
    """That of the block that this process is in."""
    return _active


def budget_at(ledger: pathlib.Path) -> Budget:
    """The budget of another process on this machine.

    Raises:
        ValueError: Its ledger cannot be reached: the block has ended, or runs on another machine.
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


def _rows(database: sqlite3.Connection) -> list[_Row]:
    return database.execute("SELECT relation, mu, event FROM releases").fetchall()


def _compose(rows: list[_Row]) -> Guarantee:
    """Squares of mu add up; the other events are composed one by one."""
    relation = NeighboringRelation[rows[0][0]]
    accountant = LastIterateAccountant(relation)
    mu = math.sqrt(math.fsum(mu**2 for _, mu, _ in rows if mu is not None)) * (1 + _ROUNDING)
    if mu > 0:
        clips = sensitivity_in_clip_norms(BatchOrder.FULL, relation)
        accountant.compose(GaussianDpEvent(clips / mu))
    for _, _, event in rows:
        if event is not None:
            accountant.compose(pickle.loads(event))
    return accountant.guarantee
