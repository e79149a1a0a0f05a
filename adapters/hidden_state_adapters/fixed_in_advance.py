"""The part of a run that is known to have been fixed before its first step, and the rest."""

from __future__ import annotations

from collections.abc import Iterator

from hidden_state_accountants import Assumption, Schedule
from hidden_state_accountants.guarantee import Topic
from hidden_state_accountants.runs.run import Run

_SCHEDULED = {  # fields of the events of all kinds
    "learning_rate": "learning rate",
    "step_size": "step size",
    "noise_multiplier": "noise",
    "noise_variance": "noise",
    "clip_norm": "clip norm",
    "weight_decay": "decay",
}


def fixed_in_advance(run: Run, steps: Assumption, rates: str) -> Iterator[Assumption]:
    """Yields the assumptions about the number of steps and the hyper-parameters of a run.

    Args:
        run: Steps so far.
        steps: Assumption about their number.
        rates: Words about the learning rates, which were compared; "" if nothing is known.
    """
    event = run.event()
    yield Assumption(steps.text, steps.status, Topic.FIXED_IN_ADVANCE)
    # An event that has no such field is about constant values, which are compared elsewhere.
    values = {n: getattr(event, f) for f, n in _SCHEDULED.items() if hasattr(event, f)}
    if rates:
        values.pop("learning rate", None)
        yield _checked(rates)
    constant = [n for n, v in values.items() if v is not None and not isinstance(v, Schedule)]
    varying = [name for name, value in values.items() if isinstance(value, Schedule)]
    if constant:
        yield _checked(f"constant {', '.join(constant)}")
    if varying:
        yield _declared(f"schedule of {', '.join(varying)} fixed in advance")
    if run.release_steps:
        yield _declared("released steps fixed in advance")


def steps_in_advance(taken: int, total: int | None) -> Assumption:
    """Returns the assumption about the steps taken, of the total declared before them, or None."""
    if total is None:
        return _declared("number of steps fixed in advance")
    if taken == total:
        return _checked(f"all of the {total} steps declared in advance")
    return _declared(
        f"training ends after step {taken} of the {total} that were declared, for a reason that "
        "does not depend on the records"
    )


def _declared(text: str) -> Assumption:
    return Assumption.declared(text, Topic.FIXED_IN_ADVANCE)


def _checked(text: str) -> Assumption:
    return Assumption.checked(text, Topic.FIXED_IN_ADVANCE)
