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
of = tf.data.Dataset.from_tensor_slices


def pairs():
    return of((X, Y))


def generated():
    """Batches from a generator, of which only the signature tells."""
    signature = tf.TensorSpec([None, 1], tf.float64), tf.TensorSpec([None], tf.float64)
    return tf.data.Dataset.from_generator(
        lambda: ((X[k : k + 4], Y[k : k + 4]) for k in (0, 4, 8)), output_signature=signature
    )


@pytest.mark.parametrize(
    "given",
    [(X, Y), (tf.constant(X), tf.constant(Y)), ({"a": X, "b": (X,)}, Y), (pairs().repeat(1), None)],
    ids=["arrays", "tensors", "structure", "Dataset"],
)
def test_batches_repeat_in_order(given):
    """Of those that do not fill one, none is used."""
    dataset = cyclic_dataset(*given, batch_size=5, drop_remainder=True)
    assert (dataset.used, dataset.batch_size) == (10, 5)
    for _ in range(3):
        x, y = zip(*dataset, strict=True)
        assert all((tf.concat(parts, 0) == X[:10]).numpy().all() for parts in _columns(x))
        np.testing.assert_array_equal(np.array(y), Y[:10].reshape(2, 5))
    assert all(part.shape[0] == 5 for part in tf.nest.flatten(dataset.element_spec))


def _columns(batches):
    return zip(*map(tf.nest.flatten, batches), strict=True)


def test_shuffles_and_augmentations_of_a_dataset_act_once():
    noisy = of(X).shuffle(12, reshuffle_each_iteration=True)
    noisy = noisy.map(lambda v: v + tf.random.normal([1], dtype=tf.float64))
    dataset = cyclic_dataset(noisy, batch_size=4)
    first, second = (np.array(list(dataset.as_numpy_iterator())) for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_rows_of_single_examples_do_not_count_as_examples():
    """40 persons with 8 labelled moments each were 320 records."""
    persons = of((np.zeros((40, 8, 3)), np.zeros((40, 8))))
    with pytest.raises(UnsupportedRunError, match="batch_size = None or 8"):
        check_batched(persons, 10)
    for batched in (persons.batch(7), persons.batch(10, drop_remainder=True)):
        check_batched(batched, 10)
    check_batched(persons, None)


@pytest.mark.parametrize("drop_remainder", [False, True])
def test_batches_are_read_as_keras_reads_them(drop_remainder):
    held = HeldExamples(pairs().batch(4, drop_remainder=drop_remainder), None)
    assert (held.number, held.batch_size, tuple(held.x.shape)) == (12, 4, (12, 1))
    held = HeldExamples(pairs(), None)
    assert (held.number, held.batch_size, tuple(held.x.shape)) == (12, None, (12, 1))


# --- one record is one example, and there once ----------------------------------------------------


def windows(shift):
    found = of(SERIES).window(4, shift, drop_remainder=True)
    found = found.flat_map(lambda window: window.batch(4))
    return found.enumerate().map(lambda number, x: (x, number))


SERIES = np.random.default_rng(0).normal(size=15)
SLIDING = np.lib.stride_tricks.sliding_window_view(SERIES, 4)
SINGLE = {
    "taken apart": lambda: pairs().batch(4).unbatch(),
    "matrices": lambda: of((np.zeros((12, 4, 4)) + X[:, None], Y)),
    "of an open length, with one target": lambda: pairs().map(
        lambda a, b: (tf.reshape(a, [tf.cast(b, tf.int32) * 0 - 1]), b)
    ),
    "windows side by side": lambda: windows(4),
    "shuffled": lambda: windows(4).shuffle(3),
    "one-hot targets": lambda: of((X, np.eye(12)[::-1])),
}


@pytest.mark.parametrize("make", SINGLE.values(), ids=SINGLE)
def test_single_examples_are_taken(make):
    assert cyclic_dataset(make(), batch_size=3).used in (3, 12)


class Draws(tf.keras.utils.Sequence):
    """With replacement."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        chosen = np.random.default_rng(index).integers(12, size=4)
        return X[chosen], Y[chosen]


@pytest.mark.parametrize("given", [(Draws(), None), (SLIDING, np.arange(12))])
def test_a_sequence_that_draws_again_and_arrays_of_windows_are_refused(given):
    with pytest.raises(UnsupportedRunError, match="One record is one example"):
        HeldExamples(*given).check_each_once()


def test_equal_examples_are_warned_about(caplog):
    more = np.r_[X, X[:4]]
    cyclic_dataset(more, np.r_[Y, 1 + Y[:4]], batch_size=4)  # other targets
    cyclic_dataset(more, np.r_[Y, Y[:4]], batch_size=12, drop_remainder=True)
    assert not caplog.records
    for x in ((more, np.r_[Y, Y[:4]]), {"a": np.ones(16), "b": np.ones((16, 2))}):
        caplog.clear()
        cyclic_dataset(x, batch_size=4)
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "some records of the data are equal" in caplog.text


BATCHES, AGAIN = r"the shape of batches.*unbatch\(\)", "equal ones from what was read"
REFUSED = {
    "size": ({"x": X, "batch_size": 0}, ValueError, "batch_size >= 1"),
    "kind of size": ({"x": X, "batch_size": 2.0}, TypeError, "batch_size"),
    "large": ({"x": X, "batch_size": 13}, UnsupportedRunError, "batch_size <= 12"),
    "remainder": ({"x": X, "batch_size": 5}, UnsupportedRunError, "use only the first 10"),
    "targets": ({"x": X, "y": Y[:11]}, ValueError, "same number"),
    "number": ({"x": np.float64(1)}, ValueError, "at least one"),
    "nothing": ({"x": X[:0]}, ValueError, "at least one"),
    "endless": ({"x": of(X).repeat()}, UnsupportedRunError, "finite"),
    "weights": ({"x": of((X, Y, Y))}, UnsupportedRunError, "weights"),
    "empty": ({"x": of(X).take(0)}, UnsupportedRunError, "empty"),
    "targets twice": ({"x": of(X), "y": Y}, TypeError, "y = None"),
    "known shapes": ({"x": pairs().batch(4, drop_remainder=True)}, UnsupportedRunError, BATCHES),
    "one component": ({"x": of(X).batch(4)}, UnsupportedRunError, BATCHES),
    "signature": ({"x": generated()}, UnsupportedRunError, BATCHES),
    "repeated": ({"x": pairs().repeat(3)}, UnsupportedRunError, AGAIN),
    "sliding windows": ({"x": windows(1)}, UnsupportedRunError, "got windows"),
    "windows that overlap by half": ({"x": windows(2)}, UnsupportedRunError, "got windows"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    arguments, kind, text = REFUSED[name]
    with pytest.raises(kind, match=text):
        cyclic_dataset(**{"batch_size": 1, **arguments})


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


ADAPTED = [
    (layers.Normalization(), NUMBERS, layers.Normalization(mean=[0.0, 1.0], variance=[1.0, 4.0])),
    (layers.Discretization(num_bins=3), NUMBERS, layers.Discretization(bin_boundaries=[3.0, 9.0])),
    (layers.StringLookup(), WORDS, layers.StringLookup(vocabulary=["a", "b"])),
    (layers.IntegerLookup(), NUMBERS.astype("int64"), layers.IntegerLookup(vocabulary=[1, 2])),
    (layers.TextVectorization(), WORDS, layers.TextVectorization(vocabulary=["a", "b"])),
    (Fitted(), NUMBERS, Fitted()),
]


@pytest.mark.parametrize(
    ("layer", "data", "constant"), ADAPTED, ids=[type(layer).__name__ for layer, *_ in ADAPTED]
)
def test_adapted_layers_are_refused_and_constants_are_fine(layer, data, constant):
    layer.adapt(data)
    name = type(layer).__name__
    with pytest.raises(UnsupportedRunError, match=rf"{name}\(.*\) with constants, got"):
        check_layers(Holder(layer))
    check_layers(Holder(constant))
    check_layers(Holder(type(constant).from_config(constant.get_config())))


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
