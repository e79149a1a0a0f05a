"""Records, each brought to its norm by itself, and the sum of their clipped gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import numpy as np
from scipy import sparse

from hidden_state_accountants.losses.arrays import NUMPY
from hidden_state_accountants.losses.linear import BY_NAME

Targets = Callable[[slice], np.ndarray]
NORMALIZATIONS = ("scale", "clip")
_SHORTEST, _LONGEST = 1e-30, 1e30
_TINY = 1e-300
_BLOCK = 2**18  # stored numbers of the matrix that are worked on at once: they fit into a cache


@attrs.frozen(eq=False)
class Records:
    """The rows of a matrix, scaled one by one, with a constant feature for the intercept.

    The matrix itself is never copied.

    Attributes:
        matrix: Shape (records, features), dense or CSR, float32 or float64.
        scales: Factors of the rows, shape (records,).
        constant: The feature of the intercept; 0 without one.
        norms: Norms of the scaled rows with the constant, shape (records,).
    """

    matrix: Any
    scales: np.ndarray
    constant: float
    norms: np.ndarray

    @classmethod
    def of(cls, matrix: Any, feature_norm: float, normalization: str, constant: float) -> Records:
        """Scales every row by itself; one shorter than 1e-30 or longer than 1e30 counts as zeros.

        "scale" brings it to exactly `feature_norm` (rows of zeros stay), "clip" to at most that.
        """
        norms = row_norms(matrix)
        scales = row_scales(norms, feature_norm, normalization)
        scaled = np.where(scales > 0, norms, 0.0) * scales
        return cls(matrix, scales, constant, np.hypot(scaled, constant))

    def __len__(self) -> int:
        return int(self.matrix.shape[0])

    @property
    def num_weights(self) -> int:
        """Number of weights of one output, the intercept included."""
        return int(self.matrix.shape[1]) + 1

    def blocks(self) -> Iterator[slice]:
        """All records, in parts that fit into a bounded amount of memory."""
        return blocks_of(self.matrix)

    def predictions(self, index: slice, weights: np.ndarray) -> np.ndarray:
        """Shape (rows, outputs), float64, for weights of shape (num_weights, outputs)."""
        scales = self.scales[index][:, None]
        with np.errstate(all="ignore"):  # rows that count as zeros may overflow
            products = self.matrix[index] @ weights[:-1].astype(self.matrix.dtype)
            products = np.asarray(products, dtype=np.float64)
            products *= scales
        products[scales[:, 0] == 0] = 0.0
        products += self.constant * weights[-1]
        return products

    def add_gradients(self, index: slice, slopes: np.ndarray, total: np.ndarray) -> None:
        """Adds the gradients of records with the slopes (rows, outputs) in their predictions.

        In float64 whatever the matrix is: a sum of 200,000 gradients in float32 is rounded by some
        per cent of one of them, and which way depends on every record.
        """
        rows = self.matrix[index].astype(np.float64, copy=False)
        total[-1] += self.constant * slopes.sum(axis=0)
        total[:-1] += ((slopes * self.scales[index][:, None]).T @ rows).T  # faster than rows.T @


def gradient_sum(
    loss: str,
    clip_norm: float,
    records: Records,
    targets: Targets,
    weights: np.ndarray,
    weights_of_records: np.ndarray | None = None,
) -> np.ndarray:
    """The sum of the clipped and weighted gradients of all records, of the shape of the weights."""
    total, slopes = np.zeros_like(weights), BY_NAME[loss](NUMPY, weights.shape[1]).slopes
    for block in records.blocks():
        y = slopes(records.predictions(block, weights), targets(block))
        # The gradient is an outer product: its norm is that of y times that of the record.
        norms = np.sqrt(np.einsum("ij,ij->i", y, y)) * records.norms[block]
        factors = np.minimum(clip_norm / np.maximum(norms, _TINY), 1.0)
        if weights_of_records is not None:
            factors = factors * weights_of_records[block]
        y *= factors[:, None]
        records.add_gradients(block, y, total)
    return total


def row_scales(norms: np.ndarray, feature_norm: float, normalization: str) -> np.ndarray:
    """Factors of rows of these norms; 0 for those that count as zeros."""
    # A row that float32 cannot scale without overflow would end the whole run.
    is_usable = (norms >= _SHORTEST) & (norms <= _LONGEST)
    scales = np.where(is_usable, feature_norm / np.where(is_usable, norms, 1.0), 0.0)
    return np.minimum(scales, 1.0) if normalization == "clip" else scales


def normalised(matrix: Any, feature_norm: float, normalization: str) -> Any:
    """A copy of a matrix whose rows are brought to their norm, in its own precision."""
    scales = row_scales(row_norms(matrix), feature_norm, normalization)
    if sparse.issparse(matrix):
        # Entries of rows that count as zeros stay in the pattern; they must not overflow.
        counts = np.diff(matrix.indptr)
        result, factors = matrix.copy(), np.repeat(scales, counts)
        result.data = np.where(factors > 0, result.data, 0) * factors.astype(matrix.dtype)
        return result
    usable = matrix if scales.all() else np.where(scales[:, None] > 0, matrix, 0)
    return usable * scales[:, None].astype(matrix.dtype)


def blocks_of(matrix: Any) -> Iterator[slice]:
    """All rows, in parts that fit into a bounded amount of memory."""
    rows = max(1, _BLOCK * matrix.shape[0] // max(1, matrix.size))
    for first in range(0, matrix.shape[0], rows):
        yield slice(first, min(first + rows, matrix.shape[0]))


def row_norms(matrix: Any) -> np.ndarray:
    """The L2 norms of the rows, float64; no overflow for finite entries."""
    norms = np.empty(matrix.shape[0])
    for index in blocks_of(matrix):
        part = matrix[index]
        if sparse.issparse(part):
            part = part.astype(np.float64)
            largest = np.asarray(abs(part).max(axis=1).todense()).ravel()
            squares = part.multiply(sparse.diags(1 / np.where(largest > 0, largest, 1.0)) @ part)
            squares = np.asarray(squares.sum(axis=1)).ravel()
            norms[index] = np.sqrt(largest) * np.sqrt(squares)
        else:
            part = np.asarray(part, dtype=np.float64)
            largest = np.abs(part).max(axis=1, initial=0.0)
            part = part / np.where(largest > 0, largest, 1.0)[:, None]
            norms[index] = largest * np.sqrt(np.einsum("ij,ij->i", part, part))
    return norms
