"""Conditions that theorems ask of a run: each function lists what is not met."""

from __future__ import annotations

import math
from collections.abc import Collection

import attrs
from dp_accounting import NeighboringRelation

from hidden_state_accountants.events.batch_order import BatchOrder, DealtEvent
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.events.loss_geometry import LossGeometry, LossKind


@attrs.frozen
class UnmetCondition:
    """A condition of a theorem, what it needs, and what the run has."""

    condition: str
    required: str
    actual: str

    def __str__(self) -> str:
        if self.required.endswith("."):  # says it all
            return f"{self.condition}: {self.required}"
        return f"{self.condition}: needs {self.required}, got {self.actual}"


Unmet = list[UnmetCondition]
"""Empty if the condition is met."""


def unless(is_met: bool, condition: str, required: str, actual: str) -> Unmet:
    """A condition of one theorem alone; those that several share have functions below."""
    return [] if is_met else [UnmetCondition(condition, required, actual)]


def _any_of(names: Collection[BatchOrder] | Collection[NeighboringRelation]) -> str:
    return " or ".join(name.name for name in names)


def batch_order(event: DealtEvent, orders: Collection[BatchOrder]) -> Unmet:
    """The batches are dealt in one of `orders`."""
    order = event.batch_order
    return unless(order in orders, "batch order", f"{_any_of(orders)} batches", order.name)


def neighboring_relation(
    event: DealtEvent,
    relation: NeighboringRelation,
    relations: Collection[NeighboringRelation] = tuple(NeighboringRelation),
) -> Unmet:
    """The relation makes sense for the batches and records of a run; is one of `relations`."""
    reason = event.unmet_relation(relation)
    if reason is None and relation not in relations:
        reason = _any_of(relations)
    return unless(reason is None, "neighboring relation", reason or "", relation.name)


def equal_batches(event: DealtEvent) -> Unmet:
    """Every batch of an epoch has the same number of records."""
    reason = event.unequal_batches()
    rest = f"a remainder of {event.dataset_size % event.batch_size}"
    return unless(reason is None, "equal batches", reason or "", rest)


def batches(
    event: LastIterateDpEvent,
    relation: NeighboringRelation,
    orders: Collection[BatchOrder] = tuple(BatchOrder),
    relations: Collection[NeighboringRelation] = tuple(NeighboringRelation),
) -> Unmet:
    """All that is asked of the batches of a run and of its neighbours."""
    return [
        *batch_order(event, orders),
        *neighboring_relation(event, relation, relations),
        *equal_batches(event),
    ]


def declared_loss(event: LastIterateDpEvent) -> Unmet:
    """Something is known about the per-example loss."""
    is_declared = event.loss is not None
    return unless(is_declared, "loss geometry", "a declared LossGeometry (loss=)", "loss=None")


def linear_modulus(loss: LossGeometry | None) -> Unmet:
    """The gradient of the loss, if one is declared, is Lipschitz."""
    if loss is None or loss.kind is not LossKind.HOELDER or loss.exponent == 1:
        return []
    needed = "a Lipschitz gradient (exponent 1)"
    return [UnmetCondition("linear modulus", needed, f"exponent {loss.exponent:g}")]


def hoelder_gradient(loss: LossGeometry | None) -> Unmet:
    """The loss, if one is declared, is one with a Hölder gradient."""
    if loss is None or loss.kind is LossKind.HOELDER:
        return []
    return [UnmetCondition("loss", "LossGeometry.hoelder", f"a {loss.kind.value} loss")]


def bounded_domain(event: LastIterateDpEvent) -> Unmet:
    """Every iterate is projected on a bounded set."""
    is_bounded = event.domain_diameter < math.inf
    return unless(is_bounded, "domain_diameter", "a bounded domain", "inf")


def constant_parameters(event: LastIterateDpEvent) -> Unmet:
    """No hyper-parameter changes during the run."""
    needed = "the same hyper-parameters in every step"
    return unless(not event.has_schedules, "schedules", needed, "a schedule")


def last_iterate_alone(event: LastIterateDpEvent) -> Unmet:
    """No iterate but the last one is released."""
    more = f"{len(event.release_steps)} more (release_steps)"
    needed = "the last iterate to be the only one released"
    return unless(not event.release_steps, "releases", needed, more)
