"""The private optimizers of Keras: drop-ins for TF Privacy's, over the one private step.

An optimizer is shown a vector of losses and a tape. `_compute_gradients` prepares the step on the
per-example gradients, and `apply_gradients` takes it. What run the steps make is a `Algorithm`'s,
as of a model that is compiled with the same optimizer.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import attrs
import tensorflow as tf

from hidden_state_accountants import (
    BatchOrder,
    LossGeometry,
    Regulariser,
    validate,
)
from hidden_state_adapters.batch_plans import BatchPlan
from hidden_state_adapters.tf_privacy.algorithm import Algorithm, UpdateRule
from hidden_state_adapters.tf_privacy.gradients import ExampleGradients, check_loss, of_rows
from hidden_state_adapters.tf_privacy.lineage import PastRun, past_runs, plain_runs
from hidden_state_adapters.tf_privacy.refusals import refusal
from hidden_state_adapters.tf_privacy.replicas import refuse_surroundings
from hidden_state_adapters.tf_privacy.settings import Declared, Settings, plain_geometry
from hidden_state_adapters.tf_privacy.step import StepEntry, check_variables
from hidden_state_adapters.tf_privacy.watch import PROBLEMS, Prepared, Problem, Watch

legacy: Any = tf.keras.optimizers.legacy
_RUNS = "runs_behind_the_weights"  # in a configuration
_TOLD = (
    "l2_norm_clip",
    "noise_multiplier",
    "num_microbatches",
    "prox",
    "projection_radius",
    "loss_geometry",
)
_CLIPS = {"clipnorm": None, "clipvalue": None, "global_clipnorm": None}
NEUTRAL: Mapping[str, Any] = {"momentum": 0.0, "nesterov": False, "decay": 0.0, **_CLIPS}
# Where every noisy update is accounted as released, what follows it is free.
NEUTRAL_AFTER_RELEASE: Mapping[str, Any] = {"gradient_accumulation_steps": 1, **_CLIPS}
_logger = logging.getLogger("hidden_state_accountants")


def refuse_options(name: str, options: Mapping[str, Any], neutral: Mapping[str, Any]) -> None:
    """Refuses arguments of Keras' optimizers that are not at their neutral values.

    Args:
        name: Of the optimizer.
        options: What it was given.
        neutral: The values that are accepted.

    Raises:
        UnsupportedRunError: A known option is not at its neutral value.
        TypeError: An option is unknown.
    """
    for option, value in options.items():
        if option not in neutral:
            raise TypeError(f"{name} got an unexpected argument {option!r}.")
        expected = neutral[option]
        if value is expected or (expected is not None and value == expected):
            continue
        raise refusal(
            f"Expected {option} = {expected}, got {value!r}: no theorem here covers it. Drop it."
        )


def check_learning_rate(learning_rate: Any) -> None:
    """Raises unless it is a schedule or a number >= 0."""
    if isinstance(learning_rate, int | float):
        validate.magnitude("learning_rate", learning_rate)


def refuse_changed_options(optimizer: Any, neutral: Mapping[str, Any]) -> None:
    """Refuses options that were set after construction."""
    now = {name: _current(optimizer, name) for name in neutral}
    refuse_options(type(optimizer).__name__, now, neutral)
    if optimizer.gradient_transformers:
        raise refusal("Expected no gradient_transformers, got some: they change the update.")


def _current(optimizer: Any, name: str) -> Any:
    if name == "momentum":
        return 0.9 if optimizer._momentum else 0.0
    if name == "decay":
        return float(optimizer._initial_decay)
    return 1 if name == "gradient_accumulation_steps" else getattr(optimizer, name)


class PrivateOptimizer(legacy.Optimizer):
    """Base of the private optimizers, to stand before a legacy class of Keras.

    Attributes:
        is_private_sgd: Whether Keras' part of the update is that of plain SGD, if no option says
            otherwise.
        update_rule: That the noisy mean goes through.

    Args:
        told: What a model would be told.
        **kwargs: Arguments of the Keras optimizer.
    """

    is_private_sgd = True
    update_rule = "SGD"
    # Keras' options that must keep these values, by name.
    _neutral_options: ClassVar[Mapping[str, Any]] = NEUTRAL
    _steps: Any = None  # a `Algorithm`, from the first step on
    _is_watched = _was_dp_gradients_called = False
    _has_equal_rows = True
    _prepared: Prepared | None = None

    def __init__(self, told: Settings, **kwargs: Any):
        refuse_surroundings()
        super().__init__(**kwargs)
        self._told = told
        self.loaded_runs: tuple[PastRun, ...] = ()  # behind the weights of the file

    # What a subclass says

    def _rule(self) -> UpdateRule:
        """Of the updates, without an optimizer of Keras."""
        raise NotImplementedError

    def _checked_loss(self, loss: Any) -> Any:
        """The loss to differentiate, at least one entry; called under the tape."""
        return check_loss(loss, self._told.num_microbatches)

    def known(self, declared: Declared) -> Declared:
        """What a callback was told of the loss, or the optimizer.

        Raises:
            UnsupportedRunError: Both were.
        """
        return declared

    # Its settings

    @property
    def l2_norm_clip(self) -> float:
        """C."""
        assert self._told.l2_norm_clip is not None
        return self._told.l2_norm_clip

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation of the noise on the sum of gradients over C."""
        assert self._told.noise_multiplier is not None
        return self._told.noise_multiplier

    @property
    def last_step(self) -> StepEntry:
        """What the last step did, and how many there were; without noise."""
        return StepEntry() if self._steps is None else self._steps.last_step

    # The steps

    def examples_of_record(self, batch_size: int) -> int:
        """m, the examples of a microbatch; errors as of `Settings.microbatch`."""
        return self._told.microbatch(batch_size)

    def begin_run(
        self, variables: Sequence[Any], plan: BatchPlan | None = None, examples_of_record: int = 1
    ) -> Algorithm:
        """The mechanism of a run that begins; whoever asks for it reads the log after every step.

        Args:
            variables: All that are trained.
            plan: The batches; None in a loop of which nothing is known, in which a refused step
                raises by itself.
            examples_of_record: m.

        Raises:
            UnsupportedRunError: It took steps, or there is no such run.
        """
        if self._steps is not None:
            taken = self.last_step.steps
            if taken:
                raise refusal(
                    f"Expected an optimizer without steps, got one with {taken} that were not "
                    "recorded. Pass the callback to every call of fit, or compile with a fresh "
                    "optimizer and account both runs."
                )
            self._steps.check_run()
        steps = self._rule().steps(self._told, self, plan, variables)
        steps.made_by, steps.examples_of_record = "the optimizer", examples_of_record
        steps.iterate = Watch(
            steps.step,
            steps.rate,
            steps.count,
            has_equal_rows=self._has_equal_rows,
            has_one_rate=bool(steps.blocks),
        )
        self._steps, self._is_watched = steps, plan is not None
        return steps

    @tf.autograph.experimental.do_not_convert  # type: ignore[misc]
    def _steps_of(self, variables: Sequence[Any]) -> Any:
        """The mechanism; of a loop that nobody records it begins here."""
        refuse_surroundings()
        if self._steps is None:
            check_variables(variables)
            with tf.init_scope():  # the step may be traced
                self.begin_run(variables).begin(self._told.declared)
                self._tell_nobody_records()
        self._steps.lineage.hang_on(self._steps.variables)
        return self._steps

    def _tell_nobody_records(self) -> None:
        """What is said once in a loop of somebody else."""

    def _recorded_steps(self) -> Any:
        """The mechanism, if all of its steps count.

        Raises:
            ValueError: No step was taken.
            UnsupportedRunError: Steps were refused, or the variables changed since.
        """
        if self._steps is None:
            raise ValueError("Expected at least one step, got none yet.")
        self._steps.check_run()
        if not self._steps.is_iterate(self._steps.step.variables):
            raise refusal(
                "The variables were changed after the last step, so they are not the iterate that "
                "is accounted. Leave them alone, or go back to what the last step left."
            )
        return self._steps

    # Keras' and TF Privacy's seams

    @property
    def _is_wrapped_by_loss_scale_optimizer(self) -> bool:
        return False

    @_is_wrapped_by_loss_scale_optimizer.setter
    def _is_wrapped_by_loss_scale_optimizer(self, value: bool) -> None:
        if value:  # Keras sets it when it wraps an optimizer
            raise refusal(
                "Expected a full-precision policy, got loss scaling (mixed_float16): clip and "
                "noise would act on the scaled gradient. Train in float32 or float64."
            )

    def _compute_gradients(
        self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None
    ) -> list[tuple[Any, Any]]:
        """The noisy mean of clipped gradients, of a loss with one entry per example."""
        if grad_loss is not None:
            raise refusal("Expected grad_loss = None, got weights of the losses. Drop them.")
        self._prepared, self._was_dp_gradients_called = None, True
        found, rows, variables = self._example_gradients(loss, var_list, tape)
        steps = self._steps_of(variables)
        block = steps.step.blocks[steps.iterate.next_block]
        if len(block) != len(variables) or any(
            now is not then for now, then in zip(variables, block, strict=True)
        ):
            raise refusal(
                f"Expected the {len(block)} variables of the steps before, in the same order, got "
                f"{len(variables)}, not the same. Construct another optimizer for another set."
            )
        prepared = steps.iterate.prepare(found, rows)
        self._raise_problem(prepared.problem)
        self._prepared = prepared
        return list(zip(prepared.gradients, variables, strict=True))

    def _example_gradients(
        self, loss: Any, var_list: Any, tape: Any
    ) -> tuple[ExampleGradients, tf.Tensor | None, list[Any]]:
        """The gradients of every record, how many there are if not all, and the variables."""
        if not callable(loss) and tape is None:
            raise ValueError("Expected a `tape` with a loss that is a tensor, got none.")
        with tape or tf.GradientTape() as tape:
            if callable(loss):
                if not callable(var_list):
                    tape.watch(var_list)
                loss = loss()
            checked = self._checked_loss(loss)
            records = self._records(checked)
            of_records = tf.reduce_mean(tf.reshape(checked, [records, -1]), axis=1)
            variables = tf.nest.flatten(var_list() if callable(var_list) else var_list)
        jacobians = tape.jacobian(of_records, variables, unconnected_gradients="zero")
        rows = None if self._has_equal_rows else tf.shape(loss, tf.int64)[0]
        return of_rows(jacobians, of_records, has_padding=False), rows, variables

    def _records(self, losses: tf.Tensor) -> Any:
        """How many there are in a batch."""
        return tf.shape(losses)[0]

    def _raise_problem(self, problem: tf.Tensor) -> None:
        if self._is_watched:
            return
        if tf.executing_eagerly():
            found = Problem(int(problem))
            if found:
                raise refusal(f"The step was not taken. {found}")
            return
        # XLA compiles no assertions: that a refused step moves nothing does not depend on them.
        for one, text in PROBLEMS.items():
            holds = tf.equal(tf.bitwise.bitwise_and(problem, int(one)), 0)
            tf.debugging.Assert(holds, [f"The step was not taken. {text}"])

    def get_gradients(self, loss: Any, params: Any) -> Any:
        """Not supported.

        Raises:
            UnsupportedRunError: Always: this is the way of TensorFlow 1 graphs and Estimators, in
                which the steps cannot be checked.
        """
        raise refusal(
            "Expected minimize or _compute_gradients, got get_gradients: TensorFlow 1 graphs and "
            "Estimators are not supported. Use Model.fit or an own loop."
        )

    def apply_gradients(
        self, grads_and_vars: Any, name: Any = None, experimental_aggregate_gradients: bool = True
    ) -> None:
        """Takes the step that `_compute_gradients` has just prepared, once.

        Raises:
            AssertionError: `_compute_gradients` was never called (as TF Privacy).
            UnsupportedRunError: These are not the gradients that it returned last.
        """
        if not self._was_dp_gradients_called:
            raise AssertionError(
                "Neither _compute_gradients() or get_gradients() on the differentially private "
                "optimizer was called. This means the training is not differentially private."
            )
        given = [gradient for gradient, _ in grads_and_vars]
        prepared, self._prepared = self._prepared, None
        own = [] if prepared is None else prepared.gradients
        if (
            prepared is None
            or len(own) != len(given)
            or any(a is not b for a, b in zip(own, given, strict=True))
        ):
            raise refusal(
                "Expected the gradients that _compute_gradients returned last, each list once and "
                "in the same tf.function, got others: they are not the noisy mean that is "
                "accounted."
            )
        self._steps.iterate.commit(prepared)

    def plain_update(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """What Keras does along gradients that have their noise."""
        super().apply_gradients(zip(gradients, variables, strict=True))

    # Where a model makes its steps

    def _leave_to_model(self) -> dict[str, Any]:
        """The arguments of a model that the optimizer says.

        Raises:
            UnsupportedRunError: The steps would not be those of this optimizer.
        """
        kind = type(self)
        if not kind.__module__.startswith("hidden_state_adapters."):
            raise refusal(
                f"Expected one of this package's optimizers in compile, got {kind.__name__}, a "
                "subclass: the model makes the steps itself, and would not call it. Train it with "
                "HiddenStateCallback."
            )
        if self.last_step.steps:
            raise refusal(
                f"Expected an optimizer without steps in compile, got a {kind.__name__} that took "
                "some: the model makes its own, with another count. Pass a new one."
            )
        refuse_changed_options(self, self._neutral_options)
        told = attrs.asdict(self._told, recurse=False)
        return {name: told[name] for name in _TOLD}

    @property
    def _given_rate(self) -> Any:
        """The learning rate as it was given: a number, a schedule, or a function."""
        return self._hyper["learning_rate"]

    # Copies and files

    def _config(self, kind: Any, *names: str, **own: Any) -> dict[str, Any]:
        """A configuration that also says what was trained, for whoever loads the file.

        Args:
            kind: Keras' class.
            *names: Of Keras' arguments, those that are kept.
            **own: Others.
        """
        base: dict[str, Any] = kind.get_config(self)
        told = {
            "l2_norm_clip": self.l2_norm_clip,
            "noise_multiplier": self.noise_multiplier,
            "num_microbatches": self._told.num_microbatches,
        }
        kept = {name: base[name] for name in ("name", "learning_rate", *names)}
        runs = plain_runs([] if self._steps is None else self._steps.variables, self.loaded_runs)
        return {**kept, **told, **own, **({_RUNS: runs} if runs else {})}

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> PrivateOptimizer:
        """Inverse of `get_config`; see Keras."""
        arguments = dict(config)
        runs = past_runs(arguments.pop(_RUNS, ()))
        optimizer: PrivateOptimizer = super().from_config(arguments, custom_objects)
        optimizer.loaded_runs = runs
        return optimizer

    def __deepcopy__(self, memo: Any) -> PrivateOptimizer:
        """A fresh optimizer with the same arguments: the steps of the original stay with it."""
        return type(self).from_config(self.get_config())

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles the arguments only, likewise."""
        return type(self).from_config, (self.get_config(),)


@tf.keras.utils.register_keras_serializable("hidden_state_adapters")
class CyclicDPKerasSGDOptimizer(PrivateOptimizer, legacy.SGD):
    r"""DPKerasSGDOptimizer for runs of which only the last iterate is released.

    One step with the b examples of a batch is

    .. math::
        x \leftarrow \Pi_R\,\mathrm{prox}_{\eta h}\Big( (1 - \eta w)\, x
        - \frac{\eta}{b} \Big(\sum_i
        \mathrm{clip}_C(\nabla f_i(x)) + \mathcal{N}(0, (z C)^2 I)\Big)\Big)

    with C = `l2_norm_clip`, z = `noise_multiplier`, w = `weight_decay`, h = `prox` and
    :math:`\Pi_R` the projection of all trainable variables together on the ball of
    `projection_radius` around 0.

    It is used like DPKerasSGDOptimizer: the loss must be a vector with one entry per example
    (``reduction="none"``), in `Model.fit` (graph, eager or XLA) and in own loops that call
    `minimize`, or `_compute_gradients` and `apply_gradients`. Unlike it, it is a class, works with
    float64, and can be saved and loaded with the model.

    Formal guarantees:
      - Of a step: as above; independent noise for every variable and step, from TensorFlow's
        generators (which are not cryptographic).
      - Of a run: none by itself, because an optimizer does not see the order of the data.
        `HiddenStateCallback` records it; or declare it as a `LastIterateDpEvent`.
      - Checked in every step, and the step is not taken otherwise: equal batches, one row per
        example; the variables are those that the last step left; finite gradients, not longer than
        `loss_geometry.lipschitz`. In eager mode the error is an UnsupportedRunError, in a graph
        tf.errors.InvalidArgumentError, with the callback always UnsupportedRunError. XLA compiles
        no assertions: there only the callback raises.

    Args:
        l2_norm_clip: C, the bound on the norm of the gradient of one example, for all variables
            together.
        noise_multiplier: z, the standard deviation of the noise on the sum of gradients over C.
        num_microbatches: None for the batch size: one example each. Fewer are records of several
            examples, which are accounted under REPLACE_ONE, as of a `HiddenStateModel`.
        gradient_accumulation_steps: 1; use a larger batch_size.
        learning_rate: A number or a LearningRateSchedule, fixed before the run.
        weight_decay: w >= 0, applied outside the clip. (A penalty in the loss is inside the clip
            and does not contract.)
        prox: A Regulariser h, whose proximal map with the step's learning rate follows every step,
            or None. The event reads its l2, which contracts.
        projection_radius: R, or None for no projection. As the event's domain_diameter it is 2R.
        loss_geometry: What you declare about the per-example loss; its `lipschitz` is checked.
            Better leave it out, and let `make_private(model)` derive it (``"auto"``).
        name: Of the optimizer.
        **kwargs: Arguments of tf.keras.optimizers.legacy.SGD at their neutral values.

    Raises:
        UnsupportedRunError: Momentum, gradient clipping by Keras, several replicas, loss scaling
            (mixed precision), a loss that is already reduced, other gradients than
            `_compute_gradients` returned.
        TypeError, ValueError: An argument has an impossible value.

    Source: the optimizer is DP-SGD (Abadi et al. 2016, arXiv:1607.00133v2, algorithm 1) with fixed
        batches.
    """

    def __init__(
        self,
        l2_norm_clip: float,
        noise_multiplier: float,
        num_microbatches: int | None = None,
        gradient_accumulation_steps: int = 1,
        learning_rate: Any = 0.01,
        *,
        weight_decay: float = 0.0,
        prox: Regulariser | None = None,
        projection_radius: float | None = None,
        loss_geometry: Any = None,
        name: str = "CyclicDPKerasSGDOptimizer",
        **kwargs: Any,
    ):
        refuse_options(type(self).__name__, kwargs, self._neutral_options)
        if gradient_accumulation_steps != 1:
            raise refusal(
                f"Expected gradient_accumulation_steps = 1, got {gradient_accumulation_steps}: "
                "every batch is a step, with its own noise. Use a larger batch_size."
            )
        check_learning_rate(learning_rate)
        if isinstance(loss_geometry, str):
            raise TypeError(
                f"Expected loss_geometry to be a LossGeometry, got {loss_geometry!r}. An optimizer "
                'does not see the model: say loss_geometry="auto" and feature_norm= to '
                "make_private(model, ...)."
            )
        told = Settings(
            l2_norm_clip=l2_norm_clip,
            noise_multiplier=noise_multiplier,
            num_microbatches=num_microbatches,
            prox=prox,
            projection_radius=projection_radius,
            loss_geometry=loss_geometry,
            batch_order=BatchOrder.CYCLIC,
        )
        self._weight_decay = validate.real("weight_decay", weight_decay, minimum=0)
        super().__init__(told, learning_rate=learning_rate, name=name)

    @property
    def weight_decay(self) -> float:
        """Decoupled."""
        return self._weight_decay

    @property
    def prox(self) -> Regulariser | None:
        """The regulariser whose proximal map follows every step."""
        return self._told.prox

    @property
    def projection_radius(self) -> float | None:
        """Radius of the ball around 0 that holds all trainable variables together."""
        return self._told.projection_radius

    @property
    def loss_geometry(self) -> LossGeometry | None:
        """What is declared here about the per-example loss."""
        return self._told.declared.geometry

    def _rule(self) -> UpdateRule:
        return UpdateRule(None)

    def _checked_loss(self, loss: Any) -> Any:
        loss = check_loss(loss, None)
        if loss.shape[0] is not None:
            self._told.microbatch(loss.shape[0])  # raises
        return loss

    def _records(self, losses: tf.Tensor) -> Any:
        return self._told.num_microbatches or super()._records(losses)

    def known(self, declared: Declared) -> Declared:
        """As of every optimizer; this one may have been told."""
        if None not in (self.loss_geometry, declared.geometry):
            raise refusal(
                "Expected loss_geometry in one place, got one of the optimizer and one of its "
                "run. Leave it out of the optimizer."
            )
        return declared if self.loss_geometry is None else self._told.declared

    def _tell_nobody_records(self) -> None:
        _logger.warning(
            "nobody records the steps of CyclicDPKerasSGDOptimizer: TensorFlow Privacy's statement "
            "knows no hidden iterates. HiddenStateCallback in fit, or make_private(model), says "
            "what the run costs."
        )

    def for_model(self) -> tuple[UpdateRule, dict[str, Any]]:
        """Plain SGD with its rate and decay, and what a model is told for it.

        Raises:
            UnsupportedRunError: It took steps, is of a subclass, or its rate is a function.
        """
        told, rate = self._leave_to_model(), self._given_rate
        if callable(rate) and not isinstance(
            rate, tf.keras.optimizers.schedules.LearningRateSchedule
        ):
            raise refusal(
                "Expected a number or a schedule of Keras as learning_rate of an optimizer that a "
                "model is compiled with, got a function. Use tf.keras.optimizers.schedules."
            )
        sgd = tf.keras.optimizers.SGD(rate, weight_decay=self._weight_decay or None)
        return UpdateRule(sgd), told

    def get_config(self) -> dict[str, Any]:
        """All arguments of the constructor as plain types; see Keras."""
        return self._config(
            legacy.SGD,
            weight_decay=self._weight_decay,
            prox=self.prox and attrs.asdict(self.prox),
            projection_radius=self.projection_radius,
            loss_geometry=plain_geometry(self.loss_geometry),
        )
