r"""Privacy profiles by their values at some nodes.

A profile is a convex function of :math:`e^\varepsilon`: it lies below the polygon through its
values, or through values above it.
"""

from __future__ import annotations

import numpy as np

from hidden_state_accountants.curves.profiles import Deltas

_ROUNDING = 2.0**-49  # of an interpolated value, in units of the value to its left


def polygon(epsilons: np.ndarray, values: np.ndarray) -> Deltas:
    """The polygon, rounded up; beyond the last node what it is there.

    Args:
        epsilons: Ascending, from 0 on.
        values: Falling, shape of the epsilons.
    """
    corners = np.expm1(epsilons)

    def deltas(epsilon: np.ndarray) -> np.ndarray:
        x = np.expm1(np.minimum(epsilon, epsilons[-1]))
        right = np.minimum(np.searchsorted(corners, x), len(corners) - 1)
        # Where the values fall steeply the interpolation cancels.
        inside = np.maximum(np.interp(x, corners, values), values[right])
        return np.asarray(inside + _ROUNDING * values[np.maximum(right - 1, 0)])

    return deltas
