"""What decides the event of a run of a stock engine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs

from hidden_state_accountants import BatchOrder, LossGeometry, RunRecorder
from hidden_state_accountants.events.batch_order import EPOCH_ORDERS


@attrs.frozen(eq=False)
class StockAccount:
    """What decides the event of a run.

    Attributes:
        batches: The arguments of a `RunRecorder` about the batches.
        loss: The loss geometry, or None.
        radius: Of the ball around 0 on which the user projects, or None.
    """

    batches: Mapping[str, Any]
    loss: LossGeometry | None
    radius: float | None

    @property
    def order(self) -> BatchOrder:
        """How the records are dealt."""
        return BatchOrder(self.batches["batch_order"])

    @property
    def batches_per_epoch(self) -> int:
        """Batches of an epoch in which every record is used once."""
        return -(-int(self.batches["dataset_size"]) // int(self.batches["batch_size"]))

    def recorder(self) -> RunRecorder:
        """A record without steps."""
        diameter = math.inf if self.radius is None else 2 * self.radius
        return RunRecorder(**self.batches, loss=self.loss, domain_diameter=diameter)

    def composed(self) -> StockAccount:
        """The same batches for any update rule."""
        return attrs.evolve(self, loss=None, radius=None)

    def restored(self, state: Mapping[str, Any]) -> tuple[RunRecorder, bool | None]:
        """A record with the steps of a state; True if it is one of composition, else None.

        Raises:
            ValueError: As `RunRecorder.load_state_dict`, or the state is not of the end of an
                epoch.
        """
        recorder, fallback = self.recorder(), self.composed().recorder()
        is_fallback = _declared(recorder) != state.get("declared") == _declared(fallback)
        if is_fallback:
            recorder = fallback
        recorder.load_state_dict(state)
        if self.order is BatchOrder.SHUFFLED_ONCE and recorder.num_steps:
            raise ValueError(
                f"Expected no steps to restore for shuffled_once, got {recorder.num_steps}: the "
                "stock loader would draw another order. Use HiddenStatePrivacyEngine, whose "
                "checkpoints can hold the order."
            )
        position = recorder.num_steps % self.batches_per_epoch if self._has_epochs else 0
        if position:
            raise ValueError(
                f"Expected a state at the end of an epoch, got one before batch "
                f"{position}: the stock loader would start again at batch 0. "
                "Use HiddenStatePrivacyEngine, whose loader goes on where it was."
            )
        return recorder, is_fallback or None

    @property
    def _has_epochs(self) -> bool:
        return self.order in EPOCH_ORDERS


def _declared(recorder: RunRecorder) -> Any:
    return recorder.state_dict()["declared"]
