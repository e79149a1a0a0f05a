r"""Theorem E: a secret pattern that moves nobody else decides how far two runs are apart.

With the distances mu of the patterns and M = E N(mu, 1) the dominating pair is (M, N(0, 1)), or
(M, M mirrored at 0) if another record takes the record's place (docs/theory/hidden_coins.md).
Half-lines are the best tests of both pairs, so that epsilon and delta are functions of one
threshold y. With the likelihood ratios :math:`r_j = e^{\mu_j y - \mu_j^2/2}`

.. math:: \varepsilon = \log\sum_j p_j r_j, \qquad
          \delta = \sum_j p_j \big[\Phi(\mu_j - y) - r_j \Phi(-y)\big],

and alike in the other orders. No term is negative, and joint convexity makes delta an upper bound
at every larger epsilon, whatever y is: nothing cancels, and no y has to be exact.
"""

from __future__ import annotations

import functools
import math

import attrs
import dp_accounting
import numpy as np
from scipy import optimize

from hidden_state_accountants.curves.base import Curve, GaussianMixtureCurve
from hidden_state_accountants.curves.by_profile import ProfileCurve, hull_profile
from hidden_state_accountants.curves.gaussian import log_delta_at
from hidden_state_accountants.curves.losses import UNIT, Losses

_FORWARD, _BACKWARD, _REPLACED = "forward", "backward", "replaced"
_FAR = 38.0  # standard deviations: less than 1e-300 of a Gaussian is beyond
_SMALL = 0.5  # largest logarithm of a likelihood ratio near which 1 is taken off
_ERROR = 64 * UNIT  # of a sum, in units of its terms' sizes; of its logarithm
_ROUNDED_UP = 1 + 2.0**-40  # a delta: more than the relative error of a sum of Gaussian ones
_AT_ONCE = 300_000  # numbers in an array
_APART = 0.02  # neighbouring thresholds of a polygon, in standard deviations
_MOST_NODES = 4000  # of a polygon
_END = 15.0  # standard deviations of a polygon: 1e-50 is beyond
_SMALLEST, _SMALL_BESIDE = 1e-50, 1e-20  # deltas where a polygon ends, and has to
_LARGEST = 600.0  # epsilon of a polygon
_TINY = 5e-324  # the smallest double: delta has a logarithm
_PRECISION = 2e-15  # of a threshold


@attrs.frozen(eq=False, init=False, slots=False)
class HiddenMixtureCurve(Curve):
    """Theorem E: the larger divergence of both orders of its pair.

    Never above the mean of the Gaussian curves of the patterns, in which the pattern is revealed.
    Renyi divergences are those of that mean.

    Args:
        weights: p_j >= 0, the probabilities of the patterns; their sum is 1 up to rounding.
        mus: mu_j in [0, inf], between a run with the record and one without. A stochastically
            larger law is valid.
        is_replaced: True if the neighbour has another record, as far from the run without either.
    """

    weights: np.ndarray
    mus: np.ndarray
    is_replaced: bool
    revealed: GaussianMixtureCurve

    def __init__(self, weights: np.ndarray, mus: np.ndarray, *, is_replaced: bool = False):
        factor = 2.0 if is_replaced else 1.0
        revealed = GaussianMixtureCurve(weights, factor * np.asarray(mus, dtype=np.float64))
        self.__attrs_init__(revealed.weights, revealed.mus / factor, is_replaced, revealed)

    @property
    def mu(self) -> float | None:
        """The common mu of the pair, if there is only one."""
        return self.revealed.mu

    @property
    def largest_mu(self) -> float:
        """That of the worst pattern."""
        return self.revealed.largest_mu

    @functools.cached_property
    def _law(self) -> tuple[np.ndarray, np.ndarray]:
        """Weights and values of the finite distances."""
        finite = self.mus < math.inf
        return self.weights[finite], self.mus[finite]

    @functools.cached_property
    def _lost(self) -> float:
        """The probability of an infinite distance."""
        return float(self.weights[self.mus == math.inf].sum())

    @functools.cached_property
    def _top(self) -> float:
        """The largest finite distance; 0 if every one is 0 or infinite."""
        return float(np.max(self._law[1], initial=0.0))

    @property
    def _orders(self) -> tuple[str, ...]:
        return (_REPLACED,) if self.is_replaced else (_FORWARD, _BACKWARD)

    def _ends(self, order: str, far: float) -> tuple[float, float]:
        """Thresholds, at the first of which no epsilon is positive, and delta small at the last."""
        return (-self._top - 1.0, far) if order == _BACKWARD else (0.0, self._top + far)

    def _at(self, order: str, thresholds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Epsilons, which grow with the threshold, and deltas there, both rounded up."""
        rows = max(1, _AT_ONCE // max(1, len(self.mus)))
        parts = [
            self._some_at(order, thresholds[i : i + rows, None])
            for i in range(0, len(thresholds), rows)
        ]
        epsilons, deltas = zip(*parts, strict=True)
        return np.concatenate(epsilons), np.concatenate(deltas)

    def _some_at(self, order: str, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        weights, mus = self._law
        if order == _BACKWARD:
            epsilon, error = _log_ratio(weights, mus, self._lost, -y)
            epsilon = -epsilon + error
            return epsilon, _below(weights, mus, -y, epsilon) * _ROUNDED_UP
        epsilon, error = _log_ratio(weights, mus, self._lost, y)
        epsilon = epsilon + error
        delta = self._lost + _above(weights, mus, y)
        if order == _REPLACED:
            mirrored, error = _log_ratio(weights, mus, self._lost, -y)
            epsilon = epsilon - mirrored + error
            delta = delta + _below(weights, mus, -y, epsilon)
        return epsilon, delta * _ROUNDED_UP

    def _point(self, order: str, threshold: float) -> tuple[float, float]:
        epsilons, deltas = self._at(order, np.array([threshold]))
        return float(epsilons[0]), float(deltas[0])

    def _threshold(self, order: str, epsilon: float, far: float = _FAR) -> float:
        """The largest threshold up to the last one whose epsilon is no larger, about."""
        low, high = self._ends(order, far)
        if self._point(order, high)[0] <= epsilon:
            return high

        def excess(threshold: float) -> float:
            return self._point(order, threshold)[0] - epsilon

        root = low
        if excess(low) < 0:
            root = optimize.brentq(excess, low, high, xtol=_PRECISION, rtol=_PRECISION)
        step = _PRECISION * (1 + abs(root))
        while excess(root) > 0:  # round towards less epsilon, never more
            root -= step
            step *= 2
        return root

    def delta(self, epsilon: float) -> float:
        if epsilon == math.inf or not self._top:
            return self._lost
        found = [self._point(o, self._threshold(o, epsilon))[1] for o in self._orders]
        return min(1.0, self.revealed.delta(epsilon), max(found))

    def epsilon(self, delta: float) -> float:
        if not (delta > self._lost and self._top):
            return self.revealed.epsilon(delta)
        found = max(self._epsilon(order, delta) for order in self._orders)
        step = 4 * UNIT
        while self.delta(found) > delta:  # round towards more epsilon, never less
            found += step * max(found, self._top)
            step *= 2
        return min(found, self.revealed.epsilon(delta))

    def _epsilon(self, order: str, delta: float) -> float:
        low, high = self._threshold(order, 0.0), self._ends(order, _FAR)[1]
        if self._point(order, low)[1] <= delta:
            return 0.0
        if self._point(order, high)[1] > delta:
            return math.inf

        def excess(threshold: float) -> float:
            return math.log(max(self._point(order, threshold)[1], _TINY) / delta)

        root = optimize.brentq(excess, low, high, xtol=_PRECISION, rtol=_PRECISION)
        return max(0.0, self._point(order, root)[0])

    def rdp(self, orders: np.ndarray) -> np.ndarray:
        return self.revealed.rdp(orders)

    @functools.cached_property
    def quick(self) -> Curve:
        """The polygons through some thousand values of each order, with privacy losses."""
        if self.mu is not None or not self._top:
            return self.revealed
        nodes = [self._nodes(order) for order in self._orders]
        beyond = max(float(deltas[-1]) for _, deltas in nodes)
        if beyond > self._lost * _ROUNDED_UP + _SMALL_BESIDE:
            return self.revealed
        return ProfileCurve(hull_profile(*nodes), beyond)

    def _nodes(self, order: str) -> tuple[np.ndarray, np.ndarray]:
        """Epsilons, the first of which is 0, and deltas there."""
        start, end = self._threshold(order, 0.0, _END), self._ends(order, _END)[1]
        number = min(_MOST_NODES, 2 + int((end - start) / _APART))
        epsilons, deltas = self._at(order, np.linspace(start, max(start, end), number))
        last = int(np.argmax(deltas <= _SMALLEST)) or number - 1
        is_node = (epsilons > 0) & (epsilons < _LARGEST) & (np.arange(number) <= last)
        return np.append(0.0, epsilons[is_node]), np.append(deltas[0], deltas[is_node])

    def privacy_losses(self) -> Losses | None:
        return self.quick.privacy_losses()

    def to_dpevent(self) -> dp_accounting.DpEvent | None:
        mixture = getattr(dp_accounting, "MixtureOfGaussiansDpEvent", None)
        if mixture is None or self.is_replaced or self._lost or self.mu is not None:
            return self.revealed.to_dpevent()
        return mixture(1.0, self.mus.tolist(), self.weights.tolist())


def _log_ratio(
    weights: np.ndarray, mus: np.ndarray, lost: float, y: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The logarithm of the mixture's likelihood ratio to N(0, 1), and a bound on its error.

    Of the finite distances the weights sum to 1 less `lost`; y has shape (points, 1).
    """
    logs = mus * (y - mus / 2)
    sizes = mus * (np.abs(y) + mus)
    largest = logs.max(axis=1, keepdims=True)
    shares = weights * np.exp(logs - largest)
    total = shares.sum(axis=1)
    far = largest[:, 0] + np.log(total)
    far_error = _ERROR * (1 + (shares * sizes).sum(axis=1) / total)
    with np.errstate(over="ignore"):
        near = np.log1p(np.maximum(np.expm1(np.minimum(logs, 1.0)) @ weights - lost, -0.9))
    near_error = _ERROR * (2 * sizes @ weights + lost)
    is_near = (np.abs(logs).max(axis=1) < _SMALL) & (lost < _SMALL)
    return np.where(is_near, near, far), np.where(is_near, near_error, far_error)


def _above(weights: np.ndarray, mus: np.ndarray, y: np.ndarray) -> np.ndarray:
    r"""The sum of :math:`p_j [\Phi(\mu_j - y) - r_j \Phi(-y)]`; arguments as for `_log_ratio`."""
    logs = mus * (y - mus / 2)
    divergences = np.exp(_log_divergences(mus, y, logs))
    ratios = np.minimum(logs, 0.0)
    terms = np.where(logs < 0, np.exp(ratios) * divergences - np.expm1(ratios), divergences)
    return np.asarray(terms @ weights)


def _below(weights: np.ndarray, mus: np.ndarray, y: np.ndarray, epsilon: np.ndarray) -> np.ndarray:
    r"""The sum of :math:`e^\varepsilon p_j [r_j \Phi(y) - \Phi(y - \mu_j)]`."""
    logs = mus * (y - mus / 2)
    divergences = _log_divergences(mus, y, logs)
    with np.errstate(divide="ignore", over="ignore"):
        above = np.log(np.expm1(np.maximum(logs, 0.0)) + np.exp(divergences))
        terms = np.where(logs < 0, logs + divergences, above)
        return np.exp(epsilon[:, None] + terms) @ weights


def _log_divergences(mus: np.ndarray, y: np.ndarray, logs: np.ndarray) -> np.ndarray:
    """The logarithms of H_e between N(mu, 1) and N(0, 1) at e = |log r_j|."""
    with np.errstate(divide="ignore"):
        return log_delta_at(np.minimum(np.where(logs < 0, y, mus - y), mus / 2), mus)
