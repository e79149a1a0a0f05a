"""Records of private runs: kept by accountants, hung on the weights that they trained."""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import attrs
from dp_accounting import NeighboringRelation
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from hidden_state_accountants import Assumption, Guarantee, UnsupportedRunError
from hidden_state_accountants.bounds.assumptions import OF_EVERY_RUN
from hidden_state_accountants.guarantee import Status, merge_assumptions
from hidden_state_accountants.runs.run import Run, run_of
from hidden_state_adapters.opacus.schedule import DeclaredSchedule

PastRun = dict[str, Any]
"""A run as plain types: `AccountedRun.state_dict`, and why no epsilon covers it or "" (refused)."""

_BEHIND = "_hidden_state_runs"  # attribute of the modules whose parameters are trained
_branches: dict[str, list[Run]] = {}  # of this process, by run: one that was resumed has several
_trained: Any = WeakIdKeyDictionary()  # parameter -> Lineage


@attrs.define(eq=False)
class AccountedRun:
    """The part of a run that its accountant keeps, however it is trained.

    Attributes:
        recorder: Record of the steps.
        assumptions: Assumptions beside those of the bound.
        schedule: Declared rates and number of steps.
        id: Name of the run, the same wherever it goes on.
        failure: Reason why the run ended (a step was refused or interrupted), or "".
        has_moved: True as soon as parameters moved, if only in a step that was interrupted.
    """

    recorder: Run
    assumptions: tuple[Assumption, ...] = ()
    schedule: DeclaredSchedule = DeclaredSchedule()
    id: str = attrs.field(factory=lambda: secrets.token_hex(16))
    failure: str = ""
    has_moved: bool = False

    def assume(self, *further: Assumption) -> None:
        """Adds to the assumptions."""
        self.assumptions = merge_assumptions([self.assumptions, further])

    def guarantee(self, relation: NeighboringRelation) -> Guarantee:
        """Returns the guarantee of the recorded steps, with everything that is taken on trust."""
        guarantee = self.recorder.guarantee(relation)
        own = self.schedule.assumptions(self.recorder, guarantee.assumptions)
        listed = merge_assumptions([own, OF_EVERY_RUN, self.assumptions])
        return attrs.evolve(guarantee, assumptions=listed)

    def state_dict(self) -> dict[str, Any]:
        """Returns that of the recorder with what was declared; what is checked is checked again."""
        own = {"assumptions": declared_texts(self.assumptions), "run_id": self.id}
        return {**self.recorder.state_dict(), **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a `state_dict` into a run without steps; a ValueError changes nothing."""
        self.recorder.load_state_dict(state)
        self.assume(*declared_by(state))
        self.id = state["run_id"]

    @classmethod
    def ended(cls, state: Mapping[str, Any]) -> AccountedRun:
        """Returns the run that a `state_dict` is of; it takes no further steps."""
        return cls(run_of(state), declared_by(state), id=state["run_id"])


def declared_texts(assumptions: Iterable[Assumption]) -> list[str]:
    """Returns the texts of the declared ones among `assumptions`, as a state holds them."""
    return [a.text for a in assumptions if a.status is Status.DECLARED]


def declared_by(state: Mapping[str, Any]) -> tuple[Assumption, ...]:
    """Returns the declared assumptions that a state holds."""
    return tuple(Assumption.declared(text) for text in state.get("assumptions", ()))


class Lineage:
    """The runs of one accountant, as the modules that they trained hold them.

    A module that is copied or pickled takes along what the runs are at that moment, as a list of
    plain types. It holds nothing that is computed from the records.

    Attributes:
        runs: Declared runs, as their accountant keeps them.
        refusals: Reasons why the accountant gives no epsilon.
        undeclared: Number of steps that were not declared.
        id: Name of the undeclared steps.
    """

    def __init__(self) -> None:
        self.runs: list[AccountedRun] = []
        self.refusals: list[str] = []
        self.undeclared, self.id = 0, secrets.token_hex(16)
        self._current: Callable[[], Any] = _nothing  # weak reference to the run that goes on

    def __iter__(self) -> Iterator[PastRun]:
        for run in self.runs:
            if run.recorder.num_steps or run.has_moved:
                reasons = filter(None, [run.failure, *self.refusals])
                yield {**run.state_dict(), "refused": " ".join(reasons)}
        if self.undeclared:
            what = f"{self.undeclared} steps of a PrivacyEngine were not declared (declare_run)."
            yield {"run_id": self.id, "num_steps": self.undeclared, "refused": what}

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)

    def missing(self, module: nn.Module | None, params: Iterable[nn.Parameter]) -> list[PastRun]:
        """Returns the runs behind weights, trained or frozen, that are not among these.

        Raises:
            UnsupportedRunError: Weights of the middle of a run were not released there.
        """
        others = (each for each in _lineages(module, params) if each is not self)
        pasts = [past for each in others for past in each if past["run_id"] != self.id]
        newest = {past["run_id"]: past for past in sorted(pasts, key=_num_steps)}
        own = {run.id: run.state_dict() for run in self.runs}
        for past in pasts:
            last = own.get(past["run_id"], newest[past["run_id"]])
            if past["num_steps"] not in (last["num_steps"], *last.get("release_steps", ())):
                raise UnsupportedRunError(
                    f"Expected the newest weights of a private run, got those after step "
                    f"{past['num_steps']} of {last['num_steps']}: epsilon covers one model of a "
                    "run. Call engine.release() where you copy a model whose run goes on."
                )
        return [past for name, past in newest.items() if name not in own]

    def hang_on(self, module: nn.Module | None, params: Iterable[nn.Parameter]) -> None:
        """Hangs the runs on trained parameters and on the parts of `module` that own them."""
        own = {id(param): param for param in params}
        for param in own.values():
            _trained[param] = self
        for part in [] if module is None else module.modules():
            if any(id(param) in own for param in part.parameters(recurse=False)):
                vars(part)[_BEHIND] = self

    def take_over(self, run: Any) -> None:
        """Hangs the runs on the model of a TrainingRun; runs of other engines end there."""
        module: nn.Module = run.declared.inner
        params = {id(param) for param in module.parameters()}
        for lineage in _lineages(module, module.parameters()):
            other = lineage._current() if isinstance(lineage, Lineage) else None
            if other is None or lineage is self:
                continue
            if any(id(param) in params for param in other.passes.params):
                other.close(
                    "This run ended when another engine took over its model, whose epsilon is that "
                    "of both runs. Use the optimizer that the last make_private returned."
                )
        self.hang_on(module, run.passes.params)
        self._current = weakref.ref(run)


def _nothing() -> None:
    """A reference to no run."""


def _lineages(module: nn.Module | None, params: Iterable[nn.Parameter]) -> list[Any]:
    """Returns the lineages of parameters and modules, each once; of copies lists."""
    parts = [] if module is None else module.modules()
    held = [*map(_trained.get, params), *(vars(part).get(_BEHIND) for part in parts)]
    return list({id(each): each for each in held if each is not None}.values())


def _num_steps(past: PastRun) -> int:
    return int(past["num_steps"])


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
            f"after step {max(released)} was released. Load the checkpoint of that step or a later "
            "one."
        )
    if furthest > steps and not discard_later_steps:
        raise ValueError(
            f"Expected the newest state of the run, got that of step {steps}: {furthest} steps "
            "were taken. If nothing computed by the later ones was ever shown, say "
            "discard_later_steps=True; it becomes a listed assumption."
        )
