r"""Theorem A where all steps are equal: what a run costs, whatever its length is.

A record takes part in every `period`-th step. Between two participations nothing moves it, so each
of them is one block of the isotonic regression (docs/theory/theorem_a.md). For c < 1 the slopes of
these equal blocks fall, so that all but the last one pool; for c >= 1 they rise, and none does. The
last block is shorter, and is pooled with the others or not.
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
) -> np.ndarray:
    r"""mu**2 from a common start, without domain and bounded drift.

    With :math:`q(n) = 1 - c^n`, m participations before the last one, and L steps from the last one
    on, for c < 1 and in units of (s/sigma)**2:

    .. math::
        c^{2L-2}\,\frac{q(2)}{q(2L)} + c^{2l-2}\,\frac{q(2)}{q(l)^2}\,\frac{q(lm)}{1 + c^{lm}}
        \qquad\text{or}\qquad \frac{c^{2L-2}\,(1 + c^l q(lm)/q(l))^2\,q(2)}
        {q(2L) + c^{2L} q(2lm)},

    the second one where the slope of the last block is not the larger one; for c >= 1
    :math:`m\,g(l) + g(L)` with :math:`1/g(n) = \sum_{i<n} c^{-2i}`.

    Args:
        contraction: c >= 0.
        shift_in_noise: s/sigma in [0, inf].
        period: l >= 1.
        participations: m + 1 >= 0, an array; 0 where the record never takes part.
        last: L in 1..l, an array of the same shape; 1 where the record never takes part.
    """
    total, last = np.asarray(participations), np.asarray(last, dtype=np.float64)
    takes_part = total > 0
    if not shift_in_noise:
        return np.zeros(total.shape)
    before = np.maximum(total - 1, 0).astype(np.float64)
    if contraction == 0:  # a step forgets all that was before it
        cost = np.where(last == 1, 1.0, 0.0)
    elif contraction < 1:
        cost = np.maximum(_contracting(math.log(contraction), period, before, last), _TINY)
    else:
        log = math.log(contraction)
        cost = before * _own_block(log, np.array(float(period))) + _own_block(log, last)
    return np.where(takes_part & (cost > 0), cost * shift_in_noise**2, 0.0)


def _own_block(log: float, steps: np.ndarray) -> np.ndarray:
    """1 / sum over i < steps of c^(-2i), for c >= 1."""
    if log == 0:
        return np.asarray(1 / steps)
    return np.asarray(np.expm1(-2 * log) / np.expm1(-2 * log * steps))


def _contracting(log: float, period: int, before: np.ndarray, last: np.ndarray) -> np.ndarray:
    def lost(steps: npt.ArrayLike) -> np.ndarray:
        return np.asarray(-np.expm1(log * np.asarray(steps)))

    kept = np.exp(log * period)
    early, early_twice = lost(period * before), lost(2 * period * before)
    alone = np.exp(2 * log * (last - 1)) * lost(2) / lost(2 * last)
    others = kept * kept * math.exp(-2 * log) * lost(2) / lost(period) ** 2
    others = others * early / (2 - early)
    decay = np.exp(2 * log * last)
    pools = kept * lost(2 * last) >= decay * lost(period) * (2 - early)
    shift = np.exp(log * (last - 1)) * (1 + kept * early / lost(period))
    together = shift * (shift * (lost(2) / (lost(2 * last) + decay * early_twice)))
    return np.where(before == 0, alone, np.where(pools, together, alone + others))


def largest_distance(contraction: float, sensitivity: float, period: int, num_steps: int) -> float:
    """No two runs are farther apart after any number of steps up to `num_steps`."""
    participations = -(-num_steps // period)
    if not sensitivity:
        return 0.0
    if contraction == 1:
        return sensitivity * participations
    if contraction < 1:
        log = math.log(contraction) if contraction else -math.inf
        return sensitivity * math.expm1(log * period * participations) / math.expm1(log * period)
    log = math.log(contraction)
    if log * (period * participations + period) > 700:
        return math.inf
    ratio = math.expm1(log * period * participations) / math.expm1(log * period)
    return sensitivity * math.exp(log * period) * ratio


def drifted_distance(
    drift_contraction: float, drift: float, diameter: float, num_steps: int
) -> float:
    """A bound after `num_steps` steps by the bounded drift and the domain alone, rounded up."""
    if drift_contraction == 1:
        moved = drift * num_steps
    elif drift_contraction == 0:
        moved = drift
    else:
        log = math.log(drift_contraction)
        moved = drift * math.expm1(log * num_steps) / (drift_contraction - 1)
    return min(diameter, moved * (1 + 1e-9))


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
