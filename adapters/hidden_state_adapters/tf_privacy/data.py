"""Batches of the same examples in the same order in every epoch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import tensorflow as tf

from hidden_state_accountants import UnsupportedRunError, validate
from hidden_state_adapters.tf_privacy.equal_examples import warn_of_equal_examples
from hidden_state_adapters.tf_privacy.pipeline import check_single_examples

_logger = logging.getLogger("hidden_state_accountants")
_MARK = "_hidden_state_cyclic_batches"


@attrs.frozen
class CyclicBatches:
    """What a dataset of `cyclic_dataset` holds.

    Attributes:
        given: Number of examples that were given.
        used: Number of examples in the batches.
        batch_size: b, the same for every batch.
    """

    given: int
    used: int
    batch_size: int


def cyclic_dataset(
    x: Any, y: Any = None, *, batch_size: int, drop_remainder: bool = False
) -> tf.data.Dataset:
    """Batch k of every epoch holds the examples k*b to (k+1)*b - 1, in this order.

    Pass the result to `Model.fit` as it is. Transformed datasets (`map`, `shuffle`, `repeat`) are
    not recognised, because their batches may differ: transform the examples before. For another
    order permute the examples beforehand, independently of their values; the order is public.
    A warning is logged if examples are equal: each is protected by itself.

    Args:
        x: Examples as an array (first axis: examples), or a tuple or dictionary of arrays; or a
            tf.data.Dataset of single examples, each once, which is read once into memory, so that
            a shuffle or an augmentation in it acts once and not in every epoch.
        y: Targets, likewise; None if x is a Dataset (of pairs) or there are no targets.
        batch_size: b; must divide the number of examples.
        drop_remainder: Leaves out the last examples that do not fill a batch, in every epoch.

    Returns:
        A tf.data.Dataset of one epoch of batches of b examples each.

    Raises:
        UnsupportedRunError: The batches would be unequal, examples carry weights, or a Dataset is
            batched or repeated.
        TypeError, ValueError: An argument has an impossible value.
    """
    batch_size = validate.integer("batch_size", batch_size, minimum=1)
    if isinstance(x, tf.data.Dataset):
        if y is not None:
            raise TypeError("Expected y = None when x is a Dataset, got targets. Use pairs in x.")
        arrays = in_memory(x)
    else:
        arrays = (x,) if y is None else (x, y)
        arrays = tf.nest.map_structure(np.asarray, arrays)
    given = _number_of_examples(arrays)
    used = given // batch_size * batch_size
    if used == 0:
        raise UnsupportedRunError(
            f"Expected batch_size <= {given}, the number of examples, got {batch_size}. Lower it."
        )
    if used != given:
        if not drop_remainder:
            raise UnsupportedRunError(
                f"Expected a batch_size that divides the {given} examples, got {batch_size}: "
                "cyclic batches must all have the same size. Choose another size, or pass "
                f"drop_remainder=True to use only the first {used} examples."
            )
        _logger.info(
            "drop_remainder=True: batches of %d use the first %d of %d examples; dataset_size is "
            "%d", batch_size, used, given, used,
        )  # fmt: skip
    warn_of_equal_examples(tf.nest.map_structure(lambda array: array[:used], arrays))
    options = tf.data.Options()
    options.deterministic = True
    dataset = (
        tf.data.Dataset.from_tensor_slices(arrays)
        .batch(batch_size, drop_remainder=True)
        .prefetch(2)
        .with_options(options)
    )
    setattr(dataset, _MARK, CyclicBatches(given, used, batch_size))
    return dataset


def cyclic_batches(dataset: Any) -> CyclicBatches | None:
    """What `cyclic_dataset` returned; None for anything else, transformed datasets among them."""
    return getattr(dataset, _MARK, None)


def in_memory(dataset: tf.data.Dataset, *, may_have_weights: bool = False) -> Any:
    """The examples of a Dataset of single ones, or of pairs with their targets, as arrays.

    Args:
        dataset: Finite, each example once.
        may_have_weights: Whether triples with a weight are taken as well.

    Raises:
        UnsupportedRunError: It is batched, repeated, infinite or empty, or has weights
            that it may not have.
    """
    if int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY:
        raise UnsupportedRunError(
            "Expected a finite Dataset, got an infinite one. Drop repeat(): Model.fit repeats the "
            "epochs."
        )
    check_single_examples(dataset)
    structure = dataset.element_spec
    if not isinstance(structure, tuple):
        dataset = dataset.map(lambda example: (example,))
        structure = dataset.element_spec
    if len(structure) > 2 + may_have_weights:
        raise UnsupportedRunError(
            f"Expected a Dataset of examples or of pairs (x, y), got {len(structure)} components: "
            "example weights change the loss that is accounted. Drop them."
        )
    examples = list(dataset.as_numpy_iterator())
    if not examples:
        raise UnsupportedRunError("Expected at least one example, got an empty Dataset.")
    columns = zip(*(tf.nest.flatten(example) for example in examples), strict=True)
    arrays = [_stacked(column) for column in columns]
    return tf.nest.pack_sequence_as(structure, arrays)


def _stacked(parts: Sequence[Any]) -> np.ndarray:
    shapes = dict.fromkeys(np.shape(part) for part in parts)
    if len(shapes) > 1:
        first, other, *_ = shapes
        raise UnsupportedRunError(
            f"Expected examples of one shape, got {first} and {other}. If they are batches, of "
            "which the last one is smaller, pass dataset.unbatch(); else pad the examples."
        )
    return np.stack(parts)


def _number_of_examples(arrays: Any) -> int:
    sizes = {len(array) if array.ndim else 0 for array in tf.nest.flatten(arrays)}
    if len(sizes) != 1 or 0 in sizes:
        raise ValueError(
            f"Expected arrays with the same number of examples, at least one, got {sorted(sizes)}."
        )
    return sizes.pop()
