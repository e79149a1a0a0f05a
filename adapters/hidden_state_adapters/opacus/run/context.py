"""A run that has started: its record, its batches, and where its gradients come from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
from dp_accounting import NeighboringRelation

from hidden_state_accountants import Assumption, UnsupportedRunError
from hidden_state_accountants.events.loss_geometry import square_norm
from hidden_state_accountants.runs.base import Run
from hidden_state_adapters.batch_plans import BatchPlan
from hidden_state_adapters.opacus.data.batch import Taken
from hidden_state_adapters.opacus.data.loader import BatchCursor, plain_collate
from hidden_state_adapters.opacus.head.curvature import BatchCurvature, uses_curvature
from hidden_state_adapters.opacus.head.run import HeadRun, KnownHeadRun
from hidden_state_adapters.opacus.head.targets import Targets
from hidden_state_adapters.opacus.run.declared import DeclaredRun
from hidden_state_adapters.opacus.sources.base import Source
from hidden_state_adapters.opacus.sources.samples import SampledRun


@attrs.frozen(eq=False)
class RunContext:
    """What a private optimizer is given of its run.

    Attributes:
        run: Records every logical step.
        declared: What `make_private` was told.
        cursor: Says which batch the loop is working on.
        batch: Looks at the batches.
        source: Gives the gradients.
        curvature: Looks at how curved the batches are, or None.
        relation: Of the guarantee.
    """

    run: Run
    declared: DeclaredRun
    cursor: BatchCursor
    batch: Taken
    source: Source
    curvature: BatchCurvature | None
    relation: NeighboringRelation

    @classmethod
    def start(
        cls, run: Run, declared: DeclaredRun, relation: NeighboringRelation, *, is_composed: bool
    ) -> RunContext:
        """Hangs on the model what looks at it; `close` undoes it.

        Args:
            run: The record, without steps.
            declared: The run.
            relation: Of the guarantee.
            is_composed: Whether every step counts.
        """
        plan, loader = declared.plan, declared.arguments.data_loader
        cursor = BatchCursor(
            plan.num_batches,
            loader.num_workers * (loader.prefetch_factor or 0),
            counts_steps=plan.draws_every_step,
        )
        declared.frozen.hold(tells=True)
        source = _source(declared, cursor, is_composed)
        batch = Taken(plan, cursor, lambda: source.inputs)
        return cls(run, declared, cursor, batch, source, _curvature(declared), relation)

    @property
    def plan(self) -> BatchPlan:
        """The batches."""
        return self.declared.plan

    @property
    def assumptions(self) -> Iterator[Assumption]:
        """What is verified at every step, and what is taken on trust."""
        loader = self.declared.arguments.data_loader
        yield from self.batch.assumptions(plain_collate(loader), self.relation)
        yield from self.source.assumptions
        if self.curvature is not None:
            yield self.curvature.assumption
        yield from self.declared.assumptions

    def close(self) -> None:
        """Leaves the module as it was."""
        self.source.close()


def _source(declared: DeclaredRun, cursor: BatchCursor, is_composed: bool) -> Source:
    arguments, known, module = declared.arguments, declared.known_criterion, declared.inner
    options: dict[str, Any] = {"lipschitz": declared.lipschitz, "is_composed": is_composed}
    dim = 0 if arguments.opacus.get("batch_first", True) else 1
    if declared.head is None:
        if arguments.opacus.get("grad_sample_mode") == "ghost" and not is_composed:
            raise UnsupportedRunError(
                'Expected grad_sample_mode = "hooks" with what asks for the gradient of every '
                'record (mechanism, loss_geometry, after), got "ghost": Opacus leaves only sums '
                "that are clipped. Leave it out."
            )
        has_loss = declared.loss is not None
        return SampledRun(module, declared.frozen, dim=dim, has_loss=has_loss, **options)
    norm = arguments.feature_norm
    options |= {
        "feature_norm": None if norm is None else float(norm),
        "divides": arguments.loss_reduction == "mean",
        "dim": dim,
    }
    if known is None:
        has_loss = declared.loss is not None
        return HeadRun(module, declared.head, declared.frozen, has_loss=has_loss, **options)
    return KnownHeadRun(
        module,
        declared.head,
        declared.frozen,
        known=known,
        targets=Targets(known, arguments.targets, declared.plan, cursor, arguments.data_loader),
        cursor=cursor,
        maps_records=arguments.loop_maps_records,
        **options,
    )


def _curvature(declared: DeclaredRun) -> BatchCurvature | None:
    loss, head, norm = declared.loss, declared.head, declared.arguments.feature_norm
    if loss is None or norm is None or not uses_curvature(loss, declared.plan.order):
        return None
    assert head is not None
    bias = head.bias is not None and head.bias.requires_grad
    return BatchCurvature(loss, square_norm(float(norm), bias), bias, declared.plan.batch_size)
