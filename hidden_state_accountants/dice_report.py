"""What a DiceSGD run costs, in words: proven, and as the paper claims."""

from __future__ import annotations

import math

from dp_accounting import NeighboringRelation

from hidden_state_accountants.bounds.dice_sgd import DiceSgd
from hidden_state_accountants.dice_sgd_event import DiceSgdDpEvent
from hidden_state_accountants.guarantee import Guarantee


def text_report(
    event: DiceSgdDpEvent,
    guarantee: Guarantee,
    delta: float,
    *,
    update_rule: str,
    checked: str,
) -> str:
    """About a dozen lines to paste.

    Args:
        event: The run.
        guarantee: Of `DiceSgdAccountant` for it.
        delta: In [0, 1].
        update_rule: Name of the optimizer that the noisy updates go through.
        checked: What the adapter checks at every step.
    """
    relation = guarantee.neighboring_relation
    bound = "none declared" if event.gradient_bound == math.inf else f"{event.gradient_bound:g}"
    clip = "normalised to" if event.automatic else "clip norm"
    return "\n".join(
        [
            "Privacy of all iterates (the error of the feedback stays hidden)",
            f"epsilon = {guarantee.epsilon(delta):.4f} at delta = {delta:g}",
            f"neighboring relation: {relation.name}",
            f"theorem: {guarantee.theorem} (docs/theory/dice_sgd.md)",
            f"published: {_published(event, relation, delta)}",
            f"run: {event.num_steps} steps x {event.batch_size} of {event.dataset_size} records, "
            f"{event.batch_order.value}; update rule {update_rule}",
            f"noise on the mean update: standard deviation {event.noise_std:.6g}",
            f"gradients: {clip} {event.clip_norm:g}; bound before clipping: {bound}",
            f"error: {clip} {event.error_clip_norm:g}",
            f"checked at every step: {checked}",
            "declared (your word): " + "; ".join(a.text for a in guarantee.assumptions),
        ]
    )


def _published(event: DiceSgdDpEvent, relation: NeighboringRelation, delta: float) -> str:
    bound = DiceSgd(analysis="published")
    unmet = bound.check(event, relation)
    if unmet:
        return f"{bound.citation} does not apply: " + "; ".join(map(str, unmet))
    claim = bound.guarantee(event, relation)
    return (
        f"{bound.citation} would claim epsilon = {claim.epsilon(delta):.4f}; do not use it: "
        f"{claim.caveat}"
    )
