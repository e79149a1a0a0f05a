r"""Theorem A for a record that is in one batch of every epoch, and a second one that is in another.

The distances of Theorem F (docs/theory/hidden_place.md): two runs differ in every epoch at the
place of the record and at its home, by multiples of what one record moves an update. The
optimum is the isotonic regression of `shifts`, in which a participation and the steps up to
the next one are a block.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping

import attrs
import numpy as np

from hidden_state_accountants.bounds.solvers.shifts import BlockStack
from hidden_state_accountants.curves.hidden_place import Places
from hidden_state_accountants.process.distances import distance_by_moduli
from hidden_state_accountants.process.noisy_process import NoisyProcess

_SPAN = 300.0  # nats of products of moduli within an epoch, or in a group of epochs
_FORGOTTEN = -250.0  # log of a product of moduli: all epochs before it are one group
_GROWTH = 0.01  # of what comes after a group of epochs or places, which it may have
_MOST_TERMS = 120_000  # places times epochs: a second
_MOST_STEPS = 20_000_000  # arrays of 160 MB
_NEGLIGIBLE = 1e-20  # share of a step that all before the steps that are looked at may have left
_FEW_PLACES = 0.25  # growth of groups of places in two epochs, every pair of which is a pattern
_MOST_PATTERNS = 2000  # of two epochs: a second
_TINY = 1e-300  # what underflows is rounded up: no shift is forgotten


_Moves = list[tuple[int | None, float]]  # positions, if reached, and distances of updates there


@attrs.frozen(eq=False, slots=False)
class EpochSums:
    """Shifts and weights of a segment, in rows of one epoch and columns of one position.

    A group of epochs is one row: what moves the record in any of them does so in the last one,
    where fewer steps are left to hide it. Steps outside of the segment have neither.

    Attributes:
        shifts: s_t C_t, in units of `shift_unit` and the row's power of two.
        weights: (C_t sigma_t)**2 of the last epoch of the group, in the row's unit.
        earlier: The sum of the weights of the group's other epochs, shape (rows,).
        exponents: The rows' powers of two, integers of shape (rows,).
        whole: The product of all moduli of the segment, in the first row's unit.
        shift_unit: The unit of all shifts.
        scale: The unit of a cost, rounded up.
    """

    shifts: np.ndarray
    weights: np.ndarray
    earlier: np.ndarray
    exponents: np.ndarray
    whole: float
    shift_unit: float
    scale: float

    @classmethod
    def of(
        cls, process: NoisyProcess, start: int, stop: int, growth: float = _GROWTH
    ) -> EpochSums | None:
        """Sums up the steps start+1..stop; None if a product of moduli is out of range."""
        period, steps = min(process.period, process.num_steps), slice(start, stop)

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
        last = forgotten + _last_of_groups(len(later) - forgotten, growth)
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

    @functools.cached_property
    def _before(self) -> np.ndarray:
        """The sum of the weights before each position, and that of all."""
        return np.cumsum(np.pad(self.weights, ((0, 0), (1, 0))), axis=1)

    @functools.cached_property
    def _after(self) -> np.ndarray:
        """The sum of the weights from each position on: no difference, which would lose digits."""
        return np.cumsum(self.weights[:, ::-1], axis=1)[:, ::-1]

    def mu_squared(self, moves: Mapping[int, float], initial: float = 0.0) -> float:
        """mu**2 of two runs, `initial` apart, whose updates are `moves` apart at some positions."""
        period = self.weights.shape[1]  # positions that are never reached are beyond it
        ordered = sorted(move for move in moves.items() if move[0] < period)
        cuts = [*(position for position, _ in ordered), period]
        between = [self.weights[:, a:b].sum(axis=1) for a, b in itertools.pairwise(cuts[:-1])]
        last = [self._after[:, cuts[-2]]] if ordered else []
        sums = np.stack([self._before[:, cuts[0]] + self.earlier, *between, *last], axis=1)
        shifts = np.zeros_like(sums)
        for column, (position, factor) in enumerate(ordered, 1):
            shifts[:, column] = factor * self.shifts[:, position]
        if initial:
            shifts[0, 0] = max(initial / self.shift_unit * self.whole, _TINY)
        exponents = np.repeat(self.exponents, len(cuts))
        stack = BlockStack(grows_left=False)
        for block in zip(
            shifts.ravel().tolist(), sums.ravel().tolist(), exponents.tolist(), strict=True
        ):
            stack.push(block)
        return stack.cost * self.scale


def hidden_places(
    process: NoisyProcess, between: np.ndarray, *, is_replaced: bool
) -> tuple[Places, ...]:
    """The distances of Theorem F for one secret order, for each home of the record.

    In R the record's place at home is empty, and the record that the pattern exchanges with it is
    in its own place. There is none where products of moduli are out of range, or the sums have too
    many terms.

    Args:
        process: The process under the relation.
        between: B_k, shape (period,).
        is_replaced: True if the record is replaced by another one, False if it has no gradient.
    """
    process, before = _recent(process)
    period, steps = process.period, process.num_steps
    if steps > _MOST_STEPS:
        return ()
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

    def distances(places: np.ndarray, at_place: float, home: int) -> np.ndarray:
        found = [
            sum(
                segment.mu_squared({place: at_place, home: one}, (at_place + one) * before)
                for segment in sums
            )
            for place in places.tolist()
        ]
        return np.sqrt(found)

    result = []
    for home, by_place in looked_at.items():
        places, firsts, counts = np.unique(by_place, return_index=True, return_counts=True)
        to_record = to_other = distances(places, 2 * one, home)
        if not is_replaced:
            # At home R is the other run.
            to_other = np.where(places == home, 0.0, distances(places, one, home))
        largest = np.maximum.reduceat(between, firsts)
        result.append(Places.of(counts / period, to_record, largest, to_other))
    return tuple(result)


def _recent(process: NoisyProcess) -> tuple[NoisyProcess, float]:
    """The last epochs of equal steps, and what one gradient an epoch before them has moved."""
    c, period = float(process.contraction[0]), process.period
    if not process.is_constant or process.release_steps or not 0 < c < 1:
        return process, 0.0
    kept = math.log(_NEGLIGIBLE * (1 - c)) / math.log(c)
    start = max(0, int((process.num_steps - kept) // period) * period)
    return process.from_step(start) if start else process, distance_by_moduli(process, start)


def places_of_fresh_orders(
    process: NoisyProcess, initial: float, *, is_replaced: bool
) -> tuple[Places, ...]:
    """The distances of Theorem F where one or two epochs have an order of their own, by the homes.

    A pattern is a place in each of them, and so is a home. The run with the record is `initial`
    apart from both others at the start. There is none where products of moduli are out of range,
    the last step has no noise, or two epochs have too many patterns.
    """
    period, steps = process.period, process.num_steps
    sums = EpochSums.of(attrs.evolve(process, period=steps), 0, steps)
    if sums is None or not process.noise_std[-1] > 0:
        return ()
    epochs = [(start, min(start + period, steps)) for start in range(0, steps, period)]
    growth = _GROWTH if len(epochs) == 1 else _FEW_PLACES
    if not process.is_constant or process.contraction[0] > 1:
        growth = 0.0
    one = 1 / 2 if is_replaced else 1.0  # the shift of one gradient, in sensitivities

    def mu(moves: _Moves, start: float) -> float:
        reached = {place: factor for place, factor in moves if place is not None}
        return math.sqrt(sums.mu_squared(reached, start))

    # The batches that are used first and last, and those that are not used where there are any.
    first, last = tuple(start for start, _ in epochs), tuple(stop - 1 for _, stop in epochs)
    unused = *last[:-1], last[-1] if steps % period == 0 else None
    result = []
    for homes in dict.fromkeys((first, last, unused)):
        choices = [
            _places_of_an_epoch(*epoch, period, home, growth)
            for epoch, home in zip(epochs, homes, strict=True)
        ]
        if len(epochs) > 1 and math.prod(map(len, choices)) > _MOST_PATTERNS:
            return ()
        rows = []
        for pattern in itertools.product(*choices):
            record, between, other = _Moves(), _Moves(), _Moves()
            for (place, _), home in zip(pattern, homes, strict=True):
                between += [(place, 1.0)]
                if place == home:
                    record += [(home, one)]
                    other += [(home, one if is_replaced else 0.0)]
                else:
                    record += [(place, 2 * one), (home, one)]
                    other += [(place, 1.0), (home, one)]
            weight = math.prod(count / period for _, count in pattern)
            rows.append((weight, mu(record, initial), mu(between, initial), mu(other, 0.0)))
        result.append(Places.of(*np.array(rows).T))
    return tuple(result)


def _places_of_an_epoch(
    start: int, stop: int, period: int, home: int | None, growth: float
) -> list[tuple[int | None, int]]:
    """The last place of every group of places, none for those not reached, and the places' number.

    A participation that is moved later never costs less, if the steps are equal and c <= 1.
    """
    cuts = sorted({start, stop} | ({home, home + 1} if home is not None else set()))
    places: list[tuple[int | None, int]] = []
    for left, right in itertools.pairwise(cuts):
        last = left + _last_of_groups(right - left, growth)
        places += zip(last.tolist(), np.diff(last, prepend=left - 1).tolist(), strict=True)
    missing = period - (stop - start)
    return places + ([(None, missing)] if missing else [])


def _representatives(process: NoisyProcess, home: int) -> np.ndarray:
    """For each place one whose A and C are no smaller, shape (period,), ascending: few of many.

    Of equal steps with c <= 1 a participation that is moved later never costs less
    (docs/theory/hidden_place.md).
    """
    period = process.period
    is_whole = process.is_constant and not process.release_steps
    if not is_whole or process.contraction[0] > 1:
        return np.arange(period)
    places = np.empty(period, dtype=int)
    cuts = sorted({0, process.num_steps % period, home, home + 1, period})
    for left, right in itertools.pairwise(cuts):
        last = left + _last_of_groups(right - left, _GROWTH)
        places[left:right] = np.repeat(last, np.diff(last, prepend=left - 1))
    return places


def _last_of_groups(number: int, growth: float) -> np.ndarray:
    """The last element of each group of `number` elements, ascending; the last groups have one."""
    last, place = [], number - 1
    while place >= 0:
        last.append(place)
        place -= max(1, int(growth * (number - place)))
    return np.array(last[::-1])
