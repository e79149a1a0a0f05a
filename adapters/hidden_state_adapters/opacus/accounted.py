"""The runs of an accountant and what they cost together."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import dp_accounting
from dp_accounting import NeighboringRelation

from hidden_state_accountants import Assumption, BatchOrder, Guarantee, compose_guarantees
from hidden_state_accountants.bounds.assumptions import COMMON
from hidden_state_accountants.curves.base import Curve, GaussianCurve
from hidden_state_accountants.curves.standard import StandardCurve, StockEvent
from hidden_state_accountants.guarantee import Status, merge_assumptions
from hidden_state_accountants.runs.base import Run, run_of
from hidden_state_adapters.opacus.data.reading import drawn_rate
from hidden_state_adapters.opacus.run.schedule import DeclaredSchedule
from hidden_state_adapters.opacus.stock.run import StockRun, on_trust

Row = tuple[float, float, int]
"""Noise multiplier, sample rate, number of steps; as in Opacus' histories."""


def nothing() -> None:
    """The check of a run that has ended."""


@attrs.frozen
class AccountedRun:
    """A run, who records it, and what is taken on trust about it."""

    source: Run | StockRun
    check: Callable[[], None] = nothing  # raises unless the model is the accounted iterate
    told: tuple[Assumption, ...] = ()  # what was declared besides, and where the noise is from
    schedule: DeclaredSchedule = DeclaredSchedule()

    @property
    def recorder(self) -> Run:
        """The record of the steps."""
        return self.source.recorder if isinstance(self.source, StockRun) else self.source

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """What is added to the assumptions of the bound."""
        own = self.source.assumptions if isinstance(self.source, StockRun) else ()
        return merge_assumptions([own, self.told])

    def guarantee(self, relation: NeighboringRelation) -> Guarantee:
        """Of what was recorded, with everything that is taken on trust."""
        guarantee = self.recorder.guarantee(relation)
        own = self.schedule.assumptions(self.recorder, guarantee.assumptions)
        return attrs.evolve(guarantee, assumptions=merge_assumptions([own, self.assumptions]))

    def state_dict(self) -> dict[str, Any]:
        """The recorder's, with what was declared; what is checked is checked again."""
        return {**self.recorder.state_dict(), "assumptions": declared_texts(self.assumptions)}

    def with_assumptions_of(self, state: Any) -> AccountedRun:
        """The run, with the assumptions of a `state_dict` beside its own."""
        stored = tuple(Assumption.declared(text) for text in state.get("assumptions", ()))
        return attrs.evolve(self, told=merge_assumptions([self.told, stored]))

    @classmethod
    def ended(cls, state: Any) -> AccountedRun:
        """The run that a `state_dict` is of; it takes no further steps."""
        return cls(run_of(state)).with_assumptions_of(state)


class RunGuarantees:
    """The guarantee of several runs together, computed once per state of their recorders.

    Args:
        relation: The neighbouring relation.
    """

    def __init__(self, relation: NeighboringRelation):
        self._relation = relation
        self._composed: tuple[Any, Guarantee] | None = None  # of what was recorded then

    def compose(self, runs: Sequence[AccountedRun]) -> Guarantee:
        """The guarantee of everything that `runs` recorded.

        Raises:
            UnsupportedRunError: There is none.
        """
        key = tuple(
            (r.recorder, r.recorder.num_steps, r.recorder.release_steps, r.assumptions)
            for r in runs
        )
        if self._composed is None or self._composed[0] != key:
            guarantees = [run.guarantee(self._relation) for run in runs]
            self._composed = key, compose_guarantees(guarantees, self._relation)
        return self._composed[1]


def declared_texts(assumptions: Sequence[Assumption]) -> list[str]:
    """What of `assumptions` is somebody's word, as a state holds it."""
    return [a.text for a in assumptions if a.status is Status.DECLARED]


ON_TRUST = on_trust(BatchOrder.POISSON)
"""What undeclared steps rest on."""


@functools.lru_cache(maxsize=16)
def undeclared_guarantee(rows: tuple[Row, ...]) -> Guarantee:
    """Composition of Poisson-sampled Gaussian mechanisms, as stock Opacus accountants assume.

    Formal guarantees: ADD_OR_REMOVE_ONE; every iterate may be released; each record joins every
    batch independently with the sample rate as Opacus draws it (`drawn_rate`).
    """
    return Guarantee(
        curve=_curve(rows),
        neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
        theorem="composition of Poisson-sampled Gaussian mechanisms (no run was declared)",
        assumptions=COMMON,
    )


def _curve(rows: tuple[Row, ...]) -> Curve:
    mu_squared, sampled = 0.0, []
    for noise, rate, steps in rows:
        if not steps:
            continue
        if noise == 0:
            return GaussianCurve(math.inf)
        if rate >= 1:
            mu_squared += steps / noise**2
            continue
        gaussian = dp_accounting.GaussianDpEvent(noise)
        event = dp_accounting.PoissonSampledDpEvent(drawn_rate(rate), gaussian)
        sampled.append(StockEvent(event, steps, NeighboringRelation.ADD_OR_REMOVE_ONE))
    mu = math.sqrt(mu_squared)
    return StandardCurve(tuple(sampled), gaussian_mu=mu) if sampled else GaussianCurve(mu)
