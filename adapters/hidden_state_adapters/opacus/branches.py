"""The runs of this process, and where each of them goes on."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from hidden_state_accountants import UnsupportedRunError
from hidden_state_adapters.opacus.recorders import Recorder

_branches: dict[str, list[Recorder]] = {}
"""The recorders of this process, by run: a run that was resumed has several."""
_left_behind: weakref.WeakSet[Recorder] = weakref.WeakSet()


def note_branch(run_id: str, recorder: Recorder) -> None:
    """Remembers that `recorder` records (a branch of) a run; only the newest may go on."""
    recorders = _branches.setdefault(run_id, [])
    _left_behind.update(other for other in recorders if other is not recorder)
    _left_behind.discard(recorder)
    if recorder not in recorders:
        recorders.append(recorder)


def check_goes_on(recorder: Recorder) -> None:
    """Raises UnsupportedRunError if another engine goes on with the run.

    Two continuations show more together than each of them says.
    """
    if recorder in _left_behind:
        raise UnsupportedRunError(
            "A checkpoint of this run was loaded by another engine, which goes on with it: no "
            "bound covers what two continuations show together. Go on there."
        )


def check_later_steps(state: Mapping[str, Any], discard_later_steps: bool) -> None:
    """Raises ValueError if this process took steps after the state that would be forgotten."""
    steps = state["num_steps"]
    branches = _branches.get(state["run_id"], [])
    released = [r for branch in branches for r in branch.release_steps if r > steps]
    if released:
        raise ValueError(
            f"Expected the newest released state of the run, got that of step {steps}: the iterate "
            f"after step {max(released)} was released and would be forgotten. Load the checkpoint "
            "of that step or a later one."
        )
    furthest = max((branch.num_steps for branch in branches), default=0)
    if furthest > steps and not discard_later_steps:
        raise ValueError(
            f"Expected the newest state of the run, got that of step {steps}: {furthest} steps "
            "were taken. If nothing computed by the later ones was ever shown to anybody, nor made "
            "you go back, say discard_later_steps=True; it becomes a listed assumption."
        )
