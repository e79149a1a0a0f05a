"""The runs of this process: which engines trained a parameter, and where each run goes on."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from hidden_state_accountants import UnsupportedRunError
from hidden_state_accountants.runs.base import Run
from hidden_state_adapters.opacus.guards.base import Guard


class Steps(Protocol):
    """A run, as far as it counts its steps."""

    @property
    def num_steps(self) -> int:
        """The number of steps recorded."""
        ...


_branches: dict[str, list[Run]] = {}
"""The records of this process, by run: a run that was resumed has several."""
_left_behind: weakref.WeakSet[Run] = weakref.WeakSet()
_moved: weakref.WeakSet[Any] = weakref.WeakSet()
"""The runs that changed parameters, if only in a step that was interrupted and not recorded."""
_trained: Any = WeakIdKeyDictionary()
"""Parameter -> the runs that train it: the engine, by a token that refers to nothing, and the
record."""


def note_branch(run_id: str, run: Run) -> None:
    """Remembers that `run` records (a branch of) a run; only the newest may go on."""
    runs = _branches.setdefault(run_id, [])
    _left_behind.update(other for other in runs if other is not run)
    _left_behind.discard(run)
    if run not in runs:
        runs.append(run)


class ContinuationGuard(Guard):
    """Notices that another engine goes on with the run.

    Two continuations show more together than each of them says.

    Args:
        run: The record.
    """

    def __init__(self, run: Run):
        self._run = run

    def admit(self, step: int) -> None:
        """Raises UnsupportedRunError if another engine goes on with the run."""
        if self._run in _left_behind:
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


def note_trained(params: Iterable[nn.Parameter], engine: object, run: Steps) -> None:
    """Remembers that a run of `engine` trains `params`."""
    for param in params:
        _trained.setdefault(param, []).append((engine, run))


def note_moved(run: Run) -> None:
    """Remembers that a step of `run` is about to change parameters, recorded or not."""
    _moved.add(run)


def check_not_trained_elsewhere(params: Iterable[nn.Parameter], engine: object) -> None:
    """Raises UnsupportedRunError if another engine took steps with one of `params`.

    The initial model, or its frozen part, would carry what those steps learned from the records,
    and this engine's epsilon would not count them. It happens when a notebook's cell is run again.
    """
    for param in params:
        for other, run in _trained.get(param, ()):
            if other is not engine and (run.num_steps or run in _moved):
                steps = f"{run.num_steps} steps" if run.num_steps else "an interrupted step"
                raise UnsupportedRunError(
                    f"Expected a model that no other engine has trained, got one with {steps} of "
                    "another engine, whose epsilon this engine does not know. Call make_private on "
                    "that engine (its runs compose), or start from a new model object. If the "
                    "records are others, load the weights into a new model object: that its "
                    "initial model does not depend on the records of this engine is then your word."
                )
