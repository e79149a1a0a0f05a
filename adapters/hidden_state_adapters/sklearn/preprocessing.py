r"""Centring and scaling of the columns by statistics that are released privately, once.

Every record is brought to at most the norm F by itself first. With z a record after that, what is
summed over the records is

.. math:: q(z) = z/F, \qquad (z/F)^2 \text{ (entry by entry)}, \qquad \text{or both},

whose norm is at most 1, 1 and the square root of 2 (docs/sklearn.md). The sum is released with
Gaussian noise; means and scales are computed from it alone. Whitening releases the moments of the
records after centring as well (`hidden_state_adapters.whitening`).
"""

from __future__ import annotations

import math
from typing import Any

import attrs
import numpy as np
from scipy import sparse

from hidden_state_adapters.recipe import shrunk
from hidden_state_adapters.sklearn.records import blocks_of, normalised
from hidden_state_adapters.whitening import Normal, noise_length, noisy_moment, whitening

WHITEN = "whiten"
STEPS = {
    "center": (True, False),
    "scale": (False, True),
    "standardize": (True, True),
    WHITEN: (True, False),
}
"""Whether the means are released, and whether the squares are."""
_LEAST_VARIANCE = 0.01  # of the mean variance: columns without any are not blown up


@attrs.frozen(eq=False)
class Statistics:
    """Released statistics of the columns. The noise is in them, so they may be seen.

    Attributes:
        means: Subtrahend, shape (features,); None without centring.
        factors: Factors, shape (features,); None without scaling.
        whitening: Matrix, shape (features, features), that rows are multiplied with after another
            normalisation; None without whitening.
    """

    means: np.ndarray | None
    factors: np.ndarray | None
    whitening: np.ndarray | None = None

    def apply(self, matrix: Any, feature_norm: float, normalization: str) -> Any:
        """A copy of the records, each brought to its norm by itself, centred and scaled."""
        if sparse.issparse(matrix):  # then there are factors alone
            rows = normalised(matrix, feature_norm, normalization)
            return (rows @ sparse.diags(self.factors)).astype(matrix.dtype).tocsr()
        result = np.empty_like(matrix)
        for part in blocks_of(matrix):
            rows = matrix[part].astype(np.float64, copy=False)
            rows = normalised(rows, feature_norm, normalization)
            rows -= 0.0 if self.means is None else self.means
            if self.whitening is not None:
                rows = normalised(rows, feature_norm, normalization) @ self.whitening
            result[part] = rows if self.factors is None else rows * self.factors
        return result


def release_statistics(
    matrix: Any,
    step: str,
    feature_norm: float,
    normalization: str,
    noise_multiplier: float,
    normal: Normal,
) -> Statistics:
    """Means and scales of the columns from one noisy sum.

    Formal guarantees: `GaussianDpEvent(noise_multiplier)`, as this package reads it: one record
    that is replaced by zeros moves the sum by at most its norm bound, one that is replaced by
    another by twice that. The number of records is public. The noise multiplier is the standard
    deviation of the noise over the norm bound of a record.
    """
    sums = column_sums(matrix, step, feature_norm, normalization)
    std = noise_multiplier * record_norm(step)
    means, squares = (sums + normal(std, sums.shape)) / matrix.shape[0]
    std /= matrix.shape[0]
    centers, scales = STEPS[step]
    origin = shrunk(means, std) if centers else np.zeros_like(means)
    factors = None
    if scales:
        variances = squares - 2 * origin * means + origin**2
        least = max(std, _LEAST_VARIANCE * float(np.maximum(variances, 0).mean()))
        # So that a record has about the norm F again, of which "clip" cuts the rest off.
        factors = 1 / np.sqrt(matrix.shape[1] * np.maximum(variances, least))
    return Statistics(feature_norm * origin if centers else None, factors)


def with_whitening(
    centred: Statistics,
    matrix: np.ndarray,
    feature_norm: float,
    normalization: str,
    std: float,
    normal: Normal,
) -> Statistics:
    """Whitening of the centred records by one noisy sum of moments.

    Formal guarantees: those of `noisy_moment`, for records that are functions of themselves and of
    the released means. `std` is that of the noise in an entry, for records of norm 1.
    """
    total = moment_sum(centred, matrix, feature_norm, normalization)
    n, columns = matrix.shape
    moment = noisy_moment(total, std, normal) / n
    return attrs.evolve(centred, whitening=whitening(moment, noise_length(std, columns) / n))


def moment_sum(
    centred: Statistics, matrix: np.ndarray, feature_norm: float, normalization: str
) -> np.ndarray:
    """The sum of u u^T over the centred records, each brought to norm 1 or cut to it."""
    total = np.zeros((matrix.shape[1], matrix.shape[1]))
    for part in blocks_of(matrix):
        rows = matrix[part].astype(np.float64)
        rows = centred.apply(rows, feature_norm, normalization)
        rows = normalised(rows, feature_norm, normalization) / feature_norm
        total += rows.T @ rows
    return total


def column_sums(matrix: Any, step: str, feature_norm: float, normalization: str) -> np.ndarray:
    """The sum of q(z) over the records: entries, and their squares; zeros for what is left out."""
    centers, scales = STEPS[step]
    sums = np.zeros((2, matrix.shape[1]))
    for part in blocks_of(matrix):
        rows = matrix[part].astype(np.float64, copy=False)
        rows = normalised(rows, feature_norm, normalization) / feature_norm
        if centers:
            sums[0] += rows.sum(axis=0)
        if scales:
            squares = rows.multiply(rows) if sparse.issparse(rows) else rows * rows
            sums[1] += np.asarray(squares.sum(axis=0)).ravel()
    return sums


def record_norm(step: str) -> float:
    """The bound on the norm of what one record adds to `column_sums`."""
    return math.sqrt(sum(STEPS[step]))
