r"""Theorem A for all positions of the record at once.

The optimum of `taut_string.least_mu_squared` for each position of a cyclic order. Between two
participations nothing moves the record, so a participation and the steps up to the next one are a
single block. Where a domain or a bounded drift helps, the distances are tracked forwards and the
windows scanned backwards for all positions together, an array operation for each step
(docs/theory/theorem_a.md, "Which record").
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import attrs
import numpy as np

from hidden_state_accountants.bounds.solvers.taut_string import NEAR, Block, BlockStack
from hidden_state_accountants.process.noisy_process import NoisyProcess

_FEW, _GROWTH = 8, 8  # blocks that are looked at together, and how many times more after them
_LARGE = 2.0**150  # products are renormalised when they exceed it
_SMALL = 2.0**-200  # of a product: what comes before hardly counts, and is not scanned
_TINY = 1e-300  # what underflows is rounded up: no shift is forgotten
_SPAN = 300.0  # nats of products of moduli that one computation holds
_CERTAIN = 1e100  # mu**2 above it is taken for infinite, and one below its inverse for that
_ROUNDING = 4e-15  # relative, for each step: sums and products of positive numbers, few a step


def mu_squared_from_start(process: NoisyProcess, start: int, stop: int) -> np.ndarray | None:
    """mu**2 of the steps start+1..stop by the first batch of the record, as for windows.

    None where a window might do better, or the products of the moduli leave the range of a double.
    """
    sums = _Sums.of(process, start, stop)
    if sums is None or _may_be_cut(process, slice(start, stop), sums):
        return None
    return (
        np.array([_cost(column) for column in sums.columns(sums.shifts, sums.blocks)]) * sums.scale
    )


def _cost(blocks: list[Block]) -> float:
    stack = BlockStack(grows_left=False)
    for block in blocks:
        stack.push(block)
    return stack.cost


def mu_squared_after_batches(
    process: NoisyProcess, start: int, stop: int, distance: np.ndarray, *, is_whole: bool = True
) -> np.ndarray | None:
    """The same with windows that start right after a batch of the record.

    Args:
        process: Of the run.
        start: The step before the segment.
        stop: Its last step.
        distance: A bound on |X_tau - X'_tau| for every position, NaN for none, (stop - start + 1,).
        is_whole: Whether the run starts there. Otherwise what more steps may improve is infinite.

    Returns:
        As `mu_squared_from_start`; None if the products of the moduli leave the range of a double.
    """
    sums = _Sums.of(process, start, stop)
    if sums is None:
        return None
    period, first = sums.shifts.shape[1], len(sums.moved) - len(sums.shifts)
    known = np.append(distance[1:], np.full((start - stop) % period, np.nan)).reshape(-1, period)
    begins = np.maximum(known[first:] / sums.shift_unit * sums.products, _TINY)
    columns = zip(
        sums.columns(sums.shifts, sums.blocks), sums.columns(begins, sums.after), strict=True
    )
    return np.array([_cost_after_batches(*both, is_whole) for both in columns]) * sums.scale


def _cost_after_batches(blocks: list[Block], begins: list[Block], is_whole: bool) -> float:
    stack, best = BlockStack(grows_left=True), math.inf
    for block, begin in zip(reversed(blocks), reversed(begins), strict=True):
        if not math.isnan(begin[0]):
            best = min(best, stack.cost_with(begin))
        stack.push(block)
        if stack.cost >= best:  # a longer window never costs less
            return best
    return min(best, stack.cost) if is_whole else math.inf


@attrs.frozen(eq=False)
class _Sums:
    """What a participation and the steps up to the next one sum up to, seen from the end.

    Arrays of (epochs, positions), the first step at position 0. Epochs that a contraction has made
    e**150 times smaller are left out, and what is left of their shifts comes with the next one.

    Attributes:
        shifts: s_t C_t, in units of `shift_unit`.
        blocks: Sums of (C_i sigma_i)**2 from step t to the next participation.
        after: The same without step t.
        products: C_t.
        moved: log of all shifts of a position up to here; of all epochs, as `later`.
        later: log C_t, shape (stop - start,).
        shift_unit: Of the shifts.
        scale: What a cost is multiplied with, rounded up.
    """

    shifts: np.ndarray
    blocks: np.ndarray
    after: np.ndarray
    products: np.ndarray
    moved: np.ndarray
    later: np.ndarray
    shift_unit: float
    scale: float

    def columns(self, shifts: np.ndarray, weights: np.ndarray) -> Iterator[list[Block]]:
        """Blocks by position, with exponents of their own: their products may not underflow."""
        exponents = np.frexp(self.products)[1]
        arrays = np.ldexp(shifts, -exponents), np.ldexp(weights, -2 * exponents), exponents
        for columns in zip(*(array.T.tolist() for array in arrays), strict=True):
            yield list(zip(*columns, strict=True))

    @classmethod
    def of(cls, process: NoisyProcess, start: int, stop: int) -> _Sums | None:
        """None if the products of the moduli leave the range of a double."""
        steps, period = slice(start, stop), min(process.period, stop - start)
        missing = (start - stop) % period

        def by_epoch(values: np.ndarray) -> np.ndarray:
            return np.append(values, np.zeros(missing)).reshape(-1, period)

        sensitivity, noise_std = process.sensitivity[steps], process.noise_std[steps]
        shift_unit, noise_unit = float(sensitivity.max()) or 1.0, float(noise_std.max()) or 1.0
        with np.errstate(divide="ignore"):
            log_moduli = np.log(process.contraction[steps])
            log_shifts = np.log(by_epoch(sensitivity / shift_unit))
        if not np.isfinite(log_moduli).all():
            return None
        later = np.append(np.cumsum(log_moduli[:0:-1])[::-1], 0.0)
        by_step = by_epoch(later)
        far = np.flatnonzero(np.abs(by_step).max(axis=1) > _SPAN)
        first = int(far[-1]) + 1 if len(far) else 0
        needed = 2 if missing else 1  # epochs with every position
        if first > max(len(by_step) - needed, 0):
            return None
        if first and by_step[first - 1].max() > -_SPAN / 2:
            return None
        moved = np.logaddexp.accumulate(log_shifts + by_step, axis=0)
        products, takes_part = np.exp(by_step[first:]), np.isfinite(log_shifts[first:])
        shifts = np.exp(log_shifts[first:]) * products
        shifts[takes_part] = np.maximum(shifts[takes_part], _TINY)
        if first:  # what is left of all that was before
            shifts[0] += np.exp(moved[first - 1])
        weights = (by_epoch(noise_std / noise_unit)[first:] * products) ** 2
        after = np.zeros_like(weights)
        after[:, :-1] = np.cumsum(weights[:, :0:-1], axis=1)[:, ::-1]
        after[:-1, 1:] += np.cumsum(weights[1:, :-1], axis=1)
        rounding = 2e-15 * weights.size * (1 + float(np.abs(by_step[first:]).max()))
        scale = (shift_unit / noise_unit) ** 2 * (1 + rounding)
        blocks = after + weights
        return cls(shifts, blocks, after, products, moved, later, shift_unit, scale)


def _may_be_cut(process: NoisyProcess, steps: slice, sums: _Sums) -> bool:
    """Whether the domain or the drift is anywhere below the largest distance of all positions."""
    largest = np.maximum.accumulate(sums.moved, axis=1)
    before = np.maximum.accumulate(sums.moved[:-1, ::-1], axis=1)[:, ::-1]
    largest[1:, :-1] = np.maximum(largest[1:, :-1], before[:, 1:])
    log_distance = np.append(-np.inf, largest.ravel()[: len(sums.later) - 1] - sums.later[:-1])
    with np.errstate(over="ignore"):
        distance = np.exp(log_distance) * sums.shift_unit
        stretched = process.contraction[steps] * distance + process.sensitivity[steps]
        limit = process.drift_contraction[steps] * distance + process.drift[steps]
    return bool((stretched > np.minimum(limit, process.domain_diameter)).any())


def mu_squared_by_windows(
    process: NoisyProcess, start: int, stop: int, initial: float = 0.0
) -> np.ndarray:
    """mu**2 of the steps start+1..stop, which end in a release, with the best start of a window.

    Args:
        process: Of the run.
        start: The step before the segment.
        stop: Its last step.
        initial: A bound on the distance after step `start` at every position.

    Returns:
        Shape (period,); entry i for the record whose first batch is that of step start+1+i. (One
        that is in no batch costs what `initial` does.)
    """
    period = min(process.period, stop - start)
    distances = _Distances(process, start, stop, period, initial)
    blocks = _Blocks(period, -(-(stop - start) // period))
    best = np.full(period, np.inf)
    is_open = np.ones(period, dtype=bool)  # whether a longer window may cost less
    next_start = np.full(period, stop - start)  # the step before which one is tried
    product = 1.0
    shift_unit = max(float(np.max(process.sensitivity[start:stop])), initial) or 1.0
    noise_unit = float(np.max(process.noise_std[start:stop])) or 1.0
    for step in range(stop - start - 1, -1, -1):
        c, s, sigma = (
            float(array[start + step])
            for array in (process.contraction, process.sensitivity, process.noise_std)
        )
        own = max(s / shift_unit * product, _TINY) if s else 0.0
        blocks.add_step(step % period, own, (sigma / noise_unit * product) ** 2)
        shift, may_start = distances.before(step)
        is_last = step == 0 or product * c < _SMALL
        asked = np.flatnonzero(is_open if is_last else is_open & may_start & (next_start >= step))
        if len(asked):
            costs = blocks.cost_with(asked, shift[asked] / shift_unit * product)
            best[asked] = np.minimum(best[asked], costs)
            is_open[asked] = blocks.cost[asked] < best[asked]
            next_start[asked] = step - 1 - (stop - start - step) // NEAR
        if is_last or not is_open.any():
            break
        product *= c
        if product > _LARGE:
            blocks.shrink(1 / product)
            product = 1.0
    found = best * (shift_unit / noise_unit) ** 2 * (1 + _ROUNDING * (stop - start))
    # What lies beyond was made of numbers that may have left the range of a double on the way.
    found[found > _CERTAIN] = np.inf
    is_moved = np.full(period, initial > 0)
    np.logical_or.at(
        is_moved, np.arange(stop - start) % period, process.sensitivity[start:stop] > 0
    )
    return np.where(is_moved, np.maximum(found, 1 / _CERTAIN), found)


class _Distances:
    """D_t of all positions, kept at few of the steps and tracked again from there.

    `before(step)` is asked backwards.
    """

    def __init__(
        self, process: NoisyProcess, start: int, stop: int, period: int, initial: float
    ) -> None:
        steps = slice(start, stop)
        self._c, self._s, self._kappa, self._drift = (
            array[steps]
            for array in (
                process.contraction,
                process.sensitivity,
                process.drift_contraction,
                process.drift,
            )
        )
        self._radius, self._period = process.domain_diameter, period
        self._first, self._chunk = len(self._c), math.isqrt(len(self._c)) + 1
        distance, is_cut = np.full(period, initial), np.zeros(period, dtype=bool)
        self._kept = [(distance, is_cut)]
        for step in range((len(self._c) - 1) // self._chunk * self._chunk):
            distance, is_cut, _, _ = self._after(step, distance)
            if (step + 1) % self._chunk == 0:
                self._kept.append((distance, is_cut))

    def _after(
        self, step: int, distance: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """D after a step, whether it was cut there, and what `before` says of the step."""
        position, s = step % self._period, self._s[step]
        total = _times(self._c[step], distance)
        moved = _times(self._kappa[step], distance) + self._drift[step]
        # kappa D + drift holds of the whole first step, in place of c D + s.
        shift = np.minimum(total, moved)
        shift[position] = min(total[position], max(moved[position] - s, 0.0))
        total[position] += s
        starts = moved < total
        capped = np.minimum(moved, self._radius)
        return np.minimum(total, capped), capped < total, shift, starts

    def before(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """What a window that starts before a step has to shift there beside s, and where one may.

        Where contraction and sensitivity alone give the distance, an earlier start is no worse.
        """
        if step < self._first:
            distance, is_cut = self._kept[step // self._chunk]
            self._first = step // self._chunk * self._chunk
            self._shifts, self._starts = [], []
            for later in range(self._first, min(self._first + self._chunk, len(self._c))):
                distance, cut_next, shift, starts = self._after(later, distance)
                self._shifts.append(shift)
                self._starts.append(is_cut | starts)
                is_cut = cut_next
        return self._shifts[step - self._first], self._starts[step - self._first]


def _times(factor: float, distance: np.ndarray) -> np.ndarray:
    """The product, 0 where the distance is infinite as well."""
    return factor * distance if factor else np.zeros_like(distance)


class _Blocks:
    """The blocks of an isotonic regression for each position, which grow to the left.

    A participation and the steps up to the next one are a block of shift S and weight W. Where
    rounding decides, blocks stay apart: those are feasible shifts as well.
    """

    def __init__(self, period: int, most: int) -> None:
        shape = (period, most + 1)
        self._shift, self._weight, self._below = (np.zeros(shape) for _ in range(3))
        self._depth = np.zeros(period, dtype=int)  # entry 0 stands for no block
        self._rows = np.arange(period)
        self._pending = np.zeros(period)  # weight of the steps before the first participation

    @property
    def cost(self) -> np.ndarray:
        """mu**2 of the steps so far, by position."""
        return self._below[self._rows, self._depth]

    def shrink(self, factor: float) -> None:
        """Changes the unit of all shifts; what vanishes is not pooled with any more."""
        self._shift *= factor
        self._weight *= factor * factor
        self._pending *= factor * factor

    def add_step(self, position: int, shift: float, weight: float) -> None:
        """One more step before those so far, which moves the record at one position."""
        self._pending += weight
        if shift:
            shifts, weights = self._shift[position], self._weight[position]
            depth, weight = int(self._depth[position]), float(self._pending[position])
            while depth and shift * float(weights[depth]) > float(shifts[depth]) * weight:
                shift += float(shifts[depth])
                weight += float(weights[depth])
                depth -= 1
            below = self._below[position]
            below[depth + 1] = below[depth] + (shift * (shift / weight) if weight else math.inf)
            depth += 1
            shifts[depth], weights[depth] = shift, weight
            self._depth[position] = depth
            self._pending[position] = 0.0

    def cost_with(self, positions: np.ndarray, shift: np.ndarray) -> np.ndarray:
        """mu**2 by position if a shift came before all steps so far."""
        weight, depth = self._pending[positions], self._depth[positions]
        shift, pools, width = shift.copy(), np.arange(len(positions)), _FEW
        while len(pools):
            rows = positions[pools, None]
            places = np.maximum(depth[pools, None] - np.arange(width), 0)
            shifts, weights = self._shift[rows, places], self._weight[rows, places]
            # What is pooled with none of these blocks, with the first one, with two of them, ...
            pooled_shift = np.cumsum(np.column_stack([shift[pools], shifts]), axis=1)
            pooled_weight = np.cumsum(np.column_stack([weight[pools], weights]), axis=1)
            stays = ~(pooled_shift[:, :-1] * weights > shifts * pooled_weight[:, :-1])
            number = np.where(stays.any(axis=1), stays.argmax(axis=1), width)
            here = np.arange(len(pools)), number
            shift[pools], weight[pools] = pooled_shift[here], pooled_weight[here]
            depth[pools] -= number
            pools, width = pools[number == width], width * _GROWTH
        with np.errstate(divide="ignore", invalid="ignore"):
            costs = np.where(shift > 0, shift * (shift / weight), 0.0)
        return self._below[positions, depth] + costs
