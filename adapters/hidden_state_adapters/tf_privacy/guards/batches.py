"""The batches of a fit or of a loop, as they are delivered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf


def batches_of(x: Any, y: Any, batch_size: int) -> Iterator[tuple[Any, Any]]:
    """Pairs of examples and targets (None if there are none), in the order of the data.

    Args:
        x: A Dataset of batches, or a structure of arrays.
        y: Targets, if `x` is no Dataset.
        batch_size: Of the batches of arrays.
    """
    if isinstance(x, tf.data.Dataset):
        yield from map(examples_and_targets, x)
        return
    rows = int(tf.nest.flatten(x)[0].shape[0])
    for start in range(0, rows, batch_size):
        part = slice(start, start + batch_size)
        examples, targets = (
            None if arrays is None else tf.nest.map_structure(_rows(part), arrays)
            for arrays in (x, y)
        )
        yield examples, targets


def _rows(part: slice) -> Callable[[Any], tf.Tensor]:
    def of(array: Any) -> tf.Tensor:
        tensor = tf.convert_to_tensor(array[part])  # floating point as fit does it
        return tf.cast(tensor, tf.keras.backend.floatx()) if tensor.dtype.is_floating else tensor

    return of


def examples_and_targets(batch: Any) -> tuple[Any, Any]:
    """The two parts of a batch of a Dataset."""
    examples, targets, _ = tf.keras.utils.unpack_x_y_sample_weight(batch)
    return examples, targets
