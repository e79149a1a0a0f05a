"""DiceSGD for Keras, whatever follows its noisy updates: the steps, and what is said of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import tensorflow as tf
from dp_accounting import NeighboringRelation

from hidden_state_accountants import (
    Assumption,
    BatchOrder,
    DiceSgdAccountant,
    DiceSgdDpEvent,
    validate,
)
from hidden_state_accountants.events.batch_order import parse_batch_order
from hidden_state_accountants.runs.dice_sgd import DiceSgdRun
from hidden_state_accountants.runs.statement import statement_of
from hidden_state_adapters.tf_privacy.declared import Declared
from hidden_state_adapters.tf_privacy.guards import settings
from hidden_state_adapters.tf_privacy.guards.step import check_loss
from hidden_state_adapters.tf_privacy.mechanisms.dice_sgd.account import CHECKED, DiceAccount
from hidden_state_adapters.tf_privacy.mechanisms.dice_sgd.error import HiddenError
from hidden_state_adapters.tf_privacy.mechanisms.dice_sgd.model_steps import DiceUpdate
from hidden_state_adapters.tf_privacy.mechanisms.dice_sgd.rule import DiceRule
from hidden_state_adapters.tf_privacy.noisy_mean import NoisyMean
from hidden_state_adapters.tf_privacy.optimizer import CheckedOptimizer
from hidden_state_adapters.tf_privacy.refusals import refusal
from hidden_state_adapters.tf_privacy.rules import PlainSGD
from hidden_state_adapters.tf_privacy.units import Units


class DiceOptimizer(DiceAccount, CheckedOptimizer):
    """Base of `DiceKerasSGDOptimizer` and `DiceKerasAdamOptimizer`; see the former."""

    _neutral_options: ClassVar = settings.NEUTRAL_AFTER_RELEASE

    def __init__(
        self,
        l2_norm_clip: float,
        noise_multiplier: float,
        num_microbatches: int | None,
        *,
        error_l2_norm_clip: float | None,
        automatic: bool,
        expected_batch_size: int | None,
        learning_rate: Any,
        refusable: dict[str, Any],
        **kwargs: Any,
    ):
        settings.refuse_options(type(self).__name__, refusable, self._neutral_options)
        clip, noise = settings.clip_and_noise(l2_norm_clip, noise_multiplier)
        error_clip = clip
        if error_l2_norm_clip is not None:
            error_clip = validate.real("error_l2_norm_clip", error_l2_norm_clip, above=0)
            settings.check_scale("error_l2_norm_clip", error_clip)
        if not isinstance(automatic, bool):
            raise TypeError(f"Expected automatic to be True or False, got {automatic!r}.")
        if expected_batch_size is not None:
            expected_batch_size = validate.integer(
                "expected_batch_size", expected_batch_size, minimum=1
            )
        settings.check_learning_rate(learning_rate)
        error = HiddenError()
        inner = PlainSGD(lambda: self._decayed_lr(tf.float32))  # Keras moves the variables
        self._rule = DiceRule(inner, error, error_clip=error_clip, automatic=automatic)
        super().__init__(
            NoisyMean(self._rule, clip, noise),
            settings.microbatches(num_microbatches),
            learning_rate=learning_rate,
            **kwargs,
        )
        self._error, self._expected_batch_size = error, expected_batch_size
        self._settings = self._current_settings()

    @property
    def error_l2_norm_clip(self) -> float:
        """C_2, in units of the mean update."""
        return self._rule.error_clip

    @property
    def automatic(self) -> bool:
        """Whether both clips normalise (Algorithm 4)."""
        return self._rule.automatic

    @property
    def expected_batch_size(self) -> int | None:
        """B, the divisor of the sums; None for the number of rows of every batch."""
        return self._expected_batch_size

    def _current_settings(self) -> dict[str, Any]:
        return {
            "l2_norm_clip": self.l2_norm_clip,
            "noise_multiplier": self.noise_multiplier,
            "num_microbatches": self._num_microbatches,
            "error_l2_norm_clip": self.error_l2_norm_clip,
            "automatic": self.automatic,
            "expected_batch_size": self.expected_batch_size,
        }

    def _check_settings(self) -> None:
        now = self._current_settings()
        if now != self._settings:
            raise refusal(
                f"Expected {self._settings} as at construction, got {now}: the bound on DiceSGD is "
                "about constant values. (The learning rate may change.)"
            )

    # The step

    def _compute_gradients(
        self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None
    ) -> list[tuple[Any, Any]]:
        """The noisy update, of a loss with one entry per example."""
        self._check_settings()
        return super()._compute_gradients(loss, var_list, grad_loss, tape)

    def _checked_loss(self, loss: Any) -> Any:
        rows_vary = self.expected_batch_size is not None
        loss = check_loss(
            loss,
            self._num_microbatches,
            may_be_empty=rows_vary,
        )
        if rows_vary and not loss.shape[0]:
            loss = _at_least_one_row(loss)
        return loss

    def _begin(self, variables: Sequence[Any]) -> None:
        super()._begin(variables)
        self._error.belongs_to(variables)

    def _divisor(self, records: tf.Tensor) -> tf.Tensor:
        """Of every batch, however many rows it has, if one was declared."""
        given = self.expected_batch_size
        return super()._divisor(records) if given is None else tf.constant(given, tf.float64)

    def _problem(self, rows: tf.Tensor, largest: tf.Tensor, variables: Sequence[Any]) -> tf.Tensor:
        with tf.init_scope():
            iterations = self.iterations  # Keras makes the variable at the first use
        of_step = self._log.problem(
            rows,
            self._num_microbatches,
            variables,
            largest,
            self._norm_bound(),
            self._mean.noise_is_fresh,
            rows_vary=self.expected_batch_size is not None,
        )
        of_run = self._error.problem(self._log.steps, iterations, self._rule.error_norm)
        return of_step + of_run

    def _raise_problem(self, problem: tf.Tensor) -> None:
        begun = self._error.begin(self.iterations)
        with tf.control_dependencies([begun]):  # it counts before anything can raise
            super()._raise_problem(problem)

    def _resource_apply_dense(self, grad: Any, var: Any, apply_state: Any = None) -> Any:
        """Keras' update of one variable and its slots, unless the step was refused."""
        assert self._gradients is not None
        update = super()._resource_apply_dense

        def take() -> tf.Tensor:
            update(grad, var, apply_state)
            return tf.constant(True)

        return tf.cond(self._gradients.is_fine, take, lambda: tf.constant(False))

    # What kind of run its steps are

    def check_start(self, units: Units, variables: Sequence[Any], declared: Declared) -> None:
        """As every mechanism's, and the divisor is the size of the batches."""
        super().check_start(units, variables, declared)
        if self.expected_batch_size not in (None, units.batch_size):
            raise refusal(
                f"Expected expected_batch_size = None or {units.batch_size}, the size of every "
                f"batch, got {self.expected_batch_size}. Leave it out."
            )

    def new_run(self, units: Units, declared: Declared) -> DiceSgdRun:
        """Of which every iterate counts as released."""
        return DiceSgdRun(
            dataset_size=units.examples,
            batch_order=BatchOrder.CYCLIC,
            gradient_bound=declared.longest_gradient,
            batch_size=units.batch_size,
            **self._constants(),
        )

    def _constants(self) -> dict[str, Any]:
        return {
            "noise_multiplier": self.noise_multiplier,
            "clip_norm": self.l2_norm_clip,
            "error_clip_norm": self.error_l2_norm_clip,
            "automatic": self.automatic,
        }

    def check_run(self) -> None:
        """Constant settings, and every noisy gradient that was computed was applied."""
        self._check_settings()
        entry, drawn = self.last_step, self._error.read_run().drawn
        if drawn != entry.steps:
            raise refusal(
                f"Noisy gradients were computed {drawn} times, but {entry.steps} steps were "
                "taken: the others were refused, interrupted or not applied. What ended the run "
                "may depend on the examples, and the bound is about a number of steps that does "
                f"not. Start again with another optimizer. {entry.problem}".rstrip()
            )

    def _update_of(self, optimizer: Any, *hypers: str, **options: Any) -> tuple[Any, Any]:
        """What `for_model` returns.

        Args:
            optimizer: A class of Keras.
            *hypers: Of its arguments, those that are numbers.
            **options: Others, by value.
        """
        told = self._leave_to_model()
        self._check_settings()
        numbers = {name: self._serialize_hyperparameter(name) for name in ("decay", *hypers)}
        rule = DiceUpdate.of_optimizer(
            optimizer(self._given_rate, **numbers, **options),
            error_l2_norm_clip=self.error_l2_norm_clip,
            automatic=self.automatic,
            expected_batch_size=self.expected_batch_size,
        )
        return rule, told

    # What is said about a run that nobody recorded

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
        self.check_run()
        order = parse_batch_order(batch_order)
        if order is BatchOrder.POISSON and self.expected_batch_size is None:
            raise refusal(
                "Expected expected_batch_size for Poisson batches, got None: their size is not a "
                "public constant, and the sums must be divided by one."
            )
        entry, log = self.last_step, self._error.read_run()
        counted = DiceSgdRun.of_totals(
            batch_size=self.expected_batch_size or entry.rows or 1,
            num_steps=entry.steps,
            fewest_rows=log.fewest_rows,
            most_rows=log.most_rows,
            largest_norm=log.largest_norm,
            **self._constants(),
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
        neighboring_relation: NeighboringRelation | str = NeighboringRelation.REPLACE_SPECIAL,
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
            ValueError, UnsupportedRunError: As `privacy_event`, or no bound covers the run, or
                the variables come from an earlier private run.
        """
        relation = validate.neighboring_relation(neighboring_relation)
        self.training.refuse_earlier_runs()
        event = self.privacy_event(
            dataset_size=dataset_size,
            batch_order=batch_order,
            num_steps=num_steps,
            gradient_bound=gradient_bound,
        )
        if relation is NeighboringRelation.ADD_OR_REMOVE_ONE and self.expected_batch_size is None:
            raise refusal(
                "Expected expected_batch_size under ADD_OR_REMOVE_ONE, got None: the sums are "
                "divided by the number of rows, which is another one with an example less. Declare "
                "the divisor, or use REPLACE_SPECIAL."
            )
        guarantee = DiceSgdAccountant(relation).compose(event).guarantee
        assumptions = (Assumption.checked(CHECKED), *guarantee.assumptions)
        return self.told(
            statement_of([event], guarantee, assumptions, delta, update_rule=self.update_rule)
        )

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self._settings.items())
        return f"{type(self).__name__}({arguments})"


def _at_least_one_row(loss: tf.Tensor) -> tf.Tensor:
    """The loss; of an empty batch one entry that no variable changes: its step takes place, too."""
    row = tf.zeros(tf.concat([[1], tf.shape(loss)[1:]], 0), loss.dtype)
    return tf.concat([loss, row], 0)[: tf.maximum(tf.shape(loss)[0], 1)]
