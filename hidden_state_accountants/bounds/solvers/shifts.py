r"""Theorem A's minimum over the shifts: an isotonic regression (docs/theory/theorem_a.md).

The smallest :math:`\mu^2 = \sum_t (a_t/\sigma_t)^2` such that

.. math:: z_t = c_t z_{t-1} + s_t - a_t \ge 0, \qquad z_T = 0.

With :math:`C_t = \prod_{j>t} c_j`, :math:`r_t = s_t C_t`, :math:`w_t = (C_t \sigma_t)^2` the
optimum is the increasing isotonic regression of :math:`r_t/w_t` with weights :math:`w_t`: blocks of
pooled steps cost :math:`(\sum r)^2 / \sum w` each. Three forms of it:

* `least_mu_squared`: one record, step by step, also from a later start where a bound on the
  distance of the two runs there is known. scipy's routine computes the same regression but needs
  every :math:`w_t` in one floating-point range; here a block is a triple (S, W, k) that stands for
  :math:`(S\,2^k, W\,4^k)`. Only sums of positive terms occur, so no digits are lost.
* `two_places.EpochSums`: a record at any position. Between two participations nothing moves it, so
  a participation and the steps up to the next one are a single block.
* `mu_squared_of_equal_steps`: equal steps in closed form. For c > 1 the slopes of equal blocks
  rise, and none pools. For c <= 1 they don't rise, so that all pool but the last two, which may be
  shorter, and are pooled with the others or not.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Block = tuple[float, float, int]
"""(S, W, k): shift S * 2**k and weight W * 4**k of a run of pooled steps."""

LONG = 100_000
"""Steps that are not scanned one by one any more where a closed form or a tail can be had."""
_TAILS = (2**14, 2**16, 2**18)  # steps before the end of a longer run in which windows may start
_SAME = 1e-12  # relative difference that may be rounding
_ZERO: Block = (0.0, 0.0, 0)
_LARGE = 2.0**64  # products are renormalised when they leave [1/_LARGE, _LARGE]
_TINY = 1e-300  # what underflows is rounded up: no shift is forgotten
_CHUNK = 4096  # steps that a scan turns into Python numbers at a time
_NEAR = 1000  # starts of windows that differ by less than this part of their length are alike


def _add(left: Block, right: Block) -> Block:
    s0, w0, k0 = left
    s1, w1, k1 = right
    if k0 == k1:
        return s0 + s1, w0 + w1, k0
    if s0 == 0 and w0 == 0:
        return right
    if s1 == 0 and w1 == 0:
        return left
    if k0 > k1:
        return s0 + math.ldexp(s1, k1 - k0), w0 + math.ldexp(w1, 2 * (k1 - k0)), k0
    return s1 + math.ldexp(s0, k0 - k1), w1 + math.ldexp(w0, 2 * (k0 - k1)), k1


def _slopes_fall(left: Block, right: Block) -> bool:
    """Returns whether S/W of `left` is at least that of `right`, so that the two must be pooled.

    Where rounding decides, "no" is the safe answer: unpooled blocks are feasible shifts.
    """
    s0, w0, k0 = left
    s1, w1, k1 = right
    if k0 == k1:
        return s0 * w1 >= s1 * w0
    if k0 > k1:
        return math.ldexp(s0 * w1, k1 - k0) >= s1 * w0
    return s0 * w1 >= math.ldexp(s1 * w0, k0 - k1)


def _cost(block: Block) -> float:
    s, w, _ = block
    if s == 0:
        return 0.0
    return s * (s / w) if w > 0 else math.inf


class BlockStack:
    """The blocks of an isotonic regression that is extended at its left or its right end.

    `push` takes amortised O(1), `cost_with` O(log(number of blocks)): every entry stores the
    aggregate of the entries down to a skew-binary jump target (Myers 1983).
    """

    __slots__ = ("_aggregates", "_below", "_blocks", "_grows_left", "_jumps")

    def __init__(self, *, grows_left: bool):
        self._grows_left = grows_left
        # Entry 0 is a sentinel, so that jump target 0 means "below the lowest block".
        self._blocks: list[Block] = [_ZERO]
        self._below = [0.0]  # cost of the blocks below and including this one
        self._jumps = [0]
        self._aggregates: list[Block] = [_ZERO]

    @property
    def cost(self) -> float:
        """mu**2 of the steps pushed so far."""
        return self._below[-1]

    def _must_pool(self, new: Block, top: Block) -> bool:
        return _slopes_fall(new, top) if self._grows_left else _slopes_fall(top, new)

    def push(self, block: Block) -> None:
        """Adds a run of steps of which only the first moves the record."""
        if block[0] == 0 and block[1] == 0:
            return
        blocks = self._blocks
        while len(blocks) > 1 and self._must_pool(block, blocks[-1]):
            block = _add(block, blocks[-1])
            blocks.pop()
            self._below.pop()
            self._jumps.pop()
            self._aggregates.pop()
        jumps = self._jumps
        parent = len(blocks) - 1
        target = jumps[parent]
        if parent and target and parent - target == target - jumps[target]:
            aggregate = _add(_add(block, self._aggregates[parent]), self._aggregates[target])
            jumps.append(jumps[target])
        else:
            aggregate = block
            jumps.append(parent)
        blocks.append(block)
        self._aggregates.append(aggregate)
        self._below.append(self._below[-1] + _cost(block))

    def cost_with(self, block: Block) -> float:
        """mu**2 if `block` were pushed; changes nothing."""
        if block[0] == 0 and block[1] == 0:
            return self.cost
        index = len(self._blocks) - 1
        while index and self._must_pool(block, self._blocks[index]):
            target = self._jumps[index]
            if target:
                # Pooling is monotone: if the block after the jump must be pooled, so must all
                # the blocks that the jump skips.
                jumped = _add(block, self._aggregates[index])
                if self._must_pool(jumped, self._blocks[target]):
                    block, index = jumped, target
                    continue
            block = _add(block, self._blocks[index])
            index -= 1
        return _cost(block) + self._below[index]


def least_mu_squared(
    contraction: np.ndarray,
    sensitivity: np.ndarray,
    noise_std: np.ndarray,
    *,
    initial_shift: float = 0.0,
    known_shift: np.ndarray | None = None,
) -> float:
    """Minimum of mu**2 over the shifts, and over the starts tau where a shift bound is known.

    c_t, s_t and sigma_t have shape (T,), `known_shift` T + 1: entry tau bounds |X_tau - X'_tau|
    (NaN: nothing beyond what the recursion gives); the entries 0 and T are ignored.

    A longer suffix never costs less, so the scan from step T backwards stops as soon as the suffix
    alone costs as much as the best start so far: O(T), as of starts that are alike one is tried.
    """
    shift_unit = max(float(np.max(sensitivity)), initial_shift) or 1.0
    noise_unit = float(np.max(noise_std)) or 1.0
    scale = (shift_unit / noise_unit) ** 2
    stack = BlockStack(grows_left=True)
    product, exponent = 1.0, 0  # C_t = product * 2**exponent
    best, next_start = math.inf, len(contraction)
    for stop in range(len(contraction), 0, -_CHUNK):
        start = max(0, stop - _CHUNK)
        chunk = slice(start, stop)
        c, c_power = _mantissas(contraction[chunk])
        s = _scaled(sensitivity[chunk], shift_unit).tolist()
        sigma = (noise_std[chunk] / noise_unit).tolist()
        known = None if known_shift is None else _scaled(known_shift[chunk], shift_unit).tolist()
        for t in range(stop - start - 1, -1, -1):
            noise = sigma[t] * product
            stack.push((s[t] * product, noise * noise, exponent))
            product *= c[t]
            exponent += c_power[t]
            if product == 0:
                return min(best, stack.cost) * scale  # everything before step t is forgotten
            if not 1 / _LARGE < product < _LARGE:
                product, power = math.frexp(product)
                exponent += power
            if known is not None and 0 < start + t <= next_start and not math.isnan(known[t]):
                best = min(best, stack.cost_with((known[t] * product, 0.0, exponent)))
                next_start = start + t - 1 - (len(contraction) - start - t) // _NEAR
            if stack.cost >= best:
                return best * scale
    first = max(initial_shift / shift_unit, _TINY) if initial_shift else 0.0
    begin = (first * product, 0.0, exponent)
    return min(best, stack.cost_with(begin)) * scale


def _scaled(shifts: np.ndarray, unit: float) -> np.ndarray:
    """In units of `unit`, rounded up where the quotient underflows: never forgets a shift."""
    return np.where(shifts > 0, np.maximum(shifts / unit, _TINY), shifts / unit)


def _mantissas(contraction: np.ndarray) -> tuple[list[float], list[int]]:
    """c as mantissa * 2**power, with power 0 unless c is extreme."""
    extreme = (contraction > _LARGE) | (contraction < 1 / _LARGE)
    if not extreme.any():
        return contraction.tolist(), [0] * len(contraction)
    mantissas, powers = np.frexp(contraction)
    return np.where(extreme, mantissas, contraction).tolist(), np.where(extreme, powers, 0).tolist()


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
        period: Steps from one participation to the next, l >= 1.
        participations: Their number, an array; 0 where the record never takes part.
        last: Steps from the last one on, in 1..l, an array of the same shape; 1 without one.
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
        log = -2 * math.log(contraction)

        def own_block(steps: np.ndarray) -> np.ndarray:
            return np.asarray(np.expm1(log) / np.expm1(log * steps))

        cost = before * own_block(np.array(float(period))) + own_block(last)
        cost += has_gap * own_block(gap)
    return np.where((total > 0) & (cost > 0), cost * shift_in_noise**2, 0.0)


_Sums = tuple[np.ndarray, np.ndarray]  # shifts and weights of blocks


def _blocks(
    log: float, period: int, before: np.ndarray, gap: np.ndarray, last: np.ndarray
) -> tuple[_Sums, _Sums, _Sums]:
    """Those of all participations but the last two, which pool, and of these two; c <= 1."""

    def powers(number: np.ndarray, stride: float) -> np.ndarray:
        """Sum over i < number of c^(stride i)."""
        if log == 0:
            return number
        return np.asarray(np.expm1(log * stride * number) / math.expm1(log * stride))

    def block(number: np.ndarray, steps: np.ndarray, after: np.ndarray) -> _Sums:
        shift = np.exp(log * (after + steps - 1)) * powers(number, float(period))
        return shift, np.exp(2 * log * after) * powers(number * steps, 2)

    one = np.ones(last.shape)
    early = block(before, np.full(last.shape, float(period)), last + gap)
    return early, block(np.minimum(gap, 1), gap, last), block(one, last, 0 * one)


def _regression(first: _Sums, second: _Sums, third: _Sums) -> np.ndarray:
    """The cost of three blocks, pooled where slopes fall."""

    def pooled(left: _Sums, right: _Sums) -> _Sums:
        return left[0] + right[0], left[1] + right[1]

    def falls(left: _Sums, right: _Sums) -> np.ndarray:
        return np.asarray(left[0] * right[1] >= right[0] * left[1])

    def cost(block: _Sums) -> np.ndarray:
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
    """The smallest mu**2 that the last steps of a run of more than `LONG` show, entry by entry.

    Any start of a window is valid, so more steps are looked at only while they help. `of_tail` maps
    a number of steps to upper bounds.
    """
    best = of_tail(_TAILS[0])
    for tail in (tail for tail in _TAILS[1:] if tail < num_steps):
        found = np.minimum(of_tail(tail), best)
        if (found >= best * (1 - _SAME)).all() and np.isfinite(best).all():
            return best
        best = found
    return best
