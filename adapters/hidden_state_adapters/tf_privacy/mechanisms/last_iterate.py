"""TF Privacy's Keras SGD for cyclic batches: decoupled decay, prox, projection, checks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import tensorflow as tf
from dp_accounting import NeighboringRelation
from tensorflow_privacy.privacy.optimizers.dp_optimizer_keras import GenericDPSGDOptimizer

from hidden_state_accountants import (
    Assumption,
    BatchOrder,
    LastIterateDpEvent,
    LossGeometry,
    Regulariser,
    RunRecorder,
    validate,
)
from hidden_state_accountants.runs.base import SLACK, Step
from hidden_state_adapters.tf_privacy import proximal
from hidden_state_adapters.tf_privacy.declared import Declared, plain_geometry
from hidden_state_adapters.tf_privacy.guards import settings
from hidden_state_adapters.tf_privacy.guards.step import (
    check_loss,
    check_microbatches,
    refuse_tensor_float_32,
)
from hidden_state_adapters.tf_privacy.noisy_mean import NoisyMean
from hidden_state_adapters.tf_privacy.optimizer import CheckedOptimizer, CheckedSGD
from hidden_state_adapters.tf_privacy.owned.rule import UpdateRule
from hidden_state_adapters.tf_privacy.projection import check_within
from hidden_state_adapters.tf_privacy.rates import as_meant, declared_rates
from hidden_state_adapters.tf_privacy.refusals import refusal
from hidden_state_adapters.tf_privacy.rules import PlainSGD
from hidden_state_adapters.tf_privacy.step_log import StepEntry
from hidden_state_adapters.tf_privacy.units import Units, checked_microbatches, checked_norms


@tf.keras.utils.register_keras_serializable("hidden_state_adapters")
class CyclicDPKerasSGDOptimizer(CheckedOptimizer, GenericDPSGDOptimizer, CheckedSGD):
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
        loss_geometry: LossGeometry | None = None,
        name: str = "CyclicDPKerasSGDOptimizer",
        **kwargs: Any,
    ):
        settings.refuse_options(type(self).__name__, kwargs, self._neutral_options)
        if gradient_accumulation_steps != 1:
            raise refusal(
                f"Expected gradient_accumulation_steps = 1, got {gradient_accumulation_steps}: "
                "every batch is a step, with its own noise. Use a larger batch_size."
            )
        clip, noise = settings.clip_and_noise(l2_norm_clip, noise_multiplier)
        settings.check_learning_rate(learning_rate)
        decay = validate.real("weight_decay", weight_decay, minimum=0)
        prox = proximal.prox_of(prox)
        if projection_radius is not None:
            projection_radius = validate.real("projection_radius", projection_radius, above=0)
        if loss_geometry is not None and not isinstance(loss_geometry, LossGeometry):
            raise TypeError(
                f"Expected loss_geometry to be a LossGeometry, got {loss_geometry!r}. An optimizer "
                'does not see the model: say loss_geometry="auto" and feature_norm= to '
                "make_private(model, ...)."
            )
        rule = PlainSGD(
            lambda: self._decayed_lr(tf.float32), decay=decay, prox=prox, radius=projection_radius
        )
        super().__init__(
            NoisyMean(rule, clip, noise),
            settings.microbatches(num_microbatches),
            learning_rate=learning_rate,
            name=name,
        )
        self._weight_decay, self._prox = decay, prox
        self._projection_radius = projection_radius
        self._loss_geometry = loss_geometry
        self._loss_of_run: LossGeometry | None = None

    @property
    def weight_decay(self) -> float:
        """Decoupled."""
        return self._weight_decay

    @property
    def prox(self) -> Regulariser | None:
        """The regulariser whose proximal map follows every step."""
        return self._prox

    @property
    def projection_radius(self) -> float | None:
        """Radius of the ball around 0 that holds all trainable variables together."""
        return self._projection_radius

    @property
    def loss_geometry(self) -> LossGeometry | None:
        """What is known about the per-example loss: declared here, or of the run."""
        return self._loss_geometry or self._loss_of_run

    def _checked_loss(self, loss: Any) -> Any:
        loss = check_loss(loss, None)
        check_microbatches(loss, self._num_microbatches)
        return loss

    def _problem(self, rows: tf.Tensor, largest: tf.Tensor, variables: Sequence[Any]) -> tf.Tensor:
        is_fresh = self._mean.noise_is_fresh
        return self._log.problem(rows, None, variables, largest, self._norm_bound(), is_fresh)

    def _raise_problem(self, problem: tf.Tensor) -> None:
        with tf.control_dependencies([self._log.count_draw()]):  # before anything can raise
            super()._raise_problem(problem)

    @property
    def gradients_computed(self) -> int:
        """How often noisy gradients were computed; in a run as often as a step was taken."""
        return self._log.drawn

    def _norm_bound(self) -> float:
        geometry = self.loss_geometry
        if geometry is None or geometry.lipschitz is None:
            return float("inf")
        return geometry.lipschitz * (1 + SLACK)

    # What kind of run its steps are

    def begin(self, declared: Declared) -> None:
        """Takes over the geometry of the loss.

        Raises:
            UnsupportedRunError: It has one already.
        """
        if None not in (self._loss_geometry, declared.geometry):
            raise refusal(
                "Expected loss_geometry in one place, got one of the optimizer and one of its "
                "run. Leave it out of the optimizer."
            )
        self._loss_of_run = declared.geometry

    def check_start(self, units: Units, variables: Sequence[Any], declared: Declared) -> None:
        """As every mechanism's, and the variables start within the ball."""
        super().check_start(units, variables, declared)
        if self.loss_geometry is not None:
            refuse_tensor_float_32()
        check_within(variables, self._projection_radius)
        if self._prox is not None:
            self._prox.check_axes([variable.shape for variable in variables])

    def derived(self, declared: Declared) -> list[Assumption]:
        """The loss, and the proximal map."""
        return [*super().derived(declared), *proximal.derived(self._prox)]

    def known_loss(self, declared: Declared) -> LossGeometry | None:
        """Of optimizer or run."""
        return self.loss_geometry

    def new_run(self, units: Units, declared: Declared) -> RunRecorder:
        """Of which the last iterate is released."""
        radius = self._projection_radius
        return RunRecorder(
            batch_order=BatchOrder.CYCLIC,
            batch_size=units.records_per_step,
            dataset_size=units.records,
            loss=units.geometry(self.loss_geometry),
            prox_strong_convexity=proximal.strong_convexity(self._prox),
            domain_diameter=math.inf if radius is None else 2 * radius,
            is_microbatched=units.microbatch > 1,
        )

    def step_of(self, entry: StepEntry) -> Step:
        """As every mechanism's; the noise of the step was not chosen among several draws."""
        self._check_draws(entry.steps)
        step = super().step_of(entry)
        return attrs.evolve(step, learning_rate=as_meant(step.learning_rate))

    def check_run(self) -> None:
        """Every noisy gradient that was computed was applied."""
        self._check_draws(self.last_step.steps)

    def _check_draws(self, taken: int) -> None:
        """Noise that somebody chose among several draws is not Gaussian."""
        drawn = self.gradients_computed
        if drawn != taken:
            raise refusal(
                f"Noisy gradients were computed {drawn} times for {taken} steps: the others were "
                "refused, interrupted or not applied. Call minimize, or _compute_gradients and "
                "apply_gradients, once for every batch."
            )

    def line_before(self, units: Units, relation: NeighboringRelation) -> str:
        """Whether the update contracts, assuming the hyper-parameters of the next step."""
        run = self.new_run(units, Declared())
        part = Step(
            noise_multiplier=self.noise_multiplier,
            clip_norm=self.l2_norm_clip,
            learning_rate=as_meant(float(self._decayed_lr(tf.float32))),
            weight_decay=self._weight_decay,
        )
        run.add(units.step_of([part] * units.accumulated, 0))
        return run.line_before(run.event(), relation)

    def checked(self, units: Units) -> list[str]:
        """The values of the steps, and what holds for the variables."""
        checked = ["learning rate, weight decay, clip norm and noise as recorded, in every step"]
        radius = self._projection_radius
        checked += checked_norms(self.loss_geometry, units.microbatch)
        checked += checked_microbatches(units.microbatch)
        if radius is not None:
            checked.append(f"all variables together within {radius:g} of 0")
        return checked

    def declared(self, event: LastIterateDpEvent) -> list[str]:
        """Where the learning rates come from, unless it is a number or a schedule of Keras."""
        return declared_rates(self._given_rate, event.learning_rate)

    def for_model(self) -> tuple[UpdateRule, dict[str, Any]]:
        """Plain SGD with its rate and decay, and what a model is told for it.

        Raises:
            UnsupportedRunError: It accumulates gradients, took steps, is of a subclass, or its rate
                is a function.
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
        return UpdateRule(sgd), {
            **told,
            "prox": self._prox,
            "projection_radius": self._projection_radius,
            "loss_geometry": self._loss_geometry,
        }

    def get_config(self) -> dict[str, Any]:
        """All arguments of the constructor as plain types; see Keras."""
        base: dict[str, Any] = tf.keras.optimizers.legacy.SGD.get_config(self)
        geometry = self._loss_geometry
        config = {
            "name": base["name"],
            "l2_norm_clip": self.l2_norm_clip,
            "noise_multiplier": self.noise_multiplier,
            "num_microbatches": self._num_microbatches,
            "learning_rate": base["learning_rate"],
            "weight_decay": self._weight_decay,
            "prox": proximal.plain_prox(self._prox),
            "projection_radius": self._projection_radius,
            "loss_geometry": None if geometry is None else plain_geometry(geometry),
        }
        return self._with_runs(config)

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> CyclicDPKerasSGDOptimizer:
        """Inverse of `get_config`; see Keras."""
        arguments = dict(config)
        if isinstance(arguments.get("loss_geometry"), Mapping):
            arguments["loss_geometry"] = LossGeometry(**arguments["loss_geometry"])
        optimizer: CyclicDPKerasSGDOptimizer = super().from_config(arguments, custom_objects)
        return optimizer
