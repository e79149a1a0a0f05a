"""What an engine knows about a run that an optimizer made by hand does not: its batches."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from dp_accounting import NeighboringRelation
from opacus.optimizers import DPOptimizer
from torch import nn

from hidden_state_accountants.events.loss_geometry import square_norm
from hidden_state_accountants.runs.base import Run
from hidden_state_adapters.batch_plans import BatchPlan
from hidden_state_adapters.opacus.data.loader import BatchCursor
from hidden_state_adapters.opacus.geometry import find_linear_head
from hidden_state_adapters.opacus.guards.base import Guard, Guards
from hidden_state_adapters.opacus.guards.batch import BatchGuard
from hidden_state_adapters.opacus.guards.collation import CollationGuard
from hidden_state_adapters.opacus.guards.curvature import CurvatureGuard, uses_curvature
from hidden_state_adapters.opacus.guards.forward import ForwardGuard
from hidden_state_adapters.opacus.guards.gradients import GradientGuard
from hidden_state_adapters.opacus.guards.head import FeatureGuard, HeadWatch
from hidden_state_adapters.opacus.guards.independence import IndependenceGuard
from hidden_state_adapters.opacus.guards.noise import NoiseGuard, NoiseMemory
from hidden_state_adapters.opacus.guards.parameters import ParameterGuard
from hidden_state_adapters.opacus.guards.records import RecordsGuard
from hidden_state_adapters.opacus.guards.schedule import ScheduleGuard
from hidden_state_adapters.opacus.guards.settings import SettingsGuard
from hidden_state_adapters.opacus.guards.untouched import UntouchedGuard
from hidden_state_adapters.opacus.head.guard import HeadRun
from hidden_state_adapters.opacus.head.targets import Targets
from hidden_state_adapters.opacus.run.declared import DeclaredRun


@attrs.frozen(eq=False)
class RunContext:
    """A run that has started: its record, its batches and the guards that hang on the model.

    Attributes:
        run: Records every logical step.
        declared: What `make_private` was told.
        cursor: Says which batch the loop is working on.
        batch: Looks at the batches.
        watch: Computes the gradients of a linear head, or looks at the loop that does.
        noise: What noise has to differ from, over all runs of the engine.
    """

    run: Run
    declared: DeclaredRun
    cursor: BatchCursor
    batch: BatchGuard
    watch: HeadRun | LoopWatch
    noise: NoiseMemory = attrs.field(repr=False)

    @classmethod
    def start(
        cls,
        run: Run,
        declared: DeclaredRun,
        noise: NoiseMemory,
        relation: NeighboringRelation,
    ) -> RunContext:
        """Hangs the guards on the model; `close` undoes it.

        Args:
            run: The record, without steps.
            declared: The run.
            noise: Of the engine.
            relation: Of the guarantee.
        """
        plan, loader = declared.plan, declared.arguments.data_loader
        cursor = BatchCursor(
            plan.num_batches,
            loader.num_workers * (loader.prefetch_factor or 0),
            counts_steps=plan.draws_every_step,
        )
        declared.frozen.hold(tells=True)
        watch: HeadRun | LoopWatch
        if declared.known_criterion is None:
            watch = LoopWatch.start(declared)
        else:
            watch = _head_run(declared, cursor)
        batch = BatchGuard(
            plan,
            cursor,
            lambda: watch.inputs,
            count=watch.begin if isinstance(watch, HeadRun) else None,
            divisor_is_public=relation is NeighboringRelation.ADD_OR_REMOVE_ONE,
        )
        return cls(run, declared, cursor, batch, watch, noise)

    def guards(
        self, optimizer: DPOptimizer, settings: SettingsGuard, own: Sequence[Guard]
    ) -> Guards:
        """All guards of the run, in the order in which they are asked.

        Args:
            optimizer: The private optimizer.
            settings: What it is set to.
            own: The guards that only its mechanism needs.
        """
        declared, watch = self.declared, self.watch
        guards: list[Guard] = [
            settings,
            ScheduleGuard(declared.schedule, declared.optimizer),
        ]
        if isinstance(watch, HeadRun):
            guards += [self.batch, watch, *own]
        else:
            guards += [watch.parameters, self.batch, *watch.others(declared), *own]
            guards += watch.bounds(declared)
        if uses_curvature(declared.loss, self.plan.order):
            if declared.arguments.feature_norm is not None:
                guards.append(self._curvature_guard(float(declared.arguments.feature_norm)))
        is_drawn_here = declared.group is None or declared.group.draws_noise
        guards.append(NoiseGuard(optimizer, self.noise, is_drawn_here=is_drawn_here))
        return Guards(guards)

    def _curvature_guard(self, feature_norm: float) -> CurvatureGuard:
        loss, head = self.declared.loss, self.declared.head
        assert loss is not None
        assert head is not None
        bias = head.bias is not None and head.bias.requires_grad
        square = square_norm(feature_norm, bias)
        size = self.plan.batch_size
        return CurvatureGuard(loss, square, bias, size, lambda: self.watch.features)

    @property
    def params(self) -> Sequence[nn.Parameter]:
        """What is trained."""
        watch = self.watch
        return watch.iterate.params if isinstance(watch, HeadRun) else watch.parameters.params

    @property
    def plan(self) -> BatchPlan:
        """The batches."""
        return self.declared.plan

    @property
    def lipschitz(self) -> float | None:
        """The declared bound on per-example gradient norms."""
        return self.declared.lipschitz

    def close(self) -> None:
        """Leaves the module and the criterion as they were."""
        self.watch.close()


def _head_run(declared: DeclaredRun, cursor: BatchCursor) -> HeadRun:
    arguments, known, head = declared.arguments, declared.known_criterion, declared.head
    assert known is not None
    assert head is not None
    assert arguments.feature_norm is not None
    targets = Targets(known, arguments.targets, declared.plan, cursor, arguments.data_loader)
    return HeadRun(
        declared.inner,
        head,
        known,
        declared.frozen,
        targets,
        cursor,
        feature_norm=float(arguments.feature_norm),
        lipschitz=declared.lipschitz,
        divides=arguments.loss_reduction == "mean",
        maps_records=arguments.loop_maps_records,
    )


@attrs.frozen(eq=False)
class LoopWatch:
    """The guards that look at a loop whose gradients Opacus computes.

    Attributes:
        parameters: Looks at the parameters between steps.
        forward: Looks at the training passes.
        independence: Looks at whether records act on each other.
        untouched: Looks at the per-example gradients between backward pass and step.
        collation: Looked at what the loader makes of records.
    """

    parameters: ParameterGuard
    forward: ForwardGuard
    independence: IndependenceGuard
    untouched: UntouchedGuard
    collation: CollationGuard

    @classmethod
    def start(cls, declared: DeclaredRun) -> LoopWatch:
        """Hangs the guards on the model."""
        inner, arguments = declared.inner, declared.arguments
        collation = CollationGuard(arguments.data_loader)
        parameters = ParameterGuard(inner, declared.optimizer)
        head = None if declared.head is None else HeadWatch(declared.head)
        # Of a linear head every gradient is a matrix product.
        is_general = declared.loss is not None and find_linear_head(inner) is None
        forward = ForwardGuard(
            inner, head, parameters, declared.frozen, checks_convolutions=is_general
        )
        dim = 0 if arguments.opacus.get("batch_first", True) else 1
        independence = IndependenceGuard(inner, forward, criterion=arguments.criterion, dim=dim)
        untouched = UntouchedGuard(inner, parameters.params, forward)
        return cls(parameters, forward, independence, untouched, collation)

    def others(self, declared: DeclaredRun) -> Sequence[Guard]:
        """Those that look at records and passes, in their order."""
        records = RecordsGuard(declared.arguments.data_loader.dataset)
        # `untouched` comes before `independence`, which makes gradients of its own.
        return (records, self.collation, self.forward, self.untouched, self.independence)

    def bounds(self, declared: DeclaredRun) -> Sequence[Guard]:
        """Those that look at norms."""
        guards: list[Guard] = []
        if declared.arguments.feature_norm is not None:
            bound = float(declared.arguments.feature_norm)
            guards.append(FeatureGuard(bound, lambda: self.forward.largest_feature_norm))
        return (*guards, GradientGuard.of_lipschitz(declared.lipschitz))

    @property
    def inputs(self) -> Sequence[torch.Tensor]:
        """The tensors that went into the model in the latest training pass."""
        return self.forward.inputs

    @property
    def features(self) -> Sequence[torch.Tensor]:
        """What went into the linear head since the last piece."""
        return self.forward.features

    def close(self) -> None:
        """Leaves the module and the criterion as they were."""
        for guard in (self.forward, self.independence, self.untouched, self.parameters):
            guard.close()
