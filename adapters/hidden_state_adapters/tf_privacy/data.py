"""The examples of a run: where they come from, that each is there once, and what they weigh."""

from __future__ import annotations

import hashlib
import inspect
import itertools
import logging
import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import tensorflow as tf

from hidden_state_accountants import UnsupportedRunError, validate
from hidden_state_adapters.public_numbers import warn_of_equal
from hidden_state_adapters.tf_privacy.refusals import refusal

_logger = logging.getLogger("hidden_state_accountants")
# By the names of TensorFlow's classes, which are private: what a function of the user makes whole
# datasets of, what has a count of repetitions, what joins, and what takes a part.
_REMADE = ("FlatMap", "Interleave", "ParallelInterleave", "GroupByWindow", "GroupByReducer")
_REPEATED = ("Repeat", "ShuffleAndRepeat")
_JOINED = ("Concatenate", "DirectedInterleave")
_SELECTED = ("Take", "TakeWhile", "Skip", "Shard", "Filter")
_ONE_EXAMPLE = "One record is one example: no view, window or augmentation of it a second time, "
_ONE_EXAMPLE += "no mixing of two."
_OVERLAPPING = (
    "Expected examples that do not overlap, got windows that do, each of which begins with a part "
    "of the one before it: what happened at one time would be in several examples, each protected "
    f"by itself. {_ONE_EXAMPLE} Move a window by its whole length."
)
_LOOKED_AT = 2**16  # examples of a part of a zip
_WINDOWS, _LARGEST_SHIFT = 16, 64  # examples that are compared with the next one, and how


# Batches of somebody else's fit


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
    One record is one example: no view, window or augmentation of it a second time, no mixing of
    two. Equal examples of a Dataset and windows that overlap are refused, equal ones of arrays give
    a warning; the rest is declared by you.

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
        UnsupportedRunError: The batches would be unequal, examples carry weights, a Dataset is
            batched or repeated, or an example is there twice.
        TypeError, ValueError: An argument has an impossible value.
    """
    batch_size = validate.integer("batch_size", batch_size, minimum=1)
    is_read = isinstance(x, tf.data.Dataset)
    if is_read:
        arrays = in_memory(x, y)
    else:
        arrays = tf.nest.map_structure(np.asarray, (x,) if y is None else (x, y))
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
    _check_each_once(tf.nest.map_structure(lambda array: array[:used], arrays), is_read=is_read)
    options = tf.data.Options()
    options.deterministic = True
    dataset = (
        tf.data.Dataset.from_tensor_slices(arrays)
        .batch(batch_size, drop_remainder=True)
        .prefetch(2)
        .with_options(options)
    )
    dataset.__class__ = type("CyclicDataset", (type(dataset),), {"__iter__": _noted_iter})
    dataset.batches = CyclicBatches(given, used, batch_size)
    return dataset


_iterated: list[weakref.ref[Any]] = []  # the dataset of ours that was asked for batches last


def _noted_iter(dataset: Any) -> Any:
    """The batches; `HiddenStateCallback` is told of whoever asks for them."""
    _iterated[:] = [weakref.ref(dataset)]
    return tf.data.Dataset.__iter__(dataset)


def forget_iterated() -> None:
    """Before a fit that is going to ask its data for batches."""
    _iterated.clear()


def newest_iterated() -> Any:
    """The dataset of `cyclic_dataset`, as it is, that was asked for batches since; or None."""
    return _iterated[0]() if _iterated else None


# What is read into memory once


def in_memory(dataset: tf.data.Dataset, y: Any, *, may_have_weights: bool = False) -> Any:
    """The examples of a Dataset of single ones, or of pairs with their targets, as arrays.

    Args:
        dataset: Finite, each example once.
        y: None.
        may_have_weights: Whether triples with a weight are taken as well.

    Raises:
        TypeError: There are targets beside it.
        UnsupportedRunError: It is batched, repeated, infinite or empty, or has weights
            that it may not have.
    """
    if y is not None:
        raise TypeError("Expected y = None when x is a Dataset, got targets. Use pairs in x.")
    if int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY:
        raise UnsupportedRunError(
            "Expected a finite Dataset, got an infinite one. Drop repeat(): Model.fit repeats the "
            "epochs."
        )
    _check_single_examples(dataset)
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
    return tf.nest.pack_sequence_as(structure, list(map(_stacked, columns)))


def _check_single_examples(dataset: tf.data.Dataset) -> None:
    """Refuses a Dataset whose elements are batches, or in which examples come several times.

    What functions inside of it do (in map, flat_map or a generator) is not seen.
    """
    if _depth(dataset) > 0:
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
    if _makes_views(dataset):
        raise UnsupportedRunError(
            "Expected a Dataset with every example once, got a flat_map or interleave of single "
            "examples: with several views of an example it would count as several, each protected "
            f"by itself, and epsilon would fall. {_ONE_EXAMPLE} Use map, for one view each, or "
            "filter."
        )
    if _makes_windows(dataset):
        raise UnsupportedRunError(_OVERLAPPING)
    if _mixes_pairs(dataset):
        raise UnsupportedRunError(
            "Expected a Dataset with every example once, got a zip of two Datasets that hold the "
            "same examples (MixUp, CutMix): what is made of two is clipped as one, and each of "
            f"them is in several. {_ONE_EXAMPLE} Drop the mixing."
        )


def _depth(dataset: Any) -> int:
    """How many times the elements were surely put into batches, and not taken apart again."""
    name = _kind(dataset)
    if name in _REMADE:
        return 0  # not known
    depth = max(map(_depth, _inputs(dataset)), default=0)
    if "Unbatch" in name:
        return max(depth - 1, 0)
    if "Rebatch" in name:  # other batches of the same
        return max(depth, 1)
    return depth + ("Batch" in name)


def _is_repeated(dataset: Any) -> bool:
    if _kind(dataset) in _REPEATED and tf.get_static_value(dataset._count) != 1:
        return True
    inputs = _inputs(dataset)
    if _kind(dataset) in _JOINED:  # with what was made of all of it?
        sources = [source for part in inputs for source in _whole_sources(part)]
        if len(set(sources)) < len(sources):
            return True
    return any(map(_is_repeated, inputs))


def _whole_sources(dataset: Any) -> set[int]:
    """What it has all examples of, by identity: each dataset on the way, and those before it."""
    found = {id(dataset)}
    if _kind(dataset) not in _SELECTED:
        found.update(*map(_whole_sources, _inputs(dataset)))
    return found


def _makes_views(dataset: Any) -> bool:
    """Whether a function makes a dataset of every example, in which it may be several times.

    What it gets are examples if their parts have as many axes as what comes out; names of files
    and whole batches have others.
    """
    inputs = _inputs(dataset)
    if "FlatMap" in _kind(dataset) or "Interleave" in _kind(dataset):
        axes = _axes(dataset)
        if any(axes) and [axes] == list(map(_axes, inputs)):
            return True
    return any(map(_makes_views, inputs))


def _makes_windows(dataset: Any) -> bool:
    """Whether it cuts windows that overlap, in whatever order they come out."""
    if _kind(dataset) == "Window":
        given = dataset._size, dataset._shift, dataset._stride
        size, shift, stride = (int(tf.get_static_value(number)) for number in given)
        if math.lcm(shift, stride) < size * stride:
            return True
    return any(map(_makes_windows, _inputs(dataset)))


def _axes(dataset: Any) -> list[int | None]:
    specs = tf.nest.flatten(dataset.element_spec)
    return [getattr(getattr(spec, "shape", None), "rank", None) for spec in specs]


def _mixes_pairs(dataset: Any) -> bool:
    """Whether it zips two datasets of examples with targets that have an example in common."""
    inputs = _inputs(dataset)
    if _kind(dataset) == "Zip":
        pairs = [part for part in inputs if isinstance(part.element_spec, tuple | dict)]
        for one, other in itertools.combinations(pairs, 2):
            if one.element_spec == other.element_spec and _looked_at(one) & _looked_at(other):
                return True
    return any(map(_mixes_pairs, inputs))


def _looked_at(dataset: Any) -> set[int]:
    for _ in range(_depth(dataset)):
        dataset = dataset.unbatch()
    examples = dataset.take(_LOOKED_AT).as_numpy_iterator()
    return {_hash(tf.nest.flatten(example)) for example in examples}


def _kind(dataset: Any) -> str:
    return type(dataset).__name__.removeprefix("_").removesuffix("Dataset")


def _inputs(dataset: Any) -> list[Any]:
    """What its elements are made from."""
    if _kind(dataset) == "DirectedInterleave":  # another input says which of these is next
        return list(dataset._data_inputs)
    return list(dataset._inputs())


def _stacked(parts: Sequence[Any]) -> np.ndarray:
    shapes = dict.fromkeys(np.shape(part) for part in parts)
    if len(shapes) > 1:
        first, other, *_ = shapes
        raise UnsupportedRunError(
            f"Expected examples of one shape, got {first} and {other}. If they are batches, of "
            "which the last one is smaller, pass dataset.unbatch(); else pad the examples."
        )
    return np.stack(parts)


def _comes_in_batches(source: Any) -> bool:
    return isinstance(source, tf.keras.utils.Sequence) or inspect.isgenerator(source)


def _read_batches(source: Any, y: Any, steps: int | None) -> tuple[tuple[Any, ...], int]:
    """Examples, targets and weights of a Sequence or generator, and the rows of the first batch.

    Which examples share a batch, and their order in later passes, is for the run to say; so every
    example is read once.
    """
    if y is not None:
        raise TypeError(
            f"Expected y = None when x is a {type(source).__name__}, got targets. Use pairs in x."
        )
    if isinstance(source, tf.keras.utils.Sequence):
        batches = [source[index] for index in range(len(source))]
    else:
        batches = _generated(source, steps)
    for batch in batches:
        if not isinstance(batch, tuple) or len(batch) not in (2, 3):
            kind = f"{len(batch)} parts" if isinstance(batch, tuple) else type(batch).__name__
            raise refusal(
                "Expected batches that are pairs (examples, targets), or triples with weights, got "
                f"{kind}."
            )
        if len(batch) != len(batches[0]):
            raise refusal("Expected weights in all batches or in none, got them in some.")
    if not batches:
        raise refusal("Expected at least one batch, got none.")
    found = tf.nest.map_structure(lambda *parts: _joined(parts), *batches)
    return found, int(np.shape(tf.nest.flatten(batches[0])[0])[0])


def _generated(source: Any, steps: int | None) -> list[Any]:
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


def _number_of_examples(arrays: Any) -> int:
    shapes = [tuple(array.shape) for array in tf.nest.flatten(arrays)]
    sizes = {int(shape[0]) if shape else 0 for shape in shapes}
    if len(sizes) != 1 or 0 in sizes:
        raise ValueError(
            f"Expected arrays with the same number of examples, at least one, got {sorted(sizes)}."
        )
    return sizes.pop()


def _hash(parts: Iterable[Any]) -> int:
    return hash(b"".join(np.asarray(part).tobytes() for part in parts))


def _check_each_once(arrays: Any, *, is_read: bool) -> None:
    """Refuses examples that are there twice, as far as they show it.

    Nothing is wrong with equal examples if they belong to different persons, which nobody can see
    here; of arrays they give a warning.

    Args:
        arrays: Examples, then targets: structures of arrays whose first axis is that of the
            examples; what is no array (a sparse matrix) is not looked at.
        is_read: Whether a pipeline or a generator gave the examples, which may repeat them.

    Raises:
        UnsupportedRunError: Examples that were read are equal, or examples overlap.
    """
    given = [part for part in tf.nest.flatten(arrays) if part is not None]
    if not all(isinstance(part, np.ndarray | tf.Tensor) for part in given):
        return
    parts = [np.ascontiguousarray(part) for part in given]
    if any(map(_slides, parts[: len(tf.nest.flatten(arrays[0]))])):  # not the targets
        raise refusal(_OVERLAPPING)
    if len(set(map(_hash, zip(*parts, strict=True)))) == len(parts[0]):
        return
    if is_read:
        raise refusal(
            "Expected every example once, got equal ones from what was read: a generator or "
            "Sequence that draws with replacement, or goes round again, gives an example several "
            f"times, each protected by itself. {_ONE_EXAMPLE} Let it give every example once; if "
            "equal ones belong to different persons, pass arrays."
        )
    warn_of_equal()


def _slides(part: np.ndarray) -> bool:
    """Whether most of the first examples begin with what the one before them ends with.

    What is the same all along, as padding is, tells nothing.
    """
    if part.ndim < 2:
        return False
    first = part[: _WINDOWS + 1]
    for shift in range(1, min(part.shape[1] // 2, _LARGEST_SHIFT) + 1):
        ends, begins = first[:-1, shift:], first[1:, :-shift]
        axes = tuple(range(1, part.ndim))
        varies = (ends != ends[:, :1]).any(axis=axes)
        if 2 * ((ends == begins).all(axis=axes) & varies).sum() > max(len(ends), 2):
            return True
    return False


# Weights


@attrs.frozen
class GivenWeights:
    """Factors of the losses, and so of the gradients, as fit was told.

    Attributes:
        of_classes: A number for every class, or None.
        of_examples: One for every example, or None.
        bound: On every weight that an example could have; None if it is not known.
    """

    of_classes: Any = None
    of_examples: Any = None
    bound: float | None = None

    @property
    def largest(self) -> float | None:
        """Bound on the weight of every example that could be in the data; None if unknown.

        Raises:
            TypeError, ValueError: The weights of the classes are none.
        """
        if self.of_examples is not None and self.bound is None:
            return None
        classes = 1.0 if self.of_classes is None else max(self._classes().values())
        return classes if self.of_examples is None else classes * float(self.bound or 0)

    def of(self, targets: Any, number: int) -> tf.Tensor | None:
        """The weight of every example, float64, shape (examples,); None if there are none.

        Args:
            targets: Of all examples.
            number: Of the examples.

        Raises:
            TypeError, ValueError: They are no weights, or not one for each example.
        """
        if self.of_classes is None and self.of_examples is None:
            return None
        weights = np.ones(number)
        if self.of_classes is not None:
            weights = weights * self._by_class(targets)
        if self.of_examples is not None:
            weights = weights * self._by_example(number)
        return tf.constant(weights, tf.float64)

    def _classes(self) -> dict[int, float]:
        given = self.of_classes
        if not isinstance(given, Mapping) or not given:
            raise TypeError(
                f"Expected class_weight to be a dictionary from classes to numbers, got {given!r}. "
                "Take the numbers from public knowledge: how often a class occurs is private."
            )
        return {
            int(label): validate.real(f"class_weight[{label!r}]", weight, minimum=0)
            for label, weight in given.items()
        }

    def _by_class(self, targets: Any) -> np.ndarray:
        known = self._classes()
        if not any(known.values()):
            raise ValueError("Expected a class_weight above 0, got none.")
        array = np.asarray(targets) if not tf.nest.is_nested(targets) else np.empty(0)
        if array.ndim == 2 and array.shape[1] > 1:
            array = array.argmax(axis=1)
        labels = array.reshape(-1)
        if array.size != len(array) or not np.array_equal(labels, np.round(labels)):
            raise ValueError(
                "Expected targets that are classes, or one-hot rows, with class_weight, got an "
                f"array of shape {array.shape}. Use sample_weight."
            )
        missing = sorted(set(labels.astype(int).tolist()) - set(known))
        if missing:
            raise ValueError(
                f"Expected class_weight for every class, got none for class {missing[0]}: its "
                "weight has to be known before the data is."
            )
        return np.array([known[label] for label in labels.astype(int).tolist()])

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
                "The bound is on the weights that an example could have; it is public."
            )
        return weights


# What a run holds


class HeldExamples:
    """A copy of the examples and their targets, which nobody else can write.

    Floating point numbers have the precision of Keras, as `Model.fit` converts them.

    Attributes:
        given: The weights that fit was told, or that came with the examples.
        batch_size: That a pipeline says, or None.

    Args:
        x: An array, or a structure of arrays, whose first axis is that of the examples; or a
            Dataset of pairs, single or in batches, a Sequence of Keras or a generator of batches,
            each of which is read once. Triples have a weight of every example beside.
        y: Targets, likewise; None if x is a Dataset.
        weights: Of classes and examples.
        steps: The batches of a generator.

    Raises:
        UnsupportedRunError: They are not arrays, or the Dataset repeats examples.
        ValueError: They have not the same number of examples, or none.
    """

    def __init__(
        self, x: Any, y: Any, weights: GivenWeights | None = None, steps: int | None = None
    ):
        weights = weights or GivenWeights()
        self._source = x
        self.batch_size: int | None = None
        self._is_read = isinstance(x, tf.data.Dataset) or _comes_in_batches(x)
        if self._is_read:
            if weights.of_examples is not None:
                raise refusal(
                    f"Expected sample_weight = None when x is a {type(x).__name__}, got weights: "
                    "whose they are depends on its order. Let it give triples (example, target, "
                    "weight), or pass arrays."
                )
            if _comes_in_batches(x):
                (x, y, *read), self.batch_size = _read_batches(x, y, steps)
            else:
                x, y, *read = self._read(x, y)
            if read:
                weights = attrs.evolve(weights, of_examples=read[0])
        self.given = weights
        self.x, self.y = _copied("x", x), _copied("y", y)
        self.number = _number_of_examples((self.x, self.y))
        self.weights = weights.of(self.y, self.number)
        self._digest = _digest((self.x, self.y, self.weights))
        self._inputs, self._targets = self.x, self.y

    def hold(self, inputs: Any, targets: Any) -> None:
        """Takes what a step reads in the place of examples and targets, which are let go.

        Args:
            inputs: What is read of all examples, a structure of tensors.
            targets: As the loss of the step wants them.
        """
        self.x, self._inputs, self._targets = None, inputs, targets

    def _read(self, dataset: tf.data.Dataset, y: Any) -> tuple[Any, ...]:
        single = dataset.unbatch() if _depth(dataset) == 1 else dataset
        found: tuple[Any, ...] = in_memory(single, y, may_have_weights=True)
        if len(found) == 1:
            raise refusal(
                "Expected a Dataset of pairs (example, target), got examples without targets."
            )
        if single is not dataset:
            first = next(iter(dataset))
            self.batch_size = int(tf.nest.flatten(first)[0].shape[0])
        return found

    def check_each_once(self) -> None:
        """Raises UnsupportedRunError, or logs a warning, if an example is there twice."""
        _check_each_once([self.x, self.y], is_read=self._is_read)

    def check_same(
        self, x: Any, y: Any, weights: GivenWeights, steps: int | None = None
    ) -> GivenWeights:
        """Raises UnsupportedRunError unless these are the examples, in their order.

        Returns:
            Their weights, as `given`.
        """
        if self._is_read and x is self._source and y is None and weights.of_examples is None:
            return self.given  # of which this is a copy
        found = HeldExamples(x, y, weights, steps)
        if found._digest != self._digest:
            raise refusal(
                "Expected the examples of the run so far, got others: the run is about one data "
                "set. Pass the same arrays to every call of fit; or compile again, which begins "
                "another run, composed with this one."
            )
        return found.given

    def first(self, rows: int) -> tuple[Any, Any]:
        """The first examples and their targets."""
        found: tuple[Any, Any] = tf.nest.map_structure(lambda part: part[:rows], (self.x, self.y))
        return found

    def taken(self, indices: tf.Tensor) -> tuple[Any, ...]:
        """What a step reads of these examples: inputs, targets, and weights if there are any.

        Args:
            indices: Of the examples, shape (rows,).

        Returns:
            Parts of shape (rows, ...).
        """
        kept = [self._inputs, self._targets]
        if self.weights is not None:
            kept.append(self.weights)
        return tuple(_gathered(structure, indices) for structure in kept)

    def given_targets(self, indices: tf.Tensor) -> Any:
        """The targets of these examples as they were given, likewise."""
        return _gathered(self.y, indices)


def _gathered(structure: Any, indices: tf.Tensor) -> Any:
    return tf.nest.map_structure(lambda part: tf.gather(part, indices), structure)


def _copied(name: str, structure: Any) -> Any:
    def copied(part: Any) -> tf.Tensor:
        if not isinstance(part, np.ndarray | tf.Tensor) and not hasattr(part, "__array__"):
            raise refusal(
                f"Expected {name} as an array, or a structure of arrays, got {type(part).__name__}."
            )
        array = np.array(part)  # a copy, which tf.convert_to_tensor may share
        if array.ndim == 0:
            raise ValueError(f"Expected {name} with an axis of examples, got a number.")
        tensor = tf.convert_to_tensor(array)
        return tf.cast(tensor, tf.keras.backend.floatx()) if tensor.dtype.is_floating else tensor

    return tf.nest.map_structure(copied, structure)


def _digest(structure: Any) -> str:
    """Of every bit of a structure of tensors, and of its form."""
    found = hashlib.blake2b(
        repr(tf.nest.map_structure(lambda part: getattr(part, "shape", None), structure)).encode()
    )
    for part in tf.nest.flatten(structure):
        array = np.empty(0) if part is None else part.numpy()
        found.update(str(array.dtype).encode())
        texts = array.dtype.kind == "O"
        found.update(repr(array.tolist()).encode() if texts else np.ascontiguousarray(array).data)
    return found.hexdigest()
