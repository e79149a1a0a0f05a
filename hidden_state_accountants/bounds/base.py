"""What every bound offers: the protocol that accountants, compare and docs iterate over."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import dp_accounting
from dp_accounting import NeighboringRelation

from hidden_state_accountants.citation import Citation
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.guarantee import Assumption, Guarantee
from hidden_state_accountants.process.noisy_process import UnmetCondition

__all__ = ["Bound", "Citation", "declared_assumptions", "divisor_assumption"]


@runtime_checkable
class Bound(Protocol):
    """One theorem. A new one is a file that defines a class like this and a line in BOUNDS."""

    def __hash__(self) -> int:
        """Bounds are values: frozen and hashable."""

    @property
    def name(self) -> str:
        """Short, stable identifier."""

    @property
    def event_type(self) -> type[dp_accounting.DpEvent]:
        """The kind of run that the bound is about."""

    @property
    def citation(self) -> Citation:
        """Paper, theorem, arXiv version."""

    @property
    def sound(self) -> bool:
        """False for published formulas that are known to under-report."""

    @property
    def dominated_by(self) -> tuple[str, ...]:
        """Names of bounds that are never larger where both apply."""

    def check(self, event: Any, relation: NeighboringRelation) -> tuple[UnmetCondition, ...]:
        """Conditions that the event, of `event_type`, does not meet; empty if the bound applies."""

    def guarantee(self, event: Any, relation: NeighboringRelation) -> Guarantee:
        """The guarantee; raises UnsupportedRunError if a condition is not met."""


def divisor_assumption(event: LastIterateDpEvent) -> Assumption:
    """The divisor is public; under add-or-remove it must not be the number of records itself."""
    return Assumption.declared(
        f"sums of gradients are divided by the constant {event.batch_size}, which stays the same "
        "when the data set changes"
    )


def declared_assumptions(event: LastIterateDpEvent) -> tuple[Assumption, ...]:
    """What a hidden-state bound takes on the word of whoever wrote the event."""
    assumptions = [
        Assumption.declared(f"per-example loss: {event.loss!r}"),
        Assumption.declared("one record per person, clipped as one unit"),
        Assumption.declared(
            "only the released iterates are seen: no averages of iterates, optimizer state or "
            "metrics on the private data"
        ),
        Assumption.declared("number of steps, schedules and released steps fixed in advance"),
        divisor_assumption(event),
    ]
    if event.domain_diameter < float("inf"):
        assumptions.append(
            Assumption.declared(
                "every iterate is projected on a convex set of diameter "
                f"{event.domain_diameter:g} that contains the initial model"
            )
        )
    return (*assumptions, Assumption.public("order of the batches, batch size, hyper-parameters"))
