"""The examples of a run, held by the run itself, and the batches that a plan deals of them."""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import tensorflow as tf

from hidden_state_accountants import BatchOrder, UnsupportedRunError
from hidden_state_adapters.batch_plans import (
    BatchPlan,
    FixedPlan,
    RandomKeys,
    ReshuffledPlan,
    SampledPlan,
    poisson_plan,
)
from hidden_state_adapters.tf_privacy.data import in_memory
from hidden_state_adapters.tf_privacy.equal_examples import warn_of_equal_examples
from hidden_state_adapters.tf_privacy.owned.sources import comes_in_batches, read_batches
from hidden_state_adapters.tf_privacy.owned.weights import GivenWeights
from hidden_state_adapters.tf_privacy.pipeline import taken_apart
from hidden_state_adapters.tf_privacy.refusals import refusal

_NO_WEIGHTS = GivenWeights()
_DRAWN_AT_ONCE = 16  # batches
FEWEST_ROWS = 2  # of a batch on the device, padding included


class HeldExamples:
    """A copy of the examples and their targets, which nobody else can write.

    Floating point numbers have the precision of Keras, as `Model.fit` converts them.

    Attributes:
        given: The weights that fit was told, or that came with the examples.
        microbatch: m: every m examples that follow each other are one record, from the first one
            on. 1 unless something else is assigned.

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
        self, x: Any, y: Any, weights: GivenWeights = _NO_WEIGHTS, steps: int | None = None
    ):
        self._source, self.microbatch = x, 1
        self.batch_size: int | None = None  # that the pipeline says
        self._is_read = isinstance(x, tf.data.Dataset) or comes_in_batches(x)
        if self._is_read:
            if weights.of_examples is not None:
                raise refusal(
                    f"Expected sample_weight = None when x is a {type(x).__name__}, got weights: "
                    "whose they are depends on its order. Let it give triples (example, target, "
                    "weight), or pass arrays."
                )
            if comes_in_batches(x):
                (x, y, *read), self.batch_size = read_batches(x, y, steps)
            else:
                x, y, *read = self._read(x, y)
            if read:
                weights = attrs.evolve(weights, of_examples=read[0])
        self.given = weights
        self.x, self.y = _copied("x", x), _copied("y", y)
        sizes = {int(part.shape[0]) for part in tf.nest.flatten((self.x, self.y))}
        if len(sizes) != 1 or 0 in sizes:
            raise ValueError(
                "Expected x and y with the same number of examples, at least one, got "
                f"{sorted(sizes)}."
            )
        self.number = sizes.pop()
        self.weights = weights.of(self.y, self.number)
        self._digest = _digest((self.x, self.y, self.weights))
        self._inputs, self._targets = self.x, self.y

    def hold(self, inputs: tf.Tensor, targets: Any) -> None:
        """Takes what a step reads in the place of examples and targets, which are let go.

        Args:
            inputs: Features of all examples.
            targets: As the loss of the step wants them.
        """
        self.x, self._inputs, self._targets = None, inputs, targets

    def _read(self, dataset: tf.data.Dataset, y: Any) -> tuple[Any, ...]:
        if y is not None:
            raise TypeError("Expected y = None when x is a Dataset, got targets. Use pairs in x.")
        single = taken_apart(dataset)
        found: tuple[Any, ...] = in_memory(single, may_have_weights=True)
        if len(found) == 1:
            raise refusal(
                "Expected a Dataset of pairs (example, target), got examples without targets."
            )
        if single is not dataset:
            first = next(iter(dataset))
            self.batch_size = int(tf.nest.flatten(first)[0].shape[0])
        return found

    def warn_of_equal(self) -> None:
        """Logs a warning if examples are equal."""
        warn_of_equal_examples([self.x, self.y])

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
        """What a step reads of these records: inputs, targets, and weights if there are any.

        Args:
            indices: Of the records, shape (rows,).

        Returns:
            Parts of shape (rows, ...), or (rows, microbatch, ...) where records are microbatches.
        """
        kept = [self._inputs, self._targets]
        if self.weights is not None:
            kept.append(self.weights)
        return tuple(self._gathered(structure, indices) for structure in kept)

    def given_targets(self, indices: tf.Tensor) -> Any:
        """The targets of these records as they were given, likewise."""
        return self._gathered(self.y, indices)

    def _gathered(self, structure: Any, indices: tf.Tensor) -> Any:
        if self.microbatch > 1:
            indices = tf.expand_dims(indices * self.microbatch, 1) + tf.range(
                self.microbatch, dtype=indices.dtype
            )
        return tf.nest.map_structure(lambda part: tf.gather(part, indices), structure)


def dealt(dealer: Dealer, epochs: int = 1) -> tf.data.Dataset:
    """Epochs of batches of a plan, as (step, rows, indices); indices beyond `rows` are padding.

    Several batches are drawn at once, which costs less than the pipeline does for each.

    Args:
        dealer: Of the batches.
        epochs: That are iterated as one.
    """
    count = dealer.period * epochs

    def of_steps(first: tf.Tensor) -> Any:
        kinds = (tf.int64, tf.int64, tf.int64)
        last = tf.minimum(first + _DRAWN_AT_ONCE, count)
        steps, rows, indices = tf.numpy_function(
            dealer.deal_after_begin, [first, last], kinds, stateful=True
        )
        return (
            tf.ensure_shape(steps, [None]),
            tf.ensure_shape(rows, [None]),
            tf.ensure_shape(indices, [None, None]),
        )

    options = tf.data.Options()
    options.deterministic = True
    # One batch after the other: nothing is to be tuned, and threads cost more than they bring.
    options.autotune.enabled = False
    options.threading.private_threadpool_size = 1
    dataset = tf.data.Dataset.range(0, count, _DRAWN_AT_ONCE).map(of_steps).unbatch()
    counted = dataset.apply(tf.data.experimental.assert_cardinality(count))
    return counted.prefetch(2).with_options(options)


class Dealer:
    """Draws the batch of a step when it is asked for, once.

    Attributes:
        period: Batches of an epoch.

    Args:
        plan: Which examples each step uses.
        done: The number of steps so far, asked when an epoch begins.
        multiple: Indices of a batch are `filled` up to one of it.
        period: Batches of an epoch.
    """

    def __init__(self, plan: BatchPlan, done: Callable[[], int], multiple: int, period: int):
        self._plan, self._done, self._multiple, self.period = plan, done, multiple, period
        self._first = 0
        self._lock = threading.Lock()  # Keras begins the first epoch's pipeline twice

    def deal(self, step: int) -> tuple[Any, Any, Any]:
        """Step, rows, and the examples of the batch filled up with the first one."""
        with self._lock:
            if step % self.period == 0:
                self._plan.start_pass(self._done())
            chosen = self._plan.batch(step)
        rows = len(chosen)
        indices = np.zeros(filled(rows, self._multiple), np.int64)
        indices[:rows] = chosen
        return np.int64(step), np.int64(rows), indices

    def deal_all(self, first: int, last: int) -> tuple[Any, Any, Any]:
        """The same of several steps, stacked, with as many indices as the largest batch has."""
        steps, rows, indices = zip(*map(self.deal, range(first, last)), strict=True)
        stacked = np.zeros((len(steps), max(map(len, indices))), np.int64)
        for place, own in zip(stacked, indices, strict=True):
            place[: len(own)] = own
        return np.array(steps), np.array(rows), stacked

    def deal_after_begin(self, first: int, last: int) -> tuple[Any, Any, Any]:
        """The same by numbers that begin with 0 at the step that follows when 0 is asked for."""
        if first == 0:
            self._first = self._done()
        return self.deal_all(self._first + int(first), self._first + int(last))


def plan_of(
    order: BatchOrder,
    examples: int,
    batch_size: int,
    *,
    max_batch_size: int | None,
    drop_remainder: bool,
    microbatch: int = 1,
) -> BatchPlan:
    """The batches of a run, drawn by the operating system where they are random.

    Args:
        order: The batch order that is accounted.
        examples: Their number.
        batch_size: b, a multiple of m; FULL has one batch of all examples, whatever it is.
        max_batch_size: The cap of POISSON batches, or None.
        drop_remainder: Leaves out the last examples that do not fill a batch of an order with equal
            batches, or a microbatch.
        microbatch: m, the examples of a record.

    Returns:
        A plan of records: its sizes are those in examples over m.

    Raises:
        UnsupportedRunError: Equal batches cannot be made.
    """
    keys = RandomKeys()
    rest = examples % microbatch
    if rest and not drop_remainder:
        raise UnsupportedRunError(
            f"Expected a number of examples that microbatches of {microbatch} divide, got "
            f"{examples}: the last {rest} would make a smaller one, whose mean weighs more. Pass "
            "drop_remainder=True to leave them out, or choose another num_microbatches."
        )
    records = range(examples // microbatch)
    if order is BatchOrder.FULL:
        return FixedPlan(records, len(records), order)
    if batch_size > examples:
        raise UnsupportedRunError(
            f"Expected batch_size <= {examples}, the number of examples, got {batch_size}. Lower "
            "it."
        )
    if order is BatchOrder.POISSON:
        number = -(-len(records) // (batch_size // microbatch))
        cap = None if max_batch_size is None else max_batch_size // microbatch
        return poisson_plan(records, number, keys, cap)
    if order is BatchOrder.WITHOUT_REPLACEMENT:
        return SampledPlan(records, batch_size // microbatch, order, keys)
    used = examples // batch_size * batch_size
    if used != examples:
        if not drop_remainder:
            raise UnsupportedRunError(
                f"Expected a batch_size that divides the {examples} examples, got {batch_size}: "
                f"{order.value} batches must all have the same size. Choose another size, pass "
                f"drop_remainder=True to use only the first {used} examples, or use "
                'batch_order="poisson" (the default) or "without_replacement", which take any '
                "batch size."
            )
        records = range(used // microbatch)
    size = batch_size // microbatch
    if order is BatchOrder.RESHUFFLED:
        return ReshuffledPlan(records, size, keys)
    return FixedPlan(records, size, order, keys if order is BatchOrder.SHUFFLED_ONCE else None)


def multiple_of_sizes(*, is_compiled: bool, expected: int) -> int:
    """What the rows of every batch are filled up to a multiple of.

    XLA compiles every size anew, so that random sizes, which spread by the root of their mean, are
    filled up to a few: more than 7 are rare, and half a spread of rows is in vain.

    Args:
        is_compiled: Whether XLA compiles the step, and sizes are random.
        expected: Rows of a batch, on average.
    """
    return math.ceil(math.sqrt(expected)) if is_compiled else 1


def filled(rows: Any, multiple: int) -> Any:
    """How many rows a batch is filled up to, as a tensor if `rows` is one; see above.

    A batch has at least `FEWEST_ROWS` on the device: not every operation takes none, and TensorFlow
    cannot vectorize every one over a single row.
    """
    parts, fewest = -(-rows // multiple), -(-FEWEST_ROWS // multiple)
    return multiple * (tf.maximum(parts, fewest) if tf.is_tensor(parts) else max(parts, fewest))


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
