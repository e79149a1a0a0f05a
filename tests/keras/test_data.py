"""cyclic_dataset: equal batches in the same order in every epoch, or an error."""

import numpy as np
import pytest

pytest.importorskip("tensorflow_privacy")
import tensorflow as tf

from hidden_state_accountants import UnsupportedRunError
from hidden_state_adapters.tf_privacy import cyclic_dataset
from hidden_state_adapters.tf_privacy.data import cyclic_batches

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
    found = cyclic_batches(dataset)
    assert (found.given, found.used, found.batch_size) == (12, 10, 5)


def test_transformed_datasets_are_not_recognised():
    dataset = cyclic_dataset(X, Y, batch_size=4)
    assert cyclic_batches(dataset) is not None
    for other in (dataset.shuffle(3), dataset.repeat(), dataset.skip(1), dataset.prefetch(1)):
        assert cyclic_batches(other) is None


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
