"""Ordinary composition: the guarantee with every iterate released, valid for any loss."""

from __future__ import annotations

import math

import attrs
import dp_accounting
from dp_accounting import NeighboringRelation

from hidden_state_accountants.bounds._bound import Citation
from hidden_state_accountants.errors import UnsupportedRunError
from hidden_state_accountants.events import BatchOrder, LastIterateDpEvent
from hidden_state_accountants.guarantee import Assumption, Curve, GaussianCurve, Guarantee
from hidden_state_accountants.process import UnmetCondition
from hidden_state_accountants.standard import StandardCurve, StockEvent


@attrs.frozen
class Composition:
    """`LastIterateDpEvent.as_composition` as a bound.

    Formal guarantees: holds for any loss, domain and decay, even if all iterates are released.
    Exact (mu-GDP) for FULL and for epoch-wise orders; random batches through dp-accounting.
    """

    name: str = "composition"
    sound: bool = True
    dominated_by: tuple[str, ...] = ()
    citation: Citation = Citation("Dong, Roth, Su 2022", "composition of the steps", "1905.02383")

    def check(
        self, event: LastIterateDpEvent, relation: NeighboringRelation
    ) -> tuple[UnmetCondition, ...]:
        """The conditions that `event` does not meet; empty if the bound applies."""
        try:
            event.as_composition(relation)
        except UnsupportedRunError as error:
            return (
                UnmetCondition(
                    "composition", str(error), f"{event.batch_order.name} under {relation.name}"
                ),
            )
        return ()

    def guarantee(self, event: LastIterateDpEvent, relation: NeighboringRelation) -> Guarantee:
        """The guarantee of the composed steps.

        Raises:
            UnsupportedRunError: A condition of `check` is not met.
        """
        composed = event.as_composition(relation)
        return Guarantee(
            curve=_curve(composed, event.batch_order),
            neighboring_relation=relation,
            theorem="composition (every iterate may be released)",
            assumptions=(
                Assumption.declared("one record per person, clipped as one unit"),
                Assumption.declared("number of steps and schedules fixed in advance"),
            ),
        )


def _curve(event: dp_accounting.DpEvent, order: BatchOrder) -> Curve:
    if isinstance(event, dp_accounting.NoOpDpEvent):
        return GaussianCurve(0.0)
    inner, count = event, 1
    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        inner, count = event.event, event.count
    if isinstance(inner, dp_accounting.GaussianDpEvent):
        noise = inner.noise_multiplier
        return GaussianCurve(math.sqrt(count) / noise if noise > 0 else math.inf)
    relation = (
        NeighboringRelation.REPLACE_ONE  # the only relation of the only accountant that reads it
        if order is BatchOrder.WITHOUT_REPLACEMENT
        else NeighboringRelation.ADD_OR_REMOVE_ONE
    )
    parts = event.events if isinstance(event, dp_accounting.ComposedDpEvent) else (event,)
    return StandardCurve(tuple(StockEvent(p.event, p.count, relation) for p in parts))
