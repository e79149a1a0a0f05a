"""Records a training loop of the user's own and checks that it is the run that is accounted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf
from dp_accounting import NeighboringRelation

from hidden_state_accountants import LossGeometry
from hidden_state_adapters.tf_privacy.data import cyclic_batches
from hidden_state_adapters.tf_privacy.declared import Declared
from hidden_state_adapters.tf_privacy.figures import Figures
from hidden_state_adapters.tf_privacy.guards.batches import batches_of, examples_and_targets
from hidden_state_adapters.tf_privacy.guards.model import build
from hidden_state_adapters.tf_privacy.guards.trained_loss import TrainedLoss
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
        neighboring_relation: REPLACE_SPECIAL or REPLACE_ONE.
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
        neighboring_relation: NeighboringRelation = NeighboringRelation.REPLACE_SPECIAL,
        gradient_bound: float = math.inf,
        block_loss: LossGeometry | None = None,
        loss: Any = None,
        loss_geometry: LossGeometry | str | None = None,
        feature_norm: float | None = None,
    ):
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
            relation=checked_relation(neighboring_relation),
            declared=Declared(
                gradient_bound=gradient_bound,
                block_loss=block_loss,
                loss_geometry=loss_geometry,
                feature_norm=feature_norm,
            ),
            trained=TrainedLoss.of_loop(
                model, lambda: batches_of(data, None, batches.batch_size), loss
            ),
        )
        self._given: int | None = None  # the batch that was handed out, without a recorded step
        self._pass = 0

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
        for index, batch in enumerate(self._data.skip(start), start):
            self._settle(is_over=True)
            if own != self._pass:
                self._record.invalidate("a pass over the data was begun before the last one ended.")
            self._given = index
            self._record.expect(*examples_and_targets(batch))
            yield batch
        self._settle(is_over=True)
        self._record.check_iterate()

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

    def _catch_up(self) -> None:
        self._settle(is_over=False)
        self._record.check_iterate()

    def _declared_texts(self) -> Iterable[str]:
        if not self._record.compares_losses:
            yield (
                "the loss of every step was computed from the batch that batches() gave last, its "
                "rows in order"
            )
