"""Evidence of an attack on a run: lower bounds that no valid claim can stay below."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import attrs
import dp_accounting
from dp_accounting import NeighboringRelation
from scipy import optimize

from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.process.conditions import UnmetCondition

LARGEST_EPSILON = 700.0  # exp of it is a double

Progress = Callable[[str], None]
"""Receives one line of text at each stage of long work."""


@attrs.frozen(eq=False)
class Evidence:
    """Lower bounds on the privacy loss of a run.

    Attributes:
        attack: The name of the attack.
        strength: Certainty of the bounds, in words: "exact", "certified", "confidence 0.95".
        witness: The run, one of the class that the claim is about, that shows them.
        delta: A lower bound, at an epsilon in [0, 700], on the delta of every valid claim: the
            larger of the two directions. Nonincreasing.
    """

    attack: str
    strength: str
    witness: str
    delta: Callable[[float], float]

    def epsilon(self, delta: float) -> float:
        """A lower bound on the epsilon of every valid claim at `delta` in [0, 1), up to 1e-9."""
        if not self.delta(0.0) > delta:
            return 0.0
        if self.delta(LARGEST_EPSILON) > delta:
            return math.inf
        root = optimize.bisect(
            lambda e: 1.0 if self.delta(e) > delta else -1.0, 0.0, LARGEST_EPSILON, xtol=1e-9
        )
        while root > 0 and not self.delta(root) > delta:
            root = max(0.0, root - 2e-9)
        return float(root)


def strongest(found: Sequence[Evidence]) -> Evidence:
    """The pointwise largest bounds of one attack's runs; the witness is the best at delta 1e-5."""
    best = max(found, key=lambda evidence: (evidence.epsilon(1e-5), evidence.delta(0.0)))
    return attrs.evolve(best, delta=lambda epsilon: max(part.delta(epsilon) for part in found))


def relation_conditions(
    event: LastIterateDpEvent, relation: NeighboringRelation
) -> tuple[UnmetCondition, ...]:
    """That the relation makes sense for the batch order, and no prox changes the law of the run."""
    unmet = []
    if reason := event.unmet_relation(relation):
        unmet.append(UnmetCondition("neighboring relation", reason, relation.name))
    if mu := event.prox_strong_convexity:
        unmet.append(UnmetCondition("proximal map", "prox_strong_convexity = 0", f"{mu:g}"))
    return tuple(unmet)


class Attack(Protocol):
    """One way to refute claims. A new one is a file with a class like this, listed in `ATTACKS`."""

    @property
    def name(self) -> str:
        """Short, stable identifier."""

    @property
    def event_type(self) -> type[dp_accounting.DpEvent]:
        """The kind of run that it attacks."""

    def check(
        self, event: dp_accounting.DpEvent, relation: NeighboringRelation
    ) -> tuple[UnmetCondition, ...]:
        """Why the attack does not apply to the event, of `event_type`; empty if it does."""

    def evidence(
        self, event: dp_accounting.DpEvent, relation: NeighboringRelation, progress: Progress
    ) -> Evidence:
        """Runs the attack on a worst case of its own choice inside the class of the event."""
