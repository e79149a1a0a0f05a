"""Records a training loop of the user's own and checks that it is the run that is accounted."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NoReturn

import tensorflow as tf
from dp_accounting import NeighboringRelation

from hidden_state_accountants import Assumption, Guarantee
from hidden_state_adapters.tf_privacy import fit_checks
from hidden_state_adapters.tf_privacy.callback import HiddenStateCallback
from hidden_state_adapters.tf_privacy.data import cyclic_batches
from hidden_state_adapters.tf_privacy.refusals import refusal


class HiddenStateRecorder:
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
      - Not checked, but listed by `assumptions`: that the loss of a step was computed from the
        batch that was handed out last, and what the user declares.

    Args:
        model: A Keras model or layer. Its trainable variables are the released model; set
            ``layer.trainable = False`` for what the optimizer does not train.
        optimizer: A fresh optimizer of this package.
        data: From `cyclic_dataset`.
        neighboring_relation: REPLACE_SPECIAL or REPLACE_ONE.
        gradient_bound: See `HiddenStateCallback`; for the Dice optimizers.

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
    ):
        batches = cyclic_batches(data)
        if batches is None:
            raise refusal(
                f"Expected a dataset of cyclic_dataset, got {type(data).__name__}: the order of "
                "its batches is not known. Use cyclic_dataset, and pass its result as it is."
            )
        if not isinstance(model, tf.keras.layers.Layer):
            raise TypeError(f"Expected a Keras model or layer, got {type(model).__name__}.")
        fit_checks.check_optimizer(optimizer)
        fit_checks.build(model, {"x": data})
        fit_checks.check_layers(model, optimizer)
        self._optimizer, self._data = optimizer, data
        self._record = _LoopRecord(
            dataset_size=batches.used,
            batch_size=batches.batch_size,
            neighboring_relation=neighboring_relation,
            gradient_bound=gradient_bound,
        )
        self._record.set_model(model)
        self._record.start(optimizer, batches.used, data)
        optimizer.watch()
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
        self._record.on_train_batch_end(given)
        if self._record.num_batches == 1:
            self._record.check_variables()

    # What was spent

    @property
    def privacy_event(self) -> Any:
        """The event that happened.

        Raises:
            ValueError: No step was taken.
            UnsupportedRunError: Steps were taken that are not recorded, or the model is not the
                iterate that was accounted.
        """
        return self._settled().privacy_event

    @property
    def guarantee(self) -> Guarantee:
        """The guarantee of what is released, with the current model as the last iterate."""
        return self._settled().guarantee

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """Everything that has to be true, each checked, declared or public."""
        return self._settled().assumptions

    def get_epsilon(self, delta: float) -> float:
        """The epsilon of what is released at `delta`, if the model is the last iterate."""
        return self._settled().get_epsilon(delta)

    def release(self) -> None:
        """Marks the current model as released; call it for every model that anybody sees.

        The last one always counts.
        """
        self._settled().release()

    def report(self, delta: float) -> str:
        """The privacy statement of the run with everything that was checked and declared."""
        return self._settled().report(delta)

    def __getstate__(self) -> Any:
        return self._record.__getstate__()

    def _settled(self) -> _LoopRecord:
        self._settle(is_over=False)
        self._record.check_iterate()
        return self._record


class _LoopRecord(HiddenStateCallback):
    """The record, started and fed by hand."""

    def start(self, optimizer: Any, used: int, data: Any) -> None:
        """In place of `on_train_begin`."""
        self._start(optimizer, used, (data, None))

    @property
    def num_batches(self) -> int:
        assert self._record is not None
        return self._record.num_batches

    @property
    def next_batch(self) -> int:
        assert self._record is not None
        return self._record.next_batch

    @property
    def has_all_steps(self) -> bool:
        assert self._record is not None
        entry = self._record.optimizer.last_step
        return entry.steps == self.num_batches and not entry.problem

    def check_iterate(self) -> None:
        """Raises UnsupportedRunError if the model is not the iterate that was accounted."""
        self._check_iterate()

    def check_variables(self) -> None:
        """Likewise, also while gradients are accumulated."""
        self._check_variables()

    def invalidate(self, text: str) -> NoReturn:
        """Ends the record."""
        self._invalidate(text)

    def _own_assumptions(self) -> tuple[Assumption, ...]:
        text = (
            "the loss of every step was computed from the batch that batches() gave last, its rows "
            "in order"
        )
        return (*super()._own_assumptions(), Assumption.declared(text))
