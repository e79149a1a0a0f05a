r"""A private bound on how curved the mean loss of a batch is, from the features of all records.

For a linear model the mean loss of a batch S of b records is K-smooth with

.. math:: K = M\,\lambda_{\max}(X_S^\top X_S)/(b B^2) \le M.

The largest eigenvalue for all records is released once, with Laplace noise; a matrix Chernoff bound
says what follows for batches that are drawn at random (docs/theory/curvature.md).
"""

from __future__ import annotations

import math
from typing import Any

import attrs
import dp_accounting
import numpy as np
import numpy.typing as npt

from hidden_state_accountants import validate
from hidden_state_accountants.events.batch_order import BatchOrder, parse_batch_order
from hidden_state_accountants.events.loss_geometry import LossGeometry, square_norm

_ROUNDING = 1e-9  # of an eigenvalue; more than the error of its computation
_GRID = 2.0**-30  # what is released is rounded up to it, so that its last digits say nothing
_SMALLEST = 1e-12


@attrs.frozen
class CurvatureRelease:
    """What `release_curvature` found.

    Attributes:
        share: Bounds the curvature of the mean loss of every batch, as a share of the smoothness
            of the losses of the records; 1 if nothing is gained.
        failure: The probability that it does not, over the noise and the order of the batches.
        event: What the release costs, to be composed with the run.
    """

    share: float
    failure: float
    event: dp_accounting.DpEvent

    def geometry(self, loss: LossGeometry) -> LossGeometry:
        """The losses of a linear model of the features, with the curvature of their batches."""
        return loss.with_curvature(self.share * loss.smoothness, self.failure)


def release_curvature(
    features: npt.ArrayLike,
    *,
    epsilon: float,
    batch_order: BatchOrder | str,
    batch_size: int,
    num_steps: int,
    feature_norm: float,
    bias: bool = False,
    failure: float = 1e-6,
    generator: np.random.Generator | None = None,
) -> CurvatureRelease:
    """Releases, once and privately, a bound on the curvature of the batches of a linear model.

    Compose `event` with the run in one accountant, and give the run
    `loss=release.geometry(loss)`, whose failure adds to its delta. Fix the epsilon of the run
    before you look at the bound, and calibrate the noise to it.

    Formal guarantees: `epsilon`-DP for the features, if a record's features are replaced by others
    or by zeros (REPLACE_ONE, REPLACE_SPECIAL, with their number public). The bound holds for the
    batches of the data set but with probability `failure`.

    Args:
        features: Of all records, in the order in which CYCLIC batches are dealt; shape (n, d).
            The model sees exactly these, and trains on nothing in front of them.
        epsilon: > 0, of the release.
        batch_order: FULL, CYCLIC, SHUFFLED_ONCE, RESHUFFLED or WITHOUT_REPLACEMENT.
        batch_size: b.
        num_steps: T, of the run.
        feature_norm: B, a bound on the norm of the features of every record that the data could
            hold.
        bias: Whether a bias is trained as well.
        failure: In (0, 1).
        generator: Of the noise, for tests; by default one that the operating system seeds.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A value is out of range, features are longer than `feature_norm`, or the order
            is POISSON.

    >>> import numpy as np
    >>> import hidden_state_accountants as hsa
    >>> features = np.random.default_rng(0).normal(size=(100_000, 20))
    >>> features /= np.linalg.norm(features, axis=1, keepdims=True)
    >>> release = hsa.release_curvature(
    ...     features, epsilon=0.05, batch_order="shuffled_once", batch_size=5000, num_steps=400,
    ...     feature_norm=1.0)
    >>> 0.05 < release.share < 0.12
    True
    >>> loss = release.geometry(hsa.LossGeometry.softmax_cross_entropy(feature_norm=1.0))
    >>> loss.curvature < 0.25 * loss.smoothness
    True

    Source: this project; Tropp 2011 (arXiv 1011.1595 v4), Theorem 2.2, for the batches.
    """
    order = parse_batch_order(batch_order)
    if order is BatchOrder.POISSON:
        raise ValueError(
            "Expected batches of a fixed size, got POISSON: their sizes enter the modulus, and the "
            "curvature is not used there. Use WITHOUT_REPLACEMENT or an order of whole epochs."
        )
    epsilon = validate.real("epsilon", epsilon, above=0)
    failure = validate.real("failure", failure, above=0, maximum=1)
    rows = _unit_rows(features, square_norm(feature_norm, bias), bias)
    records = len(rows)
    size = validate.integer("batch_size", batch_size, minimum=1, maximum=records)
    steps = validate.integer("num_steps", num_steps, minimum=1)
    if order is BatchOrder.FULL:
        size = records
    if order is BatchOrder.CYCLIC:
        batches = np.split(rows[: records // size * size], records // size)
        exact, unit = max(_largest_eigenvalue(batch) for batch in batches), size
    else:
        exact, unit = _largest_eigenvalue(rows), records
    is_random = order not in (BatchOrder.FULL, BatchOrder.CYCLIC)
    noisy = _released(exact, epsilon, unit, failure / (1 + is_random), generator)
    number = records // size if order is BatchOrder.SHUFFLED_ONCE else steps
    share = batch_share(noisy, size, number, rows.shape[1], failure / 2) if is_random else noisy
    if order is BatchOrder.WITHOUT_REPLACEMENT:
        share += 1 / size  # the record joins b - 1 others
    return CurvatureRelease(min(share, 1.0), failure, dp_accounting.LaplaceDpEvent(1 / epsilon))


def batch_share(whole: float, size: int, number: int, dimension: int, failure: float) -> float:
    r"""Bounds the largest eigenvalue of `number` batches, each a uniform sample of all records.

    .. math:: N d\, \exp\big(-b\,(\kappa\log(\kappa/u) - \kappa + u)\big) \le \text{failure}

    Args:
        whole: u, at least the largest eigenvalue of the mean of x x^T over all records, |x| <= 1.
        size: b.
        number: N.
        dimension: d.
        failure: The probability that a batch is above the bound.

    Returns:
        kappa in [u, 1]; 1 always holds.
    """
    needed = math.log(number * dimension / failure) / size
    low, high = min(whole, 1.0), 1.0
    for _ in range(100):
        middle = (low + high) / 2
        if middle * math.log(middle / whole) - middle + whole >= needed:
            high = middle
        else:
            low = middle
    return high


def _unit_rows(features: Any, square: float, bias: bool) -> np.ndarray:
    """The features, with a 1 appended for a bias, in units of their largest norm."""
    rows = np.asarray(features, dtype=np.float64)
    if rows.ndim != 2 or not len(rows):
        raise ValueError(
            f"Expected features of shape (records, dimension), got shape {rows.shape}."
        )
    if bias:
        rows = np.hstack([rows, np.ones((len(rows), 1))])
    longest = float(np.square(rows).sum(axis=1).max())
    if not longest <= square * (1 + _ROUNDING):
        raise ValueError(
            f"Expected features of norm at most feature_norm = {math.sqrt(square - bias):g}, got "
            f"{math.sqrt(longest - bias):g}. Normalise them, as for training."
        )
    return np.asarray(rows / math.sqrt(square))


def _largest_eigenvalue(rows: np.ndarray) -> float:
    """Of the mean of x x^T."""
    small = rows.T @ rows if rows.shape[1] <= len(rows) else rows @ rows.T
    return float(np.linalg.eigvalsh(small)[-1]) / len(rows)


def _released(
    value: float, epsilon: float, unit: int, failure: float, generator: np.random.Generator | None
) -> float:
    """A bound on a value that one record moves by 1/unit, but with probability `failure`."""
    generator = np.random.default_rng() if generator is None else generator
    scale = 1 / (unit * epsilon)
    noisy = value + generator.laplace(0.0, scale)
    bound = noisy + scale * math.log(1 / (2 * failure)) + _ROUNDING
    return min(max(math.ceil(bound / _GRID) * _GRID, _SMALLEST), 1.0)
