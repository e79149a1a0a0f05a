r"""Composed privacy losses: (epsilon, delta), with the error of the Fourier transform added.

A Fourier transform has an error of about 1e-16 times the number of compositions, of either sign,
whatever the size of the masses is: a small delta drowns in it. With an exponential tilt
:math:`\theta \ge 0` and :math:`M = \prod_j \sum_x p_j(x) e^{\theta x}` it is small beside delta:

.. math::
    \delta(\varepsilon) \le p(\infty) + M e^{-\theta\varepsilon} \Big\{ \sum_{x > \varepsilon}
    q(x)\, w(x - \varepsilon) + \|w\|_2\, E + 10^{-19} \Big\}, \qquad
    w(s) = e^{-\theta s} (1 - e^{-s}),

q the convolution of the tilted masses :math:`p_j(x) e^{\theta x} / M_j` by Fourier transforms, E a
bound on the 2-norm of its error. Any tilt is valid. Proof: docs/theory/numerical_error.md. Under a
tilt independent losses stay independent, and their log M add up. A tilt is chosen, and tails are
bounded, by the coarse laws of the parts (`LossMasses.coarse`), whose M is no smaller; the masses of
the one tilt that is used are exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import fft, signal

from hidden_state_accountants.curves.losses import (
    UNIT,
    LossMasses,
    PrivacyLoss,
    grid_for,
)
from hidden_state_accountants.curves.profiles import RELATIVE_ERROR

_LOST = 1e-19  # more than what leaves the window (2 exp(-45)), or underflows
_VANISHED = 1e-40  # of a characteristic function: what is smaller is left out
_SMALLEST = 1e-280  # more than what underflows in 1e13 profiles: it is no delta of 0
_FIRST_TILT, _LARGEST_TILT = 0.25, 1e6  # that Cantelli's bound tries, each twice the last
_HARDLY = 1e-6  # more than all rounding of a mean
_MOST_COUNT = 10**13  # beyond it the error is no small number any more
_MOST_CELLS = 2**23  # of a window: arrays of 64 MB
_CELLS, _DEVIATIONS = 2**22, 20.0  # at most of the first window, and its length
# Cells that are enough for a large epsilon: of the window, if its n losses get longer by n h**2/8,
# so small a share of it, and of the mean loss.
_ENOUGH_CELLS, _LONGER, _CELLS_OF_MEAN = 2**18, 1e-5, 2**15
_FINEST = 1e-9  # a mean that has none
_TAIL = 45.0  # the logarithm of the tilted probability of what a window leaves out, without sign
_FIRST, _STEP = 15.0, 5.0  # relative entropy between no tilt and the first, and so on, in nats
_DROPPED = 1e-22  # tilted probability of the losses that are left out of a composition
_UNDERFLOW = 1e-200  # of a sum whose largest term may have underflowed
_LARGEST_EXPONENT = 700.0  # whose exponential is a double
_MOST_MOVES = 40  # each half of the one before
_LARGE, _OFTEN = 1 / 16, 256  # a mass that is most likely, of a loss that runs so often
_FEW = 20  # masses that are evaluated together
_TURNS_OF_A_RUN, _MOST_TURNS = 64, 2**22  # how many points of such masses are worth their time
_SUMS = 256 * UNIT  # more than the relative error of the sum of all masses, wrapped to a window


class ComposedLoss:
    """The privacy loss of independent mechanisms.

    Formal guarantees: no figure is below that of the composed losses in exact arithmetic, given a
    Fourier transform with the error that docs/theory/numerical_error.md assumes. Delta never grows
    with epsilon, nor epsilon with delta, and ``delta(epsilon(d)) <= d``.

    Args:
        parts: (loss, count) pairs, at least one; the count is how often the mechanism runs.

    Attributes:
        infinite: The mass of infinite losses.
    """

    def __init__(self, parts: Sequence[tuple[PrivacyLoss, int]]):
        directions = [[(loss.forward, count) for loss, count in parts]]
        if not all(loss.is_symmetric for loss, _ in parts):
            directions.append([(loss.backward, count) for loss, count in parts])
        self._directions = [_Direction(_on_a_grid(losses)) for losses in directions]
        self.infinite = max(direction.infinite for direction in self._directions)

    def least_epsilon(self, delta: float) -> float:
        """At most the epsilon, for a delta above that of infinite losses: Cantelli's bound."""
        return max(direction.least_epsilon(delta) for direction in self._directions)

    def delta(self, epsilon: float) -> float:
        """Delta in [0, 1] at an epsilon in [0, inf]."""
        return max(direction.delta(epsilon) for direction in self._directions)

    def epsilon(self, delta: float) -> float:
        """The smallest epsilon >= 0 at a delta in [0, 1]; inf where none is known."""
        return max(direction.epsilon(delta) for direction in self._directions)


class _Direction:
    """The composed loss of one direction: bounds on delta, as far as anybody has asked for them."""

    def __init__(self, parts: Parts):
        self._parts, self._grid, self.infinite = parts, parts.grid, parts.infinite
        self._next = self._parts.rough_tilt(0.0)  # the deltas so far end at its mean
        self._deltas = np.empty(0)  # at the losses 0, grid, 2 grid, ...
        self._is_complete = self._parts.count > _MOST_COUNT  # no further ones can be found

    def least_epsilon(self, delta: float) -> float:
        r"""By the mean m and the deviation s of the total loss L under a tilt.

        L is above a = m - s with a tilted probability of 1/2 at least, and then m + s at most in
        the mean, so that (Jensen) L > a has a probability of M exp(-theta (m + s)) / 2 at least.
        """

        def log_likely(tilt: RoughTilt) -> float:
            above = tilt.mean + math.sqrt(max(tilt.variance, 0.0))
            return tilt.log_mass - tilt.theta * above - math.log(2)

        theta, following = 0.0, _FIRST_TILT
        while theta < _LARGEST_TILT and (
            log_likely(self._parts.rough_tilt(following)) > math.log(2 * delta)
        ):
            theta, following = following, 2 * following
        tilt = self._parts.moments(self._parts.tilt(theta))
        missed = math.exp(min(math.log(delta) - log_likely(tilt), 0.0))
        if missed > 1 - _HARDLY:
            return 0.0
        least = tilt.mean - math.sqrt(tilt.variance) + math.log1p(-missed)
        return max(0.0, least * (1 - _HARDLY))

    def delta(self, epsilon: float) -> float:
        highest = self._parts.highest
        if epsilon * (1 - 4 * UNIT) >= highest * self._grid:
            return self._parts.infinite
        cell = min(math.floor(epsilon * (1 - 4 * UNIT) / self._grid), highest - 1)
        while len(self._deltas) < cell + 2 and not self._is_complete:
            self._extend()
        if len(self._deltas) < cell + 2:
            return float(self._deltas[-1]) if len(self._deltas) else 1.0
        left, right = self._deltas[cell : cell + 2].tolist()
        # The exact delta is a convex function of e^epsilon. The place in the cell is rounded down.
        share = math.expm1(epsilon - cell * self._grid) / math.expm1(self._grid)
        share -= 8 * UNIT * (1 + epsilon) / self._grid
        return left + min(1.0, max(0.0, share)) * (right - left)

    def epsilon(self, delta: float) -> float:
        if delta >= 1:
            return 0.0
        if delta < self.infinite:
            return math.inf
        while not self._is_complete and not (len(self._deltas) and self._deltas[-1] <= delta):
            self._extend()
        cell = int(np.searchsorted(-self._deltas, -delta))
        if cell == 0 and len(self._deltas):
            return 0.0
        if cell == len(self._deltas):
            return math.inf
        left, right = self._deltas[cell - 1 : cell + 1].tolist()
        share = (left - delta) / (left - right)
        epsilon = (cell - 1) * self._grid + math.log1p(share * math.expm1(self._grid))
        step = UNIT
        while self.delta(epsilon) > delta:  # round towards more epsilon, never less
            epsilon += step * max(epsilon, self._grid)
            step *= 2
        return epsilon

    def _extend(self) -> None:
        """Adds the deltas up to the next tilt's mean, none above an earlier one."""
        before, self._next = self._next, self._parts.next_tilt(self._next)
        tilt = self._parts.tilt((before.theta + self._next.theta) / 2)
        highest = self._parts.highest
        first = len(self._deltas)
        last = max(first, min(highest, math.ceil(self._next.mean / self._grid)))
        start, stop = self._parts.window(tilt, first, last)
        if stop - start >= _MOST_CELLS:
            self._is_complete = True
            return
        bounds = self._parts.infinite + self._finite_part(tilt, start, stop, first, last)
        found = np.append(self._deltas[-1:], np.minimum(bounds + _SMALLEST, 1.0))
        self._deltas = np.append(self._deltas[:-1], np.minimum.accumulate(found))
        if last == highest:
            self._deltas[-1] = self._parts.infinite
        self._is_complete = (
            last == highest
            or self._next is before
            or self._deltas[-1] <= self._parts.infinite * (1 + 1e-12) + 2 * _SMALLEST
        )

    def _finite_part(self, tilt: Tilt, start: int, stop: int, first: int, last: int) -> np.ndarray:
        """Contribution of finite losses to delta at the cells first to last, at most."""
        law, error = self._convolved(tilt, start, stop)
        decay = math.exp(-tilt.theta * self._grid)
        # The sum with the weights w, cell by cell from the right, and without any difference.
        law = law[first - start :][::-1]
        later = _discounted(law, decay * math.exp(-self._grid))
        beyond = _discounted(-math.expm1(-self._grid) * (later + law), decay)[::-1]
        losses = np.arange(first, last + 1) * self._grid
        sums = (
            8 * UNIT * (len(law) * (1 + tilt.theta * self._grid) + tilt.theta * float(losses[-1]))
        )
        log_scale = tilt.log_mass - tilt.theta * losses + tilt.rounding + sums
        inside = beyond[: last + 1 - first]
        inside = inside + _norm_of_weights(tilt.theta, len(law), self._grid) * error + _LOST
        inside += math.expm1(min(tilt.lost, _LARGEST_EXPONENT))
        return np.exp(np.minimum(log_scale, 600.0)) * inside

    def _convolved(self, tilt: Tilt, start: int, stop: int) -> tuple[np.ndarray, float]:
        """The tilted law of the total loss on a window, and a bound on the 2-norm of its error."""
        longest = max(len(masses) for _, masses, _ in tilt.parts)
        # Wrapping a part adds no more than 64 masses up.
        size = _size_above(max(stop - start, longest // 64, 1))
        spectrum = np.ones(size // 2 + 1, dtype=complex)
        of_transform = 8 * UNIT * math.log2(size)  # its error, relative to the norm of the result
        absolute, relative, lowest = 0.0, np.zeros(len(spectrum)), 0
        for first, part, count in sorted(tilt.parts, key=lambda part: -part[2]):
            power = _transformed_power(_wrapped(part, size), count, spectrum != 0)
            spectrum *= power.values
            absolute += count * of_transform * power.rest
            relative += power.error
            lowest += count * (first + power.place)
        law = np.roll(fft.irfft(spectrum, size), (lowest - start) % size)
        moduli = np.abs(spectrum)
        errors = np.linalg.norm(np.expm1(relative) * moduli) + of_transform * np.linalg.norm(moduli)
        return np.maximum(law, 0.0), absolute + float(errors) * math.sqrt(2 / size) + _VANISHED


def _size_above(number: int) -> int:
    """The smallest larger power of two, or three times one."""
    power = 2 ** number.bit_length()
    return power * 3 // 4 if power * 3 // 4 > number else power


def _on_a_grid(parts: Sequence[tuple[LossMasses, int]]) -> Parts:
    """The parts on the finest grid whose first deltas take no window that is too long."""
    finest = max(masses.grid for masses, _ in parts)
    found = Parts(parts, finest)
    untilted = found.rough_tilt(0.0)
    tilt = found.next_tilt(untilted)
    length = max(tilt.mean, 0.0) + _DEVIATIONS * math.sqrt(tilt.variance)
    enough = math.sqrt(found.count * length / (8 * _LONGER))
    enough = max(enough, _CELLS_OF_MEAN * length / max(untilted.mean, _FINEST))
    cells = round(min(_CELLS, max(_ENOUGH_CELLS, enough)))
    grid = max(finest, grid_for(length, cells) or 0.0)
    return found if grid == finest else Parts(parts, grid)


def _norm_of_weights(theta: float, size: int, grid: float) -> float:
    r"""A bound on :math:`\|w\|_2` over the losses above a cell: integral and largest term."""
    if theta == 0:
        return math.sqrt(size)
    integral = 1 / (2 * theta * (2 * theta + 1) * (theta + 1))
    return math.sqrt(min(size, integral / grid + 1 / (theta + 1) ** 2))


def _discounted(values: np.ndarray, factor: float) -> np.ndarray:
    """Sums over all earlier entries, each times the factor to the power of its distance."""
    return np.asarray(signal.lfilter([0.0, factor], [1.0, -factor], values))


def _wrapped(values: np.ndarray, size: int) -> np.ndarray:
    """Entries whose indices are equal modulo the size, added up."""
    padded = np.zeros(-(-len(values) // size) * size)
    padded[: len(values)] = values
    return padded.reshape(-1, size).sum(axis=0)


class _Power(NamedTuple):
    """A power of the Fourier transform of masses, of which the largest is moved to 0.

    `values` are 0 where the power has vanished; `error` bounds their relative error, without that
    of the fast transform; `rest` is the 2-norm of the masses that are left to that transform.
    """

    values: np.ndarray
    error: np.ndarray
    rest: float
    place: int


def _transformed_power(masses: np.ndarray, count: int, alive: np.ndarray) -> _Power:
    """Evaluates `_Power` where `alive`.

    A fast transform has an error that is relative to the largest mass, whose own one is known at 0.
    Of a loss that is often the same, the next masses are evaluated one by one.
    """
    place = int(np.argmax(masses))
    rest = np.roll(masses, -place)
    largest, rest[0] = float(rest[0]), 0.0
    values = largest + fft.rfft(rest)
    # Of one coefficient: without it a power that has not vanished could be taken for one that has.
    error_of_one = 8 * UNIT * math.log2(len(rest)) * math.sqrt(len(rest)) * np.linalg.norm(rest)
    moduli = np.abs(values) + (error_of_one + 8 * UNIT)
    alive = alive & (moduli > _VANISHED ** (1 / count))  # soon few, if it runs often
    error = np.zeros(len(values))
    frequencies = np.flatnonzero(alive)
    turns = min(_TURNS_OF_A_RUN * count, _MOST_TURNS)
    number = min(_FEW * _FEW, turns // len(frequencies))
    if count >= _OFTEN and largest >= _LARGE and number >= _FEW:
        logarithms, lengths, left = _logarithms(largest, rest, frequencies, number)
        powers, error[alive] = np.exp(count * logarithms), (count * lengths + 16) * UNIT
    else:
        powers = values[alive]
        powers /= np.maximum(1.0, np.abs(powers))  # where the exact one is: no error grows
        powers, left = _power(powers, count), float(np.linalg.norm(rest))
        error[alive] = 11 * count * UNIT
    values[~alive] = 0.0
    values[alive] = powers
    return _Power(values, error, left, place)


def _logarithms(
    largest: float, rest: np.ndarray, frequencies: np.ndarray, number: int
) -> tuple[np.ndarray, np.ndarray, float]:
    """The logarithms of a transform where it is above 2/3, by its difference to 1.

    Returns:
        The logarithms, their errors in units of `UNIT`, and the 2-norm of the masses that were not
        evaluated one by one.
    """
    size = len(rest)
    number = min(number, size)
    near = np.argpartition(rest, size - number)[size - number :]
    masses, rest[near] = rest[near], 0.0
    left = math.fsum(rest[rest > 0].tolist())
    others = fft.rfft(rest)[frequencies] - left
    total = math.fsum([-1.0, largest, left, *masses.tolist()])
    moved, length = others + total, np.abs(others) + abs(total)
    for first in range(0, len(near), _FEW):
        cells, weights = near[first : first + _FEW], masses[first : first + _FEW]
        turns = (np.multiply.outer(frequencies, cells) + size // 2) % size - size // 2
        sines = np.sin(math.pi / size * turns)
        cosines = np.cos(math.pi / size * turns)
        moved += (-2 * sines * (sines + 1j * cosines)) @ weights
        length += (2 * np.abs(sines)) @ weights
    x, y = moved.real, moved.imag
    sizes = np.minimum(np.log1p(2 * x + (x * x + y * y)) / 2, 0.0)  # of the exact one: at most 1
    return sizes + 1j * np.arctan2(y, 1 + x), 150 * length + 6 * left, float(np.linalg.norm(rest))


def _power(base: np.ndarray, exponent: int) -> np.ndarray:
    """By squares: the error of a complex product is known, that of a logarithm is not."""
    result = np.ones_like(base)
    while True:
        if exponent & 1:
            result = result * base
        exponent >>= 1
        if not exponent:
            return result
        base = base * base


# --- tilted laws of the parts -------------------------------------------------------------------


class RoughTilt(NamedTuple):
    """A total loss under the tilt theta, by the coarse laws of its parts: log M at least."""

    theta: float
    log_mass: float
    mean: float
    variance: float


class Tilt(NamedTuple):
    """A total loss under a tilt.

    Attributes:
        theta: The tilt.
        log_mass: log M.
        rounding: A bound on the error of the logarithms of the masses times M.
        lost: A bound on the tilted probability of the cells that are left out.
        parts: First cell, tilted masses from there on, whose sum is at most 1, and count.
    """

    theta: float
    log_mass: float
    rounding: float
    lost: float
    parts: list[tuple[int, np.ndarray, int]]


def _coarse(law: LossMasses, theta: float) -> tuple[np.ndarray, float]:
    """The coarse law of a loss under a tilt, and its log M."""
    losses, masses = law.coarse
    exponents = theta * losses
    top = max(float(exponents[0]), float(exponents[-1]))
    tilted = masses * np.exp(exponents - top)
    total = float(tilted.sum())
    if total < _UNDERFLOW:
        with np.errstate(divide="ignore"):
            exponents += np.log(masses)
        top = float(exponents.max())
        tilted = np.exp(exponents - top)
        total = float(tilted.sum())
    return tilted / total, top + math.log(total)


def _tilted(
    law: LossMasses, theta: float, negligible: float
) -> tuple[int, np.ndarray, float, float, float]:
    """A loss under a tilt, without the cells at either end that have a negligible probability.

    Returns:
        The first cell, the masses, log M, a bound on the error of the logarithms of the masses
        times M, and one on what is left out, beside M.
    """
    rough, log_mass = _coarse(law, theta)
    # What lies beyond a node has a coarse law on that node and those beyond it.
    nodes = np.rint(law.coarse[0] / law.grid).astype(int)
    first = max(0, int(np.searchsorted(np.cumsum(rough), negligible)) - 1)
    last = len(nodes) - int(np.searchsorted(np.cumsum(rough[::-1]), negligible))
    cells = np.arange(nodes[first], nodes[min(last, len(nodes) - 1)] + 1)
    start = int(cells[0])
    inside = law.masses[start - law.lower : start - law.lower + len(cells)]
    # A tilted mass is at most 1: what is cut had one that underflowed (_SMALLEST covers it).
    exponents = np.minimum((theta * law.grid) * cells - log_mass, _LARGEST_EXPONENT)
    masses = inside * np.exp(exponents)
    total = float(masses.sum())
    masses /= total * (1 + _SUMS)
    found = log_mass + math.log(total) + _SUMS
    largest = abs(math.log(float(inside[inside > 0].min())))
    largest += theta * max(-law.lower, law.highest) * law.grid
    rounding = (8 * (largest + abs(log_mass) + abs(found)) + 1000) * UNIT + RELATIVE_ERROR
    return start, masses, found, rounding, 3 * negligible / total  # of the coarse M, beside M


class Parts:
    """Independent losses, (law, count) pairs, on a grid no finer than any of theirs.

    `lowest` and `highest` are the smallest and largest finite total loss, in cells of the grid;
    `infinite` bounds the mass of the total loss at infinity.
    """

    def __init__(self, parts: Sequence[tuple[LossMasses, int]], grid: float):
        self.grid = grid
        self.all = [(masses.on_grid(grid), count) for masses, count in parts]
        self.count = sum(count for _, count in self.all)
        self.lowest = sum(count * law.lower for law, count in self.all)
        self.highest = sum(count * law.highest for law, count in self.all)
        log_finite = math.fsum(
            count * math.log1p(-law.infinite) if law.infinite < 1 else -math.inf
            for law, count in self.all
        )
        # All mass of a loss is rounded up to more than 1.
        log_total = math.fsum(
            count * math.log(max(1.0, float(law.masses.sum()) + law.infinite))
            for law, count in self.all
        )
        infinite = abs(math.expm1(log_finite))
        if log_total < _LARGEST_EXPONENT:
            log_total += 64 * UNIT * (self.count + 1)
            self.infinite = min(1.0, infinite * math.exp(log_total))
        else:  # so many that nothing is claimed
            self.infinite = 1.0

    def tilt(self, theta: float) -> Tilt:
        """The total loss under a tilt."""
        found = [(_tilted(law, theta, _DROPPED / self.count), count) for law, count in self.all]
        return Tilt(
            theta,
            math.fsum(count * log_mass for (_, _, log_mass, _, _), count in found),
            math.fsum(count * rounding for (_, _, _, rounding, _), count in found),
            math.fsum(count * lost for (_, _, _, _, lost), count in found),
            [(first, masses, count) for (first, masses, *_), count in found],
        )

    def rough_tilt(self, theta: float) -> RoughTilt:
        """The total loss under a tilt, by the coarse laws of the parts."""
        total = np.zeros(3)
        for law, count in self.all:
            tilted, log_mass = _coarse(law, theta)
            losses = law.coarse[0]
            mean = float(tilted @ losses)
            total += count * np.array([log_mass, mean, float(tilted @ (losses - mean) ** 2)])
        return RoughTilt(theta, *total.tolist())

    def moments(self, tilt: Tilt) -> RoughTilt:
        """Mean and variance of the total loss under a tilt, and no more than log M."""
        mean = variance = 0.0
        for first, masses, count in tilt.parts:
            losses = (first + np.arange(len(masses))) * self.grid
            center = float(masses @ losses)
            mean += count * center
            variance += count * float(masses @ (losses - center) ** 2)
        return RoughTilt(tilt.theta, tilt.log_mass - tilt.rounding, mean, variance)

    def next_tilt(self, tilt: RoughTilt) -> RoughTilt:
        """A larger tilt whose law is a few nats away; the same if nothing is left to tilt.

        That is, by both relative entropies: where a law has a far second peak, the tilt that moves
        to it is near in one direction only, and a bad one for the losses between the peaks.
        """
        if tilt.variance <= 0:
            return tilt
        near, far = tilt.theta, math.inf
        step = _STEP if tilt.theta else _FIRST
        theta = tilt.theta + math.sqrt(2 * step / tilt.variance)
        for _ in range(60):
            found = self.rough_tilt(theta)
            gap = found.log_mass - tilt.log_mass
            moved = theta - tilt.theta
            away = max(gap - moved * tilt.mean, moved * found.mean - gap)
            if away > 1.3 * step:
                far = theta
            elif away < 0.7 * step and found.mean > tilt.mean:
                near = theta
            else:
                break
            theta = (near + far) / 2 if far < math.inf else 2 * theta - tilt.theta
        return found

    def window(self, tilt: Tilt, first: int, last: int) -> tuple[int, int]:
        """Cells, with `first` and `last`, in which a loss lies but for probability 2 exp(-45)."""
        rough = self.rough_tilt(tilt.theta)
        low = high = rough.mean
        if rough.variance > 0:
            move = math.sqrt(2 * _TAIL / rough.variance)  # the best one of a Gaussian
            high, low = self._chernoff(tilt, move), -self._chernoff(tilt, -move)
        return (
            min(first, max(self.lowest, math.floor(low / self.grid) - 1)),
            min(self.highest, max(last, math.ceil(high / self.grid) + 1)),
        )

    def _chernoff(self, tilt: Tilt, move: float) -> float:
        """Value that the tilted law exceeds (below 0: undercuts) with probability exp(-45).

        The best one of moves towards none: as log M is convex in the tilt, the bound falls with the
        size of the move and then rises.
        """
        best = math.inf
        for k in range(_MOST_MOVES):
            moved = self.rough_tilt(tilt.theta + move / 2**k)
            bound = (moved.log_mass - tilt.log_mass + _TAIL) / abs(move / 2**k)
            if bound >= best:
                break
            best = bound
        return best
