r"""The gradient of the envelope of softmax cross-entropy, for any framework.

For a target t and logits z it is y = p - t, where p minimises

.. math:: \sum_k p_k \log p_k - \langle p, z\rangle + (m/2)|p - t|^2, \qquad
    p \in \text{simplex}, \quad |p - t| \le C.

With the multiplier of the ball in r >= m, and v = log p, this is

.. math:: v_k + r (p_k - t_k) = z_k - \lambda, \qquad \sum_k p_k = 1, \qquad
    r = m \text{ or } |p - t| = C.

Logits, targets and v have shape (classes, records), so that sums over the classes are fast; r and
what belongs to a record has shape (records,). Proofs: docs/theory/moduli.md.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import attrs

from hidden_state_accountants.losses.arrays import TINY, Array, Arrays

NEWTON_STEPS = 12  # nearly all records need 4 to 8
RESCUE_STEPS = 200  # two bisections of a double each
TOLERANCE = 1e-12
"""Certified error of a gradient, in units of 1 + the largest difference of two logits."""

SMALL_STEP = 1e-13
"""Square of a step after which everything is solved: Newton's method is quadratic."""


class Point(NamedTuple):
    """State of the search for the gradients: v = `log_p`, p = exp(v) with sum 1, r = `ridge`."""

    log_p: Array
    p: Array
    ridge: Array


@attrs.frozen
class SoftmaxEnvelope:
    """The minimisation problems of a batch.

    Logits z, less the largest one of each record, and targets t have shape (classes, records). The
    clip norm is C, the smoothing m.
    """

    arrays: Arrays
    logits: Array
    targets: Array
    clip_norm: float
    smoothing: float

    @classmethod
    def of(
        cls, arrays: Arrays, logits: Array, targets: Array, clip_norm: float, smoothing: float
    ) -> SoftmaxEnvelope:
        """The problems for logits that need not be centred.

        No two points of the simplex are further apart than sqrt(2), so that a larger clip norm is
        none. One a little below cuts off so little that nothing certifies where: 1.41 takes its
        place, and no gradient is longer than what was asked for.
        """
        centred = logits - arrays.largest(logits)
        clip_norm = min(clip_norm, 2.0 if clip_norm >= math.sqrt(2) else 1.41)
        return cls(arrays, centred, targets, clip_norm, smoothing)

    def start(self) -> tuple[Point, Array]:
        """The softmax, pulled towards the target until it lies in the ball.

        Returns:
            The point, and which records were pulled. The others are solved if there is no
            smoothing.
        """
        xp, z, t = self.arrays, self.logits, self.targets
        exponentials = xp.exp(z)
        sums = xp.total(exponentials)
        log_softmax, softmax = z - xp.log(sums), exponentials / sums
        y = softmax - t
        share = xp.minimum(self.clip_norm / xp.maximum(xp.sqrt(xp.total(y * y)), TINY), 1.0)
        is_pulled = share < 1.0
        y = share * y
        p = (1.0 - share) * t + share * softmax
        # Where p underflows its logarithm is that of the softmax and the share.
        log_p = xp.maximum(xp.log(xp.maximum(p, TINY)), log_softmax + xp.log(share))
        log_p = xp.where(is_pulled, log_p, log_softmax)
        # The ridge for which z - log p - ridge * y is as short as possible.
        ridge = xp.total((z - log_p) * y) / xp.maximum(xp.total(y * y), TINY)
        ridge = xp.where(is_pulled, xp.maximum(ridge, self.smoothing), self.smoothing + 0.0 * share)
        return Point(log_p, p, ridge), is_pulled

    def newton_step(self, point: Point) -> tuple[Point, Array]:
        """One Newton step in (log p, lambda, r) together; the equation of the ball is 1/|y| = 1/C.

        The system is diagonal up to two equations for lambda and r.

        Returns:
            The next point, and for each record the square of the length of the step in p, up to
            terms of higher order.
        """
        xp, m = self.arrays, self.smoothing
        v, p, r = point
        y = p - self.targets
        squares = xp.total(y * y)
        h = v - self.logits
        slopes = 1.0 / (r * p + 1.0)
        a = p * slopes
        ay = a * y
        a0, a1, a2 = xp.total(a), xp.total(ay), xp.total(ay * y)
        b0, b1 = xp.total(a * h) + r * a1, xp.total(ay * h) + r * a2
        ratio = a1 / a0
        excess = squares * (xp.sqrt(squares) / self.clip_norm - 1.0) - b1 + b0 * ratio
        ridge = r + excess / xp.maximum(a2 - a1 * ratio, TINY)
        ridge = xp.maximum(xp.minimum(ridge, 3.0 * r + 5.0), xp.maximum(0.1 * r - 0.01, m))
        level = -(b0 + (ridge - r) * a1) / a0
        moves = (h + ridge * y + level) * slopes
        log_p = xp.when(
            xp.largest(xp.abs(moves)) > 0.5,
            lambda: self._within(v - moves, ridge, level),
            v - moves,
        )
        exponentials = xp.exp(log_p)
        sums = xp.total(exponentials)
        # The sum over p * moves is 0, so that of p * moves**2 / 2 is what the sum exceeds 1 by.
        return Point(log_p - xp.log(sums), exponentials / sums, ridge), 2.0 * xp.abs(sums - 1.0)

    def _within(self, log_p: Array, ridge: Array, level: Array) -> Array:
        """`log_p` put between bounds on the solution of v + r exp(v) = z + r t - lambda."""
        xp = self.arrays
        right = self.logits + ridge * self.targets - level
        log_ridge = xp.log(xp.maximum(ridge, TINY))
        most = _log_omega_bound(xp, right + log_ridge) - log_ridge
        return xp.maximum(xp.minimum(log_p, most), right - ridge)

    def error(self, point: Point) -> Array:
        r"""A bound on the distance of `gradient` to the exact one, shape (records,).

        With :math:`\rho = z - v - r y` less its mean, N = |y|, V the variance of y under p, and
        :math:`\theta = |N^2 - C^2| / V` (0 where r = m and N <= C)

        .. math:: \frac{|\rho|}{\sqrt{(2+r)(2+m)}}
            + \frac{\theta N}{2}\Bigl(1 + \sqrt{\tfrac{2+r}{2+m}}\Bigr)

        Infinite or not a number where the lemma does not apply, or nothing was solved.
        """
        xp, c, m = self.arrays, self.clip_norm, self.smoothing
        y, r = point.p - self.targets, point.ridge
        squares = xp.total(y * y)
        rho = point.log_p + r * y - self.logits
        for _ in range(2):  # the rounding of the mean of many classes would count for each
            rho = rho - xp.total(rho) / self.logits.shape[0]
        mean = xp.total(point.p * y)
        variance = xp.total(point.p * y * y) - mean * mean
        is_inside = (r <= m) & (squares <= c * c)
        theta = xp.where(is_inside, 0.0 * r, xp.abs(squares - c * c) / xp.maximum(variance, TINY))
        stretch = xp.sqrt((2.0 + r) / (2.0 + m))
        bound = xp.sqrt(xp.total(rho * rho)) * stretch / (2.0 + r)
        bound = bound + 0.5 * theta * xp.sqrt(squares) * (1.0 + stretch)
        applies = is_inside | ((theta <= 0.1) & (theta * (c * c) <= 0.6 * variance))
        return xp.where(applies, bound, math.inf + 0.0 * bound)

    def is_solved(self, error: Array) -> Array:
        """Returns whether the error of a record is no more than rounding."""
        spread = 1.0 + self.arrays.largest(-self.logits)
        return error <= TOLERANCE * spread

    def gradient(self, point: Point) -> Array:
        """y, no longer than C, shape (classes, records)."""
        xp = self.arrays
        y = point.p - self.targets
        norms = xp.sqrt(xp.total(y * y))
        return y * xp.minimum(self.clip_norm / xp.maximum(norms, TINY), 1.0)

    def value(self, point: Point) -> Array:
        r"""The loss, :math:`(r - m/2)|y|^2 - \langle t, \log p\rangle`, shape (records,)."""
        y = point.p - self.targets
        squares = self.arrays.total(y * y)
        fit = self.arrays.total(self.targets * point.log_p)
        return (point.ridge - 0.5 * self.smoothing) * squares - fit

    # The slow way, for the records that Newton's steps did not solve: a bracket on r, and for each
    # r the root in lambda of a convex decreasing function, which Newton's method finds from its
    # left side whatever the logits are.

    def rescue_start(self) -> Rescue:
        """The bracket that holds r."""
        xp, z = self.arrays, self.logits
        classes = z.shape[0]
        centred = z - xp.total(z) / classes
        c = self.clip_norm
        most = xp.sqrt(xp.total(centred * centred)) / c + math.log(classes) / c**2
        most = xp.maximum(most, self._least_ridge) * (1 + 1e-9)
        least = self._least_ridge + 0.0 * most
        return Rescue(least, least, most, 0.0 * most - math.inf, most < 0)

    @property
    def _least_ridge(self) -> float:
        return max(self.smoothing, TINY)  # it has a logarithm

    def rescue_step(self, state: Rescue) -> Rescue:
        """One step in lambda, or where lambda is solved in r."""
        xp, t, c = self.arrays, self.targets, self.clip_norm
        r, least, most, level, done = state
        point, level, sums = self._at(r, level)
        p = point.p
        a = p * sums / (1.0 + r * p * sums)
        a0 = xp.total(a)
        is_level = xp.abs(sums - 1.0) <= 1e-14 * (10.0 + math.sqrt(t.shape[0]))
        y = p - t
        squares = xp.total(y * y)
        excess = xp.sqrt(squares) / c - 1.0
        is_least = (r <= self._least_ridge) & (excess <= 0)
        ends = (xp.abs(excess) <= 3e-15) | (most - least <= 4e-16 * most) | is_least
        done = done | (is_level & ends)
        least = xp.where(is_level & (excess > 0), r, least)
        most = xp.where(is_level & (excess <= 0), r, most)
        a1 = xp.total(a * y)
        ridge = r + squares * excess / xp.maximum(xp.total(a * y * y) - a1 * a1 / a0, TINY)
        middle = xp.sqrt(xp.maximum(least, 1e-3 * most) * most)
        middle = xp.where((middle > least) & (middle < most), middle, 0.5 * (least + most))
        ridge = xp.where((ridge > least) & (ridge < most), ridge, middle)
        ridge = xp.where(is_level & ~done, ridge, r)
        level = level + xp.where(is_level, -(ridge - r) * a1, sums - 1.0) / a0
        return Rescue(ridge, least, most, level, done)

    def rescue_end(self, state: Rescue) -> Point:
        """Point that the bracket closed on, after one of Newton's steps where that is better."""
        found = self._at(state.ridge, state.level)[0]._replace(ridge=state.ridge - TINY)
        polished, _ = self.newton_step(found)
        is_better = self.error(polished) < self.error(found)
        where = self.arrays.where
        return Point(*(where(is_better, a, b) for a, b in zip(polished, found, strict=True)))

    def _at(self, ridge: Array, level: Array) -> tuple[Point, Array, Array]:
        """p for (r, lambda), normalised; lambda, not below every root; and the sum before."""
        xp = self.arrays
        right = self.logits + ridge * self.targets
        level = xp.maximum(level, xp.largest(right) - ridge)
        log_ridge = xp.log(ridge)
        log_p = _log_omega(xp, right - level + log_ridge) - log_ridge
        p = xp.exp(log_p)
        sums = xp.total(p)
        return Point(log_p - xp.log(sums), p / sums, ridge), level, sums


def solve(problem: SoftmaxEnvelope) -> Point:
    """The solutions, for arrays that are computed at once and not in a graph.

    p is not a number where no solution was found that `SoftmaxEnvelope.error` certifies.
    """
    point, is_pulled = problem.start()
    if problem.smoothing == 0 and not is_pulled.any():
        return point
    for _ in range(NEWTON_STEPS):
        point, squares = problem.newton_step(point)
        if not (squares > SMALL_STEP).any():
            is_solved = problem.is_solved(problem.error(point))
            if is_solved.all():
                return point
    is_solved = problem.is_solved(problem.error(point))
    if not is_solved.all():
        _rescue(problem, point, ~is_solved)
    return point


def _rescue(problem: SoftmaxEnvelope, point: Point, unsolved: Array) -> None:
    """Solves some records in the slow way, and writes them into `point`."""
    rest = attrs.evolve(
        problem, logits=problem.logits[:, unsolved], targets=problem.targets[:, unsolved]
    )
    state = rest.rescue_start()
    for _ in range(RESCUE_STEPS):
        state = rest.rescue_step(state)
        if state.done.all():
            break
    found = rest.rescue_end(state)
    found.p[:, ~rest.is_solved(rest.error(found))] = math.nan
    point.log_p[:, unsolved] = found.log_p
    point.p[:, unsolved] = found.p
    point.ridge[unsolved] = found.ridge


class Rescue(NamedTuple):
    """The state of the slow way: r = `ridge`, between `least` and `most`, lambda = `level`."""

    ridge: Array
    least: Array
    most: Array
    level: Array
    done: Array


def _log_omega_bound(xp: Arrays, x: Array) -> Array:
    """Not below the logarithm of Wright's omega: log(x) from 1 on, x below 0, and 0 between."""
    return xp.minimum(xp.log(xp.maximum(x, 1.0)), x)


def _log_omega(xp: Arrays, x: Array) -> Array:
    """The root v of v + exp(v) = x, by Newton's method from above: monotone and quadratic."""
    v = _log_omega_bound(xp, x)
    for _ in range(4):
        e = xp.exp(v)
        v = v - (v + e - x) / (1.0 + e)
    return v
