"""Public bounds of the columns, and hat functions between them.

Every record is mapped by itself, before it is brought to its norm.
"""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
from scipy import sparse
from sklearn.preprocessing import SplineTransformer


@attrs.frozen(eq=False)
class Columns:
    """A map of records, one by one, by public numbers.

    Attributes:
        middle, half: Middle and half range of every column, shape (features,).
        knots: Number of knots of every column, shape (features,); 0 for one that stays a number.
    """

    middle: np.ndarray
    half: np.ndarray
    knots: np.ndarray

    @classmethod
    def of(cls, bounds: Any, splines: Any, names: list[str]) -> Columns:
        """Checks `column_bounds` and `splines` of an estimator, for columns of these names."""
        columns = len(names)
        try:
            low, high = np.broadcast_to(np.asarray(bounds, dtype=np.float64), (columns, 2)).T
        except (TypeError, ValueError):
            low = high = np.zeros(columns)
        is_range = (low < high) & np.isfinite(high - low)
        if np.ndim(bounds) not in (1, 2) or not is_range.all():
            raise ValueError(
                "Expected column_bounds, shape (features, 2): (low, high) of every column, or one "
                f"(low, high) for all, with low < high, for {columns} columns, got {bounds!r}, "
                f"wrong for {names[int(is_range.argmin())]}. Take them from public knowledge."
            )
        try:
            knots = np.broadcast_to(np.asarray(0 if splines is None else splines), columns)
            if knots.dtype.kind not in "iu" or ((knots != 0) & (knots < 2)).any():
                raise ValueError
        except ValueError:
            raise ValueError(
                "Expected splines, the number of knots of all columns or of every one, at least 2, "
                f"or 0 for a column that stays as it is, for {columns} columns, got {splines!r}."
            ) from None
        return cls((high + low) / 2, (high - low) / 2, knots)

    @property
    def width(self) -> int:
        """Columns of the result."""
        return int(np.maximum(self.knots, 1).sum())

    def apply(self, X: Any) -> np.ndarray:
        """Columns cut at their bounds and brought to [-1, 1]; hat functions of those with knots."""
        if sparse.issparse(X):
            raise ValueError(
                "Expected dense records beside column_bounds, got a sparse matrix, of which "
                "nothing would stay sparse. Scale it by public numbers first, or use X.toarray()."
            )
        scaled = np.clip((X - self.middle) / self.half, -1.0, 1.0)
        parts = [scaled[:, self.knots == 0]]
        for number in np.unique(self.knots[self.knots > 0]):
            chosen = scaled[:, self.knots == number]
            at = np.repeat(np.linspace(-1, 1, number)[:, None], chosen.shape[1], axis=1)
            parts.append(SplineTransformer(degree=1, knots=at).fit(at).transform(chosen))
        return np.hstack(parts).astype(X.dtype, copy=False)
