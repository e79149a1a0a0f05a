"""The guarantee of a run that is still going on."""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
from dp_accounting import NeighboringRelation

from hidden_state_accountants import validate
from hidden_state_accountants.best_bound import best_guarantee
from hidden_state_accountants.bounds.shifted_interpolation import (
    ShiftedInterpolation,
    feed,
    taut_string,
)
from hidden_state_accountants.bounds.solvers.taut_string import CyclicTautString
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.guarantee import Guarantee
from hidden_state_accountants.process.noisy_process import noisy_process, unmet_conditions


class Recorded(Protocol):
    """What is read of a `LastIterateRun`."""

    @property
    def num_steps(self) -> int:
        """The number of steps recorded so far."""

    @property
    def release_steps(self) -> tuple[int, ...]:
        """The steps after which the iterate was released."""

    @property
    def is_constant(self) -> bool:
        """Whether no hyper-parameter has changed so far."""

    def event(self, since: int = 0) -> LastIterateDpEvent:
        """The event that happened, without the first `since` steps."""


class RunningGuarantee:
    """`best_guarantee` of what a recorder holds; a call costs the steps since the last call.

    Where the domain or the bounded drift helps (windows), Theorem A does not apply, or a prox acts
    at rates that change, the recorded event is evaluated as a whole.

    Args:
        recorder: A `RunRecorder` that the training loop records into.
        neighboring_relation: The relation of the guarantee.
    """

    def __init__(self, recorder: Recorded, neighboring_relation: NeighboringRelation | str):
        self._recorder = recorder
        self._relation = validate.neighboring_relation(neighboring_relation)
        self._cached: tuple[tuple[int, int], Guarantee] | None = None
        self._is_incremental = True
        self._consumed = 0
        self._taut: CyclicTautString | None = None  # the steps since the last release
        self._released = np.zeros(1)  # mu**2 per position of the segments before

    def guarantee(self) -> Guarantee:
        """The guarantee if the current iterate were the last one.

        Raises:
            ValueError: No step was recorded.
            UnsupportedRunError: No bound applies.
        """
        key = self._recorder.num_steps, len(self._recorder.release_steps)
        if self._cached is None or self._cached[0] != key:
            self._cached = key, self._evaluate()
        return self._cached[1]

    def _evaluate(self) -> Guarantee:
        recorder, relation, steps = self._recorder, self._relation, self._recorder.num_steps
        if self._is_incremental and steps > self._consumed:
            self._is_incremental = self._consume(steps)
        if not self._is_incremental or self._taut is None:
            return best_guarantee(recorder.event(), relation)
        positions = list(range(len(self._released)))
        if recorder.is_constant and not self._released.any():
            positions = [(steps - 1) % len(positions)]  # the worst, theory 1.2
        mu_squared = self._released[positions] + self._taut.mu_squared(positions)
        last_step = recorder.event(since=steps - 1)  # declares the same loss and domain
        return ShiftedInterpolation().from_mu_squared(last_step, relation, float(mu_squared.max()))

    def _consume(self, num_steps: int) -> bool:
        """Feeds the new steps; False if the step-by-step engine does not apply."""
        piece = self._recorder.event(since=self._consumed)
        if unmet_conditions(piece, self._relation):
            return False
        if piece.prox_strong_convexity and not self._recorder.is_constant:
            return False  # the prox of a step is counted with the next one, at its own rate
        process = noisy_process(piece, self._relation)
        if process.domain_diameter < math.inf:  # other bounds may be smaller
            return False
        offset = self._consumed
        if self._taut is None:
            self._released = np.zeros(process.period)
            self._taut = taut_string(process, process.period, 0)
        start = offset
        releases = [r for r in self._recorder.release_steps if offset <= r < num_steps]
        for stop in (*releases, num_steps):
            if not feed(self._taut, process, start - offset, stop - offset):
                return False
            if stop < num_steps:
                self._released += self._taut.mu_squared(range(process.period))
                self._taut = taut_string(process, process.period, stop % process.period)
            start = stop
        self._consumed = num_steps
        return True
