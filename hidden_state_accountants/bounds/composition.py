"""Ordinary composition: the guarantee with every iterate released, whatever the curvature is."""

from __future__ import annotations

import math

import attrs
import dp_accounting
from dp_accounting import NeighboringRelation

from hidden_state_accountants.bounds import assumptions
from hidden_state_accountants.bounds.base import Bound, Citation, Proof
from hidden_state_accountants.bounds.sampled_steps import composed_steps
from hidden_state_accountants.curves.base import Curve, GaussianCurve, with_delta
from hidden_state_accountants.events.batch_order import BatchOrder
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.guarantee import Assumption
from hidden_state_accountants.process.conditions import (
    Unmet,
    equal_batches,
    relation_of_run,
    released_curvature,
)


@attrs.frozen
class Composition(Bound):
    """The composition of the steps, as `LastIterateDpEvent.as_composition` has it.

    Formal guarantees: holds for any curvature, domain and decay, even if all iterates are released;
    the only fact about the loss that it uses is a declared Lipschitz constant below the clip norm.
    Exact (mu-GDP) for FULL and for epoch-wise orders; random batches by the privacy losses of their
    steps, also under relations that no standard event expresses. A cap on POISSON batches adds
    `event.cap_delta`.
    """

    key = "composition"
    event_type = LastIterateDpEvent
    paper = Citation("Dong, Roth, Su 2022", "composition of the steps", "1905.02383")

    def conditions(self, event: LastIterateDpEvent, relation: NeighboringRelation) -> Unmet:
        """Neighbours that the order of the batches admits, and equal batches."""
        return [
            *relation_of_run(event, relation),
            *equal_batches(event.batch_order, event.batch_size, event.dataset_size),
            *released_curvature(event, relation),
        ]

    def prove(self, event: LastIterateDpEvent, relation: NeighboringRelation) -> Proof:
        """The composed steps."""
        is_random = event.batch_order in (BatchOrder.POISSON, BatchOrder.WITHOUT_REPLACEMENT)
        if is_random:
            curve = composed_steps(event, relation)
        else:
            curve = _curve(event.as_composition(relation, for_one_position=True))
        extra = event.cap_delta(relation)
        return Proof(
            curve=with_delta(curve, extra),
            theorem="composition (every iterate may be released)",
        )

    def event_assumptions(
        self, event: LastIterateDpEvent, relation: NeighboringRelation
    ) -> tuple[Assumption, ...]:
        """Schedules, batches, divisor; a gradient bound where it lies below the clip norm."""
        is_amplified = event.batch_order in (BatchOrder.POISSON, BatchOrder.WITHOUT_REPLACEMENT)
        assumed = [
            assumptions.fixed_in_advance("number of steps and schedules"),
            assumptions.batches(event, are_secret=is_amplified),
            assumptions.divisor(event.batch_size),
        ]
        lipschitz = None if event.loss is None else event.loss.lipschitz
        if lipschitz is not None and (
            event.clip_norm is None
            or (lipschitz < event.one_step_if_constant().per_step("clip_norm")).any()
        ):
            assumed.append(assumptions.gradient_norm(lipschitz))
        return tuple(assumed)


def _curve(event: dp_accounting.DpEvent) -> Curve:
    """Of Gaussian mechanisms."""
    if isinstance(event, dp_accounting.NoOpDpEvent):
        return GaussianCurve(0.0)
    inner, count = event, 1
    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        inner, count = event.event, event.count
    noise = inner.noise_multiplier
    return GaussianCurve(math.sqrt(count) / noise if noise > 0 else math.inf)
