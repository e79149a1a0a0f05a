"""Certified threshold tests between two monotone noisy recursions on an interval."""

from __future__ import annotations

import math

import attrs
import numpy as np
from scipy import special

_PER_STD = 10  # nodes per standard deviation of the noise
_FEWEST_NODES = 400
_MOST_NODES = 800
_MOST_WORK = 2e7  # nodes**2 * steps


@attrs.frozen(eq=False)
class ThresholdTests:
    """Bounds on the probability that the last iterate is at most a threshold.

    Attributes:
        log_p: Logarithms of lower bounds under the first law; shape (thresholds,).
        log_q: Logarithms of upper bounds under the second law, for the same thresholds.
    """

    log_p: np.ndarray
    log_q: np.ndarray

    def delta(self, epsilon: float) -> float:
        """At most the hockey-stick divergence of the first law from the second."""
        return max(0.0, float(np.max(np.exp(self.log_p) - np.exp(epsilon + self.log_q))))

    def renyi(self, order: float) -> float:
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
    probability of being at most a threshold, to the next one below for an upper bound.

    Formal guarantees: for a nondecreasing step the rounded run, on shared noise, stays above
    (below) the real one by induction, so the bounds hold at every threshold (up to floating-point
    rounding). Logarithms throughout: probabilities of exp(-1e5) keep their relative precision.

    Args:
        length: Of the interval, in standard deviations of the noise.
        steps: The number of steps.
    """

    def __init__(self, length: float, steps: int):
        most = min(_MOST_NODES, math.isqrt(int(_MOST_WORK / steps)))
        self._steps = steps
        number = min(most, max(_FEWEST_NODES, int(_PER_STD * length)))
        self.nodes = np.linspace(-length / 2, length / 2, number)

    def tests(self, first: np.ndarray, second: np.ndarray, *, start: float) -> ThresholdTests:
        """Tests that find the first law at the lower end.

        Args:
            first: The step of the first law at `nodes`; nondecreasing.
            second: The step of the second law at `nodes`; nondecreasing.
            start: In the interval.
        """
        if not ((np.diff(first) >= 0).all() and (np.diff(second) >= 0).all()):
            raise AssertionError("a step is not monotone")
        laws = [self._law(first, start, up=True), self._law(second, start, up=False)]
        log_p, log_q = (np.minimum(np.logaddexp.accumulate(law), 0.0) for law in laws)
        return ThresholdTests(log_p, log_q)

    def _law(self, step: np.ndarray, start: float, *, up: bool) -> np.ndarray:
        """Log probabilities of the nodes after all steps, rounded up or down."""
        kernel = self._kernel(step, up)
        index = int(np.searchsorted(self.nodes, start, side="left" if up else "right"))
        index = min(max(index - (not up), 0), len(self.nodes) - 1)
        law = kernel[index]
        for _ in range(self._steps - 1):
            law = special.logsumexp(law[:, None] + kernel, axis=0)
        return law

    def _kernel(self, step: np.ndarray, up: bool) -> np.ndarray:
        """Log probability of going from one node to another."""
        gap = self.nodes[None, :] - step[:, None]
        low, high = gap[:, :-1], gap[:, 1:]
        low, high = np.where(low > 0, -high, low), np.where(low > 0, -low, high)
        log_low, log_high = special.log_ndtr(low), special.log_ndtr(high)
        between = log_high + np.log(-np.expm1(np.minimum(log_low - log_high, -1e-300)))
        below, above = special.log_ndtr(gap[:, 0]), special.log_ndtr(-gap[:, -1])
        kernel = np.empty_like(gap)
        if up:  # (node j-1, node j] counts as node j; what the projection sends to an end stays
            kernel[:, 0], kernel[:, 1:] = below, between
            kernel[:, -1] = np.logaddexp(kernel[:, -1], above)
        else:
            kernel[:, -1], kernel[:, :-1] = above, between
            kernel[:, 0] = np.logaddexp(kernel[:, 0], below)
        return kernel
