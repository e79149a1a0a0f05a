"""The noisy mean of clipped gradients, whoever takes the step: clip, sum, noise, divide."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from hidden_state_adapters.tf_privacy.gradients import ExampleGradients
from hidden_state_adapters.tf_privacy.noise import FreshNoise
from hidden_state_adapters.tf_privacy.refusals import refusal
from hidden_state_adapters.tf_privacy.rules import PlainSGD

# 1e8 times the number whose square is the smallest in float32: what is lost then cannot matter.
_SMALLEST_CLIP = 1.1e-11


class NoisyMean:
    """Clips gradients to C, adds them up, adds N(0, (zC)^2) and divides.

    In the place of TF Privacy's sum query, which works in float32, on one record at a time.

    Attributes:
        l2_norm_clip: C.
        noise_multiplier: z.
        rule: What is summed, and what is made of it.

    Args:
        rule: Likewise.
        l2_norm_clip: Likewise.
        noise_multiplier: Likewise.
    """

    def __init__(self, rule: PlainSGD, l2_norm_clip: float, noise_multiplier: float):
        self.rule, self.l2_norm_clip, self.noise_multiplier = rule, l2_norm_clip, noise_multiplier
        self._noise = FreshNoise()

    def check_precision(self, dtype: tf.DType) -> None:
        """Raises UnsupportedRunError if squares of gradients as short as C underflow."""
        if dtype == tf.float32 and self.l2_norm_clip < _SMALLEST_CLIP:
            raise refusal(
                f"Expected l2_norm_clip >= {_SMALLEST_CLIP:g} in float32, got "
                f"{self.l2_norm_clip:g}: squares of shorter gradients underflow, and they are not "
                "clipped. Scale the loss up, or train in float64."
            )

    def make_generator(self) -> None:
        """Makes the generator of the noise, if there is none yet."""
        self._noise.make_generator()

    def sums(
        self, found: ExampleGradients, dtype: tf.DType, rows: tf.Tensor | None = None
    ) -> tuple[list[list[Any]], tf.Tensor]:
        """The sums that the rule wants, and the longest gradient, infinite if one is not finite.

        Args:
            found: Of a batch.
            dtype: Of the gradients.
            rows: The first ones, which are examples; all others are padding. None for all.
        """
        norms, nothing = found.norms, tf.zeros_like(found.norms)
        is_example = None if rows is None else tf.range(tf.size(norms, tf.int64)) < rows

        def of_examples(values: tf.Tensor) -> tf.Tensor:
            return values if is_example is None else tf.where(is_example, values, nothing)

        norms = of_examples(norms)
        infinite = tf.constant(math.inf, tf.float64)
        lengths = tf.where(tf.math.is_finite(norms), norms, infinite)
        largest = tf.maximum(tf.reduce_max(lengths), tf.zeros([], tf.float64))  # of no rows, too
        factors = self.rule.factors(norms, self.l2_norm_clip, dtype)
        return [found.weighted_sum(of_examples(part)) for part in factors], largest

    def of_sums(self, sums: list[list[Any]], divisor: tf.Tensor) -> tuple[list[Any], Any]:
        """What the update is along, and what the rule keeps.

        Args:
            sums: Of all replicas.
            divisor: Float64.
        """
        noisy = self._noise.added_to(sums[0], self.l2_norm_clip * self.noise_multiplier)
        means = [part / tf.cast(divisor, part.dtype) for part in noisy]
        return self.rule.direction(means, sums[1:], divisor)

    @property
    def noise_is_fresh(self) -> Any:
        """Whether nobody set the generator since the noise before; after `of_sums`."""
        return self._noise.is_fresh
