"""The runs of an accountant and what they cost together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
from dp_accounting import NeighboringRelation

from hidden_state_accountants import (
    Assumption,
    Guarantee,
    LastIterateAccountant,
    RunningGuarantee,
    compose_guarantees,
)
from hidden_state_accountants.guarantee import merge_assumptions
from hidden_state_adapters.opacus.declared_schedule import DeclaredSchedule
from hidden_state_adapters.opacus.dice_recorder import DiceRecorder
from hidden_state_adapters.opacus.recorders import Recorder, recorder_of
from hidden_state_adapters.opacus.stock_run import StockRun


def nothing() -> None:
    """The check of a run that has ended."""


@attrs.frozen
class AccountedRun:
    """A run, who records it, and what is taken on trust about it."""

    source: Recorder | StockRun
    check: Callable[[], None] = nothing  # raises unless the model is the accounted iterate
    assumptions: tuple[Assumption, ...] = ()  # added to those of the bound; all declared
    schedule: DeclaredSchedule = DeclaredSchedule()

    @property
    def recorder(self) -> Recorder:
        """The record of the steps."""
        return self.source.recorder if isinstance(self.source, StockRun) else self.source

    def state_dict(self) -> dict[str, Any]:
        """The recorder's, with the assumptions."""
        return {**self.recorder.state_dict(), "assumptions": [a.text for a in self.assumptions]}

    def with_assumptions_of(self, state: Any) -> AccountedRun:
        """The run, with the assumptions of a `state_dict` beside its own."""
        stored = tuple(Assumption.declared(text) for text in state.get("assumptions", ()))
        return attrs.evolve(self, assumptions=merge_assumptions([self.assumptions, stored]))

    @classmethod
    def ended(cls, state: Any) -> AccountedRun:
        """The run that a `state_dict` is of; it takes no further steps."""
        return cls(recorder_of(state)).with_assumptions_of(state)


class RunGuarantees:
    """The guarantee of several runs together, computed once per state of their recorders.

    Args:
        relation: The neighbouring relation.
    """

    def __init__(self, relation: NeighboringRelation):
        self._relation = relation
        self._composed: tuple[Any, Guarantee] | None = None  # of what was recorded then
        self._running: dict[Recorder, RunningGuarantee] = {}

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
            composed = compose_guarantees([self._of(run) for run in runs], self._relation)
            self._composed = key, composed
        return self._composed[1]

    def _of(self, run: AccountedRun) -> Guarantee:
        recorder = run.recorder
        if isinstance(recorder, DiceRecorder):
            guarantee = LastIterateAccountant(self._relation).compose(recorder.event()).guarantee
            own = guarantee.assumptions
        else:
            running = self._running.setdefault(recorder, RunningGuarantee(recorder, self._relation))
            guarantee = running.guarantee()
            own = run.schedule.assumptions(recorder, guarantee.assumptions)
        assumptions = merge_assumptions([own, run.assumptions])
        return attrs.evolve(guarantee, assumptions=assumptions)
