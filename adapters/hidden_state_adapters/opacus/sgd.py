"""Plain noisy SGD, of which only the last iterate is released."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import SGD, Optimizer

from hidden_state_accountants import LastIterateDpEvent, UnsupportedRunError
from hidden_state_accountants.runs.run import Step
from hidden_state_adapters.opacus.clipped_sum import ClippedSum, move_by_sgd
from hidden_state_adapters.opacus.criteria import check_convexity
from hidden_state_adapters.opacus.declared import DeclaredRun
from hidden_state_adapters.opacus.gradients import Piece
from hidden_state_adapters.opacus.norms import check_clip_margin
from hidden_state_adapters.opacus.options import RunArguments
from hidden_state_adapters.opacus.settings import (
    UnsupportedUpdateError,
    sgd_options,
    update_of,
)


class HiddenStateOptimizer(ClippedSum):
    """Noisy clipped SGD on the batches of a plan; what the engine's event describes.

    One logical step of x is

        x <- P(prox((1 - lr*weight_decay) x - lr/b * (sum of clipped gradients + noise)))

    with noise of standard deviation noise_multiplier * max_grad_norm. torch.optim.SGD applies its
    `weight_decay` to the parameters, outside the clip: that is decoupled decay. (A penalty in the
    loss is inside the clip and does not count.) prox is the proximal map of lr times the
    Regulariser of `make_private`, P its projection: on a ball for all parameters
    together, or another set.

    `HiddenStatePrivacyEngine.make_private` makes it.

    Formal guarantees:
      - Relation and released iterates: those of the recorded `LastIterateDpEvent`.
      - By construction of a known loss: the step is computed from the batch that was dealt, the
        formula of the loss and the last iterate. Of a declared one the gradients are those that
        Opacus, or the loop's backward pass at a linear head, left.
      - Checked at every step: batch and number of records; plain SGD with equal groups; the model
        is the last iterate; gradient and feature norms within their declared bounds.

    Args:
        optimizer: A plain torch.optim.SGD.
        run: See `PrivateOptimizer`.
        **kwargs: Of DPOptimizer.

    Raises:
        UnsupportedRunError: From `step`, when the run is not the declared one; the text says which
            step and what. The step is then not taken.
    """

    base_types = (SGD,)
    checked = "plain SGD with equal groups; learning rate, decay, clip norm and noise as recorded"

    def _start(self) -> None:
        self._lipschitz, self._maps = self.declared.lipschitz, tuple(self.declared.maps.values())

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
    def event(
        cls, declared: DeclaredRun, noise_multiplier: float, num_steps: int
    ) -> LastIterateDpEvent:
        """The run with the declared learning rates or the current one, and the current decay."""
        options, scale = sgd_options(declared.optimizer), declared.scale
        clip_norm = declared.arguments.clip_norm
        check_clip_margin(clip_norm, declared.lipschitz)
        rate = declared.schedule.learning_rate(num_steps, scale)
        return LastIterateDpEvent(
            noise_multiplier=noise_multiplier,
            learning_rate=options["lr"] * scale if rate is None else rate,
            weight_decay=options["weight_decay"] / scale,
            clip_norm=clip_norm,
            num_steps=num_steps,
            **cls.constants(declared),
        )

    def check_update_rule(self, optimizer: Optimizer) -> None:
        """Raises UnsupportedRunError unless it is plain SGD with equal groups."""
        self._update = update_of(self, self.declared.plan.batch_size)

    def accumulate(self, piece: Piece) -> None:
        """Adds what Opacus would, if the clip leaves the declared bound alone or is below it."""
        check_clip_margin(float(self.max_grad_norm), self._lipschitz)
        super().accumulate(piece)

    def move(self, piece: Piece) -> None:
        """The step of plain SGD, with the rate and decay that were recorded."""
        move_by_sgd(self.original_optimizer, piece.params)

    def after_move(self, piece: Piece) -> None:
        """Applies the prox with the step size of the mean gradient, and projects all parameters."""
        for part in self._maps:
            part.apply(piece.params, self._update["learning_rate"])

    def recorded(self, batch: int | None, rows: int, largest_norm: float, **values: Any) -> Step:
        """Returns the record of a step, with the rate and decay that are about to act."""
        return super().recorded(batch, rows, largest_norm, **values, **self._update)
