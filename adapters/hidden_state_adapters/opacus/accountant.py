"""The accountant behind `PrivacyEngine(accountant="hidden_state")`."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
from dp_accounting import NeighboringRelation
from opacus.accountants import IAccountant
from opacus.optimizers import DPOptimizer
from torch import nn
from torch.utils.data import DataLoader

from hidden_state_accountants import (
    Assumption,
    BatchOrder,
    Guarantee,
    LossGeometry,
    UnsupportedRunError,
    validate,
)
from hidden_state_accountants.guarantee import merge_assumptions
from hidden_state_accountants.runs.base import Run
from hidden_state_adapters.opacus.accounted import (
    ON_TRUST,
    AccountedRun,
    Row,
    RunGuarantees,
    declared_texts,
    nothing,
    undeclared_guarantee,
)
from hidden_state_adapters.opacus.gradients.in_place import keep_in_place
from hidden_state_adapters.opacus.guards.schedule import DeclaredSchedule
from hidden_state_adapters.opacus.run.registry import check_not_trained_elsewhere, note_trained
from hidden_state_adapters.opacus.stock.checks import check_finite, refuse_adaptive_clipping
from hidden_state_adapters.opacus.stock.clip import StockClip
from hidden_state_adapters.opacus.stock.declared import StockDeclaration
from hidden_state_adapters.opacus.stock.loop import StockLoop
from hidden_state_adapters.opacus.stock.model import check_collate, check_model
from hidden_state_adapters.opacus.stock.moves import MoveWatch, note_recorded
from hidden_state_adapters.opacus.stock.noise import StockNoise
from hidden_state_adapters.opacus.stock.pieces import PieceWatch
from hidden_state_adapters.opacus.stock.run import StockRun

MECHANISM = "hidden_state"

_UNDECLARED = (
    "No run was declared: epsilon is that of composition under Poisson sampling (every iterate may "
    "be released) and holds for Poisson loaders only (poisson_sampling=True). For the last iterate "
    "call engine.accountant.declare_run(criterion=..., feature_norm=...) before training; for "
    "other loaders declare_run() without arguments reads them."
)
_WRITTEN = (
    "The history was written directly, as make_private_with_epsilon does: epsilon is that of "
    "composition under Poisson sampling and ADD_OR_REMOVE_ONE. Batches in another order have "
    "another epsilon: find their noise with HiddenStatePrivacyEngine.make_private_with_epsilon, or "
    "with hidden_state_accountants.calibrate_noise, and call make_private."
)


class HiddenStateAccountant(IAccountant):
    """Accounts runs of which only the last iterate is released; runs compose.

    With a stock engine, declare the loss, before training; the batches are read:

        engine = PrivacyEngine(accountant="hidden_state")
        model, optimizer, loader = engine.make_private(...)
        engine.accountant.declare_run(criterion=criterion, feature_norm=1.0)

    Formal guarantees:
      - Declared: those of the recorded `LastIterateDpEvent` under `neighboring_relation`. Data set
        size, batch size, order and sampling rate are read off the loader that make_private
        returned, which is then followed: a step about another batch is refused. Optimizers that no
        last-iterate theorem covers are accounted by composition. The projection, and that nothing
        else changes the parameters, are the user's word.
      - Undeclared, and for a `history` that was written directly (as Opacus' calibration does):
        composition of Poisson-sampled Gaussian mechanisms under ADD_OR_REMOVE_ONE, which is what
        stock Opacus accountants assume; every iterate may be released. Steps on a loader that is
        seen not to deal Poisson batches are refused, and so is make_private_with_epsilon on one.

    Args:
        neighboring_relation: The relation of declared runs.
    """

    def __init__(
        self, neighboring_relation: NeighboringRelation | str = NeighboringRelation.REPLACE_SPECIAL
    ):
        self._runs: list[AccountedRun] = []
        self._declared: StockRun | None = None  # the newest; not among the runs until it is read
        self._loop: StockLoop | None = None  # that Opacus made last
        self._of_undeclared: tuple[Assumption, ...] = ()  # what undeclared steps rest on
        self._loops: list[StockLoop] = []  # with steps that nobody declared
        self._token = object()  # stands for this accountant and holds nothing
        self._is_restored = False  # with what the weights of a checkpoint show
        super().__init__()
        self.neighboring_relation = validate.neighboring_relation(neighboring_relation)
        self._warned: set[str] = set()
        self._refusals: list[str] = []
        self._guarantees = RunGuarantees(self.neighboring_relation)

    @classmethod
    def mechanism(cls) -> str:
        """The name in Opacus' registry."""
        return MECHANISM

    def declare_run(
        self,
        *,
        criterion: Any = None,
        feature_norm: float | None = None,
        loss_geometry: LossGeometry | str | None = None,
        projection_radius: float | None = None,
        data_loader: DataLoader | None = None,
        module: nn.Module | None = None,
        batch_order: BatchOrder | str | None = None,
        dataset_size: int | None = None,
        batch_size: int | None = None,
    ) -> None:
        """Declares the run of the last make_private, or of the next one if that has steps.

        What the loader deals is read: "cyclic" for a loader that does not shuffle, "reshuffled"
        for one with shuffle=True and a generator that was not seeded by a script, "poisson" for
        the one that Opacus makes (poisson_sampling=True), "full" for one batch of all records. A
        loader that cannot be read is refused.

        Args:
            criterion: The loss of the training loop, from which the loss geometry is derived; see
                loss_geometry="auto" of `HiddenStatePrivacyEngine.make_private`. The loop has to
                compute this loss of the whole output of the linear head.
            feature_norm: Bound on the norm of every record at the linear layer; checked at every
                step. With criterion only.
            loss_geometry: A LossGeometry, instead of a criterion; "auto" or None with one. Neither
                gives composition.
            projection_radius: Radius of the ball around 0 on which ALL parameters together are
                projected after every step, by you.
            data_loader: The loader of the training loop, where make_private of an
                `opacus.PrivacyEngine` did not make it; otherwise it has to be that one.
            module: The private model, likewise; needed with criterion.
            batch_order: Compared with what is read. "shuffled_once" says of a fixed order that it
                was drawn uniformly and nobody ever learns it.
            dataset_size: Compared with what is read: n.
            batch_size: Compared with what is read: b; for "poisson" that of your loader.

        Raises:
            UnsupportedRunError: The loader cannot be read or is not what was declared, no bound
                covers it, or steps were taken undeclared. Of a run that is declared before
                make_private, it is raised there.
            TypeError, ValueError: An argument has an impossible value.
        """
        declaration = StockDeclaration(
            criterion=criterion,
            feature_norm=feature_norm,
            loss_geometry=loss_geometry,
            projection_radius=projection_radius,
            data_loader=data_loader,
            module=module,
            batch_order=batch_order,  # type: ignore[arg-type]
            dataset_size=dataset_size,
            batch_size=batch_size,
        )
        self._refuse_undeclared_steps("declare_run")
        run = StockRun(declaration)
        if run.is_known:
            run.recorder.check_relation(self.neighboring_relation)
        if self._loop is not None and not self._loop.has_begun:
            self._loop.start(run, self.neighboring_relation)
        self._replace_declared(run)
        self._list(run)

    def _replace_declared(self, run: StockRun | None) -> None:
        """The run that was declared before ends; without steps it never was."""
        old, self._declared = self._declared, run
        if old is None or old is run:
            return
        old.close()
        if old.is_known and not old.recorder.num_steps:
            self._runs = [known for known in self._runs if known.source is not old]

    def _list(self, run: StockRun) -> None:
        if run.is_known and all(known.source is not run for known in self._runs):
            self._runs.append(AccountedRun(run, run.check))

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
        self._replace_declared(None)
        self._loop = None
        self._runs = [attrs.evolve(run, check=nothing) for run in self._runs]
        self._runs.append(AccountedRun(recorder, check, schedule=schedule or DeclaredSchedule()))

    def assume(self, text: str) -> None:
        """Adds something that the user declared about the last run to its assumptions."""
        self._assume(Assumption.declared(text))

    def _assume(self, assumption: Assumption) -> None:
        told = merge_assumptions([self._runs[-1].told, (assumption,)])
        self._runs[-1] = attrs.evolve(self._runs[-1], told=told)

    def _assume_undeclared(self, assumption: Assumption) -> None:
        if assumption not in self._of_undeclared:
            self._of_undeclared = (*self._of_undeclared, assumption)

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
        if self._runs or self._declared is not None:
            count = len(self._runs) or 1
            raise ValueError(
                f"Expected no runs when history is overwritten, got {count}: the figure "
                "of the history would stand for theirs. Use a fresh accountant."
            )
        self._history: list[Row] = [(float(n), float(q), int(k)) for n, q, k in rows]
        self._is_written = bool(self._history)  # a question (calibration), not a training run
        self._of_undeclared = ON_TRUST if self._history else ()

    def __len__(self) -> int:
        recorded = sum(run.num_steps for run in self.recorders)
        return sum(steps for _, _, steps in self._history) + recorded

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Records one undeclared step.

        Raises:
            UnsupportedRunError: A run was declared: it is recorded through the optimizer's hook.
        """
        if self._runs or self._declared is not None:
            raise UnsupportedRunError(
                "Expected the steps of a declared run through the optimizer's step hook, got a "
                "direct call of step(), which does not say enough about the step."
            )
        for assumption in ON_TRUST:
            self._assume_undeclared(assumption)
        self._add_row(noise_multiplier, sample_rate)

    def _add_row(self, noise_multiplier: float, sample_rate: float) -> None:
        self._is_written = False
        row = float(noise_multiplier), float(sample_rate)
        if self._history and self._history[-1][:2] == row:
            self._history[-1] = (*row, self._history[-1][2] + 1)
        else:
            self._history.append((*row, 1))

    def get_optimizer_hook_fn(self, sample_rate: float) -> Callable[[DPOptimizer], None]:
        """The hook that records a step of one optimizer; see `IAccountant`.

        Raises:
            UnsupportedRunError: The loader that make_private makes now is not that of the declared
                run, or its noise was found for other batches.
        """
        loop = StockLoop.of_caller(self, sample_rate)
        loop.check_calibration()
        made = None if _records_itself(loop.optimizer) else loop.optimizer
        if made is not None:
            self._check_initial(loop, made)
        check_model(loop.module)
        check_collate(loop.data_loader)
        run = self._declared
        if run is not None and not run.has_begun and not _records_itself(loop.optimizer):
            loop.start(run, self.neighboring_relation)
            if self._loop is not None and self._loop.run is run:
                self._loop.run = None  # make_private was called again
            self._list(run)
        self._leave(self._loop)
        self._loop = loop
        if made is not None:
            keep_in_place(loop.module)
            self._watch(loop, made)
            if loop.run is None:
                loop.follow()
        noise, clip = StockNoise(), StockClip()

        def hook_fn(optimizer: DPOptimizer) -> None:
            if not _records_itself(optimizer):
                step = len(self) + 1
                self._admit_step(loop, optimizer, step)
                with self._ended_by_refusals():
                    clip.check(loop.module, optimizer)
                    self._record_step(loop, optimizer, step, noise.take_over(optimizer))

        return hook_fn

    def _leave(self, loop: StockLoop | None) -> None:
        """What happens to the parameters of a loop after the next make_private is no matter."""
        if loop is None or loop.moves is None:
            return
        moves, loop.moves = loop.moves, None
        try:
            moves.check()
        except UnsupportedRunError as error:
            self.refuse(str(error))

    def _watch(self, loop: StockLoop, optimizer: DPOptimizer) -> None:
        def look(optimizer: DPOptimizer, norms: torch.Tensor | None) -> None:
            if loop.run is not None:
                loop.run.check_piece(optimizer, norms)

        def refusing() -> contextlib.AbstractContextManager[None]:
            return self._ended_by_refusals()

        loop.pieces, loop.moves = PieceWatch(optimizer, refusing, look), MoveWatch(optimizer)
        note_trained(loop.module, optimizer.params, self._token, loop.count)

    def _check_initial(self, loop: StockLoop, optimizer: DPOptimizer) -> None:
        """Raises UnsupportedRunError for weights of runs that this accountant does not know."""
        own = optimizer.params if loop.module is None else loop.module.parameters()
        check_not_trained_elsewhere(own, self._token, copies=not self._is_restored)

    def _admit_step(self, loop: StockLoop, optimizer: DPOptimizer, step: int) -> None:
        """Raises UnsupportedRunError if there may be no step; looks at nothing of the records."""
        self.check_not_refused()
        if loop.moves is not None:
            loop.moves.check()
        refuse_adaptive_clipping(optimizer, step)
        if not loop.has_begun:
            self._check_initial(loop, optimizer)
        if loop.run is not None:
            if loop.run is not self._declared:
                raise UnsupportedRunError(
                    "This run ended when the next one was declared; its last iterate was taken as "
                    "released then."
                )
            loop.check_owner(optimizer)
            return
        if self._runs or self._declared is not None:
            raise UnsupportedRunError(
                "Expected one declare_run for every make_private, got an optimizer without one. "
                "Call engine.accountant.declare_run(...) after make_private, before its first step."
            )
        if not loop.has_begun:
            loop.check_undeclared()

    @contextlib.contextmanager
    def _ended_by_refusals(self) -> Iterator[None]:
        """Remembers what is refused within: which step it was may depend on a record."""
        try:
            yield
        except UnsupportedRunError as error:
            self.refuse(f"A step of the run was refused, which ended it: {error}")
            raise

    def _record_step(
        self, loop: StockLoop, optimizer: DPOptimizer, step: int, noise: Assumption
    ) -> None:
        if loop.pieces is None:  # a hook that was attached by hand: from the second step on
            self._watch(loop, optimizer)
        assert loop.pieces is not None
        rows, norms = loop.pieces.take()
        if loop.run is None:
            self._record_undeclared_step(loop, optimizer, step, rows)
            self._assume_undeclared(noise)
        else:
            loop.run.observe(optimizer, rows, norms)
            if not loop.has_begun:
                self._assume(noise)
            loop.count.run = loop.run.recorder
        loop.count.num_steps += 1
        note_recorded(optimizer)

    def _record_undeclared_step(
        self, loop: StockLoop, optimizer: DPOptimizer, step: int, rows: int | None
    ) -> None:
        check_finite(optimizer, step)
        loop.take_undeclared(optimizer, step, rows)
        if not loop.has_begun:
            self._loops.append(loop)
            known = loop.undeclared_assumptions(optimizer)
            for assumption in ON_TRUST if known is None else known:
                self._assume_undeclared(assumption)
        rate = loop.sample_rate * optimizer.accumulated_iterations
        self._add_row(optimizer.noise_multiplier, rate)

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
        if self._loop is not None:
            self._loop.check()
            if not len(self):
                self._loop.check_without_steps()
        runs = [run for run in self._runs if run.recorder.num_steps]
        if self._history and runs:
            raise UnsupportedRunError(
                f"Expected undeclared steps or runs, got {len(self._history)} rows of undeclared "
                f"steps and {len(runs)} runs: they hold for different neighboring relations. Use a "
                "fresh accountant for each."
            )
        if self._history:
            for loop in self._loops:
                loop.check()
            guarantee = undeclared_guarantee(tuple(self._history))
            merged = merge_assumptions([guarantee.assumptions, self._of_undeclared])
            return attrs.evolve(guarantee, assumptions=merged)
        for run in self._runs:
            run.check()
        guarantee = self._guarantees.compose(runs)
        if not runs:
            return attrs.evolve(guarantee, theorem="nothing composed: no step was recorded")
        return guarantee

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
        destination["assumptions"] = declared_texts(self._of_undeclared)
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
        elif state_dict["history"]:
            if self._runs:
                raise ValueError("Expected the state of a declared run, got undeclared steps.")
            self.history = state_dict["history"]
            self._is_written = False
            for text in state_dict.get("assumptions", ()):
                self._assume_undeclared(Assumption.declared(text))
        for reason in state_dict.get("refusals", ()):
            self.refuse(str(reason))
        self._is_restored = True

    def _load_runs(self, states: list[Any]) -> None:
        if self._declared is not None and not self._declared.is_known:
            raise ValueError(
                "Expected a run whose loader was read, got one that was only declared. Call "
                "make_private before the state is loaded."
            )
        current, last = self._runs[-1:], states[-1]
        ended = [AccountedRun.ended(state) for state in (states[:-1] if current else states)]
        for run in current:
            run.source.load_state_dict(last)
        self._history = []
        self._runs = ended + [run.with_assumptions_of(last) for run in current]


def _records_itself(optimizer: Any) -> bool:
    return getattr(optimizer, "records_itself", False)
