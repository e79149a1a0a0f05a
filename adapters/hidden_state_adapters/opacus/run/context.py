"""What an engine knows about a run that an optimizer made by hand does not: its batches."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from dp_accounting import NeighboringRelation
from opacus.optimizers import DPOptimizer

from hidden_state_accountants.events.loss_geometry import square_norm
from hidden_state_accountants.runs.base import Run
from hidden_state_adapters.batch_plans import BatchPlan
from hidden_state_adapters.opacus.data.cursor import BatchCursor
from hidden_state_adapters.opacus.geometry import find_linear_head
from hidden_state_adapters.opacus.guards.base import Guard, Guards
from hidden_state_adapters.opacus.guards.batch import BatchGuard
from hidden_state_adapters.opacus.guards.collation import CollationGuard
from hidden_state_adapters.opacus.guards.criterion import CriterionGuard, LossGradientGuard
from hidden_state_adapters.opacus.guards.curvature import CurvatureGuard, uses_curvature
from hidden_state_adapters.opacus.guards.forward import ForwardGuard
from hidden_state_adapters.opacus.guards.gradients import GradientGuard
from hidden_state_adapters.opacus.guards.head import FeatureGuard, HeadWatch
from hidden_state_adapters.opacus.guards.independence import IndependenceGuard
from hidden_state_adapters.opacus.guards.noise import NoiseGuard, NoiseMemory
from hidden_state_adapters.opacus.guards.parameters import ParameterGuard
from hidden_state_adapters.opacus.guards.projection import ProjectionGuard
from hidden_state_adapters.opacus.guards.records import RecordsGuard
from hidden_state_adapters.opacus.guards.schedule import ScheduleGuard
from hidden_state_adapters.opacus.guards.settings import SettingsGuard
from hidden_state_adapters.opacus.guards.untouched import UntouchedGuard
from hidden_state_adapters.opacus.run.declared import DeclaredRun
from hidden_state_adapters.opacus.run.registry import ContinuationGuard


@attrs.frozen(eq=False)
class RunContext:
    """A run that has started: its record, its batches and the guards that hang on the model.

    Attributes:
        run: Records every logical step.
        declared: What `make_private` was told.
        cursor: Says which batch the loop is working on.
        parameters: Looks at the parameters between steps.
        forward: Looks at the training passes.
        independence: Looks at whether records act on each other.
        untouched: Looks at the per-example gradients between backward pass and step.
        batch: Looks at the batches.
        collation: Looked at what the loader makes of records.
        criterion: Looks at the calls of the criterion, or None if its constants were declared.
        noise: What noise has to differ from, over all runs of the engine.
    """

    run: Run
    declared: DeclaredRun
    cursor: BatchCursor
    parameters: ParameterGuard
    forward: ForwardGuard
    independence: IndependenceGuard
    untouched: UntouchedGuard
    batch: BatchGuard
    collation: CollationGuard
    criterion: CriterionGuard | None
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
        inner, known = declared.inner, declared.known_criterion
        collation = CollationGuard(declared.arguments.data_loader)
        parameters = ParameterGuard(inner, declared.optimizer)
        head = None
        if declared.head is not None:
            head = HeadWatch(declared.head, is_followed=known is not None)
        # Of a linear head every gradient is a matrix product.
        is_general = declared.loss is not None and find_linear_head(inner) is None
        frozen = declared.frozen
        frozen.hold(tells=True)
        forward = ForwardGuard(inner, head, parameters, frozen, checks_convolutions=is_general)
        plan, loader = declared.plan, declared.arguments.data_loader
        cursor = BatchCursor(
            plan.num_batches,
            loader.num_workers * (loader.prefetch_factor or 0),
            counts_steps=plan.draws_every_step,
        )
        criterion = None
        if known is not None and head is not None:
            criterion = CriterionGuard(
                known,
                forward,
                head,
                lambda: () if cursor.taken is None else cursor.taken.tensors,
                divides=declared.arguments.loss_reduction == "mean",
            )
        arguments = declared.arguments
        independence = IndependenceGuard(
            inner,
            forward,
            criterion=arguments.criterion,
            dim=0 if arguments.opacus.get("batch_first", True) else 1,
        )
        is_add_or_remove = relation is NeighboringRelation.ADD_OR_REMOVE_ONE
        return cls(
            run=run,
            declared=declared,
            cursor=cursor,
            parameters=parameters,
            forward=forward,
            independence=independence,
            untouched=UntouchedGuard(inner, parameters.params, forward),
            batch=BatchGuard(
                plan, cursor, lambda: forward.inputs, divisor_is_public=is_add_or_remove
            ),
            collation=collation,
            criterion=criterion,
            noise=noise,
        )

    def guards(
        self, optimizer: DPOptimizer, settings: SettingsGuard, own: Sequence[Guard]
    ) -> Guards:
        """All guards of the run, in the order in which they are asked.

        Args:
            optimizer: The private optimizer.
            settings: What it is set to.
            own: The guards that only its mechanism needs.
        """
        arguments, criterion = self.declared.arguments, self.criterion
        guards: list[Guard] = [
            ContinuationGuard(self.run),
            settings,
            ScheduleGuard(self.declared.schedule, self.declared.optimizer),
            self.parameters,
            self.batch,
            RecordsGuard(arguments.data_loader.dataset),
            self.collation,
            self.forward,
            self.untouched,  # before the next one, which makes gradients of its own
            self.independence,
            *([] if criterion is None else [criterion]),
            *own,
        ]
        if arguments.feature_norm is not None:
            largest = self._largest_feature_norm
            guards.append(FeatureGuard(float(arguments.feature_norm), largest))
            if uses_curvature(self.declared.loss, self.plan.order):
                guards.append(self._curvature_guard(float(arguments.feature_norm)))
        guards.append(GradientGuard.of_lipschitz(self.lipschitz))
        if criterion is not None:
            guards.append(LossGradientGuard(criterion))
        if self.declared.projection is not None:
            guards.append(ProjectionGuard(self.parameters.params, self.declared.projection))
        group = self.declared.group
        is_drawn_here = group is None or group.draws_noise
        guards.append(NoiseGuard(optimizer, self.noise, is_drawn_here=is_drawn_here))
        return Guards(guards)

    def _curvature_guard(self, feature_norm: float) -> CurvatureGuard:
        loss, head = self.declared.loss, self.declared.head
        assert loss is not None
        assert head is not None
        bias = head.bias is not None and head.bias.requires_grad
        square = square_norm(feature_norm, bias)
        size = self.plan.batch_size
        return CurvatureGuard(loss, square, bias, size, lambda: self.forward.features)

    def _largest_feature_norm(self) -> torch.Tensor | None:
        return self.forward.largest_feature_norm

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
        hung = (self.forward, self.independence, self.untouched, self.criterion, self.parameters)
        for guard in hung:
            if guard is not None:
                guard.close()
