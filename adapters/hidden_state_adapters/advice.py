"""What a report says beside epsilon: what other batches, or another clip, would give."""

from __future__ import annotations

import dp_accounting
from dp_accounting import NeighboringRelation

from hidden_state_accountants import LastIterateDpEvent
from hidden_state_accountants.runs.advice import clip_that_contracts, other_batches_line


def advice(
    event: dp_accounting.DpEvent,
    relation: NeighboringRelation,
    delta: float,
    clip: str = "max_grad_norm",
) -> list[str]:
    """A line each; quick bounds only.

    Args:
        event: The run that happened.
        relation: Of the guarantee.
        delta: Where epsilon is read.
        clip: The argument that is the clip norm.
    """
    if not isinstance(event, LastIterateDpEvent):
        return []
    line, found = other_batches_line(event, relation, delta), clip_that_contracts(event, relation)
    lines = [line] if line else []
    if found is not None:
        clip_norm, before, after = found
        lines.append(
            f"raise {clip} to {clip_norm:g}: clipping then never acts, and the update "
            f"stretches distances by at most c = {after:.6g} instead of {before:.6g}. (The noise "
            "grows with it.)"
        )
    return lines
