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
from hidden_state_accountants.errors import UnsupportedRunError
from hidden_state_accountants.events.batch_order import OF_RANDOM_SIZE, BatchOrder
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.events.loss_geometry import LossKind
from hidden_state_accountants.events.schedule import Schedule, mapped
from hidden_state_accountants.guarantee import change_lines
from hidden_state_accountants.process.noisy_process import process_of

_LEAST = 0.01  # share of epsilon; a change that lowers it by less is not worth a line
# Learning rates that are tried, in those of the run; one that is lower still trains another model.
_SCALES = np.geomspace(1, 1e-3, 1000).tolist()
_ROUNDED = 1 + 1e-12  # relative error of moduli
_NO_LOSS = (
    "no loss is declared: a linear or softmax head on fixed features has a known one "
    "(docs/losses.md), a network with hidden layers has none"
)

Change = tuple[str, LastIterateDpEvent, int]
"""A description, the changed run, and its rank: 0 where a step stretches, 2 may cost accuracy."""


def single_changes(
    event: LastIterateDpEvent, relation: NeighboringRelation, delta: float, now: float
) -> tuple[tuple[str, float], ...]:
    """(description, epsilon) of the run with one thing changed, each by `best_guarantee`.

    Named are those that lower the epsilon of now by a hundredth at least: a rate that stretches no
    distance, what costs no accuracy, the rest; of each kind the most helpful one first.
    """
    helpful = []
    for description, changed, rank in _changes(event, relation):
        try:
            value = best_guarantee(changed, relation).epsilon(delta)
        except UnsupportedRunError:
            continue
        if value < now * (1 - _LEAST):
            helpful.append((rank, value, description))
    return tuple((description, value) for _, value, description in sorted(helpful))


def report_lines(
    event: dp_accounting.DpEvent, relation: NeighboringRelation, delta: float
) -> list[str]:
    """The changes of `single_changes` of a run that happened, a line each, beside its epsilon."""
    if not isinstance(event, LastIterateDpEvent):
        return []
    now = best_guarantee(event, relation).epsilon(delta)
    return change_lines(now, single_changes(event, relation, delta, now))


def _changes(event: LastIterateDpEvent, relation: NeighboringRelation) -> Iterator[Change]:
    change, order, loss = functools.partial(attrs.evolve, event), event.batch_order, event.loss
    any_sizes = {"sampling_rate": None, "max_batch_size": None}
    yield from _shorter_steps(event, relation)
    if event.release_steps:
        count = len(event.release_steps)
        yield f"release the last iterate only, not {count} more", change(release_steps=()), 1
    if order not in (BatchOrder.SHUFFLED_ONCE, BatchOrder.FULL) and loss is not None:
        secret = change(batch_order=BatchOrder.SHUFFLED_ONCE, **any_sizes)
        yield "shuffled once, by a uniform order that is kept secret", secret, 1
    if order not in (BatchOrder.POISSON, BatchOrder.FULL):
        yield "Poisson batches", change(batch_order=BatchOrder.POISSON, **any_sizes), 1
    if isinstance(event.learning_rate, Schedule):
        rate = float(f"{np.mean(event.per_step('learning_rate')):.4g}")
        yield f"a constant rate, {rate:g}", change(learning_rate=rate), 1
    if loss is None:
        return
    if loss.lipschitz and event.clip_norm is not None:
        longer = change(clip_norm=loss.lipschitz)
        if float(np.min(event.per_step("clip_norm"))) < loss.lipschitz:
            text = f"clip norm {loss.lipschitz:g}, which never acts, instead of "
            text += _text(event.clip_norm)
            if not event.has_schedules:
                noise = float(event.noise_std_on_sum()[0]) / loss.lipschitz
                yield f"{text}, at the same noise", attrs.evolve(longer, noise_multiplier=noise), 1
            yield f"{text}, at the same noise multiplier", longer, 2
    if loss.kind not in (LossKind.LINEAR, LossKind.HOELDER):
        # Twice the decay; a quarter of the smoothness, enough to contract, if that is more.
        largest = float(np.max(event.per_step("weight_decay")))
        limit = 0.5 / (float(np.max(event.per_step("learning_rate"))) or math.inf)
        decay = max(largest, min(max(2 * largest, loss.smoothness / 4), limit))
        text = f"weight decay {decay:g} instead of {_text(event.weight_decay)}"
        yield text, change(weight_decay=decay), 2


def _shorter_steps(event: LastIterateDpEvent, relation: NeighboringRelation) -> Iterator[Change]:
    """The largest learning rate whose steps stretch nothing; half of it for random sizes."""
    one_step = event.one_step_if_constant()

    def scaled(run: LastIterateDpEvent, scale: float) -> LastIterateDpEvent:
        rate = mapped(lambda rate: float(f"{rate * scale:.3g}"), run.learning_rate)
        return attrs.evolve(run, learning_rate=rate)

    def contracts(scale: float, with_decay: bool) -> bool:
        then = process_of(scaled(one_step, scale), relation)
        if then is None:
            return False
        limit = then.drift_contraction * _ROUNDED if with_decay else 1.0
        return bool((then.contraction <= limit).all())

    now = process_of(one_step, relation)
    if now is None or not 1 < now.contraction.max() < math.inf:
        return
    largest = next((scale for scale in _SCALES if contracts(scale, False)), None)
    if largest is None:  # the clip stretches: a clip norm that never acts is another change
        return
    # A rate that is hardly smaller may let the whole decay contract.
    scale = next((scale for scale in _SCALES if contracts(scale, True)), largest)
    of = "any batch"
    if event.batch_order in OF_RANDOM_SIZE:
        of, scale = "a batch of up to twice the mean size", scale / 2
    run = scaled(event, scale)
    is_schedule = isinstance(run.learning_rate, Schedule)
    text = f"rates times {scale:.3g}" if is_schedule else f"rate {run.learning_rate:g}"
    text = f"learning {text}: no step on {of} then stretches distances, which now is up to c = "
    yield f"{text}{now.contraction.max():.4g}", run, 0


def _text(value: float | Schedule | None) -> str:
    return "the schedule" if isinstance(value, Schedule) else f"{value:g}"


def why_nothing_contracts(event: LastIterateDpEvent, relation: NeighboringRelation) -> str:
    """The reason why the steps of a run shrink no distance; empty if they do."""
    process = process_of(event, relation)
    if process is None:
        return _NO_LOSS if event.loss is None else ""
    c = float(process.contraction.max())
    if c < 1:
        return ""
    if c == 1:
        return "the update does not shrink distances (c = 1)"
    return f"a step stretches distances by up to c = {c:.6g}"


def no_contraction_line(event: LastIterateDpEvent, relation: NeighboringRelation) -> str:
    """One line on a run whose update does not contract; empty if it does or is projected."""
    reason = why_nothing_contracts(event, relation)
    if event.loss is None:
        return f"no contraction: epsilon equals composition (each epoch counts); {reason}"
    return f"no contraction: {reason}" if reason and event.domain_diameter == math.inf else ""
