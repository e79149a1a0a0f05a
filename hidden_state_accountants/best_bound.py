"""The smallest guarantee that is proved of one run."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import attrs
import dp_accounting
from dp_accounting import NeighboringRelation

from hidden_state_accountants.advice import single_changes
from hidden_state_accountants.bounds import BOUNDS, Bound
from hidden_state_accountants.curves.base import (
    best_curve,
    delta_to_compare,
    is_hopeless,
)
from hidden_state_accountants.errors import UnsupportedRunError
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.guarantee import Guarantee, Topic
from hidden_state_accountants.process.conditions import UnmetCondition

RUN_EVENTS = tuple({bound.event_type: None for bound in BOUNDS})
"""The kinds of runs that some bound is about."""


@functools.lru_cache(maxsize=64)  # compose() asks twice: once to check, once to compose
def bound_guarantee(
    bound: Bound, event: dp_accounting.DpEvent, relation: NeighboringRelation
) -> Guarantee:
    """What one bound says about one run, with the changes that would help."""
    guarantee = bound.guarantee(event, relation)
    if not isinstance(event, LastIterateDpEvent):
        return guarantee
    return attrs.evolve(guarantee, changes=functools.partial(_changes, event, relation))


def _changes(
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
    rough = candidate.curve.rough_epsilon(delta)
    if rough and is_hopeless(best.curve, delta, rough):
        return True
    epsilon = candidate.epsilon(delta)
    return is_hopeless(best.curve, delta, epsilon) or epsilon < best.epsilon(delta)


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
