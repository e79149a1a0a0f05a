"""Records of private runs: kept by accountants, hung on the weights that they trained."""

from __future__ import annotations

import hashlib
import math
import numbers
import secrets
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import attrs
import numpy as np
from dp_accounting import NeighboringRelation
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from hidden_state_accountants import (
    Assumption,
    Guarantee,
    Schedule,
    UnsupportedRunError,
    validate,
)
from hidden_state_accountants.bounds.assumptions import OF_EVERY_RUN
from hidden_state_accountants.guarantee import (
    Status,
    Topic,
    merge_assumptions,
    replace_assumptions,
)
from hidden_state_accountants.runs.run import Run, run_of
from hidden_state_adapters.fixed_in_advance import fixed_in_advance, steps_in_advance

PastRun = dict[str, Any]
"""A run as plain types: `AccountedRun.state_dict`, and why no epsilon covers it or "" (refused)."""

_BEHIND = "_hidden_state_runs"  # attribute of the modules whose parameters are trained
_branches: dict[str, list[Run]] = {}  # of this process, by run: one that was resumed has several
_trained: Any = WeakIdKeyDictionary()  # parameter -> Lineage
_ROUNDING = 1e-6  # schedulers multiply step by step, some in float32


@attrs.frozen(eq=False)
class DeclaredSchedule:
    """Learning rates and number of steps that `make_private` was told.

    The theorems are about such that do not depend on the records. What is declared before the first
    step and then compared at every step needs no trust.

    Attributes:
        num_steps: Number of steps N, or None if it was not declared.
        learning_rates: Rates of the optimizer, shape (N,); shape (1,) for one constant; None if
            they were not declared.
        target_rate: Learning rate that the noise was found for, where none were declared; or None.
    """

    num_steps: int | None = None
    learning_rates: np.ndarray | None = None
    target_rate: float | None = None

    @classmethod
    def of(cls, schedule: Any, num_steps: int | None) -> DeclaredSchedule:
        """Reads the arguments of `make_private`."""
        if num_steps is not None:
            num_steps = validate.integer("num_steps", num_steps, minimum=1)
        if schedule is None:
            return cls(num_steps)
        if isinstance(schedule, numbers.Real):
            one = Schedule.from_sequence([float(schedule)], "schedule")
            return cls(num_steps, one.to_array())
        if not isinstance(schedule, Schedule):
            schedule = Schedule.from_sequence(schedule, "schedule")
        length, rates = schedule.num_steps, schedule.to_array()
        if num_steps not in (None, length):
            raise ValueError(
                f"Expected a schedule of num_steps = {num_steps} steps, got {length}. Give one "
                "learning rate per logical step (not per epoch)."
            )
        return cls(length, rates[:1] if len(schedule.values) == 1 else rates)

    def learning_rate(self, num_steps: int, scale: float) -> float | Schedule | None:
        """Returns the rates of the first `num_steps` steps, times `scale`; None if undeclared."""
        rates = self.learning_rates
        if rates is None:
            return None
        if len(rates) == 1:
            return float(rates[0]) * scale
        return Schedule.from_sequence(rates[:num_steps] * scale, "learning_rate")

    def at_rate_of(self, optimizer: Optimizer) -> DeclaredSchedule:
        """Returns the schedule that noise is found for; undeclared rates are those of now."""
        if self.learning_rates is not None:
            return self
        first = optimizer.param_groups[0]
        if "initial_lr" in first:
            raise UnsupportedRunError(
                "Expected schedule=, got an optimizer with a scheduler: its learning rate is "
                f"{float(first['lr']):g} at this moment (started from {first['initial_lr']:g}), "
                "and noise found for it would miss the target. Pass one rate for every logical "
                "step."
            )
        return attrs.evolve(self, target_rate=float(first["lr"]))

    def admit(self, step: int) -> None:
        """Raises UnsupportedRunError if all declared steps were taken; the model stays covered."""
        total = self.num_steps
        if total is not None and step > total:
            raise UnsupportedRunError(
                f"Expected num_steps = {total} steps, as declared to make_private, got step "
                f"{step}: the model of step {total} stays accounted. For more steps call "
                "make_private again (the runs compose)."
            )

    def check_rate(self, step: int, optimizer: Optimizer) -> None:
        """Raises UnsupportedRunError if a step uses another rate than the declared one."""
        rates, expected = self.learning_rates, self.target_rate
        if rates is not None:
            expected = float(rates[0 if len(rates) == 1 else step - 1])
        rate = float(optimizer.param_groups[0]["lr"])
        if expected is not None and not math.isclose(rate, expected, rel_tol=_ROUNDING):
            raise UnsupportedRunError(
                f"step {step} uses learning rate {rate:.8g}, expected {expected:.8g}, as declared "
                "by schedule= (or as make_private_with_epsilon found the noise for). Pass "
                "schedule=, one rate for every logical step."
            )

    def assumptions(self, run: Run, proven: Iterable[Assumption]) -> tuple[Assumption, ...]:
        """Returns the assumptions of a bound on a run, with what was compared marked as checked."""
        proven, is_known = tuple(proven), self.learning_rates is not None
        is_declared = is_known or self.num_steps is not None
        if not is_declared or all(a.topic is not Topic.FIXED_IN_ADVANCE for a in proven):
            return proven
        rates = "learning rate of every step as declared in advance" if is_known else ""
        steps = steps_in_advance(run.num_steps, self.num_steps)
        return replace_assumptions(proven, *fixed_in_advance(run, steps, rates))

    def fields(self) -> dict[str, Any]:
        """Returns plain types that are equal for equal declarations, and short."""
        rates, found = self.learning_rates, None
        if rates is not None:
            found = (
                f"{len(rates)} rates, {hashlib.sha256(rates.astype('<f8').tobytes()).hexdigest()}"
            )
        return {"schedule": found, "num_steps": self.num_steps}


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
        self.id = state.get("run_id", self.id)

    @classmethod
    def ended(cls, state: Mapping[str, Any]) -> AccountedRun:
        """Returns the run that a `state_dict` is of; it takes no further steps."""
        run = cls(run_of(state), declared_by(state))
        run.id = state.get("run_id", run.id)  # version 0.1.0 had none for stock engines
        return run


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

    def missing(self, module: nn.Module) -> list[PastRun]:
        """Returns the runs behind weights, trained or frozen, that are not among these."""
        others = (each for each in _lineages(module) if each is not self)
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

    def hang_on(self, module: nn.Module, params: Iterable[nn.Parameter]) -> None:
        """Hangs the runs on trained parameters and on the parts of `module` that own them."""
        own = {id(param): param for param in params}
        for param in own.values():
            _trained[param] = self
        for part in module.modules():
            if any(id(param) in own for param in part.parameters(recurse=False)):
                vars(part)[_BEHIND] = self

    def take_over(self, run: Any) -> None:
        """Hangs the runs on the model of a TrainingRun; runs of other engines end there."""
        module: nn.Module = run.declared.inner
        params = {id(param) for param in module.parameters()}
        for lineage in _lineages(module):
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


def _lineages(module: nn.Module) -> list[Any]:
    """Returns the lineages of parameters and modules, each once; of copies lists."""
    held = [*map(_trained.get, module.parameters())]
    held += [vars(part).get(_BEHIND) for part in module.modules()]
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
