"""What an optimizer for DiceSGD did, as an event and in words; for the adapters."""

from __future__ import annotations

import math

import attrs
from dp_accounting import NeighboringRelation

from hidden_state_accountants import validate
from hidden_state_accountants.bounds.dice_sgd.bound import DiceSgd
from hidden_state_accountants.errors import UnsupportedRunError
from hidden_state_accountants.events.batch_order import BatchOrder, parse_batch_order
from hidden_state_accountants.events.dice_sgd import DiceSgdDpEvent
from hidden_state_accountants.guarantee import Guarantee

# Rounding in float32 of a norm that is exactly at its bound.
_SLACK = 1e-6


@attrs.frozen(kw_only=True)
class DiceSgdRun:
    """Steps of DiceSGD with constant settings, as an adapter saw them.

    Attributes:
        noise_multiplier: Standard deviation of the noise on the sum of gradients over clip_norm.
        clip_norm: C_1.
        error_clip_norm: C_2, in units of the mean update.
        batch_size: B, the divisor.
        automatic: Whether both clips normalise.
        num_steps: Steps taken.
        fewest_rows: Of their batches.
        most_rows: Likewise.
        largest_gradient_norm: Of all gradients before clipping.
    """

    noise_multiplier: float
    clip_norm: float
    error_clip_norm: float
    batch_size: int
    automatic: bool
    num_steps: int
    fewest_rows: int
    most_rows: int
    largest_gradient_norm: float

    def event(
        self,
        *,
        dataset_size: int,
        batch_order: BatchOrder | str,
        num_steps: int | None = None,
        gradient_bound: float = math.inf,
    ) -> DiceSgdDpEvent:
        """The event of these steps, for `DiceSgdAccountant`.

        Args:
            dataset_size: N.
            batch_order: How the records were dealt into the batches: declared. Only the number of
                rows is checked.
            num_steps: The number that was fixed in advance; None for that of the steps taken.
            gradient_bound: G, declared, and checked against the gradients of these steps.

        Raises:
            ValueError: No step was taken, or no run can have these values.
            UnsupportedRunError: The steps are not those of such a run.
        """
        if not self.num_steps:
            raise ValueError("Expected at least one step, got none yet.")
        if num_steps is not None:
            planned = validate.integer("num_steps", num_steps, minimum=1)
            if planned != self.num_steps:
                raise UnsupportedRunError(
                    f"Expected num_steps = {self.num_steps}, the steps taken, got {planned}."
                )
        event = DiceSgdDpEvent(
            # ZBWH24, Algorithm 2, arXiv 2311.14632: the noise is on the mean update
            noise_std=self.noise_multiplier * self.clip_norm / self.batch_size,
            clip_norm=self.clip_norm,
            error_clip_norm=self.error_clip_norm,
            batch_size=self.batch_size,
            dataset_size=dataset_size,
            num_steps=self.num_steps,
            batch_order=parse_batch_order(batch_order),
            gradient_bound=gradient_bound,
            automatic=self.automatic,
        )
        self._check_rows(event)
        largest = self.largest_gradient_norm
        if not largest <= event.gradient_bound * (1 + _SLACK):
            raise UnsupportedRunError(
                f"Expected gradient_bound >= {largest:.8g}, the largest gradient of this run, got "
                f"{event.gradient_bound:.8g}. A bound has to be proven from the loss and the norm "
                "of the features, not read off a run. Correct it, or leave it out."
            )
        return event

    def _check_rows(self, event: DiceSgdDpEvent) -> None:
        if event.batch_order is BatchOrder.POISSON:
            if self.most_rows > event.dataset_size:
                raise UnsupportedRunError(
                    f"Expected at most dataset_size = {event.dataset_size} rows in a batch, got "
                    f"{self.most_rows}."
                )
        elif not self.fewest_rows == self.most_rows == event.batch_size:
            raise UnsupportedRunError(
                f"Expected {event.batch_size} rows in every {event.batch_order.value} batch, got "
                f"{self.fewest_rows} to {self.most_rows}. Drop the rest of the data set, or say "
                "batch_order='poisson' if every record was drawn for every batch by itself."
            )


def text_report(
    event: DiceSgdDpEvent,
    guarantee: Guarantee,
    delta: float,
    *,
    update_rule: str,
    checked: str,
) -> str:
    """About a dozen lines to paste.

    Args:
        event: The run.
        guarantee: Of `DiceSgdAccountant` for it.
        delta: In [0, 1].
        update_rule: Name of the optimizer that the noisy updates go through.
        checked: What the adapter checks at every step.
    """
    relation = guarantee.neighboring_relation
    bound = "none declared" if event.gradient_bound == math.inf else f"{event.gradient_bound:g}"
    clip = "normalised to" if event.automatic else "clip norm"
    return "\n".join(
        [
            "Privacy of all iterates (the error of the feedback stays hidden)",
            f"epsilon = {guarantee.epsilon(delta):.4f} at delta = {delta:g}",
            f"neighboring relation: {relation.name}",
            f"theorem: {guarantee.theorem} (docs/theory/dice_sgd.md)",
            f"published: {_published(event, relation, delta)}",
            f"run: {event.num_steps} steps x {event.batch_size} of {event.dataset_size} records, "
            f"{event.batch_order.value}; update rule {update_rule}",
            f"noise on the mean update: standard deviation {event.noise_std:.6g}",
            f"gradients: {clip} {event.clip_norm:g}; bound before clipping: {bound}",
            f"error: {clip} {event.error_clip_norm:g}",
            f"checked at every step: {checked}",
            "declared (your word): " + "; ".join(a.text for a in guarantee.assumptions),
        ]
    )


def _published(event: DiceSgdDpEvent, relation: NeighboringRelation, delta: float) -> str:
    bound = DiceSgd(analysis="published")
    unmet = bound.check(event, relation)
    if unmet:
        return f"{bound.citation} does not apply: " + "; ".join(map(str, unmet))
    claim = bound.guarantee(event, relation)
    return (
        f"{bound.citation} would claim epsilon = {claim.epsilon(delta):.4f}; do not use it: "
        f"{claim.caveat}"
    )
