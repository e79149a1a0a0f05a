r"""Theorem A for a record that is in one batch of every epoch, and a second one that is in another.

The distances A and C of Theorem F (docs/theory/hidden_place.md): two runs differ in every epoch at
the place of the record and at its home, by multiples of what one record moves an update. The
optimum is the isotonic regression of `shifts`, in which a participation and the steps up to
the next one are a block.
"""

from __future__ import annotations

import itertools
import math

import attrs
import numpy as np

from hidden_state_accountants.bounds.solvers.shifts import BlockStack
from hidden_state_accountants.curves.hidden_place import Places
from hidden_state_accountants.process.noisy_process import NoisyProcess

_SPAN = 300.0  # nats of products of moduli within an epoch, or in a group of epochs
_FORGOTTEN = -250.0  # log of a product of moduli: all epochs before it are one group
_GROWTH = 0.01  # of what comes after a group of epochs or places, which it may have
_MOST_TERMS = 120_000
_TINY = 1e-300  # what underflows is rounded up: no shift is forgotten


@attrs.frozen(eq=False)
class EpochSums:
    """Shifts and weights of a segment, in rows of one epoch and columns of one position.

    A group of epochs is one row: what moves the record in any of them does so in the last one,
    where fewer steps are left to hide it. Steps outside of the segment have neither.

    Attributes:
        shifts: s_t C_t, in units of `shift_unit` and the row's power of two; shape (rows, period).
        weights: (C_t sigma_t)**2 of the last epoch of the group, in the row's unit.
        earlier: The sum of the weights of the group's other epochs, shape (rows,).
        exponents: The rows' powers of two, integers of shape (rows,).
        whole: The product of all moduli of the segment, in the first row's unit.
        shift_unit: The unit of all shifts.
        scale: What a cost is multiplied with, rounded up.
    """

    shifts: np.ndarray
    weights: np.ndarray
    earlier: np.ndarray
    exponents: np.ndarray
    whole: float
    shift_unit: float
    scale: float

    @classmethod
    def of(cls, process: NoisyProcess, start: int, stop: int) -> EpochSums | None:
        """Sums up the steps start+1..stop; None if a product of moduli is out of range."""
        period, steps = process.period, slice(start, stop)

        def by_epoch(values: np.ndarray) -> np.ndarray:
            return np.pad(values, (start % period, -stop % period)).reshape(-1, period)

        sensitivity, noise_std = process.sensitivity[steps], process.noise_std[steps]
        shift_unit, noise_unit = float(sensitivity.max()) or 1.0, float(noise_std.max()) or 1.0
        with np.errstate(divide="ignore"):
            log_moduli = by_epoch(np.log(process.contraction[steps])).ravel()
        later = np.append(np.cumsum(log_moduli[:0:-1])[::-1], 0.0).reshape(-1, period)
        if not np.isfinite(later).all():
            return None
        forgotten = int(np.argmax(later.max(axis=1) > _FORGOTTEN))
        last = forgotten + _last_of_groups(len(later) - forgotten)
        group = np.searchsorted(last, np.arange(len(later)))
        at_end = later[last, -1]
        relative = later - at_end[group, None]
        if relative.max() > _SPAN or (relative[last] < -_SPAN).any():
            return None
        exponents = np.rint(at_end / math.log(2))
        unit = np.exp(at_end - exponents * math.log(2))[group, None]
        shifts = by_epoch(sensitivity / shift_unit)
        moved = np.where(shifts > 0, np.maximum(shifts * np.exp(relative) * unit, _TINY), 0.0)
        weights = (by_epoch(noise_std / noise_unit) * np.exp(relative) * unit) ** 2
        firsts = np.append(0, last[:-1] + 1)
        earlier = weights.sum(axis=1)
        earlier[last] = 0.0
        rounding = 4e-15 * later.size * (1 + float(np.abs(relative).max()))
        return cls(
            np.add.reduceat(moved, firsts),
            weights[last],
            np.add.reduceat(earlier, firsts),
            exponents.astype(int),
            float(np.exp(relative[0, 0] + log_moduli[0]) * unit[0, 0]),
            shift_unit,
            (shift_unit / noise_unit) ** 2 * (1 + rounding),
        )

    def mu_squared(
        self, place: int, at_place: float, home: int, at_home: float, initial: float = 0.0
    ) -> float:
        """Returns mu**2 of two runs that differ at two places of every epoch.

        Args:
            place: The first position.
            at_place: The distance of their updates there, in sensitivities of the process.
            home: The second position; if it is the first one, `at_home` counts alone.
            at_home: The distance of their updates there.
            initial: The distance of the two runs at the start of the segment.
        """
        moves = sorted({place: at_place, home: at_home}.items())
        cuts = [0, *(position for position, _ in moves), self.weights.shape[1]]
        sums = np.stack(
            [self.weights[:, a:b].sum(axis=1) for a, b in itertools.pairwise(cuts)], axis=1
        )
        sums[:, 0] += self.earlier
        shifts = np.zeros_like(sums)
        for column, (position, factor) in enumerate(moves, 1):
            shifts[:, column] = factor * self.shifts[:, position]
        if initial:
            shifts[0, 0] = max(initial / self.shift_unit * self.whole, _TINY)
        exponents = np.repeat(self.exponents, len(cuts) - 1)
        stack = BlockStack(grows_left=False)
        for block in zip(
            shifts.ravel().tolist(), sums.ravel().tolist(), exponents.tolist(), strict=True
        ):
            stack.push(block)
        return stack.cost * self.scale


def hidden_places(
    process: NoisyProcess, between: np.ndarray, *, is_replaced: bool, initial: float = 0.0
) -> tuple[Places, ...]:
    """Returns the distances of Theorem F for one secret order, for each home of the record.

    In R the record's place at home is empty, and the record that the pattern exchanges with it is
    in its own place.

    Args:
        process: The process under the relation.
        between: B_k, shape (period,).
        is_replaced: True if the record is replaced by another one, False if it has no gradient.
        initial: The distance of the run with the record from both others at the start.

    Returns:
        One entry for each home; none where products of moduli are out of range, or the sums have
        too many terms.
    """
    period, steps = process.period, process.num_steps
    ends = (*process.release_steps, steps)
    segments = [EpochSums.of(process, *cut) for cut in itertools.pairwise((0, *ends))]
    sums = [segment for segment in segments if segment is not None]
    # The places that are used first and last, and one that is not used where there is one.
    homes = {steps % period, (steps - 1) % period} | ({0} if steps < period else set())
    looked_at = {home: _representatives(process, home) for home in sorted(homes)}
    rows = sum(len(segment.exponents) for segment in sums)
    terms = rows * sum(len(np.unique(places)) for places in looked_at.values())
    if len(sums) < len(segments) or terms > _MOST_TERMS:
        return ()
    one = 1 / 2 if is_replaced else 1.0  # the shift of one gradient, in sensitivities

    def distances(places: np.ndarray, at_place: float, home: int, start: float) -> np.ndarray:
        unique, index = np.unique(places, return_inverse=True)
        found = [
            sum(segment.mu_squared(place, at_place, home, one, start) for segment in sums)
            for place in unique.tolist()
        ]
        return np.sqrt(found)[index]

    result = []
    for home, places in looked_at.items():
        to_record = distances(places, 2 * one, home, initial)
        to_other = to_record
        if initial or not is_replaced:
            to_other = distances(places, 2 * one if is_replaced else one, home, 0.0)
        if not is_replaced:
            to_other[home] = 0.0  # R is the other run
        _, firsts, index = np.unique(places, return_index=True, return_inverse=True)
        largest = np.maximum.reduceat(between, firsts)[index]
        weights = np.full(period, 1 / period)
        result.append(Places.of(weights, to_record, largest, to_other))
    return tuple(result)


def _representatives(process: NoisyProcess, home: int) -> np.ndarray:
    """For each place one whose A and C are no smaller, shape (period,), ascending: few of many.

    Of equal steps with c <= 1 a participation that is moved later never costs less
    (docs/theory/data_order.md).
    """
    period = process.period
    is_whole = process.is_constant and not process.release_steps
    if not is_whole or process.contraction[0] > 1:
        return np.arange(period)
    places = np.empty(period, dtype=int)
    cuts = sorted({0, process.num_steps % period, home, home + 1, period})
    for left, right in itertools.pairwise(cuts):
        last = left + _last_of_groups(right - left)
        places[left:right] = np.repeat(last, np.diff(last, prepend=left - 1))
    return places


def _last_of_groups(number: int) -> np.ndarray:
    """The last element of each group of `number` elements, ascending; the last groups have one."""
    last, place = [], number - 1
    while place >= 0:
        last.append(place)
        place -= max(1, int(_GROWTH * (number - place)))
    return np.array(last[::-1])
