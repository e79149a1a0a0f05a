"""Ordinary composition: the guarantee with every iterate released, whatever the curvature is."""

from __future__ import annotations

import math

import attrs
import dp_accounting
from dp_accounting import NeighboringRelation

from hidden_state_accountants.bounds import assumptions
from hidden_state_accountants.bounds.base import Bound, Citation, Proof
from hidden_state_accountants.curves.base import Curve, CurveWithDelta, GaussianCurve
from hidden_state_accountants.curves.standard import StandardCurve, StockEvent, has_zero_noise
from hidden_state_accountants.errors import UnsupportedRunError
from hidden_state_accountants.events.batch_order import BatchOrder
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.guarantee import Assumption
from hidden_state_accountants.process.conditions import (
    Unmet,
    UnmetCondition,
    equal_batches,
    neighboring_relation,
)


@attrs.frozen
class Composition(Bound):
    """`LastIterateDpEvent.as_composition` as a bound.

    Formal guarantees: holds for any curvature, domain and decay, even if all iterates are released;
    the only fact about the loss that it uses is a declared Lipschitz constant below the clip norm.
    Exact (mu-GDP) for FULL and for epoch-wise orders; random batches through dp-accounting. A cap
    on POISSON batches adds `event.cap_delta`.
    """

    key = "composition"
    event_type = LastIterateDpEvent
    paper = Citation("Dong, Roth, Su 2022", "composition of the steps", "1905.02383")

    def conditions(self, event: LastIterateDpEvent, relation: NeighboringRelation) -> Unmet:
        """A standard event expresses the run."""
        order = event.batch_order
        unmet = [
            *neighboring_relation(order, relation),
            *equal_batches(order, event.batch_size, event.dataset_size),
        ]
        if unmet:
            return unmet
        try:
            _composed(event, relation)
        except UnsupportedRunError as error:
            actual = f"{order.name} under {relation.name}"
            return [UnmetCondition("neighboring relation", str(error), actual)]
        return []

    def prove(self, event: LastIterateDpEvent, relation: NeighboringRelation) -> Proof:
        """The composed steps."""
        curve = _curve(_composed(event, relation), event.batch_order)
        extra = event.cap_delta(relation)
        return Proof(
            curve=CurveWithDelta(curve, extra) if extra else curve,
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
            event.clip_norm is None or (lipschitz < event.per_step("clip_norm")).any()
        ):
            assumed.append(assumptions.gradient_norm(lipschitz))
        return tuple(assumed)


def _composed(event: LastIterateDpEvent, relation: NeighboringRelation) -> dp_accounting.DpEvent:
    """Without the cap, whose delta is added."""
    return attrs.evolve(event, max_batch_size=None).as_composition(relation, for_one_position=True)


def _curve(event: dp_accounting.DpEvent, order: BatchOrder) -> Curve:
    if isinstance(event, dp_accounting.NoOpDpEvent):
        return GaussianCurve(0.0)
    inner, count = event, 1
    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        inner, count = event.event, event.count
    if isinstance(inner, dp_accounting.GaussianDpEvent):
        noise = inner.noise_multiplier
        return GaussianCurve(math.sqrt(count) / noise if noise > 0 else math.inf)
    if has_zero_noise(event):
        return GaussianCurve(math.inf)
    relation = (
        NeighboringRelation.REPLACE_ONE  # the only relation of the only accountant that reads it
        if order is BatchOrder.WITHOUT_REPLACEMENT
        else NeighboringRelation.ADD_OR_REMOVE_ONE
    )
    parts = event.events if isinstance(event, dp_accounting.ComposedDpEvent) else (event,)
    return StandardCurve(tuple(StockEvent(p.event, p.count, relation) for p in parts))
