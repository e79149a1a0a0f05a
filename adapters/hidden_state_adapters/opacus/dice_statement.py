"""What an engine says about a DiceSGD run: its assumptions and its report."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
from dp_accounting import DpEvent

from hidden_state_accountants import Assumption, DiceSgdDpEvent, Guarantee
from hidden_state_accountants.guarantee import Status, merge_assumptions
from hidden_state_accountants.runs.dice_sgd import text_report
from hidden_state_adapters.opacus.dice_optimizer import CHECKED
from hidden_state_adapters.opacus.engine_dice import EngineDiceOptimizer
from hidden_state_adapters.opacus.report import declared_by_user

_FIXED_IN_ADVANCE = "number of steps and hyper-parameters fixed in advance"


def dice_assumptions(
    guarantee: Guarantee, optimizer: EngineDiceOptimizer
) -> tuple[Assumption, ...]:
    """The assumptions of the guarantee with what the engine checks and takes on trust.

    Args:
        guarantee: Of all runs.
        optimizer: Of the current run.
    """
    context, proven = optimizer.context, guarantee.assumptions
    checked = [
        context.plan.description,
        CHECKED,
        "parameters changed by the private optimizer only; no batch statistics, buffers unchanged",
    ]
    if optimizer.num_steps and optimizer.num_steps == context.schedule.num_steps:
        checked.append(f"all of the {optimizer.num_steps} steps declared in advance")
        if sum(a.text == _FIXED_IN_ADVANCE for a in proven) == 1:
            proven = tuple(a for a in proven if a.text != _FIXED_IN_ADVANCE)
    public = "divisor, hyper-parameters"
    if not context.plan.is_secret:
        public = f"order of the batches, {public}"
    return merge_assumptions(
        [
            tuple(Assumption.checked(text) for text in checked),
            declared_by_user(context, guarantee.neighboring_relation),
            tuple(a for a in proven if a.status is not Status.PUBLIC),
            (Assumption.public(public),),
        ]
    )


def dice_report(
    events: Sequence[DpEvent],
    guarantee: Guarantee,
    assumptions: tuple[Assumption, ...],
    delta: float,
    update_rule: str,
) -> str:
    """About a dozen lines to paste; the run described is the last one, of DiceSGD."""
    event = events[-1]
    assert isinstance(event, DiceSgdDpEvent)
    by_status = {status: [a for a in assumptions if a.status is status] for status in Status}
    text = text_report(
        event,
        attrs.evolve(guarantee, assumptions=tuple(by_status[Status.DECLARED])),
        delta,
        update_rule=update_rule,
        checked="; ".join(a.text for a in by_status[Status.CHECKED]),
    )
    text += "\npublic: " + "; ".join(a.text for a in by_status[Status.PUBLIC])
    if len(events) > 1:
        text += (
            f"\nruns: {len(events)}; epsilon and theorem are those of all together, the other "
            "lines are about the last one"
        )
    return text
