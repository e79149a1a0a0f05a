r"""Whitening: directions in which rows vary little count nearly as much as those of much variance.

Of rows :math:`u` with :math:`|u| \le 1` the sum of :math:`u u^T` is released once, with noise, or
it is that of public rows. One row moves it by at most 1 in Frobenius norm when it is replaced by
zeros, by at most the square root of 2 when it is replaced by another (docs/sklearn.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from dp_accounting import NeighboringRelation

_POWER = 0.3  # of the eigenvalues: with 1/2 directions of nothing get as much noise as the others
_RIDGE = 0.01  # of the mean eigenvalue, added to every one
_FLOOR = 0.3  # of the length of the noise: smaller eigenvalues are mostly noise
_MOST_NOISE = 14.0  # its length, in mean eigenvalues: with more nothing of the moment is left
_LEAST_TRACE = 0.1  # of rows of norm at most 1
_MOST_DIRECTIONS = 10.0  # or a sixteenth of the columns: pixels have more

Normal = Callable[[float, tuple[int, ...]], np.ndarray]


def moment_bound(relation: NeighboringRelation) -> float:
    """Returns the norm bound of a row's moment, which counts twice under REPLACE_ONE.

    Two moments are no further apart than the square root of 2, not 2: their product is at least 0.
    """
    return math.sqrt(0.5) if relation is NeighboringRelation.REPLACE_ONE else 1.0


def noise_length(std: float, columns: int) -> float:
    """Returns about the largest eigenvalue of the noise of `noisy_moment`."""
    return std * math.sqrt(2 * columns)


def noise_is_short(std: float, records: int, columns: int) -> bool:
    """Tells, by public numbers alone, whether a moment with this noise in its sum whitens."""
    return noise_length(std, columns) * columns / records <= _MOST_NOISE


def noisy_moment(total: np.ndarray, std: float, normal: Normal) -> np.ndarray:
    """Returns a symmetric sum of moments of shape (columns, columns) with Gaussian noise.

    Formal guarantees: a Gaussian mechanism of standard deviation `std` for the Frobenius norm: it
    is computed from the sum with independent noise in every entry, which `total`, symmetric,
    determines. `normal` draws noise of a standard deviation (0 for public rows) and shape.
    """
    noisy = total + normal(std, total.shape)
    return (noisy + noisy.T) / 2


def whitening(moment: np.ndarray, length: float = 0.0) -> np.ndarray:
    """Returns the symmetric matrix W that makes the moments of rows u @ W more even.

    About 1 is the mean of the squared norm of u @ W.

    Args:
        moment: Mean of u u^T, shape (columns, columns), symmetric.
        length: Length of the noise in it.
    """
    values, vectors = np.linalg.eigh(moment)
    floored = np.maximum(values, _FLOOR * length)
    floored = floored + max(_RIDGE * float(floored.mean()), np.finfo(float).tiny)
    factors = floored**-_POWER
    trace = min(max(float(values.sum()), _LEAST_TRACE), 1.0)
    square = max(float((_of_sum(values, trace) * factors**2).sum()), float(np.finfo(float).tiny))
    return np.asarray((vectors * (factors / np.sqrt(square))) @ vectors.T)


def directions_are_few(moment: np.ndarray, std: float) -> bool:
    """Tells whether the variance lies in few directions, as that of a network's features does.

    Of a moment M of rows of norm 1, with noise of `std` in an entry of M before it was made
    symmetric: 1/|M|^2 is their effective number.
    """
    columns = len(moment)
    square = float(np.sum(moment**2)) - std**2 * columns * (columns + 1) / 2
    return square * max(_MOST_DIRECTIONS, columns / 16) >= 1


def _of_sum(values: np.ndarray, total: float) -> np.ndarray:
    """Returns the nearest numbers of this sum that are not negative: noise spreads eigenvalues."""
    falling = np.sort(values)[::-1]
    levels = (np.cumsum(falling) - total) / np.arange(1, len(values) + 1)
    return np.maximum(values - levels[falling > levels][-1], 0.0)
