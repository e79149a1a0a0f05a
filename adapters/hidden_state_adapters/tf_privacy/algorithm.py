"""Rules that a model is compiled with, and the private steps of a run of it.

An `UpdateRule` says which algorithm it is: DP-SGD along an optimizer of Keras here, DiceSGD and
DP-MBCD in modules of their own. `Algorithm` makes its steps; what run they make, and what has to be
true of it, is described once for all frameworks (`hidden_state_accountants.runs.algorithms`).
"""

from __future__ import annotations

import functools
import importlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import attrs
import numpy as np
import tensorflow as tf

from hidden_state_accountants import Assumption, LossGeometry, Schedule, UnsupportedRunError
from hidden_state_accountants.runs import algorithms
from hidden_state_accountants.runs.run import SLACK, Run, Step
from hidden_state_adapters.batch_plans import BatchPlan
from hidden_state_adapters.fixed_in_advance import fixed_in_advance, steps_in_advance
from hidden_state_adapters.tf_privacy import keras_api
from hidden_state_adapters.tf_privacy.gradients import ExampleGradients
from hidden_state_adapters.tf_privacy.lineage import Lineage, RunState
from hidden_state_adapters.tf_privacy.settings import Declared, Settings
from hidden_state_adapters.tf_privacy.step import (
    INFINITE,
    PlainSGD,
    StepEntry,
    Update,
    are_same,
    copies,
    joint_norm,
    together,
)
from hidden_state_adapters.tf_privacy.trained_part import check_variables, refuse_surroundings

Blocks = tuple[tuple[Any, ...], ...]


class UpdateRule:
    """DP-SGD along an optimizer of Keras; other algorithms override what is theirs."""

    why_one_replica: ClassVar[str] = ""  # reason why there cannot be several
    takes_gradient_bound: ClassVar[bool] = False  # without anything else known of the loss

    def __init__(self, optimizer: Any):
        self.optimizer = optimizer

    def declared(self, settings: Settings) -> Declared:
        """Returns what is said of the loss; UnsupportedRunError if two things say it."""
        return settings.declared

    def check(self, settings: Settings, update: Update, plan: BatchPlan | None) -> None:
        """Raises UnsupportedRunError if there is no such algorithm, of a plan if there is one."""
        if settings.needs_plain_sgd and not update.is_plain_sgd:
            raise UnsupportedRunError(
                f"Expected plain SGD with {settings.needs_plain_sgd}, got {update.name}: no "
                "theorem here covers hidden iterates of another update. Leave the argument out: "
                "every step is then accounted by composition."
            )

    def moves_by(self, settings: Settings, update: Update, variables: Sequence[Any]) -> PlainSGD:
        """Returns what is made of the noisy gradients of some variables."""
        return update.rule(settings.prox, settings.projection_radius)

    def blocks_of(self, variables: Sequence[Any]) -> Blocks:
        """Returns the variables in lists that move in turn; () if they move together."""
        return ()

    def described(self, steps: Algorithm, declared: Declared) -> algorithms.Algorithm:
        """Returns the algorithm that steps are of, with its numbers."""
        settings, update = steps.settings, steps.update
        prox, radius = settings.prox, settings.projection_radius
        return algorithms.NoisySGD(
            noise_multiplier=steps.noise_multiplier,
            clip_norm=steps.clip,
            source=declared.source,
            loss=declared.geometry,
            prox="" if prox is None else prox.effect,
            prox_strong_convexity=settings.prox_strong_convexity,
            radius=math.inf if radius is None else radius,
            weight_decay=update.weight_decay,
            other_rule="" if update.is_plain_sgd else update.name,
            microbatch=steps.examples_of_record,
        )

    def with_places(self, model: Any) -> UpdateRule:
        """Returns a rule for files, with the places of variables among those of a model."""
        return self

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments but the optimizer, as plain types."""
        return {}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> UpdateRule:
        """Inverse of `get_config`, for an optimizer that is still to be given."""
        return cls(None, **config)


class Algorithm:
    """Makes private steps by a rule, and says what run they make.

    A step clips to C, adds N(0, (zC)^2), divides by b, and moves by the rule. A model asks for
    steps on the batches of a plan; a drop-in optimizer brings gradients of its own, and has no plan
    in a loop that nobody records: there a step divides by its rows.

    Attributes:
        variables: Variables that are trained.
        blocks: Lists of them that move in turn; one by default.
        clip: Clip norm C.
        noise_multiplier: Noise multiplier z.
        last_step: Last step, and number of steps so far.
        left: Values that it left, as of `values`.
        lineage: Run that its steps are of, and those before it.
        asked_for: Number of steps that the only call of fit so far was asked for, or None.
        examples_of_record: Examples of a microbatch, m; assigned before the run begins.
    """

    def __init__(
        self,
        rule: UpdateRule,
        settings: Settings,
        optimizer: Any,
        plan: BatchPlan | None,
        variables: Sequence[Any],
    ):
        refuse_surroundings()
        check_variables(variables)
        self.update = update = Update(optimizer, variables)
        rule.check(settings, update, plan)
        self._strategy = getattr(variables[0], "distribute_strategy", None)
        if self._strategy is not None and (rule.why_one_replica or not update.is_plain_sgd):
            why = rule.why_one_replica or "Keras' other optimizers exchange gradients themselves"
            what = type(rule).__name__ if rule.why_one_replica else update.name
            raise UnsupportedRunError(
                f"Expected plain SGD in a MirroredStrategy, got {what}: {why}. Train in one."
            )
        self.plan: Any = plan
        self._rule, self.settings, self.variables = rule, settings, list(variables)
        self.blocks = rule.blocks_of(variables) or (tuple(variables),)
        clip: Any = settings.with_clip_norm(math.inf, "a loop of somebody else has none")
        self.clip: float = clip.l2_norm_clip
        noise = settings.noise_multiplier
        self.noise_multiplier = 1.0 if noise is None else noise  # which fit is to find
        self.rule = rule.moves_by(settings, update, variables)
        # Philox makes its numbers of a key and a counter that only moves ahead, and both begin
        # where the operating system says: tf.random.set_seed does not touch it.
        with tf.init_scope():  # outside of checkpoints, which would repeat its numbers
            state = np.frombuffer(os.urandom(24), np.int64)  # a counter of 128 bits, a key of 64
            self._generator = tf.random.Generator.from_state(state, alg="philox")
        self._declared = Declared()
        self.stands_at(StepEntry())
        self.lineage = Lineage(self)
        self.asked_for: int | None = None
        self._is_resumed = False  # what was declared before the first step is not known
        self.examples_of_record = 1
        self.begin(self._declared)

    # The steps

    def take(
        self,
        passes: Sequence[Callable[[], ExampleGradients]],
        rows: tf.Tensor,
        rate: tf.Tensor,
        left: Sequence[tf.Tensor],
    ) -> tuple[ExampleGradients, tf.Tensor, tf.Tensor]:
        """Takes a step of all blocks in turn, on what all replicas find together.

        Args:
            passes: Functions that give the gradients of the batch for one block, at the current
                values.
            rows: Number of examples, which are the first rows of the batch.
            rate: Learning rate.
            left: Values that the step before left, as of `values`.

        Returns:
            What the first pass gave, the norm of the longest gradient (inf if one is not finite),
            and whether the variables had these values.
        """
        refuse_surroundings(self._strategy)  # fit enters the strategy of the model
        found: list[ExampleGradients] = []
        longest, same = tf.zeros([], tf.float64), None
        for block, gradients_of in zip(self.blocks, passes, strict=True):
            found.append(gradients_of())

            def act(
                sums: Any, norm: Any, rows: Any, block: Any = block, longest: Any = longest,
                same: Any = same,
            ) -> tuple[tf.Tensor, tf.Tensor]:  # fmt: skip
                same = self.is_left(left) if same is None else same
                along, is_finite = self.direction(sums, rows)
                self.rule.move(block, along, rate)
                return tf.where(is_finite, tf.maximum(longest, norm), INFINITE), same

            longest, same = together(act, *self.sums(found[-1], rows), rows)
        assert same is not None
        return found[0], longest, same

    def is_fine(self, longest: Any) -> tf.Tensor:
        """Returns whether no gradient is longer than the bound, and all are finite."""
        limit = min(self._declared.longest_gradient * (1 + SLACK), float(np.finfo(float).max))
        return longest <= tf.constant(limit, tf.float64)

    def sums(self, found: ExampleGradients, rows: tf.Tensor) -> tuple[list[list[Any]], tf.Tensor]:
        """Returns the sums that the rule wants, and the longest gradient, inf if not finite."""
        is_example = tf.range(tf.size(found.norms, tf.int64)) < rows

        def of_examples(values: tf.Tensor) -> tf.Tensor:
            return tf.where(is_example, values, tf.zeros_like(values))

        norms = of_examples(found.norms)
        lengths = tf.where(tf.math.is_finite(norms), norms, INFINITE)
        largest = tf.maximum(tf.reduce_max(lengths), tf.zeros([], tf.float64))  # of no rows, too
        dtype = self.variables[0].dtype.base_dtype
        factors = self.rule.factors(norms, self.clip, dtype)
        return [found.weighted_sum(of_examples(part)) for part in factors], largest

    def direction(self, sums: Sequence[Any], rows: tf.Tensor) -> tuple[list[Any], Any]:
        """Returns the tensors that the rule moves along, and whether what it keeps is finite."""
        divisor = tf.cast(rows if self.plan is None else self.plan.batch_size, tf.float64)
        means = [part / tf.cast(divisor, part.dtype) for part in self._with_noise(sums[0])]
        return self.rule.direction(means, sums[1:], divisor)

    def _with_noise(self, sums: Sequence[Any]) -> list[Any]:
        scale = self.noise_multiplier * self.clip
        if not scale:
            return list(sums)
        noise = [self._generator.normal(tf.shape(s), stddev=scale, dtype=s.dtype) for s in sums]
        return [s + n for s, n in zip(sums, noise, strict=True)]

    def rates(self, count: int) -> list[float]:
        """Returns the learning rates of the next steps; of Keras' own updates 1."""
        given = self.update.given_rate
        if not self.update.is_plain_sgd:
            return [1.0] * count
        if not _is_schedule(given):
            return [float(self.update.rate()) for _ in range(count)]
        numbers = int(self.update.iterations.numpy()) + np.arange(count)
        return [float(rate) for rate in self._of_schedule(tf.constant(numbers, tf.int64))]

    @functools.cached_property
    def _of_schedule(self) -> Any:
        def rate(number: tf.Tensor) -> tf.Tensor:
            return tf.cast(self.update.given_rate(number), tf.float32)

        return tf.function(
            lambda numbers: tf.map_fn(rate, numbers, fn_output_signature=tf.float32),
            [tf.TensorSpec([None], tf.int64)],
        )

    def stands_at(self, entry: StepEntry) -> None:
        """Takes the weights of the moment for those that a step left."""
        self.last_step, self.left = entry, self.values()

    def took(self, entry: StepEntry, count: int, left: Sequence[tf.Tensor]) -> None:
        """Notes that steps were taken, the last of them, and the values that they left."""
        self.last_step = entry  # first, so that none is taken that does not count
        self.left = list(left)
        self.update.count(count)

    @property
    def has_stepped(self) -> bool:
        """True if it changed variables."""
        return self.last_step.steps > 0

    def trains(self, variables: Sequence[Any]) -> bool:
        """Returns whether these are the variables of the run."""
        return list(map(id, self.variables)) == list(map(id, variables))

    def values(self) -> list[tf.Tensor]:
        """Returns the values of the variables, of all replicas, and of moments."""
        return [v.read_value() for v in copies([*self.variables, *self.update.slots])]

    def is_left(self, left: Sequence[Any], variables: Sequence[Any] | None = None) -> tf.Tensor:
        """Returns whether variables, if not those of before, have the `values` of a step."""
        now = copies([*(variables or self.variables), *self.update.slots])
        if [v.shape for v in now] != [value.shape for value in left]:
            return tf.constant(False)
        return are_same(zip(now, left, strict=True))

    def is_iterate(self, variables: Sequence[Any]) -> bool:
        """Returns whether variables, and the optimizer's, are as the last step left them."""
        return bool(self.is_left(self.left, variables))

    def has_left(self, variable: Any) -> bool:
        """Returns whether one of the variables is as the last step left it."""
        own = {id(copy) for copy in copies([variable])}
        pairs = zip(copies([*self.variables, *self.update.slots]), self.left, strict=True)
        return bool(are_same((now, value) for now, value in pairs if id(now) in own))

    # How it goes on elsewhere

    @property
    def kind(self) -> str:
        """The model's steps, with their update rule."""
        outer = "" if type(self._rule) is UpdateRule else f", within {type(self._rule).__name__}"
        return f"HiddenStateModel with {self.update.name}{outer}"

    @property
    def hidden_state(self) -> str:
        """Secret that the algorithm keeps, or the order of batches to come that are drawn."""
        steps = self.last_step.steps or self.plan.num_batches
        return self.described.secret or self.plan.why_not_resumable(steps)

    def places(self, variables: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
        """Returns the places of the variables of each block among those that are trained."""
        places = {id(variable): place for place, variable in enumerate(variables)}
        return tuple(tuple(places[id(v)] for v in block) for block in self.blocks)

    def private_state(self) -> dict[str, Any]:
        """Returns the secret order, and what the rule keeps. Secret."""
        order = self.plan.private_state(self.last_step.steps)
        return {"order": order, **self.rule.private_state()}

    def resume(self, state: RunState, variables: Sequence[Any]) -> None:
        """Goes on with a run, with new noise; ValueError if the state is damaged, or of others."""
        if (own := self.places(variables)) != state.blocks:
            raise ValueError(
                f"Expected the blocks of the run so far, trainable variables {state.blocks}, got "
                f"{own}. Compile as before."
            )
        private = state.private or {}
        if self.plan.why_not_resumable(state.num_steps):
            self.plan.load_private_state(private.get("order", {}))
        self.rule.resume(private)
        longest = self._declared.longest_gradient  # each was compared with it
        self.stands_at(StepEntry(state.num_steps, state.batch_size, largest_norm=longest))
        self.update.iterations.assign(state.iterations)
        self._is_resumed = True

    # What it is

    def begin(self, declared: Declared) -> None:
        """Takes over what is declared of the loss."""
        self._declared = declared
        self.described = self._rule.described(self, declared)

    def set_noise(self, noise_multiplier: float) -> None:
        """Sets the noise of all steps, before the first one."""
        self.noise_multiplier = noise_multiplier
        self.begin(self._declared)

    def check_start(self, variables: Sequence[Any], declared: Declared) -> None:
        """Raises UnsupportedRunError if no run begins with these variables and declarations."""
        if declared.gradient_bound < math.inf and not self._rule.takes_gradient_bound:
            raise UnsupportedRunError(
                "Expected gradient_bound for a Dice optimizer, got "
                f"{type(self.update.optimizer).__name__}. Say loss_geometry, or nothing."
            )
        self.update.check_options()
        if self.known_loss is not None:
            _refuse_tensor_float_32()
        radius, prox = self.settings.projection_radius, self.settings.prox
        if radius is not None and not (norm := float(joint_norm(variables))) <= radius * (
            1 + SLACK
        ):
            raise UnsupportedRunError(
                f"Expected initial variables within projection_radius = {radius:g} of 0, got norm "
                f"{norm:g}. Initialise smaller, or raise the radius."
            )
        if prox is not None:
            prox.check_axes([variable.shape for variable in variables])

    @property
    def known_loss(self) -> LossGeometry | None:
        """Geometry of the loss that its runs are accounted with."""
        return getattr(self.described, "loss", None)

    def new_run(self, declared: Declared) -> Run:
        """Returns the empty record of a run."""
        return self._rule.described(self, declared).new_run(self.plan.fields)

    def step_of(self, entry: StepEntry) -> Step:
        """Returns what a step says to the run; UnsupportedRunError if it is none of such a run."""
        self.update.check_options()
        return self.described.step(
            learning_rate=as_meant(entry.learning_rate),
            weight_decay=self.update.weight_decay,
            rows=entry.rows,
            largest_norm=entry.largest_norm,
        )

    def with_steps_ahead(
        self, run: Run, steps: int, period: int, releases: tuple[bool, bool]
    ) -> Run:
        """Adds to a run the steps that it lacks, as they are going to be, up to a number of them.

        `releases` says whether a file is seen after every `period` of steps, and after every step.
        """
        plan, first, given = self.plan, run.num_steps, self.update.given_rate
        if callable(given) and not _is_schedule(given) and self.known_loss is not None:
            raise UnsupportedRunError(
                "Expected a number or a schedule of Keras as learning rate with target_epsilon, "
                "EarlyStopping or save_best_only, got a function: epsilon depends on the rates of "
                "all steps. Use tf.keras.optimizers.schedules."
            )
        rows = min(plan.batch_size, plan.max_batch_size or plan.batch_size)
        rates = [*self.rates(steps - first), None]
        for number, rate in zip(range(first, steps + 1), rates, strict=True):
            if releases[1] or (releases[0] and (steps - number) % period == 0):
                run.release()
            if rate is not None:
                step = self.step_of(StepEntry(rows=rows, learning_rate=rate))
                run.add(attrs.evolve(step, batch=number % plan.num_batches))
        return run

    # What is said of it

    def in_advance(self, run: Run) -> list[Assumption]:
        """Returns the number of steps that was asked for, and the rates that nobody changes."""
        total, given = self.settings.num_steps, self.update.given_rate
        steps = steps_in_advance(run.num_steps, None if self._is_resumed else total)
        if total is None and self.asked_for == run.num_steps:
            steps = Assumption.checked(
                f"all of the {run.num_steps} steps that the only call of fit was asked for"
            )
        rates = ""
        if not self.update.is_plain_sgd:
            rates = f"rates of {self.update.name}, which change no figure"
        elif callable(given) and not _declared_rates(given, 0.0):
            rates = f"learning rate of every step that of the compiled {type(given).__name__}"
        return list(fixed_in_advance(run, steps, rates))

    def declared(self, event: Any) -> list[str]:
        """Returns where the learning rates come from; of foreign optimizers, what they see."""
        optimizer, texts = self.update.optimizer, []
        if self.described.hides_iterates:
            texts = _declared_rates(self.update.given_rate, getattr(event, "learning_rate", 0.0))
        is_own = type(optimizer).__module__.startswith("hidden_state_adapters.")
        if not is_own and not keras_api.is_of_keras(optimizer):
            kind = type(optimizer).__name__
            texts.append(f"of the examples {kind} sees only the noisy gradients")
        return texts


def as_meant(rate: float) -> float:
    """Returns the shortest decimal that is the same float32: Keras keeps rates in float32."""
    single = np.float32(rate)
    return float(str(single)) if float(single) == rate else rate


def _declared_rates(given: Any, recorded: float | Schedule) -> list[str]:
    """Returns what is declared about learning rates that are no number and no schedule of Keras."""
    is_number = not callable(given) and not isinstance(recorded, Schedule)
    if is_number or (_is_schedule(given) and keras_api.is_of_keras(given)):
        return []
    return [
        "the learning rates that were set or computed during the run depend neither on the "
        "examples nor on the weights"
    ]


def _is_schedule(given: Any) -> bool:
    return isinstance(given, tf.keras.optimizers.schedules.LearningRateSchedule)


def _refuse_tensor_float_32() -> None:
    """Refuses a GPU that rounds to 10 bits, for runs whose loss has a declared smoothness."""
    if (
        tf.config.list_physical_devices("GPU")
        and tf.config.experimental.tensor_float_32_execution_enabled()
    ):
        raise UnsupportedRunError(
            "Expected full float32 on the GPU, got TensorFloat-32 (TensorFlow's default): "
            "gradients rounded to 10 bits do not have the declared smoothness. Call "
            "tf.config.experimental.enable_tensor_float_32_execution(False)."
        )


# Files, and what compile is given


def plain_rule(rule: UpdateRule, model: Any) -> dict[str, Any]:
    """Returns what a file tells of a rule; empty for that of the optimizer alone."""
    kind = type(rule)
    if kind is UpdateRule:
        return {}
    name, config = tf.keras.utils.get_registered_name(kind), rule.with_places(model).get_config()
    return {"module": kind.__module__, "name": name, "config": config}


def rule_of(plain: Mapping[str, Any], optimizer: Any) -> Any:
    """Returns the rule that `plain_rule` wrote down, or the optimizer."""
    if not plain:
        return optimizer
    if plain["module"].startswith("hidden_state_adapters."):  # whose modules are loaded lazily
        importlib.import_module(plain["module"])
    # Not Keras' way back: it has another one for each format of files.
    rule = tf.keras.utils.get_registered_object(plain["name"]).from_config(plain["config"])
    rule.optimizer = optimizer
    return rule


def rule_and_settings(optimizer: Any, given: Settings) -> tuple[UpdateRule, Settings]:
    """Returns rule and settings of a model that is compiled with a rule, or an optimizer."""
    if hasattr(optimizer, "for_model"):  # one with noise of this package
        rule, told = optimizer.for_model()
        return rule, given.joined_by(type(optimizer).__name__, told)
    rule = optimizer if isinstance(optimizer, UpdateRule) else UpdateRule(optimizer)
    _refuse_noise(rule.optimizer)
    if given.l2_norm_clip is None:
        raise ValueError(
            "Expected l2_norm_clip of the model, got none. Give it to the model, or compile with "
            "an optimizer that has it, such as CyclicDPKerasSGDOptimizer."
        )
    return rule, given


def _refuse_noise(optimizer: Any) -> None:
    """Raises UnsupportedRunError if an optimizer would clip and add noise a second time."""
    kinds = type(optimizer).__mro__
    is_theirs = any(kind.__module__.startswith("tensorflow_privacy.") for kind in kinds)
    if is_theirs or hasattr(optimizer, "for_model") or hasattr(optimizer, "_dp_sum_query"):
        raise UnsupportedRunError(
            f"Expected an optimizer without noise in compile, got {type(optimizer).__name__}: the "
            "model adds it, and noise would be added twice. Pass "
            "tf.keras.optimizers.SGD(...), or CyclicDPKerasSGDOptimizer(...) alone, which leaves "
            "it to the model."
        )
