"""The law of the batches of a run, by enumeration.

Records with the same gradient are interchangeable: a batch is a tuple of counts, one per group of
records. Records without a gradient belong to no group and are not counted, so that there may be any
number of them. A run is a mixture of Markov chains of batches.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from hidden_state_accountants.errors import UnsupportedRunError
from hidden_state_accountants.events.batch_order import BatchOrder
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent

Counts = tuple[int, ...]
Draws = Sequence[tuple[float, Counts, Counts]]
"""(probability, batch, next state) triples."""
Chain = Callable[[int, Counts], Draws]
"""The draws of step t (from 0) in a state."""

_MOST_BATCHES = 1000
_MOST_ORDERS = 512


def batch_chains(event: LastIterateDpEvent, groups: list[int | None]) -> list[tuple[float, Chain]]:
    """The mixture of chains from which `event` draws its batches.

    Args:
        event: The run.
        groups: The group of each record, None for those that are not counted; at least one has a
            group. Shape (dataset_size,).

    Raises:
        UnsupportedRunError: There are too many batches or orders to enumerate.
    """
    order, b = event.batch_order, event.batch_size
    sizes = _counts(groups, 1 + max(group for group in groups if group is not None))
    rest = len(groups) - sum(sizes)
    if order is BatchOrder.POISSON:
        poisson = [(p, batch, ()) for p, batch in _poisson(sizes, event.sampling_probability)]
        return [(1.0, lambda t, state: poisson)]
    if order is BatchOrder.WITHOUT_REPLACEMENT:
        fixed_size = [(p, batch, ()) for p, batch in _without_replacement(sizes, rest, b)]
        return [(1.0, lambda t, state: fixed_size)]
    if order is BatchOrder.BALLS_IN_BINS:
        return [(p, _fixed(batches)) for p, batches in _bins(sizes, event.batches_per_epoch)]
    if order is BatchOrder.BALLS_IN_BINS_REDRAWN:
        return [(1.0, _bins_redrawn(sizes, event.batches_per_epoch))]
    if order is BatchOrder.RESHUFFLED:
        return [(1.0, _reshuffled(sizes, rest, b, event.batches_per_epoch))]
    if order is BatchOrder.SHUFFLED_ONCE:
        orders = []  # at least one for each batch that the record could be in
        if event.batches_per_epoch <= _MOST_ORDERS:
            orders = list(itertools.islice(_shuffles(sizes, rest, b), _MOST_ORDERS + 1))
        if not 0 < len(orders) <= _MOST_ORDERS:
            raise UnsupportedRunError(
                f"Expected at most {_MOST_ORDERS} orders of the data, got more. Use fewer batches, "
                "or give records that behave alike the same gradient callable."
            )
        return [(p, _fixed(batches)) for p, batches in orders]
    batches = [_counts(groups[i : i + b], len(sizes)) for i in range(0, len(groups), b)]
    return [(1.0, _fixed(batches))]


def _counts(groups: list[int | None], number: int) -> Counts:
    return tuple(groups.count(group) for group in range(number))


def _without(sizes: Counts, batch: Counts) -> Counts:
    return tuple(k - n for k, n in zip(sizes, batch, strict=True))


def _fixed(batches: list[Counts]) -> Chain:
    return lambda t, state: [(1.0, batches[t % len(batches)], ())]


def _reshuffled(sizes: Counts, rest: int, batch_size: int, period: int) -> Chain:
    total = sum(sizes) + rest

    def draws(t: int, state: Counts) -> Draws:
        left = sizes if t % period == 0 else state  # what the epoch has not used yet
        unused = total - t % period * batch_size - sum(left)
        return [
            (p, batch, _without(left, batch))
            for p, batch in _without_replacement(left, unused, batch_size)
        ]

    return draws


def _shuffles(sizes: Counts, rest: int, batch_size: int) -> Iterator[tuple[float, list[Counts]]]:
    if not any(sizes) and not rest:
        yield 1.0, []
        return
    for p, batch in _without_replacement(sizes, rest, batch_size):
        left = _without(sizes, batch)
        unused = max(0, sum(sizes) + rest - batch_size) - sum(left)
        for q, later in _shuffles(left, unused, batch_size):
            yield p * q, [batch, *later]


def _bins(sizes: Counts, bins: int) -> Iterator[tuple[float, list[Counts]]]:
    """The batches of an epoch, if every record draws one of them."""
    if bins == 1:
        yield 1.0, [sizes]
        return
    for p, batch in _poisson(sizes, 1 / bins):
        left = _without(sizes, batch)
        for q, later in _bins(left, bins - 1):
            yield p * q, [batch, *later]


def _bins_redrawn(sizes: Counts, bins: int) -> Chain:
    """The same, drawn anew every epoch: the state is what is in a later bin."""

    def draws(t: int, state: Counts) -> Draws:
        left = sizes if t % bins == 0 else state
        return [
            (p, batch, _without(left, batch))
            for p, batch in _poisson(left, 1 / (bins - t % bins))
            if p
        ]

    return draws


def _subsets(sizes: Counts) -> Iterator[Counts]:
    number = math.prod(k + 1 for k in sizes)
    if number > _MOST_BATCHES:
        raise UnsupportedRunError(
            f"Expected at most {_MOST_BATCHES} different batches, got up to {number}. Use fewer "
            "records, or give records that behave alike the same gradient callable."
        )
    return itertools.product(*(range(k + 1) for k in sizes))


def _poisson(sizes: Counts, rate: float) -> Iterator[tuple[float, Counts]]:
    for batch in _subsets(sizes):
        yield (
            math.prod(
                math.comb(k, n) * rate**n * (1 - rate) ** (k - n)
                for k, n in zip(sizes, batch, strict=True)
            ),
            batch,
        )


@functools.lru_cache(maxsize=1024)  # binomial coefficients of large data sets have many digits
def _without_replacement(
    sizes: Counts, rest: int, batch_size: int
) -> tuple[tuple[float, Counts], ...]:
    size = min(batch_size, sum(sizes) + rest)
    total = math.comb(sum(sizes) + rest, size)
    return tuple(
        (math.prod(map(math.comb, sizes, batch)) * math.comb(rest, others) / total, batch)
        for batch in _subsets(sizes)
        if 0 <= (others := size - sum(batch)) <= rest
    )
