"""Both sums of a batch, clipped and cut off, the noise, and the error feedback."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import dp_accounting
import numpy as np
import tensorflow as tf

from hidden_state_adapters.tf_privacy.mechanisms.dice_sgd.error import HiddenError
from hidden_state_adapters.tf_privacy.query import WatchedGaussianSumQuery

# An automatic clip takes a vector for 0 below this part of its length, so that the factor stays
# within float32.
_SHORTEST = 1e-30


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
            tf.nest.map_structure(tf.add, sums, _scaled(record, factor)),
            # Not the difference of two sums: what is not clipped leaves exactly nothing.
            tf.nest.map_structure(tf.add, rests, _scaled(record, 1 - factor)),
            tf.maximum(largest, finite),
        )

    def get_noised_result(self, sample_state: Any, global_state: Any) -> Any:
        """The sum above; notes the next error."""
        sums, rests, self.largest_norm = sample_state
        errors, dtype = self._error.read(), sums[0].dtype
        rows = tf.cast(self.rows, tf.float64)
        divisor = rows if self.divisor is None else tf.constant(self.divisor, tf.float64)
        self.error_norm = joint_norm(errors)
        factor = clip_factor(
            self.error_norm, self.error_l2_norm_clip, dtype, automatic=self.automatic
        )
        # ZBWH24, Algorithm 2, lines 5 and 6, arXiv 2311.14632; TF Privacy divides by the rows
        noisy = self._with_noise(sums)
        if self.divisor is not None:
            noisy = _scaled(noisy, rows / divisor)
        result = [n + f for n, f in zip(noisy, _scaled(errors, rows * factor), strict=True)]
        # ZBWH24, Algorithm 2, line 7: e <- [e - clip(e, C2)] + (1/B) sum_i [g_i - clip(g_i, C1)]
        kept, added = _scaled(errors, 1 - factor), _scaled(rests, 1 / divisor)
        self.next_errors = [k + a for k, a in zip(kept, added, strict=True)]
        event = dp_accounting.NonPrivateDpEvent()  # a step is no event: DiceSgdDpEvent is the run
        return result, global_state, event


def joint_norm(parts: Sequence[Any]) -> tf.Tensor:
    """The L2 norm of all parts as one vector, in float64, without overflow or underflow (0-dim)."""
    doubles = [tf.cast(part, tf.float64) for part in parts]
    unit = tf.ones([], tf.float64)  # squares of float32 numbers are within float64
    if any(part.dtype.base_dtype == tf.float64 for part in parts):
        sizes = [tf.reduce_max(tf.abs(part)) for part in doubles]
        largest = tf.maximum(tf.reduce_max(tf.stack(sizes)), tf.zeros([], tf.float64))
        unit = tf.where(largest > 0, largest, unit)
        doubles = [part / unit for part in doubles]
    return unit * tf.sqrt(tf.add_n([tf.reduce_sum(tf.square(part)) for part in doubles]))


def clip_factor(norm: tf.Tensor, bound: float, dtype: Any, *, automatic: bool) -> tf.Tensor:
    r"""What a vector of length `norm` is multiplied with, in float64.

    .. math:: \min(1, C/|v|), \qquad \text{automatic: } C/|v|, \text{ and 0 at 0}

    Args:
        norm: float64.
        bound: C.
        dtype: Of the vector. An automatic clip takes a vector for 0 whose coordinates may have lost
            their precision. The result is never longer than C.
        automatic: Whether to normalise.
    """
    # ZBWH24, Section 2.1 and Appendix C.4, arXiv 2311.14632
    length = tf.constant(bound, tf.float64)
    if not automatic:
        return length / tf.maximum(norm, length)
    tiny = float(np.finfo(dtype.as_numpy_dtype).tiny)
    shortest = max(1e8 * math.sqrt(tiny), bound * _SHORTEST)
    return tf.where(norm >= shortest, length / norm, tf.zeros_like(norm))


def _scaled(parts: Sequence[Any], factor: tf.Tensor) -> list[Any]:
    return [tf.cast(factor, part.dtype) * part for part in parts]
