"""The noise of a run that comes after others."""

from __future__ import annotations

from collections.abc import Iterable

from dp_accounting import DpEvent, NeighboringRelation

from hidden_state_accountants import LastIterateAccountant, calibrate_noise
from hidden_state_accountants.calibration import MakeEvent
from hidden_state_accountants.figures import text_up

_TOLERANCE = 1e-4


def calibrate_noise_after(
    before: Iterable[DpEvent],
    target_epsilon: float,
    target_delta: float,
    make_event: MakeEvent | DpEvent,
    relation: NeighboringRelation,
    remedy: str,
) -> float:
    """Returns the smallest noise of a run that meets a target together with runs before it.

    Args:
        before: Events that were spent.
        target_epsilon: Met from below.
        target_delta: In (0, 1).
        make_event: See `hidden_state_accountants.calibrate_noise`.
        relation: Relation of the guarantee.
        remedy: Words for a new start, where the runs before spent more than the target.

    Raises:
        ValueError: No noise meets it.
    """
    events = tuple(before)

    def accountant() -> LastIterateAccountant:
        accountant = LastIterateAccountant(relation)
        for event in events:
            accountant.compose(event)
        return accountant

    spent = accountant().get_epsilon(target_delta) if events else 0.0
    if spent > target_epsilon:
        raise ValueError(
            f"Expected target_epsilon >= {text_up(spent, 6)} at delta = {target_delta:g}, got "
            f"{target_epsilon!r}: that is what the runs before spent, and no noise undoes it. "
            f"Raise the target, or {remedy}."
        )
    return calibrate_noise(
        target_epsilon,
        target_delta,
        make_event,
        neighboring_relation=relation,
        make_accountant=accountant,
        tolerance=_TOLERANCE,
    )
