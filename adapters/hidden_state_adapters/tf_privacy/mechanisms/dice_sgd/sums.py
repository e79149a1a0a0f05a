"""Both sums of a batch, clipped and cut off, the noise, and the error feedback."""

from __future__ import annotations

from typing import Any

import dp_accounting
import tensorflow as tf

from hidden_state_adapters.tf_privacy.mechanisms.dice_sgd.error import HiddenError
from hidden_state_adapters.tf_privacy.mechanisms.dice_sgd.feedback import (
    clip_factor,
    fed_back,
    joint_norm,
    scaled,
)
from hidden_state_adapters.tf_privacy.query import WatchedGaussianSumQuery


class DiceSumQuery(WatchedGaussianSumQuery):
    r"""The sum that, divided by the number of rows n, is the noisy update of DiceSGD.

    .. math::
        \frac{n}{B} \Big(\sum_i \mathrm{clip}(g_i, C_1) + \mathcal{N}(0, (z C_1)^2 I)\Big) +
        n\, \mathrm{clip}(e, C_2)

    Attributes:
        rows: n, to be set under the trace before the records come (1 for an empty batch).
        error_norm: After `get_noised_result`, the norm of e (float64).
        next_errors: Likewise, the next error.

    Args:
        l2_norm_clip: C_1.
        noise_multiplier: z.
        error_l2_norm_clip: C_2.
        automatic: Whether both clips normalise.
        divisor: B; None for the number of rows.
        error: Where e is kept.
    """

    def __init__(
        self,
        l2_norm_clip: float,
        noise_multiplier: float,
        *,
        error_l2_norm_clip: float,
        automatic: bool,
        divisor: int | None,
        error: HiddenError,
    ):
        super().__init__(l2_norm_clip, noise_multiplier)
        self.error_l2_norm_clip = error_l2_norm_clip
        self.automatic = automatic
        self.divisor = divisor
        self._error = error
        self.rows: Any = None
        self.error_norm: Any = None
        self.next_errors: list[Any] = []

    def initial_sample_state(self, template: Any = None) -> Any:
        """Zero sums of both kinds, and zero for the largest norm."""
        self._error.belongs_to(template)
        sums, largest = super().initial_sample_state(template)
        return sums, tf.nest.map_structure(tf.zeros_like, sums), largest

    def accumulate_record(self, params: Any, sample_state: Any, record: Any) -> Any:
        """Adds the clipped record to one sum and what is cut off to the other."""
        sums, rests, largest = sample_state
        norm = joint_norm(record)
        factor = clip_factor(norm, self.l2_norm_clip, record[0].dtype, automatic=self.automatic)
        finite = tf.where(tf.math.is_finite(norm), norm, tf.constant(float("inf"), tf.float64))
        return (
            tf.nest.map_structure(tf.add, sums, scaled(record, factor)),
            # Not the difference of two sums: what is not clipped leaves exactly nothing.
            tf.nest.map_structure(tf.add, rests, scaled(record, 1 - factor)),
            tf.maximum(largest, finite),
        )

    def get_noised_result(self, sample_state: Any, global_state: Any) -> Any:
        """The sum above; notes the next error."""
        sums, rests, self.largest_norm = sample_state
        rows = tf.cast(self.rows, tf.float64)
        divisor = rows if self.divisor is None else tf.constant(self.divisor, tf.float64)
        self.error_norm, fed, self.next_errors = fed_back(
            self._error.read(),
            rests,
            self.error_l2_norm_clip,
            divisor=divisor,
            automatic=self.automatic,
        )
        # ZBWH24, Algorithm 2, lines 5 and 6, arXiv 2311.14632; TF Privacy divides by the rows
        noisy = self._with_noise(sums)
        if self.divisor is not None:
            noisy = scaled(noisy, rows / divisor)
        result = [n + f for n, f in zip(noisy, scaled(fed, rows), strict=True)]
        event = dp_accounting.NonPrivateDpEvent()  # a step is no event: DiceSgdDpEvent is the run
        return result, global_state, event
