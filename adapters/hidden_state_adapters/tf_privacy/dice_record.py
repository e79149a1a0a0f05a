"""The record of a DiceSGD run, of which every iterate counts as released."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from dp_accounting import NeighboringRelation

from hidden_state_accountants import (
    Assumption,
    BatchOrder,
    DiceSgdAccountant,
    DiceSgdDpEvent,
    Guarantee,
)
from hidden_state_adapters.tf_privacy.optimizer_checks import SLACK
from hidden_state_adapters.tf_privacy.refusals import refusal
from hidden_state_adapters.tf_privacy.run_record import RunRecord
from hidden_state_adapters.tf_privacy.step_log import StepEntry


class DiceRecord(RunRecord):
    """Counts the steps of a DiceKerasSGDOptimizer or DiceKerasAdamOptimizer.

    Args:
        optimizer: As for `RunRecord`, like the next three.
        batch_size: b.
        examples: Of an epoch.
        relation: Of the guarantee.
        gradient_bound: A bound on every per-example gradient before clipping, or inf.
    """

    def __init__(
        self,
        optimizer: Any,
        batch_size: int,
        examples: int,
        relation: NeighboringRelation,
        gradient_bound: float = math.inf,
    ):
        super().__init__(optimizer, batch_size, examples, relation)
        if optimizer.expected_batch_size not in (None, batch_size):
            raise refusal(
                f"Expected expected_batch_size = None or {batch_size}, the size of every batch, "
                f"got {optimizer.expected_batch_size}. Leave it out."
            )
        self._gradient_bound = gradient_bound

    def _add(self, entry: StepEntry) -> None:
        if entry.largest_norm > self._gradient_bound * (1 + SLACK):
            raise refusal(
                f"step {self.num_batches} has a per-example gradient longer than gradient_bound = "
                f"{self._gradient_bound:g}. A bound has to be proven from the loss and the norm of "
                "the features. Correct it, or leave it out."
            )

    def release(self) -> None:
        """Nothing to note: every iterate is accounted as released."""

    def event(self) -> DiceSgdDpEvent:
        """The event that happened."""
        return self.optimizer.privacy_event(
            dataset_size=self.examples,
            batch_order=BatchOrder.CYCLIC,
            num_steps=self.num_batches,
            gradient_bound=self._gradient_bound,
        )

    def guarantee(self) -> Guarantee:
        """Of all iterates."""
        return DiceSgdAccountant(self.relation).compose(self.event()).guarantee

    def checked(self) -> list[str]:
        """The constants of the run."""
        return [
            "noise, both clip norms and the divisor, constant; every noisy update applied once; "
            "the error in no file"
        ]

    def report(self, assumptions: Sequence[Assumption], delta: float) -> str:
        """The report of the optimizer, and everything that was checked and declared."""
        text = self.optimizer.report_of(self.event(), self.relation, delta)
        return "\n".join([text, "all assumptions:", *(f"- {a}" for a in assumptions)])
