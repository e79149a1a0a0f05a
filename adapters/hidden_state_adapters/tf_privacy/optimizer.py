"""What the private Keras optimizers share: every step is checked before it is taken.

A class of mechanisms/ has `CheckedOptimizer` before one of TF Privacy's. It says how a step is
made, and what kind of run its steps are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import attrs
import tensorflow as tf
from tensorflow_privacy.privacy.dp_query.gaussian_query import GaussianSumQuery

from hidden_state_adapters.tf_privacy.gradients import ExampleGradients, of_rows
from hidden_state_adapters.tf_privacy.guards import settings
from hidden_state_adapters.tf_privacy.guards.step import check_loss, check_variables
from hidden_state_adapters.tf_privacy.mechanism import Mechanism
from hidden_state_adapters.tf_privacy.noisy_mean import NoisyMean
from hidden_state_adapters.tf_privacy.refusals import refusal
from hidden_state_adapters.tf_privacy.step_log import (
    PROBLEMS,
    Problem,
    StepLog,
)
from hidden_state_adapters.tf_privacy.training import TrackedTraining, Training
from hidden_state_adapters.tf_privacy.units import Units

_RUNS = "runs_behind_the_weights"  # in a configuration


@attrs.frozen(eq=False)
class Gradients:
    """What `_compute_gradients` returned, in the trace that did it, and what it saw.

    Attributes:
        tensors: The noisy gradients.
        rows: Rows of the batch (int64).
        problem: A `Problem` (int64); the step must change nothing unless it is 0.
        largest: The longest gradient, before the clip.
        kept: What the rule keeps.
    """

    tensors: tuple[Any, ...]
    rows: tf.Tensor
    problem: tf.Tensor
    largest: tf.Tensor
    kept: Any

    @property
    def is_fine(self) -> tf.Tensor:
        """Whether the step is taken."""
        return tf.equal(self.problem, 0)


class CheckedSGD(tf.keras.optimizers.legacy.SGD):
    """SGD that does not move a variable in a refused step; to stand behind `CheckedOptimizer`."""

    _gradients: Gradients | None = None
    _mean: NoisyMean

    def _resource_apply_dense(self, grad: Any, var: Any, apply_state: Any = None) -> Any:
        device, dtype = var.device, var.dtype.base_dtype
        coefficients = (apply_state or {}).get((device, dtype)) or self._fallback_apply_state(
            device, dtype
        )
        assert self._gradients is not None
        rule, fine = self._mean.rule, self._gradients.is_fine
        return rule.move_one(var, grad, coefficients["lr_t"], fine)


class CheckedOptimizer(Mechanism, tf.keras.optimizers.legacy.Optimizer):
    """Base of the private optimizers, to stand before a class of TF Privacy's factory.

    A subclass changes variables only if `self._gradients.is_fine`. XLA compiles no assertions, so
    this, and not the error, is what keeps a refused step from being taken.

    Args:
        mean: Clips, sums and adds the noise; its rule moves the variables, or what follows.
        num_microbatches: None, or the batch size.
        gradient_accumulation_steps: See TF Privacy.
        **kwargs: Arguments of the Keras optimizer.
    """

    # Keras' options that must keep these values, by name.
    _neutral_options: ClassVar[Mapping[str, Any]] = settings.NEUTRAL
    _gradients: Gradients | None = None
    _is_watched = False

    def __init__(
        self,
        mean: NoisyMean,
        num_microbatches: int | None,
        gradient_accumulation_steps: int = 1,
        **kwargs: Any,
    ):
        settings.refuse_surroundings()
        self._mean = mean
        unused = GaussianSumQuery(mean.l2_norm_clip, mean.l2_norm_clip * mean.noise_multiplier)
        super().__init__(unused, num_microbatches, gradient_accumulation_steps, **kwargs)
        self._log = StepLog()
        self.training = Training(self)
        self._track_trackable(TrackedTraining(self.training), "hidden_state_runs")

    # What a subclass may change

    def _checked_loss(self, loss: Any) -> Any:
        """The loss to differentiate, at least one entry; called under the tape."""
        return check_loss(loss, self._num_microbatches)

    def _norm_bound(self) -> float:
        """What the norm of a per-example gradient may be, with room for rounding."""
        return float("inf")

    def _problem(self, rows: tf.Tensor, largest: tf.Tensor, variables: Sequence[Any]) -> tf.Tensor:
        """The `Problem` of the step that is about to be taken (int64)."""
        return self._log.problem(
            rows,
            self._num_microbatches,
            variables,
            largest,
            self._norm_bound(),
            self._mean.noise_is_fresh,
        )

    def _divisor(self, records: tf.Tensor) -> tf.Tensor:
        """Of the sums over so many records, in float64."""
        return tf.cast(records, tf.float64)

    # Where a model makes its steps

    def _leave_to_model(self) -> dict[str, Any]:
        """The arguments of a model that every private optimizer says.

        Raises:
            UnsupportedRunError: The steps would not be those of this optimizer.
        """
        kind = type(self)
        if "for_model" not in vars(kind):
            raise refusal(
                f"Expected one of this package's optimizers in compile, got {kind.__name__}, a "
                "subclass: the model makes the steps itself, and would not call it. Train it with "
                "HiddenStateCallback."
            )
        if self.has_stepped:
            raise refusal(
                f"Expected an optimizer without steps in compile, got a {kind.__name__} that took "
                "some: the model makes its own, with another count. Pass a new one."
            )
        settings.refuse_changed_options(self, self._neutral_options)
        if self.gradient_accumulation_steps != 1:
            raise refusal(
                "Expected gradient_accumulation_steps = 1, got "
                f"{self.gradient_accumulation_steps}: every batch of a model is a step. Give fit a "
                "batch_size that many times as large."
            )
        return {
            "l2_norm_clip": self.l2_norm_clip,
            "noise_multiplier": self.noise_multiplier,
            "num_microbatches": self._num_microbatches,
        }

    @property
    def _given_rate(self) -> Any:
        """The learning rate as it was given: a number, a schedule, or a function."""
        return self._hyper["learning_rate"]

    # Its settings

    @property
    def l2_norm_clip(self) -> float:
        """C."""
        return self._mean.l2_norm_clip

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation of the noise on the sum of gradients over C."""
        return self._mean.noise_multiplier

    @property
    def grouping(self) -> tuple[Any, int]:
        """num_microbatches and gradient_accumulation_steps."""
        return self._num_microbatches, self.gradient_accumulation_steps

    def units(self, batch_size: int, examples: int) -> Units:
        """As every mechanism's, with microbatches and accumulated steps."""
        return Units.of(self, batch_size, examples)

    def watch(self) -> None:
        """The caller reads `last_step` after every step and raises if it was refused."""
        self._is_watched = True

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
        """TF Privacy's noisy mean of clipped gradients, of a loss with one entry per example."""
        settings.refuse_surroundings()
        settings.refuse_changed_options(self, self._neutral_options)
        if grad_loss is not None:
            raise refusal("Expected grad_loss = None, got weights of the losses. Drop them.")
        self._gradients = None
        self._was_dp_gradients_called = True
        losses, found, variables = self._example_gradients(loss, var_list, tape)
        check_variables(variables)
        self._begin(variables)
        mean, rows = self._mean, tf.shape(losses, out_type=tf.int64)[0]
        dtype = variables[0].dtype.base_dtype
        mean.check_precision(dtype)
        sums, largest = mean.sums(found, dtype)
        noisy, kept = mean.of_sums(sums, self._divisor(tf.size(found.norms, tf.int64)))
        problem = self._problem(rows, largest, variables)
        self._raise_problem(problem)
        self._gradients = Gradients(tuple(noisy), rows, problem, largest, kept)
        return list(zip(noisy, variables, strict=True))

    def _begin(self, variables: Sequence[Any]) -> None:
        """What has to be known before noise is made for these variables."""
        self.training.begin(variables)

    def _example_gradients(
        self, loss: Any, var_list: Any, tape: Any
    ) -> tuple[tf.Tensor, ExampleGradients, list[Any]]:
        """The losses as they were given, the gradients of every record, and the variables."""
        if not callable(loss) and tape is None:
            raise ValueError("Expected a `tape` with a loss that is a tensor, got none.")
        with tape or tf.GradientTape() as tape:
            if callable(loss):
                if not callable(var_list):
                    tape.watch(var_list)
                loss = loss()
            checked = self._checked_loss(loss)
            records = self._num_microbatches or tf.shape(checked)[0]
            of_records = tf.reduce_mean(tf.reshape(checked, [records, -1]), axis=1)
            variables = tf.nest.flatten(var_list() if callable(var_list) else var_list)
        jacobians = tape.jacobian(of_records, variables, unconnected_gradients="zero")
        return (
            tf.convert_to_tensor(loss),
            of_rows(jacobians, of_records, has_padding=False),
            variables,
        )

    def _raise_problem(self, problem: tf.Tensor) -> None:
        if tf.executing_eagerly():
            found = Problem(int(problem))
            if found and not self._is_watched:
                raise refusal(f"The step was not taken. {found}")
        elif not self._is_watched:
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
    ) -> Any:
        """Takes the step that `_compute_gradients` has just prepared, once.

        Raises:
            AssertionError: `_compute_gradients` was never called (as TF Privacy).
            UnsupportedRunError: These are not the gradients that it returned last.
        """
        if not self._was_dp_gradients_called:
            return super().apply_gradients(grads_and_vars)  # raises
        pairs = list(grads_and_vars)
        own = () if self._gradients is None else self._gradients.tensors
        given = [gradient for gradient, _ in pairs]
        if len(own) != len(given) or any(a is not b for a, b in zip(own, given, strict=True)):
            raise refusal(
                "Expected the gradients that _compute_gradients returned last, each list once and "
                "in the same tf.function, got others: they are not the noisy mean that is "
                "accounted."
            )
        try:
            return super().apply_gradients(pairs, name, experimental_aggregate_gradients)
        finally:
            self._gradients = None

    def _distributed_apply(
        self, distribution: Any, grads_and_vars: Any, apply_state: Any, name: Any
    ) -> Any:
        pairs = list(grads_and_vars)
        variables = [variable for _, variable in pairs]
        # Inside tf.function, too, what follows runs in the order of the program.
        result = super()._distributed_apply(distribution, pairs, apply_state, name)
        gradients = self._gradients
        assert gradients is not None
        rule, fine = self._mean.rule, gradients.is_fine
        rule.finish(variables, gradients.kept, fine, gradients.rows, gradients.largest)
        first = variables[0]
        self._log.write(
            rows=gradients.rows,
            problem=gradients.problem,
            variables=variables,
            values=[
                apply_state[(first.device, first.dtype.base_dtype)]["lr_t"],
                self.l2_norm_clip,
                self.noise_multiplier,
                rule.decay,
                gradients.largest,
            ],
        )
        return result

    def _with_runs(self, config: dict[str, Any]) -> dict[str, Any]:
        """A configuration that also says what was trained, for whoever loads the file."""
        runs = self.training.note()
        return {**config, _RUNS: dict(runs)} if runs else config

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> CheckedOptimizer:
        """Inverse of `get_config`; see Keras."""
        arguments = dict(config)
        runs = arguments.pop(_RUNS, {})
        optimizer: CheckedOptimizer = super().from_config(arguments, custom_objects)
        optimizer.training.read(runs)
        return optimizer

    def __deepcopy__(self, memo: Any) -> CheckedOptimizer:
        """A fresh optimizer with the same arguments: the steps of the original stay with it."""
        return type(self).from_config(self.get_config())

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles the arguments only, likewise."""
        return type(self).from_config, (self.get_config(),)
