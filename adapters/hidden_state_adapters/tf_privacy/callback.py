"""Records Keras' own fit with one of the private optimizers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import tensorflow as tf
from dp_accounting import NeighboringRelation

from hidden_state_accountants import BatchOrder, LossGeometry, UnsupportedRunError, validate
from hidden_state_accountants.events.batch_order import unmet_relation
from hidden_state_accountants.ledger import refuse_in_budget
from hidden_state_adapters.batch_plans import EqualPlan
from hidden_state_adapters.tf_privacy import keras_api
from hidden_state_adapters.tf_privacy.data import CyclicDataset
from hidden_state_adapters.tf_privacy.optimizers import PrivateOptimizer
from hidden_state_adapters.tf_privacy.other_callbacks import foreign_among, releases_of
from hidden_state_adapters.tf_privacy.record import (
    FILES_STAY_PRIVATE,
    INTERRUPTED,
    RecordedRun,
)
from hidden_state_adapters.tf_privacy.report import PrivacyReport
from hidden_state_adapters.tf_privacy.settings import Declared
from hidden_state_adapters.tf_privacy.trained_part import refuse_surroundings


class HiddenStateCallback(PrivacyReport, tf.keras.callbacks.Callback):
    """Gives the privacy of the model that Model.fit trained with an optimizer of this package.

    Every step is recorded with the values that it used. One callback follows one model with one
    optimizer over any number of calls of fit.

        data = cyclic_dataset(x, y, batch_size=100)
        record = HiddenStateCallback(data=data)
        model.fit(data, callbacks=record.with_others(ModelCheckpoint(path)))

    Where the loss is that of a linear layer, `make_private(model)` with the same optimizer in
    compile reads its constants off (``feature_norm=``), and takes the steps itself.

    Formal guarantees:
      - Relation and released iterates: those of the recorded event, a `LastIterateDpEvent` for
        CyclicDPKerasSGDOptimizer, a `DiceSgdDpEvent` (all iterates) for the Dice optimizers, a
        `BlockCoordinateDpEvent` for BlockCoordinateKerasOptimizer (whole epochs; blocks that are
        released within the run are accounted by composition).
      - Checked: that fit trains on a dataset of `cyclic_dataset`, the same one in every call; one
        step is made on each batch; layers, and the callbacks of `with_others`, are ones that can be
        accounted; after every step its learning rate, its number of rows, and that its gradients
        are finite and not longer than declared; when an epoch begins and when epsilon is asked for,
        that the weights are those that the last step left; after every epoch, that variables that
        are not trained are unchanged.
      - Declared by you, and listed by `assumptions`: that each entry of the loss is about one
        example of the batch, that every update is applied, and that nothing else changes the
        weights within an epoch, as TensorFlow Privacy's optimizers assume; what you declare. Losses
        and metrics of the training data (History, progress bar) have no privacy guarantee and must
        stay private.

    The metrics of the model are reset after every epoch, because `Model.save` would store them.

    Args:
        data: Dataset of `cyclic_dataset` that fit is going to be given, as it is; None for the one
            that it asks for batches.
        dataset_size: Number of examples; None for that of `data`. Those that
            cyclic_dataset(..., drop_remainder=True) leaves out may be counted or not; the event
            does not count them.
        batch_size: Batch size b; None for that of `data`.
        target_delta: If given, the epsilon at this delta is shown after every epoch, in the logs
            as "epsilon_if_released_now": what it would be if training ended there and only that
            model were released. It does not depend on the data.
        neighboring_relation: REPLACE_SPECIAL or REPLACE_ONE; with microbatches of several examples
            all figures are for REPLACE_ONE.
        checkpoints_stay_private: Declares that nobody sees the files that ModelCheckpoint, save,
            save_weights and export write before the last step. Otherwise each is a release.
        metrics_stay_private: Declares that nobody sees what CSVLogger, TensorBoard and
            RemoteMonitor write. Otherwise they are refused.
        gradient_bound: For the Dice optimizers, a bound on the norm of every per-example gradient
            before clipping that holds for ALL examples that could have been in the data. The run is
            checked against it. inf if none is known.
        loss_geometry: Geometry of the per-example loss (of DP-MBCD as a function of the one
            block), before clipping, for ALL examples that could have been in the data. None is
            composition, unless the optimizer was told.

    Raises:
        UnsupportedRunError: From fit, when the run is not one that can be accounted.
        TypeError, ValueError: An argument has an impossible value.
    """

    releases = (False, False)  # an iterate after every epoch, after every step

    def __init__(
        self,
        *,
        data: CyclicDataset | None = None,
        dataset_size: int | None = None,
        batch_size: int | None = None,
        target_delta: float | None = None,
        neighboring_relation: NeighboringRelation | str = NeighboringRelation.REPLACE_SPECIAL,
        checkpoints_stay_private: bool = False,
        metrics_stay_private: bool = False,
        gradient_bound: float = math.inf,
        loss_geometry: LossGeometry | None = None,
    ):
        super().__init__()
        self._data, self._passes = data, dict[CyclicDataset, int]()
        self._batch_size, self._dataset_size = _sizes(data, batch_size, dataset_size)
        if target_delta is not None:
            target_delta = validate.target_delta(target_delta)
        self._target_delta = target_delta
        self._relation = validate.neighboring_relation(neighboring_relation)
        if why_not := unmet_relation(BatchOrder.CYCLIC, self._relation):
            raise UnsupportedRunError(why_not)
        self._checkpoints_stay_private = checkpoints_stay_private
        self._metrics_stay_private = metrics_stay_private
        if isinstance(loss_geometry, str):
            raise UnsupportedRunError(
                f"Expected loss_geometry to be a LossGeometry or None, got {loss_geometry!r}: what "
                "fit trains is not known here. Train make_private(model, ..., "
                "feature_norm=...) with the same optimizer in compile."
            )
        self._declared = Declared(gradient_bound=gradient_bound, loss_geometry=loss_geometry)
        self._others: set[str] = set()  # callbacks that Keras did not write
        self._calls = 0  # of fit
        self._optimizer: Any = None
        self._steps: Any = None  # `NotedSteps`
        self._is_within_fit = self._is_checked = False

    def with_others(self, *callbacks: Any) -> list[Any]:
        """Returns the callbacks for fit: this one, and others that are checked.

        Args:
            *callbacks: All others that fit is going to have.

        Raises:
            UnsupportedRunError: One of them chooses by a metric, restores weights or shows metrics.
        """
        together = [self, *callbacks]
        self.releases = releases_of(
            together,
            self,
            checkpoints_stay_private=self._checkpoints_stay_private,
            metrics_stay_private=self._metrics_stay_private,
        )
        self._others |= foreign_among(callbacks)
        # Passes of others, such as an evaluation before the first epoch, are none of fit.
        last = tf.keras.callbacks.LambdaCallback(on_train_begin=lambda logs: self._count_passes())
        return [*together, last]

    def on_train_begin(self, logs: Any = None) -> None:
        """Begins a call of fit; what it trains on shows when the first epoch begins."""
        refuse_surroundings()
        refuse_in_budget("private run of Keras")
        if self._is_within_fit:
            self._end_interrupted()
        self._count_passes()
        self._is_within_fit, self._is_checked = True, False

    def _count_passes(self) -> None:
        self._passes = {data: data.passes for data in CyclicDataset.alive}

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Starts the record or goes on, once Keras has asked the data for batches."""
        if self._is_checked:
            return
        self._is_checked = True
        asked = [data for data, passes in self._passes.items() if data.passes > passes]
        self._passes = {}
        if len(asked) != 1 or self._data not in (None, *asked):
            raise UnsupportedRunError(
                "Expected fit on a dataset of cyclic_dataset, the same one in every call, got "
                "something else, or data with class_weight: which examples share a batch is not "
                "known. Pass to fit what cyclic_dataset(x, y, batch_size=) returned, as it is; "
                "make_private(model) draws the batches itself, and takes weights."
            )
        if self._data is None:
            self._data = asked[0]
            _, self._dataset_size = _sizes(self._data, self._batch_size, self._dataset_size)
        keras_api.build(self.model, self._data)
        if self._record is None:
            self._record = self._new_record()
        else:
            self._go_on()
        self._calls += 1

    def _new_record(self) -> RecordedRun:
        self._optimizer = optimizer = self.model.optimizer
        if not isinstance(optimizer, PrivateOptimizer):
            raise UnsupportedRunError(
                "Expected a CyclicDPKerasSGDOptimizer, DiceKerasSGDOptimizer, "
                "DiceKerasAdamOptimizer or BlockCoordinateKerasOptimizer in compile, got "
                f"{type(optimizer).__name__}: its steps cannot be checked."
            )
        if getattr(self.model.compiled_loss, "_user_loss_weights", None) is not None:
            raise UnsupportedRunError(
                "Expected compile(loss_weights=None), got weights: they change the loss that is "
                "accounted. Drop them."
            )
        declared = self._declared
        if optimizer.settings.loss_geometry is not None:
            if declared.geometry is not None:
                raise UnsupportedRunError(
                    "Expected loss_geometry in one place, got one of the optimizer and one of its "
                    "run. Leave it out of the optimizer."
                )
            declared = optimizer.settings.declared
        each = optimizer.settings.microbatch(self._batch_size)
        size = self._batch_size // each
        records = range(self._dataset_size // self._batch_size * size)
        plan = EqualPlan(records, size, BatchOrder.CYCLIC)
        self._steps = optimizer.begin_run(keras_api.trained(self.model), plan, each)
        return RecordedRun(
            self.model,
            self._steps,
            relation=self._relation,
            declared=declared,
            files_stay_private=self._checkpoints_stay_private,
        )

    def _go_on(self) -> None:
        if self.model.optimizer is not self._optimizer:
            raise UnsupportedRunError(
                "Expected the optimizer of the run so far, got another one. Use a callback of its "
                "own for every run, and compose their events."
            )
        record: Any = self._record
        record.go_on(self.model, record.optimizer)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Compares the weights with those that the epoch before has left."""
        if batch == 0:
            assert self._record is not None
            self._record.check_iterate()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Records the step, and keeps a copy of what the last one of an epoch leaves."""
        assert self._record is not None
        self._record.add(self._steps.last_step, batch)
        if self._record.next_batch == 0 or batch + 1 == self.params.get("steps"):
            self._steps.look()
        if self.releases[1]:
            self._record.release()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the epsilon to the logs, and notes a checkpoint as released."""
        assert self._record is not None
        self.model.reset_metrics()  # Model.save would store them
        self._record.check_fixed()
        if self.releases[0]:
            self._record.release()
        if logs is not None:
            logs.update(self._record.shown_after_epoch(self._target_delta))

    def on_train_end(self, logs: Any = None) -> None:
        """Refuses a run that something stopped before the declared number of epochs."""
        self._is_within_fit = False
        self.model.reset_metrics()
        if self.model.stop_training and self._record is not None:
            self._record.refuse_stopped()

    def _recorded(self) -> RecordedRun:
        record = self._record
        if self._is_within_fit and record and record.has_begun and not record.has_ended:
            raise UnsupportedRunError(
                "Within fit only target_delta shows an epsilon, that of every epoch. If it is "
                f"over, {INTERRUPTED}"
            )
        return super()._recorded()

    def _end_interrupted(self) -> None:
        """Ends the run of a fit that an error or the user has stopped, if it took a step."""
        self._is_within_fit, record = False, self._record
        if record is not None and record.has_begun and not record.has_ended:
            record.invalidate(INTERRUPTED)

    def _declared_texts(self) -> Iterable[str]:
        if self._calls > 1:
            yield "the number of calls of fit was fixed in advance, whatever their metrics showed"
        if self._checkpoints_stay_private:
            yield FILES_STAY_PRIVATE
        names = ", ".join(sorted(self._others))
        of_user = f", and of these {names} release nothing and choose nothing by data"
        yield (
            "fit had the callbacks that with_others returned, or this one alone"
            f"{of_user if names else ''}"
        )


def _sizes(
    data: CyclicDataset | None, batch_size: int | None, dataset_size: int | None
) -> tuple[int, int]:
    """Returns batch size and number of examples, which the data may say."""
    if data is None:
        batch = validate.integer("batch_size", batch_size, minimum=1)
        return batch, validate.integer(
            "dataset_size", dataset_size, minimum=batch, remedy="It is at least batch_size."
        )
    if not isinstance(data, CyclicDataset):
        raise TypeError(f"Expected a dataset of cyclic_dataset as data, got {data!r:.80}.")
    for name, own, known in (
        ("batch_size", batch_size, (data.batch_size,)),
        ("dataset_size", dataset_size, (data.given, data.used)),
    ):
        if own is not None and own not in known:
            raise UnsupportedRunError(
                f"Expected {name} = {known[-1]} of the data, got {own}. Leave it out."
            )
    return data.batch_size, data.used
