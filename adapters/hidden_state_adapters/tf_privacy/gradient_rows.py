"""Gradients of every example, as rows: their lengths, and sums of rows times factors."""

from __future__ import annotations

import tensorflow as tf


def squared_lengths(rows: tf.Tensor) -> tf.Tensor:
    """The squared L2 norm of every row, in float64 across all axes but the last.

    Args:
        rows: Shape (rows, ...).
    """
    if rows.shape.rank == 1:  # of a variable that is a number
        return tf.square(tf.cast(rows, tf.float64))
    squares = tf.cast(tf.reduce_sum(tf.square(rows), -1), tf.float64)
    return tf.reduce_sum(squares, list(range(1, squares.shape.rank)))


def sum_of_rows(rows: tf.Tensor, factors: tf.Tensor) -> tf.Tensor:
    """The sum of rows, each times its factor of shape (rows,), in the precision of the rows."""
    return tf.tensordot(tf.cast(factors, rows.dtype), rows, 1)
