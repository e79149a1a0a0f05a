"""Records a run of Model.fit and checks that it is the run that is accounted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import tensorflow as tf
from dp_accounting import NeighboringRelation

from hidden_state_accountants import LossGeometry, validate
from hidden_state_adapters.tf_privacy.continuation import RunState
from hidden_state_adapters.tf_privacy.data import cyclic_batches
from hidden_state_adapters.tf_privacy.declared import Declared
from hidden_state_adapters.tf_privacy.equal_examples import warn_of_equal_examples
from hidden_state_adapters.tf_privacy.figures import Figures
from hidden_state_adapters.tf_privacy.guards.batches import batches_of
from hidden_state_adapters.tf_privacy.guards.callbacks import check_callbacks, is_of_keras
from hidden_state_adapters.tf_privacy.guards.fit import check_data, fit_arguments, is_fitting
from hidden_state_adapters.tf_privacy.guards.model import build, check_compiled
from hidden_state_adapters.tf_privacy.guards.trained_loss import TrainedLoss
from hidden_state_adapters.tf_privacy.recorded_run import (
    RecordedRun,
    check_optimizer,
    checked_relation,
)
from hidden_state_adapters.tf_privacy.refusals import refusal

_EPSILON = "epsilon_if_released_now"


class HiddenStateCallback(Figures, tf.keras.callbacks.Callback):
    """Gives the privacy of the model that Model.fit trained with an optimizer of this package.

    Every step is recorded with the values that it used. One callback follows one model with one
    optimizer over any number of calls of fit.

    Formal guarantees:
      - Relation and released iterates: those of the recorded event, a `LastIterateDpEvent` for
        CyclicDPKerasSGDOptimizer, a `DiceSgdDpEvent` (all iterates) for the Dice optimizers, a
        `BlockCoordinateDpEvent` for BlockCoordinateKerasOptimizer (whole epochs; blocks that are
        released within the run are accounted by composition).
      - Checked before training: fixed equal batches, each once per epoch; the model, the loss and
        the other callbacks, as far as Keras shows them; on the first batch, that no example moves
        the outputs, losses or gradients of others.
      - Checked in every step: what the optimizer checks; one step per batch; fresh noise; in a
        `train_step` of one's own, that the losses are those of the compiled loss on the delivered
        batch at the weights that the step moves (to 0.1 %). After every epoch: variables that are
        not trained are unchanged.
      - Not checked, but listed by `assumptions`: what the user declares. Losses and metrics of the
        training data (History, progress bar) have no privacy guarantee and must stay private.

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
        loss_geometry: What is known about the per-example loss, before clipping. ``"auto"`` reads
            it off the compiled loss and the model: CategoricalCrossentropy (also sparse),
            BinaryCrossentropy, MeanSquaredError, Huber, LogCosh or an envelope loss of one `Dense`
            layer whose input nothing else that is trained touches. A LossGeometry is your word, for
            ALL examples that could have been in the data. None is composition, unless the optimizer
            was told.
        feature_norm: B, a bound on the L2 norm of every example's features at that layer; needed
            for "auto". All examples are measured before the first step.

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
        loss_geometry: LossGeometry | str | None = None,
        feature_norm: float | None = None,
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
        self._declared = Declared(
            gradient_bound=gradient_bound,
            block_loss=block_loss,
            loss_geometry=loss_geometry,
            feature_norm=feature_norm,
        )
        self._state: RunState | None = None  # that the first fit goes on from
        self._discard_later_steps = False
        self._delivered: Iterator[tuple[Any, Any]] = iter(())
        self._source: tuple[Any, Any] = (None, None)
        self._releases_epochs = self._releases_steps = False
        self._other_callbacks: set[str] = set()
        self._calls = 0  # of fit
        self._is_within_fit = False

    @classmethod
    def from_state(
        cls,
        state: Mapping[str, Any],
        *,
        target_delta: float | None = None,
        checkpoints_stay_private: bool = False,
        metrics_stay_private: bool = False,
        discard_later_steps: bool = False,
    ) -> HiddenStateCallback:
        """A callback whose first fit goes on with the run of another process, as one run.

            model = tf.keras.models.load_model(path)  # saved together with the state
            record = HiddenStateCallback.from_state(json.loads(text))
            model.fit(data, epochs=the_rest, callbacks=[record])

        Formal guarantees, `state` and `discard_later_steps`: see `HiddenStateRecorder.from_state`.
        Fit starts with the first batch, so the state has to be of the end of an epoch.

        Args:
            state: What `state()` returned.
            target_delta: As for the constructor, like the next two.
            checkpoints_stay_private: About the files from here on.
            metrics_stay_private: Likewise.
            discard_later_steps: Nothing that was computed after the state was ever seen.

        Raises:
            TypeError, ValueError: The state is damaged. From fit, UnsupportedRunError: it is of
                another run, or not its newest one.
        """
        read = RunState.of_plain(state)
        callback = cls(
            dataset_size=read.units.examples,
            batch_size=read.units.batch_size,
            target_delta=target_delta,
            neighboring_relation=read.named_relation,
            checkpoints_stay_private=checkpoints_stay_private,
            metrics_stay_private=metrics_stay_private,
        )
        callback._declared = read.declared  # read off the compiled loss again, if it was
        callback._state, callback._discard_later_steps = read, discard_later_steps
        return callback

    # Keras' hooks

    def on_train_begin(self, logs: Any = None) -> None:
        """Checks how fit was called and the model; starts the record or goes on with it."""
        if self._is_within_fit:
            self._end_interrupted()
        fit = fit_arguments()
        used = check_data(fit, self._dataset_size, self._batch_size)
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
        check_optimizer(self.model.optimizer)
        check_compiled(self.model)
        source = fit["x"], fit["y"]
        if self._record is None:
            self._start(used, source)
        else:
            self._go_on(self._record, source)
        self._calls += 1
        self._is_within_fit = True

    def _start(self, used: int, source: tuple[Any, Any]) -> None:
        if self._state is not None:
            self._check_goes_on(source, self._state.num_batches % self._state.units.batches)
        record = RecordedRun(
            self.model,
            self.model.optimizer,
            batch_size=self._batch_size,
            examples=used,
            relation=self._relation,
            declared=self._declared,
            trained=self._trained(source),
            state=self._state,
            discard_later_steps=self._discard_later_steps,
        )
        if self._releases_steps and record.units.accumulated > 1:
            raise refusal(
                'Expected ModelCheckpoint(save_freq="epoch") with gradient_accumulation_steps > 1, '
                "got files within steps, which hold the gradients accumulated so far. Use "
                '"epoch", or declare checkpoints_stay_private=True.'
            )
        if cyclic_batches(source[0]) is None:  # else cyclic_dataset has looked
            warn_of_equal_examples([part for part in source if part is not None])
        self._record, self._source = record, source

    def _trained(self, source: tuple[Any, Any]) -> TrainedLoss:
        return TrainedLoss.of_fit(self.model, lambda: batches_of(*source, self._batch_size))

    def _go_on(self, record: RecordedRun, source: tuple[Any, Any]) -> None:
        record.go_on(self.model, self.model.optimizer, self._trained(source))
        if any(new is not old for new, old in zip(source, self._source, strict=True)):
            raise refusal(
                "Expected the data of the run so far, the same object, got another: its batches "
                "may differ. Keep the result of cyclic_dataset and pass it to every call of fit."
            )
        self._check_goes_on(source, record.next_batch)

    def _check_goes_on(self, source: tuple[Any, Any], next_batch: int) -> None:
        if cyclic_batches(source[0]) is None:
            raise refusal(
                "Expected a dataset of cyclic_dataset for more than one call of fit, got arrays, "
                "which may have been reordered in between. Pass cyclic_dataset(x, y, batch_size="
                f"{self._batch_size}) from the first call on."
            )
        if next_batch:
            raise refusal(
                f"Expected to go on with batch {next_batch}, where the run stopped; fit starts "
                "with batch 0. Use HiddenStateRecorder, or a state of the end of an epoch."
            )

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Computes what the losses of the step have to be, if its train_step is not Keras' own."""
        assert self._record is not None
        if not self._record.compares_losses:
            return
        if not batch:
            self._delivered = batches_of(*self._source, self._batch_size)
        self._record.expect(*next(self._delivered))

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
        if self._is_within_fit and not is_fitting(self.model):
            self._end_interrupted()

    def _end_interrupted(self) -> None:
        """Ends the run of a fit that an error or the user has stopped, if it took a step."""
        assert self._record is not None
        self._is_within_fit = False
        if self._record.has_begun and not self._record.has_ended:
            self._record.invalidate(
                "fit was interrupted (by an error, or by hand when the model was good?), so the "
                "number of steps may depend on the data. Fix it in advance; start again, or go on "
                "from the state() of an earlier epoch."
            )

    def _declared_texts(self) -> Iterable[str]:
        if self._calls > 1:
            yield "the number of calls of fit was fixed in advance, whatever their metrics showed"
        if self._checkpoints_stay_private:
            yield "the files of ModelCheckpoint stay private"
        if self._other_callbacks:
            names = ", ".join(sorted(self._other_callbacks))
            yield f"other callbacks ({names}) release nothing and choose nothing by data"
