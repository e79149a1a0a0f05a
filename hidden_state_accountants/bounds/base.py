"""Base classes of bounds: a theorem that says where it holds and what it proves there."""

from __future__ import annotations

import abc
from collections.abc import Iterable
from typing import Any, ClassVar

import attrs
import dp_accounting
from dp_accounting import NeighboringRelation

from hidden_state_accountants import validate
from hidden_state_accountants.bounds import assumptions
from hidden_state_accountants.curves.base import Curve
from hidden_state_accountants.errors import UnsupportedRunError
from hidden_state_accountants.events.batch_order import BatchOrder
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.guarantee import (
    Assumption,
    Citation,
    Guarantee,
    cited,
    replace_assumptions,
)
from hidden_state_accountants.process import conditions
from hidden_state_accountants.process.conditions import Unmet, UnmetCondition

__all__ = ["PUBLISHED", "SOUND", "Bound", "Citation", "HiddenStateBound", "Proof"]

SOUND, PUBLISHED = "sound", "published"
"""The two ways to read a paper: what is proved, and what is printed."""


@attrs.frozen
class Proof:
    """Statement that a bound proves about a run; `Bound.guarantee` adds what all proofs share.

    Attributes:
        curve: The numbers.
        theorem: What proves them.
        assumptions: Lines beside `assumptions.COMMON` and `Bound.event_assumptions`, which they
            replace where they are about the same topic.
        caveat: Why the claim is not proven; see `Guarantee`.
        citations: Papers beside that of the bound.
    """

    curve: Curve
    theorem: str
    assumptions: tuple[Assumption, ...] = ()
    caveat: str = ""
    citations: tuple[Citation, ...] = ()


@attrs.frozen
class Bound(abc.ABC):
    """One theorem: the conditions that a run does not meet, and what is true of one that does.

    A new one is a file with a subclass, and a line in `BOUNDS`. Bounds are frozen and hashable.

    Attributes:
        analysis: "sound", or "published" for the formulas as a paper prints them.
        key: The name of the sound analysis.
        event_type: The kind of run that the bound is about.
        analyses: The ones there are.
        dominated_by: Names of bounds that are never larger where both apply.
        paper: Paper, theorem, arXiv version.
        published_theorem: The theorem that the published analysis reads, if it is another one.
    """

    analysis: str = attrs.field(default=SOUND)

    key: ClassVar[str]
    event_type: ClassVar[type[dp_accounting.DpEvent]]
    analyses: ClassVar[tuple[str, ...]] = (SOUND,)
    dominated_by: ClassVar[tuple[str, ...]] = ()
    paper: ClassVar[Citation]
    published_theorem: ClassVar[str] = ""

    @analysis.validator
    def _check_analysis(self, attribute: Any, value: Any) -> None:
        if value not in self.analyses:
            known = " or ".join(f'"{analysis}"' for analysis in self.analyses)
            raise ValueError(f"Expected analysis to be {known}, got {value!r}.")

    @property
    def name(self) -> str:
        """Short, stable identifier."""
        return self.key if self.sound else f"{self.key}_{self.analysis}"

    @property
    def sound(self) -> bool:
        """False for published formulas: the default accountant never uses them."""
        return self.analysis == SOUND

    @property
    def citation(self) -> Citation:
        """Paper, theorem, arXiv version."""
        if self.sound or not self.published_theorem:
            return self.paper
        return attrs.evolve(self.paper, theorem=self.published_theorem)

    def cited(self, theorem: str) -> str:
        """Name that a guarantee gives to a theorem of the paper."""
        return cited(theorem, self.paper)

    def at_a_glance(self, event: Any) -> Unmet:
        """Conditions that rule a run of `event_type` out before anything is computed."""
        return []

    @abc.abstractmethod
    def conditions(self, event: Any, relation: NeighboringRelation) -> Iterable[UnmetCondition]:
        """The conditions that the event, of `event_type`, does not meet."""

    @abc.abstractmethod
    def prove(self, event: Any, relation: NeighboringRelation) -> Proof:
        """Proves the bound for an event that meets all `conditions`."""

    @abc.abstractmethod
    def event_assumptions(
        self, event: Any, relation: NeighboringRelation
    ) -> tuple[Assumption, ...]:
        """Assumptions of every proof of the bound, beside those of all bounds."""

    def check(self, event: Any, relation: NeighboringRelation | str) -> tuple[UnmetCondition, ...]:
        """The conditions that the event does not meet; empty if the bound applies."""
        return tuple(self.conditions(event, validate.neighboring_relation(relation)))

    def guarantee(self, event: Any, relation: NeighboringRelation | str) -> Guarantee:
        """Guarantee for the run.

        Raises:
            UnsupportedRunError: A condition of `check` is not met.
        """
        relation = validate.neighboring_relation(relation)
        unmet = self.check(event, relation)
        if unmet:
            raise UnsupportedRunError(f"{self.citation}: " + "; ".join(map(str, unmet)))
        return self.guarantee_of(event, relation, self.prove(event, relation))

    def guarantee_of(self, event: Any, relation: NeighboringRelation, proof: Proof) -> Guarantee:
        """The guarantee that a proof about the event is."""
        common = replace_assumptions(assumptions.COMMON, *self.event_assumptions(event, relation))
        return Guarantee(
            curve=proof.curve,
            neighboring_relation=relation,
            theorem=proof.theorem,
            assumptions=replace_assumptions(common, *proof.assumptions),
            caveat=proof.caveat,
            citations=tuple(dict.fromkeys((self.citation, *proof.citations))),
        )


@attrs.frozen
class HiddenStateBound(Bound):
    """A bound on `LastIterateDpEvent` that relies on hidden iterates, in batches of the `orders`.

    It says whether it needs a Lipschitz gradient, a Hölder gradient, or a bounded domain.
    """

    event_type = LastIterateDpEvent
    orders: ClassVar[tuple[BatchOrder, ...]] = (BatchOrder.FULL, BatchOrder.CYCLIC)
    is_linear: ClassVar[bool] = True
    is_hoelder: ClassVar[bool] = False
    needs_domain: ClassVar[bool] = False

    def at_a_glance(self, event: LastIterateDpEvent) -> Unmet:
        """The order of the batches, the class of the loss, and the domain."""
        return [
            *conditions.batch_order(event, self.orders),
            *(conditions.linear_modulus(event.loss) if self.is_linear else ()),
            *(conditions.hoelder_gradient(event.loss) if self.is_hoelder else ()),
            *(conditions.bounded_domain(event) if self.needs_domain else ()),
        ]

    def event_assumptions(
        self, event: LastIterateDpEvent, relation: NeighboringRelation
    ) -> tuple[Assumption, ...]:
        """Loss, releases, schedules, divisor, domain and order of the batches."""
        return assumptions.of_hidden_iterates(event)
