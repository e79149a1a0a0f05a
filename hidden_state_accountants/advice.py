"""Changes that would lower the epsilon of a run of SGD, each with the accountant's own figure.

A step that stretches distances is named first. Then come the changes that cost no accuracy: a
secret order, Poisson batches, a constant rate, a clip norm that does not act; then all others.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import attrs
import dp_accounting
import numpy as np
from dp_accounting import NeighboringRelation

from hidden_state_accountants.best_bound import best_guarantee
from hidden_state_accountants.bounds.composition import composition_of
from hidden_state_accountants.errors import UnsupportedRunError
from hidden_state_accountants.events.batch_order import OF_RANDOM_SIZE, BatchOrder
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.events.loss_geometry import LossKind
from hidden_state_accountants.events.schedule import Schedule, mapped
from hidden_state_accountants.figures import text_up
from hidden_state_accountants.guarantee import change_lines
from hidden_state_accountants.process.noisy_process import NoisyProcess, process_of

_LEAST = 0.01  # share of epsilon; a change that lowers it by less is not worth a line
_DELTA = 1e-5  # where the gain of the first epochs is read
_STEPS_AHEAD = 50_000  # at most so many steps are accounted for ahead
_SMALLEST_SCALE = 1e-3  # of the learning rate; one that is lowered by more trains another model
_SCALES = 1000  # that are tried, each 0.7 % below the one before
_ROUNDED = 1 + 1e-12  # relative error of moduli
_EQUALS_COMPOSITION = "no contraction: epsilon equals composition (each epoch counts)"
_NO_SHRINKING = "the update does not shrink distances (c = 1)"
_NO_LOSS = (
    "no loss is declared: a linear or softmax head on fixed features has a known one "
    "(docs/losses.md), a network with hidden layers has none"
)

Change = tuple[str, LastIterateDpEvent, bool]
"""A description, the changed run, and whether the change may cost accuracy."""


def single_changes(
    event: LastIterateDpEvent,
    relation: NeighboringRelation,
    delta: float,
    now: float,
) -> tuple[tuple[str, float], ...]:
    """(description, epsilon) of the run with one thing changed, each by `best_guarantee`.

    Named are those that lower the epsilon of now by a hundredth at least: a rate that stretches no
    distance, what costs no accuracy, the rest; of each kind the most helpful one first.
    """

    def epsilon(run: LastIterateDpEvent) -> float:
        try:
            return best_guarantee(run, relation).epsilon(delta)
        except UnsupportedRunError:
            return math.inf

    helpful, stretching = [], _shorter_steps(event, relation)
    for change in [*stretching, *_changes(event)]:
        description, changed, costs = change
        value = epsilon(changed)
        if value < now * (1 - _LEAST):
            helpful.append((change not in stretching, costs, value, description))
    return tuple((description, value) for *_, value, description in sorted(helpful))


def report_lines(
    event: dp_accounting.DpEvent, relation: NeighboringRelation, delta: float
) -> list[str]:
    """The changes of `single_changes` of a run that happened, a line each, beside its epsilon."""
    if not isinstance(event, LastIterateDpEvent):
        return []
    now = best_guarantee(event, relation).epsilon(delta)
    return change_lines(now, single_changes(event, relation, delta, now))


def _shorter_steps(event: LastIterateDpEvent, relation: NeighboringRelation) -> list[Change]:
    """The largest learning rate whose steps stretch nothing, and half of it for random sizes."""

    def scaled(scale: float) -> LastIterateDpEvent:
        rate = mapped(lambda rate: float(f"{rate * scale:.3g}"), event.learning_rate)
        return attrs.evolve(event, learning_rate=rate)

    def process(run: LastIterateDpEvent) -> NoisyProcess | None:
        return process_of(run.one_step_if_constant(), relation)

    now = process(event)
    c = 0.0 if now is None else float(now.contraction.max())
    if not 1 < c < math.inf:
        return []
    scale = None
    for smaller in np.geomspace(1, _SMALLEST_SCALE, _SCALES).tolist():
        then = process(scaled(smaller))
        if then is not None and (then.contraction <= 1).all():
            scale = scale or smaller
            if (then.contraction <= then.drift_contraction * _ROUNDED).all():
                scale = smaller  # a hardly smaller rate lets the whole decay contract
                break
    if scale is None:  # the clip stretches: a clip norm that never acts is another change
        return []
    parts, found = {"any batch": scale}, []
    if event.batch_order in OF_RANDOM_SIZE:
        parts = {"a batch of mean size": scale, "a batch of up to twice the mean size": scale / 2}
    for of, part in parts.items():
        run = scaled(part)
        is_schedule = isinstance(run.learning_rate, Schedule)
        text = f"rates times {part:.3g}" if is_schedule else f"rate {run.learning_rate:g}"
        description = f"learning {text}: no step on {of} then stretches distances, which now is "
        found.append((f"{description}up to c = {c:.4g}", run, True))
    return found


def _changes(event: LastIterateDpEvent) -> Iterator[Change]:
    """All other changes; what has no bound is left out later."""
    change, order = functools.partial(attrs.evolve, event), event.batch_order
    any_sizes = {"sampling_rate": None, "max_batch_size": None}
    if event.release_steps:
        count = len(event.release_steps)
        alone = change(release_steps=())
        yield f"release the last iterate only, not {count} more", alone, False
    if order not in (BatchOrder.SHUFFLED_ONCE, BatchOrder.FULL) and event.loss is not None:
        secret = change(batch_order=BatchOrder.SHUFFLED_ONCE, **any_sizes)
        yield "shuffled once, by a uniform order that is kept secret", secret, False
    if order not in (BatchOrder.POISSON, BatchOrder.FULL):
        yield "Poisson batches", change(batch_order=BatchOrder.POISSON, **any_sizes), False
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
    if loss is not None and loss.kind not in (LossKind.LINEAR, LossKind.HOELDER):
        # Twice the decay; a quarter of the smoothness, enough to contract, if that is more.
        largest = float(np.max(event.per_step("weight_decay")))
        limit = 0.5 / (float(np.max(event.per_step("learning_rate"))) or math.inf)
        decay = max(largest, min(max(2 * largest, loss.smoothness / 4), limit))
        text = f"weight decay {decay:g} instead of {_text(event.weight_decay)}"
        yield text, change(weight_decay=decay), True


def _text(value: float | Schedule | None) -> str:
    return "the schedule" if isinstance(value, Schedule) else f"{value:g}"


def _length_that_is_clipped(event: LastIterateDpEvent) -> float | None:
    """The length that no gradient exceeds, where some step clips to less."""
    longest = None if event.loss is None else event.loss.lipschitz
    if longest is None or event.clip_norm is None:
        return None
    return longest if float(np.min(event.per_step("clip_norm"))) < longest else None


def why_nothing_contracts(event: LastIterateDpEvent, relation: NeighboringRelation) -> str:
    """The reason why the steps of a run shrink no distance; empty if they do."""
    process = process_of(event, relation)
    if process is None:
        return _NO_LOSS if event.loss is None else ""
    c = float(process.contraction.max())
    if c < 1:
        return ""
    return _NO_SHRINKING if c == 1 else f"a step stretches distances by up to c = {c:.6g}"


def no_contraction_line(event: LastIterateDpEvent, relation: NeighboringRelation) -> str:
    """One line on a run whose update does not contract; empty if it does or is projected.

    Args:
        event: One step of the run. Ten epochs of such steps are looked at, or 50,000 steps.
        relation: The neighbouring relation.
    """
    reason = why_nothing_contracts(event, relation)
    if event.loss is None:
        return f"{_EQUALS_COMPOSITION}; {reason}"
    if not reason or event.domain_diameter < math.inf:
        return ""
    if event.batch_order not in (BatchOrder.CYCLIC, BatchOrder.FULL):
        return (
            f"no contraction: {reason}; what the secret order gains is in get_epsilon (assuming "
            "the first step's hyper-parameters)"
        )
    epochs = min(10, _STEPS_AHEAD // event.batches_per_epoch)
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
