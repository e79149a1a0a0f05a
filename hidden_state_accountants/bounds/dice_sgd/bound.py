"""DiceSGD (Zhang, Bu, Wu, Hong 2024) with every iterate released and the error hidden.

The analysis is in `curves.py` (sound) and `published.py`; docs/theory/dice_sgd.md has
the proofs.
"""

from __future__ import annotations

import math

import attrs
import dp_accounting
from dp_accounting import NeighboringRelation

from hidden_state_accountants.bounds.analysis import SOUND, check_analysis
from hidden_state_accountants.bounds.base import Citation
from hidden_state_accountants.bounds.dice_sgd.curves import sound_curve
from hidden_state_accountants.bounds.dice_sgd.published import CAVEAT, PublishedCurve
from hidden_state_accountants.errors import UnsupportedRunError
from hidden_state_accountants.events.batch_order import EPOCH_ORDERS, BatchOrder, unmet_relation
from hidden_state_accountants.events.dice_sgd import DiceSgdDpEvent
from hidden_state_accountants.guarantee import Assumption, Guarantee
from hidden_state_accountants.process.noisy_process import UnmetCondition


@attrs.frozen
class DiceSgd:
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

    analysis: str = attrs.field(default=SOUND, validator=check_analysis)
    event_type: type[dp_accounting.DpEvent] = DiceSgdDpEvent
    dominated_by: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Short, stable identifier."""
        return "dice_sgd" if self.sound else "dice_sgd_published"

    @property
    def sound(self) -> bool:
        """Whether the claim is proven."""
        return self.analysis == SOUND

    @property
    def citation(self) -> Citation:
        """The paper; the sound analysis is this project's."""
        theorem = "the algorithm; bound of this project" if self.sound else "Theorem 3.7"
        return Citation("Zhang, Bu, Wu, Hong 2024", theorem, "2311.14632")

    def check(
        self, event: DiceSgdDpEvent, relation: NeighboringRelation
    ) -> tuple[UnmetCondition, ...]:
        """The conditions that `event` does not meet; empty if the bound applies."""
        if not self.sound:
            return tuple(_unmet_by_theorem_3_7(event, relation))
        reason = unmet_relation(event.batch_order, relation)
        if reason:
            return (UnmetCondition("neighboring_relation", reason, relation.name),)
        if event.batch_order in EPOCH_ORDERS and event.dataset_size % event.batch_size:
            rest = event.dataset_size % event.batch_size
            return (
                UnmetCondition(
                    "batch_size",
                    f"a divisor of dataset_size = {event.dataset_size} for "
                    f"{event.batch_order.name} batches (drop {rest} records)",
                    str(event.batch_size),
                ),
            )
        return ()

    def guarantee(self, event: DiceSgdDpEvent, relation: NeighboringRelation) -> Guarantee:
        """The guarantee of the run.

        Raises:
            UnsupportedRunError: A condition of `check` is not met.
        """
        unmet = self.check(event, relation)
        if unmet:
            raise UnsupportedRunError(f"{self.citation}: " + "; ".join(map(str, unmet)))
        return Guarantee(
            curve=sound_curve(event, relation) if self.sound else PublishedCurve.of(event),
            neighboring_relation=relation,
            theorem=(
                "DiceSGD with a budget for the error"
                if self.sound
                else "Theorem 3.7 of Zhang, Bu, Wu, Hong 2024"
            ),
            assumptions=_assumptions(event),
            caveat="" if self.sound else CAVEAT,
            citations=(self.citation,),
        )


def _unmet_by_theorem_3_7(
    event: DiceSgdDpEvent, relation: NeighboringRelation
) -> list[UnmetCondition]:
    c1, c2 = event.clip_norm, event.error_clip_norm
    required = [
        ("batch_order", "POISSON", event.batch_order.name, event.batch_order is BatchOrder.POISSON),
        (
            "neighboring_relation",
            "ADD_OR_REMOVE_ONE or REPLACE_SPECIAL",
            relation.name,
            relation is not NeighboringRelation.REPLACE_ONE,
        ),
        ("batch_size / dataset_size", "<= 0.2", f"{event.sampling_probability:g}",
         event.sampling_probability <= 0.2),
        ("error_clip_norm", f"clip_norm = {c1:g}", f"{c2:g}", c1 == c2)
        if event.automatic
        else ("error_clip_norm", f">= clip_norm = {c1:g}", f"{c2:g}", c1 <= c2),
    ]  # fmt: skip
    return [UnmetCondition(name, need, got) for name, need, got, holds in required if not holds]


def _assumptions(event: DiceSgdDpEvent) -> tuple[Assumption, ...]:
    assumptions = [
        Assumption.declared("one record per person, clipped as one unit"),
        Assumption.declared(
            "the error of the feedback is never released, saved or logged; noise is added to the "
            "update before anything else (a moment estimate) is computed from it"
        ),
        Assumption.declared("number of steps and hyper-parameters fixed in advance"),
        Assumption.declared(
            "the start does not depend on the data and the error starts at zero: a run that goes "
            "on with the error of an earlier one is ONE event with the steps of both"
        ),
        Assumption.declared(
            f"{event.batch_order.name} batches of {event.batch_size} of {event.dataset_size} "
            "records, chosen independently of the data"
        ),
        Assumption.declared(
            f"sums of gradients are divided by the constant {event.batch_size}, which stays the "
            "same when the data set changes"
        ),
    ]
    if not event.automatic and event.gradient_bound < math.inf:
        assumptions.append(
            Assumption.declared(f"per-example gradient norms at most {event.gradient_bound:g}")
        )
    return tuple(assumptions)
