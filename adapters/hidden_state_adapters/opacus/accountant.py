"""The accountant behind `PrivacyEngine(accountant="hidden_state")`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import attrs
from dp_accounting import NeighboringRelation
from opacus.accountants import IAccountant
from opacus.optimizers import DPOptimizer

from hidden_state_accountants import (
    Assumption,
    BatchOrder,
    Guarantee,
    LastIterateAccountant,
    LossGeometry,
    UnsupportedRunError,
)
from hidden_state_accountants.events.batch_order import parse_batch_order
from hidden_state_accountants.guarantee import merge_assumptions
from hidden_state_accountants.runs.base import Run
from hidden_state_adapters.opacus.guards.schedule import DeclaredSchedule
from hidden_state_adapters.opacus.run.accounted import (
    AccountedRun,
    Row,
    RunGuarantees,
    nothing,
    undeclared_guarantee,
)
from hidden_state_adapters.opacus.run.stock import StockRun

MECHANISM = "hidden_state"

_UNDECLARED = (
    "No run was declared: epsilon is that of composition under Poisson sampling (every iterate may "
    "be released) and holds for Poisson loaders only (poisson_sampling=True). For other loaders, "
    "and for the last iterate, call engine.accountant.declare_run(batch_order=..., "
    "dataset_size=..., batch_size=..., loss_geometry=...) before training."
)
_WRITTEN = (
    "The history was written directly, as make_private_with_epsilon does: epsilon is that of "
    "composition under Poisson sampling and ADD_OR_REMOVE_ONE. A declared run has another epsilon: "
    "find its noise with dp_accounting.calibrate_dp_mechanism and "
    "hidden_state_accountants.LastIterateAccountant, and call make_private."
)


class HiddenStateAccountant(IAccountant):
    """Accounts runs of which only the last iterate is released; runs compose.

    With a stock engine, declare what the accountant cannot see, before training:

        engine = PrivacyEngine(accountant="hidden_state")
        engine.accountant.declare_run(batch_order="cyclic", dataset_size=1500, batch_size=500,
                                      loss_geometry=hsa.LossGeometry.softmax_cross_entropy(1.0))

    Formal guarantees:
      - Declared: those of the recorded `LastIterateDpEvent` under `neighboring_relation`; the
        loader and the projection are the user's word. Optimizers that no last-iterate theorem
        covers are accounted by composition.
      - Undeclared, and for a `history` that was written directly (as Opacus' calibration does):
        composition of Poisson-sampled Gaussian mechanisms under ADD_OR_REMOVE_ONE, which is what
        stock Opacus accountants assume; every iterate may be released. It holds for Poisson loaders
        only, so `make_private_with_epsilon` does not calibrate a declared run.

    Args:
        neighboring_relation: The relation of declared runs.
    """

    def __init__(
        self, neighboring_relation: NeighboringRelation = NeighboringRelation.REPLACE_SPECIAL
    ):
        self._runs: list[AccountedRun] = []
        super().__init__()
        LastIterateAccountant(neighboring_relation)  # validates
        self.neighboring_relation = neighboring_relation
        self._unclaimed: StockRun | None = None
        self._warned: set[str] = set()
        self._refusals: list[str] = []
        self._guarantees = RunGuarantees(neighboring_relation)

    @classmethod
    def mechanism(cls) -> str:
        """The name in Opacus' registry."""
        return MECHANISM

    def declare_run(
        self,
        *,
        batch_order: BatchOrder | str,
        dataset_size: int,
        batch_size: int,
        loss_geometry: LossGeometry | None = None,
        projection_radius: float | None = None,
    ) -> None:
        """Declares the run of the next private optimizer that steps; before its first step.

        Args:
            batch_order: "cyclic" (batches of b in the same order in every epoch: shuffle=False,
                poisson_sampling=False), "reshuffled" (shuffle=True, poisson_sampling=False, drawn
                from a generator whose seed nobody learns), "full", "poisson", "shuffled_once" or
                "without_replacement".
            dataset_size: n.
            batch_size: b; for "poisson" the expected size.
            loss_geometry: What is known about the loss; None gives composition.
            projection_radius: Radius of the ball around 0 on which ALL parameters together are
                projected after every step, by you.

        Raises:
            UnsupportedRunError: No bound covers the order, or steps were taken undeclared.
            TypeError, ValueError: As `LastIterateDpEvent`.
        """
        order = parse_batch_order(batch_order)
        if loss_geometry is not None and not isinstance(loss_geometry, LossGeometry):
            raise TypeError(f"Expected loss_geometry to be a LossGeometry, got {loss_geometry!r}.")
        self._refuse_undeclared_steps("declare_run")
        run = StockRun(
            batch_order=order,
            dataset_size=dataset_size,
            batch_size=batch_size,
            loss_geometry=loss_geometry,
            projection_radius=projection_radius,
        )
        run.recorder.check_relation(self.neighboring_relation)
        if self._unclaimed is not None and not self._unclaimed.recorder.num_steps:
            self._runs.pop()
        self._unclaimed = run
        self._runs.append(AccountedRun(run, assumptions=run.assumptions))

    def add_run(
        self,
        recorder: Run,
        check: Callable[[], None] = nothing,
        schedule: DeclaredSchedule | None = None,
    ) -> None:
        """Adds a run that somebody else records; `check` is called before epsilon is computed.

        Args:
            recorder: Of the run.
            check: Raises unless the model is the accounted iterate.
            schedule: What the steps of the run are compared with.

        Raises:
            UnsupportedRunError: Steps were taken undeclared.
        """
        self._refuse_undeclared_steps("the run")
        self._runs = [attrs.evolve(run, check=nothing) for run in self._runs]
        self._runs.append(AccountedRun(recorder, check, schedule=schedule or DeclaredSchedule()))
        self._unclaimed = None

    def assume(self, text: str) -> None:
        """Adds something that the user declared about the last run to its assumptions."""
        declared = (Assumption.declared(text),)
        merged = merge_assumptions([self._runs[-1].assumptions, declared])
        self._runs[-1] = attrs.evolve(self._runs[-1], assumptions=merged)

    def refuse(self, reason: str) -> None:
        """From now on there is no guarantee: something happened that no theorem covers."""
        if reason not in self._refusals:
            self._refusals.append(reason)

    def check_not_refused(self) -> None:
        """Raises UnsupportedRunError if `refuse` was called."""
        if self._refusals:
            raise UnsupportedRunError(" ".join(self._refusals))

    def _refuse_undeclared_steps(self, what: str) -> None:
        if self._history:
            raise UnsupportedRunError(
                f"Expected {what} before the first step, got undeclared steps already: they hold "
                "for another neighboring relation. Start with a fresh accountant."
            )

    @property
    def recorders(self) -> tuple[Run, ...]:
        """The recorders of the declared runs, in order."""
        return tuple(run.recorder for run in self._runs)

    # What Opacus calls.

    @property
    def history(self) -> list[Row]:
        """Rows (noise multiplier, sample rate, steps), as of Opacus' own accountants.

        A run that shows more than DP-SGD has noise multiplier 0 there: no such figure covers it.
        """
        rows = list(self._history)
        for recorder in self.recorders:
            rows += recorder.sampled_rows()
        return rows

    @history.setter
    def history(self, rows: list[Row]) -> None:
        if self._runs:
            raise ValueError(
                f"Expected no runs when history is overwritten, got {len(self._runs)}: the figure "
                "of the history would stand for theirs. Use a fresh accountant."
            )
        self._history: list[Row] = [(float(n), float(q), int(k)) for n, q, k in rows]
        self._is_written = bool(self._history)  # a question (calibration), not a training run

    def __len__(self) -> int:
        return sum(steps for _, _, steps in self.history)

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Records one undeclared step.

        Raises:
            UnsupportedRunError: A run was declared: it is recorded through the optimizer's hook.
        """
        if self._runs:
            raise UnsupportedRunError(
                "Expected the steps of a declared run through the optimizer's step hook, got a "
                "direct call of step(), which does not say enough about the step."
            )
        self._is_written = False
        row = float(noise_multiplier), float(sample_rate)
        if self._history and self._history[-1][:2] == row:
            self._history[-1] = (*row, self._history[-1][2] + 1)
        else:
            self._history.append((*row, 1))

    def get_optimizer_hook_fn(self, sample_rate: float) -> Callable[[DPOptimizer], None]:
        """The hook that records a step of one optimizer; see `IAccountant`."""
        claimed: list[tuple[DPOptimizer, StockRun]] = []

        def hook_fn(optimizer: DPOptimizer) -> None:
            if getattr(optimizer, "records_itself", False):
                return
            if not self._runs:
                rate = sample_rate * optimizer.accumulated_iterations
                self.step(noise_multiplier=optimizer.noise_multiplier, sample_rate=rate)
                return
            if not claimed:
                claimed.append((optimizer, self._claim()))
            owner, run = claimed[0]
            if owner is not optimizer:
                raise UnsupportedRunError(
                    "Expected the steps of one optimizer, got those of a second through the same "
                    "hook. Call make_private and declare_run for each."
                )
            if run is not self._runs[-1].source:
                raise UnsupportedRunError(
                    "This run ended when the next one was declared; its last iterate was taken as "
                    "released then."
                )
            run.observe(optimizer, sample_rate)

        return hook_fn

    def _claim(self) -> StockRun:
        run, self._unclaimed = self._unclaimed, None
        if run is None:
            raise UnsupportedRunError(
                "Expected one declare_run for every make_private, got a second optimizer on the "
                "same run. Call engine.accountant.declare_run(...) before its first step."
            )
        return run

    def get_epsilon(self, delta: float, *args: Any, **kwargs: Any) -> float:
        """The epsilon of everything recorded, at `delta`; further arguments are ignored.

        Raises:
            UnsupportedRunError: The model is not the iterate that was accounted.
        """
        if self._history:
            self._warn_undeclared()
        return self.guarantee.epsilon(delta)

    @property
    def guarantee(self) -> Guarantee:
        """The guarantee of everything recorded.

        Raises:
            UnsupportedRunError: There is none.
        """
        self.check_not_refused()
        runs = [run for run in self._runs if run.recorder.num_steps]
        if self._history and runs:
            raise UnsupportedRunError(
                f"Expected undeclared steps or runs, got {len(self._history)} rows of undeclared "
                f"steps and {len(runs)} runs: they hold for different neighboring relations. Use a "
                "fresh accountant for each."
            )
        if self._history:
            return undeclared_guarantee(tuple(self._history))
        for run in self._runs:
            run.check()
        return self._guarantees.compose(runs)

    def _warn_undeclared(self) -> None:
        text = _WRITTEN if self._is_written else _UNDECLARED
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, UserWarning, stacklevel=4)

    def state_dict(self, destination: Any = None) -> Any:
        """Plain types: Opacus' keys, the relation, and the state of every recorder."""
        destination = super().state_dict(destination)
        destination["neighboring_relation"] = self.neighboring_relation.name
        destination["runs"] = [run.state_dict() for run in self._runs]
        destination["refusals"] = list(self._refusals)
        return destination

    def load_state_dict(self, state_dict: Any) -> None:
        """Restores what `state_dict` returned, into an accountant without steps.

        The last stored run goes into the current run, which must be declared alike; earlier stored
        runs are added as they were. Without a current run all are added, ended.

        Raises:
            ValueError: As `IAccountant.load_state_dict`, or the states do not belong together.
        """
        if len(self):
            raise ValueError(
                f"Expected to load into an accountant without steps, got one with {len(self)}: "
                "spent budget is never forgotten. Call make_private on a fresh engine, then load."
            )
        IAccountant.load_state_dict(HiddenStateAccountant(), state_dict)  # for its checks
        relation = state_dict.get("neighboring_relation", self.neighboring_relation.name)
        if relation != self.neighboring_relation.name:
            raise ValueError(
                f"Expected a state for {self.neighboring_relation.name}, got {relation}."
            )
        if state_dict.get("runs"):
            self._load_runs(list(state_dict["runs"]))
            for reason in state_dict.get("refusals", ()):
                self.refuse(str(reason))
        elif state_dict["history"]:
            if self._runs:
                raise ValueError("Expected the state of a declared run, got undeclared steps.")
            self.history = state_dict["history"]
            self._is_written = False

    def _load_runs(self, states: list[Any]) -> None:
        current, last = self._runs[-1:], states[-1]
        ended = [AccountedRun.ended(state) for state in (states[:-1] if current else states)]
        for run in current:
            run.source.load_state_dict(last)
        self._history = []
        self._runs = ended + [run.with_assumptions_of(last) for run in current]
