"""TF Privacy's Gaussian sum query, in the precision of the parameters and with two readings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dp_accounting
import tensorflow as tf
from tensorflow_privacy.privacy.dp_query.gaussian_query import GaussianSumQuery

from hidden_state_adapters.tf_privacy.noise import FreshNoise
from hidden_state_adapters.tf_privacy.refusals import refusal

# 1e8 times the number whose square is the smallest in float32: what is lost then cannot matter.
_SMALLEST_CLIP = 1.1e-11


class WatchedGaussianSumQuery(GaussianSumQuery):
    """Clips every record to `l2_norm_clip`, sums, adds noise, and tells what it saw.

    GaussianSumQuery works in float32 only. Here clip and noise have the precision of the records.
    The noise is `FreshNoise`.

    Attributes:
        largest_norm: After `get_noised_result`, the largest norm of a record before clipping
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

    def initial_sample_state(self, template: Any = None) -> Any:
        """Zero sums, and zero for the largest norm."""
        return super().initial_sample_state(template), tf.zeros([], tf.float64)

    def accumulate_record(self, params: Any, sample_state: Any, record: Any) -> Any:
        """Adds the clipped record to the sums."""
        sums, largest = sample_state
        if record[0].dtype == tf.float32 and self.l2_norm_clip < _SMALLEST_CLIP:
            raise refusal(
                f"Expected l2_norm_clip >= {_SMALLEST_CLIP:g} in float32, got "
                f"{self.l2_norm_clip:g}: squares of shorter gradients underflow, and they are not "
                "clipped. Scale the loss up, or train in float64."
            )
        clip = tf.constant(self.l2_norm_clip, record[0].dtype)
        clipped, norm = tf.clip_by_global_norm(record, clip)
        norm = tf.cast(norm, tf.float64)
        norm = tf.where(tf.math.is_finite(norm), norm, tf.constant(float("inf"), tf.float64))
        return tf.nest.map_structure(tf.add, sums, clipped), tf.maximum(largest, norm)

    def get_noised_result(self, sample_state: Any, global_state: Any) -> Any:
        """The sums plus independent Gaussian noise of standard deviation noise_multiplier * C."""
        sums, self.largest_norm = sample_state
        event = dp_accounting.GaussianDpEvent(self.noise_multiplier)
        return self._with_noise(sums), global_state, event

    def _with_noise(self, sums: Sequence[Any]) -> list[Any]:
        return self._noise.added_to(sums, self.l2_norm_clip * self.noise_multiplier)

    @property
    def noise_is_fresh(self) -> Any:
        """Whether nobody set the generator since the noise before; after `get_noised_result`."""
        return self._noise.is_fresh
