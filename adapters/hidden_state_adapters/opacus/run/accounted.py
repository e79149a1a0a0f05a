"""What an accountant keeps of its runs, and what undeclared steps cost."""

from __future__ import annotations

import functools
import math
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import dp_accounting
from dp_accounting import NeighboringRelation

from hidden_state_accountants import Assumption, Guarantee
from hidden_state_accountants.bounds.assumptions import COMMON
from hidden_state_accountants.curves.base import Curve, GaussianCurve
from hidden_state_accountants.curves.composed import compose_curves
from hidden_state_accountants.curves.standard import EventCurve
from hidden_state_accountants.guarantee import Status, merge_assumptions
from hidden_state_accountants.runs.assumptions import OF_EVERY_RUN
from hidden_state_accountants.runs.run import Run, run_of
from hidden_state_adapters.opacus.data.reading import drawn_rate
from hidden_state_adapters.opacus.run.schedule import DeclaredSchedule

Row = tuple[float, float, int]
"""Noise multiplier, sample rate, number of steps; as in Opacus' histories."""


@attrs.define(eq=False)
class AccountedRun:
    """What an accountant keeps of a run, however it is trained.

    Attributes:
        recorder: The record of the steps.
        assumptions: What is added to those of the bound.
        schedule: What the steps are compared with.
        id: The name of the run, the same wherever it goes on.
        failure: What ended the run: a step that was refused or interrupted; or "".
        has_moved: Whether parameters moved, if only in a step that was interrupted.
    """

    recorder: Run
    assumptions: tuple[Assumption, ...] = ()
    schedule: DeclaredSchedule = DeclaredSchedule()
    id: str = attrs.field(factory=lambda: secrets.token_hex(16))
    failure: str = ""
    has_moved: bool = False

    def assume(self, *further: Assumption) -> None:
        """Adds to the assumptions."""
        self.assumptions = merge_assumptions([self.assumptions, further])

    def guarantee(self, relation: NeighboringRelation) -> Guarantee:
        """Of what was recorded, with everything that is taken on trust."""
        guarantee = self.recorder.guarantee(relation)
        own = self.schedule.assumptions(self.recorder, guarantee.assumptions)
        listed = merge_assumptions([own, OF_EVERY_RUN, self.assumptions])
        return attrs.evolve(guarantee, assumptions=listed)

    def state_dict(self) -> dict[str, Any]:
        """The recorder's, with what was declared; what is checked is checked again."""
        own = {"assumptions": declared_texts(self.assumptions), "run_id": self.id}
        return {**self.recorder.state_dict(), **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a `state_dict` into a run without steps.

        Raises:
            ValueError: As `RunRecorder.load_state_dict`. Nothing is changed then.
        """
        self.recorder.load_state_dict(state)
        self.assume(*declared_by(state))
        self.id = state.get("run_id", self.id)

    @classmethod
    def ended(cls, state: Mapping[str, Any]) -> AccountedRun:
        """The run that a `state_dict` is of; it takes no further steps."""
        run = cls(run_of(state), assumptions=declared_by(state))
        run.id = state.get("run_id", run.id)
        return run


def declared_texts(assumptions: Sequence[Assumption]) -> list[str]:
    """What of `assumptions` is somebody's word, as a state holds it."""
    return [a.text for a in assumptions if a.status is Status.DECLARED]


def declared_by(state: Mapping[str, Any]) -> tuple[Assumption, ...]:
    """What a state holds of `declared_texts`."""
    return tuple(Assumption.declared(text) for text in state.get("assumptions", ()))


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
        assumptions=(
            *COMMON,
            *OF_EVERY_RUN,
            Assumption.declared(
                "the rate and the divisor, which Opacus computes from the number of records, are "
                "public constants"
            ),
        ),
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
        sampled.append((EventCurve(event, NeighboringRelation.ADD_OR_REMOVE_ONE), steps))
    return compose_curves([*sampled, (GaussianCurve(math.sqrt(mu_squared)), 1)])
