"""The law of the batches of a run, by enumeration.

Records with the same gradient are interchangeable: a batch is a tuple of counts, one per group of
records. A run is a mixture of Markov chains of batches.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from hidden_state_accountants.batch_order import BatchOrder
from hidden_state_accountants.errors import UnsupportedRunError
from hidden_state_accountants.events import LastIterateDpEvent

Counts = tuple[int, ...]
Draws = Sequence[tuple[float, Counts, Counts]]
"""(probability, batch, next state) triples."""
Chain = Callable[[int, Counts], Draws]
"""The draws of step t (from 0) in a state."""

_MOST_BATCHES = 1000  # binomial coefficients then fit a double
_MOST_ORDERS = 512


def batch_chains(event: LastIterateDpEvent, groups: list[int]) -> list[tuple[float, Chain]]:
    """The mixture of chains from which `event` draws its batches.

    Args:
        event: The run.
        groups: The group of each record; shape (dataset_size,).

    Raises:
        UnsupportedRunError: There are too many batches or orders to enumerate.
    """
    order, b = event.batch_order, event.batch_size
    sizes = _counts(groups, max(groups) + 1)
    if order is BatchOrder.POISSON:
        poisson = [(p, batch, ()) for p, batch in _poisson(sizes, b / event.dataset_size)]
        return [(1.0, lambda t, state: poisson)]
    if order is BatchOrder.WITHOUT_REPLACEMENT:
        fixed_size = [(p, batch, ()) for p, batch in _without_replacement(sizes, b)]
        return [(1.0, lambda t, state: fixed_size)]
    if order is BatchOrder.RESHUFFLED:
        return [(1.0, _reshuffled(sizes, b, event.batches_per_epoch))]
    if order is BatchOrder.SHUFFLED_ONCE:
        orders = list(itertools.islice(_shuffles(sizes, b), _MOST_ORDERS + 1))
        if len(orders) > _MOST_ORDERS:
            raise UnsupportedRunError(
                f"Expected at most {_MOST_ORDERS} orders of the data, got more. Use fewer batches, "
                "or give records that behave alike the same gradient callable."
            )
        return [(p, _fixed(batches)) for p, batches in orders]
    batches = [_counts(groups[i : i + b], len(sizes)) for i in range(0, len(groups), b)]
    return [(1.0, _fixed(batches))]


def _counts(groups: list[int], number: int) -> Counts:
    return tuple(groups.count(group) for group in range(number))


def _fixed(batches: list[Counts]) -> Chain:
    return lambda t, state: [(1.0, batches[t % len(batches)], ())]


def _reshuffled(sizes: Counts, batch_size: int, period: int) -> Chain:
    def draws(t: int, state: Counts) -> Draws:
        left = sizes if t % period == 0 else state  # what the epoch has not used yet
        return [
            (p, batch, tuple(k - n for k, n in zip(left, batch, strict=True)))
            for p, batch in _without_replacement(left, batch_size)
        ]

    return draws


def _shuffles(sizes: Counts, batch_size: int) -> Iterator[tuple[float, list[Counts]]]:
    if not any(sizes):
        yield 1.0, []
        return
    for p, batch in _without_replacement(sizes, batch_size):
        left = tuple(k - n for k, n in zip(sizes, batch, strict=True))
        for q, rest in _shuffles(left, batch_size):
            yield p * q, [batch, *rest]


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


def _without_replacement(sizes: Counts, batch_size: int) -> Iterator[tuple[float, Counts]]:
    size = min(batch_size, sum(sizes))
    total = math.comb(sum(sizes), size)
    for batch in _subsets(sizes):
        if sum(batch) == size:
            yield math.prod(map(math.comb, sizes, batch)) / total, batch
