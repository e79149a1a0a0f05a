"""Two small networks on scikit-learn's digits, in NumPy, with the gradient of every record."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import numpy as np

PIXELS, CLASSES = 64, 10
HIDDEN, CHANNELS = 24, 6  # of the MLP, of the CNN
_SIDE, _KERNEL = 8, 3
_LEFT = _SIDE - _KERNEL + 1  # positions of the kernel along a side; pooled in pairs
_POOLED = _LEFT // 2

Passes = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]]


@attrs.frozen
class Network:
    """A model with cross-entropy whose parameters are one vector.

    Attributes:
        name: In words.
        size: Of the vector.
        passes: Parameters and records (n, 64) to logits (n, 10), and to a function from the slopes
            of the losses in the logits to the gradients of the records, (n, size).
        start: The initial parameters for a generator.
    """

    name: str
    size: int
    passes: Passes
    start: Callable[[np.random.Generator], np.ndarray]

    def gradients(self, w: np.ndarray, x: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Of the loss of every record, shape (n, size)."""
        logits, back = self.passes(w, x)
        return back(slopes(logits, labels))

    def accuracy(self, w: np.ndarray, x: np.ndarray, labels: np.ndarray) -> float:
        """The share of records whose largest logit is the label's."""
        return float(np.mean(self.passes(w, x)[0].argmax(axis=1) == labels))


def slopes(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Of the cross-entropy of every record in its logits."""
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    shares[np.arange(len(labels)), labels] -= 1.0
    return shares


def _outer(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    return np.einsum("ni,nj->nij", left, right).reshape(len(left), -1)


def _mlp_passes(w, x):
    first, second = np.split(w, [PIXELS * HIDDEN])
    first, second = first.reshape(PIXELS, HIDDEN), second.reshape(HIDDEN, CLASSES)
    hidden = np.maximum(x @ first, 0.0)

    def back(s):
        inner = s @ second.T * (hidden > 0)
        return np.hstack([_outer(x, inner), _outer(hidden, s)])

    return hidden @ second, back


def _cnn_passes(w, x):
    kernels, last = np.split(w, [_KERNEL**2 * CHANNELS])
    kernels = kernels.reshape(_KERNEL**2, CHANNELS)
    last = last.reshape(_POOLED**2 * CHANNELS, CLASSES)
    images = x.reshape(-1, _SIDE, _SIDE)
    windows = np.lib.stride_tricks.sliding_window_view(images, (_KERNEL, _KERNEL), axis=(1, 2))
    patches = windows.reshape(len(x), _LEFT, _LEFT, _KERNEL**2)
    before = patches @ kernels
    hidden = np.maximum(before, 0.0)
    pooled = hidden.reshape(len(x), _POOLED, 2, _POOLED, 2, CHANNELS).mean(axis=(2, 4))
    pooled = pooled.reshape(len(x), -1)

    def back(s):
        inner = (s @ last.T).reshape(len(x), _POOLED, 1, _POOLED, 1, CHANNELS) / 4
        inner = np.broadcast_to(inner, (len(x), _POOLED, 2, _POOLED, 2, CHANNELS))
        inner = inner.reshape(before.shape) * (before > 0)
        flat = patches.reshape(len(x), -1, _KERNEL**2).transpose(0, 2, 1)
        of_kernels = flat @ inner.reshape(len(x), -1, CHANNELS)
        return np.hstack([of_kernels.reshape(len(x), -1), _outer(pooled, s)])

    return pooled @ last, back


def _start(shapes):
    def start(rng):
        parts = [rng.normal(scale=np.sqrt(2 / rows), size=rows * n) for rows, n in shapes]
        return np.concatenate(parts)

    return start


_MLP_SHAPES = ((PIXELS, HIDDEN), (HIDDEN, CLASSES))
_CNN_SHAPES = ((_KERNEL**2, CHANNELS), (_POOLED**2 * CHANNELS, CLASSES))
NETWORKS = (
    Network(f"MLP, {HIDDEN} units", sum(m * n for m, n in _MLP_SHAPES), _mlp_passes,
            _start(_MLP_SHAPES)),
    Network(f"CNN, {CHANNELS} channels", sum(m * n for m, n in _CNN_SHAPES), _cnn_passes,
            _start(_CNN_SHAPES)),
)  # fmt: skip


def digits() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """1,500 records to train on and 297 to test, pixels from 0 to 1, with their labels."""
    from sklearn.datasets import load_digits

    features, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    features, labels = features[order] / 16, labels[order]
    return features[:1500], labels[:1500], features[1500:], labels[1500:]
