"""DiceSGD (Zhang, Bu, Wu, Hong 2024) with every iterate released and the error hidden.

The analysis is in `curves.py` (sound) and `published.py`; docs/theory/dice_sgd.md has
the proofs.
"""

from __future__ import annotations

import math

import attrs
from dp_accounting import NeighboringRelation

from hidden_state_accountants.bounds import assumptions
from hidden_state_accountants.bounds.base import PUBLISHED, SOUND, Bound, Citation, Proof
from hidden_state_accountants.bounds.dice_sgd.curves import sound_curve
from hidden_state_accountants.bounds.dice_sgd.published import CAVEAT, published_curve
from hidden_state_accountants.events.batch_order import BatchOrder
from hidden_state_accountants.events.dice_sgd import DiceSgdDpEvent
from hidden_state_accountants.guarantee import Assumption, Topic
from hidden_state_accountants.process.conditions import (
    Unmet,
    batch_order,
    equal_batches,
    neighboring_relation,
    unless,
)

_OF_THE_PAPER = (NeighboringRelation.ADD_OR_REMOVE_ONE, NeighboringRelation.REPLACE_SPECIAL)


@attrs.frozen
class DiceSgd(Bound):
    """DiceSGD under any order of the batches; the smaller of two bounds where both apply.

    Formal guarantees of analysis="sound":
      - Released: all iterates (or all noisy updates v). The last iterate alone gets no less.
      - Relation: REPLACE_SPECIAL and REPLACE_ONE; ADD_OR_REMOVE_ONE for FULL and POISSON.
      - (i) The participations of the record are revealed: Gaussian for each pattern, averaged over
        the patterns (for CYCLIC the worst position). (ii) POISSON, except under REPLACE_ONE: the
        clipped gradient stays a subsampled Gaussian with a share of the noise, the error's part is
        one Gaussian with the rest.
      - A gradient bound at most the clip norm makes it ordinary DP-SGD. Without a gradient bound,
        and for the automatic variant, the error can shift every later step by 2 C2.
      - Assumptions: those of `DiceSgdDpEvent`; both clips are exactly min(1, C/|v|) v.

    analysis="published" is Theorem 3.7 (automatic: the noise of Appendix C.4) solved for epsilon.
    It is false.

    Args:
        analysis: "sound" or "published".
    """

    key = "dice_sgd"
    event_type = DiceSgdDpEvent
    analyses = (SOUND, PUBLISHED)
    paper = Citation(
        "Zhang, Bu, Wu, Hong 2024", "the algorithm; bound of this project", "2311.14632"
    )
    published_theorem = "Theorem 3.7"

    def conditions(self, event: DiceSgdDpEvent, relation: NeighboringRelation) -> Unmet:
        """Neighbours that the order of the batches admits, and equal batches."""
        if not self.sound:
            return _unmet_by_theorem_3_7(event, relation)
        order = event.batch_order
        return [
            *neighboring_relation(order, relation),
            *equal_batches(order, event.batch_size, event.dataset_size),
        ]

    def prove(self, event: DiceSgdDpEvent, relation: NeighboringRelation) -> Proof:
        """A budget for the error, or what the paper claims."""
        if self.sound:
            return Proof(
                curve=sound_curve(event, relation), theorem="DiceSGD with a budget for the error"
            )
        return Proof(
            curve=published_curve(event),
            theorem="Theorem 3.7 of Zhang, Bu, Wu, Hong 2024",
            caveat=CAVEAT,
        )

    def event_assumptions(
        self, event: DiceSgdDpEvent, relation: NeighboringRelation
    ) -> tuple[Assumption, ...]:
        """The secret of the error, its start, schedules, batches, divisor, gradient bound."""
        is_averaged = event.batch_order not in (BatchOrder.FULL, BatchOrder.CYCLIC)
        assumed = [
            Assumption.declared(
                "the error of the feedback is never released, saved or logged; noise is added to "
                "the update before anything else (a moment estimate) is computed from it",
                Topic.HIDDEN_STATE,
            ),
            assumptions.fixed_in_advance("number of steps and hyper-parameters"),
            Assumption.declared(
                "the start does not depend on the data and the error starts at zero: a run that "
                "goes on with the error of an earlier one is ONE event with the steps of both",
                Topic.START,
            ),
            assumptions.batches(event, are_secret=is_averaged),
            assumptions.divisor(event.batch_size),
        ]
        if not event.automatic and event.gradient_bound < math.inf:
            assumed.append(assumptions.gradient_norm(event.gradient_bound))
        return tuple(assumed)


def _unmet_by_theorem_3_7(event: DiceSgdDpEvent, relation: NeighboringRelation) -> Unmet:
    c1, c2 = event.clip_norm, event.error_clip_norm
    rate = event.sampling_probability
    needed = f"clip_norm = {c1:g}" if event.automatic else f">= clip_norm = {c1:g}"
    is_large_enough = c1 == c2 if event.automatic else c1 <= c2
    return [
        *batch_order(event.batch_order, (BatchOrder.POISSON,)),
        *neighboring_relation(event.batch_order, relation, _OF_THE_PAPER),
        *unless(
            event.sampling_rate is None, "sampling rate", "batch_size / dataset_size", f"{rate:g}"
        ),
        *unless(rate <= 0.2, "batch_size / dataset_size", "<= 0.2", f"{rate:g}"),
        *unless(is_large_enough, "error_clip_norm", needed, f"{c2:g}"),
    ]
