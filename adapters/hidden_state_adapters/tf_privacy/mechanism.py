"""What a record asks of whoever makes the private steps of its run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dp_accounting import NeighboringRelation

from hidden_state_accountants import Assumption, LossGeometry
from hidden_state_accountants.guarantee import Topic
from hidden_state_accountants.runs.base import Run, Step
from hidden_state_accountants.runs.statement import Statement
from hidden_state_adapters.tf_privacy.continuation import RunState
from hidden_state_adapters.tf_privacy.declared import EVERY_FEATURE, Declared
from hidden_state_adapters.tf_privacy.step_log import StepEntry, StepLog
from hidden_state_adapters.tf_privacy.training import Training
from hidden_state_adapters.tf_privacy.units import Units


class Mechanism:
    """Makes private steps, notes each in a log on the device, and says what run they make.

    It is a base of the private optimizers, and what stands behind a model that owns its steps.
    Callback and model know no more than this.

    Attributes:
        training: What its steps train.
        update_rule: That the noisy mean goes through.
        examples_of_record: How many examples a record of the event is, beside what `units` says.
        hidden_state: What its run cannot go on without, and nobody may know.
        iterations: Keras' count of the updates, a variable.
    """

    update_rule = "SGD"
    examples_of_record = 1
    hidden_state = ""
    training: Training
    iterations: Any
    _log: StepLog
    _declarable = ""  # what a user may declare of its runs: a name of `Declared`

    # Its settings

    @property
    def kind(self) -> str:
        """What has to be the same where its run goes on."""
        return type(self).__name__

    @property
    def l2_norm_clip(self) -> float:
        """C."""
        raise NotImplementedError

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation of the noise on the sum of gradients over C."""
        raise NotImplementedError

    @property
    def grouping(self) -> tuple[Any, int]:
        """num_microbatches and gradient_accumulation_steps, which stay the same in a run."""
        return None, 1

    def units(self, batch_size: int, examples: int) -> Units:
        """What the event counts as one record and as one step."""
        return Units(batch_size, examples, microbatch=1, accumulated=1)

    def watch(self) -> None:
        """The caller reads `last_step` after every step and raises if it was refused."""

    # What kind of run its steps are

    def begin(self, declared: Declared) -> None:
        """Takes over what is said of the run that begins."""

    def check_start(self, units: Units, variables: Sequence[Any], declared: Declared) -> None:
        """Refuses to begin a run over such batches, with these variables and declarations.

        Raises:
            UnsupportedRunError: The text says which.
        """
        declared.refuse_all_but(self._declarable, type(self).__name__)

    def new_run(self, units: Units, declared: Declared) -> Run:
        """An empty run over the batches; asked for when the first step was taken."""
        raise NotImplementedError

    def step_of(self, entry: StepEntry) -> Step:
        """What an entry of the log says to the run.

        Raises:
            UnsupportedRunError: It is no step of such a run.
        """
        return Step(
            noise_multiplier=entry.noise_multiplier,
            clip_norm=entry.l2_norm_clip,
            learning_rate=entry.learning_rate,
            weight_decay=entry.weight_decay,
            rows=entry.rows,
            largest_norm=entry.largest_norm,
        )

    def check_run(self) -> None:
        """Raises UnsupportedRunError if noisy gradients were computed that no step applied."""

    def line_before(self, units: Units, relation: NeighboringRelation) -> str:
        """What should be known before training; empty if nothing."""
        return ""

    def checked(self, units: Units) -> list[str]:
        """What is checked of its runs, beside what is checked of every run."""
        raise NotImplementedError

    def declared(self, event: Any) -> list[str]:
        """What is the user's word about its runs, beside what is so of every run.

        Args:
            event: The run.
        """
        return []

    def known_loss(self, declared: Declared) -> LossGeometry | None:
        """The geometry of the loss that its runs are accounted with."""
        return None

    def derived(self, declared: Declared) -> list[Assumption]:
        """What takes the place of a user's word of the same topic."""
        if not declared.source:
            return []
        text = f"per-example loss: {declared.geometry!r}, {declared.source}"
        if declared.largest_weight != 1:
            text += f", times a weight of at most {declared.largest_weight:g}"
        return [Assumption.checked(text, Topic.LOSS), EVERY_FEATURE]

    def in_advance(self, run: Run) -> list[Assumption]:
        """What is known to have been fixed before the first step, likewise."""
        return []

    def told(self, statement: Statement) -> str:
        """The statement of a recorded run, in the shape of TensorFlow Privacy's."""
        return statement.paragraphs()

    # What was done

    @property
    def last_step(self) -> StepEntry:
        """What the last step did, and how many there were."""
        return self._log.read()

    @property
    def has_stepped(self) -> bool:
        """Whether it changed variables."""
        return self._log.read().steps > 0

    def is_iterate(self, variables: Sequence[Any]) -> bool:
        """Whether the variables are as the last step left them, bit by bit."""
        return self._log.has_written(list(variables))

    # How it goes on where another one stood

    @property
    def blocks(self) -> tuple[tuple[Any, ...], ...]:
        """Its variables, if it updates them in turn."""
        return ()

    def private_state(self) -> dict[str, Any]:
        """The `hidden_state` as plain types. Secret."""
        return {}

    def resume(self, state: RunState, variables: Sequence[Any]) -> None:
        """Goes on with a run, after its steps so far, with new noise.

        Args:
            state: Of the run.
            variables: Those that are trained, as its last step left them.

        Raises:
            ValueError: The private state is damaged.
        """
        self._log.resume(state.num_batches, state.units.batch_size, variables)
        self.iterations.assign(state.iterations)
        self.training.resume(variables)
