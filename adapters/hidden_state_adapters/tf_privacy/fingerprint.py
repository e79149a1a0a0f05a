"""A number that changes when any bit of a list of tensors changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

# Odd constants of splitmix64 (Steele, Lea & Flood 2014), as signed 64-bit integers.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX = 0xBF58476D1CE4E5B9 - 2**64
_INTEGERS = {tf.float32: tf.int32, tf.float64: tf.int64}


def fingerprint(tensors: Sequence[Any]) -> tf.Tensor:
    """The int64 sum of a mixed hash of every entry and its position.

    Integer sums do not depend on the order of summation, so every device and compiler gives the
    same number.

    Args:
        tensors: float32 or float64 tensors or variables.
    """
    total = tf.zeros([], tf.int64)
    start = tf.ones([], tf.int64)
    for tensor in tensors:
        flat = tf.reshape(tf.convert_to_tensor(tensor), [-1])
        bits = tf.cast(tf.bitcast(flat, _INTEGERS[flat.dtype]), tf.int64)
        size = tf.size(flat, out_type=tf.int64)
        mixed = (bits + tf.range(start, start + size) * _GOLDEN) * _MIX
        mixed = _xor_shift(_xor_shift(mixed, 29) * _GOLDEN, 32)
        total += tf.reduce_sum(mixed)
        start += size
    return total


def _xor_shift(values: tf.Tensor, bits: int) -> tf.Tensor:
    shifted = tf.bitwise.right_shift(values, tf.constant(bits, tf.int64))
    return tf.bitwise.bitwise_xor(values, shifted)
