"""The clip of DiceSGD and the feedback of its error, whatever makes the sums of a batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hidden_state_adapters.tf_privacy.projection import joint_norm

# An automatic clip takes a vector for 0 below this part of its length, so that the factor stays
# within float32.
_SHORTEST = 1e-30


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


def fed_back(
    errors: Sequence[Any],
    rests: Sequence[Any],
    bound: float,
    *,
    divisor: tf.Tensor,
    automatic: bool,
) -> tuple[tf.Tensor, list[Any], list[Any]]:
    """The norm of the error e, clip(e), and the next error.

    Args:
        errors: e.
        rests: The sums over the batch of what the clip cut off of each gradient.
        bound: C_2.
        divisor: B, float64.
        automatic: Whether to normalise.
    """
    norm = joint_norm(errors)
    factor = clip_factor(norm, bound, errors[0].dtype, automatic=automatic)
    # ZBWH24, Algorithm 2, line 7, arXiv 2311.14632:
    # e <- [e - clip(e, C2)] + (1/B) sum_i [g_i - clip(g_i, C1)]
    kept, added = scaled(errors, 1 - factor), scaled(rests, 1 / divisor)
    return norm, scaled(errors, factor), [k + a for k, a in zip(kept, added, strict=True)]


def scaled(parts: Sequence[Any], factor: tf.Tensor) -> list[Any]:
    """All parts times a float64 factor, each in its precision."""
    return [tf.cast(factor, part.dtype) * part for part in parts]
