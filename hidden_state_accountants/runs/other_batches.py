"""What the same noise would give with other batches, and which clip would contract: advice."""

from __future__ import annotations

import math
from collections.abc import Iterator

import attrs
from dp_accounting import NeighboringRelation

from hidden_state_accountants.best_bound import best_guarantee
from hidden_state_accountants.bounds.composition import Composition
from hidden_state_accountants.errors import UnsupportedRunError
from hidden_state_accountants.events.batch_order import BatchOrder
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.figures import text_up
from hidden_state_accountants.runs.last_iterate import process_of

_STEPS_LOOKED_AHEAD, _LARGE = 20_000, 10.0
_NAMES = {
    BatchOrder.POISSON: "poisson",
    BatchOrder.SHUFFLED_ONCE: "shuffled_once (an order that is kept secret)",
    BatchOrder.FULL: "full",
}
_QUICK = (BatchOrder.CYCLIC, BatchOrder.SHUFFLED_ONCE, BatchOrder.FULL)


def other_batches(
    event: LastIterateDpEvent, relation: NeighboringRelation, delta: float
) -> dict[BatchOrder, float]:
    """Epsilon of the same number of epochs, at the same noise multiplier, with other batches.

    Quick bounds only: of POISSON batches composition, which is no larger than what stock
    accountants report; a hidden state may need less. None for runs whose settings change.

    Args:
        event: The run.
        relation: Of the guarantee.
        delta: Where epsilons are read.

    Returns:
        Epsilon by order, for POISSON, SHUFFLED_ONCE (with a loss geometry) and FULL, as far as they
        are other orders and have a bound.
    """
    found: dict[BatchOrder, float] = {}
    has_poisson_only = relation is NeighboringRelation.ADD_OR_REMOVE_ONE
    if has_poisson_only or event.has_schedules or event.record_position is not None:
        return found
    for other in _others(event):
        try:
            found[other.batch_order] = _quick_epsilon(other, relation, delta)
        except UnsupportedRunError:
            continue
    return found


def _others(event: LastIterateDpEvent) -> Iterator[LastIterateDpEvent]:
    plain = attrs.evolve(event, sampling_rate=None, max_batch_size=None)
    order, size = event.batch_order, event.dataset_size
    if order not in (BatchOrder.POISSON, BatchOrder.FULL):
        yield attrs.evolve(plain, batch_order=BatchOrder.POISSON)
    if order not in (BatchOrder.SHUFFLED_ONCE, BatchOrder.FULL) and event.loss is not None:
        yield attrs.evolve(plain, batch_order=BatchOrder.SHUFFLED_ONCE)
    if order is not BatchOrder.FULL:
        epochs = math.ceil(event.num_steps / event.batches_per_epoch)
        yield attrs.evolve(
            plain,
            batch_order=BatchOrder.FULL,
            batch_size=size,
            num_steps=epochs,
            release_steps=(),
        )


def _quick_epsilon(event: LastIterateDpEvent, relation: NeighboringRelation, delta: float) -> float:
    if event.batch_order is not BatchOrder.POISSON:
        return best_guarantee(event, relation).epsilon(delta)
    composition = Composition()
    unmet = composition.check(event, relation)
    if unmet:
        raise UnsupportedRunError("; ".join(map(str, unmet)))
    return composition.guarantee(event, relation).epsilon(delta)


def epochs_to_win(
    event: LastIterateDpEvent, relation: NeighboringRelation, delta: float
) -> int | None:
    """About how many epochs it takes until the run costs less than Poisson batches would.

    Args:
        event: The run, after some epochs of its constant settings.
        relation: Of the guarantee.
        delta: Where epsilons are read.

    Returns:
        A number of epochs for which it does, at most 1.2 times the smallest one; None if there is
        none within 20,000 steps and below epsilon = 10, or no quick bound.
    """
    steps = event.batches_per_epoch
    is_quick = event.batch_order in _QUICK and not event.has_schedules
    if event.loss is None or event.release_steps or not is_quick:
        return None

    def own(epochs: int) -> float:
        return _quick_epsilon(attrs.evolve(event, num_steps=epochs * steps), relation, delta)

    def wins(epochs: int) -> bool:
        run = attrs.evolve(event, num_steps=epochs * steps, batch_order=BatchOrder.POISSON)
        return own(epochs) <= _quick_epsilon(run, relation, delta)

    low, high = 0, math.ceil(event.num_steps / steps)
    while not wins(high):
        low, high = high, 4 * high
        if high * steps > _STEPS_LOOKED_AHEAD or own(high) > _LARGE:
            return None
    while low and high > 1.2 * low:
        middle = math.ceil(math.sqrt(low * high))
        if middle >= high:
            break
        low, high = (low, middle) if wins(middle) else (middle, high)
    return high


def other_batches_line(
    event: LastIterateDpEvent, relation: NeighboringRelation, delta: float
) -> str:
    """What the same noise would give with other batches, in one line; "" if nothing is known.

    Args:
        event: The run.
        relation: Of the guarantee.
        delta: Where epsilons are read.
    """
    found = other_batches(event, relation, delta)
    if not found:
        return ""
    passes = event.num_steps / event.batches_per_epoch
    figures = [f"{_NAMES[order]} {text_up(epsilon, 4)}" for order, epsilon in found.items()]
    line = (
        f"with other batches, at this noise after {passes:g} epochs: epsilon at most "
        f"{', '.join(figures)}"
    )
    if not costs_more_than_poisson(event, found, relation, delta):
        return line
    own = f"{line}; {event.batch_order.value} batches cost"
    if event.loss is None:
        return f"{own} more for any number of epochs, because no loss geometry is declared"
    epochs = epochs_to_win(event, relation, delta)
    if epochs is not None:
        return f"{own} less than Poisson batches from about {epochs} epochs on"
    return f"{own} more now"


def costs_more_than_poisson(
    event: LastIterateDpEvent,
    others: dict[BatchOrder, float],
    relation: NeighboringRelation,
    delta: float,
) -> bool:
    """Whether Poisson batches would cost less, as far as quick bounds say.

    Args:
        event: The run.
        others: Of `other_batches`.
        relation: Of the guarantee.
        delta: Where epsilons are read.
    """
    poisson = others.get(BatchOrder.POISSON, math.inf)
    return poisson < best_guarantee(event, relation).epsilon(delta)


def clip_that_contracts(
    event: LastIterateDpEvent, relation: NeighboringRelation
) -> tuple[float, float, float] | None:
    """The clip norm from which on no clip acts, where that makes the update contract more.

    Args:
        event: The run.
        relation: Of the guarantee.

    Returns:
        The clip norm, and the largest modulus of the update now and then; None if it is of no use.
    """
    loss = event.loss
    if loss is None or loss.lipschitz is None or event.clip_norm is None:
        return None
    if float(event.per_step("clip_norm").min()) >= loss.lipschitz:
        return None
    clip_norm = math.ceil(loss.lipschitz * 1.00001 * 1e4) / 1e4
    now = process_of(event, relation)
    then = process_of(attrs.evolve(event, clip_norm=clip_norm), relation)
    if now is None or then is None:
        return None
    before, after = float(now.contraction.max()), float(then.contraction.max())
    return (clip_norm, before, after) if after < before else None
