"""Discrete laws on fewer values, each of which is rounded up to the largest one of its group."""

from __future__ import annotations

import math

import numpy as np

_LEAST = 1e-5  # of the largest value: what is smaller makes one group


def fewer(
    values: np.ndarray, masses: np.ndarray, edges: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The largest value between neighbouring edges, ascending, and the sum of the masses there.

    Args:
        values: Numbers, in any order.
        masses: Their masses, or how often each occurs.
        edges: Ascending ends of the groups, which contain them; values above the last one are a
            group as well.
    """
    groups, index = np.unique(np.searchsorted(edges, values), return_inverse=True)
    largest = np.full(len(groups), -math.inf)
    np.maximum.at(largest, index, values)
    return largest, np.bincount(index, masses)


def geometric(values: np.ndarray, ratio: float) -> np.ndarray:
    """Edges that are at most a ratio apart, up to the largest finite value; 0 is one of its own."""
    positive = values[(values > 0) & (values < math.inf)]
    if not len(positive):
        return np.zeros(1)
    top = float(positive.max())
    low = max(float(positive.min()), _LEAST * top)
    return np.append(0.0, np.geomspace(low, top, 2 + int(math.log(top / low) / math.log(ratio))))
