"""Records a run of Model.fit and checks that it is the run that is accounted."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf
from dp_accounting import NeighboringRelation

from hidden_state_accountants import (
    Assumption,
    BatchOrder,
    DiceSgdDpEvent,
    Guarantee,
    LastIterateDpEvent,
    RunRecorder,
    UnsupportedRunError,
    validate,
)
from hidden_state_accountants.guarantee import merge_assumptions
from hidden_state_adapters.tf_privacy import fit_checks
from hidden_state_adapters.tf_privacy.data import cyclic_batches
from hidden_state_adapters.tf_privacy.dice_optimizer import DiceOptimizer
from hidden_state_adapters.tf_privacy.dice_record import DiceRecord
from hidden_state_adapters.tf_privacy.last_iterate_record import LastIterateRecord
from hidden_state_adapters.tf_privacy.refusals import refusal
from hidden_state_adapters.tf_privacy.run_record import RunRecord

_EPSILON = "epsilon_if_released_now"
_logger = logging.getLogger("hidden_state_accountants")


class HiddenStateCallback(tf.keras.callbacks.Callback):
    """Gives the privacy of the model that Model.fit trained with an optimizer of this package.

    Every step is recorded with the values that it used. One callback follows one model with one
    optimizer over any number of calls of fit.

    Formal guarantees:
      - Relation and released iterates: those of the recorded event, a `LastIterateDpEvent` for
        CyclicDPKerasSGDOptimizer, a `DiceSgdDpEvent` (all iterates) for the Dice optimizers.
      - Checked before training: fixed equal batches, each once per epoch; the model, the loss and
        the other callbacks, as far as Keras shows them.
      - Checked in every step: what the optimizer checks; one step per batch; fresh
        noise. After every epoch: variables that are not trained are unchanged.
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
        neighboring_relation: REPLACE_SPECIAL or REPLACE_ONE.
        checkpoints_stay_private: Declares that nobody sees the files of ModelCheckpoint. Otherwise
            every one counts as released.
        metrics_stay_private: Declares that nobody sees what CSVLogger, TensorBoard and
            RemoteMonitor write. Otherwise they are refused.
        gradient_bound: For the Dice optimizers, a bound on the norm of every per-example gradient
            before clipping that holds for ALL examples that could have been in the data. The run is
            checked against it. inf if none is known.

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
        neighboring_relation: NeighboringRelation = NeighboringRelation.REPLACE_SPECIAL,
        checkpoints_stay_private: bool = False,
        metrics_stay_private: bool = False,
        gradient_bound: float = math.inf,
    ):
        super().__init__()
        self._batch_size = validate.integer("batch_size", batch_size, minimum=1)
        self._dataset_size = validate.integer(
            "dataset_size", dataset_size, minimum=batch_size, remedy="It is at least batch_size."
        )
        if target_delta is not None:
            target_delta = validate.target_delta(target_delta)
        self._target_delta = target_delta
        self._relation = validate.neighboring_relation(neighboring_relation)
        RunRecorder(batch_order=BatchOrder.CYCLIC, batch_size=1, dataset_size=1).check_relation(
            neighboring_relation
        )
        self._checkpoints_stay_private = checkpoints_stay_private
        self._metrics_stay_private = metrics_stay_private
        self._gradient_bound = validate.real(
            "gradient_bound", gradient_bound, above=0, allow_inf=True
        )
        self._record: RunRecord | None = None
        self._source: tuple[Any, Any] = (None, None)
        self._fixed: list[np.ndarray] = []
        self._releases = (False, False)
        self._other_callbacks: tuple[str, ...] = ()
        self._invalid = ""

    # Keras' hooks

    def on_train_begin(self, logs: Any = None) -> None:
        """Checks how fit was called and the model; starts the record or goes on with it."""
        if self._invalid:
            raise refusal(f"The run cannot go on: {self._invalid}")
        fit = fit_checks.fit_arguments()
        used = fit_checks.check_data(fit, self._dataset_size, self._batch_size)
        others = fit["callbacks"].callbacks
        self._releases = fit_checks.check_callbacks(
            others,
            self,
            checkpoints_stay_private=self._checkpoints_stay_private,
            metrics_stay_private=self._metrics_stay_private,
        )
        self._other_callbacks += tuple(
            type(c).__name__ for c in others if c is not self and not fit_checks.is_of_keras(c)
        )
        fit_checks.build(self.model, fit)
        optimizer = fit_checks.check_model(self.model)
        source = fit["x"], fit["y"]
        if self._record is None:
            self._start(optimizer, used, source)
        else:
            self._go_on(optimizer, source)
        optimizer.watch()

    def _start(self, optimizer: Any, used: int, source: tuple[Any, Any]) -> None:
        if optimizer.last_step.steps:
            raise refusal(
                f"Expected an optimizer without steps, got one with {optimizer.last_step.steps} "
                "that were not recorded. Pass the callback to every call of fit, or compile with a "
                "fresh optimizer and account both runs."
            )
        record = self._new_record(optimizer, used)
        if self._releases[1] and optimizer.gradient_accumulation_steps > 1:
            raise refusal(
                'Expected ModelCheckpoint(save_freq="epoch") with gradient_accumulation_steps > 1, '
                "got files within steps, which hold the gradients accumulated so far. Use "
                '"epoch", or declare checkpoints_stay_private=True.'
            )
        self._record, self._source = record, source
        self._fixed = [v.numpy() for v in self.model.non_trainable_variables]
        before = int(optimizer.iterations)
        if before:
            _logger.warning(
                "the optimizer was loaded with %d steps: they are another run, not in this record; "
                "compose the events of both", before,
            )  # fmt: skip
        line = record.line_before()
        if line:
            _logger.warning(line)

    def _new_record(self, optimizer: Any, used: int) -> RunRecord:
        if isinstance(optimizer, DiceOptimizer):
            return DiceRecord(
                optimizer, self._batch_size, used, self._relation, self._gradient_bound
            )
        if self._gradient_bound < math.inf:
            raise refusal(
                f"Expected gradient_bound for a Dice optimizer, got {type(optimizer).__name__}. "
                "Declare the optimizer's loss_geometry."
            )
        return LastIterateRecord(optimizer, self._batch_size, used, self._relation)

    def _go_on(self, optimizer: Any, source: tuple[Any, Any]) -> None:
        assert self._record is not None
        if optimizer is not self._record.optimizer:
            raise refusal(
                "Expected the optimizer of the run so far, got another one. Use a callback of its "
                "own for every run, and compose their events."
            )
        if any(new is not old for new, old in zip(source, self._source, strict=True)):
            raise refusal(
                "Expected the data of the run so far, the same object, got another: its batches "
                "may differ. Keep the result of cyclic_dataset and pass it to every call of fit."
            )
        if cyclic_batches(source[0]) is None:
            raise refusal(
                "Expected a dataset of cyclic_dataset for more than one call of fit, got arrays, "
                "which may have been reordered in between. Pass cyclic_dataset(x, y, batch_size="
                f"{self._batch_size}) from the first call on."
            )
        self._check_iterate()
        if self._record.next_batch:
            raise refusal(
                f"Expected to go on with batch {self._record.next_batch}, where the "
                "last call of fit was interrupted; fit starts with batch 0."
            )

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Records the step."""
        assert self._record is not None
        try:
            self._record.add(self._record.optimizer.last_step, batch)
        except ValueError as error:
            self._invalidate(str(error))
        if self._releases[1]:
            self._record.release()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the epsilon to the logs, and notes a checkpoint as released."""
        assert self._record is not None
        self.model.reset_metrics()
        self._check_fixed()
        if self._releases[0]:
            self._record.release()
        if self._target_delta is not None and logs is not None:
            logs[_EPSILON] = self.guarantee.epsilon(self._target_delta)

    def on_train_end(self, logs: Any = None) -> None:
        """Refuses a run that something stopped before the declared number of epochs."""
        self.model.reset_metrics()
        if self.model.stop_training:
            self._invalidate(
                "training was stopped early (model.stop_training), so the number of steps may "
                "depend on the data. Fix it in advance."
            )

    # What was spent

    @property
    def privacy_event(self) -> LastIterateDpEvent | DiceSgdDpEvent:
        """The event that happened.

        Raises:
            ValueError: No step was taken.
            UnsupportedRunError: Steps were taken that are not recorded.
        """
        return self._checked_record().event()

    @property
    def guarantee(self) -> Guarantee:
        """The guarantee of what is released, with the current model as the last iterate."""
        return self._checked_record().guarantee()

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """Everything that has to be true, each checked, declared or public."""
        guarantee = self.guarantee
        return merge_assumptions([self._own_assumptions(), guarantee.assumptions])

    def get_epsilon(self, delta: float) -> float:
        """The epsilon of what is released at `delta`, if the model is the last iterate.

        Raises:
            ValueError: No step was taken.
            UnsupportedRunError: The model is not the iterate that was accounted.
        """
        self._check_iterate()
        return self.guarantee.epsilon(delta)

    def release(self) -> None:
        """Marks the current model as released; call it for every model that anybody sees.

        The last one always counts.

        Raises:
            UnsupportedRunError: The model is not the iterate that was accounted.
        """
        self._check_iterate()
        if self._record is not None:
            self._record.release()

    def report(self, delta: float | None = None) -> str:
        """The privacy statement of the run with everything that was checked and declared.

        Args:
            delta: Where epsilon is read; None for target_delta.

        Raises:
            ValueError: No step was taken, or no delta was given.
            UnsupportedRunError: The model is not the iterate that was accounted.
        """
        if delta is None:
            delta = self._target_delta
        if delta is None:
            raise ValueError("Expected delta, got None. Pass it here or as target_delta.")
        self._check_iterate()
        delta = validate.target_delta(delta)
        return self._checked_record().report(self.assumptions, delta)

    def _own_assumptions(self) -> tuple[Assumption, ...]:
        assert self._record is not None
        checked = [
            "batches of equal size in the fixed order of the data set, each once per epoch, one "
            "step each",
            "variables in float32 or float64, changed by the private optimizer only; variables "
            "that are not trained unchanged",
            *self._record.checked(),
        ]
        declared = [
            "every entry of the loss depends on one example of the delivered batch",
            "the initial model and the order of the examples do not depend on the examples",
            "losses and metrics of the training data (History, progress bar) stay private",
        ]
        if self._checkpoints_stay_private:
            declared.append("the files of ModelCheckpoint stay private")
        if self._other_callbacks:
            names = ", ".join(sorted(set(self._other_callbacks)))
            declared.append(f"other callbacks ({names}) release nothing and choose nothing by data")
        return (
            *(Assumption.checked(text) for text in checked),
            *(Assumption.declared(text) for text in declared),
        )

    # Checks

    def _checked_record(self) -> RunRecord:
        if self._invalid:
            raise refusal(f"The run is not accounted: {self._invalid}")
        if self._record is None or not self._record.num_batches:
            raise ValueError("Expected at least one step, got none yet. Pass the callback to fit.")
        self._record.check()
        return self._record

    def _check_iterate(self) -> None:
        if self._record is None or not self._record.num_batches:
            return
        self._checked_record()
        self._check_variables()

    def _check_variables(self) -> None:
        assert self._record is not None
        if not self._record.optimizer.is_iterate(self.model.trainable_variables):
            raise refusal(
                "The trainable variables were changed outside the private optimizer, so the model "
                "is not the iterate that was accounted. Release the model that fit left."
            )
        self._check_fixed()

    def _check_fixed(self) -> None:
        now = [v.numpy() for v in self.model.non_trainable_variables]
        if len(now) != len(self._fixed) or not all(map(np.array_equal, now, self._fixed)):
            self._invalidate(
                "a variable that is not trained was changed during the run (running statistics, "
                "counters): it carries the data of the examples past the noise."
            )

    def _invalidate(self, text: str) -> NoReturn:
        self._invalid = text
        raise refusal(text)

    def __getstate__(self) -> Mapping[str, Any]:
        raise UnsupportedRunError(
            "The record of a run cannot be copied or pickled: the steps of the copy would be "
            "missing from epsilon. Keep privacy_event.to_dict()."
        )
