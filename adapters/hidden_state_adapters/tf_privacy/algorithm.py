"""What a model is compiled with, and what makes and tells the private steps of a run of it.

An `UpdateRule` says which algorithm it is; the `Algorithm` makes its steps and says what run they
make. Both are here for DP-SGD along an optimizer of Keras; DiceSGD and DP-MBCD override them.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import tensorflow as tf
from dp_accounting import NeighboringRelation

from hidden_state_accountants import (
    Assumption,
    BlockCoordinateDpEvent,
    LossGeometry,
    RunRecorder,
    Schedule,
)
from hidden_state_accountants.advice import no_contraction_line
from hidden_state_accountants.guarantee import Topic
from hidden_state_accountants.runs.run import Run, Step
from hidden_state_accountants.runs.statement import Statement
from hidden_state_adapters.batch_plans import BatchPlan
from hidden_state_adapters.fixed_in_advance import fixed_in_advance, steps_in_advance
from hidden_state_adapters.tf_privacy import keras_api
from hidden_state_adapters.tf_privacy.gradients import ExampleGradients
from hidden_state_adapters.tf_privacy.lineage import Lineage, RunState
from hidden_state_adapters.tf_privacy.refusals import refusal
from hidden_state_adapters.tf_privacy.replicas import refuse_surroundings
from hidden_state_adapters.tf_privacy.settings import EVERY_FEATURE, Declared, Settings
from hidden_state_adapters.tf_privacy.step import (
    Iterate,
    PlainSGD,
    PrivateStep,
    StepEntry,
    Update,
    check_variables,
    check_within,
    refuse_noise,
)


@attrs.frozen
class StepsAhead:
    """The steps that a call of fit is going to take.

    Attributes:
        steps: Their number, those of earlier calls included.
        period: Batches of an epoch.
        releases_epochs: Whether a file is seen after every epoch.
        releases_steps: Whether after every step.
    """

    steps: int
    period: int
    releases_epochs: bool
    releases_steps: bool

    def add_to(self, run: Run, step: Callable[[int], Step]) -> Run:
        """The run, with the steps that it lacks.

        Args:
            run: Its steps so far.
            step: That of every number, from 0 on, of the whole run.
        """
        for number in range(run.num_steps, self.steps + 1):
            if self.releases_steps or (self.releases_epochs and number % self.period == 0):
                run.release()
            if number < self.steps:
                run.add(step(number))
        return run


class UpdateRule:
    """DP-SGD along an optimizer of Keras. Other mechanisms override what makes the steps.

    Files of Keras hold the optimizer by themselves, and `plain_rule` in the model's configuration.

    Args:
        optimizer: Of Keras, or its name.
    """

    def __init__(self, optimizer: Any):
        self.optimizer = optimizer

    def declared(self, settings: Settings) -> Declared:
        """What is said of the loss.

        Raises:
            UnsupportedRunError: Two things say it.
        """
        return settings.declared

    def steps(
        self, settings: Settings, optimizer: Any, plan: BatchPlan | None, variables: Sequence[Any]
    ) -> Algorithm:
        """What makes the steps of a run.

        Args:
            settings: Of the model.
            optimizer: The one that Keras has compiled.
            plan: The batches.
            variables: Those that are trained.

        Raises:
            UnsupportedRunError: No such run can be accounted.
        """
        return Algorithm(settings, Update(optimizer, variables), plan, variables)

    def with_places(self, model: Any) -> UpdateRule:
        """A rule for files: variables are named by their places among those that a model trains.

        Raises:
            UnsupportedRunError: It is about other variables.
        """
        return self

    def get_config(self) -> dict[str, Any]:
        """The arguments but the optimizer, as plain types."""
        return {}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> UpdateRule:
        """Inverse of `get_config`, for an optimizer that is still to be given."""
        return cls(None, **config)


class Algorithm:
    """Makes private steps, and says what run they make: DP-SGD along an optimizer of Keras.

    A model asks it for steps on the batches of a plan, an optimizer shows it gradients of its own.
    Other mechanisms override what is theirs.

    Attributes:
        step: That is made.
        lineage: Run that its steps are of, and those before it.
        update_rule: That the noisy mean goes through.
        asked_for: The steps that the only call of fit so far was asked for; None if there are more.
        examples_of_record: m, the examples of a microbatch; assigned before the run is asked for.
        made_by: Who takes the steps, in words; assigned likewise.

    Args:
        settings: Of the model, or what the optimizer was made with.
        update: Of the compiled optimizer.
        plan: The batches; None in a loop of which nothing is known.
        variables: Those that are trained.
        blocks: The same in lists that move in turn; one by default.

    Raises:
        UnsupportedRunError: Something is said of an update that is not plain SGD's.
    """

    _knows_gradient_bound = False  # whether one without a geometry says anything of its runs

    def __init__(
        self,
        settings: Settings,
        update: Update,
        plan: BatchPlan | None,
        variables: Sequence[Any],
        blocks: Sequence[Sequence[Any]] = (),
    ):
        refuse_surroundings()
        check_variables(variables)
        self._check_settings(settings, update)
        self._strategy = getattr(variables[0], "distribute_strategy", None)
        if self._strategy is not None:
            self._check_replicas(update)
        assert settings.l2_norm_clip is not None  # compile has asked for it
        self._settings, self._update, self._given_plan = settings, update, plan
        noise = settings.noise_multiplier
        self.step = PrivateStep(
            self._rule(),
            variables,
            clip=settings.l2_norm_clip,
            noise_multiplier=1.0 if noise is None else noise,  # which fit is to find
            divisor=None if plan is None else plan.batch_size,
            kept=update.slots,
            blocks=blocks,
        )
        self.iterate: Any = Iterate(self.step)  # an optimizer in a loop has a `Watch`
        self._loss: LossGeometry | None = None
        self.lineage = Lineage(self)
        self.asked_for: int | None = None  # steps, by the only call of fit so far
        self._is_resumed = False  # what was declared before the first step is not known
        self.update_rule, self.examples_of_record = update.name, 1
        self.made_by = "the run itself"

    @property
    def _plan(self) -> BatchPlan:
        assert self._given_plan is not None  # a record has one
        return self._given_plan

    def _check_settings(self, settings: Settings, update: Update) -> None:
        if settings.needs_plain_sgd and not update.is_plain_sgd:
            raise refusal(
                f"Expected plain SGD with {settings.needs_plain_sgd}, got {update.name}: no "
                "theorem here covers hidden iterates of another update. Compile with "
                "tf.keras.optimizers.SGD(learning_rate, weight_decay=...), or leave the argument "
                "out: every step is then accounted by composition."
            )

    def _check_replicas(self, update: Update) -> None:
        if not update.is_plain_sgd:
            raise refusal(
                f"Expected plain SGD in a MirroredStrategy, got {update.name}: Keras' other "
                "optimizers exchange gradients themselves, in every replica. Use "
                "tf.keras.optimizers.SGD(learning_rate, weight_decay=...), or no strategy."
            )

    # The step

    def _rule(self) -> PlainSGD:
        """What is made of the noisy gradients."""
        return self._update.rule(self._settings.prox, self._settings.projection_radius)

    def take(
        self,
        passes: Sequence[Callable[[], ExampleGradients]],
        rows: tf.Tensor,
        rate: tf.Tensor,
        left: Sequence[tf.Tensor],
    ) -> tuple[ExampleGradients, tf.Tensor, tf.Tensor]:
        """Clips, adds noise, and moves the variables; see `PrivateStep.take`."""
        refuse_surroundings(self._strategy)  # fit enters the strategy of the model
        return self.step.take(passes, rows, rate, left)

    def rate(self) -> tf.Tensor:
        """Returns the learning rate of the next update."""
        return self._update.rate()

    def count(self, steps: Any) -> None:
        """Notes so many updates in Keras' count."""
        self._update.count(steps)

    def rates(self, count: int) -> list[float]:
        """Returns the learning rates of the next steps; of Keras' own updates 1."""
        if not self._update.is_plain_sgd:
            return [1.0] * count
        if _is_schedule(self.given_rate):
            numbers = int(self.iterations.numpy()) + np.arange(count)
            return [float(rate) for rate in self._of_schedule(tf.constant(numbers, tf.int64))]
        return [float(self._update.rate()) for _ in range(count)]

    @functools.cached_property
    def _of_schedule(self) -> Callable[[tf.Tensor], tf.Tensor]:
        def rate(number: tf.Tensor) -> tf.Tensor:
            return tf.cast(self.given_rate(number), tf.float32)

        return tf.function(
            lambda numbers: tf.map_fn(rate, numbers, fn_output_signature=tf.float32),
            [tf.TensorSpec([None], tf.int64)],
        )

    def took(self, entries: Sequence[StepEntry], values: Sequence[tf.Tensor]) -> None:
        """Notes steps that were taken together, and the values that they left."""
        if entries:
            self.iterate.last = entries[-1]  # first, so that none is taken that does not count
        self.iterate.values = values
        self._update.count(len(entries))

    # What it is

    @property
    def last_step(self) -> StepEntry:
        """What the last step did, and how many there were."""
        entry: StepEntry = self.iterate.last
        return entry

    @property
    def has_stepped(self) -> bool:
        """Whether it changed variables."""
        return self.last_step.steps > 0

    @property
    def variables(self) -> Sequence[Any]:
        """Variables that it trains."""
        return self.step.variables

    def has_left(self, variable: Any) -> bool:
        """Returns whether one of them is as the last step left it."""
        return self.step.has_left(self.iterate.values, variable)

    @property
    def blocks(self) -> tuple[tuple[Any, ...], ...]:
        """Its variables, if it updates them in turn."""
        return ()

    def check_run(self) -> None:
        """Raises UnsupportedRunError if noise was made that no step was taken with."""
        entry = self.last_step
        if entry.drawn != entry.steps:
            raise refusal(
                f"Noisy gradients were computed {entry.drawn} times, but {entry.steps} steps were "
                "taken: the others were refused, interrupted or not applied. What ended the run "
                "may depend on the examples, and the bound is about a number of steps that does "
                f"not. Start again with another optimizer. {entry.problem}".rstrip()
            )

    @property
    def kind(self) -> str:
        """The model's steps, with their update rule."""
        return f"HiddenStateModel with {self._update.name}"

    @property
    def hidden_state(self) -> str:
        """The order of the examples, where one is drawn for the whole run."""
        return self._plan.why_not_resumable(self._plan.num_batches)

    def private_state(self) -> dict[str, Any]:
        """That order."""
        return {"order": self._plan.private_state(self.last_step.steps)}

    def resume(self, state: RunState, variables: Sequence[Any]) -> None:
        """Goes on with a run, after its steps so far, with new noise.

        Moments are what Keras restored.

        Args:
            state: Of the run.
            variables: Those that are trained, as its last step left them.

        Raises:
            ValueError: The private state is damaged.
        """
        longest = state.declared.longest_gradient  # each was compared with it
        self.iterate.stands_at(state.num_steps, state.batch_size, longest)
        self.iterations.assign(state.iterations)
        self._is_resumed = True

    @property
    def l2_norm_clip(self) -> float:
        """C."""
        return self.step.clip

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation of the noise on the sum of gradients over C."""
        return self.step.noise_multiplier

    @property
    def iterations(self) -> Any:
        """Keras' count of the updates."""
        return self._update.iterations

    def goes_back(self) -> None:
        """Takes the weights of the moment, made of those of earlier steps, for the newest."""
        last = self.last_step
        self.iterate.stands_at(last.steps, last.rows)

    def trains(self, variables: Sequence[Any]) -> bool:
        """Whether these are the variables of the run."""
        return list(map(id, self.step.variables)) == list(map(id, variables))

    def is_iterate(self, variables: Sequence[Any]) -> bool:
        """Whether variables, and the optimizer's, are as the last step left them, bit by bit."""
        left: bool = self.iterate.is_left(variables)
        return left

    def begin(self, declared: Declared) -> None:
        """Takes over the geometry of the loss."""
        self._loss, self.step.norm_bound = declared.geometry, declared.longest_gradient

    def check_start(self, variables: Sequence[Any], declared: Declared) -> None:
        """Refuses to begin a run with these variables and declarations.

        Raises:
            UnsupportedRunError: The text says which.
        """
        if declared.gradient_bound < math.inf and not self._knows_gradient_bound:
            raise refusal(
                "Expected gradient_bound for a Dice optimizer, got "
                f"{type(self._update.optimizer).__name__}. Say loss_geometry, or nothing."
            )
        self._update.check_options()
        if self._loss is not None:
            _refuse_tensor_float_32()
        if self._settings.projection_radius is not None:
            check_within(variables, self._settings.projection_radius)
        if self._settings.prox is not None:
            self._settings.prox.check_axes([variable.shape for variable in variables])

    def derived(self, declared: Declared) -> list[Assumption]:
        """What takes the place of a user's word of the same topic: the loss, the proximal map."""
        of_map = _derived_map(self._settings)
        if not declared.source:
            return of_map
        text = f"per-example loss: {declared.geometry!r}, {declared.source}"
        if declared.largest_weight != 1:
            text += f", times a weight of at most {declared.largest_weight:g}"
        return [Assumption.checked(text, Topic.LOSS), EVERY_FEATURE, *of_map]

    def known_loss(self, declared: Declared) -> LossGeometry | None:
        """The geometry of the loss that its runs are accounted with."""
        return self._loss

    def new_run(self, declared: Declared) -> Run:
        """Of which the last iterate is released."""
        plan, radius = self._plan, self._settings.projection_radius
        is_microbatched = self.examples_of_record > 1
        return RunRecorder(
            batch_order=plan.order,
            batch_size=plan.batch_size,
            dataset_size=plan.dataset_size,
            loss=None if is_microbatched else self._loss,
            prox_strong_convexity=self._settings.prox_strong_convexity,
            domain_diameter=math.inf if radius is None else 2 * radius,
            sampling_rate=plan.sampling_rate,
            max_batch_size=plan.max_batch_size,
            is_microbatched=is_microbatched,
        )

    def set_noise(self, noise_multiplier: float) -> None:
        """Of all steps; before the first one."""
        assert not self.has_stepped
        self.step.noise_multiplier = noise_multiplier

    def event_ahead(self, declared: Declared, ahead: StepsAhead) -> Any:
        """The event of a run that is still to be made, with a noise multiplier of 1.

        Raises:
            UnsupportedRunError: Its learning rates are not known, or its releases are not in it.
        """
        self.set_noise(1.0)
        run = self.with_steps_ahead(self.new_run(declared), ahead)
        event = run.event()
        if run.release_steps[:-1] and isinstance(event, BlockCoordinateDpEvent):
            raise refusal(
                f"Expected no released epochs with target_epsilon, got {self.kind} with "
                "ModelCheckpoint or EarlyStopping: its event does not know them, so that noise "
                "would be found for hidden ones. Give noise_multiplier, or leave the callback out."
            )
        return event

    def with_steps_ahead(self, run: Run, ahead: StepsAhead) -> Run:
        """Adds to a run the steps that it lacks, as they are going to be.

        Raises:
            UnsupportedRunError: Their learning rates are not known.
        """
        first, plan = run.num_steps, self._plan
        is_function = callable(self.given_rate) and not _is_schedule(self.given_rate)
        if is_function and self.known_loss(Declared()) is not None:
            raise refusal(
                "Expected a number or a schedule of Keras as learning rate with target_epsilon, "
                "EarlyStopping or save_best_only, got a function: epsilon depends on the rates of "
                "all steps. Use tf.keras.optimizers.schedules."
            )
        rates = self.rates(ahead.steps - first)
        rows = min(plan.batch_size, plan.max_batch_size or plan.batch_size)

        def step(number: int) -> Step:
            entry = StepEntry(rows=rows, learning_rate=rates[number - first])
            return attrs.evolve(self.step_of(entry), batch=number % plan.num_batches)

        return ahead.add_to(run, step)

    def step_of(self, entry: StepEntry) -> Step:
        """Returns what a step says to the run.

        Raises:
            UnsupportedRunError: It is no step of such a run.
        """
        self._update.check_options()
        rate, decay = self._rate_and_decay(as_meant(entry.learning_rate))
        return Step(
            noise_multiplier=self.noise_multiplier,
            clip_norm=self.l2_norm_clip,
            learning_rate=rate,
            weight_decay=decay,
            rows=entry.rows,
            largest_norm=entry.largest_norm,
        )

    def _rate_and_decay(self, rate: float) -> tuple[float, float]:
        """Returns those of a step; a rule that is not plain SGD's is one that moves."""
        decay = self._update.weight_decay
        expands = rate * decay >= 1 and self._loss is None
        return (rate, decay) if self._update.is_plain_sgd and not expands else (1.0, 0.0)

    def line_before(self, relation: NeighboringRelation) -> str:
        """Whether the update contracts, assuming the hyper-parameters of the next step."""
        is_drop_in = hasattr(self._update.optimizer, "plain_update")
        if self._loss is None and not is_drop_in:  # composition is what was asked for
            return ""
        run = self.new_run(Declared())
        entry = StepEntry(rows=self._plan.batch_size, learning_rate=float(self._update.rate()))
        run.add(attrs.evolve(self.step_of(entry), batch=0))
        return no_contraction_line(run.event(), relation)

    def checked(self) -> list[str]:
        """The values of the steps, and what holds for the variables."""
        checked = [
            "learning rate, weight decay, clip norm and noise as recorded, in every step, made by "
            f"{self.made_by}"
            if self._update.is_plain_sgd
            else f"clip norm and noise as recorded, in every step; {self._update.name} along the "
            "noisy gradients, its moments as the last step left them"
        ]
        each, loss = self.examples_of_record, self._loss
        if loss is not None and loss.lipschitz is not None:
            of = "per-example" if each == 1 else "microbatches'"
            checked.append(f"{of} gradient norms at most {loss.lipschitz:g}")
        if each > 1:
            checked.append(
                f"fixed microbatches of {each} examples, in the order of the data set: each is a "
                "record of the event, accounted by composition, and its mean gradient is clipped "
                "as one. An example that is replaced moves it by up to twice the clip norm, which "
                "is what REPLACE_ONE says of a record"
            )
        if self._settings.projection_radius is not None:
            checked.append(
                f"all variables together within {self._settings.projection_radius:g} of 0"
            )
        return checked

    def in_advance(self, run: Run) -> list[Assumption]:
        """The number of steps that was asked for, and rates that Keras or nobody changes."""
        total = None if self._is_resumed else self._settings.num_steps
        steps, given = steps_in_advance(run.num_steps, total), self.given_rate
        if self._settings.num_steps is None and self.asked_for == run.num_steps:
            steps = Assumption.checked(
                f"all of the {run.num_steps} steps that the only call of fit was asked for"
            )
        rates = ""
        if not self._update.is_plain_sgd:
            rates = f"rates of {self._update.name}, which change no figure"
        elif callable(given) and not declared_rates(given, 0.0):
            rates = f"learning rate of every step that of the compiled {type(given).__name__}"
        return list(fixed_in_advance(run, steps, rates))

    def told(self, statement: Statement) -> str:
        """The statement of a run; of another rule than plain SGD it says which."""
        text = statement.paragraphs()
        if self._update.is_plain_sgd:
            return text
        return (
            f"Update rule: {self._update.name} along the noisy gradients. No bound on hidden "
            "iterates knows it:\nevery step counts, and a learning rate of 1 stands for it.\n\n"
            f"{text}"
        )

    def declared(self, event: Any) -> list[str]:
        """Where the learning rates come from; of foreign optimizers, what they see."""
        return declared_rates(self.given_rate, event.learning_rate) + self._declared_of_optimizer()

    def _declared_of_optimizer(self) -> list[str]:
        kind = type(self._update.optimizer)
        if keras_api.is_of_keras(self._update.optimizer):
            return []
        return [f"of the examples {kind.__name__} sees only the noisy gradients"]

    @property
    def given_rate(self) -> Any:
        """Of the optimizer."""
        return self._update.given_rate


def as_meant(rate: float) -> float:
    """The shortest decimal that is the same float32, if it is one: Keras keeps rates in float32."""
    single = np.float32(rate)
    return float(str(single)) if float(single) == rate else rate


def declared_rates(given: Any, recorded: float | Schedule) -> list[str]:
    """What is the user's word about learning rates, unless they are a number or Keras' schedule.

    Args:
        given: To the optimizer: a number, a schedule, or a function.
        recorded: Of the steps.
    """
    if _is_schedule(given):
        if keras_api.is_of_keras(given):
            return []
    elif not callable(given) and not isinstance(recorded, Schedule):
        return []
    return [
        "the learning rates that were set or computed during the run depend neither on the "
        "examples nor on the weights"
    ]


def _is_schedule(given: Any) -> bool:
    return isinstance(given, tf.keras.optimizers.schedules.LearningRateSchedule)


def _derived_map(settings: Settings) -> list[Assumption]:
    """What takes the place of a user's word about the proximal map."""
    prox = settings.prox
    return [] if prox is None else [Assumption.checked(prox.effect, Topic.REGULARISER)]


def _refuse_tensor_float_32() -> None:
    """Refuses a GPU that rounds to 10 bits, for runs whose loss has a declared smoothness."""
    if (
        tf.config.list_physical_devices("GPU")
        and tf.config.experimental.tensor_float_32_execution_enabled()
    ):
        raise refusal(
            "Expected full float32 on the GPU, got TensorFloat-32 (TensorFlow's default): "
            "gradients rounded to 10 bits do not have the declared smoothness. Call "
            "tf.config.experimental.enable_tensor_float_32_execution(False)."
        )


# Files, and what compile is given


def plain_rule(rule: UpdateRule, model: Any) -> dict[str, Any]:
    """What a file tells of a rule, beside its optimizer; empty for that of the optimizer alone."""
    if type(rule) is UpdateRule:
        return {}
    kind, config = type(rule), rule.with_places(model).get_config()
    return {
        "module": kind.__module__,
        "name": tf.keras.utils.get_registered_name(kind),
        "config": config,
    }


def rule_of(plain: Mapping[str, Any], optimizer: Any) -> Any:
    """What a model was compiled with: the rule that `plain_rule` wrote down, or the optimizer.

    Raises:
        UnsupportedRunError: The rule is a class of somebody else that Keras does not know.
    """
    if not plain:
        return optimizer
    if plain["module"].startswith("hidden_state_adapters."):  # whose modules are loaded lazily
        importlib.import_module(plain["module"])
    kind = tf.keras.utils.get_registered_object(plain["name"])
    if kind is None:
        raise refusal(
            f"Expected the class {plain['name']}, which the model was compiled with, got none of "
            "this name. Decorate it with tf.keras.utils.register_keras_serializable, and import it "
            "before the model is loaded."
        )
    # Not Keras' way back: it has another one for each format of files.
    rule = kind.from_config(plain["config"])
    rule.optimizer = optimizer
    return rule


def rule_and_settings(optimizer: Any, given: Settings) -> tuple[UpdateRule, Settings]:
    """What a model that is compiled with an optimizer trains by.

    Args:
        optimizer: An `UpdateRule`, an optimizer of Keras or its name, or one with noise of
            this package.
        given: What the model was made with.

    Raises:
        UnsupportedRunError: The optimizer says something else than the model, or would add noise a
            second time.
        ValueError: None of the two says how long a gradient may be.
    """
    if hasattr(optimizer, "for_model"):  # one with noise of this package
        rule, told = optimizer.for_model()
        return rule, given.joined_by(type(optimizer).__name__, told)
    rule = optimizer if isinstance(optimizer, UpdateRule) else UpdateRule(optimizer)
    refuse_noise(rule.optimizer)
    if given.l2_norm_clip is None:
        raise ValueError(
            "Expected l2_norm_clip of the model, got none. Give it to the model, or compile with "
            "an optimizer that has it, such as CyclicDPKerasSGDOptimizer."
        )
    return rule, given
