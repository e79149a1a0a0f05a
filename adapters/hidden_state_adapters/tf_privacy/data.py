"""The examples of a run: read once into memory, each there once, and what they weigh."""

from __future__ import annotations

import hashlib
import inspect
import itertools
import logging
import weakref
from collections.abc import Mapping
from typing import Any, ClassVar

import attrs
import numpy as np
import tensorflow as tf

from hidden_state_accountants import UnsupportedRunError, validate
from hidden_state_adapters.public_numbers import warn_of_equal

_logger = logging.getLogger("hidden_state_accountants")
_ONE_EXAMPLE = "One record is one example: no view, window or augmentation of it a second time."
_WINDOWS, _LARGEST_SHIFT = 16, 64  # examples that are compared with the next one, and how


# Batches of Keras' own fit


class CyclicDataset(tf.data.Dataset):  # type: ignore[misc]
    """Equal batches in the same order in every pass.

    Attributes:
        used: Number of examples in the batches.
        batch_size: Size b of every batch.
        passes: Number of times that somebody asked for the batches.
        alive: All such datasets of the process.
    """

    alive: ClassVar[weakref.WeakSet[CyclicDataset]] = weakref.WeakSet()

    def __init__(self, dataset: Any, used: int, batch_size: int):
        self.used, self.batch_size, self.passes = used, batch_size, 0
        self._dataset = dataset
        super().__init__(dataset._variant_tensor)
        self.alive.add(self)

    def __iter__(self) -> Any:
        self.passes += 1
        return super().__iter__()

    @property
    def element_spec(self) -> Any:
        """Types of the elements."""
        return self._dataset.element_spec

    def _inputs(self) -> list[Any]:
        return [self._dataset]


def cyclic_dataset(
    x: Any, y: Any = None, *, batch_size: int, drop_remainder: bool = False
) -> CyclicDataset:
    """Returns a dataset whose batch k holds the examples k*b to (k+1)*b - 1 in every epoch.

    Pass the result to `Model.fit` as it is. For another order permute the examples beforehand,
    independently of their values; the order is public. One record is one example: no view, window
    or augmentation of it a second time, no mixing of two. Equal examples of a Dataset and windows
    that overlap are refused, equal ones of arrays give a warning; the rest is declared by you.

    Args:
        x: Examples as an array (first axis: examples), or a tuple or dictionary of arrays; or a
            tf.data.Dataset of single examples, which is read once into memory, so that a shuffle
            or an augmentation in it acts once and not in every epoch.
        y: Targets, likewise; None if x is a Dataset (of pairs) or there are no targets.
        batch_size: Batch size b, which must divide the number of examples.
        drop_remainder: True to leave out the last examples that do not fill a batch.

    Returns:
        A tf.data.Dataset of one epoch of batches of b examples each.

    Raises:
        UnsupportedRunError: The batches would be unequal, examples carry weights, a Dataset is
            batched or infinite, or an example is there twice.
        TypeError, ValueError: An argument has an impossible value.
    """
    batch_size = validate.integer("batch_size", batch_size, minimum=1)
    is_read = isinstance(x, tf.data.Dataset)
    if not is_read:
        arrays = tf.nest.map_structure(np.asarray, (x,) if y is None else (x, y))
    elif _is_batched(x.element_spec):
        raise UnsupportedRunError(
            "Expected a Dataset of single examples, got one whose elements have the shape of "
            "batches: every batch would count as one example. Pass dataset.unbatch()."
        )
    else:
        arrays, _ = _read(x, y)
        if len(arrays) > 2:
            raise UnsupportedRunError(
                f"Expected a Dataset of examples or of pairs (x, y), got {len(arrays)} components: "
                "example weights change the loss that is accounted. Drop them."
            )
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
        _logger.info("drop_remainder=True: the first %d of %d examples are used", used, given)
    _check_each_once(tf.nest.map_structure(lambda array: array[:used], arrays), is_read=is_read)
    options = tf.data.Options()
    options.deterministic = True
    dataset = tf.data.Dataset.from_tensor_slices(arrays).batch(batch_size, drop_remainder=True)
    return CyclicDataset(dataset.prefetch(2).with_options(options), used, batch_size)


# What is read into memory once


def _is_batched(spec: Any) -> bool:
    """Returns whether the elements of a Dataset have the shape of batches, as Keras' fit wants.

    All components of a batch have a first axis of one length, which is open where the last batch
    may be shorter. Of elements of one component only that tells.
    """
    shapes = [getattr(part, "shape", tf.TensorShape(None)) for part in tf.nest.flatten(spec)]
    if not all(shape.rank for shape in shapes):
        return False
    rows = {shape[0] for shape in shapes}
    return rows == {None} or (len(rows) == 1 and len(shapes) > 1)


def check_batched(source: Any, batch_size: Any) -> None:
    """Raises UnsupportedRunError if rows of a Dataset would count as examples, and need not be."""
    is_dataset = isinstance(source, tf.data.Dataset)
    if batch_size is None or not is_dataset or not _is_batched(source.element_spec):
        return
    rows = tf.nest.flatten(source.element_spec)[0].shape[0]
    if rows not in (None, batch_size):
        raise UnsupportedRunError(
            f"Expected batch_size = None or {rows} with a Dataset whose elements all have {rows} "
            f"rows, got {batch_size}: every row would count as an example. If each element is one, "
            "pass dataset.batch(batch_size)."
        )


def _read(source: Any, y: Any, steps: int | None = None) -> tuple[tuple[Any, ...], int | None]:
    """Returns the examples of a Dataset, Sequence or generator, and the rows of its first batch."""
    kind = type(source).__name__
    if y is not None:
        raise TypeError(f"Expected y = None when x is a {kind}, got targets. Use pairs in x.")
    is_batched = True
    if isinstance(source, tf.data.Dataset):
        if int(source.cardinality()) == tf.data.INFINITE_CARDINALITY:
            raise UnsupportedRunError(
                "Expected a finite Dataset, got an infinite one. Drop repeat()."
            )
        is_batched, items = _is_batched(source.element_spec), list(source.as_numpy_iterator())
    elif isinstance(source, tf.keras.utils.Sequence):
        items = [source[index] for index in range(len(source))]
    else:
        items = list(itertools.islice(source, (steps or 0) + 1))
        if len(items) != steps:
            raise UnsupportedRunError(
                f"Expected a generator that ends after steps_per_epoch = {steps} batches, got "
                f"{len(items)} or more: it is read once. Say the number of its batches."
            )
    if not items:
        raise UnsupportedRunError(f"Expected at least one example, got an empty {kind}.")
    items = [item if isinstance(item, tuple) else (item,) for item in items]
    columns = zip(*map(tf.nest.flatten, items), strict=True)
    joined = [(np.concatenate if is_batched else np.stack)(parts) for parts in columns]
    rows = len(tf.nest.flatten(items[0])[0]) if is_batched else None
    return tf.nest.pack_sequence_as(items[0], joined), rows


def _number_of_examples(arrays: Any) -> int:
    shapes = [tuple(array.shape) for array in tf.nest.flatten(arrays)]
    sizes = {int(shape[0]) if shape else 0 for shape in shapes}
    if len(sizes) != 1 or 0 in sizes:
        raise ValueError(
            f"Expected arrays with the same number of examples, at least one, got {sorted(sizes)}."
        )
    return sizes.pop()


def _check_each_once(arrays: Any, *, is_read: bool) -> None:
    """Raises UnsupportedRunError if examples, then targets, show that they are there twice.

    Equal ones of arrays may belong to different persons and give a warning. What is no array (a
    sparse matrix) is not looked at. `is_read` says whether they come from a pipeline.
    """
    given = [part for part in tf.nest.flatten(arrays) if part is not None]
    if not all(isinstance(part, np.ndarray | tf.Tensor) for part in given):
        return
    parts = [np.ascontiguousarray(part) for part in given]
    if any(map(_slides, parts[: len(tf.nest.flatten(arrays[0]))])):  # not the targets
        raise UnsupportedRunError(
            "Expected examples that do not overlap, got windows that begin with a part of the one "
            f"before: several examples would hold the same moment. {_ONE_EXAMPLE}"
        )
    rows = (b"".join(part.tobytes() for part in row) for row in zip(*parts, strict=True))
    if len(set(map(hash, rows))) == len(parts[0]):
        return
    if is_read:
        raise UnsupportedRunError(
            "Expected every example once, got equal ones from what was read (repeat, replacement, "
            f"a data set joined with itself). {_ONE_EXAMPLE} If they belong to different persons, "
            "pass arrays."
        )
    warn_of_equal()


def _slides(part: np.ndarray) -> bool:
    """Returns whether most of the first examples begin with what the one before them ends with.

    What is the same all along, as padding is, tells nothing.
    """
    first, axes = part[: _WINDOWS + 1], tuple(range(1, part.ndim))
    for shift in range(1, min(part.shape[1] // 2, _LARGEST_SHIFT) + 1 if axes else 0):
        ends, begins = first[:-1, shift:], first[1:, :-shift]
        varies = (ends != ends[:, :1]).any(axis=axes)
        if 2 * ((ends == begins).all(axis=axes) & varies).sum() > max(len(ends), 2):
            return True
    return False


# Weights


@attrs.frozen
class GivenWeights:
    """Factors of the losses, and so of the gradients, as fit was told.

    Attributes:
        of_classes: Number for every class, or None.
        of_examples: Number for every example, or None.
        bound: Bound on those that an example could have, or None.
    """

    of_classes: Mapping[Any, Any] | None = None
    of_examples: Any = None
    bound: float | None = None

    @property
    def largest(self) -> float | None:
        """Bound on the weight of every example that could be in the data; None if unknown."""
        of_class = 1.0 if self.of_classes is None else max(self._classes().values())
        if self.of_examples is None:
            return of_class
        return None if self.bound is None else of_class * self.bound

    def of(self, targets: Any, number: int) -> tf.Tensor | None:
        """Returns the weight of every example, float64, shape (examples,), or None."""
        if self.of_classes is None and self.of_examples is None:
            return None
        weights = np.ones(number)
        if self.of_classes is not None:
            weights = weights * self._by_class(targets)
        if self.of_examples is not None:
            weights = weights * self._by_example(number)
        return tf.constant(weights, tf.float64)

    def _classes(self) -> dict[int, float]:
        return {
            int(label): validate.real(f"class_weight[{label!r}]", weight, minimum=0)
            for label, weight in (self.of_classes or {}).items()
        }

    def _by_class(self, targets: Any) -> np.ndarray:
        known = self._classes()
        array = np.asarray(targets) if not tf.nest.is_nested(targets) else np.empty(0)
        if array.ndim == 2 and array.shape[1] > 1:
            array = array.argmax(axis=1)
        labels = array.reshape(-1).tolist()
        if array.size != len(array) or not set(labels) <= set(known):
            raise ValueError(
                "Expected targets that are classes of class_weight, or one-hot rows of them, got "
                f"others, of shape {array.shape}. Give every class a number."
            )
        return np.array([known[label] for label in labels])

    def _by_example(self, number: int) -> np.ndarray:
        weights = np.asarray(self.of_examples, dtype=np.float64)
        if weights.shape != (number,):
            raise ValueError(
                f"Expected sample_weight of shape ({number},), one for each example, got shape "
                f"{weights.shape}."
            )
        if not (np.isfinite(weights) & (weights >= 0)).all():
            raise ValueError("Expected every sample_weight to be finite and >= 0, got another one.")
        if self.bound is not None and not (weights <= self.bound).all():
            raise ValueError(
                f"Expected every sample_weight <= weight_bound = {self.bound:g}, got a larger one. "
                "It bounds the weights that an example could have, and is public."
            )
        return weights


# What a run holds


class HeldExamples:
    """A copy of the examples and their targets, which nobody else can write.

    Floating point numbers have the precision of Keras, as `Model.fit` converts them. A Dataset, a
    Sequence or a generator is read once.

    Attributes:
        given: Weights that fit was told, or that came with the examples.
        batch_size: Batch size that a pipeline says, or None.
    """

    def __init__(
        self, x: Any, y: Any, weights: GivenWeights | None = None, steps: int | None = None
    ):
        weights = weights or GivenWeights()
        self._source = x
        self.batch_size: int | None = None
        sources = (tf.data.Dataset, tf.keras.utils.Sequence)
        self._is_read = isinstance(x, sources) or inspect.isgenerator(x)
        if self._is_read:
            if weights.of_examples is not None:
                raise UnsupportedRunError(
                    f"Expected sample_weight = None when x is a {type(x).__name__}, got weights: "
                    "whose they are depends on its order. Let it give triples with the weight."
                )
            found, self.batch_size = _read(x, y, steps)
            if len(found) not in (2, 3):
                raise UnsupportedRunError(
                    "Expected pairs (example, target), or triples with weights, got "
                    f"{len(found)} parts."
                )
            x, y, *read = found
            if read:
                weights = attrs.evolve(weights, of_examples=read[0])
        self.given = weights
        self.x, self.y = _copied("x", x), _copied("y", y)
        self.number = _number_of_examples((self.x, self.y))
        self.weights = weights.of(self.y, self.number)
        self._digest = _digest((self.x, self.y, self.weights))
        self._inputs, self._targets = self.x, self.y

    def hold(self, inputs: Any, targets: Any) -> None:
        """Takes the inputs and targets of a step in the place of the examples, which are let go."""
        self.x, self._inputs, self._targets = None, inputs, targets

    def check_each_once(self) -> None:
        """Raises UnsupportedRunError, or logs a warning, if an example is there twice."""
        _check_each_once([self.x, self.y], is_read=self._is_read)

    def check_same(
        self, x: Any, y: Any, weights: GivenWeights, steps: int | None = None
    ) -> GivenWeights:
        """Returns the weights of the same examples; UnsupportedRunError if they are others."""
        is_source = self._is_read and x is self._source and y is None
        same_classes = weights.of_classes == self.given.of_classes
        if is_source and same_classes and weights.of_examples is None:
            return self.given  # of which this is a copy
        found = HeldExamples(x, y, weights, steps)
        if found._digest != self._digest:
            raise UnsupportedRunError(
                "Expected the examples of the run so far, got others: the run is about one data "
                "set. Compile again, which begins another run, composed with this one."
            )
        return found.given

    def first(self, rows: int) -> tuple[Any, Any]:
        """Returns the first examples and their targets."""
        found: tuple[Any, Any] = tf.nest.map_structure(lambda part: part[:rows], (self.x, self.y))
        return found

    def taken(self, indices: tf.Tensor) -> tuple[Any, ...]:
        """Returns the inputs and targets of a step on these examples, and weights if any."""
        kept = [self._inputs, self._targets]
        if self.weights is not None:
            kept.append(self.weights)
        return tuple(_gathered(structure, indices) for structure in kept)

    def given_targets(self, indices: tf.Tensor) -> Any:
        """Returns the targets of these examples as they were given."""
        return _gathered(self.y, indices)


def _gathered(structure: Any, indices: tf.Tensor) -> Any:
    return tf.nest.map_structure(lambda part: tf.gather(part, indices), structure)


def _copied(name: str, structure: Any) -> Any:
    def copied(part: Any) -> tf.Tensor:
        if not isinstance(part, np.ndarray | tf.Tensor) and not hasattr(part, "__array__"):
            raise UnsupportedRunError(
                f"Expected {name} as an array, or a structure of arrays, got {type(part).__name__}."
            )
        tensor = tf.convert_to_tensor(np.array(part))  # a copy, which it may share
        return tf.cast(tensor, tf.keras.backend.floatx()) if tensor.dtype.is_floating else tensor

    return tf.nest.map_structure(copied, structure)


def _digest(structure: Any) -> str:
    """Returns a hash of every bit of a structure of tensors, and of its form."""
    form = tf.nest.map_structure(lambda part: getattr(part, "shape", None), structure)
    found = hashlib.blake2b(repr(form).encode())
    for part in tf.nest.flatten(structure):
        array = np.empty(0) if part is None else part.numpy()
        found.update(str(array.dtype).encode())
        texts = array.dtype.kind == "O"
        found.update(repr(array.tolist()).encode() if texts else np.ascontiguousarray(array).data)
    return found.hexdigest()
