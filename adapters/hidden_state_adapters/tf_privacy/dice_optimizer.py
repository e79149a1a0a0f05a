"""What is said about a run of DiceSGD in Keras."""

from __future__ import annotations

import math

from dp_accounting import NeighboringRelation

from hidden_state_accountants import BatchOrder, DiceSgdAccountant, DiceSgdDpEvent
from hidden_state_accountants.events.batch_order import parse_batch_order
from hidden_state_accountants.runs.dice_sgd import DiceSgdRun, text_report
from hidden_state_adapters.tf_privacy.dice_mechanism import DiceMechanism
from hidden_state_adapters.tf_privacy.refusals import refusal

_CHECKED = (
    "constant noise, clip norms and divisor; both clips exactly min(1, C/|v|) v or normalised; "
    "finite gradients, one row each, in float32 or float64; the same variables, changed by this "
    "optimizer only; every noisy update applied once; noise that was not used in the last "
    "thousands of steps"
)


class DiceOptimizer(DiceMechanism):
    """Base of `DiceKerasSGDOptimizer` and `DiceKerasAdamOptimizer`; see the former."""

    _update_rule = ""

    def privacy_event(
        self,
        *,
        dataset_size: int,
        batch_order: BatchOrder | str,
        num_steps: int | None = None,
        gradient_bound: float = math.inf,
    ) -> DiceSgdDpEvent:
        """The run that really happened, for `hidden_state_accountants.DiceSgdAccountant`.

        Args:
            dataset_size: N.
            batch_order: How the examples were dealt into the batches. The optimizer does not see
                the data: it only checks the number of rows. POISSON, and FULL under
                ADD_OR_REMOVE_ONE, need expected_batch_size.
            num_steps: The number that was fixed in advance; None takes the number of steps taken.
            gradient_bound: G, a bound on the norm of every per-example gradient before clipping
                that holds for ALL examples that could have been in the data. The gradients of this
                run are checked against it. inf if none is known.

        Raises:
            ValueError: No step was taken, or no run can have these values.
            UnsupportedRunError: The run was another one, or a step was refused or not applied.
        """
        self._check_settings()
        entry, run = self.last_step, self._error.read_run()
        if run.drawn != entry.steps:
            raise refusal(
                f"Noisy gradients were computed {run.drawn} times, but {entry.steps} steps were "
                "taken: the others were refused, interrupted or not applied. What ended the run "
                "may depend on the examples, and the bound is about a number of steps that does "
                "not. "
                f"Start again with another optimizer. {entry.problem}".rstrip()
            )
        order = parse_batch_order(batch_order)
        if order is BatchOrder.POISSON and self.expected_batch_size is None:
            raise refusal(
                "Expected expected_batch_size for Poisson batches, got None: their size is not a "
                "public constant, and the sums must be divided by one."
            )
        counted = DiceSgdRun.of_totals(
            noise_multiplier=self.noise_multiplier,
            clip_norm=self.l2_norm_clip,
            error_clip_norm=self.error_l2_norm_clip,
            batch_size=self.expected_batch_size or entry.rows,
            automatic=self.automatic,
            num_steps=entry.steps,
            fewest_rows=run.fewest_rows,
            most_rows=run.most_rows,
            largest_norm=run.largest_norm,
        )
        return counted.event(
            dataset_size=dataset_size,
            batch_order=order,
            num_steps=num_steps,
            gradient_bound=gradient_bound,
        )

    def report(
        self,
        delta: float,
        *,
        dataset_size: int,
        batch_order: BatchOrder | str,
        num_steps: int | None = None,
        gradient_bound: float = math.inf,
        neighboring_relation: NeighboringRelation = NeighboringRelation.REPLACE_SPECIAL,
    ) -> str:
        """A few lines to paste: the proven epsilon, and what the paper would have claimed.

        Args:
            delta: In [0, 1].
            dataset_size: N; see `privacy_event` for this and the next three.
            batch_order: Of the examples in the batches.
            num_steps: T.
            gradient_bound: G.
            neighboring_relation: REPLACE_SPECIAL, REPLACE_ONE, or for full and Poisson batches
                ADD_OR_REMOVE_ONE.

        Raises:
            ValueError, UnsupportedRunError: As `privacy_event`, or no bound covers the run.
        """
        event = self.privacy_event(
            dataset_size=dataset_size,
            batch_order=batch_order,
            num_steps=num_steps,
            gradient_bound=gradient_bound,
        )
        if (
            neighboring_relation is NeighboringRelation.ADD_OR_REMOVE_ONE
            and self.expected_batch_size is None
        ):
            raise refusal(
                "Expected expected_batch_size under ADD_OR_REMOVE_ONE, got None: the sums are "
                "divided by the number of rows, which is another one with an example less. Declare "
                "the divisor, or use REPLACE_SPECIAL."
            )
        return self.report_of(event, neighboring_relation, delta)

    def report_of(
        self, event: DiceSgdDpEvent, neighboring_relation: NeighboringRelation, delta: float
    ) -> str:
        """As `report`, for an event of `privacy_event`."""
        text = text_report(
            event,
            DiceSgdAccountant(neighboring_relation).compose(event).guarantee,
            delta,
            update_rule=self._update_rule,
            checked=_CHECKED,
        )
        before = self._error.read_run().first_iteration
        if not before:
            return text
        return (
            f"{text}\nNOT in these figures: {before} steps before this optimizer was loaded. They "
            "are another run; compose both events in one accountant."
        )
