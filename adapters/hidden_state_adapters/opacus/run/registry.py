"""Which parameters the private runs of this process train, and how far each run went."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from hidden_state_accountants import UnsupportedRunError
from hidden_state_accountants.runs.run import Run


class Steps(Protocol):
    """A run, as far as it counts its steps."""

    @property
    def num_steps(self) -> int:
        """The number of steps recorded."""
        ...


_branches: dict[str, list[Run]] = {}
"""The records of this process, by run: a run that was resumed has several."""
_trained: Any = WeakIdKeyDictionary()
"""Parameter -> the runs that train it, each with its engine (a token that refers to nothing)."""


def note_branch(run_id: str, run: Run) -> None:
    """Remembers that `run` records (a branch of) a run."""
    runs = _branches.setdefault(run_id, [])
    if run not in runs:
        runs.append(run)


def check_later_steps(state: Mapping[str, Any], discard_later_steps: bool) -> None:
    """Raises ValueError if this process took steps after the state that would be forgotten."""
    steps, branches = state["num_steps"], _branches.get(state["run_id"], [])
    released = [r for branch in branches for r in branch.release_steps if r > steps]
    furthest = max((branch.num_steps for branch in branches), default=0)
    if released:
        raise ValueError(
            f"Expected the newest released state of the run, got that of step {steps}: the iterate "
            f"after step {max(released)} was released and would be forgotten. Load the checkpoint "
            "of that step or a later one."
        )
    if furthest > steps and not discard_later_steps:
        raise ValueError(
            f"Expected the newest state of the run, got that of step {steps}: {furthest} steps "
            "were taken. If nothing computed by the later ones was ever shown to anybody, nor made "
            "you go back, say discard_later_steps=True; it becomes a listed assumption."
        )


def note_trained(params: Iterable[nn.Parameter], engine: object, run: Steps) -> None:
    """Remembers that a run of `engine`, a token that refers to nothing, trains `params`."""
    for param in params:
        _trained.setdefault(param, []).append((engine, run))


def check_not_trained_elsewhere(params: Iterable[nn.Parameter], engine: object) -> None:
    """Raises UnsupportedRunError for parameters that another engine of this process trained.

    A notebook's cell that was run again made another engine for the model of the first one.

    Args:
        params: All parameters of the model, trained or frozen.
        engine: As for `note_trained`.
    """
    for param in params:
        for other, run in _trained.get(param, ()):
            if other is not engine and run.num_steps:
                raise UnsupportedRunError(
                    f"Expected a model that no other engine has trained, got one with "
                    f"{run.num_steps} steps of another engine, whose epsilon this engine does not "
                    "know. Call make_private on that engine (its runs compose), or start from a "
                    "new model. To go on with a run, call make_private on a model as it was at the "
                    "beginning, then load_checkpoint."
                )
