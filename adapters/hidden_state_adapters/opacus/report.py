"""The assumptions of a guarantee with what the adapter checks and takes on trust."""

from __future__ import annotations

from dp_accounting import NeighboringRelation

from hidden_state_accountants import Assumption, BatchOrder, Guarantee
from hidden_state_accountants.guarantee import Status, merge_assumptions
from hidden_state_adapters.opacus.run_context import RunContext


def run_assumptions(guarantee: Guarantee, context: RunContext | None) -> tuple[Assumption, ...]:
    """The assumptions of the guarantee with what the adapter checks and takes on trust.

    Args:
        guarantee: Of all runs.
        context: Of the current run, if there is one.
    """
    checked = [
        "plain SGD with equal groups; learning rate, decay, clip norm and noise as recorded",
        "parameters in float32 or float64, changed by the private optimizer only; no batch "
        "statistics, buffers unchanged",
    ]
    public = "batch size, hyper-parameters"
    if context is not None:
        plan = context.plan
        checked.insert(0, plan.description)
        if context.criterion is not None:
            checked.append(
                "the criterion called once on all outputs, a target for each; no other loss"
            )
        if context.lipschitz is not None:
            checked.append(f"per-example gradient norms at most {context.lipschitz:g}")
        if context.feature_norm is not None:
            checked.append(f"feature norms at most {context.feature_norm:g}")
        if context.projection_radius is not None:
            radius = context.projection_radius
            checked.append(f"all parameters together projected on the ball of radius {radius:g}")
        if not plan.is_secret:
            public = f"order of the batches, {public}"
    return merge_assumptions(
        [
            tuple(Assumption.checked(text) for text in checked),
            declared_by_user(context, guarantee.neighboring_relation),
            tuple(
                a
                for a in guarantee.assumptions
                if "projected on" not in a.text and a.status is not Status.PUBLIC
            ),
            (Assumption.public(public),),
        ]
    )


def declared_by_user(
    context: RunContext | None, relation: NeighboringRelation
) -> tuple[Assumption, ...]:
    """What the adapter cannot see of a run in any way, in addition to what its bound assumes."""
    declared = [
        "every per-example gradient is that of the loss at one record of the delivered batch",
        "the initial model and the order of the records do not depend on the records",
    ]
    if context is not None:
        plan = context.plan
        if context.forward.has_frozen_backbone:
            declared.append(
                "the frozen part of the model is public: it was not fitted to the private records, "
                "and it maps every record by itself"
            )
        if plan.is_secret and plan.is_seeded:
            declared.append("order_seed is random, and nobody else ever knows it")
        if plan.order is BatchOrder.POISSON:
            declared.append("the sizes of the batches are shown to nobody")
            if relation is NeighboringRelation.ADD_OR_REMOVE_ONE:
                declared.append("the sampling probability b/n is a public constant")
    return tuple(Assumption.declared(text) for text in declared)
