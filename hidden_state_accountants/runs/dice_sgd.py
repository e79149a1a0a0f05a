"""A run of DiceSGD, step by step: every iterate is covered, the error stays hidden."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
from dp_accounting import NeighboringRelation

from hidden_state_accountants import validate
from hidden_state_accountants.best_bound import best_guarantee
from hidden_state_accountants.errors import UnsupportedRunError
from hidden_state_accountants.events.batch_order import BatchOrder
from hidden_state_accountants.events.dice_sgd import DiceSgdDpEvent
from hidden_state_accountants.guarantee import Guarantee
from hidden_state_accountants.runs.base import Run, Step


class DiceSgdRun(Run):
    """Counts the steps of a run of DiceSGD, whose settings are constant.

    Every iterate is covered, so a release changes no figure. It is remembered all the same, because
    a run may not go back to before it.

    Args:
        noise_multiplier: Standard deviation of the noise on the sum of gradients over clip_norm.
        clip_norm: C_1, of each gradient.
        batch_size: B, the divisor and, unless POISSON, the number of rows of every batch.
        **declared: As for `DiceSgdDpEvent`: `error_clip_norm`, `dataset_size`, `batch_order`, and
            as far as they are known `automatic`, `gradient_bound` and `sampling_rate`.

    Raises:
        TypeError, ValueError: As `DiceSgdDpEvent`.
    """

    event_type = DiceSgdDpEvent
    releases_every_iterate = True
    of_one_step: ClassVar = {"num_steps": 1}

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
        self._check_batch(step)
        validate.integer("rows", step.rows, minimum=0)

    def _check_batch(self, step: Step) -> None:
        own, number = self._template, self._num_steps + 1
        if own.batch_order is not BatchOrder.POISSON and step.rows != own.batch_size:
            raise UnsupportedRunError(
                f"step {number} used {step.rows} rows, expected batch_size = {own.batch_size}."
            )
        if step.rows is not None and step.rows > own.dataset_size:
            raise UnsupportedRunError(
                f"step {number} used {step.rows} rows, more than dataset_size = {own.dataset_size}."
            )
        if own.batch_order is BatchOrder.CYCLIC and step.batch is not None:
            self._check_turn(step.batch, own.batches_per_epoch)

    def event(self) -> DiceSgdDpEvent:
        """The event that happened, for `DiceSgdAccountant`."""
        self._check_has_steps()
        event: DiceSgdDpEvent = attrs.evolve(self._template, num_steps=self._num_steps)
        return event

    @classmethod
    def of_totals(
        cls, *, fewest_rows: int | None = None, most_rows: int | None = None, **counted: Any
    ) -> DiceSgdRun:
        """As `Run.of_totals`, with the rows of the batches.

        Args:
            fewest_rows: Of the batches; None if all have batch_size rows.
            most_rows: Likewise.
            **counted: As there.
        """
        run = super().of_totals(**counted)
        size = run._template.batch_size
        if run.num_steps:
            run._check_rows(
                validate.integer("fewest_rows", size if fewest_rows is None else fewest_rows),
                validate.integer("most_rows", size if most_rows is None else most_rows),
            )
        return run

    def _check_rows(self, fewest: int, most: int) -> None:
        own = self._template
        if own.batch_order is BatchOrder.POISSON:
            if most > own.dataset_size:
                raise UnsupportedRunError(
                    f"Expected at most dataset_size = {own.dataset_size} rows in a batch, got "
                    f"{most}."
                )
        elif not fewest == most == own.batch_size:
            raise UnsupportedRunError(
                f"Expected {own.batch_size} rows in every {own.batch_order.value} batch, got "
                f"{fewest} to {most}. Drop the rest of the data set, or say "
                "batch_order='poisson' if every record was drawn for every batch by itself."
            )

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
