"""What is said of a run of SGD beside its epsilon: whether it contracts, and what would lower it.

Of the single changes of a run those come first that cost no accuracy: a secret order, Poisson
batches, a constant rate, a clip norm that does not act. Any other is named beside the noise that
gives the same epsilon without it: on many data sets that is the better model.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import dp_accounting
import numpy as np
from dp_accounting import NeighboringRelation

from hidden_state_accountants.best_bound import best_guarantee
from hidden_state_accountants.bounds.composition import composition_of
from hidden_state_accountants.errors import UnsupportedRunError
from hidden_state_accountants.events.batch_order import BatchOrder
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.events.loss_geometry import LossKind
from hidden_state_accountants.events.schedule import Schedule
from hidden_state_accountants.figures import text_up
from hidden_state_accountants.process.noisy_process import process_of

_LEAST = 0.01  # of epsilon; a change that lowers it by less is not worth a line
_CLOSE, _TRIES = 1.01, 4  # of epsilon, at equal noise
_DELTA = 1e-5  # where the gain of the first epochs is read
_STEPS_THAT_CONTRACT = 50_000  # how far ahead is looked
_EQUALS_COMPOSITION = "no contraction: epsilon equals composition (each epoch counts)"
_UNKNOWN_CURVATURE = (LossKind.LINEAR, LossKind.HOELDER)
_NAMES = {
    BatchOrder.POISSON: "poisson",
    BatchOrder.SHUFFLED_ONCE: "shuffled_once (an order that is kept secret)",
    BatchOrder.FULL: "full",
}


def single_changes(
    event: LastIterateDpEvent, relation: NeighboringRelation, delta: float
) -> tuple[tuple[str, float], ...]:
    """(description, epsilon) of the run with one thing changed: what costs no accuracy first.

    Returns:
        The changes that lower epsilon by a hundredth at least, the most helpful of a kind first.
    """

    def epsilon(run: LastIterateDpEvent) -> float:
        try:
            return best_guarantee(run, relation).epsilon(delta)
        except UnsupportedRunError:
            return math.inf

    now, found = epsilon(event), []
    for description, changed, costs in _changes(event):
        value = epsilon(changed)
        if not value < now * (1 - _LEAST):
            continue
        noise = _equal_noise(event, epsilon, now, value) if costs else None
        if noise is not None:
            description += f" (without that, noise multiplier {noise:g} gives the same epsilon)"
        found.append((costs, value, description))
    return tuple((description, value) for _, value, description in sorted(found))


def _equal_noise(
    event: LastIterateDpEvent,
    epsilon: Callable[[LastIterateDpEvent], float],
    now: float,
    wanted: float,
) -> float | None:
    """The noise multiplier, to three digits, with which the run has the epsilon wanted.

    Epsilon falls about like a power of the noise, whose exponent is that of the last two values.
    """
    if isinstance(event.noise_multiplier, Schedule) or not 0 < wanted < now < math.inf:
        return None
    noise, exponent, value = event.noise_multiplier, -1.0, now
    for _ in range(_TRIES):
        following = noise * (wanted / value) ** (1 / exponent)
        found = epsilon(attrs.evolve(event, noise_multiplier=following))
        if not 0 < found < math.inf:
            return None
        if wanted / _CLOSE <= found <= wanted * _CLOSE:
            return float(f"{following:.2e}")
        if found != value:
            exponent = min(math.log(found / value) / math.log(following / noise), -0.1)
        noise, value = following, found
    return None


def _changes(event: LastIterateDpEvent) -> Iterator[tuple[str, LastIterateDpEvent, bool]]:
    """Description, the changed run, and whether the change may cost accuracy."""
    change = functools.partial(attrs.evolve, event)
    if event.release_steps:
        count = len(event.release_steps)
        alone = change(release_steps=())
        yield f"release the last iterate only, not {count} more", alone, False
    if event.batch_order is BatchOrder.CYCLIC:
        secret = change(batch_order=BatchOrder.SHUFFLED_ONCE)
        yield "keep the order of the batches secret (shuffled once, uniformly)", secret, False
    if event.batch_order not in (BatchOrder.POISSON, BatchOrder.FULL):
        poisson = change(batch_order=BatchOrder.POISSON)
        yield "Poisson batches", poisson, False
    if isinstance(event.learning_rate, Schedule):
        rate = float(f"{np.mean(event.per_step('learning_rate')):.4g}")
        yield f"a constant rate, {rate:g}", change(learning_rate=rate), False
    loss, longest = event.loss, _length_that_is_clipped(event)
    if longest is not None:
        text = f"clip norm {longest:g}, which never acts, instead of {_text(event.clip_norm)}"
        longer = change(clip_norm=longest)
        if not event.has_schedules:
            noise = float(event.noise_std_on_sum()[0]) / longest
            same = attrs.evolve(longer, noise_multiplier=noise)
            yield f"{text}, at the same noise", same, False
        yield f"{text}, at the same noise multiplier", longer, True
    if loss is not None and loss.kind not in _UNKNOWN_CURVATURE:
        # Twice the decay; a quarter of the smoothness, enough to contract, if that is more.
        largest = float(np.max(event.per_step("weight_decay")))
        limit = 0.5 / (float(np.max(event.per_step("learning_rate"))) or math.inf)
        decay = max(largest, min(max(2 * largest, loss.smoothness / 4), limit))
        text = f"weight decay {decay:g} instead of {_text(event.weight_decay)}"
        yield text, change(weight_decay=decay), True


def _text(value: float | Schedule | None) -> str:
    return "the schedule" if isinstance(value, Schedule) else f"{value:g}"


def _length_that_is_clipped(event: LastIterateDpEvent) -> float | None:
    """The known length that no gradient exceeds, where some step clips to less."""
    longest = None if event.loss is None else event.loss.lipschitz
    if longest is None or event.clip_norm is None:
        return None
    return longest if float(np.min(event.per_step("clip_norm"))) < longest else None


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


def report_lines(
    event: dp_accounting.DpEvent,
    relation: NeighboringRelation,
    delta: float,
    clip: str = "max_grad_norm",
) -> list[str]:
    """What other batches, or another clip, would give, a line each; quick bounds only.

    Args:
        event: The run that happened.
        relation: Of the guarantee.
        delta: Where epsilon is read.
        clip: The argument that is the clip norm.
    """
    if not isinstance(event, LastIterateDpEvent):
        return []
    lines = (_of_other_batches(event, relation, delta), _of_another_clip(event, relation, clip))
    return [line for line in lines if line]


def _of_other_batches(
    event: LastIterateDpEvent, relation: NeighboringRelation, delta: float
) -> str:
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


def other_batches(
    event: LastIterateDpEvent, relation: NeighboringRelation, delta: float
) -> dict[BatchOrder, float]:
    """Epsilon of the same number of epochs, at the same noise multiplier, with other batches.

    Of POISSON batches by composition, which is no larger than what stock accountants report; a
    hidden state may need less. None for runs whose settings change.

    Returns:
        Epsilon by order, for POISSON, SHUFFLED_ONCE (with a loss geometry) and FULL, as far as they
        are other orders and have a bound.
    """
    found: dict[BatchOrder, float] = {}
    has_poisson_only = relation is NeighboringRelation.ADD_OR_REMOVE_ONE
    if has_poisson_only or event.has_schedules:
        return found
    now = event.batch_order
    for order in () if now is BatchOrder.FULL else _NAMES:
        if order is now or (order is BatchOrder.SHUFFLED_ONCE and event.loss is None):
            continue
        changes: dict[str, Any] = {"sampling_rate": None, "max_batch_size": None}
        if order is BatchOrder.FULL:
            changes |= {"batch_size": event.dataset_size, "release_steps": ()}
            changes["num_steps"] = math.ceil(event.num_steps / event.batches_per_epoch)
        other = attrs.evolve(event, batch_order=order, **changes)
        bound = composition_of if order is BatchOrder.POISSON else best_guarantee
        with contextlib.suppress(UnsupportedRunError):
            if (known := bound(other, relation)) is not None:
                found[order] = known.epsilon(delta)
    return found


def _of_another_clip(event: LastIterateDpEvent, relation: NeighboringRelation, clip: str) -> str:
    """The clip norm from which on no clip acts, where that makes the update contract more."""
    longest = _length_that_is_clipped(event)
    if longest is None:
        return ""
    clip_norm = math.ceil(longest * 1.00001 * 1e4) / 1e4
    now = process_of(event, relation)
    then = process_of(attrs.evolve(event, clip_norm=clip_norm), relation)
    if now is None or then is None:
        return ""
    before, after = float(now.contraction.max()), float(then.contraction.max())
    if not after < before:
        return ""
    return (
        f"raise {clip} to {clip_norm:g}: clipping then never acts, and the update "
        f"stretches distances by at most c = {after:.6g} instead of {before:.6g}. (The noise "
        "grows with it.)"
    )
