"""`make_private(optimizer_class=...)`: what is allowed for a DiceSGD run and what it means."""

from __future__ import annotations

import math
from typing import Any

import attrs
from torch import nn
from torch.optim import Optimizer

from hidden_state_accountants import DiceSgdDpEvent, UnsupportedRunError, validate
from hidden_state_adapters.opacus import dice_checks
from hidden_state_adapters.opacus import optimizer_checks as checks
from hidden_state_adapters.opacus.batch_plans import BatchPlan
from hidden_state_adapters.opacus.dice_adam import DiceAdamOptimizer
from hidden_state_adapters.opacus.dice_sgd import DiceSGDOptimizer
from hidden_state_adapters.opacus.dice_state import smallest_norm
from hidden_state_adapters.opacus.engine_dice import (
    EngineDiceAdamOptimizer,
    EngineDiceOptimizer,
    EngineDiceSGDOptimizer,
)
from hidden_state_adapters.opacus.run_context import RunContext

_CLASSES: dict[Any, type[EngineDiceOptimizer]] = {
    DiceSGDOptimizer: EngineDiceSGDOptimizer,
    DiceAdamOptimizer: EngineDiceAdamOptimizer,
}
_NOT_FOR_DICE = {
    "loss_geometry": "the bound on DiceSGD knows nothing of the loss but gradient_bound",
    "feature_norm": "the bound on DiceSGD knows no features; pass gradient_bound",
    "projection_radius": "the projection is not in the algorithm, and would not lower epsilon",
    "max_batch_size": "a capped batch is not a Poisson batch, and the bound on DiceSGD has no term "
    "for the cap. Use BatchMemoryManager where batches do not fit into memory",
    "learning_rate_schedule": "the learning rate costs nothing here, so that it need not be "
    "declared: the steps see noisy updates only",
}


@attrs.frozen(kw_only=True)
class DiceArguments:
    """The arguments of `make_private` that only DiceSGD has.

    Attributes:
        optimizer_class: DiceSGDOptimizer or DiceAdamOptimizer.
        error_max_grad_norm: C_2, or None for C_1.
        automatic: Whether both clips normalise.
        gradient_bound: G.
    """

    optimizer_class: type
    error_max_grad_norm: float | None = None
    automatic: bool = False
    gradient_bound: float = math.inf

    @property
    def name(self) -> str:
        """Of the algorithm."""
        return self.optimizer_class.__name__

    def check(
        self, module: nn.Module, optimizer: Optimizer, max_grad_norm: Any, opacus: dict[str, Any]
    ) -> None:
        """Checks everything that the optimizer checks, before anything is changed.

        Raises:
            TypeError, ValueError: An argument has an impossible value.
            UnsupportedRunError: The base optimizer is another one, or carries a state.
        """
        made = _CLASSES[self.optimizer_class]
        dice_checks.check_base(self.name, optimizer, made._base_types)
        checks.refuse_step_hooks(optimizer)
        dice_checks.refuse_per_layer(error_max_grad_norm=self.error_max_grad_norm)
        dice_checks.check_options(
            opacus.get("loss_reduction", "mean"), opacus.get("noise_generator"), False
        )
        clip_norm = validate.magnitude("max_grad_norm", max_grad_norm, positive=True)
        params = [p for p in module.parameters() if p.requires_grad]
        dice_checks.check_clip_norms(smallest_norm(params), clip_norm, self._error_clip(clip_norm))
        _refuse_state(optimizer)

    def _error_clip(self, clip_norm: float) -> float:
        if self.error_max_grad_norm is None:
            return clip_norm
        return validate.magnitude("error_max_grad_norm", self.error_max_grad_norm, positive=True)

    def event(
        self, plan: BatchPlan, max_grad_norm: Any, noise_multiplier: Any, num_steps: int
    ) -> DiceSgdDpEvent:
        """The run with this noise and number of steps.

        Raises:
            TypeError, ValueError: An argument has an impossible value.
        """
        noise = validate.magnitude("noise_multiplier", noise_multiplier)
        clip_norm = validate.magnitude("max_grad_norm", max_grad_norm, positive=True)
        return DiceSgdDpEvent(
            # ZBWH24, Algorithm 2, arXiv 2311.14632: the noise is on the mean update
            noise_std=noise * clip_norm / plan.batch_size,
            clip_norm=clip_norm,
            error_clip_norm=self._error_clip(clip_norm),
            batch_size=plan.batch_size,
            dataset_size=len(plan.records),
            num_steps=num_steps,
            batch_order=plan.order,
            gradient_bound=self.gradient_bound,
            automatic=self.automatic,
        )

    def make_optimizer(
        self, optimizer: Optimizer, context: RunContext, **kwargs: Any
    ) -> EngineDiceOptimizer:
        """The private optimizer of a run."""
        return _CLASSES[self.optimizer_class](
            optimizer,
            context=context,
            error_max_grad_norm=self.error_max_grad_norm,
            automatic=self.automatic,
            **kwargs,
        )


def dice_arguments(
    optimizer_class: Any,
    error_max_grad_norm: float | None,
    automatic: bool,
    gradient_bound: float,
    **others: Any,
) -> DiceArguments | None:
    """The arguments of a DiceSGD run; None for a run of plain SGD.

    Args:
        optimizer_class: Of `make_private`.
        error_max_grad_norm: C_2.
        automatic: As for `DiceSGDOptimizer`.
        gradient_bound: G.
        **others: Arguments of `make_private` that DiceSGD refuses unless they are None.

    Raises:
        UnsupportedRunError: Another class, or arguments that do not go together.
    """
    if optimizer_class is None:
        if error_max_grad_norm is not None or automatic or gradient_bound != math.inf:
            raise UnsupportedRunError(
                "Expected error_max_grad_norm, automatic and gradient_bound with "
                "optimizer_class=DiceSGDOptimizer or DiceAdamOptimizer only, got one of them for "
                "plain SGD. Leave them out."
            )
        return None
    if not any(optimizer_class is known for known in _CLASSES):
        raise UnsupportedRunError(
            "Expected optimizer_class = None (plain SGD), DiceSGDOptimizer or DiceAdamOptimizer, "
            f"got {optimizer_class!r}: the engine checks the steps of these only. "
            "(BlockCoordinateOptimizer is built by hand.)"
        )
    for name, value in others.items():
        if value is not None:
            raise UnsupportedRunError(
                f"Expected {name} = None with optimizer_class = {optimizer_class.__name__}, got "
                f"{value!r}: {_NOT_FOR_DICE[name]}."
            )
    return DiceArguments(
        optimizer_class=optimizer_class,
        error_max_grad_norm=error_max_grad_norm,
        automatic=automatic,
        gradient_bound=gradient_bound,
    )


def _refuse_state(optimizer: Optimizer) -> None:
    if dice_checks.holds_tensors(optimizer.state):
        raise UnsupportedRunError(
            f"Expected a {type(optimizer).__name__} that took no step, got one with a state "
            "(momentum, moments): it may hold gradients without noise, which the first steps would "
            "show. Construct a new one; engine.load_checkpoint restores the state of a run."
        )
