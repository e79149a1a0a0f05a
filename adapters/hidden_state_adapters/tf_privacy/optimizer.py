"""TF Privacy's Keras SGD for cyclic batches: decoupled decay, projection, checks in every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import tensorflow as tf
from tensorflow_privacy.privacy.optimizers.dp_optimizer_keras import GenericDPSGDOptimizer

from hidden_state_accountants import LossGeometry, _validate
from hidden_state_adapters.tf_privacy import optimizer_checks as checks
from hidden_state_adapters.tf_privacy.query import WatchedGaussianSumQuery
from hidden_state_adapters.tf_privacy.refusals import refusal
from hidden_state_adapters.tf_privacy.step_log import PROBLEMS, Problem, StepEntry, StepLog


@attrs.frozen(eq=False)
class _Gradients:
    """What `_compute_gradients` returned, in the trace that did it, and what it saw."""

    tensors: tuple[Any, ...]
    rows: tf.Tensor
    problem: tf.Tensor

    @property
    def is_fine(self) -> tf.Tensor:
        return tf.equal(self.problem, 0)


class _DecayedSGD(tf.keras.optimizers.legacy.SGD):
    """SGD with decoupled decay, x <- (1 - lr * weight_decay) x - lr * gradient."""

    _weight_decay = 0.0
    _gradients: _Gradients | None = None

    def _resource_apply_dense(self, grad: Any, var: Any, apply_state: Any = None) -> Any:
        device, dtype = var.device, var.dtype.base_dtype
        coefficients = (apply_state or {}).get((device, dtype)) or self._fallback_apply_state(
            device, dtype
        )
        rate = coefficients["lr_t"]
        old = var.read_value()
        decay = tf.constant(self._weight_decay, dtype)  # tf.cast goes through float32
        kept = old * (1 - rate * decay) if self._weight_decay else old
        assert self._gradients is not None
        # tf.where and not a factor 0: a refused gradient may hold NaN.
        return var.assign(tf.where(self._gradients.is_fine, kept - rate * grad, old))


@tf.keras.utils.register_keras_serializable("hidden_state_adapters")
class CyclicDPKerasSGDOptimizer(GenericDPSGDOptimizer, _DecayedSGD):
    r"""DPKerasSGDOptimizer for runs of which only the last iterate is released.

    One step with the b examples of a batch is

    .. math::
        x \leftarrow \Pi_R\Big( (1 - \eta w)\, x - \frac{\eta}{b} \Big(\sum_i
        \mathrm{clip}_C(\nabla f_i(x)) + \mathcal{N}(0, (z C)^2 I)\Big)\Big)

    with C = `l2_norm_clip`, z = `noise_multiplier`, w = `weight_decay` and :math:`\Pi_R` the
    projection of all trainable variables together on the ball of `projection_radius` around 0.

    It is used like DPKerasSGDOptimizer: the loss must be a vector with one entry per example
    (``reduction="none"``), in `Model.fit` (graph, eager or XLA) and in own loops that call
    `minimize`, or `_compute_gradients` and `apply_gradients`. Unlike it, it is a class, works with
    float64, and can be saved and loaded with the model.

    Formal guarantees:
      - Of a step: as above; independent noise for every variable and step, from TensorFlow's
        generators (which are not cryptographic).
      - Of a run: none by itself, because an optimizer does not see the order of the data.
        `HiddenStateCallback` records the run, or declare it as a `LastIterateDpEvent`.
      - Checked in every step, and the step is not taken otherwise: equal batches, one row per
        example; the variables are those that the last step left; finite gradients, not longer than
        `loss_geometry.lipschitz`. In eager mode the error is an UnsupportedRunError, in a graph
        tf.errors.InvalidArgumentError, with the callback always UnsupportedRunError. XLA compiles
        no assertions: there only the callback raises.

    Args:
        l2_norm_clip: C, the bound on the norm of the gradient of one example, for all variables
            together.
        noise_multiplier: z, the standard deviation of the noise on the sum of gradients over C.
        num_microbatches: None, or the batch size: one example each.
        gradient_accumulation_steps: As for DPKerasSGDOptimizer, noise is added in every one of
            these steps. HiddenStateCallback accounts 1 only.
        learning_rate: A number or a LearningRateSchedule, fixed before the run.
        weight_decay: w >= 0, applied outside the clip. (A penalty in the loss is inside the clip
            and does not contract.)
        projection_radius: R, or None for no projection. As the event's domain_diameter it is 2R.
        loss_geometry: What is known about the per-example loss; for the callback, and its
            `lipschitz` is checked.
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
        projection_radius: float | None = None,
        loss_geometry: LossGeometry | None = None,
        name: str = "CyclicDPKerasSGDOptimizer",
        **kwargs: Any,
    ):
        checks.refuse_surroundings()
        checks.refuse_options(kwargs)
        clip = _validate.real("l2_norm_clip", l2_norm_clip, above=0)
        noise = _validate.magnitude("noise_multiplier", noise_multiplier)
        checks.check_scale("l2_norm_clip", clip)
        checks.check_scale("l2_norm_clip * noise_multiplier", clip * noise)
        if num_microbatches is not None:
            num_microbatches = _validate.integer("num_microbatches", num_microbatches, minimum=1)
        if isinstance(learning_rate, int | float):
            _validate.magnitude("learning_rate", learning_rate)
        decay = _validate.real("weight_decay", weight_decay, minimum=0)
        if projection_radius is not None:
            projection_radius = _validate.real("projection_radius", projection_radius, above=0)
        if loss_geometry is not None and not isinstance(loss_geometry, LossGeometry):
            raise TypeError(f"Expected loss_geometry to be a LossGeometry, got {loss_geometry!r}.")
        super().__init__(
            WatchedGaussianSumQuery(clip, noise),
            num_microbatches,
            _validate.integer(
                "gradient_accumulation_steps", gradient_accumulation_steps, minimum=1
            ),
            learning_rate=learning_rate,
            name=name,
        )
        self._weight_decay = decay
        self._projection_radius = projection_radius
        self._loss_geometry = loss_geometry
        self._log = StepLog()
        self._is_watched = False

    @property
    def l2_norm_clip(self) -> float:
        """C."""
        return self._dp_sum_query.l2_norm_clip

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation of the noise on the sum of gradients over C."""
        return self._dp_sum_query.noise_multiplier

    @property
    def weight_decay(self) -> float:
        """Decoupled."""
        return self._weight_decay

    @property
    def projection_radius(self) -> float | None:
        """Radius of the ball around 0 that holds all trainable variables together."""
        return self._projection_radius

    @property
    def loss_geometry(self) -> LossGeometry | None:
        """What is declared about the per-example loss."""
        return self._loss_geometry

    @property
    def last_step(self) -> StepEntry:
        """What the last step did, and how many there were."""
        return self._log.read()

    def is_iterate(self, variables: Sequence[Any]) -> bool:
        """Whether the variables are as the last step left them, bit by bit."""
        return self._log.has_written(list(variables))

    def watch(self) -> None:
        """The caller reads `last_step` after every step and raises if it was refused."""
        self._is_watched = True

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
        checks.refuse_surroundings()
        checks.refuse_changed_options(self)
        if grad_loss is not None:
            raise refusal("Expected grad_loss = None, got weights of the losses. Drop them.")
        self._gradients = None
        seen: list[Any] = []

        def note(value: Any) -> Any:
            seen.append(checks.check_loss(value, self._num_microbatches))
            return value

        def noted_loss() -> Any:
            return note(loss())

        pairs = super()._compute_gradients(
            noted_loss if callable(loss) else note(loss), var_list, None, tape
        )
        variables = [variable for _, variable in pairs]
        checks.check_variables(variables)
        query, rows = self._dp_sum_query, tf.shape(seen[0], out_type=tf.int64)[0]
        problem = self._log.problem(
            rows, self._num_microbatches, variables, query.largest_norm, self._norm_bound()
        )
        self._raise_problem(problem)
        self._gradients = _Gradients(tuple(gradient for gradient, _ in pairs), rows, problem)
        return pairs

    def _norm_bound(self) -> float:
        declared = None if self._loss_geometry is None else self._loss_geometry.lipschitz
        return float("inf") if declared is None else declared * (1 + checks.SLACK)

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
        if self._projection_radius is not None:
            _project(variables, self._projection_radius, gradients.is_fine)
        first = variables[0]
        self._log.write(
            rows=gradients.rows,
            problem=gradients.problem,
            variables=variables,
            noise=self._dp_sum_query.noise_fingerprint,
            values=[
                apply_state[(first.device, first.dtype.base_dtype)]["lr_t"],
                self.l2_norm_clip,
                self.noise_multiplier,
                self._weight_decay,
                self._dp_sum_query.largest_norm,
            ],
        )
        return result

    def get_config(self) -> dict[str, Any]:
        """All arguments of the constructor as plain types; see Keras."""
        base: dict[str, Any] = tf.keras.optimizers.legacy.SGD.get_config(self)
        geometry = self._loss_geometry
        return {
            "name": base["name"],
            "l2_norm_clip": self.l2_norm_clip,
            "noise_multiplier": self.noise_multiplier,
            "num_microbatches": self._num_microbatches,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "learning_rate": base["learning_rate"],
            "weight_decay": self._weight_decay,
            "projection_radius": self._projection_radius,
            "loss_geometry": None if geometry is None else _plain_geometry(geometry),
        }

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> CyclicDPKerasSGDOptimizer:
        """Inverse of `get_config`; see Keras."""
        arguments = dict(config)
        if isinstance(arguments.get("loss_geometry"), Mapping):
            arguments["loss_geometry"] = LossGeometry(**arguments["loss_geometry"])
        return super().from_config(arguments, custom_objects)

    def __deepcopy__(self, memo: Any) -> CyclicDPKerasSGDOptimizer:
        """A fresh optimizer with the same arguments: the steps of the original stay with it."""
        return type(self).from_config(self.get_config())


def _plain_geometry(geometry: LossGeometry) -> dict[str, Any]:
    return attrs.asdict(geometry) | {"kind": geometry.kind.value}


def _project(variables: Sequence[Any], radius: float, is_fine: tf.Tensor) -> None:
    """Projects the variables together on the ball around 0, unless the step was refused.

    The radius is lowered by two units of rounding, so that the result lies inside the ball.
    """
    eps = max(float(np.finfo(v.dtype.as_numpy_dtype).eps) for v in variables)
    norm = checks.joint_norm(variables)
    factor = tf.minimum(tf.constant(1.0, tf.float64), radius * (1 - 2 * eps) / norm)
    factor = tf.where(is_fine, factor, tf.ones_like(factor))
    for variable in variables:
        variable.assign(variable.read_value() * tf.cast(factor, variable.dtype.base_dtype))
