"""Full batches on a bounded domain: both runs pinned at opposite ends before the last step.

Probabilities of exp(-1e3) decide here, so that the recursion has a grid of its own, in logarithms.
"""

import math

import attrs
import numpy as np
from scipy import special

from hidden_state_accountants.events.batch_order import BatchOrder, sensitivity_in_clip_norms

# In the plane with the unit vectors e1, e2: the clipped gradients point along e2, the curved
# direction is W, the domain is a segment along U. -U'(I - e2 e2')W W'U = 1/8 is the most that a
# segment can show: the largest eigenvalue of the symmetric part of -(I - e2 e2')W W'.
W = np.array([0.5, math.sqrt(0.75)])
U = np.array([0.5, -math.sqrt(0.75)])


@attrs.frozen(eq=False)
class ThresholdTests:
    """Bounds on the probability that the last iterate is at most a threshold.

    Logarithms of lower bounds under the first law, and of upper bounds under the second.
    """

    log_p: np.ndarray
    log_q: np.ndarray

    def delta(self, epsilon):
        """At most the hockey-stick divergence of the first law from the second."""
        return max(0.0, float(np.max(np.exp(self.log_p) - np.exp(epsilon + self.log_q))))

    def renyi(self, order):
        """At most the Renyi divergence of the first law from the second."""
        # Data processing; the divergence of two coins grows in p and falls in q where p >= q.
        some = (self.log_p >= self.log_q) & np.isfinite(self.log_q) & (self.log_q < 0)
        p, q = self.log_p[some], self.log_q[some]
        with np.errstate(divide="ignore"):
            other = order * np.log(-np.expm1(p)) + (1 - order) * np.log(-np.expm1(q))
        other = np.where(p < 0, other, -np.inf)
        total = np.logaddexp(order * p + (1 - order) * q, other) / (order - 1)
        return max(0.0, float(np.max(total, initial=0.0)))


class IntervalChain:
    r"""The recursion x <- projection(step(x) + N(0, 1)) on [-length/2, length/2].

    After each step the iterate is rounded to a node: to the next one above for a lower bound on the
    probability of being at most a threshold, to the next one below for an upper bound. For a
    nondecreasing step the rounded run, on shared noise, stays above (below) the real one by
    induction, so the bounds hold at every threshold (up to floating-point rounding).
    """

    def __init__(self, length, steps):
        self._steps = steps
        self.nodes = np.linspace(-length / 2, length / 2, min(800, max(400, int(10 * length))))

    def tests(self, first, second, *, start):
        """Tests that find the first law at the lower end, of nondecreasing steps at the nodes."""
        assert (np.diff([first, second]) >= 0).all()
        laws = [self._law(first, start, up=True), self._law(second, start, up=False)]
        return ThresholdTests(*(np.minimum(np.logaddexp.accumulate(law), 0.0) for law in laws))

    def _law(self, step, start, *, up):
        """Log probabilities of the nodes after all steps, rounded up or down."""
        kernel = self._kernel(step, up)
        index = int(np.searchsorted(self.nodes, start, side="left" if up else "right"))
        law = kernel[min(max(index - (not up), 0), len(self.nodes) - 1)]
        for _ in range(self._steps - 1):
            law = special.logsumexp(law[:, None] + kernel, axis=0)
        return law

    def _kernel(self, step, up):
        """Log probability of going from one node to another."""
        gap = self.nodes[None, :] - step[:, None]
        low, high = gap[:, :-1], gap[:, 1:]
        low, high = np.where(low > 0, -high, low), np.where(low > 0, -low, high)
        log_low, log_high = special.log_ndtr(low), special.log_ndtr(high)
        between = log_high + np.log(-np.expm1(np.minimum(log_low - log_high, -1e-300)))
        below, above = special.log_ndtr(gap[:, :1]), special.log_ndtr(-gap[:, -1:])
        if up:  # (node j-1, node j] counts as node j; what the projection sends to an end stays
            between[:, -1:] = np.logaddexp(between[:, -1:], above)
            return np.hstack([below, between])
        between[:, :1] = np.logaddexp(between[:, :1], below)
        return np.hstack([between, above])


class BoundedDomain:
    r"""Refutes claims that take a clipped convex step for a nonexpansive one on a bounded domain.

    The domain is a segment of length R = domain_diameter in the plane, along U; the iterate is a
    number x in [-R/2, R/2]. The records besides the one that differs have, in pairs of opposite
    sign, the convex M-smooth losses

    .. math::
        f(z) = \tfrac{M}{2} \langle W, z \rangle^2 \pm P z_2, \quad
        P = C + \tfrac{\sqrt 3}{8} M R, \quad
        W = \tfrac12 (1, \sqrt 3), \quad U = \tfrac12 (1, -\sqrt 3)

    whose gradients are longer than C everywhere: clipping removes their change along :math:`z_2`,
    and what is left pushes the iterate AWAY from the middle. A step maps x to about
    (1 + eta M/8) x. As many records as needed are linear and add a drift. The record that differs
    pulls one run to the left, the other to the right, so that they sit at opposite ends before the
    last step; the drift is such that the left run stays at its end and is hardly pushed beyond,
    where the projection would hide how far away it is.

    The event has full batches of a convex loss, clipped, with eta M < 2, on a domain. Every value
    is at most the exact divergence of the run: tests of the last iterate against a threshold.

    Source: this project. Kong & Ribero 2025 (arXiv 2407.05237), Theorem 2.2, states
    :math:`D_\alpha \le \alpha (L_\lambda R + s)^2/(2 \sigma^2)` with :math:`L_\lambda = 1` for
    convex losses; clipped steps are proved :math:`\sqrt 2 L_\lambda`-Lipschitz only. See
    docs/papers/last_iterate.md.
    """

    OVERSHOOTS = (None, 0.0, 1.0, 2.0)
    """How far beyond its end, in standard deviations of the noise, the first run is pushed; None
    for the run that is symmetric about 0."""

    def __init__(self, event, relation):
        self.eta, self.clip, self.b = event.learning_rate, event.clip_norm, event.batch_size
        self.std = self.eta * float(event.noise_std_on_sum()[0]) / self.b
        self.diameter, self.curvature = event.domain_diameter, event.loss.smoothness
        self.pull = self.eta * self.clip / self.b  # the drift that one record can make
        is_replaced = sensitivity_in_clip_norms(BatchOrder.FULL, relation) == 2
        self.pulls = (-self.pull, self.pull if is_replaced else 0.0)  # of record and neighbour
        self.chain = IntervalChain(self.diameter / self.std, event.num_steps)

    def delta(self, epsilon):
        """The largest over a few drifts."""
        return max(self.tests(overshoot).delta(epsilon) for overshoot in self.OVERSHOOTS)

    def renyi(self, order):
        """The largest over a few drifts."""
        return max(self.tests(overshoot).renyi(order) for overshoot in self.OVERSHOOTS)

    def tests(self, overshoot):
        """Threshold tests of the last iterate."""
        nodes = self.chain.nodes
        moved = self.step(nodes * self.std, self.common_records(overshoot))
        left, right = ((moved + pull) / self.std for pull in self.pulls)
        return self.chain.tests(left, right, start=0.0 if overshoot is None else float(nodes[0]))

    def common_records(self, overshoot):
        """(number, gradient in the plane) of the records that do not differ, at most b - 1."""
        end = np.array(-self.diameter / 2)
        drift, linear = 0.0, 0
        for _ in range(3):  # the drift depends a little on the number of records that make it
            if overshoot is None:
                drift = -sum(self.pulls) / 2
            else:
                stays = end - self.step(end, self._pairs(self.b - 1 - linear))
                drift = float(stays) - self.pulls[0] - overshoot * self.std
            linear = min(self.b - 1, math.ceil(abs(drift) / self.pull))
        pairs = self._pairs(self.b - 1 - linear)
        if linear == 0:
            return pairs
        slope = float(np.clip(drift / (linear * self.pull), -1, 1)) * self.clip
        return [*pairs, (linear, lambda z: np.zeros_like(z) - slope * U)]

    def _pairs(self, most):
        """The expanding losses."""
        push = self.clip + math.sqrt(3) / 8 * self.curvature * self.diameter

        def gradient(sign):
            shift = np.array([0.0, sign * push])
            return lambda z: self.curvature * (z @ W)[..., None] * W + shift

        return [(most // 2, gradient(1.0)), (most // 2, gradient(-1.0))]

    def step(self, x, records):
        """The update by `records`, clipped, along the segment, before noise and projection."""
        total = np.zeros_like(x)
        for number, gradient in records:
            values = gradient(x[..., None] * U)
            norm = np.maximum(np.linalg.norm(values, axis=-1), 1e-300)
            total += number * (values @ U) * np.minimum(1.0, self.clip / norm)
        return x - self.eta / self.b * total
