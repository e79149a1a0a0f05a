"""DiceSGD for a model that owns its run: both sums of a batch, and the error between the steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import tensorflow as tf
from dp_accounting import NeighboringRelation

from hidden_state_accountants import LossGeometry, validate
from hidden_state_accountants.runs.base import Step
from hidden_state_accountants.runs.dice_sgd import DiceSgdRun
from hidden_state_adapters.batch_plans import BatchPlan
from hidden_state_adapters.tf_privacy.declared import Declared
from hidden_state_adapters.tf_privacy.guards.settings import check_scale
from hidden_state_adapters.tf_privacy.mechanism import Mechanism
from hidden_state_adapters.tf_privacy.mechanisms.dice_sgd.account import DiceAccount
from hidden_state_adapters.tf_privacy.mechanisms.dice_sgd.error import HiddenError
from hidden_state_adapters.tf_privacy.mechanisms.dice_sgd.rule import DiceRule
from hidden_state_adapters.tf_privacy.owned.rule import UpdateRule
from hidden_state_adapters.tf_privacy.owned.settings import Settings
from hidden_state_adapters.tf_privacy.owned.steps import OwnedSteps, Update
from hidden_state_adapters.tf_privacy.refusals import refusal
from hidden_state_adapters.tf_privacy.step_log import StepEntry
from hidden_state_adapters.tf_privacy.units import Units


@tf.keras.utils.register_keras_serializable("hidden_state_adapters")
class DiceUpdate(UpdateRule):
    r"""Compiles a `HiddenStateModel` with DiceSGD: what the clip cuts off is fed back, clipped.

        model.compile(DiceUpdate(tf.keras.optimizers.AdamW(0.01), error_l2_norm_clip=0.01), loss)

    With C_1 = `l2_norm_clip` and z = `noise_multiplier` of the model, and b examples in a batch on
    average, the optimizer takes a step along :math:`v_t + \mathcal{N}(0, (z C_1 / b)^2 I)`,

    .. math::
        v_t = \frac1b \sum_{i \in B_t} \mathrm{clip}(g_i, C_1) + \mathrm{clip}(e_t, C_2), \quad
        e_{t+1} = e_t + \frac1b \sum_{i \in B_t} g_i - v_t, \quad e_0 = 0

    in any order of the batches.

    Formal guarantees:
      - Those of `DiceSgdDpEvent`: all iterates and all noisy updates count as released, so any
        optimizer, option and learning rate is covered, and releases cost nothing.
      - The error is in no file, configuration, copy or text; a saved model that is trained further
        is another run, with e = 0, and both are composed.
      - What the model checks of every step, and that the error is finite.

    Args:
        optimizer: Any of Keras, or its name. It may have no noise of its own.
        error_l2_norm_clip: C_2 > 0, in units of the MEAN update; None is C_1, as the paper
            recommends. Without a bound on the gradients choose it far smaller.
        automatic: Normalise instead of clip: C v/|v|, and 0 at 0.
        gradient_bound: G, a bound on the norm of the gradient of EVERY example that could have been
            in the data, before the clip; those of the run are compared with it. `loss_geometry` of
            the model says it, too.

    Raises:
        TypeError, ValueError: An argument has an impossible value.
        UnsupportedRunError: From fit: a projection or `max_batch_size`, which the bound does not
            know, or both `loss_geometry` and `gradient_bound`.

    Source: Zhang, Bu, Wu, Hong 2024 (arXiv 2311.14632), Algorithms 2, 3 (Adam) and 4 (automatic).
    """

    knows_microbatches = False
    _divisor: int | None = None  # that an optimizer was told

    def __init__(
        self,
        optimizer: Any,
        *,
        error_l2_norm_clip: float | None = None,
        automatic: bool = False,
        gradient_bound: float = math.inf,
    ):
        super().__init__(optimizer)
        if error_l2_norm_clip is not None:
            validate.real("error_l2_norm_clip", error_l2_norm_clip, above=0)
            check_scale("error_l2_norm_clip", error_l2_norm_clip)
        if not isinstance(automatic, bool):
            raise TypeError(f"Expected automatic to be True or False, got {automatic!r}.")
        self.error_l2_norm_clip, self.automatic = error_l2_norm_clip, automatic
        self.gradient_bound = Declared(gradient_bound=gradient_bound).gradient_bound

    @classmethod
    def of_optimizer(
        cls, optimizer: Any, *, expected_batch_size: int | None, **arguments: Any
    ) -> DiceUpdate:
        """As of an optimizer with noise.

        Args:
            optimizer: Without noise.
            expected_batch_size: That the run has to have; None for any.
            **arguments: As for the class.
        """
        rule = cls(optimizer, **arguments)
        rule._divisor = expected_batch_size
        return rule

    def get_config(self) -> dict[str, Any]:
        """The arguments but the optimizer, as plain types."""
        bound = self.gradient_bound
        return {
            "error_l2_norm_clip": self.error_l2_norm_clip,
            "automatic": self.automatic,
            "gradient_bound": None if math.isinf(bound) else bound,
            "expected_batch_size": self._divisor,
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> DiceUpdate:
        """Inverse of `get_config`."""
        bound = config["gradient_bound"]
        given = {**config, "gradient_bound": math.inf if bound is None else bound}
        return cls.of_optimizer(None, **given)

    def declared(self, settings: Settings) -> Declared:
        """Of the loss, and the bound on its gradients."""
        return attrs.evolve(settings.declared, gradient_bound=self.gradient_bound)

    def steps(
        self, settings: Settings, optimizer: Any, plan: BatchPlan, variables: Sequence[Any]
    ) -> DiceSteps:
        """Those of DiceSGD."""
        if self._divisor not in (None, plan.batch_size):
            raise refusal(
                f"Expected expected_batch_size = None or {plan.batch_size}, the divisor of every "
                f"batch, got {self._divisor}. Leave it out."
            )
        return DiceSteps(
            settings,
            Update(optimizer, variables),
            plan,
            variables,
            error_l2_norm_clip=self.error_l2_norm_clip,
            automatic=self.automatic,
        )


class DiceSteps(DiceAccount, OwnedSteps):
    """Makes the steps of a model that is compiled with `DiceUpdate`.

    Args:
        settings: Of the model.
        update: Of the compiled optimizer.
        plan: The batches.
        variables: Those that are trained.
        error_l2_norm_clip: C_2, or None for C_1.
        automatic: Whether both clips normalise.

    Raises:
        UnsupportedRunError: The bound on DiceSGD does not know such a run.
    """

    _composes = False

    def __init__(
        self,
        settings: Settings,
        update: Update,
        plan: BatchPlan,
        variables: Sequence[Any],
        *,
        error_l2_norm_clip: float | None,
        automatic: bool,
    ):
        assert settings.l2_norm_clip is not None
        self._error_clip = error_l2_norm_clip or settings.l2_norm_clip
        self._automatic, self._error = automatic, HiddenError()
        self._error.belongs_to(variables)
        super().__init__(settings, update, plan, variables)

    def _check_settings(self, settings: Settings, update: Update) -> None:
        unknown = {
            "prox": "a proximal map is not in the algorithm",
            "projection_radius": "a projection is not in the algorithm, and would not lower "
            "epsilon",
            "max_batch_size": "a capped batch is not a Poisson batch, and the bound on DiceSGD has "
            "no term for the cap",
        }
        for name, why in unknown.items():
            if getattr(settings, name) is not None:
                raise refusal(
                    f"Expected {name} = None with DiceUpdate, got {getattr(settings, name)}: {why}."
                    " Leave it out."
                )

    def _rule(self) -> DiceRule:
        return DiceRule(
            super()._rule(),
            self._error,
            error_clip=self._error_clip,
            automatic=self._automatic,
            iterations=self.iterations,
        )

    # As every mechanism's

    @property
    def kind(self) -> str:
        """The model's steps, with their update rule."""
        return f"{super().kind}, within DiceUpdate"

    def known_loss(self, declared: Declared) -> LossGeometry | None:
        """Of the loss only the bound on its gradients counts."""
        return None

    def new_run(self, units: Units, declared: Declared) -> DiceSgdRun:
        """Of which every iterate counts as released."""
        plan = self._plan
        return DiceSgdRun(
            noise_multiplier=self.noise_multiplier,
            clip_norm=self.l2_norm_clip,
            error_clip_norm=self._error_clip,
            automatic=self._automatic,
            batch_order=plan.order,
            batch_size=plan.batch_size,
            dataset_size=len(plan.records),
            sampling_rate=plan.sampling_rate,
            gradient_bound=declared.longest_gradient,
        )

    def step_of(self, entry: StepEntry) -> Step:
        """As every mechanism's; the rule of the update is free, and stays what it was."""
        self._update.check_options()
        return Mechanism.step_of(self, entry)

    def line_before(self, units: Units, relation: NeighboringRelation) -> str:
        """Nothing: no iterate is hidden."""
        return ""

    def declared(self, event: Any) -> list[str]:
        """Of foreign optimizers, what they see."""
        return self._declared_of_optimizer()
