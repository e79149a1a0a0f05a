"""Data: equal batches in the same order in every epoch; layers that were adapted to it."""

import numpy as np
import pytest

pytest.importorskip("tensorflow_privacy")
import tensorflow as tf

from hidden_state_accountants import UnsupportedRunError
from hidden_state_adapters.tf_privacy import cyclic_dataset
from hidden_state_adapters.tf_privacy.data import HeldExamples, check_batched
from hidden_state_adapters.tf_privacy.trained_part import check_layers

X, Y = np.arange(12.0).reshape(12, 1), np.arange(12)


def epochs(dataset, count=3):
    return [[tf.nest.map_structure(np.array, b) for b in dataset] for _ in range(count)]


@pytest.mark.parametrize(
    "source",
    [
        lambda: (X, Y),
        lambda: (tf.constant(X), tf.constant(Y)),
        lambda: (tf.data.Dataset.from_tensor_slices((X, Y)), None),
        lambda: (tf.data.Dataset.from_tensor_slices((X, Y)).map(lambda a, b: (a, b)), None),
    ],
    ids=["arrays", "tensors", "Dataset", "mapped Dataset"],
)
def test_batches_repeat_in_order(source):
    x, y = source()
    dataset = cyclic_dataset(x, y, batch_size=4)
    for epoch in epochs(dataset):
        assert len(epoch) == 3
        for k, (bx, by) in enumerate(epoch):
            np.testing.assert_array_equal(bx, X[4 * k : 4 * k + 4])
            np.testing.assert_array_equal(by, Y[4 * k : 4 * k + 4])
    assert dataset.element_spec[0].shape == (4, 1)  # known in advance: no ragged batch


def test_rows_of_single_examples_do_not_count_as_examples():
    """40 persons with 8 labelled moments each were 320 records."""
    persons = tf.data.Dataset.from_tensor_slices((np.zeros((40, 8, 3)), np.zeros((40, 8))))
    with pytest.raises(UnsupportedRunError, match="batch_size = None or 8"):
        check_batched(persons, 10)
    for batched in (persons.batch(10), persons.batch(10, drop_remainder=True)):
        check_batched(batched, 10)
        check_batched(batched, None)
    check_batched(persons.batch(7), 10)


def test_shuffles_and_augmentations_of_a_dataset_act_once():
    noisy = tf.data.Dataset.from_tensor_slices(X).shuffle(12, reshuffle_each_iteration=True)
    noisy = noisy.map(lambda v: v + tf.random.normal([1], dtype=tf.float64))
    first, *others = epochs(cyclic_dataset(noisy, batch_size=4))
    for other in others:
        np.testing.assert_array_equal(np.array(other), np.array(first))


def test_structures_of_arrays():
    for batch in cyclic_dataset({"a": X, "b": (X, Y)}, Y, batch_size=6):
        assert batch[0]["b"][1].shape == (6,)


def test_a_remainder_is_refused_or_dropped_in_every_epoch():
    with pytest.raises(UnsupportedRunError, match="drop_remainder=True to use only the first 10"):
        cyclic_dataset(X, Y, batch_size=5)
    dataset = cyclic_dataset(X, Y, batch_size=5, drop_remainder=True)
    for epoch in epochs(dataset):
        np.testing.assert_array_equal(np.concatenate([by for _, by in epoch]), Y[:10])
    assert (dataset.used, dataset.batch_size) == (10, 5)


def pairs():
    return tf.data.Dataset.from_tensor_slices((X, Y))


def generated(*shapes):
    """Batches from a generator, of which only the signature tells."""
    signature = tuple(tf.TensorSpec(shape, tf.float64) for shape in shapes)
    return tf.data.Dataset.from_generator(
        lambda: ((X[k : k + 4], Y[k : k + 4]) for k in (0, 4, 8)), output_signature=signature
    )


ALREADY_BATCHED = {
    "with known shapes": lambda: pairs().batch(4, drop_remainder=True),
    "by cyclic_dataset": lambda: cyclic_dataset(X, Y, batch_size=4),
    "of one component": lambda: tf.data.Dataset.from_tensor_slices(X).batch(4),
    "by its signature": lambda: generated([None, 1], [None]),
}


@pytest.mark.parametrize("make", ALREADY_BATCHED.values(), ids=ALREADY_BATCHED)
def test_batches_of_batches_are_refused(make):
    with pytest.raises(UnsupportedRunError, match=r"the shape of batches.*unbatch\(\)"):
        cyclic_dataset(make(), batch_size=1)


def test_elements_of_several_shapes_are_no_examples():
    uneven = tf.data.Dataset.from_generator(
        lambda: iter([X[:8], X[8:]]), output_signature=tf.TensorSpec(None, tf.float64)
    )
    with pytest.raises(ValueError, match="same shape"):
        cyclic_dataset(uneven, batch_size=1)


@pytest.mark.parametrize("drop_remainder", [False, True])
def test_batches_are_read_as_keras_reads_them(drop_remainder):
    held = HeldExamples(pairs().batch(4, drop_remainder=drop_remainder), None)
    assert (held.number, held.batch_size, tuple(held.x.shape)) == (12, 4, (12, 1))
    held = HeldExamples(pairs(), None)
    assert (held.number, held.batch_size, tuple(held.x.shape)) == (12, None, (12, 1))


SINGLE = {
    "taken apart": lambda: pairs().batch(4).unbatch(),
    "matrices": lambda: tf.data.Dataset.from_tensor_slices((np.zeros((12, 4, 4)) + X[:, None], Y)),
    "of an open length, with one target": lambda: pairs().map(
        lambda a, b: (tf.reshape(a, [tf.cast(b, tf.int32) * 0 - 1]), b)
    ),
    "repeated once": lambda: pairs().repeat(1),
}


@pytest.mark.parametrize("make", SINGLE.values(), ids=SINGLE)
def test_single_examples_are_taken(make):
    assert cyclic_dataset(make(), batch_size=4).used == 12


# One record is one example


def cut(series, shift):
    """Windows of four."""
    windows = tf.data.Dataset.from_tensor_slices(series).window(4, shift, drop_remainder=True)
    windows = windows.flat_map(lambda window: window.batch(4))
    return windows.enumerate().map(lambda number, x: (x, number))


class Draws(tf.keras.utils.Sequence):
    """With replacement."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        chosen = np.random.default_rng(index).integers(12, size=4)
        return X[chosen], Y[chosen]


SERIES = np.random.default_rng(0).normal(size=15)
WINDOWS = np.lib.stride_tricks.sliding_window_view(SERIES, 4)
SEVERAL_TIMES = {
    "repeated": (lambda: pairs().repeat(3), "equal ones from what was read"),
    "sliding windows": (lambda: cut(SERIES, 1), "got windows"),
    "windows that overlap by half": (lambda: cut(SERIES, 2), "got windows"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "text"), SEVERAL_TIMES.values(), ids=SEVERAL_TIMES)
def test_an_example_that_is_there_twice_is_refused(make, text):
    with pytest.raises(UnsupportedRunError, match=rf"{text}.*One record is one example"):
        cyclic_dataset(make(), batch_size=1)


@pytest.mark.parametrize("given", [(Draws(), None), (WINDOWS, np.arange(12))])
def test_a_sequence_that_draws_again_and_arrays_of_windows_are_refused(given):
    with pytest.raises(UnsupportedRunError, match="One record is one example"):
        HeldExamples(*given).check_each_once()


def test_windows_that_do_not_overlap_and_one_hot_targets_are_taken():
    for apart in (cut(SERIES, 4), cut(SERIES, 4).shuffle(3)):
        assert cyclic_dataset(apart, batch_size=1).used == 3
    assert cyclic_dataset(X, np.eye(12)[::-1], batch_size=4).used == 12  # one-hot targets


def test_equal_examples_are_warned_about(caplog):
    cyclic_dataset(np.r_[X, X[:4]], np.r_[Y, 1 + Y[:4]], batch_size=4)  # other targets
    cyclic_dataset(np.r_[X, X[:4]], np.r_[Y, Y[:4]], batch_size=12, drop_remainder=True)
    assert not caplog.records
    for x in ((np.r_[X, X[:4]], np.r_[Y, Y[:4]]), {"a": np.ones(16), "b": np.ones((16, 2))}):
        caplog.clear()
        cyclic_dataset(x, batch_size=4)
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "some records of the data are equal" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"x": X, "batch_size": 0}, ValueError, "batch_size >= 1"),
        ({"x": X, "batch_size": 2.0}, TypeError, "batch_size"),
        ({"x": X, "batch_size": 13}, UnsupportedRunError, "batch_size <= 12"),
        ({"x": X, "y": Y[:11], "batch_size": 1}, ValueError, "same number"),
        ({"x": np.float64(1), "batch_size": 1}, ValueError, "at least one"),
        ({"x": X[:0], "batch_size": 1}, ValueError, "at least one"),
        (
            {"x": tf.data.Dataset.from_tensor_slices(X).repeat(), "batch_size": 1},
            UnsupportedRunError,
            "finite",
        ),
        (
            {"x": tf.data.Dataset.from_tensor_slices((X, Y, Y)), "batch_size": 1},
            UnsupportedRunError,
            "weights",
        ),
        (
            {"x": tf.data.Dataset.from_tensor_slices(X).take(0), "batch_size": 1},
            UnsupportedRunError,
            "empty",
        ),
        (
            {"x": tf.data.Dataset.from_tensor_slices(X), "y": Y, "batch_size": 1},
            TypeError,
            "y = None",
        ),
    ],
)
def test_refused(arguments, kind, text):
    with pytest.raises(kind, match=text):
        cyclic_dataset(**arguments)


# --- layers that were adapted to the data, and where the same layers are fine ---------------------

layers = tf.keras.layers
NUMBERS = np.arange(24, dtype="float32").reshape(12, 2)
WORDS = np.array([["a"], ["b"], ["a c"]] * 4)


class Fitted(layers.experimental.preprocessing.PreprocessingLayer):
    """A layer of the user's own."""

    def call(self, x):
        return x

    def reset_state(self):
        pass

    def update_state(self, data):
        pass


class Holder(tf.keras.Model):
    def __init__(self, layer):
        super().__init__()
        self.parts = [layer, layers.Dense(1)]
        self.parts[1].build((None, 2))


@pytest.mark.parametrize(
    ("layer", "data"),
    [
        (layers.Normalization(), NUMBERS),
        (layers.Discretization(num_bins=3), NUMBERS),
        (layers.StringLookup(), WORDS),
        (layers.IntegerLookup(), NUMBERS.astype("int64")),
        (layers.TextVectorization(output_sequence_length=2), WORDS),
        (Fitted(), NUMBERS),
    ],
    ids=lambda value: type(value).__name__,
)
def test_adapted_layers_are_refused(layer, data):
    layer.adapt(data)
    name = type(layer).__name__
    with pytest.raises(UnsupportedRunError, match=rf"{name}\(.*\) with constants, got"):
        check_layers(Holder(layer))


@pytest.mark.parametrize(
    "layer",
    [
        layers.Normalization(mean=[0.0, 1.0], variance=[1.0, 4.0]),
        layers.Discretization(bin_boundaries=[3.0, 9.0]),
        layers.StringLookup(vocabulary=["a", "b"]),
        layers.TextVectorization(output_sequence_length=2, vocabulary=["a", "b"]),
        layers.Rescaling(0.1),
        layers.CategoryEncoding(num_tokens=24),
        Fitted(),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_constants_are_fine(layer):
    check_layers(Holder(layer))
    check_layers(Holder(type(layer).from_config(layer.get_config())))


def test_a_frozen_backbone_whose_weights_were_loaded():
    """As in EfficientNet: nobody knows constants, and nothing was adapted."""
    network = tf.keras.Sequential([tf.keras.Input([2]), layers.Normalization(), layers.Dense(2)])
    with pytest.raises(UnsupportedRunError, match="Freeze it, where it is a part of a public"):
        check_layers(network)
    network.trainable = False
    model = tf.keras.Sequential([tf.keras.Input([2]), network, layers.Dense(1)])
    check_layers(model)
    network.layers[0].adapt(NUMBERS)
    with pytest.raises(UnsupportedRunError, match="as adapt left it"):
        check_layers(model)
