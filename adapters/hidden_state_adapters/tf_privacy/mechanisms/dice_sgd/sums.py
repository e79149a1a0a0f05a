"""Both sums of a batch, clipped and cut off, the noise, and the error feedback."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hidden_state_adapters.tf_privacy.gradient_rows import sum_of_rows
from hidden_state_adapters.tf_privacy.mechanisms.dice_sgd.error import HiddenError
from hidden_state_adapters.tf_privacy.mechanisms.dice_sgd.feedback import (
    clip_factor,
    fed_back,
    row_norms,
    scaled,
)
from hidden_state_adapters.tf_privacy.query import WatchedGaussianSumQuery


class DiceSumQuery(WatchedGaussianSumQuery):
    r"""The sum that, divided by the number of rows n, is the noisy update of DiceSGD.

    .. math::
        \frac{n}{B} \Big(\sum_i \mathrm{clip}(g_i, C_1) + \mathcal{N}(0, (z C_1)^2 I)\Big) +
        n\, \mathrm{clip}(e, C_2)

    Attributes:
        rows: n, to be set under the trace before the loss is differentiated (1 for an empty batch).
        error_norm: After `noisy_sums`, the norm of e (float64).
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

    def noisy_sums(self, records: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """The sum above; notes the next error."""
        self._error.belongs_to(variables)
        norms = self._noted(row_norms(records))
        factors = clip_factor(norms, self.l2_norm_clip, records[0].dtype, automatic=self.automatic)
        sums = [sum_of_rows(part, factors) for part in records]
        # Not the difference of two sums: what is not clipped leaves exactly nothing.
        rests = [sum_of_rows(part, 1 - factors) for part in records]
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
        return [n + f for n, f in zip(noisy, scaled(fed, rows), strict=True)]
