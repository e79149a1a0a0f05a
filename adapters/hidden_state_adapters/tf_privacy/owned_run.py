"""The run of a model that owns it: examples, batches, steps and their record."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any

import attrs
import tensorflow as tf
from dp_accounting import NeighboringRelation

from hidden_state_accountants import BatchOrder, validate
from hidden_state_adapters.batch_plans import FixedPlan
from hidden_state_adapters.tf_privacy import keras_api
from hidden_state_adapters.tf_privacy.continuation import RunState
from hidden_state_adapters.tf_privacy.declared import Declared
from hidden_state_adapters.tf_privacy.gradients import (
    ExampleGradients,
    MeansOfSeveral,
    RowByRow,
    ThroughLinearLayers,
)
from hidden_state_adapters.tf_privacy.guards.broken_products import refuse_broken_products
from hidden_state_adapters.tf_privacy.guards.callbacks import (
    check_callbacks,
    chooses_rates,
    is_of_keras,
    keeps_the_best,
    stopping,
)
from hidden_state_adapters.tf_privacy.guards.model import build
from hidden_state_adapters.tf_privacy.guards.settings import refuse_surroundings
from hidden_state_adapters.tf_privacy.guards.trained_loss import TrainedLoss
from hidden_state_adapters.tf_privacy.lineage import digest
from hidden_state_adapters.tf_privacy.owned.ahead import StepsAhead, noise_for
from hidden_state_adapters.tf_privacy.owned.data import (
    FEWEST_ROWS,
    HeldExamples,
    dealt,
    filled,
    multiple_of_sizes,
    plan_of,
)
from hidden_state_adapters.tf_privacy.owned.losses import RowLosses
from hidden_state_adapters.tf_privacy.owned.rule import UpdateRule
from hidden_state_adapters.tf_privacy.owned.settings import Settings
from hidden_state_adapters.tf_privacy.owned.weights import GivenWeights, times
from hidden_state_adapters.tf_privacy.recorded_run import Dealt, RecordedRun
from hidden_state_adapters.tf_privacy.refusals import refusal
from hidden_state_adapters.tf_privacy.replicas import check_made_in, strategy_of
from hidden_state_adapters.tf_privacy.step_log import Problem
from hidden_state_adapters.tf_privacy.units import Units

_EPSILON = "epsilon_if_released_now"
_BATCH_SIZE = 32  # of Keras, where nothing is said
_MOMENT = 0.05  # seconds between two looks, which nobody notices
_LONGEST_PACE = 64  # steps between them
_LARGEST_JUMP = 8  # times as many: the first ones may have been short


@attrs.frozen
class Target:
    """What the noise of a run is found for.

    Attributes:
        epsilon: Met from below.
        delta: In (0, 1).
    """

    epsilon: float
    delta: float


@attrs.frozen
class Continued:
    """A run that goes on.

    Attributes:
        state: Where it stood.
        discard_later_steps: Says that nothing of the steps after the state was ever seen.
    """

    state: RunState
    discard_later_steps: bool


class OwnedRun:
    """Everything that a model trains with, from the first call of fit on.

    Attributes:
        relation: That the run is accounted under. An example that is left out, or has no gradient,
            makes another microbatch, and none is left out: for them it is REPLACE_ONE, which
            covers an example without gradient.
        first_batch: The first examples and their targets, whoever trains on them.

    Args:
        model: It is compiled.
        settings: Of the model.
        rule: That it is compiled with.
        uses_xla: Whether XLA compiles the step.
        x: The examples.
        y: Targets.
        batch_size: As for fit.
        steps_per_epoch: Likewise.
        weights: Likewise.
        continued: The run that goes on; None for a new one.

    Raises:
        UnsupportedRunError: No such run can be accounted.
        TypeError, ValueError: An argument has an impossible value.
    """

    def __init__(
        self,
        model: Any,
        settings: Settings,
        rule: UpdateRule,
        *,
        uses_xla: bool,
        x: Any,
        y: Any,
        batch_size: int | None,
        steps_per_epoch: int | None,
        weights: GivenWeights,
        continued: Continued | None = None,
    ):
        refuse_surroundings(strategy := strategy_of(model))
        if strategy is not None and uses_xla:
            raise refusal(
                "Expected jit_compile = False in a MirroredStrategy, got True: XLA compiles no "
                "exchange between its replicas. Leave it out."
            )
        if strategy is not None and (model._given_pace or 1) != 1:
            raise refusal(
                f"Expected steps_per_execution = 1 in a MirroredStrategy, got {model._given_pace}: "
                "its replicas meet in every step. Leave it out."
            )
        self._strategy = strategy
        self._model, self._settings, self._losses = model, settings, RowLosses(model.loss)
        self._examples = HeldExamples(x, y, weights, steps_per_epoch)
        self._largest_weight = self._examples.given.largest
        if batch_size is None:
            batch_size = self._examples.batch_size
        self._asked = _batches(batch_size, steps_per_epoch)
        size, number = self._asked
        if settings.order is BatchOrder.FULL:
            size = self._examples.number
        self._microbatch = _microbatch(settings, rule, size)
        self.relation = settings.neighboring_relation
        if self._microbatch > 1:
            self.relation = NeighboringRelation.REPLACE_ONE
        self._examples.microbatch = self._microbatch
        self.plan = plan_of(
            settings.order,
            self._examples.number,
            size,
            max_batch_size=settings.max_batch_size,
            drop_remainder=settings.drop_remainder,
            microbatch=self._microbatch,
        )
        self._period = number or self.plan.num_batches
        self._replicas = 1 if strategy is None else strategy.num_replicas_in_sync
        fewest = max(FEWEST_ROWS, self._replicas)
        self.is_padded = settings.order is BatchOrder.POISSON or self.plan.batch_size < fewest
        self._multiple = multiple_of_sizes(
            is_compiled=uses_xla and self.is_padded, expected=self.plan.batch_size
        )
        if self._period != self.plan.num_batches and not self.plan.draws_every_step:
            raise refusal(
                f"Expected {self.plan.num_batches} steps in an epoch, got steps_per_epoch = "
                f"{number}: every batch is used once per epoch. Leave it out."
            )
        if continued is not None:
            self._check_relation(continued.state)
            self._check_end_of_epoch(continued.state.num_batches)
            self._restore_order(continued.state)
        with model.distribute_strategy.scope():  # variables of Keras are those of its replicas
            build(model, self._examples.x)
            check_made_in(strategy, keras_api.variables(model))
            if strategy is not None or keras_api.IS_KERAS_3:
                keras_api.build_optimizer(model.optimizer, model.trainable_variables)
        variables = keras_api.trained(model)
        declared = self._weighted(rule.declared(settings))
        steps = rule.steps(settings, model.optimizer, self.plan, variables)
        steps.examples_of_record = self._microbatch
        # Of the order of the batches; what is known of the loss only adds theorems.
        steps.new_run(Units(size, size, 1, 1), declared).check_relation(self.relation)
        self.record = RecordedRun(
            model,
            steps,
            batch_size=self.plan.batch_size,
            examples=len(self.plan.records),
            relation=self.relation,
            declared=declared,
            trained=self._trained(model),
            dealt=Dealt(
                self.plan.description, self._period, self.plan.num_rows, self._examples_of_steps()
            ),
            state=None if continued is None else continued.state,
            discard_later_steps=continued is not None and continued.discard_later_steps,
        )
        self._examples.warn_of_equal()
        self.first_batch = next(self._batches())
        parts = steps.blocks or (variables,)
        self.clipping = [self._clipping(part, *self.first_batch) for part in parts]
        self._refuse_broken_products()
        self.steps, self.planned = steps, 0  # by the end of the call of fit
        self.pace = 1  # steps between two looks, where nobody says how many
        steps.training.begin(variables)
        # Step by step even where the loop of fit is eager, so that no example is traced anew.
        self._compiled = tf.function(self._take, jit_compile=uses_xla, reduce_retracing=True)
        self._uses_xla = uses_xla

    def _clipping(self, variables: Any, examples: Any, targets: Any) -> Any:
        of_run = self._model, self._losses, variables
        linear = ThroughLinearLayers.of(*of_run, examples, targets, self._microbatch)
        return linear or (MeansOfSeveral if self._microbatch > 1 else RowByRow)(*of_run)

    def _refuse_broken_products(self) -> None:
        """Raises UnsupportedRunError if TensorFlow would mix examples in the gradients."""
        x, y, *weights = self._examples.taken(tf.constant([0, 0], tf.int64))
        rows = (x, y, *weights) if self._microbatch > 1 else (x, y)
        for clipping in self.clipping:

            def norms(*rows: Any, of: Any = clipping) -> tf.Tensor:
                return of.gradients(*rows).norms

            refuse_broken_products(norms, *rows)

    def check_can_go_on(self) -> None:
        """Raises UnsupportedRunError where fit, which begins an epoch, could not go on."""
        if self.record.chooses_steps:
            raise refusal(
                "Expected a run that EarlyStopping cannot stop, or has not, got one that it may "
                "have: its steps are accounted ahead, and do not go on elsewhere. Save the model; "
                "whoever trains it further composes both runs."
            )
        self._check_end_of_epoch(self.record.num_batches)

    def _check_end_of_epoch(self, steps: int) -> None:
        batch = steps % self._period
        if batch and not self.plan.draws_every_step:
            raise refusal(
                f"Expected a state of the end of an epoch, got one before batch {batch} of "
                f"{self._period}: fit begins with batch 0. Take the state after fit, or in "
                "on_epoch_end of a callback."
            )

    def _check_relation(self, state: RunState) -> None:
        if state.named_relation is not self.relation:
            raise refusal(
                f"The state is of another run: expected neighboring_relation = {state.relation}, "
                f"got {self.relation.name}. Use the settings of before."
            )

    def _batches(self) -> Any:
        size = self.plan.batch_size * self._microbatch
        return self._examples.batches(min(size, self._examples.number))

    def _weighted(self, declared: Declared) -> Declared:
        """What is said of the loss, with the weights that an example may have."""
        if self._examples.weights is None or declared == Declared():
            return declared
        largest = self._largest_weight
        if largest is None:
            raise refusal(
                "Expected weight_bound= of the model with sample_weight and what is known of the "
                "loss, got none: gradients and curvature grow with the weight. It is a bound on "
                "the weights that an example could have, not the largest one of these examples; or "
                "leave loss_geometry and gradient_bound out."
            )
        return attrs.evolve(declared, largest_weight=largest)

    @property
    def has_weights(self) -> bool:
        """Whether classes or examples have weights."""
        return self._examples.weights is not None

    def _restore_order(self, state: RunState) -> None:
        """That of a run that has one, before anything is asked about its batches.

        Raises:
            ValueError: The state is damaged.
        """
        if not self.plan.why_not_resumable(self.plan.num_batches) or state.private is None:
            return  # a state that lacks it is refused by the record
        try:
            self.plan.load_private_state(state.private["order"])
        except KeyError as error:
            raise ValueError(
                f"The state is damaged, or of another batch_order: it lacks {error}."
            ) from error

    def _examples_of_steps(self) -> Any:
        """As `Dealt` wants them."""
        if self.plan.order is BatchOrder.POISSON:  # of which no theorem uses the curvature
            return lambda: ()
        if not isinstance(self.plan, FixedPlan):
            return None

        def examples() -> Any:
            for step in range(self.plan.num_batches):
                index = self.plan.batch(step)
                x, *_ = self._examples.taken(tf.constant(index, tf.int64))
                yield [self._one_by_one(x)]

        return examples

    def _trained(self, model: Any) -> TrainedLoss:
        return TrainedLoss(
            model,
            self._batches,
            self._losses,
            given=self._losses.given,
            keras_loss=self._losses.keras_loss,
            is_the_step=True,
        )

    def go_on(
        self,
        model: Any,
        x: Any,
        y: Any,
        batch_size: Any,
        steps_per_epoch: Any,
        weights: GivenWeights,
    ) -> None:
        """Checks that another call of fit goes on with the run.

        Raises:
            UnsupportedRunError: It does not.
        """
        if batch_size is None:
            batch_size = self._examples.batch_size
        if self.record.chooses_steps:
            raise refusal(
                "Expected a run that EarlyStopping has not stopped, got one that it has: it is "
                "accounted with all epochs that could have followed, and is over. Compile again: "
                "that begins another run, which is composed with this one."
            )
        asked = _batches(batch_size, steps_per_epoch)
        if asked != self._asked:
            raise refusal(
                f"Expected (batch_size, steps_per_epoch) = {self._asked}, as in the run so far, "
                f"got {asked}. Compile again for another run."
            )
        weights = self._examples.check_same(x, y, weights, steps_per_epoch)
        if self.has_weights and weights.largest != self._largest_weight:
            raise refusal(
                f"Expected weights of at most {self._largest_weight}, as in the run so far, got at "
                f"most {weights.largest}: another example could have that one. Keep class_weight; "
                "or compile again for another run."
            )
        self.record.go_on(model, self.steps, self._trained(model))

    def prepare(
        self, epochs: int, releases: tuple[bool, bool], target: Target | None, *, may_stop: bool
    ) -> None:
        """Gets ready for the steps of a call of fit.

        Args:
            epochs: That it trains.
            releases: Whether an iterate is seen after every epoch, and after every step.
            target: What the noise is to be found for; None if it is known.
            may_stop: Whether validation data choose the number of epochs, or one of them.

        Raises:
            UnsupportedRunError: There are more steps than were declared.
            ValueError: No noise meets the target.
        """
        before = self.record.num_batches
        total = before + max(0, epochs) * self._period
        declared = self._settings.num_steps
        if declared is not None and total > declared:
            raise refusal(
                f"Expected at most num_steps = {declared} steps, as declared to the model, got "
                f"{before} so far and {total - before} more. Train fewer epochs; or compile again "
                "for another run, which is composed with this one."
            )
        self.planned = total
        ahead = StepsAhead(total, self._period, *releases)
        units = self.record.units
        if target is not None:
            event = self.steps.event_ahead(units, self.record.declared, ahead)
            spent = self.record.earlier_events
            noise = noise_for(target.epsilon, target.delta, event, spent, self.relation)
            self.steps.set_noise(noise)
        if may_stop:
            empty = self.steps.new_run(units, self.record.declared)
            self.steps.with_steps_ahead(empty, units, ahead)  # raises
            self.record.may_stop(lambda run: self.steps.with_steps_ahead(run, units, ahead))
        self.steps.asked_for = None if before else total

    @property
    def steps_per_epoch(self) -> int | None:
        """What fit has to be told of `epochs`; None if it is their length."""
        return None if self._strategy is None else self._period

    def epochs(self, number: int) -> Any:
        """The batches of one epoch, drawn when it begins, which Keras iterates `number` times.

        In a strategy those of all epochs, which it iterates once.
        """
        strategy = self._strategy

        def batches(epochs: int) -> tf.data.Dataset:
            done = self.record
            return dealt(
                self.plan, self._period, lambda: done.num_batches, self._multiple, epochs=epochs
            )

        if strategy is None:
            return batches(1)

        def for_each_replica(*batch: Any) -> tf.data.Dataset:
            return tf.data.Dataset.from_tensors(batch).repeat(self._replicas)

        return strategy.distribute_datasets_from_function(
            lambda context: batches(number).flat_map(for_each_replica)
        )

    def step(self, data: Any) -> tuple[Any, Any, Any]:
        """Takes the private step on a batch of `epoch`.

        Returns:
            The losses, the targets and the outputs of its examples.
        """
        step, rows, indices = data
        indices = indices[: filled(rows, self._multiple)]  # what follows has the size of another
        if self._strategy is not None:
            indices, rows = self._part(indices, rows)
        x, y, *weights = self._examples.taken(indices)
        in_graph = not self._uses_xla and not tf.executing_eagerly()
        take = self._take if in_graph or self._strategy is not None else self._compiled
        losses, outputs = take(step, rows, x, y, *weights)
        if self.is_padded:
            losses, y, outputs = losses[:rows], y[:rows], outputs[:rows]
        return losses, self._one_by_one(y), self._one_by_one(outputs)

    def _one_by_one(self, structure: Any) -> Any:
        """Of records that are microbatches the rows of all examples."""
        if self._microbatch == 1:
            return structure
        return tf.nest.map_structure(
            lambda part: tf.reshape(part, tf.concat([[-1], tf.shape(part)[2:]], 0)), structure
        )

    def _part(self, indices: tf.Tensor, rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """What this replica takes of a batch, at least one row, and how many are examples."""
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        own = indices[:rows][replica :: self._replicas]
        count = tf.shape(own, out_type=tf.int64)[0]
        return tf.concat([own, indices[:1]], 0)[: tf.maximum(count, 1)], count

    def _take(self, step: Any, rows: Any, x: Any, y: Any, *weights: Any) -> tuple[Any, Any]:
        if not self.steps.trains(keras_api.trained(self._model)):
            raise refusal(str(Problem.WEIGHTS))

        def gradients_by(clipping: Any) -> ExampleGradients:
            if self._microbatch > 1:
                return clipping.gradients(x, y, *weights)
            found = clipping.gradients(x, y)
            return times(found, *weights) if weights else found

        passes = [functools.partial(gradients_by, one) for one in self.clipping]
        found = self.steps.take(passes, step, rows)
        return found.losses, found.outputs

    def end_interrupted(self, steps_before: int) -> None:
        """Ends the run of a fit that an error or the user has stopped, if it took a step."""
        record = self.record
        record.note_weights()
        if record.has_ended or self.steps.last_step.steps == steps_before:
            return
        record.invalidate(
            "fit was interrupted (by an error, or by hand when the model was good?), so the "
            "number of steps may depend on the data. Fix it in advance, and start again."
        )


def _microbatch(settings: Settings, rule: UpdateRule, batch_size: int) -> int:
    """The examples of a microbatch.

    Args:
        settings: Of the model.
        rule: Of the update.
        batch_size: In examples.

    Raises:
        UnsupportedRunError: There are none of equal size, or no bound covers them.
    """
    number = settings.num_microbatches or batch_size
    if batch_size % number:
        raise refusal(
            f"Expected num_microbatches to divide batch_size = {batch_size}, got {number}. Leave "
            "it out, for one example each."
        )
    size = batch_size // number
    if size == 1:
        return 1
    of_several = f"got microbatches of {size} examples (batch_size / num_microbatches)"
    if not rule.knows_microbatches:
        raise refusal(
            f"Expected num_microbatches = None with {type(rule).__name__}, {of_several}: its bound "
            "is about gradients of single examples. Leave it out."
        )
    if settings.neighboring_relation is NeighboringRelation.ADD_OR_REMOVE_ONE:
        raise refusal(
            f"Expected neighboring_relation = REPLACE_SPECIAL or REPLACE_ONE, {of_several} and "
            "ADD_OR_REMOVE_ONE: with one example more or less all microbatches after it are other "
            "ones. Leave num_microbatches out, for one example each."
        )
    if settings.max_batch_size is not None and settings.max_batch_size < size:
        raise refusal(
            f"Expected max_batch_size >= {size}, got {settings.max_batch_size} and microbatches of "
            f"{size} examples: no microbatch fits. Raise it."
        )
    return size


def _batches(batch_size: Any, steps_per_epoch: Any) -> tuple[int, int | None]:
    size = _BATCH_SIZE if batch_size is None else batch_size
    if steps_per_epoch is not None:
        steps_per_epoch = validate.integer("steps_per_epoch", steps_per_epoch, minimum=1)
    return validate.integer("batch_size", size, minimum=1), steps_per_epoch


class Recording(tf.keras.callbacks.Callback):
    """Records the steps of a fit; the first one of its callbacks.

    Attributes:
        releases: Whether an iterate is seen after every epoch, and after every step.
        stopping: The callbacks that may stop early.
        chooses: Whether validation data choose the number of epochs, or one of them.
        chooses_rates: Whether they choose the learning rates.

    Args:
        run: Of the model.
        settings: Likewise.
        others: The user's callbacks.
        pace: How many steps are made between two looks, for this callback to choose; or None.
        has_validation: Whether fit has validation data.

    Raises:
        UnsupportedRunError: One of them chooses by the data, restores weights or shows metrics.
    """

    def __init__(
        self,
        run: OwnedRun,
        settings: Settings,
        others: Sequence[Any],
        pace: tf.Variable | None = None,
        *,
        has_validation: bool,
    ):
        super().__init__()
        self._run, self._steps, self._pace, self._began = run, run.steps, pace, 0.0
        self._record, self._target_delta = run.record, settings.target_delta
        self.releases = check_callbacks(
            [self, *others],
            self,
            checkpoints_stay_private=settings.checkpoints_stay_private,
            metrics_stay_private=settings.metrics_stay_private,
            public_validation=settings.validation_data_is_public and has_validation,
            rates_are_free=run.steps.rates_are_free,
        )
        self.chooses_rates = any(map(chooses_rates, others))
        self.stopping = stopping(others)
        self.chooses = bool(self.stopping) or keeps_the_best(others)
        self._released: set[tuple[str, ...]] = set()  # digests of iterates that may come back
        self.foreign = {type(c).__name__ for c in others if not is_of_keras(c)}

    def on_train_begin(self, logs: Any = None) -> None:
        """Goes on at the pace that an earlier fit of the run has found."""
        if self._pace is not None:
            self._pace.assign(self._run.pace)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Notes the time."""
        self._began = time.monotonic()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Records the steps since the last look, and chooses how many follow until the next."""
        for entry in self._steps.steps_since(self._record.num_batches):
            self._record.add(self._record.next_batch, entry)
        if self.releases[1]:
            self._record.release()
        if self._pace is not None:
            self._quicken(self._pace, time.monotonic() - self._began)

    def _quicken(self, pace: tf.Variable, seconds: float) -> None:
        """Makes more steps until the next look, if that is only a moment away, too."""
        faster = min(_MOMENT / max(seconds, 1e-9), _LARGEST_JUMP)
        if faster > 1:
            found = min(int(max(faster, 2) * int(pace.numpy())), _LONGEST_PACE)
            pace.assign(found)
            self._run.pace = max(found, self._run.pace)  # the last steps of an epoch are few

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the epsilon to the logs, and notes a checkpoint as released."""
        self.model.reset_metrics()  # Model.save would store them
        self._record.after_epoch()
        if self.releases[0]:
            self._record.release()
        if self.stopping:
            self._released.add(self._digests())
        if self._target_delta is not None and logs is not None:
            logs[_EPSILON] = self._record.guarantee().epsilon(self._target_delta)

    def on_train_end(self, logs: Any = None) -> None:
        """Refuses a run that something stopped before the declared number of epochs."""
        self.model.reset_metrics()
        stopped = any(callback.stopped_epoch for callback in self.stopping)
        if stopped and self._digests() in self._released:  # restore_best_weights
            self._run.steps.goes_back()
        if self.chooses:
            self._record.has_stopped(early=stopped)
        lacks_steps = self._record.num_batches < self._run.planned  # a StopIteration
        if (self.model.stop_training or lacks_steps) and not stopped:
            self._record.invalidate(
                "training was stopped early (model.stop_training), so the number of steps may "
                "depend on the data. Fix it in advance."
            )

    def after_fit(self) -> None:
        """Takes weights that EarlyStopping has put back for the newest, where it was late to.

        In Keras 3 it does so in its own on_train_end, also if it has not stopped the run.
        """
        steps = self._run.steps
        if self.stopping and not steps.is_iterate(keras_api.trained(self.model)):
            if self._digests() in self._released:
                steps.goes_back()
                self._record.is_over()

    def _digests(self) -> tuple[str, ...]:
        return tuple(map(digest, keras_api.trained(self.model)))
