"""A private run: it holds the data, deals the batches, takes the steps and accounts them."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import tensorflow as tf
from dp_accounting import NeighboringRelation

from hidden_state_accountants import Assumption, BatchOrder, UnsupportedRunError, validate
from hidden_state_accountants.events.batch_order import OF_RANDOM_SIZE
from hidden_state_accountants.ledger import refuse_in_budget
from hidden_state_adapters.batch_plans import BatchPlan, RandomKeys, plan_of
from hidden_state_adapters.calibration import calibrate_noise_after
from hidden_state_adapters.tf_privacy import keras_api
from hidden_state_adapters.tf_privacy.algorithm import Algorithm, UpdateRule, rule_and_settings
from hidden_state_adapters.tf_privacy.data import GivenWeights, HeldExamples, check_batched
from hidden_state_adapters.tf_privacy.gradients import RowByRow, ThroughLinearLayers, times
from hidden_state_adapters.tf_privacy.head import Known, look_at
from hidden_state_adapters.tf_privacy.lineage import Continued, RunState
from hidden_state_adapters.tf_privacy.losses import RowLosses
from hidden_state_adapters.tf_privacy.record import FILES_STAY_PRIVATE, INTERRUPTED, RecordedRun
from hidden_state_adapters.tf_privacy.report import PrivacyReport
from hidden_state_adapters.tf_privacy.settings import Declared, Settings
from hidden_state_adapters.tf_privacy.step import (
    MOVED,
    NOT_FINITE,
    TOO_LONG,
    StepEntry,
    Update,
)
from hidden_state_adapters.tf_privacy.trained_part import (
    FixedVariables,
    check_made_in,
    refuse_surroundings,
    strategy_of,
)

_BATCH_SIZE = 32  # of Keras, where nothing is said
_FEWEST_ROWS = 2  # of a batch on the device, padding included
_MOMENT = 0.05  # seconds between two looks, which nobody notices
_LONGEST_PACE = 64  # steps between them
_LARGEST_JUMP = 8  # times as many: the first ones may have been short


@attrs.frozen(eq=False)
class Given:
    """Arguments of fit about the data: examples, targets, batches and weights."""

    x: Any
    y: Any
    batch_size: int | None
    steps_per_epoch: int | None
    weights: GivenWeights

    def batches(self, of_data: int | None) -> tuple[int, int | None]:
        """Returns batch size and steps of an epoch, where the data may say the first."""
        size, steps = self.batch_size, self.steps_per_epoch
        if size is None:
            size = of_data or _BATCH_SIZE
        if steps is not None:
            steps = validate.integer("steps_per_epoch", steps, minimum=1)
        return validate.integer("batch_size", size, minimum=1), steps


class PrivateRun(PrivacyReport):
    r"""A private run that a loop of your own asks for its steps; `fit` of a model asks likewise.

        run = PrivateRun(
            model, x, y, loss=loss, optimizer=tf.keras.optimizers.SGD(0.5), batch_size=150,
            l2_norm_clip="auto", noise_multiplier=6.0, feature_norm=1.0,
        )
        for _ in range(1000):
            loss = run.step()  # deals, clips, adds noise, moves the model, writes down
        print(run.report(1e-5))

    A step is that of `HiddenStateModel`, and so are the arguments that are described there. It
    needs nothing of Keras but ``model(x)``, its variables, a loss and an optimizer, and trains the
    model that it is given, with Keras 2 and with Keras 3.

    Attributes:
        relation: Neighboring relation that the run is accounted under.
        steps_per_epoch: Number of steps of an epoch of `train`.

    Args:
        model: A Keras model or layer. Its trainable variables are trained.
        x: Examples, as for the `fit` of a `HiddenStateModel`.
        y: Targets, likewise.
        loss: Loss, as for its `compile`.
        optimizer: Optimizer of Keras, a `DiceUpdate`, a `BlockCoordinateUpdate`, or an optimizer
            with noise of this package.
        batch_size: Batch size, as for its `fit`.
        steps_per_epoch: Number of steps of an epoch, as for its `fit`.
        class_weight: Weights of classes, as for its `fit`.
        sample_weight: Weights of examples, as for its `fit`.
        jit_compile: True if XLA compiles the step.
        state: State of a run that goes on, as `state()` returned it; the model has the weights that
            were saved with it.
        discard_later_steps: Declares that nothing that was computed after the state, in this
            process, was ever seen by anybody, nor made you go back.
        **settings: The arguments of `HiddenStateModel` by name: `l2_norm_clip`,
            `noise_multiplier`, `batch_order`, `loss_geometry`, `feature_norm`, ...

    Formal guarantees: those of `HiddenStateModel`. Declared by you, and listed: what the loop does
    beside the steps (evaluation, choice of their number) does not depend on the examples.

    Raises:
        UnsupportedRunError: No such run can be accounted; from every step, once it has ended.
        TypeError, ValueError: An argument has an impossible value.

    Source: DP-SGD (Abadi et al. 2016, arXiv:1607.00133v2, algorithm 1).
    """

    _how_to_begin = "Call step or train."
    _strategy: Any = None
    _show: Callable[[Any, Any], Any] = staticmethod(lambda targets, outputs: None)

    def __init__(
        self,
        model: Any,
        x: Any,
        y: Any = None,
        *,
        loss: Any,
        optimizer: Any,
        batch_size: int | None = None,
        steps_per_epoch: int | None = None,
        class_weight: Any = None,
        sample_weight: Any = None,
        jit_compile: bool = False,
        state: Mapping[str, Any] | None = None,
        discard_later_steps: bool = False,
        **settings: Any,
    ):
        if not isinstance(model, tf.keras.layers.Layer):
            raise TypeError(f"Expected a Keras model or layer, got {type(model).__name__}.")
        if isinstance(model, PrivacyReport):
            raise UnsupportedRunError(
                f"Expected a plain model of Keras, got {type(model).__name__}, which has a run of "
                "its own. Call its fit."
            )
        if isinstance(model, tf.keras.Model) and strategy_of(model) is not None:
            raise UnsupportedRunError(
                "Expected a model that was made in no strategy, got one of a MirroredStrategy: a "
                "loop of your own has one replica. Call fit of make_private(model)."
            )
        rule, checked = rule_and_settings(optimizer, Settings(**settings))
        weights = GivenWeights(class_weight, sample_weight, checked.weight_bound)
        self._open(
            model,
            loss,
            tf.keras.optimizers.get(rule.optimizer),
            rule,
            checked,
            Given(x, y, batch_size, steps_per_epoch, weights),
            uses_xla=jit_compile,
            continued=Continued(RunState.of_plain(state), discard_later_steps) if state else None,
        )

    @classmethod
    def of_compiled(
        cls, model: Any, rule: UpdateRule, settings: Settings, given: Given, **how: Any
    ) -> PrivateRun:
        """Returns the run of a compiled model, whose fit takes its steps."""
        run = cls.__new__(cls)
        refuse_surroundings(strategy := strategy_of(model))
        run._strategy = strategy
        run._show = lambda targets, outputs: model.compute_metrics(None, targets, outputs, None)
        run._open(model, model.loss, model.optimizer, rule, settings, given, **how)
        return run

    def _open(
        self,
        model: Any,
        loss: Any,
        optimizer: Any,
        rule: UpdateRule,
        settings: Settings,
        given: Given,
        *,
        uses_xla: bool,
        continued: Continued | None,
    ) -> None:
        if self._strategy is not None and uses_xla:
            raise UnsupportedRunError(
                "Expected jit_compile = False in a MirroredStrategy, got True: XLA compiles no "
                "exchange between its replicas. Leave it out."
            )
        self._model, self._uses_xla = model, uses_xla
        self.relation, self._target_delta = settings.neighboring_relation, settings.target_delta
        check_batched(given.x, given.batch_size)
        self._examples = HeldExamples(given.x, given.y, given.weights, given.steps_per_epoch)
        self._largest_weight = self._examples.given.largest
        self._asked = given.batches(self._examples.batch_size)
        self.plan = self._planned(settings)
        variables = self._built(optimizer)
        example, losses = self._examples.first(1)[0], RowLosses(loss)
        known = self._looked_at(losses, rule, settings, optimizer, variables)
        settings = settings.with_clip_norm(known.declared.longest_gradient, known.why_not)
        self.settings, self._noise = settings, settings.noise_multiplier
        self.steps = Algorithm(rule, settings, optimizer, self.plan, variables)
        # Of the order of the batches; what is known of the loss only adds theorems.
        self.steps.new_run(known.declared).check_relation(self.relation)
        self._record: RecordedRun = RecordedRun(
            model,
            self.steps,
            relation=self.relation,
            declared=known.declared,
            checked=[Assumption.checked(known.checked)],
            files_stay_private=settings.checkpoints_stay_private,
            continued=continued,
        )
        self._record.why_not_known = known.why_not
        if self.relation is NeighboringRelation.ADD_OR_REMOVE_ONE:
            self._record.why_not_known = "bounds on hidden iterates need REPLACE_SPECIAL"
        if settings.batch_order is None:
            self._record.note = "Batches are Poisson, the default of batch_order=."
        self.clipping: list[Any] = []
        for part in self.steps.blocks:
            if known.head is not None:
                self.clipping.append(attrs.evolve(known.head, variables=list(part)))
            else:
                fast = ThroughLinearLayers.of(model, losses, part, example)
                self.clipping.append(fast or RowByRow(model, losses, part))
        self._prepare_steps()

    def _planned(self, settings: Settings) -> BatchPlan:
        """Returns the plan of the batches that are dealt of the examples."""
        examples, (size, steps) = self._examples.number, self._asked
        if settings.order is BatchOrder.FULL:
            size = examples
        if settings.microbatch(size) > 1:
            raise UnsupportedRunError(
                f"Expected num_microbatches = None or {size}, one example each, got "
                f"{settings.num_microbatches}: several move their mean by up to twice the clip "
                "norm. Leave it out."
            )
        plan = plan_of(
            settings.order,
            range(examples),
            size,
            RandomKeys(),
            max_batch_size=settings.max_batch_size,
            sampling_rate=settings.sampling_rate,
            drops=settings.drop_remainder,
            how="drop_remainder=True",
        )
        if settings.sampling_rate is not None:
            plan.hide_size()
        self.steps_per_epoch = steps or plan.num_batches
        if self.steps_per_epoch != plan.num_batches and not plan.draws_every_step:
            raise UnsupportedRunError(
                f"Expected {plan.num_batches} steps in an epoch, got steps_per_epoch = {steps}: "
                "every batch is used once per epoch. Leave it out."
            )
        return plan

    def _built(self, optimizer: Any) -> list[Any]:
        """Makes the variables of model, optimizer and metrics; returns those that are trained."""
        model, strategy = self._model, self._strategy
        with contextlib.nullcontext() if strategy is None else strategy.scope():
            keras_api.build(model, self._examples.x)  # variables of Keras are those of its replicas
            if strategy is not None:
                check_made_in(strategy, keras_api.variables(model))
            if strategy is not None or keras_api.IS_KERAS_3:
                keras_api.build_optimizer(optimizer, model.trainable_variables)
            if strategy is not None:
                keras_api.build_metrics(model, self._examples.first(1))
        return keras_api.trained(model)

    def _looked_at(
        self,
        losses: RowLosses,
        rule: UpdateRule,
        settings: Settings,
        optimizer: Any,
        variables: Sequence[Any],
    ) -> Known:
        """Looks at the examples, and at what is known of the loss; the model is as before."""
        fixed, held, declared = FixedVariables(self._model), self._examples, rule.declared(settings)
        largest = 1.0 if held.weights is None else self._largest_weight
        if largest is None and declared != Declared():
            raise UnsupportedRunError(
                "Expected weight_bound= with sample_weight and what is known of the loss, got "
                "none: its constants grow with the largest weight that an example could have. Pass "
                "a public bound."
            )
        held.check_each_once()
        is_plain = Update(optimizer, variables).is_plain_sgd
        gains = (is_plain and len(rule.blocks_of(variables)) <= 1) or rule.takes_gradient_bound
        adds = self.relation is NeighboringRelation.ADD_OR_REMOVE_ONE
        of_data = self._model, losses, held.x, held.y
        known = look_at(*of_data, declared, is_of_use=gains and not adds)
        if known.head is not None:
            held.hold(known.head.inputs, known.head.targets)
        fixed.check(self._model)
        return attrs.evolve(known, declared=known.declared.weighted(largest or 1.0))

    def _prepare_steps(self) -> None:
        """Gets what takes the steps ready."""
        self._replicas = 1 if self._strategy is None else self._strategy.num_replicas_in_sync
        size = self.plan.batch_size
        fewest = max(_FEWEST_ROWS, self._replicas)
        self.is_padded = self.plan.order in OF_RANDOM_SIZE or size < fewest
        self._multiple = multiple_of_sizes(
            is_compiled=self._uses_xla and self.is_padded, expected=size
        )
        self.pace = 1  # steps between two looks, where nobody says how many
        self._calls, self._may_stop, self._foreign = 0, False, frozenset[str]()  # of fit
        # Step by step even where the loop of fit is eager, so that no example is traced anew.
        self._compiled = tf.function(self._take, jit_compile=self._uses_xla, reduce_retracing=True)
        width = None if self.is_padded else size
        kinds = [tf.TensorSpec([None], tf.int64), tf.TensorSpec([None, width], tf.int64)]
        kinds += [tf.TensorSpec([None], tf.float64)]
        values = [tf.TensorSpec(value.shape, value.dtype) for value in self.steps.left]
        several = tf.function(self._take_several, [*kinds, values])
        self._several = functools.cache(several.get_concrete_function)

    @property
    def record(self) -> RecordedRun:
        """Record of its steps."""
        return self._record

    @property
    def noise_multiplier(self) -> float | None:
        """Noise multiplier that was given, or that was found; None before."""
        return self._noise

    @property
    def has_weights(self) -> bool:
        """True if classes or examples have weights."""
        return self._examples.weights is not None

    # A loop of one's own

    def step(self) -> float:
        """Deals a batch and takes the next private step on it.

        Returns:
            The mean loss of its examples before the step, for you alone: it has no guarantee.

        Raises:
            UnsupportedRunError: The step ended the run, or another one has.
        """
        self._check_may_step(1)
        self.target(None, None)
        return mean_loss(self._advance(1))

    def train(
        self,
        epochs: int,
        *,
        target_epsilon: float | None = None,
        target_delta: float | None = None,
        verbose: bool = True,
    ) -> list[float]:
        """Takes the steps of so many epochs; a bar shows how far they are.

        Args:
            epochs: Passes over the data, of `steps_per_epoch` steps each.
            target_epsilon: Finds the smallest noise that meets it after these epochs, the first
                steps of a run that was made without noise_multiplier.
            target_delta: In (0, 1); None for that of the run.
            verbose: True to show the bar.

        Returns:
            The mean loss of every epoch, for you alone: it has no guarantee.

        Raises:
            UnsupportedRunError: Errors of `step`. An interruption ends the run: the number of steps
                may depend on the data.
            ValueError: No noise meets the target.
        """
        epochs = validate.integer("epochs", epochs, minimum=1)
        self._check_may_step(1)
        target = self.target(target_epsilon, target_delta)
        self.prepare(epochs, (False, False), target, may_stop=False)
        self._calls += 1
        shown = []
        with self.whole_or_none():
            for epoch in range(epochs):
                if verbose:
                    print(f"Epoch {epoch + 1}/{epochs}")
                bar = tf.keras.utils.Progbar(self.steps_per_epoch, verbose=int(verbose))
                total = np.zeros(2)
                for done, sums in self.epoch():
                    total += sums
                    bar.update(done, [("loss", mean_loss(sums))])
                shown.append(mean_loss(total))
        return shown

    def epoch(
        self, pace: int | None = None, *, eagerly: bool = False
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Takes the steps of an epoch, `pace` between two looks, or as many as take a moment.

        Yields:
            At every look how many were taken, and the sum of their losses beside the number of
            their examples since the look before.
        """
        done = 0
        while done < self.steps_per_epoch:
            count, began = min(pace or self.pace, self.steps_per_epoch - done), time.monotonic()
            sums = self._advance(count, eagerly)
            faster = min(_MOMENT / max(time.monotonic() - began, 1e-9), _LARGEST_JUMP)
            done += count
            yield done, sums
            if pace is None and count == self.pace and faster > 1:
                self.pace = min(int(max(faster, 2) * count), _LONGEST_PACE)

    def _check_may_step(self, count: int) -> None:
        """Raises UnsupportedRunError if the run has ended, or takes no more steps."""
        if self._record.has_ended:
            self._record.check()  # raises
        refuse_in_budget("private run of Keras")
        before, declared = self._record.num_batches, self.settings.num_steps
        if declared is not None and before + count > declared:
            raise UnsupportedRunError(
                f"Expected at most num_steps = {declared} steps, as declared to the model, got "
                f"{before} so far and {count} more. Train fewer epochs; or compile again "
                "for another run, which is composed with this one."
            )

    # The steps

    def _advance(self, count: int, eagerly: bool = False) -> np.ndarray:
        """Takes steps and records them; returns the sum of their losses and the number of examples.

        The host deals the batches and says the learning rates. The device tells how long the
        longest gradient was, and what the steps have left.
        """
        record, steps, first = self._record, self.steps, self.steps.last_step.steps
        if first != record.num_batches:
            record.check()  # raises: it was interrupted
        if not first:
            record.check_variables()  # weights may have been loaded since
        rates = steps.rates(count)
        rows, indices = self._dealt(first, first + count)
        eagerly = eagerly or tf.config.functions_run_eagerly()
        several: Any = self._take_several if eagerly else self._several()
        given = [tf.constant(part) for part in (rows, indices, np.array(rates))]
        try:
            told, left = several(*given, list(steps.left))
            loss, examples, longest, same, tried = told.numpy()
        except BaseException:  # also of the user, who may go on
            if not steps.is_iterate(keras_api.trained(self._model)):
                steps.took(StepEntry(first + 1), 1, steps.left)  # or more
                with contextlib.suppress(UnsupportedRunError):
                    record.invalidate(INTERRUPTED)
            raise
        problem, done = "", range(first + 1, first + int(tried) + 1)
        if not same or not steps.is_fine(longest):
            problem = MOVED if not same else NOT_FINITE if math.isinf(longest) else TOO_LONG
            longest = 0.0  # that of the step which is refused
        entries = [
            StepEntry(number, int(batch), rate, longest)
            for number, batch, rate in zip(done, rows, rates, strict=False)
        ]
        entries[-1] = attrs.evolve(entries[-1], problem=problem)
        # If one is refused the weights were moved all the same: they are no fresh ones.
        steps.took(entries[-1], len(entries), left if same else steps.left)
        for entry in entries:
            record.add(entry, record.next_batch)
        if record.num_batches % self.steps_per_epoch == 0:
            record.check_fixed()
        return np.array([loss, examples])

    def _dealt(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns rows and indices of several batches, as many indices as the largest has."""
        self.plan.start_pass(first)
        batches = [self.plan.batch(step) for step in range(first, last)]
        sizes = [len(batch) for batch in batches]
        stacked = np.zeros((len(sizes), max(filled(size, self._multiple) for size in sizes)), int)
        for place, batch in zip(stacked, batches, strict=True):
            place[: len(batch)] = batch
        return np.array(sizes), stacked

    @keras_api.as_written
    def _take_several(
        self, rows: tf.Tensor, indices: tf.Tensor, rates: tf.Tensor, left: Sequence[tf.Tensor]
    ) -> tuple[tf.Tensor, Sequence[tf.Tensor]]:
        """Takes steps until one is refused.

        Returns sum and number of the losses, the norm of the longest gradient, whether nothing else
        wrote to the variables, and the number of steps tried; and the values that they left.
        """
        strategy, steps = self._strategy, self.steps

        def one(number: Any, total: Any, longest: Any, same: Any, left: Any) -> tuple[Any, ...]:
            batch = rows[number], indices[number], rates[number], left
            if strategy is None:
                sums, norm, same = self._take_on_replica(*batch)
            else:
                found = strategy.run(self._take_on_replica, batch)
                sums = strategy.reduce("SUM", found[0], axis=None)
                norm, same = (strategy.experimental_local_results(part)[0] for part in found[1:])
            total, longest = total + tf.cast(sums, tf.float64), tf.maximum(longest, norm)
            return number + 1, total, longest, same, steps.values()

        def goes_on(number: Any, _: Any, longest: Any, same: Any, *__: Any) -> tf.Tensor:
            return (number < tf.size(rows)) & same & steps.is_fine(longest)

        zero = tf.zeros([], tf.float64)
        start = tf.constant(0), tf.zeros([2], tf.float64), zero, tf.constant(True), left
        number, total, longest, same, left = tf.while_loop(goes_on, one, start)
        told = [longest, tf.cast(same, tf.float64), tf.cast(number, tf.float64)]
        return tf.concat([total, tf.stack(told)], 0), left

    def _take_on_replica(self, rows: Any, indices: Any, rate: Any, left: Any) -> tuple[Any, ...]:
        """Takes a step; returns sum and number of the losses, and what `Algorithm.take` tells."""
        indices = indices[: filled(rows, self._multiple)]  # what follows has the size of another
        if self._strategy is not None:  # a part of the batch, a row or more
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            own = indices[:rows][replica :: self._replicas]
            rows = tf.shape(own, out_type=tf.int64)[0]
            indices = tf.concat([own, indices[:1]], 0)[: tf.maximum(rows, 1)]
        in_graph = not self._uses_xla and not tf.executing_eagerly()
        take = self._take if in_graph or self._strategy is not None else self._compiled
        losses, outputs, *told = take(rows, rate, left, *self._examples.taken(indices))
        targets = self._examples.given_targets(indices)
        if self.is_padded:
            losses, outputs = losses[:rows], outputs[:rows]
            targets = tf.nest.map_structure(lambda part: part[:rows], targets)
        self._show(targets, outputs)
        sums = tf.stack([tf.reduce_sum(losses), tf.cast(tf.size(losses), losses.dtype)])
        return sums, *told

    @keras_api.as_written
    def _take(
        self, rows: Any, rate: Any, left: Any, x: Any, y: Any, *weights: Any
    ) -> tuple[Any, ...]:
        if not self.steps.trains(keras_api.trained(self._model)):
            raise UnsupportedRunError(MOVED)

        def gradients_by(clipping: Any) -> Any:
            found = clipping.gradients(x, y)
            return times(found, *weights) if weights else found

        passes = [functools.partial(gradients_by, one) for one in self.clipping]
        found, longest, same = self.steps.take(passes, rows, rate, left)
        return found.losses, found.outputs, longest, same

    # Calls of fit

    def _check_can_go_on(self) -> None:
        """Raises UnsupportedRunError where the run cannot go on elsewhere."""
        if self._record.chooses_steps:
            raise UnsupportedRunError(
                "Expected a run that EarlyStopping cannot stop, or has not, got one that it may "
                "have: its steps are accounted ahead, and do not go on elsewhere. Save the model; "
                "whoever trains it further composes both runs."
            )

    def go_on(self, given: Given) -> None:
        """Raises UnsupportedRunError unless another call of fit goes on with the run."""
        if self._record.chooses_steps:
            raise UnsupportedRunError(
                "Expected a run that EarlyStopping has not stopped, got one that it has: it is "
                "accounted with all epochs that could have followed, and is over. Compile again: "
                "that begins another run, which is composed with this one."
            )
        asked = given.batches(self._examples.batch_size)
        if asked != self._asked:
            raise UnsupportedRunError(
                f"Expected (batch_size, steps_per_epoch) = {self._asked}, as in the run so far, "
                f"got {asked}. Compile again for another run."
            )
        weights = self._examples.check_same(given.x, given.y, given.weights, given.steps_per_epoch)
        if self.has_weights and weights.largest != self._largest_weight:
            raise UnsupportedRunError(
                f"Expected weights of at most {self._largest_weight}, as in the run so far, got at "
                f"most {weights.largest}: another example could have that one. Keep class_weight."
            )
        self._record.go_on(self._model, self.steps)

    def target(self, epsilon: float | None, delta: float | None) -> tuple[float, float] | None:
        """Returns epsilon and delta that the noise is to be found for; None if it is known."""
        if epsilon is None:
            if self.noise_multiplier is None:
                raise ValueError(
                    "Expected noise_multiplier, or target_epsilon in the first call of fit or "
                    "train, got neither."
                )
            return None
        if self.settings.noise_multiplier is not None:
            raise TypeError(
                f"Expected target_epsilon = None, got {epsilon!r} with noise_multiplier = "
                f"{self.settings.noise_multiplier:g}. Make the model without noise_multiplier, and "
                "compile with an optimizer without noise."
            )
        if self._record.has_begun:
            raise UnsupportedRunError(
                "Expected target_epsilon in the first call of fit of a run, got it in a later one: "
                "steps with another noise were taken. Leave it out, or compile again."
            )
        delta = self._target_delta if delta is None else delta
        if delta is None:
            raise ValueError("Expected target_delta with target_epsilon, got None.")
        epsilon = validate.real("target_epsilon", epsilon, minimum=0, allow_inf=True)
        return epsilon, validate.target_delta(delta)

    def prepare(
        self,
        epochs: int,
        releases: tuple[bool, bool],
        target: tuple[float, float] | None,
        *,
        may_stop: bool,
    ) -> None:
        """Gets ready for the epochs of a call of fit, and finds the noise for a target.

        `releases` says whether an iterate is seen after every epoch, and after every step,
        `may_stop` whether validation data choose the number of epochs, or one of them.
        """
        record, steps = self._record, self.steps
        before = record.num_batches
        total = before + max(0, epochs) * self.steps_per_epoch
        ahead = total, self.steps_per_epoch, releases
        self._check_may_step(total - before)

        def planned() -> Any:
            return steps.with_steps_ahead(steps.new_run(record.declared), *ahead)

        if target is not None:
            steps.set_noise(1.0)
            event = planned().event()
            self._noise = calibrate_noise_after(
                record.earlier_events,
                *target,
                lambda noise: _with_noise(event, noise),
                self.relation,
                "start from weights that no private run left",
            )
            steps.set_noise(self._noise)
        if may_stop:
            planned()  # raises
            record.may_stop(lambda run: steps.with_steps_ahead(run, *ahead))
        steps.asked_for = None if before else total

    @contextlib.contextmanager
    def whole_or_none(self) -> Iterator[None]:
        """Ends the run of epochs that an error or the user has stopped, if they took a step."""
        record, before = self._record, self.steps.last_step.steps
        try:
            yield
        except BaseException:
            if not record.has_ended and self.steps.last_step.steps != before:
                with contextlib.suppress(UnsupportedRunError):  # said when somebody asks
                    record.invalidate(INTERRUPTED)
            raise

    def fits(self, call: Any) -> None:
        """Notes a call of fit, by its loop."""
        self._calls += 1
        self._may_stop |= call.chooses
        self._foreign |= call.foreign

    def _declared_texts(self) -> Iterable[str]:
        if self._calls > 1:
            yield "the number of calls of fit was fixed in advance, whatever their metrics showed"
        if self.has_weights:
            yield (
                "weights of classes are public numbers, weights of examples depend on nothing but "
                "their example"
            )
        if self._may_stop:
            yield (
                "validation data are public; by their metrics only EarlyStopping chose when to "
                "stop, or ModelCheckpoint which file to keep: the iterates of all epochs that were "
                "asked for count as released, trained or not"
            )
        if self.settings.sampling_rate is not None:
            yield (
                "sampling_rate and batch_size are public constants that were not computed from the "
                "examples or their number, and neither is the number of steps"
            )
        if self.settings.checkpoints_stay_private:
            yield FILES_STAY_PRIVATE
        if self._foreign:
            names = ", ".join(sorted(self._foreign))
            yield f"other callbacks ({names}) release nothing and choose nothing by data"


def multiple_of_sizes(*, is_compiled: bool, expected: int) -> int:
    """Returns the number that the rows of every batch are filled up to a multiple of.

    XLA compiles every size anew, so that random sizes, which spread by the root of their mean, are
    filled up to a few: more than 7 are rare, and half a spread of rows is in vain.
    """
    return math.ceil(math.sqrt(expected)) if is_compiled else 1


def filled(rows: Any, multiple: int) -> Any:
    """Returns the number of rows that a batch is filled up to, a tensor if `rows` is one.

    A batch has at least two on the device: not every operation takes none, and TensorFlow cannot
    vectorize every one over a single row.
    """
    parts, fewest = -(-rows // multiple), -(-_FEWEST_ROWS // multiple)
    return multiple * (tf.maximum(parts, fewest) if tf.is_tensor(parts) else max(parts, fewest))


def mean_loss(sums: np.ndarray) -> float:
    """Returns the mean of losses, of their sum and number; 0 of none."""
    return float(sums[0] / max(sums[1], 1))


def _with_noise(event: Any, noise: float) -> Any:
    """Returns an event with a noise multiplier of 1, with another one."""
    powers = {"noise_multiplier": 1, "noise_std": 1, "noise_variance": 2}
    name = next(name for name in powers if hasattr(event, name))
    return attrs.evolve(event, **{name: noise ** powers[name] * getattr(event, name)})
