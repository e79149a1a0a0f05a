"""A run of DiceSGD, step by step: every iterate is covered, the error stays hidden."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import attrs
from dp_accounting import NeighboringRelation

from hidden_state_accountants import validate
from hidden_state_accountants.best_bound import best_guarantee
from hidden_state_accountants.bounds.dice_sgd.bound import DiceSgd
from hidden_state_accountants.errors import UnsupportedRunError
from hidden_state_accountants.events.batch_order import BatchOrder, parse_batch_order, rate_text
from hidden_state_accountants.events.dice_sgd import DiceSgdDpEvent
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.figures import fixed_up
from hidden_state_accountants.guarantee import Guarantee
from hidden_state_accountants.runs.base import Run, Step, check_covered, check_in_bound
from hidden_state_accountants.runs.description import Description, Other

_TOTALS = ("fewest_rows", "most_rows", "largest_norm")


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
        error_clip_norm: C_2, in units of the mean update.
        batch_size: B, the divisor and, unless POISSON, the number of rows of every batch.
        automatic: Whether both clips normalise.
        dataset_size: N; None if it is declared later.
        batch_order: A `BatchOrder` or its value; None if it is declared later.
        gradient_bound: G, of all gradients before clipping; inf if none is declared.
        sampling_rate: POISSON only; None is batch_size / dataset_size.

    Raises:
        TypeError, ValueError: As `DiceSgdDpEvent`.
    """

    event_type = DiceSgdDpEvent
    releases_every_iterate = True
    declares = (
        "noise_std",
        "clip_norm",
        "error_clip_norm",
        "batch_size",
        "dataset_size",
        "batch_order",
        "gradient_bound",
        "automatic",
        "sampling_rate",
    )
    of_one_step: ClassVar = {"num_steps": 1}
    later = ("dataset_size", "batch_order")

    def __init__(
        self,
        *,
        noise_multiplier: float,
        clip_norm: float,
        error_clip_norm: float,
        batch_size: int,
        automatic: bool = False,
        dataset_size: int | None = None,
        batch_order: BatchOrder | str | None = None,
        gradient_bound: float = math.inf,
        sampling_rate: float | None = None,
    ):
        super().__init__(
            noise_std=_noise_std(noise_multiplier, clip_norm, batch_size),
            clip_norm=clip_norm,
            error_clip_norm=error_clip_norm,
            batch_size=batch_size,
            dataset_size=dataset_size,
            batch_order=None if batch_order is None else parse_batch_order(batch_order),
            gradient_bound=gradient_bound,
            automatic=automatic,
            sampling_rate=sampling_rate,
        )

    @classmethod
    def of_totals(
        cls,
        *,
        num_steps: int,
        fewest_rows: int,
        most_rows: int,
        largest_norm: float,
        **settings: Any,
    ) -> DiceSgdRun:
        """A run whose steps were counted elsewhere, on the device.

        Args:
            num_steps: Steps taken, with the same settings.
            fewest_rows: Of their batches.
            most_rows: Likewise.
            largest_norm: Of all gradients before clipping.
            **settings: As for the constructor.

        Raises:
            TypeError, ValueError: No run can have these values.
            UnsupportedRunError: The steps are not those of the declared run.
        """
        run = cls(**settings)
        run._num_steps = validate.integer("num_steps", num_steps, minimum=0)
        run._fewest_rows = validate.integer("fewest_rows", fewest_rows, minimum=0)
        run._most_rows = validate.integer("most_rows", most_rows, minimum=fewest_rows)
        run._largest_norm = float(largest_norm)
        if not run._later and run._num_steps:
            run.event()  # checks the totals
        return run

    # What happens

    def _check(self, step: Step) -> None:
        self._check_settings(step)
        self._check_batch(step)
        where = f"of step {self._num_steps + 1}"
        check_in_bound("gradient_bound", self._template.gradient_bound, step.largest_norm, where)
        validate.integer("rows", step.rows, minimum=0)

    def _check_settings(self, step: Step) -> None:
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

    def _check_batch(self, step: Step) -> None:
        own, number = self._template, self._num_steps + 1
        if "batch_order" in self._later:
            return
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

    # What is said about it

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
        check_in_bound("gradient_bound", event.gradient_bound, self._largest_norm, "of this run")
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

    def check_relation(self, relation: NeighboringRelation | str) -> None:
        """As `Run.check_relation`; of a run that is declared later nothing is known yet."""
        if not self._later:
            check_covered(self._template, relation)

    def sampled_rows(self) -> list[tuple[float, float, int]]:
        """One row with noise 0, which no accountant takes for private: DP-SGD shows less."""
        told = attrs.evolve(self._template, dataset_size=self._told("dataset_size", None))
        return [(0.0, told.sampling_probability, self._num_steps)] if self._num_steps else []

    @classmethod
    def describe(
        cls,
        event: DiceSgdDpEvent,
        relation: NeighboringRelation,
        delta: float,
        notes: Mapping[str, Any],
    ) -> Description:
        """As `Run.describe`; of the notes it reads `update_rule`, an optimizer's name."""
        plain = LastIterateDpEvent(
            noise_multiplier=event.noise_std * event.batch_size / event.clip_norm,
            learning_rate=1.0,
            clip_norm=event.clip_norm,
            batch_size=event.batch_size,
            dataset_size=event.dataset_size,
            num_steps=event.num_steps,
            batch_order=event.batch_order,
            sampling_rate=event.sampling_rate,
        )
        clip = "normalised to" if event.automatic else "clip norm"
        bound = "none declared" if event.gradient_bound == math.inf else f"{event.gradient_bound:g}"
        return Description(
            title="Privacy of all iterates (the error of the feedback stays hidden)",
            theory="docs/theory/dice_sgd.md",
            facts=(
                ("published", _published(event, relation, delta)),
                (
                    "run",
                    f"{event.num_steps} steps x {event.batch_size} of {event.dataset_size} records"
                    f"{rate_text(event.sampling_rate)}, "
                    f"{event.batch_order.value}; update rule {notes.get('update_rule', 'any')}",
                ),
                ("noise on the mean update", f"standard deviation {event.noise_std:.6g}"),
                ("gradients", f"{clip} {event.clip_norm:g}; bound before clipping: {bound}"),
                ("error", f"{clip} {event.error_clip_norm:g}"),
            ),
            run=(
                f"DiceSGD performed over {event.dataset_size} examples with {event.batch_size} "
                f"examples per iteration in {event.batch_order.value} order"
                f"{rate_text(event.sampling_rate)}, noise multiplier "
                f"{plain.noise_multiplier:.6g}, gradients {clip} {event.clip_norm:g}, error {clip} "
                f"{event.error_clip_norm:g}, for {event.num_steps} iterations "
                f"({event.num_steps / event.batches_per_epoch:g} epochs) without microbatching."
            ),
            protects=(
                "This privacy guarantee protects the release of all model checkpoints in addition "
                "to the final model, and of all that is computed from them. It does not protect "
                "the error of the feedback, or losses and metrics of the training data."
            ),
            released="Epsilon of all released models:",
            others=(Other("Epsilon of ANOTHER algorithm, DP-SGD (*):", plain, relation),),
            footnote=(
                "(*) Not this run: DP-SGD with the same batches, clip norm and noise, without "
                "error feedback. DiceSGD must not be reported with it."
            ),
        )

    @classmethod
    def every_iterate(cls, event: DiceSgdDpEvent, relation: NeighboringRelation) -> Guarantee:
        """That of the run: every iterate is released anyway."""
        return best_guarantee(event, relation)

    # How it goes on elsewhere

    def private_state(self) -> dict[str, Any]:
        """The rows of the batches and the longest gradient."""
        return {"totals": {name: getattr(self, f"_{name}") for name in _TOTALS}}

    def _load_steps(self, state: Mapping[str, Any]) -> None:
        # A run that was declared in full was compared step by step; nothing is known for a bound
        # that comes later.
        rows = self._template.batch_size
        unknown = math.inf if self._template.gradient_bound == math.inf else 0.0
        stored = {"fewest_rows": rows, "most_rows": rows, "largest_norm": unknown}
        if self._later or "totals" in state:
            stored = dict(state.get("totals") or {})
        if set(stored) != set(_TOTALS):
            raise ValueError(f"The state is damaged: expected totals {_TOTALS}, got {stored!r}.")
        self._fewest_rows = validate.integer("fewest_rows", stored["fewest_rows"], minimum=0)
        self._most_rows = validate.integer(
            "most_rows", stored["most_rows"], minimum=self._fewest_rows
        )
        self._largest_norm = validate.real(
            "largest_norm", stored["largest_norm"], minimum=0, allow_inf=True
        )
        if not self._later and self._num_steps:
            self.event()  # the totals of another run raise


def _noise_std(noise_multiplier: float, clip_norm: float, batch_size: int) -> float:
    validate.magnitude("noise_multiplier", noise_multiplier)
    validate.magnitude("clip_norm", clip_norm, positive=True)
    validate.integer("batch_size", batch_size, minimum=1)
    # ZBWH24, Algorithm 2, arXiv 2311.14632: the noise is on the mean update
    return noise_multiplier * clip_norm / batch_size


def _published(event: DiceSgdDpEvent, relation: NeighboringRelation, delta: float) -> str:
    bound = DiceSgd(analysis="published")
    unmet = bound.check(event, relation)
    if unmet:
        return f"{bound.citation} does not apply: " + "; ".join(map(str, unmet))
    claim = bound.guarantee(event, relation)
    epsilon = fixed_up(claim.epsilon(delta), 4)
    return f"{bound.citation} would claim epsilon = {epsilon}; do not use it: {claim.caveat}"
