r"""The exact law of the iterates of noisy gradient descent on quadratic and linear losses.

Plain linear algebra, on purpose without the rest of the package: an oracle must not share a mistake
with what it judges.

>>> import numpy as np
>>> from gaussian_oracle import GaussianOracle
>>> oracle = GaussianOracle(
...     np.zeros((2, 1, 1)), [(1.0, [[0, 1]] * 4)], learning_rate=0.1, noise_std=2.0,
...     batch_size=2, record=0, slope_difference=[1.0])
>>> round(oracle.mu, 12)  # a linear loss: sqrt(4) * 1 / 2
1.0
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy import optimize, special

Batches = Sequence[Sequence[int] | np.ndarray]

_TOLERANCE = 1e-9  # relative, for "the same covariance" and "on a line"
_TAIL = 40.0  # standard deviations beyond which a double holds no mass


def equally_likely_orders(
    order: str, dataset_size: int, batch_size: int, num_steps: int
) -> list[tuple[float, Batches]]:
    """Every sequence of batches of a secret order, by brute force, as `orders` of an oracle.

    Args:
        order: without_replacement, shuffled_once or reshuffled.
        dataset_size: Number of records.
        batch_size: Of the batches; the last one of an epoch may be shorter.
        num_steps: Number of steps.
    """
    n, b = dataset_size, batch_size
    if order == "without_replacement":
        found = list(itertools.product(itertools.combinations(range(n), b), repeat=num_steps))
    else:
        epochs = -(-num_steps // -(-n // b))
        repeat = 1 if order == "shuffled_once" else epochs
        found = []
        for shuffles in itertools.product(itertools.permutations(range(n)), repeat=repeat):
            batches = [s[i : i + b] for s in shuffles for i in range(0, n, b)]
            found.append((batches * epochs)[:num_steps])
    return [(1 / len(found), batches) for batches in found]


class GaussianOracle:
    r"""Exact divergences between two runs on quadratic losses that differ in one slope.

    Record i has the gradient :math:`H_i x + g_i`; the neighbouring data set adds
    `slope_difference` to the slope :math:`g_r` of one record. From :math:`x_0 = 0`

    .. math::
        x_t = p_t \Big((1 - \eta_t w_t) x_{t-1} - \frac{\eta_t}{b}\Big(\sum_{i \in B_t}
              (H_i x_{t-1} + g_i) + \mathcal{N}(0, \sigma_t^2 I)\Big)\Big)

    so that, for every order of the batches, the released iterates are jointly Gaussian on both
    sides with the same covariance.

    Formal guarantees:
      - One order: `mu`, `delta` and `renyi` are the exact values for these two runs, in any
        dimension and for any released steps, up to floating-point rounding.
      - Several orders (the order is secret): both sides are mixtures. They are exact if all orders
        give the same covariance and all means lie on one line; the mixtures then differ along
        that line only. Anything else is refused.
      - Every value is a lower bound on what a valid claim about a class that contains the run
        (gradient bound, curvature, batch order) may state. No clipping takes place.

    Args:
        hessians: Shape (n, d, d), symmetric, of any sign; zeros for linear losses.
        orders: (probability, batches) pairs; the probabilities sum to 1. `batches` holds, for each
            of the T steps, the indices of the records of its batch; a record may occur repeatedly.
        learning_rate: eta, a number or shape (T,).
        noise_std: sigma, the standard deviation of the noise on the SUM of the gradients (the unit
            of the gradients), a number or shape (T,).
        batch_size: b, the public divisor.
        record: Index of the record that differs.
        slope_difference: Shape (d,).
        weight_decay: w, a number or shape (T,).
        prox: p, the factor of a proximal map at the end of a step, a number or shape (T,).
        slopes: g, shape (n, d); needed only where orders are random. None stands for zeros.
        release_steps: Steps, counted from 1, after which the iterate is released; the last always
            is.

    Source: the law of a linear recursion; Balle & Wang 2018 (arXiv 1805.06530 v2), Theorem 5, for
    delta as an integral.
    """

    def __init__(
        self,
        hessians: npt.ArrayLike,
        orders: Sequence[tuple[float, Batches]],
        *,
        learning_rate: npt.ArrayLike,
        noise_std: npt.ArrayLike,
        batch_size: int,
        record: int,
        slope_difference: npt.ArrayLike,
        weight_decay: npt.ArrayLike = 0.0,
        prox: npt.ArrayLike = 1.0,
        slopes: npt.ArrayLike | None = None,
        release_steps: Sequence[int] = (),
    ):
        self._hessians = np.asarray(hessians, dtype=np.float64)
        size, dimension, _ = self._hessians.shape
        here = np.zeros((size, dimension)) if slopes is None else np.array(slopes, dtype=np.float64)
        there = here.copy()
        there[record] += slope_difference
        self._slopes = np.stack([here, there], axis=-1)  # (n, d, 2): the two data sets
        self._weights = np.array([probability for probability, _ in orders])
        assert (self._weights > 0).all()
        assert abs(self._weights.sum() - 1) < _TOLERANCE
        (steps,) = {len(batches) for _, batches in orders}
        eta, sigma, decay, prox = (
            np.broadcast_to(np.asarray(value, dtype=np.float64), steps)
            for value in (learning_rate, noise_std, weight_decay, prox)
        )
        self._scale, self._decay = prox * eta / batch_size, prox * (1 - eta * decay)
        self._noise_std = self._scale * sigma
        laws = [self.law(batches, {*release_steps, steps}) for _, batches in orders]
        means, covariances = map(np.stack, zip(*laws, strict=True))
        self._first, self._second = _on_a_line(means, covariances)

    def law(self, batches: Batches, released: set[int]) -> tuple[np.ndarray, np.ndarray]:
        """Means (k d, 2) and covariance (k d, k d) of the k released iterates for one order."""
        dimension = self._hessians.shape[1]
        mean, covariance = np.zeros((dimension, 2)), np.zeros((dimension, dimension))
        means, joint, cross = np.zeros((0, 2)), np.zeros((0, 0)), np.zeros((0, dimension))
        for t, batch in enumerate(batches):
            rows = np.asarray(batch, dtype=np.intp)
            matrix = self._decay[t] * np.eye(dimension)
            matrix -= self._scale[t] * self._hessians[rows].sum(axis=0)
            mean = matrix @ mean - self._scale[t] * self._slopes[rows].sum(axis=0)
            covariance = matrix @ covariance @ matrix.T
            covariance += self._noise_std[t] ** 2 * np.eye(dimension)
            cross = cross @ matrix.T
            if t + 1 in released:
                means = np.vstack([means, mean])
                joint = np.block([[joint, cross], [cross.T, covariance]])
                cross = np.vstack([cross, covariance])
        return means, joint

    @property
    def mu(self) -> float:
        """The mu for which the pair is exactly that of N(0, 1) against N(mu, 1); one order only."""
        assert len(self._weights) == 1
        return abs(float(self._second[0] - self._first[0]))

    def delta(self, epsilon: float) -> tuple[float, float]:
        r"""Hockey-stick divergences :math:`\int \max(p - e^\varepsilon q, 0)`, epsilon in [0, 700].

        Returns:
            The data set against its neighbour, and the neighbour against the data set.
        """
        return (
            self._hockey_stick(self._first, self._second, epsilon),
            self._hockey_stick(self._second, self._first, epsilon),
        )

    def renyi(self, order: float) -> tuple[float, float]:
        """Renyi divergences (in nats) of an order > 1; directions as in `delta`."""
        return (
            self._renyi(self._first, self._second, order),
            self._renyi(self._second, self._first, order),
        )

    def _log_density(self, x: np.ndarray, centres: np.ndarray) -> np.ndarray:
        """Log density, times sqrt(2 pi), of the mixture of N(centre, 1)."""
        squares = -0.5 * (x[..., None] - centres) ** 2
        return special.logsumexp(squares, b=self._weights, axis=-1)

    def _hockey_stick(self, first: np.ndarray, second: np.ndarray, epsilon: float) -> float:
        def excess(x: float | np.ndarray) -> np.ndarray:
            x = np.asarray(x)
            return self._log_density(x, first) - self._log_density(x, second) - epsilon

        low = min(first.min(), second.min()) - _TAIL
        high = max(first.max(), second.max()) + _TAIL
        x = np.linspace(low, high, 8 * math.ceil(high - low) + 1)
        values = excess(x)
        changes = np.flatnonzero(np.sign(values[1:]) != np.sign(values[:-1]))
        roots = [optimize.brentq(excess, *x[i : i + 2], xtol=1e-14) for i in changes]
        edges = [-np.inf, *roots, np.inf]
        middles = [low, *(np.add(roots[1:], roots[:-1]) / 2), high] if roots else [0.0]
        total = 0.0
        for (left, right), middle in zip(itertools.pairwise(edges), middles, strict=True):
            if excess(middle) > 0:
                total += self._mass(left, right, first)
                total -= math.exp(epsilon) * self._mass(left, right, second)
        return min(max(total, 0.0), 1.0)

    def _mass(self, left: float, right: float, centres: np.ndarray) -> float:
        a, b = left - centres, right - centres
        a, b = np.where(a > 0, -b, a), np.where(a > 0, -a, b)  # the tail that does not cancel
        return float(self._weights @ (special.ndtr(b) - special.ndtr(a)))

    def _renyi(self, first: np.ndarray, second: np.ndarray, order: float) -> float:
        # The trapezoid rule converges geometrically. Where the integrand has a maximum, x is
        # order * (posterior mean of `first`) - (order - 1) * (that of `second`).
        low = order * first.min() - (order - 1) * second.max() - _TAIL
        high = order * first.max() - (order - 1) * second.min() + _TAIL
        step = 0.5 / (1 + np.ptp(first) + np.ptp(second))
        x, step = np.linspace(low, high, math.ceil((high - low) / step) + 1, retstep=True)
        exponent = order * self._log_density(x, first)
        exponent += (1 - order) * self._log_density(x, second)
        log_integral = special.logsumexp(exponent) + math.log(step / math.sqrt(2 * np.pi))
        return max(0.0, float(log_integral / (order - 1)))


def _on_a_line(means: np.ndarray, covariances: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Whitened positions, on their common line, of the means of the two data sets.

    Args:
        means: Shape (orders, k d, 2).
        covariances: Shape (orders, k d, k d).

    Raises:
        ValueError: There is no such line, or the covariances differ or are singular.
    """
    covariance = covariances[0]
    size = float(np.abs(covariance).max())
    if float(np.abs(covariances - covariance).max()) > _TOLERANCE * size:
        raise ValueError("Expected the same covariance in every order, got different ones.")
    eigenvalues, vectors = np.linalg.eigh(covariance)
    if not eigenvalues[0] > 1e-14 * eigenvalues[-1]:
        raise ValueError("Expected a covariance of full rank, got a singular one.")
    points = np.moveaxis(means, 2, 0) @ (vectors / np.sqrt(eigenvalues))  # (2, orders, k d)
    points = points - points[0, 0]
    norms = np.linalg.norm(points, axis=-1)
    farthest = points[np.unravel_index(np.argmax(norms), norms.shape)]
    direction = farthest / (norms.max() or 1.0)
    positions = points @ direction
    off_line = points - positions[..., None] * direction
    if float(np.linalg.norm(off_line, axis=-1).max()) > _TOLERANCE * norms.max():
        raise ValueError("Expected the means of all orders on a line, got a plane or more.")
    return positions[0], positions[1]
