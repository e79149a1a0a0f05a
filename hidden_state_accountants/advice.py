"""Which single change of a run would lower its epsilon most, and what it is worth in noise.

What costs no accuracy comes first: a secret order, Poisson batches, a constant rate, a clip norm
that does not act. Any other change is named beside the noise that gives the same epsilon without
it: on many data sets that is the better model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import attrs
import numpy as np

from hidden_state_accountants.errors import UnsupportedRunError
from hidden_state_accountants.events.batch_order import BatchOrder
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.events.loss_geometry import LossKind
from hidden_state_accountants.events.schedule import Schedule

_UNKNOWN_CURVATURE = (LossKind.LINEAR, LossKind.HOELDER)
_FIXED = (
    BatchOrder.CYCLIC,
    BatchOrder.SHUFFLED_ONCE,
    BatchOrder.RESHUFFLED,
    BatchOrder.WITHOUT_REPLACEMENT,
)
_LEAST = 0.01  # of epsilon; a change that lowers it by less is not worth a line
_CLOSE, _TRIES = 1.01, 4  # of epsilon, at equal noise

Epsilon = Callable[[LastIterateDpEvent], float]


def single_changes(event: LastIterateDpEvent, epsilon: Epsilon) -> tuple[tuple[str, float], ...]:
    """(description, epsilon) of the run with one thing changed: what costs no accuracy first.

    Args:
        event: The run.
        epsilon: Evaluates a run; may raise UnsupportedRunError.

    Returns:
        The changes that lower epsilon by a hundredth at least, the most helpful of a kind first.
    """
    now, free, other = epsilon(event), [], []
    for description, changed, costs in _changes(event):
        value = _evaluated(changed, epsilon)
        if not value < now * (1 - _LEAST):
            continue
        if not costs:
            free.append((description, value))
            continue
        noise = _equal_noise(event, now, value, epsilon)
        if noise is not None:
            description += f" (without that, noise multiplier {noise} gives the same epsilon)"
        other.append((description, value))
    return (
        *sorted(free, key=lambda change: change[1]),
        *sorted(other, key=lambda change: change[1]),
    )


def _evaluated(event: LastIterateDpEvent, epsilon: Epsilon) -> float:
    try:
        return epsilon(event)
    except UnsupportedRunError:
        return math.inf


def _equal_noise(
    event: LastIterateDpEvent, now: float, wanted: float, epsilon: Epsilon
) -> str | None:
    """The noise multiplier, upwards to three digits, with which the run has the epsilon wanted.

    Epsilon falls about like a power of the noise, whose exponent is that of the last two values.
    """
    if isinstance(event.noise_multiplier, Schedule) or not 0 < wanted < now < math.inf:
        return None
    noise, exponent = float(event.noise_multiplier), -1.0
    value = now
    for _ in range(_TRIES):
        following = noise * (wanted / value) ** (1 / exponent)
        found = _evaluated(attrs.evolve(event, noise_multiplier=following), epsilon)
        if not 0 < found < math.inf:
            return None
        if wanted / _CLOSE <= found <= wanted * _CLOSE:
            return f"{float(f'{following:.2e}'):g}"
        if found != value:
            exponent = min(math.log(found / value) / math.log(following / noise), -0.1)
        noise, value = following, found
    return None


def _changes(event: LastIterateDpEvent) -> Iterator[tuple[str, LastIterateDpEvent, bool]]:
    """Description, the changed run, and whether its steps are others."""
    if event.release_steps:
        count = len(event.release_steps)
        yield (
            f"release the last iterate only, not {count} more",
            attrs.evolve(event, release_steps=()),
            False,
        )
    if event.batch_order is BatchOrder.CYCLIC:
        secret = attrs.evolve(event, batch_order=BatchOrder.SHUFFLED_ONCE, record_position=None)
        yield "keep the order of the batches secret (shuffled once, uniformly)", secret, False
    if event.batch_order in _FIXED:
        poisson = attrs.evolve(event, batch_order=BatchOrder.POISSON, record_position=None)
        yield "Poisson batches", poisson, False
    if isinstance(event.learning_rate, Schedule):
        rate = float(f"{np.mean(event.per_step('learning_rate')):.4g}")
        yield (
            f"a constant rate, {rate:g}",
            attrs.evolve(event, learning_rate=rate),
            False,
        )
    loss = event.loss
    if loss is None:
        return
    if loss.lipschitz is not None and event.clip_norm is not None:
        clip_norm = event.per_step("clip_norm")
        if float(np.min(clip_norm)) < loss.lipschitz:
            yield from _longer_clips(event, loss.lipschitz)
    if loss.kind not in _UNKNOWN_CURVATURE:
        decay = _more_decay(event, loss.smoothness)
        yield (
            f"weight decay {decay:g} instead of {_text(event.weight_decay)}",
            attrs.evolve(event, weight_decay=decay),
            True,
        )


def _longer_clips(
    event: LastIterateDpEvent, longest: float
) -> Iterator[tuple[str, LastIterateDpEvent, bool]]:
    text = (
        f"clip norm {longest:g}, which never acts, instead of {_text(event.clip_norm)}, at the same"
    )
    longer = attrs.evolve(event, clip_norm=longest)
    if not event.has_schedules:
        multiplier = float(event.noise_std_on_sum()[0]) / longest
        yield f"{text} noise", attrs.evolve(longer, noise_multiplier=multiplier), False
    yield f"{text} noise multiplier", longer, True


def _more_decay(event: LastIterateDpEvent, smoothness: float) -> float:
    """Twice the decay; a quarter of the smoothness, enough to contract, if that is more."""
    largest = float(np.max(event.per_step("weight_decay")))
    limit = 0.5 / (float(np.max(event.per_step("learning_rate"))) or math.inf)
    return max(largest, min(max(2 * largest, smoothness / 4), limit))


def _text(value: float | Schedule | None) -> str:
    return "the schedule" if isinstance(value, Schedule) else f"{value:g}"
