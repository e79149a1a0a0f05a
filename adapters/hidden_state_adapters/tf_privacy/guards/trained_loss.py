"""The function of a batch whose gradients a run takes, as far as it is known."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from hidden_state_accountants import UnsupportedRunError
from hidden_state_adapters.tf_privacy import keras_api
from hidden_state_adapters.tf_privacy.guards.rows import (
    are_equal,
    number_of_rows,
    rows_that_move,
    same_random_numbers,
)
from hidden_state_adapters.tf_privacy.guards.step import check_loss
from hidden_state_adapters.tf_privacy.losses import ENVELOPES
from hidden_state_adapters.tf_privacy.refusals import refusal

Batches = Callable[[], Iterable[tuple[Any, Any]]]
_STEP = ("train_step", "compute_loss", "make_train_function")
EVERY_ENTRY = "every entry of the loss depends on one example of the delivered batch"
AT_THE_WEIGHTS = (
    "the loss of every step is computed at the weights that the step moves: no others are put in "
    "for the forward pass (sharpness-aware or look-ahead steps)"
)


class TrainedLoss:
    """loss(targets, model(examples)), which is looked at before the first step.

    Args:
        model: A Keras model or layer that is built.
        batches: Gives the batches of the data set from the first one on, as pairs of examples and
            targets.
        loss: Of targets and outputs, with one entry for each example; None if it is not known.
        given: What the user passed as the loss.
        keras_loss: The object or function of Keras that it is; None if it is none.
        is_told: Whether a user said that a loop of their own trains this function.
        is_the_step: Whether Keras itself takes the gradients of this very function. A step of
            one's own is compared with it, unless it draws random numbers.

    Raises:
        TypeError: `loss` is no function.
    """

    def __init__(
        self,
        model: Any,
        batches: Batches,
        loss: Any,
        *,
        given: Any = None,
        keras_loss: Any = None,
        is_told: bool = False,
        is_the_step: bool = False,
    ):
        if loss is not None and not callable(loss):
            raise TypeError(f"Expected loss to be a function, a Keras loss or None, got {loss!r}.")
        self.model, self.batches, self.loss = model, batches, loss
        self.given, self.keras_loss, self.is_the_step = given, keras_loss, is_the_step
        self._is_told = is_told
        self._is_looked_at = self._is_random = False

    @classmethod
    def of_loop(cls, model: Any, batches: Batches, loss: Any) -> TrainedLoss:
        """What a loop of one's own trains a model with; None if that is not told."""
        return cls(model, batches, loss, given=loss, keras_loss=loss, is_told=loss is not None)

    @classmethod
    def of_fit(cls, model: Any, batches: Batches) -> TrainedLoss:
        """What `Model.fit` trains a compiled model with."""
        container = type(model.compiled_loss)
        given = getattr(model.compiled_loss, "_user_losses", None)
        if not given:
            return cls(model, batches, None)
        is_own = any(
            getattr(type(model), name) is not getattr(tf.keras.Model, name) or name in vars(model)
            for name in _STEP
        )
        return cls(
            model,
            batches,
            # A container of its own: that of the model keeps a mean of what it saw.
            container(given, output_names=getattr(model, "output_names", None)),
            given=_without_brackets(given),
            keras_loss=_keras_loss(given),
            is_the_step=not is_own,
        )

    def go_on(self, other: TrainedLoss) -> None:
        """Takes over the model of a later part of the run, which has to be looked at again.

        Raises:
            UnsupportedRunError: Loss or step are not those that were looked at.
        """
        is_other_step = self.is_the_step != other.is_the_step
        if is_other_step or not _is_same_loss(self.given, other.given):
            raise refusal(
                "Expected the compiled loss and the train_step of the run so far, got others: what "
                "is known of the loss was read off them. Keep them, or use an optimizer and a "
                "callback of its own for every loss, and compose their events."
            )
        self.model = other.model

    @property
    def is_compared(self) -> bool:
        """Whether every step has to be given the losses of this function."""
        is_fixed = self._is_looked_at and not self._is_random
        return self.loss is not None and is_fixed and not self.is_the_step

    @property
    def is_certain(self) -> bool:
        """Whether the gradients of every step are known to be those of this function."""
        return self.loss is not None and (self.is_the_step or self.is_compared)

    @property
    def has_single_rows(self) -> bool:
        """Whether every row of the losses of a step is that of one example."""
        return self.is_certain and self._is_looked_at

    def losses(self, examples: Any, targets: Any) -> tf.Tensor:
        """Of a batch in a training pass, with one row for each example."""
        return self._losses(targets, self.model(examples, training=True))

    def _losses(self, targets: Any, outputs: Any) -> tf.Tensor:
        return check_loss(self.loss(targets, outputs), None, may_have_axes=True)

    def look(self) -> None:
        """Refuses a model or a loss that mixes the rows of the first batch; again during the run.

        Raises:
            UnsupportedRunError: It does, or the loss has not one entry for each example.
        """
        examples, targets = next(iter(self.batches()))
        rows = number_of_rows(examples)
        if rows is None:
            return
        is_training, shapes = True, ""
        variables = keras_api.trained(self.model)
        randomness: Callable[[Any], AbstractContextManager[None]] = contextlib.nullcontext

        def results(examples: Any, targets: Any) -> list[tf.Tensor]:
            with randomness(self.model):
                return parts_of(examples, targets)

        def parts_of(examples: Any, targets: Any) -> list[tf.Tensor]:
            nonlocal shapes
            outputs = self.model(examples, training=is_training)
            shapes = _shapes(targets, outputs)
            parts = [part for part in tf.nest.flatten(outputs) if number_of_rows(part) == rows]
            if self.loss is not None:
                losses = self._losses(targets, outputs)
                if losses.shape[0] != rows:
                    raise refusal(
                        f"Expected one loss for each of the {rows} examples of a batch, got "
                        f"{losses.shape[0]}; {shapes}. Return a vector with one entry for each."
                    )
                parts.append(losses)
            return [part for part in parts if part.dtype.is_floating]

        try:
            self._is_random |= not are_equal(results, examples, targets, variables)
        except Exception as error:  # of the user's, who calls the model in another way
            if self.is_the_step or (self._is_told and isinstance(error, UnsupportedRunError)):
                raise
            if self._is_told:
                raise refusal(
                    "Expected loss(targets, model(examples, training=True)) to give the losses of "
                    f"the first batch, got {error!r}: the steps cannot be compared with it. "
                    "Correct it, or leave loss out: what your loop trains is then your word."
                ) from error
            if self.loss is not None:  # compiled for something else than the step
                self.loss = None
                self.look()
            return
        is_training = not self._is_random
        if self._is_random and not are_equal(results, examples, targets, variables):
            randomness = same_random_numbers  # drawn in inference mode, too (a sampling layer)
        moved = rows_that_move(results, examples, targets, variables)
        if self._is_random and not moved:  # a layer may mix the rows of a training pass (MixUp)
            is_training, randomness = True, same_random_numbers
            if are_equal(results, examples, targets, variables):
                moved = rows_that_move(results, examples, targets, variables)
        if moved:
            raise refusal(
                f"Expected every example to have {'a loss' if self.loss else 'outputs'} of its "
                f"own, got other {moved} for the examples of the first batch when another example "
                f"of it is changed; {shapes}. Clipping bounds nothing then. Means, norms and "
                "ranks over the batch have to go, and targets must have the shape of the outputs "
                "that they are compared with."
            )
        self._is_looked_at = moved is not None

    def checked(self, words: Collection[str]) -> Iterator[str]:
        """What was looked at.

        Args:
            words: The user's about earlier steps of the run, which another process made.
        """
        if self._is_looked_at:
            what = "outputs" if self.loss is None else "losses"
            mode = " in inference mode" if self._is_random else ""
            yield (
                f"changing an example of the first batch changes no other example's {what} or "
                f"their gradients{mode}"
            )
        if AT_THE_WEIGHTS in words or not self.is_certain:
            return
        if self.is_the_step:
            yield "the loss of every step is the compiled one, at the weights that the step moves"
        else:
            yield (
                "the losses of every step are those of the given loss and model on the delivered "
                "batch, at the weights that the step moves (to 0.1 %)"
            )

    @property
    def left_open(self) -> Iterator[str]:
        """What is left to the user's word."""
        if self._is_random or not self.has_single_rows:
            yield EVERY_ENTRY
        if not self.is_certain:
            yield AT_THE_WEIGHTS


def _without_brackets(given: Any) -> Any:
    """The loss of `compile(loss=[loss])` or `loss={"output": loss}`; others as they are."""
    losses = tf.nest.flatten(given)
    return losses[0] if len(losses) == 1 else given


def _keras_loss(given: Any) -> Any:
    loss = _without_brackets(given)
    return None if tf.nest.is_nested(loss) else tf.keras.losses.get(loss)


def _is_same_loss(first: Any, second: Any) -> bool:
    """Whether these are the same losses, or of Keras or this package and of the same options."""
    if first is second:
        return True
    is_known = type(first).__module__ == tf.keras.losses.Loss.__module__
    is_known |= type(first) in ENVELOPES
    if not is_known or type(first) is not type(second):
        return isinstance(first, str) and first == second
    return bool(first.get_config() == second.get_config())


def _shapes(targets: Any, outputs: Any) -> str:
    def of(structure: Any) -> str:
        return ", ".join(str(tuple(part.shape)) for part in tf.nest.flatten(structure))

    return f"targets of shape {'-' if targets is None else of(targets)}, outputs {of(outputs)}"
