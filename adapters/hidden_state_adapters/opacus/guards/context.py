"""What a private optimizer knows about its run, and the values it checks before a step."""

from __future__ import annotations

import math
from collections.abc import Mapping

import attrs
import torch

from hidden_state_accountants import UnsupportedRunError
from hidden_state_adapters.opacus import device_figures
from hidden_state_adapters.opacus import optimizer_checks as checks
from hidden_state_adapters.opacus.data.plans import BatchPlan
from hidden_state_adapters.opacus.guards.criterion import CriterionWatch
from hidden_state_adapters.opacus.data.cursor import BatchCursor
from hidden_state_adapters.opacus.guards.schedule import DeclaredSchedule
from hidden_state_adapters.opacus.gradients.figures import Figure
from hidden_state_adapters.opacus.guards.forward import ForwardWatch
from hidden_state_adapters.opacus.guards.noise import NoiseWatch
from hidden_state_adapters.opacus.guards.parameters import ParameterWatch
from hidden_state_adapters.opacus.recorders import Recorder


@attrs.define
class RunContext:
    """What a private optimizer needs to know about its run.

    Attributes:
        recorder: Records every logical step.
        plan: The batches.
        cursor: Says which batch the loop is working on.
        parameters: Watches the parameters between steps.
        forward: Watches the forward passes.
        criterion: Watches the calls of the criterion, or None if its constants were declared.
        noise: Watches the random numbers, over all runs of the engine.
        lipschitz: The declared bound on per-example gradient norms, or None.
        feature_norm: The declared bound on the features, or None.
        projection_radius: Radius of the ball around 0 that the iterates are projected on, or None.
        schedule: What was declared about learning rates and the number of steps.
    """

    recorder: Recorder
    plan: BatchPlan
    cursor: BatchCursor
    parameters: ParameterWatch
    forward: ForwardWatch
    lipschitz: float | None = None
    feature_norm: float | None = None
    projection_radius: float | None = None
    criterion: CriterionWatch | None = None
    noise: NoiseWatch = attrs.field(factory=NoiseWatch)
    schedule: DeclaredSchedule = DeclaredSchedule()

    @property
    def batch_size(self) -> int:
        """b, the divisor."""
        return self.plan.batch_size

    def reset_watches(self) -> None:
        """Starts counting for the next batch."""
        self.forward.reset()
        if self.criterion is not None:
            self.criterion.reset()

    def remove_hooks(self) -> None:
        """Leaves the module and the criterion as they were."""
        self.forward.remove()
        if self.criterion is not None:
            self.criterion.remove()

    def check_values(
        self,
        step: int,
        rows: int,
        norms: torch.Tensor | None = None,
        more: Mapping[str, Figure] | None = None,
    ) -> dict[str, float]:
        """Raises UnsupportedRunError unless parameters, gradients and features are as declared.

        Args:
            step: The number of the step, from 1 on.
            rows: The records of the current piece of its batch.
            norms: Of its per-example gradients; None for no rows, or where others look at them.
            more: Figures to read from the device in the same transfer.

        Returns:
            The values of all figures.
        """
        figures: dict[str, Figure] = {
            **(more or {}),
            "changed": self.parameters.changed(),
            "buffers": self.parameters.buffers_changed(),
            "perturbed": self.forward.has_other_parameters,
        }
        if norms is not None:
            figures["gradient"] = norms.max()
        elif self.lipschitz is not None and rows:
            figures["gradient"] = math.nan
        if self.feature_norm is not None and rows:
            largest = self.forward.largest_feature_norm
            figures["feature"] = math.nan if largest is None else largest
        if self.projection_radius is not None:
            figures["norm"] = checks.joint_norm(self.parameters.params)
        if self.criterion is not None:
            figures["bad_target"] = self.criterion.has_bad_target
            figures["other_loss"] = self.criterion.has_other_gradient
        values = device_figures.read(figures)
        self._judge(step, values)
        return values

    def _judge(self, step: int, values: dict[str, float]) -> None:
        if values["changed"]:
            raise parameters_changed(step - 1)
        if values["perturbed"]:
            raise UnsupportedRunError(
                f"step {step} has gradients at other parameters than the last step left: they were "
                "changed for the training pass and restored. The theorems need the gradient at the "
                "iterate. Leave the parameters alone between the steps."
            )
        if values["buffers"]:
            raise buffers_changed()
        if self.criterion is not None and values["bad_target"]:
            self.criterion.raise_bad_target(step)
        if self.feature_norm is not None and "feature" in values:
            checks.check_feature_norm(values["feature"], self.feature_norm, step)
        if self.lipschitz is not None and "gradient" in values:
            checks.check_gradient_norm(values["gradient"], self.lipschitz, step)
        if not math.isfinite(values.get("gradient", 0.0)):
            raise UnsupportedRunError(
                f"step {step} has a per-example gradient whose norm is not finite (or a square "
                "overflows): no clip bounds it. The step was not taken. Look for a division by 0, "
                "or scale the loss down."
            )
        if self.criterion is not None and values["other_loss"]:
            self.criterion.raise_other_gradient(step)
        radius = self.projection_radius
        if radius is not None and not values["norm"] <= radius * (1 + 1e-6):
            raise UnsupportedRunError(
                f"step {step} starts at norm {values['norm']:.8g}, outside the ball of radius "
                f"{radius:.8g}."
            )


def parameters_changed(step: int) -> UnsupportedRunError:
    """The error for parameters that are not those that step `step` left."""
    return UnsupportedRunError(
        f"The parameters were changed outside the private optimizer after step "
        f"{step}, so the model is not the iterate that was accounted. Leave them "
        "alone during the run; an earlier iterate may be used only if engine.release() was "
        "called there."
    )


def buffers_changed() -> UnsupportedRunError:
    """The error for a buffer that was written during the run."""
    return UnsupportedRunError(
        "A buffer of the module was changed during the run (running statistics, counters, caches): "
        "it carries data of the records past the noise. Put the layer that writes it in eval() "
        "mode, or replace it."
    )
