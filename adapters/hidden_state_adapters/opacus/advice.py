"""What is said of a run beside its epsilon: what other batches, or another clip, would give."""

from __future__ import annotations

import attrs
import dp_accounting
from dp_accounting import NeighboringRelation

from hidden_state_accountants import BatchOrder, LastIterateDpEvent
from hidden_state_accountants.runs.other_batches import (
    clip_that_contracts,
    costs_more_than_poisson,
    other_batches,
    other_batches_line,
)

_EPOCHS, _DELTA = 10, 1e-5
_STEPS_LOOKED_AHEAD = 20_000


def advice_before(
    first: dp_accounting.DpEvent, relation: NeighboringRelation, num_steps: int | None
) -> list[str]:
    """What should be known before training, a line each; quick bounds only.

    Args:
        first: One step of the run, with its first hyper-parameters.
        relation: Of the guarantee.
        num_steps: That were declared; None is ten epochs.
    """
    if not isinstance(first, LastIterateDpEvent):
        return []
    lines = _clip_lines(first, relation)
    steps = num_steps or _EPOCHS * first.batches_per_epoch
    if steps > _STEPS_LOOKED_AHEAD or first.batch_order is BatchOrder.POISSON:
        return lines
    ahead = attrs.evolve(first, num_steps=steps)
    others = other_batches(ahead, relation, _DELTA)
    if costs_more_than_poisson(ahead, others, relation, _DELTA):
        lines.append(
            f"{other_batches_line(ahead, relation, _DELTA)} (assuming delta = {_DELTA:g} and "
            "the first step's hyper-parameters). Leave out batch_order for Poisson batches."
        )
    return lines


def advice_after(
    event: dp_accounting.DpEvent, relation: NeighboringRelation, delta: float
) -> list[str]:
    """The same of a run that happened, for a report.

    Args:
        event: The run.
        relation: Of the guarantee.
        delta: Where epsilon is read.
    """
    if not isinstance(event, LastIterateDpEvent):
        return []
    line = other_batches_line(event, relation, delta)
    return [*([line] if line else []), *_clip_lines(event, relation)]


def _clip_lines(event: LastIterateDpEvent, relation: NeighboringRelation) -> list[str]:
    found = clip_that_contracts(event, relation)
    if found is None:
        return []
    clip_norm, before, after = found
    return [
        f"raise max_grad_norm to {clip_norm:g}: clipping then never acts, and the update stretches "
        f"distances by at most c = {after:.6g} instead of {before:.6g}. (The noise grows with it.)"
    ]
