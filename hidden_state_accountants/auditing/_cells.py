"""Divergences of two laws on cells: as computed, and certified (the proof is in `GridOracle`)."""

from __future__ import annotations

import math

import attrs
import numpy as np
from scipy import special

LARGEST_EPSILON = 700.0
"""Its exponential fits a double."""

_ROUNDING = 1e-11  # relative, per step: more than the sums of a convolution lose


@attrs.frozen(eq=False)
class CellPair:
    """The computed masses of the same cells under two laws, and how far the real ones may differ.

    Attributes:
        p: Masses of the first law; shape (cells,).
        q: Masses of the second law; shape (cells,).
        missing_p: Mass of the first law that was cut off on the way.
        missing_q: Mass of the second law that was cut off on the way.
        kappa: Shape (num_steps,); see `GridOracle`.
    """

    p: np.ndarray
    q: np.ndarray
    missing_p: float
    missing_q: float
    kappa: np.ndarray

    def reversed(self) -> CellPair:
        """The other direction."""
        return CellPair(self.q, self.p, self.missing_q, self.missing_p, self.kappa)

    def at_least(self, p: np.ndarray) -> np.ndarray:
        """Lower bounds on real probabilities from computed ones, of the first law.

        The better of Hölder's inequality and the upper bound on the complement.
        """
        largest = float(self.kappa.max())
        orders = np.geomspace(1e-4, 0.9, 40) / (2 * largest)
        orders = orders[orders > 1]
        p = np.maximum(p - self.missing_p, 0)
        best = np.zeros_like(p)
        for a in orders:
            log_moment = -0.5 * float(np.log1p(-2 * a * self.kappa).sum()) / a
            log_moment += _ROUNDING * len(self.kappa)
            best = np.maximum(best, (p * math.exp(-log_moment)) ** (a / (a - 1)))
        return np.maximum(best, 1 - self._inflated(1 - p + _ROUNDING * len(self.kappa)))

    def at_most(self, q: np.ndarray) -> np.ndarray:
        """Upper bounds on real probabilities from computed ones, of the second law."""
        return np.minimum(self._inflated(q + self.missing_q), 1.0)

    def _inflated(self, mass: np.ndarray) -> np.ndarray:
        slack = float(self.kappa.sum()) + _ROUNDING * len(self.kappa)
        return mass * math.exp(min(slack, LARGEST_EPSILON))

    def hockey_stick(self, epsilon: float) -> float:
        """The computed hockey-stick divergence."""
        return float(np.maximum(self.p - math.exp(epsilon) * self.q, 0).sum())

    def hockey_stick_lower_bound(self, epsilon: float) -> float:
        """At most the real one."""
        # The loss is about 2 * sum(kappa): a set chosen with it in mind loses least.
        best = 0.0
        for margin in (0.0, 2 * float(self.kappa.sum())):
            inside = self.p > math.exp(min(epsilon + margin, LARGEST_EPSILON)) * self.q
            p = self.at_least(np.array([self.p[inside].sum()]))[0]
            q = self.at_most(np.array([self.q[inside].sum()]))[0]
            best = max(best, float(p - math.exp(epsilon) * q))
        return best

    def renyi(self, order: float) -> float:
        """The computed Renyi divergence."""
        # The tails of p and q are cut off at different places; without these corrections a cell
        # of p could stand against an empty cell of q.
        p, q = self.p - self.missing_p, self.q + self.missing_q
        return _renyi(p[p > 0], q[p > 0], order)

    def renyi_lower_bound(self, order: float) -> float:
        """At most the real one."""
        p, q = self.at_least(self.p), self.at_most(self.q)
        return _renyi(p[p > 0], q[p > 0], order)


def _renyi(p: np.ndarray, q: np.ndarray, order: float) -> float:
    if p.size == 0:
        return 0.0
    exponent = order * np.log(p) + (1 - order) * np.log(q)
    return max(0.0, float(special.logsumexp(exponent)) / (order - 1))
