"""The accountant behind `PrivacyEngine(accountant="hidden_state")`."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import dp_accounting
from dp_accounting import NeighboringRelation
from opacus.accountants import IAccountant
from opacus.optimizers import DPOptimizer
from torch import nn

from hidden_state_accountants import (
    Assumption,
    BatchOrder,
    Guarantee,
    LastIterateAccountant,
    LossGeometry,
    UnsupportedRunError,
    compose_guarantees,
    validate,
)
from hidden_state_accountants.bounds.assumptions import COMMON, OF_EVERY_RUN
from hidden_state_accountants.events.batch_order import parse_batch_order
from hidden_state_accountants.guarantee import merge_assumptions
from hidden_state_accountants.ledger import refuse_in_budget
from hidden_state_accountants.runs.run import Run
from hidden_state_adapters.opacus.noise import whose_noise
from hidden_state_adapters.opacus.order import drawn_rate
from hidden_state_adapters.opacus.registry import (
    AccountedRun,
    Lineage,
    declared_by,
    declared_texts,
)
from hidden_state_adapters.opacus.stock import ON_TRUST, StockRun, rows_of_step
from hidden_state_adapters.public_numbers import warn_of_delta

MECHANISM = "hidden_state"
Row = tuple[float, float, int]
"""Noise multiplier, sample rate, number of steps; as in Opacus' histories."""

_UNDECLARED = (
    "No run was declared: epsilon is that of composition under Poisson sampling and "
    "ADD_OR_REMOVE_ONE (every iterate may be released), and holds for Poisson loaders only. For "
    "the last iterate call engine.accountant.declare_run(criterion=..., feature_norm=...) before "
    "training; for other loaders declare_run() without arguments reads them."
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
        returned; noise, clip norm, learning rate and decay off every step. Optimizers that no
        last-iterate theorem covers are accounted by composition. What the loop does with the
        batches, and that Opacus' gradients are right, is one listed assumption.
      - Undeclared, and for a `history` that was written directly (as Opacus' calibration does):
        composition of Poisson-sampled Gaussian mechanisms under ADD_OR_REMOVE_ONE, as stock Opacus
        accountants assume. Loaders that are seen not to deal Poisson batches are refused.

    Args:
        neighboring_relation: Relation of declared runs.
    """

    def __init__(
        self, neighboring_relation: NeighboringRelation | str = NeighboringRelation.REPLACE_SPECIAL
    ):
        self._lineage = Lineage()  # what the modules that are trained hold
        self._runs: list[AccountedRun] = self._lineage.runs
        self._made: StockRun | None = None  # by the last make_private of a stock engine
        self._check: Callable[[], None] = _nothing  # raises unless the model is the last iterate
        self._of_undeclared: tuple[Assumption, ...] = ()  # what undeclared steps rest on
        super().__init__()
        self.neighboring_relation = validate.neighboring_relation(neighboring_relation)

    @classmethod
    def mechanism(cls) -> str:
        """The name in Opacus' registry."""
        return MECHANISM

    # Runs of a stock engine

    def declare_run(
        self,
        *,
        criterion: Any = None,
        feature_norm: float | None = None,
        loss_geometry: LossGeometry | str | None = None,
        batch_order: BatchOrder | str | None = None,
        dataset_size: int | None = None,
        batch_size: int | None = None,
    ) -> None:
        """Declares the run of the last make_private, before its first step.

        What the loader deals is read: "cyclic" for a loader that does not shuffle, "reshuffled"
        for one with shuffle=True and a generator that was not seeded by a script, "poisson" for
        the one that Opacus makes (poisson_sampling=True), "full" for one batch of all records.

        Args:
            criterion: Loss of the training loop, of the whole output of a linear head.
            feature_norm: Bound on the norm of every record at the linear layer, declared by you.
            loss_geometry: LossGeometry in place of a criterion. Neither gives composition.
            batch_order: Order that is compared with the loader's. "shuffled_once" says of a fixed
                order that it was drawn uniformly and nobody ever learns it.
            dataset_size: Number of records, compared likewise.
            batch_size: Records of a batch, compared likewise, but for Poisson batches.

        Raises:
            UnsupportedRunError: The loader cannot be read or is not what was declared, no bound
                covers it, or there is no make_private whose run took no step.
            TypeError, ValueError: An argument has an impossible value.
        """
        made = self._made
        self._refuse_mixture(self._history)
        if made is None or made.num_steps:
            raise UnsupportedRunError(
                "Expected declare_run after make_private of a PrivacyEngine and before its first "
                "step, got it elsewhere: the loader that make_private returned is read. Call it "
                "right after make_private."
            )
        before = made.accounted
        run = made.declare(
            self.neighboring_relation,
            criterion,
            feature_norm,
            loss_geometry,
            batch_order=batch_order and parse_batch_order(batch_order),
            dataset_size=dataset_size,
            batch_size=batch_size,
        )
        self._runs[:] = [*(known for known in self._runs if known is not before), run]

    def get_optimizer_hook_fn(self, sample_rate: float) -> Callable[[DPOptimizer], None]:
        """Returns the hook that records a step of one optimizer; see `IAccountant`.

        Of one that is attached by hand the batches are taken for Poisson batches of this rate.
        """
        made = StockRun.by_caller(self, sample_rate)
        if made is None:
            return lambda optimizer: self._take_step_by_hand(optimizer, sample_rate)
        self._made, self._check = made, made.check_moved
        return lambda optimizer: self._take_step(made)

    def _take_step_by_hand(self, optimizer: DPOptimizer, sample_rate: float) -> None:
        self.check_not_refused()
        refuse_in_budget("run of a DPOptimizer")
        self._refuse_mixture(self._runs)
        params = nn.ParameterList(optimizer.params)
        self._refuse_others_runs(params)
        with self._ended_by_refusals():
            rows_of_step(optimizer, len(self) + 1)
        self._add_undeclared(optimizer, sample_rate, whose_noise(optimizer))
        self._lineage.hang_on(params, optimizer.params)

    @contextlib.contextmanager
    def _ended_by_refusals(self) -> Iterator[None]:
        try:
            yield
        except UnsupportedRunError as error:
            self.refuse(f"A step of the run was refused, which ended it: {error}")
            raise

    def _add_undeclared(self, optimizer: DPOptimizer, rate: float, *own: Assumption) -> None:
        self.step(noise_multiplier=optimizer.noise_multiplier, sample_rate=rate)
        self._lineage.undeclared += 1
        self._of_undeclared = merge_assumptions([self._of_undeclared, own])

    def _take_step(self, made: StockRun) -> None:
        """Records the next step of an optimizer; what is refused after `_admit` ends the run."""
        self._admit(made)
        with self._ended_by_refusals():
            made.observe(len(self) + 1)
        own = whose_noise(made.optimizer), *made.coins
        if made.accounted is None:
            self._add_undeclared(made.optimizer, made.sample_rate, *own)
        if made.num_steps == 1:
            self._lineage.hang_on(made.inner, made.optimizer.params)
            if made.accounted is not None:
                made.accounted.assume(*own)

    def _admit(self, made: StockRun) -> None:
        """Raises UnsupportedRunError, whatever the records are, if there may be no step."""
        self.check_not_refused()
        refuse_in_budget("run of a PrivacyEngine")
        if made.accounted is not None and made is not self._made:
            raise UnsupportedRunError(
                "This run ended when make_private was called again; its last iterate was taken as "
                "released then."
            )
        self._refuse_mixture(made.accounted is None and self._runs)
        if made.num_steps:
            return
        self._refuse_others_runs(made.inner)
        if made.accounted is None:
            made.check_undeclared()

    def _refuse_others_runs(self, module: nn.Module) -> None:
        """Raises UnsupportedRunError for weights of runs that this accountant does not know."""
        for past in self._lineage.missing(module):
            raise UnsupportedRunError(
                f"Expected a model that no other engine has trained, got one with "
                f"{past['num_steps']} steps of another engine, whose epsilon this engine does not "
                "know. Train with HiddenStatePrivacyEngine, which composes the runs."
            )

    # Runs of HiddenStatePrivacyEngine

    def add_run(self, run: Any, earlier: Sequence[AccountedRun] = ()) -> None:
        """Adds a TrainingRun that records itself, after the `earlier_runs` behind its weights."""
        self._refuse_mixture(self._history)
        self._made, self._check = None, run.check_iterate
        self._runs += [*earlier, run.accounted]
        self._lineage.take_over(run)

    def earlier_runs(self, module: nn.Module) -> list[AccountedRun]:
        """Returns the runs behind the weights of a model that this accountant does not know yet."""
        found = []
        for past in self._lineage.missing(module):
            if past["refused"]:
                raise UnsupportedRunError(
                    "Expected initial weights whose private runs have an epsilon, got those of "
                    f"one that has none: {past['refused']} Start from a new model."
                )
            run = AccountedRun.ended(past)
            run.recorder.check_relation(self.neighboring_relation)
            run.recorder.event()  # a run that ended within an epoch may have none
            found.append(run)
        return found

    def assume(self, text: str) -> None:
        """Adds something that the user declared about the last run to its assumptions."""
        self._runs[-1].assume(Assumption.declared(text))

    def refuse(self, reason: str) -> None:
        """From now on there is no guarantee: something happened that no theorem covers."""
        if reason not in self._lineage.refusals:
            self._lineage.refusals.append(reason)

    def check_not_refused(self) -> None:
        """Raises UnsupportedRunError if `refuse` was called."""
        if self._lineage.refusals:
            raise UnsupportedRunError(" ".join(self._lineage.refusals))

    def _refuse_mixture(self, is_mixed: Any) -> None:
        """Raises UnsupportedRunError for declared runs beside steps that were not declared."""
        if is_mixed:
            raise UnsupportedRunError(
                "Expected declared runs or undeclared steps, got both: they hold for different "
                "neighboring relations. Call engine.accountant.declare_run(...) after every "
                "make_private, before its first step."
            )

    @property
    def recorders(self) -> tuple[Run, ...]:
        """The recorders of the declared runs, in order."""
        return tuple(run.recorder for run in self._runs)

    # What Opacus calls, and what follows

    @property
    def history(self) -> list[Row]:
        """Rows (noise multiplier, sample rate, steps) of undeclared steps, as Opacus has them.

        Declared runs have noise multiplier 0 there: no such figure covers them.
        """
        declared = [(0.0, 1.0, run.num_steps) for run in self.recorders if run.num_steps]
        return [*self._history, *declared]

    @history.setter
    def history(self, rows: list[Row]) -> None:
        self._refuse_mixture(rows and self._runs)
        self._history: list[Row] = [(float(n), float(q), int(k)) for n, q, k in rows]
        self._of_undeclared = (ON_TRUST,) if self._history else ()

    def __len__(self) -> int:
        recorded = sum(run.num_steps for run in self.recorders)
        return sum(steps for _, _, steps in self._history) + recorded

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Records one undeclared step; raises UnsupportedRunError if a run was declared."""
        self._refuse_mixture(self._runs)
        self._of_undeclared = merge_assumptions([self._of_undeclared, (ON_TRUST,)])
        row, steps = (float(noise_multiplier), float(sample_rate)), 0
        if self._history and self._history[-1][:2] == row:
            steps = self._history.pop()[2]
        self._history.append((*row, steps + 1))

    def get_epsilon(self, delta: float, *args: Any, **kwargs: Any) -> float:
        """Returns the epsilon of everything recorded, at `delta`; further arguments are ignored.

        Raises:
            UnsupportedRunError: The model is not the iterate that was accounted.
        """
        if self._history:
            warnings.warn(_UNDECLARED, UserWarning, stacklevel=3)
        value = self.guarantee.epsilon(delta)
        self.warn_of_delta(delta)
        return value

    def warn_of_delta(self, delta: float) -> None:
        """Warns of a delta of 1/n and more; there are runs, or nothing is said."""
        sizes = [r.event().dataset_size for r in self.recorders if r.num_steps]
        warn_of_delta(delta, max(sizes, default=0))

    @property
    def guarantee(self) -> Guarantee:
        """The guarantee of everything recorded; UnsupportedRunError if there is none."""
        self.check_not_refused()
        self._check()
        self._refuse_mixture(self._history and self._runs)
        if self._history:
            guarantee = _undeclared_guarantee(tuple(self._history))
            merged = merge_assumptions([guarantee.assumptions, self._of_undeclared])
            return attrs.evolve(guarantee, assumptions=merged)
        relation = self.neighboring_relation
        runs = [run.guarantee(relation) for run in self._runs if run.recorder.num_steps]
        guarantee = compose_guarantees(runs, relation)
        if not runs:
            return attrs.evolve(guarantee, theorem="nothing composed: no step was recorded")
        return guarantee

    def state_dict(self, destination: Any = None) -> Any:
        """Returns plain types: Opacus' keys, the relation, and the state of every recorder."""
        destination = super().state_dict(destination)
        destination["neighboring_relation"] = self.neighboring_relation.name
        destination["runs"] = [run.state_dict() for run in self._runs]
        destination["refusals"] = list(self._lineage.refusals)
        destination["assumptions"] = declared_texts(self._of_undeclared)
        return destination

    def check_empty(self) -> None:
        """Raises ValueError if there are steps, which nothing that is loaded may replace."""
        if len(self):
            raise ValueError(
                f"Expected to load into an accountant without steps, got one with {len(self)}: "
                "spent budget is never forgotten. Call make_private on a fresh engine, then load."
            )

    def load_state_dict(self, state_dict: Any) -> None:
        """Restores what `state_dict` returned, into an accountant without steps.

        Runs are added as they were, ended: what a stock engine goes on with is a new run, of which
        epsilon counts both. The current run of a HiddenStatePrivacyEngine takes up the last one.

        Raises:
            ValueError: Opacus does not take the state, or the states do not belong together.
        """
        self.check_empty()
        IAccountant.load_state_dict(HiddenStateAccountant(), state_dict)  # for its checks
        relation = state_dict.get("neighboring_relation", self.neighboring_relation.name)
        if relation != self.neighboring_relation.name:
            raise ValueError(
                f"Expected a state for {self.neighboring_relation.name}, got {relation}."
            )
        states, current = list(state_dict.get("runs", ())), list(self._runs)
        if states and current and self._made is None:
            current[-1].load_state_dict(states.pop())
        self._runs[:] = [*map(AccountedRun.ended, states), *current]
        if not state_dict.get("runs"):
            self.history = state_dict["history"]
        stored = declared_by(state_dict)
        self._of_undeclared = merge_assumptions([self._of_undeclared, stored])
        for reason in state_dict.get("refusals", ()):
            self.refuse(str(reason))
        if self._made is not None:
            self._check = _nothing  # the weights of a checkpoint were written


def _nothing() -> None:
    """The check where no run goes on."""


@functools.lru_cache(maxsize=16)
def _undeclared_guarantee(rows: tuple[Row, ...]) -> Guarantee:
    """Returns the composition of Poisson-sampled Gaussian mechanisms under ADD_OR_REMOVE_ONE."""
    accountant = LastIterateAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE)
    for noise, rate, steps in rows:
        event: dp_accounting.DpEvent = dp_accounting.GaussianDpEvent(noise)
        if rate < 1:
            event = dp_accounting.PoissonSampledDpEvent(drawn_rate(rate), event)
        accountant.compose(event, steps)
    public = "the rate and the divisor, which Opacus computes from the number of records,"
    return attrs.evolve(
        accountant.guarantee,
        theorem="composition of Poisson-sampled Gaussian mechanisms (no run was declared)",
        assumptions=(
            *COMMON,
            *OF_EVERY_RUN,
            Assumption.declared(f"{public} are public constants"),
        ),
    )
