"""In which steps a record takes part: the law of the first one and of their number."""

from __future__ import annotations

import math

import attrs
import numpy as np
import numpy.typing as npt
from scipy import stats

from hidden_state_accountants.events.batch_order import BINS, EPOCH_ORDERS, BatchOrder

_BY_EPOCH = (*EPOCH_ORDERS, *BINS)
_EXACT_STEPS = 300  # runs that are not rounded up
_RATIO = 1.004  # of neighbouring numbers that longer runs round up to


@attrs.frozen(eq=False)
class Inclusions:
    """Patterns of participation of one record, arrays of one shape.

    `weights` are their probabilities. The record takes part in `count` steps; `after_first` steps
    follow the first of them (0 if there is none), and at most `before_last` of them are before the
    last step of the run.
    """

    weights: np.ndarray
    count: np.ndarray
    after_first: np.ndarray
    before_last: np.ndarray


def inclusions(order: BatchOrder, num_steps: int, period: int, rate: float) -> Inclusions:
    """The law of the participations, for bounds that increase with each of the three numbers.

    CYCLIC: every position is listed with the weight that a secret order gives it. Runs of more than
    300 steps with batches drawn step by step are rounded up, by at most 0.4 percent. `rate` is the
    probability of taking part in a step of POISSON and WITHOUT_REPLACEMENT batches.
    """
    if order is BatchOrder.FULL or (order not in _BY_EPOCH and rate == 1):
        return _with_absent([1.0], [num_steps], [num_steps - 1], num_steps)
    if order in _BY_EPOCH:
        return _by_epoch(order, num_steps, period)
    return _step_by_step(num_steps, rate)


def _geometric(rate: float, num_steps: int) -> np.ndarray:
    """P(the first inclusion is in step t), t = 0..num_steps-1."""
    if rate == 1:
        return np.eye(1, num_steps)[0]
    return rate * np.exp(np.arange(num_steps) * math.log1p(-rate))


def _with_absent(
    weights: npt.ArrayLike, count: npt.ArrayLike, after: npt.ArrayLike, num_steps: int
) -> Inclusions:
    weights, count, after = (np.asarray(a) for a in (weights, count, after))
    absent = max(0.0, 1.0 - float(weights.sum()))
    weights, count, after = np.append(weights, absent), np.append(count, 0), np.append(after, 0)
    return Inclusions(weights, count, after, np.minimum(count, np.minimum(after, num_steps - 1)))


def _by_epoch(order: BatchOrder, num_steps: int, period: int) -> Inclusions:
    """Positions that the run does not reach leave the record out."""
    position = np.arange(min(period, num_steps))
    share = np.full(len(position), 1 / period)
    after = num_steps - 1 - position
    if order not in (BatchOrder.RESHUFFLED, BatchOrder.BALLS_IN_BINS_REDRAWN):
        count = -(-(num_steps - position) // period)
        law = _with_absent(share, count, after, num_steps)
        in_last = np.append((num_steps - 1 - position) % period == 0, False)
        return attrs.evolve(law, before_last=law.count - in_last)
    epochs, rest = divmod(num_steps, period)
    if epochs == 0:
        return _with_absent(share, np.ones(len(position)), after, num_steps)
    again = rest / period  # the chance of one more participation in the epoch that is cut off
    return _with_absent(
        np.concatenate([share * (1 - again), share * again]),
        np.repeat([epochs, epochs + 1], len(position)),
        np.tile(after, 2),
        num_steps,
    )


def _ladder(top: int) -> np.ndarray:
    """Numbers from 0 to top to round up to."""
    if top < _EXACT_STEPS:
        return np.arange(top + 1)
    rungs = np.ceil(np.geomspace(1, top, int(np.log(top) / np.log(_RATIO)) + 2)).astype(np.int64)
    return np.unique(np.concatenate([[0], np.minimum(rungs, top), [top]]))


def _step_by_step(num_steps: int, rate: float) -> Inclusions:
    """The first participation is geometric, the number of those after it binomial.

    Rounding the steps that are left up, for the binomial law too, only adds participations.
    """
    ladder = _ladder(num_steps - 1)
    left = np.arange(num_steps - 1, -1, -1)
    first = np.bincount(
        np.searchsorted(ladder, left), _geometric(rate, num_steps), minlength=len(ladder)
    )
    after = ladder[:, None]
    low, high = np.append(-1, ladder[:-1])[None, :], ladder[None, :]
    upper = stats.binom.sf(low, after, rate) - stats.binom.sf(high, after, rate)
    lower = stats.binom.cdf(high, after, rate) - stats.binom.cdf(low, after, rate)
    others = np.where(low >= after * rate, upper, lower)  # no digits lost in either tail
    weights = first[:, None] * others
    kept = weights > 0
    count = np.broadcast_to(1 + np.minimum(high, after), kept.shape)[kept]
    return _with_absent(weights[kept], count, np.broadcast_to(after, kept.shape)[kept], num_steps)
