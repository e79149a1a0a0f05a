"""The rows of a batch do not depend on each other: one is changed, and the others are looked at.

Clipping bounds what one example does to its own gradient. If an example changes the outputs of the
others (a mean or a norm over the batch, targets that are broadcast), nothing is bounded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

from hidden_state_adapters.tf_privacy import keras_api

_FACTOR = 1e3  # by which the changed row sticks out: it moves a mean of a million rows visibly
_RELATIVE = 1e-5  # rounding of a row that was computed twice in the same place of equal batches

Function = Callable[[Any, Any], Sequence[tf.Tensor]]
_Batch = tuple[Any, Any]  # examples and targets


def number_of_rows(batch: Any) -> int | None:
    """Rows of a structure of tensors or arrays; None if they do not agree or are not dense."""
    parts = tf.nest.flatten(batch)
    if not all(isinstance(part, np.ndarray | tf.Tensor) and len(part.shape) for part in parts):
        return None
    rows = {int(part.shape[0]) for part in parts}
    return rows.pop() if len(rows) == 1 else None


def rows_that_move(
    function: Function, examples: Any, targets: Any, variables: Sequence[Any]
) -> str | None:
    """What a changed row of a batch moves in the other rows.

    Looked at are the results and their gradient, because at zero weights the results say nothing.

    Args:
        function: Maps examples and targets to tensors with a row for each example.
        examples: A batch, a structure of dense tensors.
        targets: Likewise, or None.
        variables: Whose gradients are looked at.

    Returns:
        "" if nothing moves; None if this could not be looked at.
    """
    rows = number_of_rows(examples)
    if rows is None:
        return None
    if rows == 1:
        return ""
    is_looked_at = False
    for index, batch, changed in _changes(examples, targets, rows):
        others = np.delete(np.arange(rows), index)
        try:
            values, gradients = _look(function, batch, others, variables)
            new_values, new_gradients = _look(function, changed, others, variables)
        except Exception:  # of the user's: a number may stand for a word, or be limited
            continue
        if not values:
            return None
        if not are_same(values, new_values):
            return "results"
        if not are_same(gradients, new_gradients) and _are_finite(new_gradients):
            return "gradients"
        is_looked_at |= changed[0] is not examples
    return "" if is_looked_at else None


@contextlib.contextmanager
def same_random_numbers(model: Any) -> Iterator[None]:
    """A model draws the same random numbers whenever this is entered, and goes on as before."""
    state = context.context()
    seed, generator = state._seed, getattr(state, "_rng", None)  # of seeds; None without a seed
    tf.random.set_seed(0)
    own = keras_api.random_states(model)
    before = [variable.numpy() for variable in own]
    for variable in own:
        variable.assign(tf.zeros_like(variable))
    try:
        yield
    finally:
        for variable, value in zip(own, before, strict=True):
            variable.assign(value)
        state._seed, state._rng = seed, generator


def are_equal(function: Function, examples: Any, targets: Any, variables: Sequence[Any]) -> bool:
    """Whether the function gives the same results twice, and the same gradients of them."""
    first, second = (_look(function, (examples, targets), None, variables) for _ in range(2))
    return all(map(are_same, first, second))


def _look(
    function: Function, batch: _Batch, rows: np.ndarray | None, variables: Sequence[Any]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Results of these rows (None: of all), and the gradient of a fixed mixture of them."""
    random = np.random.default_rng(0)
    with tf.GradientTape() as tape:
        parts = [part if rows is None else tf.gather(part, rows) for part in function(*batch)]
        mixture = tf.zeros([], tf.float64)
        for part in parts:
            weighted = part * random.normal(size=part.shape)
            mixture += tf.cast(tf.reduce_sum(weighted), tf.float64)
    gradients = tape.gradient(mixture, variables, unconnected_gradients="zero")
    return [part.numpy() for part in parts], [tf.convert_to_tensor(g).numpy() for g in gradients]


def _changes(examples: Any, targets: Any, rows: int) -> Iterator[tuple[int, _Batch, _Batch]]:
    """Triples of a row, a batch, and the batch in which this row is another one.

    Whole numbers may have an end that every row touches (8-bit pixels), so they are halved, too.
    """
    batch, last = (examples, targets), rows - 1
    for index, new_row in ((0, _large), (last, _large), (0, _other), (last, _zeros)):
        changed = _changed(examples, index, new_row), _changed(targets, index, _other)
        yield index, batch, changed
    if targets is not None:
        yield last, batch, (examples, _changed(targets, last, _large))
    if any(np.array(part).dtype.kind in "iu" for part in tf.nest.flatten(examples)):
        halved = tf.nest.map_structure(_halved, examples)
        yield last, (halved, targets), (_changed(halved, last, _large), targets)


def _changed(batch: Any, index: int, new_row: Callable[[np.ndarray, int], Any]) -> Any:
    def change(part: Any) -> tf.Tensor:
        array = np.array(part)
        is_number = array.dtype.kind in "fiu"  # otherwise a word or a truth value that occurs
        array[index] = (new_row if is_number else _other)(array, index)
        return tf.convert_to_tensor(array)

    return None if batch is None else tf.nest.map_structure(change, batch)


def _halved(part: Any) -> Any:
    return tf.convert_to_tensor(part) // 2 if np.array(part).dtype.kind in "iu" else part


def _large(array: np.ndarray, index: int) -> np.ndarray:
    size = _FACTOR * max(1.0, float(np.abs(array.astype(np.float64)).max()))
    if array.dtype.kind == "f":
        return array[index] + size
    return np.full_like(array[index], min(size, np.iinfo(array.dtype).max))


def _zeros(array: np.ndarray, index: int) -> np.ndarray:
    return np.zeros_like(array[index])


def _other(array: np.ndarray, index: int) -> Any:
    """The first row that is not this one; if there is none, a number that occurs nowhere."""
    differs = (array != array[index]).reshape(len(array), -1).any(axis=1)
    if differs.any():
        return array[np.argmax(differs)]
    return array[index] == 0 if array.dtype.kind in "fiu" else array[index]


def are_same(first: Sequence[np.ndarray], second: Sequence[np.ndarray]) -> bool:
    """Whether these are the same arrays, up to what two computations of them differ by."""
    return all(
        a.shape == b.shape
        and np.allclose(a, b, rtol=_RELATIVE, atol=_RELATIVE * _size(a), equal_nan=True)
        for a, b in zip(first, second, strict=True)
    )


def _size(part: np.ndarray) -> float:
    finite = np.abs(part[np.isfinite(part)])
    return float(finite.max()) if finite.size else 1.0


def _are_finite(parts: Sequence[np.ndarray]) -> bool:
    return all(np.isfinite(part).all() for part in parts)
