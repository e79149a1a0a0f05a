r"""Theorem A where all steps are equal: what a run costs, whatever its length is.

A record takes part in every `period`-th step. Between two participations nothing moves it, so each
of them is one block of the isotonic regression (docs/theory/theorem_a.md). For c > 1 the slopes of
equal blocks rise, and none pools. For c <= 1 they don't rise, so that all pool but the last two,
which may be shorter, and are pooled with the others or not.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

LONG = 100_000
"""Steps that are not scanned one by one any more where a closed form or a tail can be had."""
_TAILS = (2**14, 2**16, 2**18)
_SAME = 1e-12
_TINY = 1e-300  # what underflows is rounded up: no shift is forgotten


def mu_squared_of_equal_steps(
    contraction: float,
    shift_in_noise: float,
    *,
    period: int,
    participations: npt.ArrayLike,
    last: npt.ArrayLike,
    gap: npt.ArrayLike | None = None,
) -> np.ndarray:
    r"""mu**2 from a common start, without domain and bounded drift.

    A participation and the n - 1 steps after it are a block of shift and weight, in units of s and
    sigma**2 and k steps before the end,

    .. math:: S = c^{k + n - 1}, \qquad W = c^{2k} \sum_{i < n} c^{2i},

    and blocks that pool cost :math:`(\sum S)^2 / \sum W`. For c > 1 every block costs
    :math:`1 / \sum_{i<n} c^{-2i}` by itself.

    Args:
        contraction: c >= 0.
        shift_in_noise: s/sigma in [0, inf].
        period: l >= 1, the steps from one participation to the next.
        participations: How many there are, >= 0, an array; 0 where the record never takes part.
        last: Steps from the last one on, in 1..l, an array of the same shape; 1 where the record
            never takes part.
        gap: Steps from the last one but one to the last one, in 1..l; None for l.
    """
    total, last = np.asarray(participations), np.asarray(last, dtype=np.float64)
    gap = np.full(last.shape, float(period)) if gap is None else np.asarray(gap, dtype=np.float64)
    if not shift_in_noise:
        return np.zeros(total.shape)
    has_gap = np.minimum(np.maximum(total - 1, 0), 1)
    before = np.maximum(total - 2, 0).astype(np.float64)
    if contraction == 0:  # a step forgets all that was before it
        cost = np.where(last == 1, 1.0, 0.0)
    elif contraction <= 1:
        blocks = _blocks(math.log(contraction), period, before, has_gap * gap, last)
        cost = np.maximum(_regression(*blocks), _TINY)
    else:
        log = math.log(contraction)
        cost = before * _own_block(log, np.array(float(period))) + _own_block(log, last)
        cost += has_gap * _own_block(log, gap)
    return np.where((total > 0) & (cost > 0), cost * shift_in_noise**2, 0.0)


def _own_block(log: float, steps: np.ndarray) -> np.ndarray:
    """1 / sum over i < steps of c^(-2i), for c > 1."""
    return np.asarray(np.expm1(-2 * log) / np.expm1(-2 * log * steps))


Block = tuple[np.ndarray, np.ndarray]
"""Shifts and weights."""


def _blocks(
    log: float, period: int, before: np.ndarray, gap: np.ndarray, last: np.ndarray
) -> tuple[Block, Block, Block]:
    """Those of all participations but the last two, which pool, and of these two; c <= 1."""

    def powers(number: np.ndarray, stride: float) -> np.ndarray:
        """Sum over i < number of c^(stride i)."""
        if log == 0:
            return number
        return np.asarray(np.expm1(log * stride * number) / math.expm1(log * stride))

    def block(number: np.ndarray, steps: np.ndarray, after: np.ndarray) -> Block:
        shift = np.exp(log * (after + steps - 1)) * powers(number, float(period))
        return shift, np.exp(2 * log * after) * powers(number * steps, 2)

    one = np.ones(last.shape)
    return (
        block(before, np.full(last.shape, float(period)), last + gap),
        block(np.minimum(gap, 1), gap, last),
        block(one, last, 0 * one),
    )


def _regression(first: Block, second: Block, third: Block) -> np.ndarray:
    """The cost of three blocks, pooled where slopes fall."""

    def pooled(left: Block, right: Block) -> Block:
        return left[0] + right[0], left[1] + right[1]

    def falls(left: Block, right: Block) -> np.ndarray:
        return np.asarray(left[0] * right[1] >= right[0] * left[1])

    def cost(block: Block) -> np.ndarray:
        shift, weight = block
        return np.where(shift > 0, shift * (shift / np.where(weight > 0, weight, 1.0)), 0.0)

    early, late = pooled(first, second), pooled(second, third)
    late_pools = falls(second, third)
    first_pools = np.where(late_pools, falls(first, late), falls(first, second))
    all_pool = first_pools & (late_pools | falls(early, third))
    two = np.where(first_pools, cost(early) + cost(third), cost(first) + cost(late))
    apart = cost(first) + cost(second) + cost(third)
    some = np.where(first_pools | late_pools, two, apart)
    return np.where(all_pool, cost(pooled(early, third)), some)


def by_tails(num_steps: int, of_tail: Callable[[int], np.ndarray]) -> np.ndarray:
    """The smallest mu**2 that the last steps of a long run show, entry by entry.

    Any start of a window is valid, so more steps are looked at only while they help.

    Args:
        num_steps: Of the run, more than `LONG`.
        of_tail: Maps a number of steps, less than `num_steps`, to upper bounds.
    """
    best = of_tail(_TAILS[0])
    for tail in (tail for tail in _TAILS[1:] if tail < num_steps):
        found = np.minimum(of_tail(tail), best)
        if (found >= best * (1 - _SAME)).all() and np.isfinite(best).all():
            return best
        best = found
    return best
