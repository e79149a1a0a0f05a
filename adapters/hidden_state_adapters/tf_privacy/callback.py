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
        data: Dataset of `cyclic_dataset` that every call of fit is given, as it is; None for the
            one that the first call asks for batches.
        dataset_size: Number of examples, with those that drop_remainder leaves out or without;
            compared with the data's. None compares nothing.
        batch_size: Batch size, compared likewise.
        target_delta: If given, the epsilon at this delta is shown after every epoch, in the logs
            as "epsilon_if_released_now": what it would be if training ended there and only that
            model were released. It does not depend on the data.
        neighboring_relation: REPLACE_SPECIAL or REPLACE_ONE; with microbatches of several examples
            all figures are for REPLACE_ONE.
        checkpoints_stay_private: Declares that nobody sees the files that ModelCheckpoint, save,
            save_weights and export write before the last step. Otherwise each is a release.
        metrics_stay_private: Declares that nobody sees what CSVLogger, TensorBoard and
            RemoteMonitor write. Otherwise they are refused.
        gradient_bound: Bound on the norm of every per-example gradient before clipping, of ALL
            examples that could have been in the data, for the Dice optimizers; compared in every
            step. inf if none is known.
        loss_geometry: Geometry of the per-example loss (of DP-MBCD as a function of the one
            block), before clipping, for ALL examples that could have been in the data. None is
            composition, unless the optimizer was told.

    Raises:
        UnsupportedRunError: From fit, when the run is not one that can be accounted.
        TypeError, ValueError: An argument has an impossible value.
    """

    def __init__(
        self,
        data: CyclicDataset | None = None,
        *,
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
        if not isinstance(data, CyclicDataset | None):
            raise TypeError(f"Expected a dataset of cyclic_dataset as data, got {data!r:.80}.")
        self._data, self._passes = data, dict[CyclicDataset, int]()
        self._sizes = dataset_size, batch_size
        if target_delta is not None:
            target_delta = validate.target_delta(target_delta)
        self._target_delta = target_delta
        self._relation = validate.neighboring_relation(neighboring_relation)
        if why_not := unmet_relation(BatchOrder.CYCLIC, self._relation):
            raise UnsupportedRunError(why_not)
        self._checkpoints_stay_private = checkpoints_stay_private
        self._metrics_stay_private = metrics_stay_private
        self._declared = Declared(gradient_bound=gradient_bound, loss_geometry=loss_geometry)
        self._releases = False, False  # an iterate after every epoch, after every step
        self._others: set[str] = set()  # callbacks that Keras did not write
        self._calls = 0  # of fit
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
        self._releases = releases_of(
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
        refuse_in_budget("private run of Keras")
        refuse_surroundings()
        if self._is_within_fit and self._has_open_run():
            self._record.invalidate(INTERRUPTED)  # type: ignore[union-attr]
        self._is_within_fit, self._is_checked = True, False
        self._count_passes()

    def _count_passes(self) -> None:
        self._passes = {data: data.passes for data in CyclicDataset.alive}

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Starts the record or goes on, once Keras has asked the data for batches."""
        if self._is_checked:
            return
        asked = [data for data, passes in self._passes.items() if data.passes > passes]
        if len(asked) != 1 or self._data not in (None, *asked):
            raise UnsupportedRunError(
                "Expected fit on a dataset of cyclic_dataset, as it is, the same one in every "
                "call, got something else, or data with class_weight: which examples share a batch "
                "is not known. make_private(model) draws the batches itself."
            )
        self._data, self._passes, self._is_checked = asked[0], {}, True
        (size, batch), (used, own) = self._sizes, (self._data.used, self._data.batch_size)
        if batch not in (None, own) or (size is not None and size // own * own != used):
            raise UnsupportedRunError(
                f"Expected dataset_size = {used} and batch_size = {own} of the data, got {size} "
                f"and {batch}. Leave them out."
            )
        keras_api.build(self.model, self._data)
        if self._record is None:
            self._record = self._new_record()
        elif self.model.optimizer is self._steps.update.optimizer:
            self._record.go_on(self.model, self._steps)
        else:
            raise UnsupportedRunError(
                "Expected the optimizer of the run so far, got another one. Use a callback of its "
                "own for every run."
            )
        self._calls += 1

    def _new_record(self) -> RecordedRun:
        optimizer, data = self.model.optimizer, self._data
        assert data is not None
        if not isinstance(optimizer, PrivateOptimizer):
            raise UnsupportedRunError(
                "Expected an optimizer with noise of this package in compile, such as "
                f"CyclicDPKerasSGDOptimizer, got {type(optimizer).__name__}."
            )
        if getattr(self.model.compiled_loss, "_user_loss_weights", None) is not None:
            raise UnsupportedRunError(
                "Expected compile(loss_weights=None), got weights: they change the loss that is "
                "accounted. Drop them."
            )
        settings, declared = optimizer.settings, self._declared
        if declared.geometry is None and settings.loss_geometry is not None:
            declared = settings.declared
        each = settings.microbatch(data.batch_size)
        size = data.batch_size // each
        plan = EqualPlan(range(data.used // each), size, BatchOrder.CYCLIC)
        self._steps = optimizer.begin_run(keras_api.trained(self.model), plan, each)
        return RecordedRun(
            self.model,
            self._steps,
            relation=self._relation,
            declared=declared,
            files_stay_private=self._checkpoints_stay_private,
        )

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
        if self._releases[1]:
            self._record.release()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the epsilon to the logs, and notes a checkpoint as released."""
        assert self._record is not None
        self.model.reset_metrics()  # Model.save would store them
        self._record.check_fixed()
        if self._releases[0]:
            self._record.release()
        if logs is not None:
            logs.update(self._record.shown_after_epoch(self._target_delta))

    def on_train_end(self, logs: Any = None) -> None:
        """Refuses a run that something stopped before the declared number of epochs."""
        self._is_within_fit = False
        self.model.reset_metrics()
        if self.model.stop_training and self._record is not None:
            self._record.refuse_stopped()

    def _has_open_run(self) -> bool:
        record = self._record
        return record is not None and record.has_begun and not record.has_ended

    def _recorded(self) -> RecordedRun:
        if self._is_within_fit and self._has_open_run():
            raise UnsupportedRunError(
                "Within fit only target_delta shows an epsilon, that of every epoch. If it is "
                f"over, {INTERRUPTED}"
            )
        return super()._recorded()

    def _declared_texts(self) -> Iterable[str]:
        if self._calls > 1:
            yield "the number of calls of fit was fixed in advance, whatever their metrics showed"
        if self._checkpoints_stay_private:
            yield FILES_STAY_PRIVATE
        text = "fit had the callbacks that with_others returned, or this one alone"
        if self._others:
            names = ", ".join(sorted(self._others))
            text += f", and of these {names} release nothing and choose nothing by data"
        yield text
