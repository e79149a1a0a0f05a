"""What is said of a run of SGD beside its epsilon: whether it contracts, and what would help."""

from __future__ import annotations

import contextlib
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
from hidden_state_accountants.guarantee import Guarantee
from hidden_state_accountants.process.noisy_process import (
    NoisyProcess,
    noisy_process,
    sampled_process,
    unmet_conditions,
)

_DELTA = 1e-5
_EQUALS_COMPOSITION = "no contraction: epsilon equals composition (each epoch counts)"
_STEPS_THAT_CONTRACT = 50_000  # how far ahead is looked
_NAMES = {
    BatchOrder.POISSON: "poisson",
    BatchOrder.SHUFFLED_ONCE: "shuffled_once (an order that is kept secret)",
    BatchOrder.FULL: "full",
}


def process_of(event: LastIterateDpEvent, relation: NeighboringRelation) -> NoisyProcess | None:
    """The contractive process of a run; of random batches that with batches of b records."""
    if unmet_conditions(event, relation, tuple(BatchOrder)):
        return None
    if event.batch_order in (BatchOrder.POISSON, BatchOrder.WITHOUT_REPLACEMENT):
        return sampled_process(event, relation, event.batch_size)
    return noisy_process(event, relation)


def composition_of(event: LastIterateDpEvent, relation: NeighboringRelation) -> Guarantee | None:
    """Ordinary composition of the steps; None if it does not cover the order of the batches."""
    bound = Composition()
    return None if bound.check(event, relation) else bound.guarantee(event, relation)


def no_contraction_line(event: LastIterateDpEvent, relation: NeighboringRelation) -> str:
    """One line on a run whose update does not contract; empty if it does or is projected.

    The run is looked at for ten epochs, or fewer if that is more than 50,000 steps.

    Args:
        event: One step of the run with its first hyper-parameters.
        relation: The neighbouring relation.
    """
    process = process_of(event, relation)
    if process is None:
        return f"{_EQUALS_COMPOSITION}; no loss geometry is declared"
    c = float(process.contraction[0])
    if c < 1 or event.domain_diameter < math.inf:
        return ""
    reason = (
        f"one step stretches distances by up to c = {c:.6g}"
        if c > 1
        else "the update does not shrink distances (c = 1)"
    )
    if event.batch_order not in (BatchOrder.CYCLIC, BatchOrder.FULL):
        return (
            f"no contraction: {reason}; what the secret order gains is in get_epsilon (assuming "
            "the first step's hyper-parameters)"
        )
    epochs = min(10, _STEPS_THAT_CONTRACT // event.batches_per_epoch)
    if epochs < 2:  # within one epoch the last batch always costs as much as under composition
        return f"no contraction: {reason} (assuming the first step's hyper-parameters)"
    ahead = attrs.evolve(event, num_steps=epochs * event.batches_per_epoch)
    composed = composition_of(ahead, relation)
    every = math.inf if composed is None else composed.epsilon(_DELTA)
    gain = best_guarantee(ahead, relation).epsilon(_DELTA) / every if 0 < every < math.inf else 1.0
    assuming = f"assuming delta = {_DELTA:g} and the first step's hyper-parameters"
    if gain > 0.999:
        return f"{_EQUALS_COMPOSITION}; {reason} ({assuming})"
    return (
        f"no contraction: {reason}; after {epochs} epochs epsilon is {text_up(gain, 3)} times that "
        f"of composition, thanks to the noise of the other batches only ({assuming})"
    )


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
        is_random = other.batch_order is BatchOrder.POISSON
        with contextlib.suppress(UnsupportedRunError):
            known = (composition_of if is_random else best_guarantee)(other, relation)
            if known is not None:
                found[other.batch_order] = known.epsilon(delta)
    return found


def _others(event: LastIterateDpEvent) -> Iterator[LastIterateDpEvent]:
    plain = attrs.evolve(event, sampling_rate=None, max_batch_size=None)
    order = event.batch_order
    if order is BatchOrder.FULL:
        return
    if order is not BatchOrder.POISSON:
        yield attrs.evolve(plain, batch_order=BatchOrder.POISSON)
    if order is not BatchOrder.SHUFFLED_ONCE and event.loss is not None:
        yield attrs.evolve(plain, batch_order=BatchOrder.SHUFFLED_ONCE)
    yield attrs.evolve(
        plain,
        batch_order=BatchOrder.FULL,
        batch_size=event.dataset_size,
        num_steps=math.ceil(event.num_steps / event.batches_per_epoch),
        release_steps=(),
    )


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
    poisson = found.get(BatchOrder.POISSON, math.inf)
    if poisson >= best_guarantee(event, relation).epsilon(delta):
        return line
    own = f"{line}; {event.batch_order.value} batches cost"
    if event.loss is None:
        return f"{own} more for any number of epochs, because no loss geometry is declared"
    return f"{own} more now"


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
