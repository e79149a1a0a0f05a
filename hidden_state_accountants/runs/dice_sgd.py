"""A run of DiceSGD, step by step: every iterate is covered, the error stays hidden."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import attrs
from dp_accounting import NeighboringRelation

from hidden_state_accountants import validate
from hidden_state_accountants.best_bound import best_guarantee
from hidden_state_accountants.errors import UnsupportedRunError
from hidden_state_accountants.events.batch_order import BatchOrder, parse_batch_order
from hidden_state_accountants.events.dice_sgd import DiceSgdDpEvent
from hidden_state_accountants.guarantee import Guarantee
from hidden_state_accountants.runs import description
from hidden_state_accountants.runs.base import Run, Step


class DiceSgdRun(Run):
    """Counts the steps of a run of DiceSGD, whose settings are constant.

    Every iterate is covered, so a release changes no figure. It is remembered all the same, because
    a run may not go back to before it.

    What is declared here is compared with every step. An optimizer that does not see its loader
    leaves out `dataset_size` and `batch_order`, and `event` is told them: it compares them with the
    fewest and most rows of all steps, and a gradient bound with the longest gradient.

    Args:
        noise_multiplier: Standard deviation of the noise on the sum of gradients over clip_norm.
        clip_norm: C_1, of each gradient.
        batch_size: B, the divisor and, unless POISSON, the number of rows of every batch.
        **declared: As for `DiceSgdDpEvent`: `error_clip_norm`, and as far as they are known
            `dataset_size`, `batch_order`, `automatic`, `gradient_bound` and `sampling_rate`.

    Raises:
        TypeError, ValueError: As `DiceSgdDpEvent`.
    """

    event_type = DiceSgdDpEvent
    releases_every_iterate = True
    of_one_step: ClassVar = {"num_steps": 1}
    later = ("dataset_size", "batch_order")

    def __init__(
        self, *, noise_multiplier: float, clip_norm: float, batch_size: int, **declared: Any
    ):
        super().__init__(
            noise_std=_noise_std(noise_multiplier, clip_norm, batch_size),
            clip_norm=clip_norm,
            batch_size=batch_size,
            **declared,
        )

    @classmethod
    def _norm_bound(cls, event: DiceSgdDpEvent) -> tuple[str, float | None]:
        return "gradient_bound", event.gradient_bound

    def _check(self, step: Step) -> None:
        own, number = self._template, self._num_steps + 1
        if step.clip_norm != own.clip_norm:
            raise UnsupportedRunError(
                f"step {number} used clip_norm = {step.clip_norm}, expected {own.clip_norm:g}: the "
                "bound on DiceSGD is about constant values."
            )
        noise_std = _noise_std(step.noise_multiplier, own.clip_norm, own.batch_size)
        if noise_std != own.noise_std:
            raise UnsupportedRunError(
                f"step {number} used noise of standard deviation {noise_std:.8g} on the mean "
                f"update, expected {own.noise_std:.8g}: the bound on DiceSGD is about constant "
                "values."
            )
        if "batch_order" not in self._later:
            self._check_batch(step)
        validate.integer("rows", step.rows, minimum=0)

    def _check_batch(self, step: Step) -> None:
        own, number = self._template, self._num_steps + 1
        if own.batch_order is not BatchOrder.POISSON and step.rows != own.batch_size:
            raise UnsupportedRunError(
                f"step {number} used {step.rows} rows, expected batch_size = {own.batch_size}."
            )
        if "dataset_size" in self._later:
            return
        if step.rows is not None and step.rows > own.dataset_size:
            raise UnsupportedRunError(
                f"step {number} used {step.rows} rows, more than dataset_size = {own.dataset_size}."
            )
        if own.batch_order is BatchOrder.CYCLIC and step.batch is not None:
            self._check_turn(step.batch, own.batches_per_epoch)

    def _check_steps(self) -> None:
        if not self._later and self._num_steps:
            self.event()  # the totals of another run raise

    def event(
        self,
        *,
        dataset_size: int | None = None,
        batch_order: BatchOrder | str | None = None,
        num_steps: int | None = None,
        gradient_bound: float | None = None,
    ) -> DiceSgdDpEvent:
        """The event that happened, for `DiceSgdAccountant`.

        Args:
            dataset_size: N, if it was not declared before.
            batch_order: How the records were dealt into the batches, if it was not declared before.
                Only the number of rows is checked.
            num_steps: The number that was fixed in advance; None for that of the steps taken.
            gradient_bound: G, if it was not declared before; checked against the gradients of these
                steps.

        Raises:
            TypeError, ValueError: No step was taken, or no run can have these values.
            UnsupportedRunError: The steps are not those of such a run, or something else was
                declared before.
        """
        self._check_has_steps()
        if num_steps is not None:
            planned = validate.integer("num_steps", num_steps, minimum=1)
            if planned != self._num_steps:
                raise UnsupportedRunError(
                    f"Expected num_steps = {self._num_steps}, the steps taken, got {planned}."
                )
        order = None if batch_order is None else parse_batch_order(batch_order)
        event = attrs.evolve(
            self._template,
            num_steps=self._num_steps,
            dataset_size=self._told("dataset_size", dataset_size),
            batch_order=self._told("batch_order", order),
            gradient_bound=self._told("gradient_bound", gradient_bound, math.inf),
        )
        self._check_rows(event)
        self._check_norm(event, self._largest_norm, "of this run")
        return event

    def _check_rows(self, event: DiceSgdDpEvent) -> None:
        if event.batch_order is BatchOrder.POISSON:
            if self._most_rows > event.dataset_size:
                raise UnsupportedRunError(
                    f"Expected at most dataset_size = {event.dataset_size} rows in a batch, got "
                    f"{self._most_rows}."
                )
        elif not self._fewest_rows == self._most_rows == event.batch_size:
            raise UnsupportedRunError(
                f"Expected {event.batch_size} rows in every {event.batch_order.value} batch, got "
                f"{self._fewest_rows} to {self._most_rows}. Drop the rest of the data set, or say "
                "batch_order='poisson' if every record was drawn for every batch by itself."
            )

    @classmethod
    def describe(
        cls,
        event: DiceSgdDpEvent,
        relation: NeighboringRelation,
        delta: float,
        notes: Mapping[str, Any],
    ) -> description.Description:
        """As `Run.describe`; of the notes it reads `update_rule`, an optimizer's name."""
        return description.of_dice_sgd(event, relation, delta, notes.get("update_rule", "any"))

    @classmethod
    def every_iterate(cls, event: DiceSgdDpEvent, relation: NeighboringRelation) -> Guarantee:
        """That of the run: every iterate is released anyway."""
        return best_guarantee(event, relation)


def _noise_std(noise_multiplier: float, clip_norm: float, batch_size: int) -> float:
    validate.magnitude("noise_multiplier", noise_multiplier)
    validate.magnitude("clip_norm", clip_norm, positive=True)
    validate.integer("batch_size", batch_size, minimum=1)
    # ZBWH24, Algorithm 2, arXiv 2311.14632: the noise is on the mean update
    return noise_multiplier * clip_norm / batch_size
