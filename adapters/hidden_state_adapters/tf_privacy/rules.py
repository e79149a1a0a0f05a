r"""What a private step makes of noisy gradients: plain SGD, or any optimizer of Keras.

A rule says what the gradients of the examples are multiplied with before they are added up, what
the update is along, how the variables move, and what it keeps. `PrivateStep` does all the rest.
Here are

.. math:: x \leftarrow \Pi_R\, \mathrm{prox}_{\eta h}((1 - \eta w) x - \eta \tilde g)

and what an optimizer of Keras does along :math:`\tilde g`; DiceSGD is a rule around another one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hidden_state_accountants import Regulariser
from hidden_state_adapters.tf_privacy import proximal
from hidden_state_adapters.tf_privacy.projection import project


class PlainSGD:
    """SGD with decoupled decay, proximal map and projection.

    Attributes:
        decay: w.

    Args:
        rate: Gives the learning rate of the next update.
        count: Notes an update, if it is told that it was made; by default nobody has to.
        decay: w.
        prox: h, or None.
        radius: R, or None for no projection.
    """

    def __init__(
        self,
        rate: Callable[[], Any],
        count: Callable[[tf.Tensor], None] = lambda fine: None,
        *,
        decay: float = 0.0,
        prox: Regulariser | None = None,
        radius: float | None = None,
    ):
        self.rate, self.count, self.decay = rate, count, decay
        self._prox, self._radius = prox, radius

    def factors(self, norms: tf.Tensor, clip: float, dtype: Any) -> list[tf.Tensor]:
        """What the gradient of each example is multiplied with, for each sum that is wanted.

        Args:
            norms: Of the gradients, float64.
            clip: C.
            dtype: Of the gradients.
        """
        bound = tf.constant(clip, tf.float64)
        return [bound / tf.maximum(norms, bound)]

    def direction(self, noisy: list[Any], rests: Sequence[Any], divisor: Any) -> tuple[Any, Any]:
        """What the update is along, and what `finish` is given.

        Args:
            noisy: The noisy mean of the clipped gradients.
            rests: The other sums.
            divisor: Of the mean, float64.
        """
        return noisy, None

    def problem(self, steps: tf.Tensor) -> tf.Tensor:
        """An int64 `Problem` of the step after so many, 0 if the rule knows of none."""
        return tf.zeros([], tf.int64)

    def move(
        self, variables: Sequence[Any], gradients: Sequence[Any], rate: Any, fine: tf.Tensor
    ) -> None:
        """Moves the variables if the step is taken."""
        for gradient, variable in zip(gradients, variables, strict=True):
            self.move_one(variable, gradient, tf.cast(rate, gradient.dtype), fine)

    def move_one(self, variable: Any, gradient: Any, rate: tf.Tensor, fine: tf.Tensor) -> Any:
        """Moves a variable, with a rate in its precision; returns the assignment."""
        old = variable.read_value()
        # tf.cast of the decay would go through float32.
        kept = old * (1 - rate * tf.constant(self.decay, old.dtype)) if self.decay else old
        new = proximal.after_prox(self._prox, kept - rate * gradient, rate)
        # tf.where and not a factor 0: a refused gradient may hold NaN.
        return variable.assign(tf.where(fine, new, old))

    def finish(
        self, variables: Sequence[Any], kept: Any, fine: tf.Tensor, rows: Any, largest: Any
    ) -> None:
        """What follows when all variables have moved; nothing of a refused step.

        Args:
            variables: All that are trained.
            kept: What `direction` gave.
            fine: Whether the step is taken.
            rows: Of the batch.
            largest: Its longest gradient.
        """
        self.count(fine)
        if self._radius is not None:
            project(variables, self._radius, fine)


class AnyOptimizer(PlainSGD):
    """An optimizer of Keras along the noisy gradients, which counts its updates itself.

    Args:
        rate: As for `PlainSGD`.
        apply: Updates variables along gradients.
    """

    def __init__(self, rate: Callable[[], Any], apply: Callable[[Any, Any], Any]):
        super().__init__(rate)
        self._apply = apply

    def move(
        self, variables: Sequence[Any], gradients: Sequence[Any], rate: Any, fine: tf.Tensor
    ) -> None:
        """As for `PlainSGD`."""

        def update() -> tf.Tensor:
            self._apply(gradients, variables)
            return tf.constant(True)

        tf.cond(fine, update, lambda: tf.constant(False))
