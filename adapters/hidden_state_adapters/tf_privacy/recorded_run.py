"""The steps of one optimizer over fixed batches, checked one by one, and what is said of them."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, NoReturn

from dp_accounting import DpEvent, NeighboringRelation

from hidden_state_accountants import Assumption, BatchOrder, Guarantee, RunRecorder, validate
from hidden_state_accountants.guarantee import merge_assumptions, replace_assumptions
from hidden_state_accountants.runs.base import Run, Step
from hidden_state_accountants.runs.statement import statement_of
from hidden_state_adapters.tf_privacy.declared import Declared
from hidden_state_adapters.tf_privacy.derived import check_curvature, resolved
from hidden_state_adapters.tf_privacy.guards.model import FixedVariables, check_layers
from hidden_state_adapters.tf_privacy.guards.settings import refuse_surroundings
from hidden_state_adapters.tf_privacy.guards.trained_loss import TrainedLoss
from hidden_state_adapters.tf_privacy.optimizer import CheckedOptimizer
from hidden_state_adapters.tf_privacy.refusals import refusal
from hidden_state_adapters.tf_privacy.step_log import ExpectedLosses, Problem, StepEntry
from hidden_state_adapters.tf_privacy.units import Units

_CHECKED = (
    "batches of equal size in the fixed order of the data set, each once per epoch, one step each",
    "variables in float32 or float64, changed by the private optimizer only; variables that are "
    "not trained unchanged",
)
_DECLARED = (
    "the initial model and the order of the examples do not depend on the examples",
    "losses and metrics of the training data (History, progress bar) stay private",
)
_logger = logging.getLogger("hidden_state_accountants")


class RecordedRun:
    """What a callback and a recorder hold: they say which batch a step was taken on.

    The optimizer says what kind of `Run` its steps are, and what each of them did.

    Args:
        model: A Keras model or layer that is built; its trainable variables are released.
        optimizer: It has not taken a step.
        batch_size: b.
        examples: Of an epoch, a multiple of b.
        relation: Of the guarantee.
        declared: By the user.
        trained: What the gradients are taken of.

    Raises:
        UnsupportedRunError: No run of this optimizer and model can be accounted.
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
        trained: TrainedLoss,
    ):
        check_optimizer(optimizer)
        check_layers(model)
        taken = optimizer.last_step.steps
        if taken:
            raise refusal(
                f"Expected an optimizer without steps, got one with {taken} that were not recorded."
                " Pass the callback to every call of fit, or compile with a fresh optimizer and "
                "account both runs."
            )
        optimizer.check_run()
        self.optimizer: CheckedOptimizer = optimizer
        self.units = Units.of(optimizer, batch_size, examples)
        self.model = model
        self._fixed = FixedVariables(model)
        trained.look()
        self._fixed.check(model)
        self._trained = trained
        self._declared = self._begin(declared)
        self.num_batches = 0  # of which the optimizer made steps, or parts of them
        self._relation = relation
        self._period = self.units.batches
        self._grouping = _grouping(optimizer)
        self._run: Run | None = None  # the first step decides what it is about
        self._parts: list[Step] = []  # of the step that is accumulated
        self._noise: set[int] = set()
        self._invalid = ""
        self._check_accumulation()
        self._warn()
        self._expected = ExpectedLosses(self.units.batch_size) if trained.is_compared else None
        optimizer.watch(has_single_rows=trained.has_single_rows, expected=self._expected)

    def _begin(self, declared: Declared) -> Declared:
        """What the run is accounted with, and the optimizer is told."""
        known = resolved(declared, self._trained)
        self.optimizer.begin(known)
        self.optimizer.check_start(self.units, self.model.trainable_variables, known)
        geometry = self.optimizer.known_loss(known)
        if geometry is not None and not known.source:
            check_curvature(geometry, self._trained)
        return known

    def _warn(self) -> None:
        before = int(self.optimizer.iterations)
        if before:
            _logger.warning(
                "the optimizer was loaded with %d steps: they are another run, not in this record; "
                "compose the events of both", before,
            )  # fmt: skip
        line = self.optimizer.line_before(self.units, self._relation)
        if line:
            _logger.warning(line)

    # What happens

    @property
    def next_batch(self) -> int:
        """The index within the epoch of the batch that the next step must use."""
        return self.num_batches % self._period

    @property
    def has_all_steps(self) -> bool:
        """Whether the last step that the optimizer took or refused is recorded."""
        entry = self.optimizer.last_step
        return entry.steps == self.num_batches and not entry.problem

    @property
    def compares_losses(self) -> bool:
        """Whether `expect` has to be told every batch."""
        return self._expected is not None

    def expect(self, examples: Any, targets: Any) -> None:
        """Notes the losses that the next step has to be given.

        Args:
            examples: Of the batch that is delivered.
            targets: Likewise.
        """
        if self._expected is not None:
            self._expected.expect(self._trained.losses(examples, targets))

    def add(self, batch: int) -> None:
        """Records the step that was taken on a batch, with the values that it used.

        Raises:
            UnsupportedRunError: It is not the step that has to follow; nothing can follow then.
        """
        if self._expected is not None:
            self._expected.forget()
        try:
            self._add(self.optimizer.last_step, batch)
        except (TypeError, ValueError) as error:
            self.invalidate(str(error))

    def _add(self, entry: StepEntry, batch: int) -> None:
        self._check_entry(entry, batch)
        self.num_batches += 1
        self._check_accumulation()
        self._parts.append(self.optimizer.step_of(entry))
        if self.num_batches == 1:
            self.check_variables()
        if len(self._parts) < self.units.accumulated:
            return
        if self._run is None:
            self._run = self.optimizer.new_run(self.units, self._declared)
        self._run.add(self.units.step_of(self._parts, batch // self.units.accumulated))
        self._parts.clear()

    def _check_entry(self, entry: StepEntry, batch: int) -> None:
        step = self.num_batches + 1
        if Problem.LOSS in entry.problem:
            self._fixed.check(self.model)  # a plainer cause
        if entry.problem:  # the run ends here for a reason that may depend on the data
            raise refusal(f"step {step} was not taken. {entry.problem}")
        if entry.steps != step:
            raise refusal(
                f"after batch {batch} the optimizer has taken {entry.steps} steps, expected {step}:"
                " one for every batch."
            )
        if self._expected is not None and self._expected.compared < step:
            raise refusal(
                f"the losses of step {step} were not compared with those of the known loss: the "
                "step was traced before its record began. Make the tf.function after it."
            )
        if entry.noise in self._noise:
            raise refusal(
                f"step {step} used the noise of an earlier step, so the noise would repeat and "
                "cancel. Leave the generator of the optimizer alone."
            )
        if entry.noise:
            self._noise.add(entry.noise)
        if batch != self.next_batch or entry.rows != self.units.batch_size:
            raise refusal(
                f"step {step} used {entry.rows} rows of batch {batch}, expected batch_size = "
                f"{self.units.batch_size} rows of batch {self.next_batch}."
            )

    def _check_accumulation(self) -> None:
        """Gradients are applied when TensorFlow Privacy's count says so, which must be ours."""
        now = _grouping(self.optimizer)
        if now != self._grouping:
            raise refusal(
                "microbatches or accumulation were changed during the run: expected "
                f"(num_microbatches, gradient_accumulation_steps) = {self._grouping}, got {now}."
            )
        iterations = int(self.optimizer.iterations)
        if (iterations - self.num_batches) % self.units.accumulated:
            raise refusal(
                f"optimizer.iterations is {iterations} after {self.num_batches} batches, so "
                f"gradients are applied in other steps than every {self.units.accumulated}th. "
                "Start with a fresh optimizer."
            )

    def release(self) -> None:
        """Notes that the current variables are seen."""
        if self._run is not None:
            self._run.release()

    def invalidate(self, text: str) -> NoReturn:
        """Ends the run: there is no figure for it."""
        self._invalid = text
        raise refusal(text)

    def go_on(self, model: Any, optimizer: Any, trained: TrainedLoss) -> None:
        """Checks that the run so far may go on with this model, optimizer and loss.

        Raises:
            UnsupportedRunError: It has ended, or the model is not the iterate that was accounted.
        """
        if self._invalid:
            raise refusal(f"The run cannot go on: {self._invalid}")
        check_optimizer(optimizer)
        check_layers(model)
        if optimizer is not self.optimizer:
            raise refusal(
                "Expected the optimizer of the run so far, got another one. Use a callback of its "
                "own for every run, and compose their events."
            )
        self._trained.check_goes_on(trained)
        self.model = model
        self.check_iterate()
        optimizer.check_start(self.units, model.trainable_variables, self._declared)

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
            raise ValueError(
                "Expected at least one step, got none yet. Pass the callback to fit, or take a "
                "step on every batch of the recorder."
            )
        taken = self.optimizer.last_step.steps
        if taken != self.num_batches:
            raise refusal(
                f"The optimizer took {taken} steps, but {self.num_batches} are recorded. "
                "Pass the callback to every call of fit, and train in no other way."
            )
        self.optimizer.check_run()
        if self._parts:
            raise refusal(
                f"{len(self._parts)} of {self.units.accumulated} gradients of a step are "
                "accumulated; the optimizer holds their sum. Finish the epoch."
            )

    def check_iterate(self) -> None:
        """Raises UnsupportedRunError if the model is not the iterate that was accounted."""
        if self.num_batches or self._invalid:
            self.check()
            self.check_variables()

    def check_variables(self) -> None:
        """Likewise, also while gradients are accumulated."""
        if not self.optimizer.is_iterate(self.model.trainable_variables):
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

    def event(self) -> DpEvent:
        """The event that happened.

        Raises:
            ValueError, UnsupportedRunError: As `check`.
        """
        self.check()
        assert self._run is not None
        return self._run.event()

    def guarantee(self) -> Guarantee:
        """Of what is released, with the current model as the last iterate; errors as `check`."""
        self.check()
        assert self._run is not None
        return self._run.guarantee(self._relation)

    def assumptions(self, declared: Iterable[str] = ()) -> tuple[Assumption, ...]:
        """Everything that has to be true.

        Args:
            declared: What its holder adds.
        """
        own = [Assumption.checked(text) for text in _CHECKED]
        own += [Assumption.checked(text) for text in self.optimizer.checked(self.units)]
        own += [*self._trained.assumptions, *self._declared.measured]
        texts = (*_DECLARED, *self.optimizer.left_open(), *declared)
        own += [Assumption.declared(text) for text in texts]
        merged = merge_assumptions([tuple(own), self.guarantee().assumptions])
        return replace_assumptions(merged, *self.optimizer.derived(self._declared))

    def statement(self, delta: float, declared: Iterable[str] = ()) -> str:
        """The privacy statement; see `assumptions`."""
        statement = statement_of(
            [self.event()],
            self.guarantee(),
            self.assumptions(declared),
            delta,
            microbatch=self.units.microbatch,
            update_rule=self.optimizer.update_rule,
        )
        return self.optimizer.told(statement)


def _grouping(optimizer: Any) -> tuple[Any, Any]:
    """What `Units` is made from, beside the batches."""
    return optimizer._num_microbatches, optimizer.gradient_accumulation_steps


def check_optimizer(optimizer: Any) -> None:
    """Refuses an optimizer whose steps cannot be accounted.

    Raises:
        UnsupportedRunError: It is none of this package.
    """
    refuse_surroundings()  # fit enters the strategy of the model
    if not isinstance(optimizer, CheckedOptimizer):
        raise refusal(
            "Expected a CyclicDPKerasSGDOptimizer, DiceKerasSGDOptimizer, DiceKerasAdamOptimizer "
            "or BlockCoordinateKerasOptimizer (in Model.compile), got "
            f"{type(optimizer).__name__}: its steps cannot be checked."
        )


def checked_relation(relation: NeighboringRelation) -> NeighboringRelation:
    """The relation, if batches that are always the same ones can be accounted under it.

    Raises:
        TypeError, UnsupportedRunError: They cannot.
    """
    relation = validate.neighboring_relation(relation)
    fixed = RunRecorder(batch_order=BatchOrder.CYCLIC, batch_size=1, dataset_size=1)
    fixed.check_relation(relation)
    return relation
