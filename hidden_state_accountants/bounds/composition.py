"""Ordinary composition: the guarantee with every iterate released, whatever the curvature is."""

from __future__ import annotations

import math

import attrs
import dp_accounting
from dp_accounting import NeighboringRelation

from hidden_state_accountants.bounds.base import Citation, divisor_assumption
from hidden_state_accountants.curves.base import Curve, CurveWithDelta, GaussianCurve
from hidden_state_accountants.curves.standard import StandardCurve, StockEvent, has_zero_noise
from hidden_state_accountants.errors import UnsupportedRunError
from hidden_state_accountants.events.batch_order import BatchOrder
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.guarantee import Assumption, Guarantee
from hidden_state_accountants.process.noisy_process import UnmetCondition


@attrs.frozen
class Composition:
    """`LastIterateDpEvent.as_composition` as a bound.

    Formal guarantees: holds for any curvature, domain and decay, even if all iterates are released;
    the only fact about the loss that it uses is a declared Lipschitz constant below the clip norm.
    Exact (mu-GDP) for FULL and for epoch-wise orders; random batches through dp-accounting. A cap
    on POISSON batches adds `event.cap_delta`.
    """

    name: str = "composition"
    event_type: type[dp_accounting.DpEvent] = LastIterateDpEvent
    sound: bool = True
    dominated_by: tuple[str, ...] = ()
    citation: Citation = Citation("Dong, Roth, Su 2022", "composition of the steps", "1905.02383")

    def check(
        self, event: LastIterateDpEvent, relation: NeighboringRelation
    ) -> tuple[UnmetCondition, ...]:
        """The conditions that `event` does not meet; empty if the bound applies."""
        try:
            attrs.evolve(event, max_batch_size=None).as_composition(relation)
        except UnsupportedRunError as error:
            return (
                UnmetCondition(
                    "neighboring relation",
                    str(error),
                    f"{event.batch_order.name} under {relation.name}",
                ),
            )
        return ()

    def guarantee(self, event: LastIterateDpEvent, relation: NeighboringRelation) -> Guarantee:
        """The guarantee of the composed steps.

        Raises:
            UnsupportedRunError: A condition of `check` is not met.
        """
        composed = attrs.evolve(event, max_batch_size=None).as_composition(relation)
        curve = _curve(composed, event.batch_order)
        extra = event.cap_delta(relation)
        return Guarantee(
            curve=CurveWithDelta(curve, extra) if extra else curve,
            neighboring_relation=relation,
            theorem="composition (every iterate may be released)",
            assumptions=_assumptions(event),
        )


def _assumptions(event: LastIterateDpEvent) -> tuple[Assumption, ...]:
    assumptions = [
        Assumption.declared("one record per person, clipped as one unit"),
        Assumption.declared("number of steps and schedules fixed in advance"),
        Assumption.declared(
            f"{event.batch_order.name} batches of "
            f"{event.batch_size} of {event.dataset_size} records, chosen independently of the data"
        ),
        divisor_assumption(event),
    ]
    lipschitz = None if event.loss is None else event.loss.lipschitz
    if event.clip_norm is None or (
        lipschitz is not None and (lipschitz < event.per_step("clip_norm")).any()
    ):
        assumptions.append(Assumption.declared(f"per-example gradient norms at most {lipschitz:g}"))
    return tuple(assumptions)


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
