"""Plain noisy SGD, of which only the last iterate is released."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from hidden_state_accountants import Schedule, UnsupportedRunError
from hidden_state_accountants.runs.algorithms import Algorithm
from hidden_state_accountants.runs.run import Step
from hidden_state_adapters.opacus.criteria import check_convexity
from hidden_state_adapters.opacus.declared import DeclaredRun, RunArguments
from hidden_state_adapters.opacus.gradients import Piece, check_clip_margin
from hidden_state_adapters.opacus.private_step import PrivateOptimizer
from hidden_state_adapters.opacus.update_rules import (
    UnsupportedUpdateError,
    move_by_sgd,
    sgd_options,
    update_of,
)


class HiddenStateOptimizer(PrivateOptimizer):
    """Noisy clipped SGD on the batches of a plan; what the engine's event describes.

    One logical step of x is

        x <- P(prox((1 - lr*weight_decay) x - lr/b * (sum of clipped gradients + noise)))

    with noise of standard deviation noise_multiplier * max_grad_norm. torch.optim.SGD applies its
    `weight_decay` to the parameters, outside the clip: that is decoupled decay. (A penalty in the
    loss is inside the clip and does not count.) prox is the proximal map of lr times the
    Regulariser of `make_private`, P its projection: on a ball for all parameters
    together, or another set.

    Formal guarantees:
      - Relation and released iterates: those of the recorded `LastIterateDpEvent`.
      - By construction of a known loss: the step is computed from the batch that was dealt, the
        formula of the loss and the last iterate. Of a declared one the gradients are those that
        Opacus left.
      - Checked at every step: batch and number of records; plain SGD with equal groups; the model
        is the last iterate; gradient and feature norms within their declared bounds.

    Args:
        optimizer: Plain torch.optim.SGD.
        run: Run of the engine, as for `PrivateOptimizer`.
        **kwargs: Arguments of DPOptimizer.

    Raises:
        UnsupportedRunError: From `step`, when the run is not the declared one; the text says which
            step and what. The step is then not taken.
    """

    checked = "plain SGD with equal groups; learning rate, decay, clip norm and noise as recorded"

    @classmethod
    def check_arguments(
        cls, arguments: RunArguments, module: nn.Module, optimizer: Optimizer
    ) -> None:
        """Raises UnsupportedRunError unless it is plain SGD of what the loss can be convex in."""
        check_convexity(arguments.loss_geometry, module, [module.parameters()])
        try:
            sgd_options(optimizer)
        except UnsupportedUpdateError as error:
            asked = ", ".join(arguments.asks_for_hidden_iterates)
            raise UnsupportedRunError(
                f"{error} Or leave out {asked}: any optimizer is accounted by composition, where "
                "every step counts."
            ) from None

    @classmethod
    def algorithm(cls, declared: DeclaredRun, noise_multiplier: float) -> Algorithm:
        """See `PrivateOptimizer.algorithm`.

        Raises:
            UnsupportedRunError: The clip norm is too close above the bound on the gradients.
        """
        check_clip_margin(declared.arguments.clip_norm, declared.lipschitz)
        return super().algorithm(declared, noise_multiplier)

    @classmethod
    def rates(cls, declared: DeclaredRun, num_steps: int) -> tuple[float | Schedule, float]:
        """Returns the declared learning rates or the current one, and the current decay."""
        options, scale = sgd_options(declared.optimizer), declared.scale
        rates = declared.schedule.learning_rate(num_steps, scale)
        now = options["lr"] * scale if rates is None else rates
        return now, options["weight_decay"] / scale

    def check_update_rule(self, optimizer: Optimizer) -> None:
        """Raises UnsupportedRunError unless it is plain SGD with equal groups."""
        self._update = update_of(self, self.declared.plan.batch_size)

    def clip_and_accumulate(self) -> None:
        """Adds what Opacus would, if the clip leaves the declared bound alone or is below it."""
        check_clip_margin(float(self.max_grad_norm), self.declared.lipschitz)
        super().clip_and_accumulate()

    def scale_grad(self) -> None:
        """Leaves the noisy sum as it is, which `move` divides."""

    def move(self, piece: Piece) -> None:
        """Makes the step of plain SGD that was recorded, then the prox and the projection."""
        passes, rate = self._passes, self._update["learning_rate"]
        scaled, decay = rate / self.declared.plan.batch_size, rate * self._update["weight_decay"]
        move_by_sgd(self.original_optimizer, passes.own, passes.params, scaled, decay)
        passes.show()
        for part in self.declared.maps.values():
            part.apply(passes.params, rate)
        if self.declared.maps:
            passes.keep()

    def recorded(self, batch: int | None, rows: int, largest_norm: float, **values: Any) -> Step:
        """Returns the record of a step, with the rate and decay that are about to act."""
        return super().recorded(batch, rows, largest_norm, **values, **self._update)
