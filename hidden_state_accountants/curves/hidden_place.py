r"""Theorem F: a record has one of several places, and nobody learns which.

Two runs P and Q on neighbouring data sets draw the same secret place k with probability p_k, and a
third run R does not read it. If P_k and R are A_k-GDP, P_k and Q_k are B_k-GDP, and Q_k and R are
C_k-GDP, then for every epsilon >= 0

.. math:: \sup_S P(S) - e^\varepsilon Q(S) \le \max_\rho \sum_k p_k\, h_k\big(
          \min(\max(y_k, \rho - C_k), \rho + A_k - B_k)\big), \quad
          h_k(y) = \Phi(y + B_k) - e^\varepsilon \Phi(y),

where y_k is the largest point of h_k. With A and C exchanged it bounds the other order
(docs/theory/hidden_place.md).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import attrs
import dp_accounting
import numpy as np
from scipy import optimize, special

from hidden_state_accountants.curves.base import Curve, GaussianMixtureCurve
from hidden_state_accountants.curves.by_profile import ProfileCurve, hull_profile
from hidden_state_accountants.curves.losses import Losses

_TOLERANCE = 1e-3  # relative, of a maximum over rho
_INTERVALS = 48  # of rho, to begin with
_NEAR = np.linspace(-1.0, 1.0, 9)  # around the best rho so far, in intervals
_ROUNDS = 5  # of looking there
_WIDE = 1.0  # interval, in which every place has its best y
_FAR, _BEYOND = 40.0, 1e100  # standard deviations: beyond them nothing is left; any number
_SMALLEST_DISTANCE = 1e-9  # what a smaller B_k is rounded up to
_UNIT = 2.0**-42  # relative error of scipy's Phi, and of a sum, rounded up
_TINY = 1e-300  # delta has a logarithm
_DENSITY = 1 / math.sqrt(2 * math.pi)
_LARGEST = 600.0  # epsilon that is looked at
_AT_ONCE, _MOST = 300_000, 1_000_000  # numbers in an array; in those of one epsilon
_RATIO = 1.02  # of neighbouring nodes of a polygon, up to
_WIDEST = 0.28  # of the last of these; then they are equally far apart
_FAR_NODES = 36  # beyond it
_SMALL, _SMALLEST = 1e-13, 1e-50  # deltas where they begin and end
_MANY = 8  # epsilons
_PRECISION = 1e-7  # relative, of an epsilon


@attrs.frozen(eq=False)
class Places:
    """The distances of Theorem F for one choice of R; arrays of shape (places,).

    Attributes:
        weights: p_k >= 0 that sum to 1 up to rounding.
        to_record: A_k in [0, inf], between the run with the record and R.
        between: B_k in (0, inf), between the two runs.
        to_other: C_k in [0, inf], between the other run and R.
    """

    weights: np.ndarray
    to_record: np.ndarray
    between: np.ndarray
    to_other: np.ndarray

    @classmethod
    def of(
        cls, weights: np.ndarray, to_record: np.ndarray, between: np.ndarray, to_other: np.ndarray
    ) -> Places:
        """Joins equal places and applies the triangle inequalities."""
        between = np.maximum(np.minimum(between, to_record + to_other), _SMALLEST_DISTANCE)
        to_record = np.minimum(to_record, between + to_other)
        to_other = np.minimum(to_other, to_record + between)
        to_record = np.maximum(to_record, between - to_other)
        rows = np.stack([to_record, between, to_other])
        distances, index = np.unique(rows, axis=1, return_inverse=True)
        return cls(np.bincount(index.ravel(), weights), *distances)

    @property
    def exchanged(self) -> Places:
        """The places for the other order of the two data sets."""
        return attrs.evolve(self, to_record=self.to_other, to_other=self.to_record)

    def deltas(self, epsilons: np.ndarray) -> np.ndarray:
        """Bounds on the divergences at epsilons >= 0, a `_TOLERANCE` above the maximum over rho."""
        rows = max(1, _AT_ONCE // (len(self.weights) * (_INTERVALS + 2)))
        parts = [epsilons[i : i + rows] for i in range(0, len(epsilons), rows)]
        return np.concatenate([self._deltas(np.minimum(part, _LARGEST)) for part in parts])

    def _deltas(self, epsilons: np.ndarray) -> np.ndarray:
        all_rows = np.arange(len(epsilons))
        growth = np.exp(epsilons)
        best_y = -epsilons[:, None] / self.between - self.between / 2

        def y_at(row: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
            """The best y of every place for rho in [low, high], shape (len(row), places)."""
            return np.clip(
                best_y[row],
                low[:, None] - self.to_other,
                high[:, None] + self.to_record - self.between,
            )

        def total(row: np.ndarray, y: np.ndarray) -> np.ndarray:
            """The sum of all h_k, rounded up."""
            record = special.ndtr(y + self.between)
            other = growth[row, None] * special.ndtr(y)
            return (record * (1 + _UNIT) - other * (1 - _UNIT)) @ self.weights

        def bound(
            row: np.ndarray, low: np.ndarray, high: np.ndarray, at_ends: np.ndarray
        ) -> np.ndarray:
            """A bound for all rho in [low, high], of which `at_ends` is the larger end's value."""
            left, right = y_at(row, low, low), y_at(row, high, high)
            with np.errstate(over="ignore", invalid="ignore"):
                bend = _bend(left, right) * growth[row, None]
                bend += _bend(left + self.between, right + self.between)
                above = at_ends + (high - low) ** 2 / 8 * (bend @ self.weights)
            is_wide = high - low > _WIDE
            wide = row[is_wide], low[is_wide], high[is_wide]
            above[is_wide] = np.fmin(above[is_wide], total(wide[0], y_at(*wide)))
            return above

        # Outside of these no h_k is at its largest point, and the first and last interval have it.
        edges = np.linspace(
            np.clip((best_y + self.between - self.to_record).min(axis=1), -_FAR, _FAR),
            np.clip((best_y + self.to_other).max(axis=1), -_FAR, _FAR),
            _INTERVALS + 1,
            axis=1,
        )
        width = (edges[:, 1] - edges[:, 0])[:, None]
        edges = np.pad(edges, ((0, 0), (1, 1)), constant_values=((0, 0), (-_BEYOND, _BEYOND)))
        tried, largest = edges, np.zeros(len(epsilons))
        for _ in range(_ROUNDS):
            rows, flat = np.repeat(all_rows, tried.shape[1]), tried.ravel()
            found = total(rows, y_at(rows, flat, flat)).reshape(tried.shape)
            if tried is edges:
                at_edges = found
            place = found.argmax(axis=1)
            largest = np.maximum(largest, found[all_rows, place])
            tried = tried[all_rows, place][:, None] + width * _NEAR
            width = width * (_NEAR[1] - _NEAR[0])
        row = np.repeat(all_rows, edges.shape[1] - 1)
        low, high = edges[:, :-1].ravel(), edges[:, 1:].ravel()
        at_low, at_high = at_edges[:, :-1].ravel(), at_edges[:, 1:].ravel()
        result = np.zeros(len(epsilons))
        while len(row):
            above = bound(row, low, high, np.maximum(at_low, at_high))
            is_done = above <= largest[row] * (1 + _TOLERANCE) + _TINY
            is_done |= len(row) * len(self.weights) > _MOST
            np.maximum.at(result, row[is_done], above[is_done])
            row, low, high, at_low, at_high = (
                array[~is_done] for array in (row, low, high, at_low, at_high)
            )
            middle = (np.maximum(low, -2 * _FAR) + np.minimum(high, 2 * _FAR)) / 2
            at_middle = total(row, y_at(row, middle, middle))
            np.maximum.at(largest, row, at_middle)
            row = np.tile(row, 2)
            low, high = np.concatenate([low, middle]), np.concatenate([middle, high])
            at_low = np.concatenate([at_low, at_middle])
            at_high = np.concatenate([at_middle, at_high])
        return np.maximum(result, largest * (1 + _TOLERANCE) + _TINY)


def _bend(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """A bound on |t| phi(t), the slope of the normal density, for t in [low, high]."""
    nearest = np.maximum(np.maximum(low, -high), 0.0)
    return np.maximum(np.abs(low), np.abs(high)) * np.exp(-(nearest**2) / 2) * _DENSITY


def _smallest(places: Sequence[Places], epsilons: np.ndarray) -> np.ndarray:
    """The smallest divergences; of many only those of the R that is best at one of a few."""
    if len(epsilons) > _MANY:
        some = epsilons[:: len(epsilons) // _MANY]
        best = np.argmin([p.deltas(some) for p in places], axis=0)
        places = [places[i] for i in np.unique(best)]
    return np.asarray(np.min([p.deltas(epsilons) for p in places], axis=0))


@attrs.frozen(eq=False, slots=False)
class HiddenPlaceCurve(Curve):
    """Theorem F, with the smallest divergence of several choices of R, and the mean revealed."""

    places: tuple[Places, ...]
    revealed: GaussianMixtureCurve
    _found: dict[float, float] = attrs.field(factory=dict, init=False, repr=False)

    @functools.cached_property
    def _orders(self) -> tuple[Sequence[Places], ...]:
        """The distances for both orders of the data sets; one if they are alike."""
        if all(np.array_equal(p.to_record, p.to_other) for p in self.places):
            return (self.places,)
        return self.places, tuple(p.exchanged for p in self.places)

    def _deltas(self, epsilons: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The divergences of both orders."""
        found = [_smallest(places, epsilons) for places in self._orders]
        return found[0], found[-1]

    def delta(self, epsilon: float) -> float:
        revealed = self.revealed.delta(epsilon)
        if not 0 < revealed <= 1 or epsilon > _LARGEST:
            return revealed
        return min(revealed, float(np.max(self._deltas(np.array([epsilon])))))

    def epsilon(self, delta: float) -> float:
        if delta not in self._found:  # curves are compared at one delta, again and again
            self._found[delta] = self._epsilon(delta)
        return self._found[delta]

    def _epsilon(self, delta: float) -> float:
        high = self.revealed.epsilon(delta)
        if not 0 < high <= _LARGEST:
            return high
        if self.delta(0.0) <= delta:
            return 0.0

        def excess(epsilon: float) -> float:
            largest = max(float(p.deltas(np.array([epsilon]))[0]) for p in best)
            return math.log(max(min(largest, self.revealed.delta(epsilon)), _TINY) / delta)

        root, best = high, [places[0] for places in self._orders]
        for _ in range(len(self.places)):  # the best R there, which may be another one elsewhere
            found = [min(o, key=lambda p: p.deltas(np.array([root]))[0]) for o in self._orders]
            if root < high and found == best:
                break
            best = found
            if excess(high) > 0:  # by the tolerance
                return high
            root = optimize.brentq(excess, 0.0, high, xtol=_PRECISION * high, rtol=_PRECISION)
        step = _PRECISION
        while self.delta(root) > delta:  # round towards more epsilon, never less
            root = min(high, root * (1 + step) + step * high)
            step *= 2
        return root

    def rdp(self, orders: np.ndarray) -> np.ndarray:
        return self.revealed.rdp(orders)

    @functools.cached_property
    def quick(self) -> Curve:
        """The polygon through few values of each order, which has privacy losses as well."""
        usual, top = self.epsilon(_SMALL), self.epsilon(_SMALLEST)
        if not 0 < usual < top <= _LARGEST:
            return self.revealed
        near = usual / 300 * _RATIO ** np.arange(math.log(300 * _WIDEST) / math.log(_RATIO))
        between = np.arange(near[-1], usual, _WIDEST * (_RATIO - 1) * usual)[1:]
        nodes = np.concatenate([[0.0], near, between, np.geomspace(usual, top, _FAR_NODES)])
        revealed = np.array([self.revealed.delta(epsilon) for epsilon in nodes])
        orders = [(nodes, np.minimum(_smallest(o, nodes), revealed)) for o in self._orders]
        return ProfileCurve(hull_profile(*orders), max(float(deltas.min()) for _, deltas in orders))

    def privacy_losses(self) -> Losses | None:
        return self.quick.privacy_losses()

    def to_dpevent(self) -> dp_accounting.DpEvent | None:
        return self.revealed.to_dpevent()
