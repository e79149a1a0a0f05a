"""The record of a run: what its steps were, from the first one to the event."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import attrs
from dp_accounting import DpEvent, NeighboringRelation

from hidden_state_accountants import Assumption, Guarantee, UnsupportedRunError
from hidden_state_accountants.accountants import compose_guarantees
from hidden_state_accountants.runs.run import Run, run_of
from hidden_state_adapters.tf_privacy import keras_api
from hidden_state_adapters.tf_privacy.algorithm import Algorithm
from hidden_state_adapters.tf_privacy.lineage import (
    Continued,
    PastRun,
    RunState,
    fingerprint,
    runs_behind,
)
from hidden_state_adapters.tf_privacy.settings import Declared
from hidden_state_adapters.tf_privacy.step import MOVED, StepEntry
from hidden_state_adapters.tf_privacy.trained_part import FixedVariables, check_layers
from hidden_state_adapters.trained_layers import why_not_convex

_FIXED = (
    "batches of equal size in the fixed order of the data set, each once per epoch, one step each"
)
FOREIGN_LOOP = (
    "this loop trains what TensorFlow Privacy's optimizers assume: each entry of the loss is about "
    "one example of the batch, computed at the weights that the step moves; every noisy update is "
    "applied, and nothing else changes the weights within an epoch; batches are those of "
    "cyclic_dataset"
)
_GOES_ON = (
    "the run went on with the examples of before in the same order, each time once and from its "
    "newest state"
)
_PRIVATE_STATES = "states of the run, and the weights saved with them, are seen by nobody else"
_DISCARDED = "nothing that was computed after step {}, where the run went on again, was ever seen"
INTERRUPTED = (
    "fit was interrupted (by an error, or by hand when the model was good?), so the number of "
    "steps may depend on the data. Fix it in advance, and start again."
)
FILES_STAY_PRIVATE = (
    "the files that ModelCheckpoint, save, save_weights and export wrote before the last step stay "
    "private"
)
_logger = logging.getLogger("hidden_state_accountants")


class RecordedRun:
    """The record that a callback or a private run keeps of its steps.

    Attributes:
        num_batches: Number of steps that were recorded.
        texts: Declared assumptions about the steps so far.
        spent: Guarantees of the runs that the initial weights come from.
        earlier_events: Their events.

    Args:
        model: Keras model or layer that is built; its trainable variables are released.
        optimizer: Algorithm, which has not taken a step.
        relation: Neighboring relation of the guarantee.
        declared: Declarations that the run is accounted with.
        checked: Assumptions that its holder checks of gradients; None in a foreign loop.
        continued: Run that goes on; None for a new one.
        files_stay_private: True if nobody sees files of the model from before the last step.
    """

    why_not_known = ""  # of the loss, where that is of use
    note = ""  # that the report ends with

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        *,
        relation: NeighboringRelation,
        declared: Declared,
        checked: Iterable[Assumption] | None = None,
        continued: Continued | None = None,
        files_stay_private: bool = False,
    ):
        check_layers(model)
        self.optimizer: Algorithm = optimizer
        if continued is not None:
            continued.state.check_fits(model, optimizer, relation)
        self.model, self.declared, self._fixed = model, declared, FixedVariables(model)
        self.of_gradients = None if checked is None else tuple(checked)
        self.of_batches = _FIXED if checked is None else optimizer.plan.description
        optimizer.begin(declared)
        optimizer.check_start(keras_api.trained(model), declared)
        if checked is not None:  # else the first step says what its blocks are
            self._check_convexity()
        # Of a microbatch no example is left out, and one without gradient makes it another one.
        has_several = optimizer.examples_of_record > 1
        self.relation = NeighboringRelation.REPLACE_ONE if has_several else relation
        self.num_batches, self.texts = 0, tuple[str, ...]()
        self._run: Run | None = None  # the first step decides what it is about
        self._invalid = ""
        self._complete: Callable[[Run], Run] | None = None  # see `may_stop`
        self._is_over = False  # stopped early
        self._files_stay_private, self._private_step = files_stay_private, 0
        self._releases_next = False  # a file was written of a step that is not recorded yet
        self._lineage = optimizer.lineage
        self._lineage.writes = weakref.WeakMethod(self._writes)
        if continued is not None:
            self._resume(continued)
            return
        self._take_over(runs_behind(model))
        before = int(optimizer.update.iterations.numpy())
        if before and not self.spent:
            raise UnsupportedRunError(
                f"Expected a fresh optimizer, or the weights that its last step left, got one with "
                f"iterations = {before} and other weights: the steps that it counts are missing "
                "here. Compile with a fresh optimizer, or go on with the state of that run."
            )
        if self.spent:
            _logger.warning(
                "the initial weights come from %d private run(s) before this one: epsilon is that "
                "of all of them together", len(self.spent),
            )  # fmt: skip

    def _take_over(self, earlier: tuple[PastRun, ...], run_id: str | None = None) -> None:
        """Goes on with the run of this name here, after those that its weights come from."""
        runs = [past.run() for past in earlier]
        self.spent = [run.guarantee(self.relation) for run in runs]
        self.earlier_events = tuple(run.event() for run in runs)
        self._lineage.begin(earlier, run_id)
        trained = keras_api.trained(self.model)
        self._lineage.hang_on(trained, self.model, resumed=run_id is not None)

    # How it goes on elsewhere

    def state(
        self, declared: Iterable[str], *, stays_private: bool, include_private_state: bool
    ) -> RunState:
        """Returns the state of complete steps; see `PrivacyReport.state`."""
        optimizer, variables = self.optimizer, keras_api.trained(self.model)
        self.check()
        self.check_variables()
        if self.of_gradients is None:
            raise UnsupportedRunError(
                "Expected a model that deals its batches, got Keras' own fit: its run does not go "
                "on elsewhere. Use make_private(model); or save the model, and whoever trains it "
                "further composes both runs."
            )
        if optimizer.hidden_state and not include_private_state:
            raise UnsupportedRunError(
                f"Expected include_private_state=True, got False: a run of {optimizer.kind} cannot "
                f"go on without {optimizer.hidden_state}. Say it, with stays_private=True, and "
                "keep the state where nobody else reads it."
            )
        if stays_private:
            self.texts = _each_once(self.texts, [_PRIVATE_STATES])
            self._private_step = self.num_batches
        else:
            self.release()
        assert self._run is not None
        return RunState(
            run_id=self._lineage.run_id,
            optimizer=optimizer.kind,
            relation=self.relation,
            batch_size=optimizer.plan.batch_size,
            examples=optimizer.plan.dataset_size,
            texts=_each_once(self.texts, declared),
            num_steps=self.num_batches,
            iterations=int(optimizer.update.iterations.numpy()),
            run=self._run.state_dict(),
            earlier=self._lineage.earlier,
            weights=fingerprint(keras_api.variables(self.model)),
            blocks=optimizer.places(variables),
            private=optimizer.private_state() if include_private_state else None,
        )

    def _resume(self, continued: Continued) -> None:
        state = continued.state
        self._lineage.check_newest(continued)
        self.optimizer.resume(state, keras_api.trained(self.model))
        self._run = self._lineage.run = self.optimizer.new_run(self.declared)
        self._run.load_state_dict(state.run)  # names the field that differs
        self.num_batches = self._lineage.steps = state.num_steps
        self._lineage.released = max(self._run.release_steps, default=0)
        self._take_over(state.earlier, state.run_id)
        is_discarded = continued.discard_later_steps
        discarded = [_DISCARDED.format(self.num_batches)] if is_discarded else []
        self.texts = _each_once(state.texts, [_GOES_ON, *discarded])

    # What happens

    @property
    def next_batch(self) -> int:
        """Index within the epoch of the batch that the next step must use."""
        return int(self.num_batches % self.optimizer.plan.num_batches)

    @property
    def has_begun(self) -> bool:
        """True if the optimizer took a step, recorded or not."""
        return bool(self.num_batches or self.optimizer.last_step.steps or self._invalid)

    @property
    def has_ended(self) -> bool:
        """True if the run has no epsilon any more."""
        return bool(self._invalid)

    def add(self, entry: StepEntry, batch: int) -> None:
        """Records a step on a batch of the epoch; UnsupportedRunError, for good, if another one."""
        try:
            self._add(entry, batch)
        except (TypeError, ValueError) as error:
            self.invalidate(str(error))

    def _add(self, entry: StepEntry, batch: int) -> None:
        plan: Any = self.optimizer.plan
        step, rows = self.num_batches + 1, plan.num_rows(self.num_batches)
        if not self._lineage.is_newest:
            raise UnsupportedRunError(
                "Another record of this process goes on with the run: no bound covers what two "
                "continuations show together. Go on there."
            )
        if entry.problem:  # the run ends here for a reason that may depend on the data
            raise UnsupportedRunError(f"step {entry.steps} ends the run. {entry.problem}")
        if entry.steps != step:
            raise UnsupportedRunError(
                f"after batch {batch} the optimizer has taken {entry.steps} steps, expected {step}:"
                " one for every batch."
            )
        if batch != self.next_batch or entry.rows != rows:
            raise UnsupportedRunError(
                f"Expected step {step} on all rows of batch {self.next_batch}, got batch {batch} "
                "or other rows."
            )
        self.num_batches = step
        told = attrs.evolve(self.optimizer.step_of(entry), batch=batch, rows=plan.batch_size)
        if step == 1:
            self.check_variables()
            self._check_convexity()
        if self._run is None:
            self._run = self._lineage.run = self.optimizer.new_run(self.declared)
        self._run.add(told)
        self._lineage.steps = step
        if self._releases_next:
            self._releases_next = False
            self.release()

    def _check_convexity(self) -> None:
        """Refuses a convex loss of several layers that are moved together."""
        layers = [keras_api.layers_of(self.model, part) for part in self.optimizer.blocks]
        if reason := why_not_convex(self.optimizer.known_loss, layers):
            raise UnsupportedRunError(reason)

    def release(self) -> None:
        """Counts the current weights as released."""
        self._lineage.release()

    def _writes(self) -> None:
        """Counts a file that is written now, unless it is declared to stay private."""
        if self._files_stay_private or self._private_step == self.num_batches:
            return
        if self.optimizer.last_step.steps == self.num_batches:
            self.release()
        else:  # a callback writes before the one that records
            self._releases_next = True

    def shown_after_epoch(self, delta: float | None) -> dict[str, float]:
        """Returns, for the logs, what epsilon would be if training ended there."""
        return {} if delta is None else {"epsilon_if_released_now": self.guarantee().epsilon(delta)}

    def refuse_stopped(self) -> NoReturn:
        """Ends the run: what stopped it may have looked at the data."""
        self.invalidate(
            "training was stopped early (model.stop_training), so the number of steps may "
            "depend on the data. Fix it in advance."
        )

    def invalidate(self, text: str) -> NoReturn:
        """Ends the run, which has no epsilon any more."""
        self._invalid = self._lineage.ended = text
        raise UnsupportedRunError(text)

    def go_on(self, model: Any, optimizer: Any) -> None:
        """Raises UnsupportedRunError unless the run may go on with this model and optimizer."""
        if self._invalid:
            raise UnsupportedRunError(f"The run cannot go on: {self._invalid}")
        check_layers(model)
        if model is not self.model:
            self._lineage.hang_on(keras_api.trained(model), model)
        self.model = model
        self.check_iterate()
        optimizer.check_start(keras_api.trained(model), self.declared)

    # What must hold for an epsilon

    def check(self) -> None:
        """Raises unless there is a step, all are recorded, and the last one is complete."""
        if self._invalid:
            raise UnsupportedRunError(f"The run is not accounted: {self._invalid}")
        if not self.num_batches:
            raise ValueError("Expected at least one step, got none yet. Pass the callback to fit.")
        taken = self.optimizer.last_step.steps
        if taken != self.num_batches:
            raise UnsupportedRunError(
                f"The optimizer took {taken} steps, but {self.num_batches} are recorded. "
                "Pass the callback to every call of fit, and train in no other way."
            )

    def check_iterate(self) -> None:
        """Raises UnsupportedRunError if the model is not the iterate that was accounted."""
        if self.num_batches or self._invalid:
            self.check()
            self.check_variables()

    def check_variables(self) -> None:
        """Raises UnsupportedRunError likewise, of steps that may not be recorded yet."""
        if not self.optimizer.is_iterate(keras_api.trained(self.model)):
            raise UnsupportedRunError(MOVED)
        self.check_fixed()

    def check_fixed(self) -> None:
        """Raises UnsupportedRunError, for good, if a variable that is not trained was changed."""
        try:
            self._fixed.check(self.model)
        except ValueError as error:
            self.invalidate(str(error))

    # What was spent

    def may_stop(self, complete: Callable[[Run], Run]) -> None:
        """Accounts the run with all steps that could follow, because released iterates choose them.

        What is seen of it until it stops is a function of what all of them would release.
        """
        self._complete, self._lineage.whole = complete, self.whole_run

    def has_stopped(self, *, early: bool) -> None:
        """Gives the run all steps that could have followed; it is over if they were not taken."""
        self._is_over = early
        self._run = self._lineage.run = self.whole_run()
        self._complete = self._lineage.whole = None

    def whole_run(self) -> Run:
        """Returns the run, with the steps that could follow where released iterates choose them."""
        assert self._run is not None
        if self._complete is None:
            return self._run
        return self._complete(run_of(self._run.state_dict()))

    @property
    def chooses_steps(self) -> bool:
        """True if EarlyStopping may stop it, or has."""
        return self._complete is not None or self._is_over

    def events(self) -> tuple[DpEvent, ...]:
        """Returns the events of the runs that the initial weights come from, and this one's."""
        self.check()
        return (*self.earlier_events, self.whole_run().event())

    def guarantee(self) -> Guarantee:
        """Returns the guarantee of all `events`, with the current model as the last iterate."""
        self.check()
        own = self.whole_run().guarantee(self.relation)
        return compose_guarantees([*self.spent, own], self.relation) if self.spent else own


def _each_once(texts: Iterable[str], more: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*texts, *more)))
