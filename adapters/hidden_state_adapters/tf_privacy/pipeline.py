"""How a tf.data.Dataset of examples was made, as far as TensorFlow tells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hidden_state_accountants import UnsupportedRunError

# By the names of TensorFlow's classes, which are private: what a function of the user makes whole
# datasets of, and what has a count of repetitions.
_REMADE = ("FlatMap", "Interleave", "ParallelInterleave", "GroupByWindow", "GroupByReducer")
_REPEATED = ("Repeat", "ShuffleAndRepeat")
_JOINED = ("Concatenate", "DirectedInterleave")
_SELECTED = ("Take", "TakeWhile", "Skip", "Shard", "Filter")


def check_single_examples(dataset: tf.data.Dataset) -> None:
    """Refuses a Dataset whose elements are batches, or in which examples come several times.

    What functions inside of it do (in map, flat_map or a generator) is not seen.

    Raises:
        UnsupportedRunError: The text says which.
    """
    if _is_grouped(dataset):
        raise UnsupportedRunError(
            "Expected a Dataset of single examples, got one that is already batched: every batch "
            "would count as one example. Pass dataset.unbatch(). (If a group is one example, a "
            "window of a time series for instance, pass the groups as arrays.)"
        )
    shapes = [getattr(spec, "shape", None) for spec in tf.nest.flatten(dataset.element_spec)]
    if all(shape is not None and shape.rank and shape[0] is None for shape in shapes):
        raise UnsupportedRunError(
            f"Expected a Dataset of single examples, got elements of shape {shapes[0]}, whose "
            "first dimension is open as that of batches is: every batch would count as one "
            "example. Pass dataset.unbatch(); or, if they are single examples, say how long they "
            "are with tf.ensure_shape."
        )
    if _is_repeated(dataset):
        raise UnsupportedRunError(
            "Expected a Dataset with every example once, got one with repeat(), or joined with a "
            "copy of itself (an augmented one?): an example would count as several, each protected "
            "by itself. Drop the copies: epochs are passes over the data, as many as "
            "fit(epochs=...) or the loop over batches() makes, and every example has one view."
        )


def taken_apart(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Its single examples, if its elements are batches that the pipeline surely made of them."""
    return dataset.unbatch() if _depth(dataset) == 1 else dataset


def _is_grouped(dataset: Any) -> bool:
    """Whether the elements are surely batches of what it was made from."""
    return _depth(dataset) > 0


def _depth(dataset: Any) -> int:
    """How many times the elements were put into batches that were not taken apart again."""
    name, inputs = _kind(dataset), _inputs(dataset)
    if name in _REMADE:
        return 0  # not known
    depth = max(map(_depth, inputs), default=0)
    if "Unbatch" in name:
        return max(depth - 1, 0)
    if "Rebatch" in name:  # other batches of the same
        return max(depth, 1)
    return depth + 1 if "Batch" in name else depth


def _is_repeated(dataset: Any) -> bool:
    if _kind(dataset) in _REPEATED and tf.get_static_value(dataset._count) != 1:
        return True
    inputs = _inputs(dataset)
    return _joins_copies(dataset, inputs) or any(map(_is_repeated, inputs))


def _joins_copies(dataset: Any, inputs: Sequence[Any]) -> bool:
    """Whether one dataset is joined with what was made of all of it (an augmented copy)."""
    if _kind(dataset) not in _JOINED:
        return False
    sources = [source for part in inputs for source in _whole_sources(part)]
    return len(set(sources)) < len(sources)


def _whole_sources(dataset: Any) -> set[int]:
    """What it has all examples of, by identity: each dataset on the way, and those before it."""
    found = {id(_of_version_2(dataset))}
    if _kind(dataset) not in _SELECTED:
        found.update(*map(_whole_sources, _inputs(dataset)))
    return found


def _kind(dataset: Any) -> str:
    return type(_of_version_2(dataset)).__name__.removeprefix("_").removesuffix("Dataset")


def _inputs(dataset: Any) -> list[Any]:
    """What its elements are made from."""
    dataset = _of_version_2(dataset)
    if _kind(dataset) == "DirectedInterleave":  # another input says which of these is next
        return list(dataset._data_inputs)
    return list(dataset._inputs())


def _of_version_2(dataset: Any) -> Any:
    """What an adapter to TensorFlow 1 holds."""
    return getattr(dataset, "_dataset", dataset)
