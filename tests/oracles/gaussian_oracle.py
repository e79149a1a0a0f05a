"""The exact law of the iterates of noisy gradient descent on quadratic and linear losses.

Plain linear algebra, on purpose without the rest of the package: an oracle must not share a mistake
with what it judges.
"""

import itertools
import math

import numpy as np
from scipy import optimize, special

_TOLERANCE = 1e-9  # relative, for "the same covariance" and "on a line"
_TAIL = 40.0  # standard deviations beyond which a double holds no mass


def equally_likely_orders(order, dataset_size, batch_size, num_steps):
    """Every sequence of batches of a secret order, by brute force, as `orders` of an oracle.

    The order is without_replacement, shuffled_once or reshuffled; the last batch of an epoch may be
    shorter.
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
    sides with the same covariance. With several orders (the order is secret) both sides are
    mixtures: exact if all orders give the same covariance and all means lie on one line; anything
    else is refused. No clipping takes place, so every value is at most what a valid claim about a
    class that contains the run may state.

    Args:
        hessians: Shape (n, d, d), symmetric, of any sign; zeros for linear losses.
        orders: (probability, batches) pairs; `batches` holds the indices of the records of each
            step, where a record may occur repeatedly.
        learning_rate: eta, a number or one for each step, as weight_decay, noise_std and prox.
        noise_std: sigma, the standard deviation of the noise on the SUM of the gradients.
        batch_size: b, the public divisor.
        record: Index of the record that differs.
        slope_difference: Shape (d,).
        weight_decay: w.
        prox: p, the factor of a proximal map at the end of a step.
        slopes: g, shape (n, d); needed only where orders are random. None stands for zeros.
        release_steps: Steps, counted from 1, whose iterates are released; the last always is.

    Source: the law of a linear recursion; Balle & Wang 2018 (arXiv 1805.06530 v2), Theorem 5, for
    delta as an integral.
    """

    def __init__(
        self,
        hessians,
        orders,
        *,
        learning_rate,
        noise_std,
        batch_size,
        record,
        slope_difference,
        weight_decay=0.0,
        prox=1.0,
        slopes=None,
        release_steps=(),
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
        self._first, self._second = _on_a_line(*map(np.stack, zip(*laws, strict=True)))

    @classmethod
    def of(cls, event, hessians, orders, **arguments):
        """With the rates, the noise, the divisor and the releases of an event without clipping."""
        settings = {
            "learning_rate": event.per_step("learning_rate"),
            "noise_std": event.noise_std_on_sum(),
            "weight_decay": event.per_step("weight_decay"),
            "batch_size": event.batch_size,
            "release_steps": event.release_steps,
        }
        return cls(hessians, orders, **settings | arguments)

    def law(self, batches, released):
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
    def mu(self):
        """The mu for which one order's pair is exactly that of N(0, 1) against N(mu, 1).

        With several orders the largest distance of two means.
        """
        return float(np.ptp([self._first, self._second]))

    def delta(self, epsilon):
        r"""Hockey-stick divergences :math:`\int \max(p - e^\varepsilon q, 0)`, in both directions.

        The data set against its neighbour comes first. Epsilon is in [0, 700].
        """
        return (
            self._hockey_stick(self._first, self._second, epsilon),
            self._hockey_stick(self._second, self._first, epsilon),
        )

    def renyi(self, order):
        """Renyi divergences (in nats) of an order > 1; directions as in `delta`."""
        return (
            self._renyi(self._first, self._second, order),
            self._renyi(self._second, self._first, order),
        )

    def _log_density(self, x, centres):
        """Log density, times sqrt(2 pi), of the mixture of N(centre, 1)."""
        squares = -0.5 * (np.asarray(x)[..., None] - centres) ** 2
        return special.logsumexp(squares, b=self._weights, axis=-1)

    def _hockey_stick(self, first, second, epsilon):
        def excess(x):
            return self._log_density(x, first) - self._log_density(x, second) - epsilon

        ends = np.concatenate([first, second])
        x = np.arange(ends.min() - _TAIL, ends.max() + _TAIL, 0.125)
        is_inside = excess(x) > 0
        changes = np.flatnonzero(is_inside[1:] != is_inside[:-1])
        edges = [optimize.brentq(excess, *x[i : i + 2], xtol=1e-14) for i in changes]
        edges = [-np.inf] * int(is_inside[0]) + edges + [np.inf] * int(is_inside[-1])
        total = 0.0
        for left, right in zip(edges[::2], edges[1::2], strict=True):
            total += self._mass(left, right, first)
            total -= math.exp(epsilon) * self._mass(left, right, second)
        return min(max(total, 0.0), 1.0)

    def _mass(self, left, right, centres):
        a, b = left - centres, right - centres
        a, b = np.where(a > 0, -b, a), np.where(a > 0, -a, b)  # the tail that does not cancel
        return float(self._weights @ (special.ndtr(b) - special.ndtr(a)))

    def _renyi(self, first, second, order):
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


def _on_a_line(means, covariances):
    """Whitened positions, on their common line, of the means (orders, k d, 2) of both data sets."""
    covariance = covariances[0]
    if np.abs(covariances - covariance).max() > _TOLERANCE * np.abs(covariance).max():
        raise ValueError("Expected the same covariance in every order, got different ones.")
    eigenvalues, vectors = np.linalg.eigh(covariance)
    if not eigenvalues[0] > 1e-14 * eigenvalues[-1]:
        raise ValueError("Expected a covariance of full rank, got a singular one.")
    points = np.moveaxis(means, 2, 0) @ (vectors / np.sqrt(eigenvalues))  # (2, orders, k d)
    points = points - points[0, 0]
    norms = np.linalg.norm(points, axis=-1)
    direction = points[np.unravel_index(np.argmax(norms), norms.shape)] / (norms.max() or 1.0)
    positions = points @ direction
    off_line = points - positions[..., None] * direction
    if np.linalg.norm(off_line, axis=-1).max() > _TOLERANCE * norms.max():
        raise ValueError("Expected the means of all orders on a line, got a plane or more.")
    return positions
