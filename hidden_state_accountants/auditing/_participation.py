"""The total shift by a record that joins batches at random."""

from __future__ import annotations

import attrs
import numpy as np
from scipy import stats

from hidden_state_accountants.auditing._released import released_shifts
from hidden_state_accountants.events.batch_order import BatchOrder
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent

_MOST_WORK = 1e9  # nodes times draws of a convolution
_STEPS_IN_DOUBT = 12.0  # standard deviations of the shift that the lattice covers


@attrs.frozen(eq=False)
class Atoms:
    """A discrete law: masses at points >= 0, and mass beyond all of them."""

    points: np.ndarray
    mass: np.ndarray
    beyond: float = 0.0


@attrs.frozen(eq=False)
class _Draw:
    """A shift of points[j] with probability mass[j], else none; independent of other draws."""

    points: np.ndarray
    mass: np.ndarray


def shift_law(event: LastIterateDpEvent, *, up: bool = False) -> Atoms:
    r"""The law of the shift of a linear statistic of the releases, rounded down or rounded up.

    The statistic is the last iterate where nothing else is released, otherwise the sum of the
    standardised increments between releases, weighted by their expected shifts. A record that
    contributes the gradient bound wherever it takes part shifts it by the sum, over the steps that
    it joins, of the weighted `released_shifts`, in standard deviations of the statistic. The law
    bounds the real one stochastically; it is exact if all shifts are equal or there is one draw.
    """
    shift, segment = released_shifts(event)
    draws = _draws(event, shift)
    if event.release_steps:
        expected = np.zeros(segment[-1] + 1)
        np.add.at(expected, segment, shift)
        size = float(np.linalg.norm(expected)) or 1.0
        draws = _draws(event, shift * (expected / size)[segment])
    return _sum_of(draws, up)


def participation_probability(event: LastIterateDpEvent) -> float:
    """The probability that a record's gradient is in one POISSON or WITHOUT_REPLACEMENT batch.

    A loader with a cap drops uniformly, so the record stays with probability min(1, cap / size).
    """
    rate = event.sampling_probability
    if event.max_batch_size is None:
        return rate
    size = 1 + np.arange(event.dataset_size)
    kept = np.minimum(1.0, event.max_batch_size / size)
    return float(rate * (stats.binom.pmf(size - 1, event.dataset_size - 1, rate) @ kept))


def _draws(event: LastIterateDpEvent, shift: np.ndarray) -> list[_Draw]:
    order, steps, period = event.batch_order, event.num_steps, event.batches_per_epoch
    if order in (BatchOrder.POISSON, BatchOrder.WITHOUT_REPLACEMENT):
        rate = np.array([participation_probability(event)])
        return [_Draw(shift[t : t + 1], rate) for t in range(steps)]
    sizes = np.full(period, event.batch_size)
    sizes[-1] = event.dataset_size - (period - 1) * event.batch_size
    share = sizes / event.dataset_size
    if order is BatchOrder.RESHUFFLED:
        epochs = [shift[start : start + period] for start in range(0, steps, period)]
        return [_Draw(epoch, share[: len(epoch)]) for epoch in epochs]
    return [_Draw(np.bincount(np.arange(steps) % period, shift, minlength=period), share)]


def _sum_of(draws: list[_Draw], up: bool) -> Atoms:
    values = np.concatenate([draw.points for draw in draws])
    largest = float(values.max())
    if largest == 0:
        return Atoms(np.zeros(1), np.ones(1))
    if len(draws) == 1:
        none = max(0.0, 1 - float(draws[0].mass.sum()))
        return Atoms(np.append(draws[0].points, 0.0), np.append(draws[0].mass, none))
    if float(values[values > 0].min()) >= largest * (1 - 1e-12):
        return _number_of_equal_shifts(draws, largest)
    return _convolved(draws, up)


def _number_of_equal_shifts(draws: list[_Draw], shift: float) -> Atoms:
    rates = np.array([float(draw.mass[draw.points > 0].sum()) for draw in draws])
    rates = np.where(rates > 1 - 1e-12, 1.0, rates)
    values, counts = np.unique(rates, return_counts=True)
    law = np.ones(1)
    for rate, count in zip(values, counts, strict=True):
        part = stats.binom.pmf(np.arange(count + 1), count, rate)
        kept = np.flatnonzero(part)
        part = np.concatenate([np.zeros(kept[0]), part[kept[0] : kept[-1] + 1]])
        law = np.convolve(law, part)
    kept = np.flatnonzero(law)
    return Atoms(kept * shift, law[kept])


def _convolved(draws: list[_Draw], up: bool) -> Atoms:
    """The law of the sum, every shift rounded down or up to a lattice."""
    top = sum(float(draw.points.max()) for draw in draws)
    mean = sum(float(draw.points @ draw.mass) for draw in draws)
    variance = sum(float(draw.points**2 @ draw.mass) for draw in draws)
    peak = max(float(draw.points.max()) for draw in draws)
    top = min(top, mean + _STEPS_IN_DOUBT * (variance**0.5 + peak))
    number = sum(len(draw.points) for draw in draws)
    nodes = int(np.clip(_MOST_WORK / number, 512, 16384))
    room = min(len(draws), nodes // 2) if up else 0  # each draw may be rounded up by a node
    width = top / (nodes - 1 - room)
    small = 0.0  # shifts too small to be worth rounding up one by one: all of them happen
    law, beyond = np.zeros(nodes), 0.0
    law[0] = 1.0
    for draw in sorted(draws, key=lambda draw: float(draw.points.max())):
        reach = float(draw.points.max())
        if up and small + reach <= width:
            small += reach
            continue
        if not up and reach < width:
            continue
        steps = draw.points / width
        steps = (np.ceil(steps) if up else np.floor(steps)).astype(np.int64)
        stays = max(0.0, 1 - float(draw.mass.sum()))
        moved = law * stays
        for jump, mass in zip(steps.tolist(), draw.mass.tolist(), strict=True):
            if jump:
                moved[jump:] += mass * law[:-jump]
                lost = mass * float(law[-jump:].sum())
            else:
                moved += mass * law
                lost = 0.0
            if up:
                beyond += lost
            else:
                moved[-1] += lost
        law = moved
    return Atoms(small + width * np.arange(nodes), law, beyond)
