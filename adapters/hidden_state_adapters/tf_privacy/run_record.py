"""The steps of an optimizer over fixed batches, checked one by one."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

from dp_accounting import NeighboringRelation

from hidden_state_accountants import Assumption, DiceSgdDpEvent, Guarantee, LastIterateDpEvent
from hidden_state_adapters.tf_privacy.refusals import refusal
from hidden_state_adapters.tf_privacy.step_log import StepEntry


class RunRecord(abc.ABC):
    """What the record of every kind of run does; one subclass for each kind.

    Args:
        optimizer: It has not taken a step.
        batch_size: b.
        examples: Of an epoch, a multiple of b.
        relation: Of the guarantee.
    """

    def __init__(
        self, optimizer: Any, batch_size: int, examples: int, relation: NeighboringRelation
    ):
        self.optimizer = optimizer
        self.batch_size = batch_size
        self.examples = examples
        self.relation = relation
        self.num_batches = 0  # of which the optimizer made steps, or parts of them
        self._noise: set[int] = set()

    @property
    def next_batch(self) -> int:
        """The index within the epoch of the batch that the next step must use."""
        return self.num_batches % (self.examples // self.batch_size)

    def add(self, entry: StepEntry, batch: int) -> None:
        """Records the step on a batch, with the values that it used.

        Raises:
            ValueError: It is not the step that has to follow; nothing can follow then.
        """
        step = self.num_batches + 1
        if entry.problem:  # the run ends here for a reason that may depend on the data
            raise refusal(f"step {step} was not taken. {entry.problem}")
        if entry.steps != step:
            raise refusal(
                f"after batch {batch} the optimizer has taken {entry.steps} steps, expected {step}:"
                " one for every batch."
            )
        if entry.noise in self._noise:
            raise refusal(
                f"step {step} used the noise of an earlier step, so the noise would repeat and "
                "cancel. Leave the generator of the optimizer alone."
            )
        if entry.noise:
            self._noise.add(entry.noise)
        if batch != self.next_batch or entry.rows != self.batch_size:
            raise refusal(
                f"step {step} used {entry.rows} rows of batch {batch}, expected batch_size = "
                f"{self.batch_size} rows of batch {self.next_batch}."
            )
        self.num_batches = step
        self._add(entry)

    @abc.abstractmethod
    def _add(self, entry: StepEntry) -> None:
        """Takes a checked step into the account."""

    def check(self) -> None:
        """Raises UnsupportedRunError unless all steps of the optimizer are recorded."""
        taken = self.optimizer.last_step.steps
        if taken != self.num_batches:
            raise refusal(
                f"The optimizer took {taken} steps, but {self.num_batches} are recorded. "
                "Pass the callback to every call of fit, and train in no other way."
            )

    def line_before(self) -> str:
        """What should be known before training; empty if nothing."""
        return ""

    @abc.abstractmethod
    def release(self) -> None:
        """Notes that the current variables are seen."""

    @abc.abstractmethod
    def event(self) -> LastIterateDpEvent | DiceSgdDpEvent:
        """The event that happened."""

    @abc.abstractmethod
    def guarantee(self) -> Guarantee:
        """Of the event."""

    @abc.abstractmethod
    def checked(self) -> list[str]:
        """What was checked, beside what the callback checks of every run."""

    @abc.abstractmethod
    def report(self, assumptions: Sequence[Assumption], delta: float) -> str:
        """The event and its epsilons as text."""
