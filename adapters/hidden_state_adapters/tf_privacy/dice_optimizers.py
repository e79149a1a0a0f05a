"""DiceSGD for Keras: Algorithms 2 and 4 (automatic=True) with SGD, Algorithm 3 with Adam."""

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
from hidden_state_accountants.runs.assumptions import OF_EVERY_RUN
from hidden_state_accountants.runs.statement import Statement
from hidden_state_adapters.batch_plans import BatchPlan
from hidden_state_adapters.tf_privacy.algorithm import Algorithm
from hidden_state_adapters.tf_privacy.dice import CHECKED, DiceUpdate
from hidden_state_adapters.tf_privacy.gradients import check_loss
from hidden_state_adapters.tf_privacy.optimizers import (
    NEUTRAL_AFTER_RELEASE,
    PrivateOptimizer,
    check_learning_rate,
    legacy,
    refuse_options,
)
from hidden_state_adapters.tf_privacy.refusals import refusal
from hidden_state_adapters.tf_privacy.settings import Settings


class DiceOptimizer(PrivateOptimizer):
    """Base of `DiceKerasSGDOptimizer` and `DiceKerasAdamOptimizer`; see the former.

    Attributes:
        expected_batch_size: B, if batches vary.

    Args:
        keras: What Keras' class is made with, by name.
        **refusable: Other arguments of Keras, at their neutral values.
    """

    _neutral_options: ClassVar = NEUTRAL_AFTER_RELEASE
    _keras: ClassVar[Any]  # Keras' class
    _numbers: ClassVar[tuple[str, ...]]  # of its arguments, those that may be set
    _others: ClassVar[tuple[str, ...]]  # and those that stay

    def __init__(
        self,
        l2_norm_clip: float,
        noise_multiplier: float,
        num_microbatches: int | None,
        keras: dict[str, Any],
        *,
        error_l2_norm_clip: float | None = None,
        automatic: bool = False,
        expected_batch_size: int | None = None,
        **refusable: Any,
    ):
        refuse_options(type(self).__name__, refusable, self._neutral_options)
        if expected_batch_size is not None:
            expected_batch_size = validate.integer(
                "expected_batch_size", expected_batch_size, minimum=1
            )
        check_learning_rate(keras["learning_rate"])
        told = Settings(
            l2_norm_clip=l2_norm_clip,
            noise_multiplier=noise_multiplier,
            num_microbatches=num_microbatches,
            batch_order=BatchOrder.CYCLIC,
        )
        self._update = DiceUpdate.of_optimizer(
            None,
            error_l2_norm_clip=error_l2_norm_clip,
            automatic=automatic,
            expected_batch_size=expected_batch_size,
        )
        self.expected_batch_size = expected_batch_size
        self._has_equal_rows = expected_batch_size is None
        super().__init__(told, **keras)

    @property
    def error_l2_norm_clip(self) -> float:
        """C_2, in units of the mean update."""
        return self._update.error_l2_norm_clip or self.l2_norm_clip

    @property
    def automatic(self) -> bool:
        """Whether both clips normalise (Algorithm 4)."""
        return self._update.automatic

    def _rule(self) -> DiceUpdate:
        return self._update

    def begin_run(
        self, variables: Sequence[Any], plan: BatchPlan | None = None, examples_of_record: int = 1
    ) -> Algorithm:
        """As every optimizer's, with its divisor."""
        steps = super().begin_run(variables, plan, examples_of_record)
        if self.expected_batch_size is not None:
            steps.step.divisor = self.expected_batch_size
        return steps

    def _checked_loss(self, loss: Any) -> Any:
        rows_vary = self.expected_batch_size is not None
        loss = check_loss(loss, self._told.num_microbatches, may_be_empty=rows_vary)
        return _at_least_one_row(loss) if rows_vary and not loss.shape[0] else loss

    def for_model(self) -> tuple[Any, dict[str, Any]]:
        """A `DiceUpdate` of Keras' optimizer, and what a model is told for it.

        Raises:
            UnsupportedRunError: It took steps, or is of a subclass.
        """
        told, names = self._leave_to_model(), ("decay", *self._numbers)
        options = {name: self._serialize_hyperparameter(name) for name in names}
        options |= {name: getattr(self, name) for name in self._others}
        rule = DiceUpdate.of_optimizer(self._keras(self._given_rate, **options), **self._dice)
        return rule, told

    def get_config(self) -> dict[str, Any]:
        """All arguments of the constructor as plain types; see Keras. It holds no error."""
        names = ("decay", *self._numbers, *self._others)
        return self._config(self._keras, *names, **self._dice)

    @property
    def _dice(self) -> dict[str, Any]:
        return {
            "error_l2_norm_clip": self.error_l2_norm_clip,
            "automatic": self.automatic,
            "expected_batch_size": self.expected_batch_size,
        }

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
        order = parse_batch_order(batch_order)
        if order is BatchOrder.POISSON and self.expected_batch_size is None:
            raise refusal(
                "Expected expected_batch_size for Poisson batches, got None: their size is not a "
                "public constant, and the sums must be divided by one."
            )
        steps = self._recorded_steps()
        event = steps.run_so_far(
            dataset_size=dataset_size, batch_order=order, gradient_bound=gradient_bound
        ).event()
        if num_steps is not None:
            planned = validate.integer("num_steps", num_steps, minimum=1)
            if planned != event.num_steps:
                raise refusal(
                    f"Expected num_steps = {event.num_steps}, the steps taken, got {planned}."
                )
        return event

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
        steps = self._recorded_steps()
        steps.lineage.refuse_earlier_runs()
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
                "a constant that was not computed from their number, or use REPLACE_SPECIAL."
            )
        guarantee = DiceSgdAccountant(relation).compose(event).guarantee
        assumptions = (Assumption.checked(CHECKED), *OF_EVERY_RUN, *guarantee.assumptions)
        return steps.told(
            Statement([event], guarantee, assumptions, delta, update_rule=self.update_rule)
        )

    def __repr__(self) -> str:
        names = ("l2_norm_clip", "noise_multiplier", "error_l2_norm_clip", "automatic")
        arguments = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"{type(self).__name__}({arguments})"


def _at_least_one_row(loss: tf.Tensor) -> tf.Tensor:
    """The loss; of an empty batch one entry that no variable changes: its step takes place, too."""
    row = tf.zeros(tf.concat([[1], tf.shape(loss)[1:]], 0), loss.dtype)
    return tf.concat([loss, row], 0)[: tf.maximum(tf.shape(loss)[0], 1)]


@tf.keras.utils.register_keras_serializable("hidden_state_adapters")
class DiceKerasSGDOptimizer(DiceOptimizer, legacy.SGD):
    r"""DPKerasSGDOptimizer that feeds back, clipped again, what the clip cut off.

    .. math::
        v_t = \frac1B \sum_{i \in B_t} \mathrm{clip}(g_i, C_1) + \mathrm{clip}(e_t, C_2), \quad
        e_{t+1} = e_t + \frac1B \sum_{i \in B_t} g_i - v_t, \quad e_0 = 0

    and Keras' SGD takes a step along :math:`v_t + \mathcal{N}(0, \sigma_1^2 I)`,
    :math:`\sigma_1 = \text{noise_multiplier} \cdot C_1 / B`. All variables are clipped as one
    vector with exactly min(1, C/|v|). It is used like DPKerasSGDOptimizer: the loss must be a
    vector with one entry per example (``reduction="none"``), in `Model.fit` (graph, eager or XLA;
    `HiddenStateCallback` records the run) and in own loops that call `minimize`, or
    `_compute_gradients` and `apply_gradients`.

    Formal guarantees:
      - Those of `privacy_event(...)` under `hidden_state_accountants.DiceSgdAccountant`: all
        iterates, all noisy updates and all that is computed from them are released. So momentum,
        Nesterov and learning rates that depend on released values are covered: they never see
        :math:`v_t` without noise. The error's recursion does not know them.
      - The error is in no file (.keras, .h5, SavedModel, tf.train.Checkpoint, weights), config,
        pickle, copy or text. So a loaded or copied optimizer starts ANOTHER run with e = 0; the
        record of the old one does not go on. Compose the events of both.
      - Checked in every step, and the step is not taken otherwise: the same variables, which nobody
        else changed, and finite per-example gradients. A step that is refused, or whose gradients
        are not applied, ends the run. In
        eager mode the error is an UnsupportedRunError, in a graph tf.errors.InvalidArgumentError.
        XLA compiles no assertions: there the callback raises, and `privacy_event`.
      - Not covered: rounding of floating-point numbers; how the batches were dealt, and that one
        row is one example, are the user's word. `last_step` shows values without noise.

    Args:
        l2_norm_clip: C_1 > 0.
        noise_multiplier: Standard deviation of the noise on the SUM of clipped gradients over C_1,
            as everywhere in TF Privacy. At equal noise the epsilon is larger than that of DP-SGD.
        num_microbatches: None, or the number of rows: one example each.
        error_l2_norm_clip: C_2 > 0, in units of the MEAN update; None is C_1, as the paper
            recommends. One example moves the clipped mean by C_1 / B, but can move the clipped
            error by up to 2 C_2 in every step: without a gradient bound choose it far smaller.
        automatic: Normalise instead of clip: C v/|v|, and 0 at 0. A gradient bound is then of no
            use.
        expected_batch_size: B, the public divisor of the sums, for batches of varying size
            (Poisson, accounted with probability B/N; take the step of an empty batch, too). For
            fixed shapes fill such a batch up with rows whose loss is multiplied by 0. None: every
            batch has the same number of rows, and that is B.
        learning_rate: A number or a LearningRateSchedule.
        momentum: As in Keras.
        nesterov: As in Keras.
        decay: As in Keras.
        name: Of the optimizer.
        **kwargs: Other arguments of tf.keras.optimizers.legacy.SGD, and
            gradient_accumulation_steps, at their neutral values.

    Raises:
        TypeError, ValueError: An argument has an impossible value.
        UnsupportedRunError: Gradient clipping by Keras, accumulation of gradients, several
            replicas, loss scaling, a loss that is reduced already. From a step: the run is not
            covered; the text says why.

    Source: Zhang, Bu, Wu, Hong 2024 (arXiv 2311.14632), Algorithms 2 and 4.
    """

    _keras, _numbers, _others = legacy.SGD, ("momentum",), ("nesterov",)

    def __init__(
        self,
        l2_norm_clip: float,
        noise_multiplier: float,
        num_microbatches: int | None = None,
        *,
        learning_rate: Any = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
        decay: float = 0.0,
        name: str = "DiceKerasSGDOptimizer",
        **kwargs: Any,
    ):
        keras = {
            "learning_rate": learning_rate, "momentum": momentum, "nesterov": nesterov,
            "decay": decay, "name": name,
        }  # fmt: skip
        super().__init__(l2_norm_clip, noise_multiplier, num_microbatches, keras, **kwargs)


@tf.keras.utils.register_keras_serializable("hidden_state_adapters")
class DiceKerasAdamOptimizer(DiceOptimizer, legacy.Adam):
    r"""Keras' Adam on the noisy updates of DiceSGD.

    .. math::
        \tilde v_t = v_t + \mathcal{N}(0, \sigma_1^2 I), \quad
        m_t = \beta_1 m_{t-1} + (1 - \beta_1) \tilde v_t, \quad
        s_t = \beta_2 s_{t-1} + (1 - \beta_2) \tilde v_t^2

    The noise is inside the moments, so they and all options of Adam are post-processing: the run
    costs what DiceSGD costs, and the moments may be in a checkpoint. Update :math:`v_t`, error,
    arguments, formal guarantees and errors: see `DiceKerasSGDOptimizer`.

    Two misprints of the algorithm are put right: the second moment decays with 1 - beta_2 (not
    beta^2), and the bias corrections count steps from 1 (not 0: division by zero). Keras adds
    epsilon before the bias correction.

    Args:
        l2_norm_clip: C_1.
        noise_multiplier: Standard deviation of the noise on the sum over C_1.
        num_microbatches: None, or the number of rows.
        error_l2_norm_clip: C_2.
        automatic: Normalise instead of clip.
        expected_batch_size: B, for batches of varying size.
        learning_rate: A number or a LearningRateSchedule.
        beta_1: As in Keras, as are the next four.
        beta_2: Of the second moment.
        epsilon: Beside its root.
        amsgrad: Whether the largest second moment counts.
        decay: Of the learning rate.
        name: Of the optimizer.
        **kwargs: As `DiceKerasSGDOptimizer`.

    Source: Zhang, Bu, Wu, Hong 2024 (arXiv 2311.14632), Algorithm 3.
    """

    is_private_sgd = False
    update_rule = "Adam"
    _keras, _numbers, _others = legacy.Adam, ("beta_1", "beta_2"), ("epsilon", "amsgrad")

    def __init__(
        self,
        l2_norm_clip: float,
        noise_multiplier: float,
        num_microbatches: int | None = None,
        *,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        decay: float = 0.0,
        name: str = "DiceKerasAdamOptimizer",
        **kwargs: Any,
    ):
        keras = {
            "learning_rate": learning_rate, "beta_1": beta_1, "beta_2": beta_2,
            "epsilon": epsilon, "amsgrad": amsgrad, "decay": decay, "name": name,
        }  # fmt: skip
        super().__init__(l2_norm_clip, noise_multiplier, num_microbatches, keras, **kwargs)
