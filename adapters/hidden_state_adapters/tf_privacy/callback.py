"""What Keras' loop tells of a fit: the callbacks that record one, and the other ones in it.

A model that owns its run has a `Recording` in front of the user's callbacks. `HiddenStateCallback`
records Keras' own fit with one of the private optimizers.
"""

from __future__ import annotations

import inspect
import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from dp_accounting import NeighboringRelation

from hidden_state_accountants import BatchOrder, LossGeometry, validate
from hidden_state_adapters.batch_plans import FixedPlan
from hidden_state_adapters.tf_privacy import keras_api
from hidden_state_adapters.tf_privacy.data import CyclicBatches, cyclic_batches
from hidden_state_adapters.tf_privacy.optimizers import PrivateOptimizer
from hidden_state_adapters.tf_privacy.origins import digest
from hidden_state_adapters.tf_privacy.record import (
    INTERRUPTED,
    Figures,
    RecordedRun,
    checked_relation,
)
from hidden_state_adapters.tf_privacy.refusals import refusal
from hidden_state_adapters.tf_privacy.replicas import refuse_surroundings
from hidden_state_adapters.tf_privacy.run import PrivateRun, quicker
from hidden_state_adapters.tf_privacy.settings import Declared

_callbacks = tf.keras.callbacks
_WRITE_METRICS = (_callbacks.CSVLogger, _callbacks.TensorBoard, _callbacks.RemoteMonitor)
_CHOOSE_BY_METRICS = (_callbacks.EarlyStopping, _callbacks.ReduceLROnPlateau)
_EPSILON = "epsilon_if_released_now"


# The other callbacks


def _releases_of(
    callbacks: Sequence[Any],
    own: Any,
    *,
    checkpoints_stay_private: bool,
    metrics_stay_private: bool,
    public_validation: bool = False,
    rates_are_free: bool = False,
) -> tuple[bool, bool]:
    """Whether an iterate is released after every epoch, and after every step.

    Args:
        callbacks: All of a fit.
        own: The one that records.
        checkpoints_stay_private: As declared.
        metrics_stay_private: Likewise.
        public_validation: Whether metrics of validation data are those of public data, and every
            iterate that they are computed from may count as released.
        rates_are_free: Whether every step counts in full, whatever its learning rate is.

    Raises:
        UnsupportedRunError: A callback chooses the model, the steps or their size by a metric,
            restores weights, or publishes metrics.
    """
    after_epochs = after_steps = False
    for position, callback in enumerate(callbacks):
        name = type(callback).__name__
        chooses = _chooses_by_validation(callback) or (rates_are_free and _chooses_rates(callback))
        if public_validation and chooses:
            after_epochs = True
        elif isinstance(callback, _CHOOSE_BY_METRICS):
            raise refusal(
                f"Expected steps that are fixed in advance, got {name}: it chooses them, or the "
                "model, by a metric that depends on the data. Drop it. (A model that owns its run "
                "takes EarlyStopping on a val_ metric with validation_data that are declared "
                "public: validation_data_is_public=True. ReduceLROnPlateau, too, where epsilon is "
                "that of composition: without loss_geometry.)"
            )
        if isinstance(callback, (_callbacks.BackupAndRestore, *keras_api.OTHER_CALLBACKS)):
            raise refusal(
                f"Expected no {name}: the files that it writes, or the weights that it puts in, "
                "are not followed here. Drop it, or use ModelCheckpoint."
            )
        if isinstance(callback, _WRITE_METRICS) and not metrics_stay_private:
            raise refusal(
                f"Expected no {name}: it writes losses and metrics of the training data, which "
                "have no privacy guarantee. Drop it, or declare metrics_stay_private=True."
            )
        if not isinstance(callback, _callbacks.ModelCheckpoint):
            continue
        if callback.save_best_only and not (public_validation and _chooses_by_validation(callback)):
            raise refusal(
                "Expected ModelCheckpoint(save_best_only=False), got True: it chooses the model by "
                "a metric. Release the last model."
            )
        if checkpoints_stay_private:
            continue
        each_step, after_epochs = callback.save_freq != "epoch", True
        after_steps |= each_step
        is_before = position < list(callbacks).index(own)
        if not callback.save_weights_only and (each_step or is_before):
            raise refusal(
                "Expected ModelCheckpoint after HiddenStateCallback in callbacks and with "
                'save_freq="epoch": a saved model holds the metrics of the epoch, computed from '
                "the training data, unless HiddenStateCallback has reset them. Reorder, use "
                "save_weights_only=True, or declare checkpoints_stay_private=True."
            )
    return after_epochs, after_steps


def _chooses_by_validation(callback: Any) -> bool:
    """Whether it is one of Keras that stops, or keeps files, by metrics of validation data."""
    kinds = (_callbacks.EarlyStopping, _callbacks.ModelCheckpoint)
    if not isinstance(callback, kinds) or not _is_of_keras(callback):
        return False
    if isinstance(callback, _callbacks.ModelCheckpoint) and callback.save_freq != "epoch":
        return False
    return str(callback.monitor).startswith("val_")


def _chooses_rates(callback: Any) -> bool:
    """Whether it is the one of Keras that sets learning rates by metrics of validation data."""
    is_known = isinstance(callback, _callbacks.ReduceLROnPlateau) and _is_of_keras(callback)
    return is_known and str(callback.monitor).startswith("val_")


def _is_of_keras(callback: Any) -> bool:
    """Whether it does only what Keras wrote; a LambdaCallback runs functions of the user."""
    is_lambda = isinstance(callback, _callbacks.LambdaCallback)
    return not is_lambda and keras_api.is_of_keras(callback)


def _foreign(callbacks: Iterable[Any]) -> set[str]:
    return {type(callback).__name__ for callback in callbacks if not _is_of_keras(callback)}


def refuse_moved_rates(callbacks: Sequence[Any]) -> None:
    """Raises UnsupportedRunError if a callback sets the rates of steps that are accounted ahead."""
    if any(isinstance(callback, _callbacks.LearningRateScheduler) for callback in callbacks):
        raise refusal(
            "Expected no LearningRateScheduler with target_epsilon, EarlyStopping or "
            "save_best_only, got one: steps are accounted before they are made, with the rate "
            "of the moment. Give the optimizer a schedule, tf.keras.optimizers.schedules."
        )


# Those that record


class _Recorder(tf.keras.callbacks.Callback):
    """What both do at the end of an epoch and of the training."""

    releases = (False, False)  # an iterate after every epoch, after every step
    _record: Any
    _target_delta: float | None

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the epsilon to the logs, and notes a checkpoint as released."""
        self.model.reset_metrics()  # Model.save would store them
        self._record.after_epoch()
        if self.releases[0]:
            self._record.release()
        if self._target_delta is not None and logs is not None:
            logs[_EPSILON] = self._record.guarantee().epsilon(self._target_delta)

    def _refuse_stopped(self) -> None:
        self._record.invalidate(
            "training was stopped early (model.stop_training), so the number of steps may "
            "depend on the data. Fix it in advance."
        )


class Recording(_Recorder):
    """Records the steps of a fit; the first one of its callbacks.

    Attributes:
        releases: Whether an iterate is seen after every epoch, and after every step.
        chooses: Whether validation data choose the number of epochs, or one of them.
        chooses_rates: Whether they choose the learning rates.
        foreign: Names of the callbacks that Keras did not write.

    Args:
        run: Of the model.
        others: The user's callbacks.
        pace: How many steps are made between two looks, for this callback to choose; or None.
        has_validation: Whether fit has validation data.

    Raises:
        UnsupportedRunError: One of them chooses by the data, restores weights or shows metrics.
    """

    def __init__(
        self,
        run: PrivateRun,
        others: Sequence[Any],
        pace: tf.Variable | None = None,
        *,
        has_validation: bool,
    ):
        super().__init__()
        self._run, self._steps, self._pace, self._began = run, run.steps, pace, 0.0
        settings = run.settings
        self._record, self._target_delta = run.record, settings.target_delta
        self.releases = _releases_of(
            [self, *others],
            self,
            checkpoints_stay_private=settings.checkpoints_stay_private,
            metrics_stay_private=settings.metrics_stay_private,
            public_validation=settings.validation_data_is_public and has_validation,
            rates_are_free=run.steps.rates_are_free,
        )
        self.chooses_rates = any(map(_chooses_rates, others))
        self._stopping = [c for c in others if isinstance(c, _callbacks.EarlyStopping)]
        files = [c for c in others if isinstance(c, _callbacks.ModelCheckpoint)]
        self.chooses = bool(self._stopping) or any(c.save_best_only for c in files)
        self._released: set[tuple[str, ...]] = set()  # digests of iterates that may come back
        self.foreign = _foreign(others)

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
            found = quicker(int(self._pace.numpy()), time.monotonic() - self._began)
            self._pace.assign(found)
            self._run.pace = max(found, self._run.pace)  # the last steps of an epoch are few

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """As of every recorder; notes weights that EarlyStopping may put back."""
        super().on_epoch_end(epoch, logs)
        if self._stopping:
            self._released.add(self._digests())

    def on_train_end(self, logs: Any = None) -> None:
        """Refuses a run that something stopped before the declared number of epochs."""
        self.model.reset_metrics()
        stopped = any(callback.stopped_epoch for callback in self._stopping)
        if stopped and self._digests() in self._released:  # restore_best_weights
            self._run.steps.goes_back()
        if self.chooses:
            self._record.has_stopped(early=stopped)
        lacks_steps = self._record.num_batches < self._run.planned  # a StopIteration
        if (self.model.stop_training or lacks_steps) and not stopped:
            self._refuse_stopped()

    def after_fit(self) -> None:
        """Takes weights that EarlyStopping has put back for the newest, where it was late to.

        In Keras 3 it does so in its own on_train_end, also if it has not stopped the run.
        """
        steps = self._run.steps
        if self._stopping and not steps.is_iterate(keras_api.trained(self.model)):
            if self._digests() in self._released:
                steps.goes_back()
                self._record.is_over()

    def _digests(self) -> tuple[str, ...]:
        return tuple(map(digest, keras_api.trained(self.model)))


class HiddenStateCallback(Figures, _Recorder):
    """Gives the privacy of the model that Model.fit trained with an optimizer of this package.

    Every step is recorded with the values that it used. One callback follows one model with one
    optimizer over any number of calls of fit.

    Where the loss is that of a linear layer, `make_private(model)` with the same optimizer in
    compile reads its constants off (``loss_geometry="auto"``), and takes the steps itself.

    Formal guarantees:
      - Relation and released iterates: those of the recorded event, a `LastIterateDpEvent` for
        CyclicDPKerasSGDOptimizer, a `DiceSgdDpEvent` (all iterates) for the Dice optimizers, a
        `BlockCoordinateDpEvent` for BlockCoordinateKerasOptimizer (whole epochs; blocks that are
        released within the run are accounted by composition).
      - Checked: the data are those of `cyclic_dataset`, one step is made on each batch, layers and
        other callbacks are ones that can be accounted; what the optimizer checks of every step;
        after every epoch, that variables that are not trained are unchanged.
      - Declared by you, and listed by `assumptions`: that each entry of the loss is about one
        example of the batch, as TensorFlow Privacy's optimizers assume; what you declare. Losses
        and metrics of the training data (History, progress bar) have no privacy guarantee and must
        stay private.

    The metrics of the model are reset after every epoch, because `Model.save` would store them.

    Args:
        dataset_size: Number of examples. Those that cyclic_dataset(..., drop_remainder=True)
            leaves out may be counted or not; the event does not count them.
        batch_size: b.
        target_delta: If given, the epsilon at this delta is shown after every epoch, in the logs
            as "epsilon_if_released_now": what it would be if training ended there and only that
            model were released. It does not depend on the data.
        neighboring_relation: REPLACE_SPECIAL or REPLACE_ONE; with microbatches of several examples
            all figures are for REPLACE_ONE.
        checkpoints_stay_private: Declares that nobody sees the files of ModelCheckpoint. Otherwise
            every one counts as released.
        metrics_stay_private: Declares that nobody sees what CSVLogger, TensorBoard and
            RemoteMonitor write. Otherwise they are refused.
        gradient_bound: For the Dice optimizers, a bound on the norm of every per-example gradient
            before clipping that holds for ALL examples that could have been in the data. The run is
            checked against it. inf if none is known.
        block_loss: For BlockCoordinateKerasOptimizer with one block, what is known about the
            per-example loss before clipping, for ALL examples that could have been in the data. The
            gradients of the run are checked against its `lipschitz`.
        loss_geometry: What is known about the per-example loss, before clipping, for ALL examples
            that could have been in the data. None is composition, unless the optimizer was told.

    Raises:
        UnsupportedRunError: From fit, when the run is not one that can be accounted.
        TypeError, ValueError: An argument has an impossible value.
    """

    def __init__(
        self,
        *,
        dataset_size: int,
        batch_size: int,
        target_delta: float | None = None,
        neighboring_relation: NeighboringRelation | str = NeighboringRelation.REPLACE_SPECIAL,
        checkpoints_stay_private: bool = False,
        metrics_stay_private: bool = False,
        gradient_bound: float = math.inf,
        block_loss: LossGeometry | None = None,
        loss_geometry: LossGeometry | None = None,
    ):
        super().__init__()
        self._batch_size = validate.integer("batch_size", batch_size, minimum=1)
        self._dataset_size = validate.integer(
            "dataset_size", dataset_size, minimum=batch_size, remedy="It is at least batch_size."
        )
        if target_delta is not None:
            target_delta = validate.target_delta(target_delta)
        self._target_delta = target_delta
        self._relation = checked_relation(neighboring_relation)
        self._checkpoints_stay_private = checkpoints_stay_private
        self._metrics_stay_private = metrics_stay_private
        if isinstance(loss_geometry, str):
            raise refusal(
                f"Expected loss_geometry to be a LossGeometry or None, got {loss_geometry!r}: what "
                "fit trains is not known here. Train make_private(model, ..., "
                'loss_geometry="auto", feature_norm=...) with the same optimizer in compile.'
            )
        if loss_geometry is not None and loss_geometry.curvature is not None:
            raise refusal(
                f"Expected a loss_geometry without curvature, got {loss_geometry!r}: how curved "
                "batches are is looked at by make_private(model, ..., feature_norm=...)."
            )
        self._declared = Declared(
            gradient_bound=gradient_bound, block_loss=block_loss, loss_geometry=loss_geometry
        )
        self._others: set[str] = set()  # callbacks that Keras did not write
        self._calls = 0  # of fit
        self._data: Any = None  # of the first fit
        self._optimizer: Any = None
        self._is_within_fit = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Checks the data, the model and the other callbacks; starts the record or goes on."""
        refuse_surroundings()
        if self._is_within_fit:
            self._end_interrupted()
        fit = next((call.f_locals for call in _calls_of_fit(sys._getframe())), None)
        if fit is None:
            raise refusal(
                "Expected to be called by Model.fit, got another caller: the order of the data "
                "cannot be checked. For a loop of your own make the model private: "
                "make_private(model)."
            )
        batches, others = self._checked_data(fit), fit["callbacks"].callbacks
        self.releases = _releases_of(
            others,
            self,
            checkpoints_stay_private=self._checkpoints_stay_private,
            metrics_stay_private=self._metrics_stay_private,
        )
        self._others |= _foreign(callback for callback in others if callback is not self)
        keras_api.build(self.model, fit["x"])
        _check_compiled(self.model)
        if self._record is None:
            self._record = self._new_record(batches)
        else:
            self._go_on(fit["x"])
        self._data, self._is_within_fit = fit["x"], True
        self._calls += 1

    def _checked_data(self, fit: Mapping[str, Any]) -> CyclicBatches:
        """What fit trains on: each example exactly once per epoch, in a fixed order."""
        batches = cyclic_batches(fit["x"])
        if batches is None:
            raise refusal(
                f"Expected fit on a dataset of cyclic_dataset, got {type(fit['x']).__name__}: the "
                "order of its batches is not known. Pass cyclic_dataset(x, y, batch_size="
                f"{self._batch_size}) to fit as it is."
            )
        if batches.batch_size != self._batch_size:
            raise refusal(
                f"Expected batches of batch_size = {self._batch_size} examples, got "
                f"{batches.batch_size}."
            )
        if self._dataset_size not in (batches.given, batches.used):
            raise refusal(
                f"Expected dataset_size = {self._dataset_size} examples, got {batches.used}."
            )
        if fit["class_weight"] is not None:
            raise refusal(
                "Expected class_weight = None, got weights: they change the loss that is "
                "accounted. Drop them, or use make_private(model), which accounts them."
            )
        return batches

    def _new_record(self, batches: CyclicBatches) -> RecordedRun:
        self._optimizer = optimizer = self.model.optimizer
        if not isinstance(optimizer, PrivateOptimizer):
            raise refusal(
                "Expected a CyclicDPKerasSGDOptimizer, DiceKerasSGDOptimizer, "
                "DiceKerasAdamOptimizer or BlockCoordinateKerasOptimizer in compile, got "
                f"{type(optimizer).__name__}: its steps cannot be checked."
            )
        declared = optimizer.known(self._declared)
        each = optimizer.examples_of_record(self._batch_size)
        records, size = range(batches.used // each), self._batch_size // each
        plan = FixedPlan(records, size, BatchOrder.CYCLIC)
        return RecordedRun(
            self.model,
            optimizer.begin_run(keras_api.trained(self.model), plan, each),
            batch_size=size,
            examples=len(records),
            relation=self._relation,
            declared=declared,
        )

    def _go_on(self, data: Any) -> None:
        if self.model.optimizer is not self._optimizer:
            raise refusal(
                "Expected the optimizer of the run so far, got another one. Use a callback of its "
                "own for every run, and compose their events."
            )
        record: Any = self._record
        record.go_on(self.model, record.optimizer)
        if data is not self._data:
            raise refusal(
                "Expected the data of the run so far, the same object, got another: its batches "
                "may differ. Keep the result of cyclic_dataset and pass it to every call of fit."
            )
        if record.next_batch:
            raise refusal(
                f"Expected to go on with batch {record.next_batch}, where the run stopped; fit "
                "starts with batch 0. Leave steps_per_epoch out."
            )

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Records the step."""
        assert self._record is not None
        self._record.add(batch)
        if self.releases[1]:
            self._record.release()

    def on_train_end(self, logs: Any = None) -> None:
        """Refuses a run that something stopped before the declared number of epochs."""
        self._is_within_fit = False
        self.model.reset_metrics()
        if self.model.stop_training:
            self._refuse_stopped()

    def _catch_up(self) -> None:
        newest = sys._current_frames().values()  # fit may run in any thread
        calls = (call for frame in newest for call in _calls_of_fit(frame))
        if self._is_within_fit and all(call.f_locals["self"] is not self.model for call in calls):
            self._end_interrupted()

    def _end_interrupted(self) -> None:
        """Ends the run of a fit that an error or the user has stopped, if it took a step."""
        self._is_within_fit = False
        assert self._record is not None
        if self._record.has_begun and not self._record.has_ended:
            self._record.invalidate(INTERRUPTED)

    def _declared_texts(self) -> Iterable[str]:
        if self._calls > 1:
            yield "the number of calls of fit was fixed in advance, whatever their metrics showed"
        if self._checkpoints_stay_private:
            yield "the files of ModelCheckpoint stay private"
        if self._others:
            names = ", ".join(sorted(self._others))
            yield f"other callbacks ({names}) release nothing and choose nothing by data"


def _check_compiled(model: Any) -> None:
    """Refuses what `Model.compile` was told, if it cannot be accounted."""
    executions = getattr(model, "_steps_per_execution", None)
    if executions is not None and int(executions) != 1:
        raise refusal(
            f"Expected steps_per_execution = 1, got {int(executions)}: every step is checked."
        )
    if getattr(model.compiled_loss, "_user_loss_weights", None) is not None:
        raise refusal(
            "Expected compile(loss_weights=None), got weights: they change the loss that is "
            "accounted. Drop them."
        )


def _calls_of_fit(frame: Any) -> Iterator[Any]:
    """The calls of Model.fit among a frame and its callers, the innermost first."""
    code = inspect.unwrap(tf.keras.Model.fit).__code__
    while frame is not None:
        if frame.f_code is code:
            yield frame
        frame = frame.f_back
