"""Records a training loop of the user's own and checks that it is the run that is accounted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import tensorflow as tf
from dp_accounting import NeighboringRelation

from hidden_state_accountants import LossGeometry
from hidden_state_adapters.tf_privacy.continuation import RunState
from hidden_state_adapters.tf_privacy.data import cyclic_batches
from hidden_state_adapters.tf_privacy.declared import Declared
from hidden_state_adapters.tf_privacy.figures import Figures
from hidden_state_adapters.tf_privacy.guards.batches import batches_of, examples_and_targets
from hidden_state_adapters.tf_privacy.guards.model import build
from hidden_state_adapters.tf_privacy.guards.trained_loss import TrainedLoss
from hidden_state_adapters.tf_privacy.lineage import Origin
from hidden_state_adapters.tf_privacy.recorded_run import (
    RecordedRun,
    check_optimizer,
    checked_relation,
)
from hidden_state_adapters.tf_privacy.refusals import refusal


class HiddenStateRecorder(Figures):
    """Gives the privacy of a model that an own loop trained, as HiddenStateCallback does for fit.

        record = HiddenStateRecorder(model, optimizer, cyclic_dataset(x, y, batch_size=100))
        for _ in range(epochs):
            for x, y in record.batches():
                with tf.GradientTape() as tape:
                    losses = loss(y, model(x, training=True))  # one entry per example
                optimizer.minimize(losses, model.trainable_variables, tape=tape)
        print(record.report(delta=1e-5))

    The body of the loop may be a tf.function, with or without XLA. Every step is recorded with the
    values that it used, when the next batch is asked for, and at the latest when a figure is. A
    step that the optimizer refused raises at the same place, and the run ends there.

    Formal guarantees:
      - Relation and released iterates: those of `privacy_event`.
      - Checked: the batches are handed out in the fixed order, each once per pass, and exactly one
        step of the optimizer was taken on each; a pass that was left goes on where it was left.
        The trained variables are the model's. Otherwise as `HiddenStateCallback`.
      - Checked if `loss` is given, and otherwise listed by `assumptions`: that the loss of a step
        was computed from the batch that was handed out last, at the weights that the step moves.
      - Not checked, but listed: what the user declares.

    Args:
        model: A Keras model or layer. Its trainable variables are the released model; set
            ``layer.trainable = False`` for what the optimizer does not train.
        optimizer: A fresh optimizer of this package.
        data: From `cyclic_dataset`.
        neighboring_relation: REPLACE_SPECIAL or REPLACE_ONE; with microbatches of several examples
            all figures are for REPLACE_ONE.
        gradient_bound: See `HiddenStateCallback`; for the Dice optimizers.
        block_loss: See `HiddenStateCallback`; for BlockCoordinateKerasOptimizer.
        loss: The loss of the loop, a function of targets and outputs with one entry per example,
            such as a Keras loss with ``reduction="none"``. If it is given, the losses of every
            step must be those of ``loss(y, model(x, training=True))`` on the batch that was handed
            out, at the weights that the step moves. If not, this is your word.
        loss_geometry: See `HiddenStateCallback`; "auto" needs `loss`.
        feature_norm: Likewise.

    Raises:
        UnsupportedRunError: At construction, from `batches` and from every figure, when the run is
            not one that can be accounted. The record then stays invalid.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        data: tf.data.Dataset,
        *,
        neighboring_relation: NeighboringRelation | str = NeighboringRelation.REPLACE_SPECIAL,
        gradient_bound: float = math.inf,
        block_loss: LossGeometry | None = None,
        loss: Any = None,
        loss_geometry: LossGeometry | str | None = None,
        feature_norm: float | None = None,
    ):
        self._open(
            model,
            optimizer,
            data,
            relation=checked_relation(neighboring_relation),
            declared=Declared(
                gradient_bound=gradient_bound,
                block_loss=block_loss,
                loss_geometry=loss_geometry,
                feature_norm=feature_norm,
            ),
            loss=loss,
        )

    @classmethod
    def from_state(
        cls,
        state: Mapping[str, Any],
        model: Any,
        optimizer: Any,
        data: tf.data.Dataset,
        *,
        loss: Any = None,
        discard_later_steps: bool = False,
    ) -> HiddenStateRecorder:
        """Goes on with the run of another process (or of this one), as one run.

        Formal guarantees: those of one run with all its steps; its noise is new. Checked: settings
        and batches are those of before, the weights those that the last step left, and in this
        process nobody else goes on with the run. Your word, and listed: that the examples are those
        of before, and that no other process goes on with it.

        Args:
            state: What `state()` returned.
            model: With the weights that were saved together with the state.
            optimizer: A fresh or loaded optimizer with the arguments of before. Momentum and
                moments are Keras' to restore; they change no figure.
            data: The examples of before, from `cyclic_dataset`.
            loss: The loss of the loop, as for the constructor; needed if it was for "auto".
            discard_later_steps: Declares that nothing that was computed after the state, in this
                process, was ever seen by anybody, nor made you go back.

        Raises:
            TypeError, ValueError: The state is damaged.
            UnsupportedRunError: It is of another run, or not its newest one.
        """
        recorder = cls.__new__(cls)
        read = RunState.of_plain(state)
        recorder._open(
            model,
            optimizer,
            data,
            relation=read.named_relation,
            declared=read.declared,
            loss=loss,
            state=read,
            discard_later_steps=discard_later_steps,
        )
        return recorder

    def _open(
        self,
        model: Any,
        optimizer: Any,
        data: tf.data.Dataset,
        *,
        relation: NeighboringRelation,
        declared: Declared,
        loss: Any,
        state: RunState | None = None,
        discard_later_steps: bool = False,
    ) -> None:
        batches = cyclic_batches(data)
        if batches is None:
            raise refusal(
                f"Expected a dataset of cyclic_dataset, got {type(data).__name__}: the order of "
                "its batches is not known. Use cyclic_dataset, and pass its result as it is."
            )
        if not isinstance(model, tf.keras.layers.Layer):
            raise TypeError(f"Expected a Keras model or layer, got {type(model).__name__}.")
        check_optimizer(optimizer)
        build(model, data)
        self._data = data
        self._record: RecordedRun = RecordedRun(
            model,
            optimizer,
            batch_size=batches.batch_size,
            examples=batches.used,
            relation=relation,
            declared=declared,
            trained=TrainedLoss.of_loop(
                model, lambda: batches_of(data, None, batches.batch_size), loss
            ),
            state=state,
            discard_later_steps=discard_later_steps,
        )
        self._given: int | None = None  # the batch that was handed out, without a recorded step
        self._pass = 0
        optimizer.training.where_from = self._where_from

    def batches(self) -> Iterator[Any]:
        """The batches of one pass over the data, or the rest of a pass that was left.

        Raises:
            UnsupportedRunError: The batch before was not used for exactly one step, or another
                pass was begun meanwhile.
        """
        self._settle(is_over=False)
        self._given = None  # without a step: it is handed out again
        self._pass += 1
        own, start = self._pass, self._record.next_batch
        self._record.check_initial_weights()  # weights may have been loaded since
        for index, batch in enumerate(self._data.skip(start), start):
            self._settle(is_over=True)
            if own != self._pass:
                self._record.invalidate("a pass over the data was begun before the last one ended.")
            self._given = index
            self._record.expect(*examples_and_targets(batch))
            yield batch
        self._settle(is_over=True)
        self._record.check_iterate()
        self._record.after_epoch()

    def _settle(self, *, is_over: bool) -> None:
        """Records the step on the batch that was handed out, if there was one.

        Args:
            is_over: Whether there has to be one by now.
        """
        if self._given is None:
            return
        if not is_over and self._record.has_all_steps:
            return
        given, self._given = self._given, None
        self._record.add(given)

    def _where_from(self) -> Origin:
        self._settle(is_over=False)  # of a pass that was left
        return self._record.where_from()

    def _catch_up(self) -> None:
        self._settle(is_over=False)

    def _declared_texts(self) -> Iterable[str]:
        if not self._record.compares_losses:
            yield (
                "the loss of every step was computed from the batch that batches() gave last, its "
                "rows in order"
            )
        if self._record.next_batch:
            yield "the number of steps was fixed in advance, within a pass over the data as it is"
