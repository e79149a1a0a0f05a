"""The accountant behind `PrivacyEngine(accountant="hidden_state")`."""

from __future__ import annotations

import functools
import math
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import dp_accounting
import torch
from dp_accounting import NeighboringRelation
from opacus.accountants import IAccountant
from opacus.optimizers import AdaClipDPOptimizer, DPOptimizer
from torch import nn

from hidden_state_accountants import (
    Assumption,
    BatchOrder,
    Guarantee,
    LastIterateAccountant,
    LossGeometry,
    RunRecorder,
    Schedule,
    UnsupportedRunError,
    compose_guarantees,
    validate,
)
from hidden_state_accountants.bounds.assumptions import COMMON, OF_EVERY_RUN
from hidden_state_accountants.events.batch_order import parse_batch_order
from hidden_state_accountants.guarantee import merge_assumptions
from hidden_state_accountants.ledger import refuse_in_budget
from hidden_state_accountants.runs.run import Run
from hidden_state_adapters.opacus.gradients import read
from hidden_state_adapters.opacus.noise import whose_noise
from hidden_state_adapters.opacus.order import drawn_rate
from hidden_state_adapters.opacus.registry import (
    AccountedRun,
    Lineage,
    declared_by,
    declared_texts,
    end_other_runs,
    note_trained,
)
from hidden_state_adapters.opacus.stock import (
    ON_TRUST,
    MadePrivate,
    StockRun,
    check_noise,
    count_rows,
)
from hidden_state_adapters.opacus.update_rules import WHY_NOT_ADAPTIVE
from hidden_state_adapters.public_numbers import warn_of_delta

MECHANISM = "hidden_state"
Row = tuple[float, float, int]
"""Noise multiplier, sample rate, number of steps; as in Opacus' histories."""

_UNDECLARED = (
    "No run was declared: epsilon is that of composition under Poisson sampling and "
    "ADD_OR_REMOVE_ONE (every iterate may be released), and holds for Poisson loaders only. For "
    "the last iterate call engine.accountant.declare_run(criterion=..., feature_norm=...) before "
    "training; for other loaders declare_run() without arguments reads them, and their noise is "
    "found by HiddenStatePrivacyEngine.make_private_with_epsilon or by "
    "hidden_state_accountants.calibrate_noise."
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
        neighboring_relation: The relation of declared runs.
    """

    def __init__(
        self, neighboring_relation: NeighboringRelation | str = NeighboringRelation.REPLACE_SPECIAL
    ):
        self._lineage = Lineage()  # what the modules that are trained hold
        self._runs: list[AccountedRun] = self._lineage.runs
        self._check: Callable[[], None] = _nothing  # raises unless the model is the last iterate
        self._made: MadePrivate | None = None  # by the last one
        self._of_undeclared: tuple[Assumption, ...] = ()  # what undeclared steps rest on
        self._is_restored = False  # with what the weights of a checkpoint show
        super().__init__()
        self.neighboring_relation = validate.neighboring_relation(neighboring_relation)
        self._has_warned = False
        self._composed: tuple[Any, Guarantee] | None = None  # of what was recorded then

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
        batch_order: BatchOrder | str | None = None,
        dataset_size: int | None = None,
        batch_size: int | None = None,
    ) -> None:
        """Declares the run of the last make_private, before its first step.

        What the loader deals is read: "cyclic" for a loader that does not shuffle, "reshuffled"
        for one with shuffle=True and a generator that was not seeded by a script, "poisson" for
        the one that Opacus makes (poisson_sampling=True), "full" for one batch of all records. A
        loader that cannot be read is refused.

        Args:
            criterion: The loss of the training loop, of the whole output of a linear head.
            feature_norm: Bound on the norm of every record at the linear layer, declared by you.
            loss_geometry: A LossGeometry, instead of a criterion. Neither gives composition.
            batch_order: Compared with what is read. "shuffled_once" says of a fixed order that it
                was drawn uniformly and nobody ever learns it.
            dataset_size: Compared with what is read: n.
            batch_size: Compared with what is read: b, but for Poisson batches.

        Raises:
            UnsupportedRunError: The loader cannot be read or is not what was declared, no bound
                covers it, or there is no make_private whose run took no step.
            TypeError, ValueError: An argument has an impossible value.
        """
        made = self._made
        self._refuse_undeclared_steps("declare_run")
        if made is None or made.num_steps:
            raise UnsupportedRunError(
                "Expected declare_run after make_private and before its first step, got it "
                f"{'before make_private' if made is None else 'after a step'}: the loader that "
                "make_private returned is read. Call it right after make_private."
            )
        if made.optimizer is None:
            raise UnsupportedRunError(
                "Expected declare_run for make_private of an opacus.PrivacyEngine, got a step hook "
                "that was attached by hand: nothing says which batches the loop uses. Leave it "
                "out for Poisson batches, or use an engine."
            )
        run = StockRun(
            made,
            self.neighboring_relation,
            criterion=criterion,
            feature_norm=feature_norm,
            loss_geometry=loss_geometry,
            batch_order=batch_order and parse_batch_order(batch_order),
            dataset_size=dataset_size,
            batch_size=batch_size,
        )
        self._drop_empty()  # declared again before its first step
        made.run = run
        self._runs.append(run)

    def _drop_empty(self) -> None:
        """Forgets a declared run without steps, of the last make_private."""
        last = None if self._made is None else self._made.run
        if last is not None and not last.recorder.num_steps:
            self._runs[:] = [known for known in self._runs if known is not last]

    def add_run(
        self,
        run: AccountedRun,
        check: Callable[[], None],
        earlier: Sequence[AccountedRun] = (),
    ) -> None:
        """Adds a run that somebody else records, after those behind its initial weights.

        Args:
            run: The run.
            check: Function that raises unless the model is the accounted iterate; called before
                epsilon is computed.
            earlier: What `earlier_runs` found.

        Raises:
            UnsupportedRunError: Steps were taken undeclared.
        """
        self._refuse_undeclared_steps("the run")
        self._made = None
        self._runs += [*earlier, run]
        self._check = check

    def earlier_runs(self, module: nn.Module) -> list[AccountedRun]:
        """Returns the runs behind the weights of a model that this accountant does not know yet.

        Raises:
            UnsupportedRunError: No epsilon covers such a run together with others.
        """
        found = []
        for past in self._lineage.missing(module, module.parameters()):
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

    def take_over(self, run: Any) -> None:
        """Hangs the runs of this accountant on the model that a TrainingRun trains."""
        end_other_runs(run.declared.inner, self._lineage)
        note_trained(run.declared.inner, run.passes.params, self._lineage)
        self._lineage.current = weakref.ref(run)

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
        return [*self._history, *(row for run in self.recorders for row in _rows(run))]

    @history.setter
    def history(self, rows: list[Row]) -> None:
        if self._runs:
            raise ValueError(
                f"Expected no runs when history is overwritten, got {len(self._runs)}: the "
                "figure of the history would stand for theirs. Use a fresh accountant."
            )
        self._history: list[Row] = [(float(n), float(q), int(k)) for n, q, k in rows]
        self._of_undeclared = (ON_TRUST,) if self._history else ()

    def __len__(self) -> int:
        recorded = sum(run.num_steps for run in self.recorders)
        return sum(steps for _, _, steps in self._history) + recorded

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Records one undeclared step; raises UnsupportedRunError if a run was declared."""
        if self._runs:
            raise UnsupportedRunError(
                "Expected the steps of a declared run through the optimizer's step hook, got a "
                "direct call of step(), which does not say enough about the step."
            )
        self._of_undeclared = merge_assumptions([self._of_undeclared, (ON_TRUST,)])
        self._add_row(noise_multiplier, sample_rate)

    def _add_row(self, noise_multiplier: float, sample_rate: float) -> None:
        row, steps = (float(noise_multiplier), float(sample_rate)), 0
        if self._history and self._history[-1][:2] == row:
            steps = self._history.pop()[2]
        self._history.append((*row, steps + 1))

    def get_optimizer_hook_fn(self, sample_rate: float) -> Callable[[DPOptimizer], None]:
        """Returns the hook that records a step of one optimizer; see `IAccountant`.

        Raises:
            UnsupportedRunError: The noise was found for other batches, or cannot be drawn.
        """
        made = MadePrivate.by_caller(self, sample_rate)
        if made.optimizer is not None:
            self._check_initial(made, made.optimizer)
        made.prepare()
        self._drop_empty()
        self._made = made
        return lambda optimizer: self._take_step(made, optimizer)

    def _check_initial(self, made: MadePrivate, optimizer: DPOptimizer) -> None:
        """Raises UnsupportedRunError for weights of runs that this accountant does not know."""
        own = optimizer.params if made.inner is None else made.inner.parameters()
        for past in self._lineage.missing(made.inner, own):
            raise UnsupportedRunError(
                f"Expected a model that no other engine has trained, got one with "
                f"{past['num_steps']} steps of another engine, whose epsilon this engine does not "
                "know. Call make_private on that engine (its runs compose), train with "
                "HiddenStatePrivacyEngine (which composes the runs behind the weights), or start "
                "from a new model. To go on with a run, call make_private on a new model, then "
                "load_checkpoint."
            )

    def _take_step(self, made: MadePrivate, optimizer: DPOptimizer) -> None:
        """Records the next step of an optimizer; what is refused after `_admit` ends the run."""
        step, is_first = len(self) + 1, not made.num_steps
        self._admit(made, optimizer, step)
        try:
            if is_first:
                note_trained(made.inner, optimizer.params, self._lineage)
                check_noise(optimizer)
            _check_finite(optimizer, step)
            if made.run is None:
                count_rows(optimizer, step)
                self._add_row(optimizer.noise_multiplier, made.sample_rate)
                self._lineage.undeclared += 1
            else:
                made.run.observe(optimizer)
        except UnsupportedRunError as error:
            self.refuse(f"A step of the run was refused, which ended it: {error}")
            raise
        made.num_steps += 1
        if is_first and made.run is not None:
            made.run.assume(whose_noise(optimizer))
        elif is_first:
            own = (whose_noise(optimizer), ON_TRUST, *made.coins)
            self._of_undeclared = merge_assumptions([self._of_undeclared, own])

    def _admit(self, made: MadePrivate, optimizer: DPOptimizer, step: int) -> None:
        """Raises UnsupportedRunError, whatever the records are, if there may be no step."""
        self.check_not_refused()
        refuse_in_budget("run of a PrivacyEngine")
        if isinstance(optimizer, AdaClipDPOptimizer):
            raise UnsupportedRunError(
                f"step {step} uses adaptive clipping: {WHY_NOT_ADAPTIVE}. "
                'Use clipping="flat" or "per_layer".'
            )
        if made.run is not None and made is not self._made:
            raise UnsupportedRunError(
                "This run ended when make_private was called again; its last iterate was taken as "
                "released then."
            )
        if made.run is None and self._runs:
            raise UnsupportedRunError(
                "Expected one declare_run for every make_private, got an optimizer without one. "
                "Call engine.accountant.declare_run(...) after make_private, before its first step."
            )
        if not made.num_steps:
            self._check_initial(made, optimizer)
            if made.run is None:
                made.check_undeclared()

    def get_epsilon(self, delta: float, *args: Any, **kwargs: Any) -> float:
        """Returns the epsilon of everything recorded, at `delta`; further arguments are ignored.

        Raises:
            UnsupportedRunError: The model is not the iterate that was accounted.
        """
        if self._history and not self._has_warned:
            self._has_warned = True
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
        if self._made is not None and not self._made.num_steps and not self._is_restored:
            self._made.check_moved()
        runs = [run for run in self._runs if run.recorder.num_steps]
        if self._history and runs:
            raise UnsupportedRunError(
                f"Expected undeclared steps or runs, got {len(self._history)} rows of undeclared "
                f"steps and {len(runs)} runs: they hold for different neighboring relations. Use a "
                "fresh accountant for each."
            )
        if self._history:
            guarantee = _undeclared_guarantee(tuple(self._history))
            merged = merge_assumptions([guarantee.assumptions, self._of_undeclared])
            return attrs.evolve(guarantee, assumptions=merged)
        self._check()
        recorders = [run.recorder for run in runs]
        now = [(r, r.num_steps, r.release_steps) for r in recorders], [r.assumptions for r in runs]
        if self._composed is None or self._composed[0] != now:
            of_runs = [run.guarantee(self.neighboring_relation) for run in runs]
            self._composed = now, compose_guarantees(of_runs, self.neighboring_relation)
        guarantee = self._composed[1]
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

    def load_state_dict(self, state_dict: Any) -> None:
        """Restores what `state_dict` returned, into an accountant without steps.

        The last stored run goes into the current run, which must be declared alike; earlier stored
        runs are added as they were. Without a current run all are added, ended.

        Raises:
            ValueError: Opacus does not take the state, or the states do not belong together.
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
            states, current = list(state_dict["runs"]), self._runs[-1:]
            ended = [AccountedRun.ended(state) for state in (states[:-1] if current else states)]
            for run in current:
                run.load_state_dict(states[-1])
            self._history = []
            self._runs[:] = ended + current
        elif state_dict["history"]:
            if self._runs:
                raise ValueError("Expected the state of a declared run, got undeclared steps.")
            self.history = state_dict["history"]
            stored = declared_by(state_dict)
            self._of_undeclared = merge_assumptions([self._of_undeclared, stored])
        for reason in state_dict.get("refusals", ()):
            self.refuse(str(reason))
        self._is_restored = True


def _nothing() -> None:
    """The check where no run goes on."""


def _rows(run: Run) -> list[Row]:
    """Returns a run as rows of a history, whose readers take it for DP-SGD."""
    if not run.num_steps:
        return []
    if not isinstance(run, RunRecorder):
        return [(0.0, 1.0, run.num_steps)]
    event = run.event()
    noise, rate = event.noise_multiplier, event.sampling_probability
    if not isinstance(noise, Schedule):
        return [(noise, rate, run.num_steps)]
    return [(z, rate, steps) for z, steps in zip(noise.values, noise.lengths, strict=True)]


def _check_finite(optimizer: DPOptimizer, step: int) -> None:
    """Raises UnsupportedRunError if the noisy gradients are not finite."""
    gradients = [p.grad for p in optimizer.params if p.grad is not None]
    sums = [gradient.sum(dtype=torch.float64) for gradient in gradients]  # of fewer passes
    if not all(map(math.isfinite, read(sums))):
        raise UnsupportedRunError(
            f"step {step} has a gradient that is not finite, which no clip bounds and no noise "
            "hides. Look for a division by 0, or scale the loss down."
        )


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
