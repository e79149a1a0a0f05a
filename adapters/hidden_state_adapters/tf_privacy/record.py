"""The record of a run: entries of the log become steps, and what is told of them."""

from __future__ import annotations

import functools
import logging
import textwrap
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import attrs
import numpy as np
from dp_accounting import DpEvent, NeighboringRelation

from hidden_state_accountants import (
    Assumption,
    BatchOrder,
    Comparison,
    Gain,
    Guarantee,
    RunRecorder,
    UnsupportedRunError,
    compare,
    validate,
    would_gain,
)
from hidden_state_accountants.accountants import compose_guarantees
from hidden_state_accountants.advice import report_lines
from hidden_state_accountants.guarantee import merge_assumptions, replace_assumptions
from hidden_state_accountants.runs.assumptions import OF_EVERY_RUN
from hidden_state_accountants.runs.run import Run, run_of
from hidden_state_accountants.runs.statement import Statement
from hidden_state_adapters.public_numbers import warn_of_delta
from hidden_state_adapters.tf_privacy import keras_api
from hidden_state_adapters.tf_privacy.algorithm import Algorithm
from hidden_state_adapters.tf_privacy.lineage import (
    PastRun,
    RunState,
    fingerprint,
    reduced_with_runs,
    runs_behind,
)
from hidden_state_adapters.tf_privacy.refusals import refusal
from hidden_state_adapters.tf_privacy.settings import Declared
from hidden_state_adapters.tf_privacy.step import StepEntry, check_constraints, check_variables
from hidden_state_adapters.trained_layers import why_not_convex

_FIXED = (
    "batches of equal size in the fixed order of the data set, each once per epoch, one step each"
)
_CHECKED = (
    "variables in float32 or float64, {}; variables that are not trained as at the start, whenever "
    "epsilon is asked for"
)
_ONLY_BY_STEPS = "changed by the private optimizer only"
_BETWEEN_EPOCHS = "those that the last step left when an epoch begins and when epsilon is asked for"
_DECLARED = (
    "the preprocessing of an example does not depend on the others",
    "losses and metrics of the training data (History, progress bar) stay private",
)
_NO_MEMORY = (
    "no step reads what was computed from other examples without noise and is kept outside of the "
    "model's variables: a memory of features, centres, running statistics"
)
_FOREIGN_LOOP = (
    "this loop trains what TensorFlow Privacy's optimizers assume: each entry of the loss is about "
    "one example of the batch, computed at the weights that the step moves; every noisy update is "
    "applied, and nothing else changes the weights within an epoch; batches are those of "
    "cyclic_dataset"
)
_EARLIER = (
    "the private runs that the initial weights come from ({}) are composed with this one: "
    "variables, copies of models and files of private models and optimizers tell"
)
_GOES_ON = (
    "the run went on with the examples of before in the same order, each time once and from its "
    "newest state"
)
_PRIVATE_STATES = "states of the run, and the weights saved with them, are seen by nobody else"
_DISCARDED = "nothing that was computed after step {}, where the run went on again, was ever seen"
_NO_LOSS = (
    "Every step counts, because no loss_geometry is declared. Where one Dense layer is trained, at "
    'the end of the model, loss_geometry="auto" with feature_norm= reads it off.'
)
INTERRUPTED = (
    "fit was interrupted (by an error, or by hand when the model was good?), so the number of "
    "steps may depend on the data. Fix it in advance, and start again."
)
FILES_STAY_PRIVATE = (
    "the files that ModelCheckpoint, save, save_weights and export wrote before the last step stay "
    "private"
)
_WRITES = ("save", "save_weights", "export")
# What gives a preprocessing layer the statistics that `adapt` would find.
_ADAPTED = {"input_mean": "mean=..., variance=...", "input_bin_boundaries": "bin_boundaries=..."}
_logger = logging.getLogger("hidden_state_accountants")


def check_layers(model: Any) -> None:
    """Refuses a model whose layers or variables cannot be accounted.

    Keras does not tell which data `adapt` has seen, so constants are the way to say that they do
    not come from the examples.

    Raises:
        UnsupportedRunError: The text names the layer or variable.
    """
    for layer in model._flatten_layers():
        if isinstance(layer, keras_api.BATCH_NORMALIZATIONS) and layer.trainable:
            raise refusal(
                f"Expected no trainable batch normalisation, got {layer.name}: it mixes the "
                "examples of a batch and keeps statistics of them without noise. Use "
                "LayerNormalization, or set layer.trainable = False."
            )
        if getattr(layer, "stateful", False):
            raise refusal(
                f"Expected layers without state, got {layer.name} with stateful=True: it carries "
                "examples into later steps without noise."
            )
        if keras_api.computes_otherwise(layer):
            raise refusal(
                f"Expected {layer.name} to use its variables in their own precision, got a "
                "mixed-precision or quantized policy: coarse rounding makes the update expand "
                'small distances. Train with the policy "float32" or "float64".'
            )
        if isinstance(layer, keras_api.ADAPTED_LAYERS) and (argument := _adapted(layer)):
            raise refusal(
                f"Expected {type(layer).__name__}({argument}) with constants, got {layer.name} as "
                "adapt left it: statistics of the examples would be in the model without noise. "
                "Adapt a layer to public data, and give what it found as constants. In a backbone "
                "that came with public weights freeze it: backbone.trainable = False."
            )
    if model.losses:
        raise refusal(
            "Expected no regularisation losses (kernel_regularizer, add_loss), got "
            f"{len(model.losses)}: inside the clip a penalty is no decoupled decay. Drop them, and "
            "give the optimizer the decay, SGD(weight_decay=); that of Keras' L2(a) is 2 a. For L1 "
            "take prox= of the private model."
        )
    if keras_api.IS_KERAS_3:  # whose own variables know of constraints, and TensorFlow's do not
        check_constraints(model.trainable_variables)
    check_variables(keras_api.trained(model))


def _adapted(layer: Any) -> str:
    """The argument that would have given what the layer was fitted to; "" if it was given."""
    if not layer.trainable and not getattr(layer, "is_adapted", False):
        return ""  # of a frozen backbone (EfficientNet), whose weights are declared to be public
    for attribute, argument in _ADAPTED.items():
        if hasattr(layer, attribute):
            return argument if getattr(layer, attribute) is None else ""
    if hasattr(layer, "_has_input_vocabulary"):
        return "" if layer._has_input_vocabulary else "vocabulary=..."
    return "..." if layer.is_adapted else ""


class FixedVariables:
    """The variables of a model that are not trained: their values when the run began."""

    def __init__(self, model: Any):
        self._values = self._now(model)

    def check(self, model: Any) -> None:
        """Raises UnsupportedRunError if one of them was changed."""
        now = self._now(model)
        if len(now) != len(self._values) or not all(map(np.array_equal, now, self._values)):
            raise refusal(
                "a variable that is not trained was changed during the run (running statistics, "
                "counters): it carries the data of the examples past the noise."
            )

    def _now(self, model: Any) -> list[np.ndarray]:
        return [variable.numpy() for variable in keras_api.fixed(model)]


@attrs.frozen
class Dealt:
    """How the batches of a run are dealt.

    Attributes:
        text: What is checked of them, in words.
        period: Batches of an epoch.
        rows: What the batch of a step, from 0 on, must have.
    """

    text: str
    period: int
    rows: Callable[[int], int]


class RecordedRun:
    """What a callback and a model hold: they say which batch a step was taken on.

    The mechanism says what kind of `Run` its steps are, and what each of them did.

    Attributes:
        declared: What the run is accounted with.

    Args:
        model: A Keras model or layer that is built; its trainable variables are released.
        optimizer: The mechanism; it has not taken a step.
        batch_size: b, as all that follows in records, which may be microbatches.
        examples: Of an epoch.
        relation: Of the guarantee.
        declared: By the user.
        checked: What its holder knows of the gradients; None in a loop of somebody else.
        state: Of the run that goes on; None for a new one.
        discard_later_steps: Says that nothing of the steps after the state was ever seen.
        dealt: The batches; None for those of `cyclic_dataset`.
        files_stay_private: Says that nobody sees files of the model from before the last step;
            otherwise the iterate that one is written of counts as released.

    Raises:
        UnsupportedRunError: No run of this optimizer and model can be accounted, or the state is
            of another one.
        ValueError: The state is damaged.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        *,
        batch_size: int,
        examples: int,
        relation: NeighboringRelation,
        declared: Declared,
        checked: Iterable[Assumption] | None = None,
        state: RunState | None = None,
        discard_later_steps: bool = False,
        dealt: Dealt | None = None,
        files_stay_private: bool = False,
    ):
        check_layers(model)
        self.optimizer: Algorithm = optimizer
        self._batch_size, self._examples = batch_size, examples
        if state is not None:
            state.check_fits(model, optimizer, batch_size, examples)
        self.model = model
        self._fixed = FixedVariables(model)
        self._of_gradients = None if checked is None else tuple(checked)
        self._dealt = dealt or Dealt(_FIXED, examples // batch_size, lambda _: batch_size)
        self.declared = declared
        optimizer.begin(declared)
        optimizer.check_start(keras_api.trained(model), declared)
        if checked is not None or not optimizer.blocks:  # else the first step says what they are
            self._check_convexity()
        self.num_batches = 0  # that were recorded
        # Of a microbatch no example is left out, and one without gradient makes it another one.
        has_several = optimizer.examples_of_record > 1
        self._relation = NeighboringRelation.REPLACE_ONE if has_several else relation
        self._run: Run | None = None  # the first step decides what it is about
        self._invalid = ""
        self._texts: tuple[str, ...] = ()  # of the user's word, about steps so far
        self._complete: Callable[[Run], Run] | None = None  # see `may_stop`
        self._whole: tuple[Any, Run] | None = None
        self._is_over = False  # stopped early
        self._files_stay_private, self._private_step = files_stay_private, 0
        self._releases_next = False  # a file was written of a step that is not recorded yet
        self._lineage = optimizer.lineage
        self._count_files(model)
        if state is None:
            self._begin()
        else:
            self._resume(state, discard_later_steps)
        if state is None and (line := self.optimizer.line_before(self._relation)):
            _logger.warning(line)

    def _begin(self) -> None:
        """Asks where the initial weights come from."""
        self._take_over(runs_behind(self.model))
        before = int(self.optimizer.update.iterations.numpy())
        if before and not self._earlier:
            raise refusal(
                f"Expected a fresh optimizer, or the weights that its last step left, got one with "
                f"iterations = {before} and other weights: the steps that it counts are missing "
                "here. Go on with the state of that run; or, if the weights come from no training "
                "on these examples, compile with a fresh optimizer."
            )
        if self._earlier:
            _logger.warning(
                "the initial weights come from %d private run(s) before this one: epsilon is that "
                "of all of them together", len(self._earlier),
            )  # fmt: skip

    def _take_over(self, earlier: tuple[PastRun, ...], run_id: str | None = None) -> None:
        """Goes on with the run of this name here, after those that its weights come from."""
        self._earlier = tuple(past.run() for past in earlier)
        self._spent = [run.guarantee(self._relation) for run in self._earlier]
        self._lineage.begin(earlier, run_id)
        trained = keras_api.trained(self.model)
        self._lineage.hang_on(trained, self.model, resumed=run_id is not None)

    # How it goes on elsewhere

    def state(
        self, declared: Iterable[str], *, stays_private: bool, include_private_state: bool
    ) -> RunState:
        """Where the run stands, complete steps only.

        Args:
            declared: What its holder adds to the assumptions.
            stays_private: Whether the current weights do not count as released by it.
            include_private_state: Whether the hidden state of the optimizer is part of it.

        Raises:
            ValueError: No step was taken.
            UnsupportedRunError: As `check_iterate`; or the run cannot go on without the hidden
                state of the optimizer.
        """
        self.check()
        self.check_variables()
        assert self._run is not None
        if self._of_gradients is None:
            raise refusal(
                "Expected a model that deals its batches, got Keras' own fit: its run does not go "
                "on elsewhere. Use make_private(model); or save the model, and whoever trains it "
                "further composes both runs."
            )
        optimizer, variables = self.optimizer, keras_api.trained(self.model)
        if optimizer.hidden_state and not include_private_state:
            raise refusal(
                f"Expected include_private_state=True, got False: a run of {optimizer.kind} cannot "
                f"go on without {optimizer.hidden_state}. Say include_private_state=True and "
                "stays_private=True, and keep the state where nobody else reads it."
            )
        if stays_private:
            self._assume(_PRIVATE_STATES)
            self._private_step = self.num_batches
        else:
            self.release()
        places = {id(variable): index for index, variable in enumerate(variables)}
        return RunState(
            run_id=self._lineage.run_id,
            optimizer=optimizer.kind,
            relation=self._relation,
            batch_size=self._batch_size,
            examples=self._examples,
            declared=self.declared,
            texts=tuple(dict.fromkeys((*self._texts, *self._left_open, *declared))),
            num_steps=self.num_batches,
            iterations=int(optimizer.update.iterations.numpy()),
            run=self._run.state_dict(),
            earlier=self._lineage.earlier,
            weights=fingerprint(keras_api.variables(self.model)),
            blocks=tuple(tuple(places[id(v)] for v in block) for block in optimizer.blocks),
            private=optimizer.private_state() if include_private_state else None,
        )

    def _resume(self, state: RunState, discard_later_steps: bool) -> None:
        self._lineage.check_newest(state, discard_later_steps)
        self.optimizer.resume(state, keras_api.trained(self.model))
        self._run = self.optimizer.new_run(self.declared)
        self._run.load_state_dict(state.run)  # names the field that differs
        self.num_batches = self._lineage.steps = state.num_steps
        self._lineage.run, self._lineage.released = (
            self._run,
            max(self._run.release_steps, default=0),
        )
        self._take_over(state.earlier, state.run_id)
        discarded = (_DISCARDED.format(self._run.num_steps),) if discard_later_steps else ()
        self._texts = tuple(dict.fromkeys((*state.texts, _GOES_ON, *discarded)))

    # What happens

    @property
    def next_batch(self) -> int:
        """The index within the epoch of the batch that the next step must use."""
        return self.num_batches % self._dealt.period

    @property
    def has_begun(self) -> bool:
        """Whether the optimizer took a step, recorded or not."""
        return bool(self.num_batches or self.optimizer.last_step.steps or self._invalid)

    @property
    def has_ended(self) -> bool:
        """Whether there is no figure for the run any more."""
        return bool(self._invalid)

    def add(self, batch: int, entry: StepEntry | None = None) -> None:
        """Records the step that was taken on a batch, with the values that it used.

        Args:
            batch: Its index within the epoch.
            entry: What is known of the step; None for the last one.

        Raises:
            UnsupportedRunError: It is not the step that has to follow; nothing can follow then.
        """
        try:
            self._add(self.optimizer.last_step if entry is None else entry, batch)
        except (TypeError, ValueError) as error:
            self.invalidate(str(error))

    def _add(self, entry: StepEntry, batch: int) -> None:
        self._check_entry(entry, batch)
        self.num_batches += 1
        step = self.optimizer.step_of(entry)
        if self.num_batches == 1:
            self.check_variables()
            self._check_convexity()
        if self._run is None:
            self._run = self._lineage.run = self.optimizer.new_run(self.declared)
        self._run.add(attrs.evolve(step, batch=batch, rows=self._batch_size))
        self._lineage.steps = self.num_batches
        if self._releases_next:
            self._releases_next = False
            self.release()

    def _check_convexity(self) -> None:
        """Refuses a convex loss of several layers that are moved together."""
        parts = self.optimizer.blocks or (keras_api.trained(self.model),)
        layers = [keras_api.layers_of(self.model, part) for part in parts]
        if reason := why_not_convex(self.optimizer.known_loss, layers):
            raise refusal(reason)

    def _assume(self, text: str) -> None:
        self._texts = tuple(dict.fromkeys((*self._texts, text)))

    def _check_entry(self, entry: StepEntry, batch: int) -> None:
        step = self.num_batches + 1
        if not self._lineage.is_newest:
            raise refusal(
                "Another record of this process goes on with the run: no bound covers what two "
                "continuations show together. Go on there."
            )
        if entry.problem:  # the run ends here for a reason that may depend on the data
            raise refusal(f"step {step} ends the run. {entry.problem}")
        if entry.steps != step:
            raise refusal(
                f"after batch {batch} the optimizer has taken {entry.steps} steps, expected {step}:"
                " one for every batch."
            )
        rows = self._dealt.rows(self.num_batches)
        if batch != self.next_batch or entry.rows != rows:
            raise refusal(
                f"Expected step {step} on all rows of batch {self.next_batch}, got batch {batch} "
                "or other rows."
            )

    def release(self) -> None:
        """Notes that the current variables are seen."""
        self._lineage.release()

    def _count_files(self, model: Any) -> None:
        """Lets what writes files of a model count them as releases, whoever calls it.

        So do models inside of it that are trained, and the one that `make_private` was given.
        """
        writes = weakref.WeakMethod(self._writes)

        def counted(write: Callable[..., Any], part: Any, *args: Any, **kwargs: Any) -> Any:
            if (note := writes()) is not None:
                note()
            return write(part, *args, **kwargs)

        def reduced(write: Callable[..., Any], part: Any, protocol: Any) -> Any:
            return reduced_with_runs(part, counted(write, part, protocol))

        def copied(part: Any, memo: Any) -> Any:
            make, arguments = part.__reduce_ex__(4)
            return make(*arguments)

        for part in keras_api.models_of(model):
            for name in _WRITES:
                if (write := getattr(type(part), name, None)) is not None:
                    vars(part)[name] = functools.partial(counted, write, part)
            vars(part)["__reduce_ex__"] = functools.partial(reduced, type(part).__reduce_ex__, part)
            vars(part)["__deepcopy__"] = functools.partial(copied, part)

    def _writes(self) -> None:
        """Counts a file that is written now, unless it is declared to stay private."""
        if self._files_stay_private or self._private_step == self.num_batches:
            return
        if self.optimizer.last_step.steps == self.num_batches:
            self.release()
        else:  # a callback writes before the one that records
            self._releases_next = True

    def shown_after_epoch(self, delta: float | None) -> dict[str, float]:
        """For the logs: what epsilon would be if training ended there; nothing without delta."""
        return {} if delta is None else {"epsilon_if_released_now": self.guarantee().epsilon(delta)}

    def refuse_stopped(self) -> NoReturn:
        """Ends the run: what stopped it may have looked at the data."""
        self.invalidate(
            "training was stopped early (model.stop_training), so the number of steps may "
            "depend on the data. Fix it in advance."
        )

    def invalidate(self, text: str) -> NoReturn:
        """Ends the run: there is no figure for it."""
        self._invalid = self._lineage.ended = text
        raise refusal(text)

    def go_on(self, model: Any, optimizer: Any) -> None:
        """Checks that the run so far may go on with this model, optimizer and loss.

        Raises:
            UnsupportedRunError: It has ended, or the model is not the iterate that was accounted.
        """
        if self._invalid:
            raise refusal(f"The run cannot go on: {self._invalid}")
        check_layers(model)
        if model is not self.model:
            self._count_files(model)
        self.model = model
        self.check_iterate()
        optimizer.check_start(keras_api.trained(model), self.declared)

    # What must hold for a figure

    def check(self) -> None:
        """Raises unless all steps of the optimizer are recorded, and the last one is complete.

        Raises:
            ValueError: No step was taken.
            UnsupportedRunError: The run has ended, or steps are missing.
        """
        if self._invalid:
            raise refusal(f"The run is not accounted: {self._invalid}")
        if not self.num_batches:
            raise ValueError("Expected at least one step, got none yet. Pass the callback to fit.")
        taken = self.optimizer.last_step.steps
        if taken != self.num_batches:
            raise refusal(
                f"The optimizer took {taken} steps, but {self.num_batches} are recorded. "
                "Pass the callback to every call of fit, and train in no other way."
            )
        self.optimizer.check_run()

    def check_iterate(self) -> None:
        """Raises UnsupportedRunError if the model is not the iterate that was accounted."""
        if self.num_batches or self._invalid:
            self.check()
            self.check_variables()

    def check_told(self) -> None:
        """What is asked before anything is told of the run: model and loss are what they were.

        Where another private optimizer has trained on, there is nothing to look at any more; the
        event is told, to be composed with that of the other.

        Raises:
            UnsupportedRunError: The model is not the iterate that was accounted.
        """
        if not self._lineage.is_over:
            self.check_iterate()

    def check_variables(self) -> None:
        """Likewise, of steps that may not be recorded yet."""
        if not self.optimizer.is_iterate(keras_api.trained(self.model)):
            raise refusal(
                "The trainable variables were changed outside the private optimizer, so the model "
                "is not the iterate that was accounted. Release the model that fit left."
            )
        self.check_fixed()

    def check_fixed(self) -> None:
        """Raises UnsupportedRunError, for good, if a variable that is not trained was changed."""
        try:
            self._fixed.check(self.model)
        except ValueError as error:
            self.invalidate(str(error))

    # What was spent

    def may_stop(self, complete: Callable[[Run], Run]) -> None:
        """The number of steps is going to be chosen, by what released iterates show.

        The run is accounted with all steps that could follow. What is seen of it until it stops is
        a function of what all of them would release.

        Args:
            complete: Adds those steps, and their releases, to a run.
        """
        self._complete, self._lineage.whole = complete, self._whole_run

    def has_stopped(self, *, early: bool) -> None:
        """From here on the run has all steps that could have followed.

        Args:
            early: Whether they were not taken, so that the run is over.
        """
        assert self._run is not None
        self._is_over = early
        self._run = self._lineage.run = self._whole_run()
        self._complete = self._lineage.whole = None

    def _whole_run(self) -> Run:
        assert self._run is not None
        if self._complete is None:
            return self._run
        so_far = self.num_batches, self._run.release_steps
        if self._whole is None or self._whole[0] != so_far:
            copy = run_of(self._run.state_dict())
            self._whole = so_far, self._complete(copy)
        return self._whole[1]

    @property
    def chooses_steps(self) -> bool:
        """Whether EarlyStopping may stop it, or has."""
        return self._complete is not None or self._is_over

    def event(self) -> DpEvent:
        """The event that happened.

        Raises:
            ValueError, UnsupportedRunError: As `check`.
        """
        self.check()
        return self._whole_run().event()

    def events(self) -> tuple[DpEvent, ...]:
        """Those of the runs that the initial weights come from, and this one; as `event`."""
        return (*self.earlier_events, self.event())

    @property
    def earlier_events(self) -> tuple[DpEvent, ...]:
        """Those of the runs that the initial weights come from."""
        return tuple(run.event() for run in self._earlier)

    def guarantee(self) -> Guarantee:
        """Of what is released, with the current model as the last iterate; errors as `check`.

        It is that of all `events` together.
        """
        self.check()
        own = self._whole_run().guarantee(self._relation)
        return compose_guarantees([*self._spent, own], self._relation) if self._spent else own

    def assumptions(self, declared: Iterable[str] = ()) -> tuple[Assumption, ...]:
        """Everything that has to be true.

        Args:
            declared: What its holder adds.
        """
        is_own_loop = self._of_gradients is not None
        variables = _CHECKED.format(_ONLY_BY_STEPS if is_own_loop else _BETWEEN_EPOCHS)
        own = [Assumption.checked(text) for text in (self._dealt.text, variables)]
        own += [Assumption.checked(text) for text in self.optimizer.described.checked()]
        own += [*(self._of_gradients or ()), *self.declared.measured]
        if self._earlier:
            own.append(Assumption.checked(_EARLIER.format(len(self._earlier))))
        of_run = [*self._left_open, *self.optimizer.declared(self.event()), *self._texts]
        if not self.declared.source:  # else loss and features are known
            of_run.append(_NO_MEMORY)
        own += [*OF_EVERY_RUN, *map(Assumption.declared, (*_DECLARED, *of_run, *declared))]
        # What was read off this run's loss says nothing about the runs before it.
        run = self._whole_run()
        proven = run.guarantee(self._relation).assumptions
        derived = self.optimizer.described.derived()
        proven = replace_assumptions(proven, *derived, *self.optimizer.in_advance(run))
        before = [guarantee.assumptions for guarantee in self._spent]
        return merge_assumptions([tuple(own), proven, *before])

    @property
    def _left_open(self) -> Iterable[str]:
        """What is the user's word about the loss."""
        return (_FOREIGN_LOOP,) if self._of_gradients is None else ()

    def statement(self, delta: float, declared: Iterable[str] = ()) -> str:
        """The privacy statement; see `assumptions`."""
        statement = Statement(
            self.events(),
            self.guarantee(),
            self.assumptions(declared),
            delta,
            microbatch=self.optimizer.examples_of_record,
            update_rule=self.optimizer.update.name,
        )
        return self.optimizer.told(statement)


def checked_relation(relation: NeighboringRelation | str) -> NeighboringRelation:
    """The relation, if batches that are always the same ones can be accounted under it.

    Raises:
        TypeError, UnsupportedRunError: They cannot.
    """
    relation = validate.neighboring_relation(relation)
    fixed = RunRecorder(batch_order=BatchOrder.CYCLIC, batch_size=1, dataset_size=1)
    fixed.check_relation(relation)
    return relation


def _advice(events: Sequence[DpEvent], guarantee: Guarantee, delta: float) -> list[str]:
    """Where epsilon is that of composition: why no smaller bound holds, and what would help."""
    if len(events) > 1 or not guarantee.theorem.startswith("composition"):
        return []
    unused = [f"Not used: {name}: {reason}." for name, reason in guarantee.alternatives[:1]]
    if getattr(events[0], "loss", ...) is None:
        unused = [_NO_LOSS]
    helps = report_lines(events[0], guarantee.neighboring_relation, delta, "l2_norm_clip")
    return [textwrap.fill(line[:1].upper() + line[1:], 80) for line in [*unused, *helps]]


class Figures:
    """Event, guarantee and statement of a `RecordedRun`; a base beside the holder's own."""

    _record: RecordedRun | None = None
    _how_to_begin = "Pass the callback to fit."
    _target_delta: float | None = None

    def _told_by(self) -> Figures:
        """Who holds the record."""
        return self

    def _check_can_go_on(self) -> None:
        """Raises UnsupportedRunError where the run could not go on elsewhere."""

    def _declared_texts(self) -> Iterable[str]:
        """What the holder adds to the assumptions that are the user's word."""
        return ()

    def _recorded(self) -> RecordedRun:
        own = self._told_by()
        if own._record is None:
            raise ValueError(f"Expected at least one step, got none yet. {self._how_to_begin}")
        own._record.check_told()
        return own._record

    @property
    def privacy_event(self) -> Any:
        """The event that happened: a `LastIterateDpEvent`, or the one of the optimizer.

        Raises:
            ValueError: No step was taken.
            UnsupportedRunError: Steps were taken that are not recorded, the run has ended, or the
                model is neither the last iterate nor what another private optimizer made of it.
        """
        return self._recorded().event()

    @property
    def privacy_events(self) -> tuple[Any, ...]:
        """The events of the private runs that the initial weights come from, and this one's.

        Raises:
            ValueError, UnsupportedRunError: As `privacy_event`.
        """
        return self._recorded().events()

    @property
    def guarantee(self) -> Guarantee:
        """The guarantee of what is released, with the current model as the last iterate.

        It is that of all `privacy_events` together, as are the figures that follow, with all
        `assumptions`.
        """
        return attrs.evolve(self._recorded().guarantee(), assumptions=self.assumptions)

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """Everything that has to be true, each checked, declared or public."""
        return self._recorded().assumptions(self._told_by()._declared_texts())

    def get_epsilon(self, delta: float) -> float:
        """The epsilon of what is released at `delta`, if the model is the last iterate.

        Raises:
            ValueError: No step was taken.
            UnsupportedRunError: The model is not the iterate that was accounted.
        """
        record = self._recorded()
        record.check_iterate()
        warn_of_delta(delta, record.event().dataset_size)
        return record.guarantee().epsilon(delta)

    def compare(self, delta: float = 1e-5) -> Comparison:
        """What every bound, and dp-accounting's own accountants, say about what happened.

        Args:
            delta: In [0, 1].

        Returns:
            A table with the rows of each run; `print` it.

        Raises:
            ValueError, UnsupportedRunError: As `get_epsilon`.
        """
        self.get_epsilon(delta)  # checks the iterate
        relation = self.guarantee.neighboring_relation
        return compare(list(self.privacy_events), delta, relation)

    def would_gain(self, delta: float = 1e-5, *, epochs: int | None = None) -> Gain:
        """Whether hiding the iterates gains anything; one epoch is enough to ask for all.

        Args:
            delta: Where epsilon is read, in (0, 1).
            epochs: Length of the run, if its settings stay what they were; None for the steps that
                were taken.

        Returns:
            The epsilons of all iterates and of the last one, the noise at equal epsilon, and the
            change that helps most; `print` it.

        Raises:
            TypeError: The run is one of which every step counts.
            ValueError, UnsupportedRunError: As `privacy_event`; or settings change, which says
                nothing of other epochs.
        """
        event = self.privacy_event
        if epochs is not None:
            event = attrs.evolve(event, num_steps=epochs * event.batches_per_epoch)
        return would_gain(event, delta, self._recorded().guarantee().neighboring_relation)

    def release(self) -> None:
        """Marks the current model as released; call it for every model that anybody sees.

        The last one always counts.

        Raises:
            UnsupportedRunError: The model is not the iterate that was accounted.
        """
        own = self._told_by()
        if own._record is not None:
            own._record.check_iterate()
            own._record.release()

    def state(
        self, *, stays_private: bool = False, include_private_state: bool = False
    ) -> dict[str, Any]:
        """What the run needs to go on in another process, as plain types for JSON.

        Save the model at the same moment. There, load it, construct or load the optimizer as
        before, and call `resume`: it is then one run. The noise of the other process is new.

        It holds nothing that was measured on the examples, unless `include_private_state`.

        Args:
            stays_private: False counts the current weights as released. True says that nobody else
                ever sees this state and the weights saved with it, which is then an assumption.
            include_private_state: Also the error of a DiceSGD run, which is data of the examples
                without noise, and the secret order of a "shuffled_once" run: they cannot go on
                without it. Needs stays_private=True. Other orders are drawn anew.

        Raises:
            ValueError: No step was taken; or the private state would be released.
            UnsupportedRunError: The model is not the iterate that was accounted, or the run cannot
                go on without the private state.
        """
        if include_private_state and not stays_private:
            raise ValueError(
                "Expected stays_private = True with include_private_state = True, got False: the "
                "guarantee rests on nobody knowing the error of DiceSGD."
            )
        self._told_by()._check_can_go_on()
        state = self._recorded().state(
            self._told_by()._declared_texts(),
            stays_private=stays_private,
            include_private_state=include_private_state,
        )
        return state.to_plain()

    def report(self, delta: float | None = None) -> str:
        """The privacy statement of the run with everything that was checked and declared.

        Args:
            delta: Where epsilon is read; None for the callback's target_delta.

        Raises:
            ValueError: No step was taken, or no delta was given.
            UnsupportedRunError: The model is not the iterate that was accounted.
        """
        delta = self._target_delta if delta is None else delta
        if delta is None:
            raise ValueError("Expected delta, got None. Pass it here or as target_delta.")
        record = self._recorded()
        record.check_iterate()
        text = record.statement(validate.target_delta(delta), self._told_by()._declared_texts())
        return "\n".join([text, *_advice(record.events(), record.guarantee(), delta)])

    def __getstate__(self) -> Any:
        raise UnsupportedRunError(
            "The record of a run cannot be copied or pickled: the steps of the copy would be "
            "missing from epsilon. Keep "
            "privacy_event.to_dict()."
        )
