"""Gradients of every example, as rows: their lengths, and sums of rows times factors."""

from __future__ import annotations

import tensorflow as tf

_LONGEST_BLOCK = 256  # entries


def squared_lengths(rows: tf.Tensor) -> tf.Tensor:
    """The squared L2 norm of every row, float64, shape (rows,).

    Squares are added up in the precision of the rows within blocks of at most 256 entries, which
    is as fast as it gets, and in float64 across them, so that no long sum is too small.

    Args:
        rows: Shape (rows, ...).
    """
    entries = rows.shape[1:].num_elements()
    count, block = -1, 1  # where the shape is not known
    if entries is not None:
        block = max(size for size in range(1, _LONGEST_BLOCK + 1) if entries % size == 0)
        count = entries // block  # -1 is none where there are no rows
    blocks = tf.reshape(rows, [tf.shape(rows)[0], count, block])
    return tf.reduce_sum(tf.cast(tf.reduce_sum(tf.square(blocks), 2), tf.float64), 1)


def sum_of_rows(rows: tf.Tensor, factors: tf.Tensor) -> tf.Tensor:
    """The sum of rows, each times its factor of shape (rows,), in the precision of the rows."""
    return tf.tensordot(tf.cast(factors, rows.dtype), rows, 1)
