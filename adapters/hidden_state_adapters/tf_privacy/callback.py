"""Records a run of Keras' own Model.fit: its data, its steps, and what it releases."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import tensorflow as tf
from dp_accounting import NeighboringRelation

from hidden_state_accountants import BatchOrder, LossGeometry, validate
from hidden_state_adapters.batch_plans import FixedPlan
from hidden_state_adapters.tf_privacy import keras_api
from hidden_state_adapters.tf_privacy.data import cyclic_batches
from hidden_state_adapters.tf_privacy.declared import Declared
from hidden_state_adapters.tf_privacy.figures import Figures
from hidden_state_adapters.tf_privacy.guards.callbacks import check_callbacks, is_of_keras
from hidden_state_adapters.tf_privacy.guards.model import build, check_compiled, check_layers
from hidden_state_adapters.tf_privacy.guards.settings import refuse_surroundings
from hidden_state_adapters.tf_privacy.optimizers import PrivateOptimizer
from hidden_state_adapters.tf_privacy.recorded_run import RecordedRun, checked_relation
from hidden_state_adapters.tf_privacy.refusals import refusal

_EPSILON = "epsilon_if_released_now"


class HiddenStateCallback(Figures, tf.keras.callbacks.Callback):
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
      - Your word, and listed by `assumptions`: that each entry of the loss is about one example of
        the batch, as TensorFlow Privacy's optimizers assume; what you declare. Losses and metrics
        of the training data (History, progress bar) have no privacy guarantee and must stay
        private.

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
        self._releases_epochs = self._releases_steps = False
        self._other_callbacks: set[str] = set()
        self._calls = 0  # of fit
        self._data = self._optimizer = None  # of the first fit
        self._is_within_fit = False

    # Keras' hooks

    def on_train_begin(self, logs: Any = None) -> None:
        """Checks the data, the model and the other callbacks; starts the record or goes on."""
        if self._is_within_fit:
            self._end_interrupted()
        refuse_surroundings()
        fit = _arguments_of_fit()
        used = self._check_data(fit)
        others = fit["callbacks"].callbacks
        self._releases_epochs, self._releases_steps = check_callbacks(
            others,
            self,
            checkpoints_stay_private=self._checkpoints_stay_private,
            metrics_stay_private=self._metrics_stay_private,
        )
        self._other_callbacks |= {
            type(c).__name__ for c in others if c is not self and not is_of_keras(c)
        }
        build(self.model, fit["x"])
        check_compiled(self.model)
        if self._record is None:
            self._record = self._new_record(used)
        else:
            self._go_on(self._record, fit["x"])
        self._data = fit["x"]
        self._calls += 1
        self._is_within_fit = True

    def _new_record(self, used: int) -> RecordedRun:
        self._optimizer = optimizer = self.model.optimizer
        if not isinstance(optimizer, PrivateOptimizer):
            raise refusal(
                "Expected a CyclicDPKerasSGDOptimizer, DiceKerasSGDOptimizer, "
                "DiceKerasAdamOptimizer or BlockCoordinateKerasOptimizer in compile, got "
                f"{type(optimizer).__name__}: its steps cannot be checked."
            )
        declared, each = (
            optimizer.known(self._declared),
            optimizer.examples_of_record(self._batch_size),
        )
        size, records = self._batch_size // each, range(used // each)
        check_layers(self.model)
        plan = FixedPlan(records, size, BatchOrder.CYCLIC)
        return RecordedRun(
            self.model,
            optimizer.begin_run(keras_api.trained(self.model), plan, each),
            batch_size=size,
            examples=len(records),
            relation=self._relation,
            declared=declared,
        )

    def _check_data(self, fit: Mapping[str, Any]) -> int:
        """The number of examples that fit uses, each exactly once per epoch in a fixed order.

        Raises:
            UnsupportedRunError: They are not those of cyclic_dataset, or weighted.
        """
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
        return batches.used

    def _go_on(self, record: RecordedRun, data: Any) -> None:
        if self.model.optimizer is not self._optimizer:
            raise refusal(
                "Expected the optimizer of the run so far, got another one. Use a callback of its "
                "own for every run, and compose their events."
            )
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
        if self._releases_steps:
            self._record.release()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the epsilon to the logs, and notes a checkpoint as released."""
        assert self._record is not None
        self.model.reset_metrics()
        self._record.after_epoch()
        if self._releases_epochs:
            self._record.release()
        if self._target_delta is not None and logs is not None:
            logs[_EPSILON] = self._record.guarantee().epsilon(self._target_delta)

    def on_train_end(self, logs: Any = None) -> None:
        """Refuses a run that something stopped before the declared number of epochs."""
        assert self._record is not None
        self._is_within_fit = False
        self.model.reset_metrics()
        if self.model.stop_training:
            self._record.invalidate(
                "training was stopped early (model.stop_training), so the number of steps may "
                "depend on the data. Fix it in advance."
            )

    def _catch_up(self) -> None:
        if self._is_within_fit and not _is_fitting(self.model):
            self._end_interrupted()

    def _end_interrupted(self) -> None:
        """Ends the run of a fit that an error or the user has stopped, if it took a step."""
        assert self._record is not None
        self._is_within_fit = False
        if self._record.has_begun and not self._record.has_ended:
            self._record.invalidate(
                "fit was interrupted (by an error, or by hand when the model was good?), so the "
                "number of steps may depend on the data. Fix it in advance, and start again."
            )

    def _declared_texts(self) -> Iterable[str]:
        if self._calls > 1:
            yield "the number of calls of fit was fixed in advance, whatever their metrics showed"
        if self._checkpoints_stay_private:
            yield "the files of ModelCheckpoint stay private"
        if self._other_callbacks:
            names = ", ".join(sorted(self._other_callbacks))
            yield f"other callbacks ({names}) release nothing and choose nothing by data"


def _arguments_of_fit() -> Mapping[str, Any]:
    """The variables of the call of Model.fit that is running, which Keras tells no callback.

    Raises:
        UnsupportedRunError: It is not Model.fit that runs.
    """
    for frame in _calls_of_fit(sys._getframe(1)):
        return frame.f_locals
    raise refusal(
        "Expected to be called by Model.fit, got another caller: the order of the data cannot be "
        "checked. For a loop of your own make the model private: make_private(model)."
    )


def _is_fitting(model: Any) -> bool:
    """Whether a call of Model.fit of this model is running, in any thread."""
    newest = sys._current_frames().values()
    return any(call.f_locals["self"] is model for top in newest for call in _calls_of_fit(top))


def _calls_of_fit(frame: Any) -> Iterator[Any]:
    """The calls of Model.fit among a frame and its callers, the innermost first."""
    code = inspect.unwrap(tf.keras.Model.fit).__code__
    while frame is not None:
        if frame.f_code is code:
            yield frame
        frame = frame.f_back
