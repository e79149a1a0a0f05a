"""Marks that ordinary mistakes leave in the records: what is found is warned of, never refused.

A warning depends on the records. It is for whoever holds them, and nothing to be published; that
of units follows from what was released.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
from scipy import sparse

from hidden_state_accountants.ledger import active_budget
from hidden_state_adapters.sklearn.records import blocks_of

_ROUNDING = 1e-5  # of means and scales in float32
_SAME = 1e-9  # of sums of products
_CANDIDATES = 1000  # pairs of rows that are compared
_SAME_DIRECTION = 0.9  # squared length of the mean of records of norm 1: prepared ones have less
_MOST_NOISE = 0.05  # in one of the means: with more they tell nothing
_COUNTED = 1e-6  # of the sums of weights of the classes
_fitted: dict[tuple[int, int, float], int] = {}  # by records, features, a mark of them: fits


class UnaccountedStepWarning(UserWarning):
    """The records look as if a step was fitted to them that no epsilon is about."""


class PrivacyBudgetWarning(UserWarning):
    """The same records may be trained on again, and every fit spends its epsilon."""


@attrs.define(eq=False)
class Lineage:
    """An estimator and its copies, which a search makes and fits: they are warned of once.

    Attributes:
        fits, copies: Numbers of them that this process knows of.
        is_warned: True once a warning was given.
    """

    fits: int = 0
    copies: int = 0
    is_warned: bool = False

    def warn(self, what: str, stacklevel: int) -> None:
        """Warns with `PrivacyBudgetWarning`, the first time and outside of budgets."""
        if self.is_warned or active_budget() is not None:
            return
        self.is_warned = True
        warnings.warn(
            f"{what}: every fit on the same records spends its own epsilon, and whoever sees "
            "several models, or the best of several, sees all of them spent together. Fit inside "
            "of `with hidden_state_accountants.budget(epsilon, delta) as spent:`, which adds them "
            "up and refuses what goes over; search on public data; or use the default settings, "
            "which need no search. (This is said once; report_ has the count.)",
            PrivacyBudgetWarning,
            stacklevel=stacklevel + 1,
        )


def look_at(X: Any, y: np.ndarray, lineage: Lineage, name: str, stacklevel: int) -> int:
    """Warns of records that were trained on before, were transformed together, or are equal.

    Returns:
        Number of fits that this process knows of, this one included: on records that look like
        these, or of this estimator and its copies.
    """
    direction = np.random.default_rng(0).normal(size=X.shape[1])  # equal rows, equal products
    products = np.concatenate([X[part] @ direction for part in blocks_of(X)])
    mark = (X.shape[0], X.shape[1], float(products.sum()))
    mark = next(
        (
            old
            for old in _fitted
            if mark[:2] == old[:2] and math.isclose(mark[2], old[2], rel_tol=_SAME)
        ),
        mark,
    )
    _fitted[mark] = _fitted.get(mark, 0) + 1
    lineage.fits += 1
    if lineage.fits == 2:
        lineage.warn(f"fit 2 of this {name} and its copies", stacklevel + 1)
    elif _fitted[mark] == 2:
        lineage.warn(f"fit 2 of a {name} to these records", stacklevel + 1)
    if not sparse.issparse(X):
        step = _fitted_step(X)
        if step:
            warnings.warn(
                f"X looks as if {step} had been fitted to these very records: no epsilon covers "
                "what that shows of them. Use constants from public knowledge, or preprocessing=, "
                "which is accounted.",
                UnaccountedStepWarning,
                stacklevel=stacklevel + 1,
            )
    count = max(lineage.fits, _fitted[mark])
    if _has_equal_rows(X, y, products):
        warnings.warn(
            "some records are equal. Epsilon protects one record: who is in the data k times, or "
            "is oversampled, has about k times this epsilon. Keep one record for each person, and "
            "use class_weight in place of oversampling. (Equal records of different persons are "
            "fine.)",
            UnaccountedStepWarning,
            stacklevel=stacklevel + 1,
        )
    return count


def warn_of_balanced(codes: np.ndarray, weights: np.ndarray, stacklevel: int) -> None:
    """Warns of weights with which all classes weigh the same: they were counted."""
    counts, sums = np.bincount(codes), np.bincount(codes, weights)
    counts, sums = counts[counts > 0], sums[counts > 0]
    are_even = sums[0] > 0 and np.allclose(sums, sums[0], rtol=_COUNTED, atol=0)
    if are_even and counts.min() < counts.max():
        warnings.warn(
            "the weights look as if they were computed from these very labels (balanced): how "
            "often a label occurs is private, and no epsilon covers what the weights show of it. "
            "Take them from public knowledge of how frequent the classes are.",
            UnaccountedStepWarning,
            stacklevel=stacklevel + 1,
        )


def warn_of_units(
    means: np.ndarray, std: float, name: Callable[[int], str], stacklevel: int
) -> None:
    """Warns of columns of unlike units: normalised records then hardly differ.

    Looks at the released `means` alone, of records of norm at most 1, with noise of `std` in each.
    """
    if means @ means < _SAME_DIRECTION or std > _MOST_NOISE:
        return
    longest = [name(int(index)) for index in np.argsort(-(means**2))[:3]]
    warnings.warn(
        "a normalised record is nearly the same for all records (most of it is "
        f"{', '.join(longest)}): columns of unlike units, or far from zero. Pass column_bounds=, "
        "(low, high) of every column from public knowledge.",
        UserWarning,
        stacklevel=stacklevel + 1,
    )


def _fitted_step(X: np.ndarray) -> str | None:
    """The step that leaves columns that add up to zero exactly, or that all end at 0 and 1."""
    columns = X.shape[1]
    total, square = np.zeros(columns), np.zeros(columns)
    low, high = np.full(columns, np.inf), np.full(columns, -np.inf)
    for index in blocks_of(X):
        part = np.asarray(X[index], dtype=np.float64)
        total += part.sum(axis=0)
        square += np.einsum("ij,ij->j", part, part)
        np.minimum(low, part.min(axis=0), out=low)
        np.maximum(high, part.max(axis=0), out=high)
    varies = low < high
    if varies.sum() < 2:
        return None
    if np.all(np.abs(total) <= _ROUNDING * np.sqrt(len(X) * square)):
        return "a step that centres (StandardScaler, PCA)"
    is_unit = np.isclose(high, 1, rtol=_ROUNDING) & (
        np.isclose(low, 0, atol=_ROUNDING) | np.isclose(low, -1, rtol=_ROUNDING)
    )
    if is_unit[varies].all() and _between(X, low, high)[varies].sum() >= 2:
        return "a step that scales (MinMaxScaler)"
    return None


def _between(X: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """True for columns with a third value; flags have none, whatever was done to them."""
    found = np.zeros(X.shape[1], dtype=bool)
    for index in blocks_of(X):
        part = X[index]
        found |= ((part > low) & (part < high)).any(axis=0)
    return found


def _has_equal_rows(X: Any, y: np.ndarray, products: np.ndarray) -> bool:
    """True if two of the likeliest pairs of records are equal, labels included."""
    order = np.argsort(products, kind="stable")
    gaps = np.diff(products[order])
    pairs = np.flatnonzero(gaps <= _SAME * np.abs(products).max())[:_CANDIDATES]
    for pair in pairs:
        one, other = order[pair], order[pair + 1]
        difference = X[[one]] - X[[other]]
        if y[one] == y[other] and not abs(difference).sum():
            return True
    return False
