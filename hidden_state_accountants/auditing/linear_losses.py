r"""The attack by linear losses: constant gradients as long as the bound, which nothing contracts.

>>> import hidden_state_accountants as hsa
>>> from dp_accounting import NeighboringRelation
>>> from hidden_state_accountants.auditing import LinearLosses
>>> run = hsa.LastIterateDpEvent(
...     noise_multiplier=4.0, learning_rate=0.5, clip_norm=1.0, batch_size=8, dataset_size=8,
...     num_steps=16, batch_order="full", loss=hsa.LossGeometry.convex(1.0))
>>> evidence = LinearLosses().evidence(run, NeighboringRelation.REPLACE_SPECIAL, print)
>>> round(evidence.renyi(2.0), 12)  # mu = sqrt(16) / 4, as if every iterate were released
1.0
"""

from __future__ import annotations

import attrs
import dp_accounting
from dp_accounting import NeighboringRelation

from hidden_state_accountants.auditing._half_lines import HalfLines
from hidden_state_accountants.auditing._participation import shift_law
from hidden_state_accountants.auditing._released import mu_by_position, worst_position
from hidden_state_accountants.auditing.evidence import (
    Evidence,
    Progress,
    relation_conditions,
    strongest,
)
from hidden_state_accountants.curves.gaussian import delta_from_mu
from hidden_state_accountants.events.batch_order import BatchOrder, sensitivity_in_clip_norms
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.events.loss_geometry import LossKind
from hidden_state_accountants.process.conditions import UnmetCondition

_DETERMINISTIC = (BatchOrder.FULL, BatchOrder.CYCLIC)


@attrs.frozen
class LinearLosses:
    r"""Every per-example loss is linear; the record's gradient is as long as the bound allows.

    Linear losses are convex, weakly convex, smooth, Hölder and generalized linear with any
    constants. Where every batch holds the record they reach composition, unless weight decay
    contracts: this is what refutes a claim that hiding iterates helps by itself.

    Formal guarantees:
      - FULL, CYCLIC: the exact mu of all releases together, at the worst position of the record.
      - Random orders: lower bounds for the exact law of the shift of the last iterate (with
        releases: of a weighted sum of the increments between them). The record's gradient stands
        against minus itself (REPLACE_ONE) or none. In batches of a fixed size it may point away
        from a common gradient of the other records: the pairs of shifts, in gradient bounds, are
        (2, 0) and (1, -1) for REPLACE_ONE, (1, 0) and (2, 1) otherwise. Schedules and decay:
        shifts are rounded to a lattice, downwards on one side and upwards on the other.
      - Strongly convex losses are not linear; where clipping acts their clipped gradients are
        constant except with a probability that vanishes as their minima move away. The bound is
        the supremum over such runs.

    Source: the law of a sum of Gaussians; this project.
    """

    name: str = "linear_losses"
    event_type: type[dp_accounting.DpEvent] = LastIterateDpEvent

    def check(
        self, event: LastIterateDpEvent, relation: NeighboringRelation
    ) -> tuple[UnmetCondition, ...]:
        """Why the attack does not apply; empty if it does."""
        unmet = list(relation_conditions(event, relation))
        if event.domain_diameter < float("inf"):
            unmet.append(
                UnmetCondition(
                    "law of the iterates", "no projection", f"diameter {event.domain_diameter:g}"
                )
            )
        loss = event.loss
        strongly_convex = loss is not None and loss.kind is LossKind.STRONGLY_CONVEX
        if loss is not None and strongly_convex and loss.lipschitz is not None:
            unmet.append(
                UnmetCondition(
                    "linear losses in the class",
                    "losses that are not strongly convex, or clipped ones of any gradient norm",
                    repr(loss),
                )
            )
        if event.batch_order not in _DETERMINISTIC and _has_a_silent_step(event):
            unmet.append(UnmetCondition("noise", "noise_multiplier > 0 at every step", "0"))
        return tuple(unmet)

    def evidence(
        self, event: LastIterateDpEvent, relation: NeighboringRelation, progress: Progress
    ) -> Evidence:
        """The bounds of the strongest such run."""
        if event.batch_order in _DETERMINISTIC:
            return self._deterministic(event, relation)
        return self._random(event, relation, progress)

    def _deterministic(self, event: LastIterateDpEvent, relation: NeighboringRelation) -> Evidence:
        position = worst_position(event)
        factor = sensitivity_in_clip_norms(event.batch_order, relation)
        mu = factor * float(mu_by_position(event)[position])
        where = "every batch" if event.batch_order is BatchOrder.FULL else f"batch {position + 1}"
        where += "" if event.batches_per_epoch == 1 else f" of {event.batches_per_epoch}"
        return Evidence(
            attack=self.name,
            strength="exact",
            witness=f"linear losses; a record in {where} against {_neighbour(relation)}: "
            f"mu = {mu:.6g}",
            delta=lambda epsilon: delta_from_mu(mu, epsilon),
            renyi=lambda order: order * mu**2 / 2,
        )

    def _random(
        self, event: LastIterateDpEvent, relation: NeighboringRelation, progress: Progress
    ) -> Evidence:
        down = shift_law(event)
        found = []
        for here, there in _shift_pairs(event.batch_order, relation):
            progress(f"{self.name}: shifts of {here} against {there} gradient bounds")
            # Downwards from a positive shift is upwards from a negative one.
            up = shift_law(event, up=True) if there > 0 else down
            lines = HalfLines(down, up, here, there)
            found.append(
                Evidence(
                    attack=self.name,
                    strength="certified",
                    witness=f"linear losses, {event.batch_order.name}; a record against "
                    f"{_neighbour(relation)}: shifts of {here} and {there} gradient bounds "
                    "wherever it takes part",
                    delta=lines.delta,
                    renyi=lines.renyi,
                )
            )
        return strongest(found)


def _has_a_silent_step(event: LastIterateDpEvent) -> bool:
    noise = event.noise_std_on_sum()
    return bool(((event.per_step("learning_rate") > 0) & (noise == 0)).any())


def _neighbour(relation: NeighboringRelation) -> str:
    if relation is NeighboringRelation.REPLACE_ONE:
        return "one with the opposite gradient"
    return "none"


def _shift_pairs(order: BatchOrder, relation: NeighboringRelation) -> list[tuple[int, int]]:
    if order is BatchOrder.POISSON:
        return [(1, -1)] if relation is NeighboringRelation.REPLACE_ONE else [(1, 0)]
    if relation is NeighboringRelation.REPLACE_ONE:
        return [(2, 0), (1, -1)]
    return [(1, 0), (2, 1)]
