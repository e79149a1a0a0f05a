"""The line before training: whether hidden iterates are going to help at all."""

from __future__ import annotations

import math

import attrs
from dp_accounting import NeighboringRelation

from hidden_state_accountants.accountants import LastIterateAccountant
from hidden_state_accountants.bounds.composition import Composition
from hidden_state_accountants.events.batch_order import BatchOrder
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.figures import text_up
from hidden_state_accountants.runs.descriptions.last_iterate import process_of

_STEPS_LOOKED_AHEAD, _DELTA = 50_000, 1e-5
_EQUALS_COMPOSITION = "no contraction: epsilon equals composition (each epoch counts)"


def no_contraction_line(event: LastIterateDpEvent, relation: NeighboringRelation) -> str:
    """One line on a run whose update does not contract; empty if it does or is projected.

    The run is looked at for ten epochs, or fewer if that is more than 50,000 steps.

    Args:
        event: One step of the run with its first hyper-parameters.
        relation: The neighbouring relation.
    """
    process = process_of(event, relation)
    if process is None:
        return f"{_EQUALS_COMPOSITION}; no loss geometry is declared"
    c = float(process.contraction[0])
    if c < 1 or event.domain_diameter < math.inf:
        return ""
    reason = (
        f"one step stretches distances by up to c = {c:.6g}"
        if c > 1
        else "the update does not shrink distances (c = 1)"
    )
    if event.batch_order not in (BatchOrder.CYCLIC, BatchOrder.FULL):
        return (
            f"no contraction: {reason}; what the secret order gains is in get_epsilon (assuming "
            "the first step's hyper-parameters)"
        )
    epochs = min(10, _STEPS_LOOKED_AHEAD // event.batches_per_epoch)
    if epochs < 2:  # within one epoch the last batch always costs as much as under composition
        return f"no contraction: {reason} (assuming the first step's hyper-parameters)"
    ahead = attrs.evolve(event, num_steps=epochs * event.batches_per_epoch)
    last = LastIterateAccountant(relation).compose(ahead).get_epsilon(_DELTA)
    composition = Composition()
    gain = 1.0
    if not composition.check(ahead, relation):
        every = composition.guarantee(ahead, relation).epsilon(_DELTA)
        gain = last / every if 0 < every < math.inf else 1.0
    assuming = f"assuming delta = {_DELTA:g} and the first step's hyper-parameters"
    if gain > 0.999:
        return f"{_EQUALS_COMPOSITION}; {reason} ({assuming})"
    return (
        f"no contraction: {reason}; after {epochs} epochs epsilon is {text_up(gain, 3)} times that "
        f"of composition, thanks to the noise of the other batches only ({assuming})"
    )
