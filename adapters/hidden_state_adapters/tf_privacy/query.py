"""TF Privacy's Gaussian sum query, in the precision of the parameters and with two readings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow_privacy.privacy.dp_query.gaussian_query import GaussianSumQuery

from hidden_state_adapters.tf_privacy.gradient_rows import squared_lengths, sum_of_rows
from hidden_state_adapters.tf_privacy.noise import FreshNoise
from hidden_state_adapters.tf_privacy.refusals import refusal

# 1e8 times the number whose square is the smallest in float32: what is lost then cannot matter.
_SMALLEST_CLIP = 1.1e-11


class WatchedGaussianSumQuery(GaussianSumQuery):
    """Clips every record to `l2_norm_clip`, sums, adds noise, and tells what it saw.

    GaussianSumQuery works in float32 only, and on one record at a time. Here clip and noise have
    the precision of the records. The noise is `FreshNoise`.

    Attributes:
        largest_norm: After `noisy_sums`, the largest norm of a record before clipping
            (float64, infinite if a record was not finite); a tensor of the trace that called it.

    Args:
        l2_norm_clip: C.
        noise_multiplier: Standard deviation of the noise on the sum over C.
    """

    def __init__(self, l2_norm_clip: float, noise_multiplier: float):
        super().__init__(l2_norm_clip, l2_norm_clip * noise_multiplier)
        self.l2_norm_clip = l2_norm_clip
        self.noise_multiplier = noise_multiplier
        self.largest_norm: Any = None
        self._noise = FreshNoise()

    def noisy_sums(self, records: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """The sums of the clipped records plus independent noise of deviation z C.

        All records are clipped at once, where TF Privacy's loop takes one after the other.

        Args:
            records: Their gradients by every variable, each with an axis of records before the axes
                of the variable.
            variables: That the gradients are of.
        """
        if records[0].dtype == tf.float32 and self.l2_norm_clip < _SMALLEST_CLIP:
            raise refusal(
                f"Expected l2_norm_clip >= {_SMALLEST_CLIP:g} in float32, got "
                f"{self.l2_norm_clip:g}: squares of shorter gradients underflow, and they are not "
                "clipped. Scale the loss up, or train in float64."
            )
        norms = self._noted(tf.sqrt(tf.add_n([squared_lengths(part) for part in records])))
        clip = tf.constant(self.l2_norm_clip, tf.float64)
        factors = clip / tf.maximum(norms, clip)
        return self._with_noise([sum_of_rows(part, factors) for part in records])

    def _noted(self, norms: tf.Tensor) -> tf.Tensor:
        """The norms of the records, of which the largest one is kept."""
        infinite, none = tf.constant(math.inf, tf.float64), tf.zeros([], tf.float64)
        largest = tf.reduce_max(tf.where(tf.math.is_finite(norms), norms, infinite))
        self.largest_norm = tf.maximum(largest, none)  # of no rows it is none
        return norms

    def _with_noise(self, sums: Sequence[Any]) -> list[Any]:
        return self._noise.added_to(sums, self.l2_norm_clip * self.noise_multiplier)

    @property
    def noise_is_fresh(self) -> Any:
        """Whether nobody set the generator since the noise before; after `noisy_sums`."""
        return self._noise.is_fresh
