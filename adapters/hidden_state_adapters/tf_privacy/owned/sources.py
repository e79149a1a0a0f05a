"""Examples in batches, of a Sequence of Keras or of a generator, read into arrays once."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from hidden_state_adapters.tf_privacy.refusals import refusal


def comes_in_batches(source: Any) -> bool:
    """Whether it is a Sequence of Keras or a generator."""
    return isinstance(source, tf.keras.utils.Sequence) or inspect.isgenerator(source)


def read_batches(source: Any, y: Any, steps: int | None) -> tuple[tuple[Any, ...], int]:
    """Examples, targets and weights, if there are any, and the rows of the first batch.

    Which examples share a batch, and their order in later passes, is for the model to say; so every
    example is read once.

    Args:
        source: A Sequence of Keras, or a generator, of pairs of examples and targets, or triples
            with the weights of the examples.
        y: None.
        steps: The batches of a generator.

    Raises:
        TypeError: There are targets beside them.
        UnsupportedRunError: A generator has not as many batches as were said, so that examples may
            come again; or they are neither pairs nor triples.
    """
    if y is not None:
        raise TypeError(
            f"Expected y = None when x is a {type(source).__name__}, got targets. Use pairs in x."
        )
    is_sequence = isinstance(source, tf.keras.utils.Sequence)
    batches = [source[i] for i in range(len(source))] if is_sequence else _generated(source, steps)
    for batch in batches:
        if not isinstance(batch, tuple) or len(batch) not in (2, 3):
            raise refusal(
                "Expected batches that are pairs (examples, targets), or triples with weights, got "
                f"{_kind(batch)}."
            )
        if len(batch) != len(batches[0]):
            raise refusal("Expected weights in all batches or in none, got them in some.")
    if not batches:
        raise refusal("Expected at least one batch, got none.")
    found = tf.nest.map_structure(lambda *parts: _joined(parts), *batches)
    return found, int(np.shape(tf.nest.flatten(batches[0])[0])[0])


def _generated(source: Iterable[Any], steps: int | None) -> list[Any]:
    if steps is None:
        raise refusal(
            "Expected steps_per_epoch, the batches of one pass, with a generator, got None: it is "
            "read once, into memory, and has to end. Say the number, or pass arrays or a "
            "keras.utils.Sequence."
        )
    found = list(itertools.islice(source, steps + 1))
    if len(found) != steps:
        more = "more: it may go on with the same examples, each of which would count as several"
        raise refusal(
            f"Expected a generator of steps_per_epoch = {steps} batches, got "
            f"{more if len(found) > steps else len(found)}. Let it end after one pass; epochs "
            "are for fit to make."
        )
    return found


def _joined(parts: Any) -> np.ndarray:
    arrays = [np.asarray(part) for part in parts]
    shapes = list(dict.fromkeys(array.shape[1:] for array in arrays))
    if len(shapes) > 1 or not all(array.ndim for array in arrays):
        raise refusal(
            f"Expected examples of one shape in all batches, got {shapes[0]} and {shapes[-1]}. Pad "
            "the examples."
        )
    return np.concatenate(arrays)


def _kind(batch: Any) -> str:
    return f"{len(batch)} parts" if isinstance(batch, tuple) else type(batch).__name__
