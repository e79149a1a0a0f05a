"""Lower bounds on divergences from the probabilities of half-lines."""

from __future__ import annotations

import math

import numpy as np
from scipy import special

from hidden_state_accountants.auditing._participation import Atoms

_PER_STD = 25  # thresholds per standard deviation of the noise
_MOST_THRESHOLDS = 8000
_FAR = 14.0  # standard deviations beyond the means that thresholds reach
_ROUNDING = 1e-10  # relative: more than sums of positive terms lose
_NEGLIGIBLE = 1e-60  # atoms that are left out, and counted
_CHUNK = 4_000_000


class HalfLines:
    r"""Two mixtures of unit Gaussians on a line, compared on half-lines.

    .. math::
        D_{e^\varepsilon}(P, Q) \ge \max_c P(x > c) - e^\varepsilon Q(x > c), \qquad
        D_{e^\varepsilon}(Q, P) \ge \max_c Q(x < c) - e^\varepsilon P(x < c)

    Both are equalities where the likelihood ratio increases, up to the spacing of the thresholds.
    They stay lower bounds if the centres of P are rounded down and those of Q up.

    Args:
        first: Centres of P, rounded down; mass `beyond` is infinitely far to the right.
        second: Centres of Q, rounded up.
        first_factor: What the points of `first` are multiplied with.
        second_factor: The same for `second`; at most first_factor.
    """

    def __init__(self, first: Atoms, second: Atoms, first_factor: float, second_factor: float):
        p, p_mass, p_lost = _kept(first, first_factor)
        q, q_mass, q_lost = _kept(second, second_factor)
        low, high = min(p.min(), q.min()) - _FAR, max(p.max(), q.max()) + _FAR
        number = min(_MOST_THRESHOLDS, math.ceil((high - low) * _PER_STD))
        c = np.linspace(low, high, number)
        less, more = 1 - _ROUNDING, 1 + _ROUNDING
        self._p_above, self._q_above = _above(p, p_mass, c) * less, _above(q, q_mass, c) * more
        self._q_below, self._p_below = _above(-q, q_mass, -c) * less, _above(-p, p_mass, -c) * more
        self._q_above += q_lost  # what was left out counts against the bound
        self._p_below += p_lost

    def delta(self, epsilon: float) -> float:
        """A lower bound on the larger of the two hockey-stick divergences."""
        factor = math.exp(epsilon)
        forward = float(np.max(self._p_above - factor * self._q_above))
        return max(0.0, forward, float(np.max(self._q_below - factor * self._p_below)))

    def renyi(self, order: float) -> float:
        """A lower bound on the larger Renyi divergence: that of a half-line and the rest."""
        return max(
            _binary_renyi(self._p_above, self._q_above, order),
            _binary_renyi(self._q_below, self._p_below, order),
        )


def _kept(atoms: Atoms, factor: float) -> tuple[np.ndarray, np.ndarray, float]:
    kept = atoms.mass > _NEGLIGIBLE
    points, index = np.unique(factor * atoms.points[kept], return_inverse=True)
    lost = float(atoms.mass[~kept].sum()) + atoms.beyond
    return points, np.bincount(index, atoms.mass[kept]), lost


def _above(centres: np.ndarray, mass: np.ndarray, c: np.ndarray) -> np.ndarray:
    rows = max(1, _CHUNK // len(centres))
    parts = [c[i : i + rows] for i in range(0, len(c), rows)]
    return np.concatenate([special.ndtr(centres - part[:, None]) @ mass for part in parts])


def _binary_renyi(p: np.ndarray, q: np.ndarray, order: float) -> float:
    """p and q are a lower and an upper bound on the probabilities of the same events."""
    p, q = p[p > q], q[p > q]
    if p.size == 0:
        return 0.0
    q = np.maximum(q, 1e-300)
    with np.errstate(divide="ignore"):
        inside = order * np.log(p) + (1 - order) * np.log(q)
        outside = order * np.log1p(-np.minimum(p, 1.0)) + (1 - order) * np.log1p(-q)
    return max(0.0, float(np.max(np.logaddexp(inside, outside))) / (order - 1))
