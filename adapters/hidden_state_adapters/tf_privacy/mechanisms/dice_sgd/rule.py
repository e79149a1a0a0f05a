r"""The update of DiceSGD, around the rule that follows it: what the clip cuts off is fed back.

.. math::
    v = \frac1B \sum_i \mathrm{clip}(g_i, C_1) + \mathrm{clip}(e, C_2), \quad
    e \leftarrow e + \frac1B \sum_i g_i - v
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hidden_state_adapters.tf_privacy.mechanisms.dice_sgd.error import HiddenError
from hidden_state_adapters.tf_privacy.mechanisms.dice_sgd.feedback import clip_factor, fed_back
from hidden_state_adapters.tf_privacy.rules import PlainSGD


class DiceRule(PlainSGD):
    """A rule along the noisy v.

    Attributes:
        error_clip: C_2.
        automatic: Whether both clips normalise.
        error_norm: After `direction`, the norm of e, in the trace that called it.

    Args:
        inner: Moves the variables.
        error: Where e is kept.
        error_clip: C_2.
        automatic: Likewise.
        iterations: Keras' count of the updates; None if who takes the steps asks for `problem`
            by itself.

    Source: Zhang, Bu, Wu, Hong 2024 (arXiv 2311.14632), Algorithms 2 and 4.
    """

    def __init__(
        self,
        inner: PlainSGD,
        error: HiddenError,
        *,
        error_clip: float,
        automatic: bool,
        iterations: Any = None,
    ):
        super().__init__(inner.rate, inner.count, decay=inner.decay)
        self._inner, self._error, self._iterations = inner, error, iterations
        self.error_clip, self.automatic = error_clip, automatic
        self.error_norm: Any = None

    def factors(self, norms: tf.Tensor, clip: float, dtype: Any) -> list[tf.Tensor]:
        """Of the clipped gradients, and of what the clip cuts off."""
        factors = clip_factor(norms, clip, dtype, automatic=self.automatic)
        # Not the difference of two sums: what is not clipped leaves exactly nothing.
        return [factors, 1 - factors]

    def direction(self, noisy: list[Any], rests: Sequence[Any], divisor: Any) -> tuple[Any, Any]:
        """The noisy mean and the clipped error; the next error."""
        self.error_norm, fed, errors = fed_back(
            self._error.read(),
            rests[0],
            self.error_clip,
            divisor=divisor,
            automatic=self.automatic,
        )
        # ZBWH24, Algorithm 2, lines 5 and 6, arXiv 2311.14632
        return [n + f for n, f in zip(noisy, fed, strict=True)], errors

    def problem(self, steps: tf.Tensor) -> tf.Tensor:
        """Whether the error is that of the step before."""
        found = self._error.problem(steps, self._iterations, self.error_norm)
        self._error.begin(self._iterations)
        return found

    def move(
        self, variables: Sequence[Any], gradients: Sequence[Any], rate: Any, fine: tf.Tensor
    ) -> None:
        """By the inner rule."""
        self._inner.move(variables, gradients, rate, fine)

    def finish(
        self, variables: Sequence[Any], kept: Any, fine: tf.Tensor, rows: Any, largest: Any
    ) -> None:
        """What the inner rule does, and the error moves."""
        self._inner.finish(variables, None, fine, rows, largest)
        self._error.finish(is_fine=fine, rows=rows, largest=largest, errors=kept)
