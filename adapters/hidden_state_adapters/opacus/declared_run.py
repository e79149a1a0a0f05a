"""What `make_private` was told about a run, checked, before anything is changed."""

from __future__ import annotations

import math
from typing import Any

import attrs
from dp_accounting import NeighboringRelation
from opacus.grad_sample import AbstractGradSampleModule
from opacus.optimizers import DPOptimizer
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from hidden_state_accountants import (
    BatchOrder,
    DiceSgdDpEvent,
    LastIterateDpEvent,
    LossGeometry,
    RunRecorder,
)
from hidden_state_adapters.opacus import arguments
from hidden_state_adapters.opacus import optimizer_checks as checks
from hidden_state_adapters.opacus.batch_plans import BatchPlan
from hidden_state_adapters.opacus.criterion_watch import CriterionWatch
from hidden_state_adapters.opacus.cursor import BatchCursor
from hidden_state_adapters.opacus.declared_schedule import DeclaredSchedule, declared_schedule
from hidden_state_adapters.opacus.dice_arguments import DiceArguments, dice_arguments
from hidden_state_adapters.opacus.dice_recorder import DiceRecorder
from hidden_state_adapters.opacus.engine_dice import EngineDiceOptimizer
from hidden_state_adapters.opacus.forward_watch import ForwardWatch, check_batch_norm
from hidden_state_adapters.opacus.geometry import find_linear_head
from hidden_state_adapters.opacus.ghost_engine import check_ghost_arguments
from hidden_state_adapters.opacus.head_watch import HeadWatch
from hidden_state_adapters.opacus.noise_watch import NoiseWatch
from hidden_state_adapters.opacus.optimizer import HiddenStateOptimizer
from hidden_state_adapters.opacus.parameter_watch import ParameterWatch, check_parameters
from hidden_state_adapters.opacus.record_order import plan_batches
from hidden_state_adapters.opacus.recorders import Recorder
from hidden_state_adapters.opacus.run_context import RunContext


@attrs.frozen(kw_only=True)
class DeclaredRun:
    """The checked arguments of one `make_private`; see there."""

    module: nn.Module
    inner: nn.Module  # without Opacus' wrapper
    optimizer: Optimizer  # without Opacus' wrapper
    data_loader: DataLoader
    max_grad_norm: float
    plan: BatchPlan
    max_batch_size: int | None
    loss: LossGeometry | None
    head: nn.Linear | None
    criterion: Any
    watched_criterion: nn.Module | None
    feature_norm: float | None
    projection_radius: float | None
    diameter: float
    schedule: DeclaredSchedule
    dice: DiceArguments | None  # None: plain SGD
    opacus_kwargs: dict[str, Any]

    @property
    def loss_reduction(self) -> str:
        """Opacus' loss_reduction."""
        return str(self.opacus_kwargs.get("loss_reduction", "mean"))

    @property
    def lipschitz(self) -> float | None:
        """The declared bound on per-example gradient norms."""
        return None if self.loss is None else self.loss.lipschitz

    def event(self, noise_multiplier: float, num_steps: int) -> LastIterateDpEvent | DiceSgdDpEvent:
        """The run with the declared learning rates or the current one, and the current decay.

        Raises:
            TypeError, ValueError: A hyper-parameter has an impossible value.
        """
        if self.dice is not None:
            return self.dice.event(self.plan, self.max_grad_norm, noise_multiplier, num_steps)
        options = checks.sgd_options(self.optimizer)
        # The event divides by b; a "sum" optimizer does not.
        scale = 1 if self.loss_reduction == "mean" else self.plan.batch_size
        rate = self.schedule.learning_rate(num_steps, scale)
        return LastIterateDpEvent(
            noise_multiplier=noise_multiplier,
            learning_rate=options["lr"] * scale if rate is None else rate,
            weight_decay=options["weight_decay"] / scale,
            clip_norm=self.max_grad_norm,
            num_steps=num_steps,
            **self._declared(),
        )

    def _declared(self) -> dict[str, Any]:
        return {
            "batch_order": self.plan.order,
            "batch_size": self.plan.batch_size,
            "dataset_size": len(self.plan.records),
            "loss": self.loss,
            "domain_diameter": self.diameter,
            "max_batch_size": self.max_batch_size,
        }

    def start(self, noise: NoiseWatch, event: LastIterateDpEvent | DiceSgdDpEvent) -> RunContext:
        """Sets the watches and a fresh recorder; `RunContext.remove_hooks` undoes it.

        Args:
            noise: Of the engine.
            event: What `event` says of the run's noise.
        """
        recorder: Recorder
        if isinstance(event, DiceSgdDpEvent):
            recorder = DiceRecorder(event)
        else:
            recorder = RunRecorder(**self._declared())
        parameters = ParameterWatch(self.inner, self.optimizer)
        criterion = self.watched_criterion
        head = None
        if self.head is not None:
            head = HeadWatch(self.inner, self.head, is_output=criterion is not None)
        # Of a linear head every gradient is a matrix product.
        is_general = self.loss is not None and find_linear_head(self.inner) is None
        forward = ForwardWatch(self.inner, head, parameters, checks_convolutions=is_general)
        loader = self.data_loader
        return RunContext(
            recorder=recorder,
            plan=self.plan,
            cursor=BatchCursor(
                self.plan.num_batches,
                loader.num_workers * (loader.prefetch_factor or 0),
                counts_steps=self.plan.draws_every_step,
            ),
            parameters=parameters,
            forward=forward,
            noise=noise,
            criterion=None if criterion is None else CriterionWatch(criterion, forward),
            lipschitz=self.lipschitz,
            feature_norm=self.feature_norm,
            projection_radius=self.projection_radius,
            schedule=self.schedule,
        )

    def make_optimizer(
        self, optimizer: Optimizer, context: RunContext, **kwargs: Any
    ) -> HiddenStateOptimizer | EngineDiceOptimizer:
        """The private optimizer of the run that `start` started."""
        if self.dice is not None:
            return self.dice.make_optimizer(optimizer, context, **kwargs)
        return HiddenStateOptimizer(optimizer, context=context, **kwargs)


def declare_run(
    relation: NeighboringRelation,
    *,
    module: nn.Module,
    optimizer: Optimizer,
    data_loader: DataLoader,
    max_grad_norm: float,
    batch_order: BatchOrder | str = BatchOrder.CYCLIC,
    criterion: Any = None,
    loss_geometry: LossGeometry | str | None = None,
    feature_norm: float | None = None,
    projection_radius: float | None = None,
    poisson_sampling: bool | None = None,
    max_batch_size: int | None = None,
    order_seed: int | None = None,
    order_is_secret: bool = False,
    optimizer_class: type | None = None,
    error_max_grad_norm: float | None = None,
    automatic: bool = False,
    gradient_bound: float = math.inf,
    learning_rate_schedule: Any = None,
    num_steps: int | None = None,
    **opacus_kwargs: Any,
) -> DeclaredRun:
    """Checks the arguments of `HiddenStatePrivacyEngine.make_private`; see there."""
    order = arguments.batch_order_of(batch_order, poisson_sampling)
    arguments.check_order_seed(order, order_seed, order_is_secret)
    arguments.refuse_add_or_remove(relation, order)
    dice = dice_arguments(
        optimizer_class,
        error_max_grad_norm,
        automatic,
        gradient_bound,
        loss_geometry=loss_geometry,
        feature_norm=feature_norm,
        projection_radius=projection_radius,
        max_batch_size=max_batch_size,
        learning_rate_schedule=learning_rate_schedule,
    )
    arguments.check_opacus_arguments(opacus_kwargs, order)
    check_ghost_arguments(opacus_kwargs, criterion)
    arguments.refuse_per_layer_clipping(max_grad_norm)
    if isinstance(optimizer, DPOptimizer):
        optimizer = optimizer.original_optimizer
    inner = module._module if isinstance(module, AbstractGradSampleModule) else module
    arguments.refuse_distributed(module)
    if dice is None:
        checks.sgd_options(optimizer)
    check_parameters(inner, optimizer)
    if dice is not None:
        dice.check(inner, optimizer, max_grad_norm, opacus_kwargs)
    check_batch_norm(inner)
    reduction = opacus_kwargs.get("loss_reduction", "mean")
    loss, head = arguments.resolve_loss(inner, criterion, loss_geometry, feature_norm, reduction)
    declared = DeclaredRun(
        module=module,
        inner=inner,
        optimizer=optimizer,
        data_loader=data_loader,
        max_grad_norm=max_grad_norm,
        plan=plan_batches(
            data_loader,
            order,
            max_batch_size=max_batch_size,
            order_seed=order_seed,
            order_is_secret=order_is_secret,
        ),
        max_batch_size=max_batch_size,
        loss=loss,
        head=head,
        criterion=criterion,
        watched_criterion=criterion if loss_geometry == "auto" else None,
        feature_norm=feature_norm,
        projection_radius=projection_radius,
        diameter=arguments.domain_diameter(inner, projection_radius),
        schedule=declared_schedule(learning_rate_schedule, num_steps),
        dice=dice,
        opacus_kwargs=opacus_kwargs,
    )
    arguments.check_covered(declared.event(1.0, declared.schedule.num_steps or 1), relation)
    if dice is None:
        checks.check_clip_margin(float(max_grad_norm), declared.lipschitz)
    return declared
