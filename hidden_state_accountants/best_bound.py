"""The smallest guarantee that is proved of one run, and what would lower it.

Of the single changes of a run those come first that cost no accuracy: a secret order, Poisson
batches, a constant rate, a clip norm that does not act. Any other is named beside the noise that
gives the same epsilon without it: on many data sets that is the better model.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping

import attrs
import dp_accounting
import numpy as np
from dp_accounting import NeighboringRelation

from hidden_state_accountants.bounds import BOUNDS, Bound
from hidden_state_accountants.curves.base import BestOfCurves, best_curve, delta_to_compare
from hidden_state_accountants.errors import UnsupportedRunError
from hidden_state_accountants.events.batch_order import BatchOrder
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.events.loss_geometry import LossKind
from hidden_state_accountants.events.schedule import Schedule
from hidden_state_accountants.guarantee import Guarantee, Topic
from hidden_state_accountants.process.conditions import UnmetCondition

RUN_EVENTS = tuple({bound.event_type: None for bound in BOUNDS})
"""The kinds of runs that some bound is about."""
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


@functools.lru_cache(maxsize=64)  # compose() asks twice: once to check, once to compose
def bound_guarantee(
    bound: Bound, event: dp_accounting.DpEvent, relation: NeighboringRelation
) -> Guarantee:
    """What one bound says about one run, with the changes that would help."""
    guarantee = bound.guarantee(event, relation)
    if not isinstance(event, LastIterateDpEvent):
        return guarantee
    return attrs.evolve(guarantee, changes=functools.partial(_changes_of, event, relation))


def _changes_of(
    event: LastIterateDpEvent, relation: NeighboringRelation, delta: float
) -> tuple[tuple[str, float], ...]:
    return single_changes(event, lambda e: best_guarantee(e, relation).epsilon(delta))


def best_guarantee(event: dp_accounting.DpEvent, relation: NeighboringRelation) -> Guarantee:
    """The smallest guarantee of the sound bounds in `BOUNDS` that apply to one run.

    Raises:
        UnsupportedRunError: None applies; see `why_none_applies`.
    """
    found: list[tuple[Bound, Guarantee]] = []
    others: list[tuple[str, str]] = []
    unmet_of: dict[str, tuple[UnmetCondition, ...]] = {}
    for bound in BOUNDS:
        if not bound.sound or not isinstance(event, bound.event_type):
            continue
        unmet = tuple(bound.at_a_glance(event))
        better = [other.name for other, _ in found if other.name in bound.dominated_by]
        if better and not unmet:
            others.append((bound.name, f"never smaller than {better[0]}"))
            continue
        unmet = unmet or bound.check(event, relation)
        if unmet:
            unmet_of[bound.name] = unmet
            others.append((bound.name, "; ".join(map(str, unmet))))
            continue
        found.append((bound, bound_guarantee(bound, event, relation)))
    if not found:
        raise UnsupportedRunError(why_none_applies(event, unmet_of))
    best = found[0]
    for candidate in found[1:]:
        if _is_smaller(candidate[1], best[1]):
            best = candidate
    others += [
        (bound.name, "not smaller for this run") for bound, _ in found if bound is not best[0]
    ]
    known = [guarantee for _, guarantee in found]
    surely = _without_what_may_fail(event)
    if surely is not None:
        known.append(best_guarantee(surely, relation))
    curves = [g.curve for g in known if g is best[1] or _may_be_joined(g, best[1])]
    best_of_all = attrs.evolve(best[1], curve=best_curve(curves), alternatives=tuple(others))
    if not best_of_all.only_for:
        return best_of_all
    everywhere = attrs.evolve(event, record_position=None)
    of_all_records = functools.partial(best_guarantee, everywhere, relation)
    return attrs.evolve(best_of_all, of_all_records=of_all_records)


def _without_what_may_fail(event: dp_accounting.DpEvent) -> LastIterateDpEvent | None:
    """The run without a released curvature, which says nothing at deltas below its failure."""
    if not isinstance(event, LastIterateDpEvent) or event.loss is None:
        return None
    if event.loss.curvature_failure is None:
        return None
    loss = attrs.evolve(event.loss, curvature=None, curvature_failure=None)
    return attrs.evolve(event, loss=loss)


def _may_be_joined(guarantee: Guarantee, best: Guarantee) -> bool:
    """Whether another curve may be smaller at some delta without assuming more than the best.

    Of two Gaussian curves one is smaller everywhere. What holds for all iterates says so, and may
    therefore not rest on hidden ones anywhere.
    """
    if guarantee.mu is not None and best.mu is not None:
        return False
    return _needs_hidden_iterates(best) or not _needs_hidden_iterates(guarantee)


def _needs_hidden_iterates(guarantee: Guarantee) -> bool:
    return any(assumption.topic is Topic.RELEASES for assumption in guarantee.assumptions)


def _is_smaller(candidate: Guarantee, best: Guarantee) -> bool:
    if candidate.mu is not None and best.mu is not None:
        # Theorem A without amplification IS composition; rounding must not decide the name.
        return candidate.mu < best.mu * (1 - 1e-12)
    delta = delta_to_compare(candidate.curve, best.curve)
    return BestOfCurves((best.curve, candidate.curve)).smallest(delta)[1] == 1


def why_none_applies(
    event: dp_accounting.DpEvent, unmet: Mapping[str, tuple[UnmetCondition, ...]]
) -> str:
    """What the bound that is nearest to covering a run would need, in words.

    Args:
        event: The run.
        unmet: The conditions that it does not meet, by the names of the bounds.
    """
    if not unmet:
        return f"No bound is about {type(event).__name__}."
    nearest = min(unmet, key=lambda name: len(unmet[name]))
    text = f"{nearest}: {'; '.join(map(str, unmet[nearest]))}"
    if len(unmet) > 1:
        text += (
            f" ({len(unmet) - 1} more bounds do not apply either: hidden_state_accountants.compare)"
        )
    return text


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
