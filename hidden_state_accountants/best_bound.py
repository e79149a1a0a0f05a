"""The smallest guarantee that is proved of one run."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import attrs
import dp_accounting
from dp_accounting import NeighboringRelation

from hidden_state_accountants.bounds import BOUNDS, Bound
from hidden_state_accountants.curves.base import best_curve, is_smaller
from hidden_state_accountants.errors import UnsupportedRunError
from hidden_state_accountants.guarantee import Guarantee, Topic
from hidden_state_accountants.process.conditions import UnmetCondition

RUN_EVENTS = tuple({bound.event_type: None for bound in BOUNDS})
"""The kinds of runs that some bound is about."""


@functools.lru_cache(maxsize=4)  # a comparison asks for the best of the bounds, and for each
def bound_guarantee(
    bound: Bound, event: dp_accounting.DpEvent, relation: NeighboringRelation
) -> Guarantee:
    """Guarantee of one bound for one run."""
    return bound.guarantee(event, relation)


def best_guarantee(event: dp_accounting.DpEvent, relation: NeighboringRelation) -> Guarantee:
    """The smallest guarantee of the sound bounds in `BOUNDS` that apply to one run.

    Raises:
        UnsupportedRunError: None applies; the text is about the one that is nearest.
    """
    found: dict[str, Guarantee] = {}
    reasons: list[tuple[str, str]] = []
    unmet_of: dict[str, tuple[UnmetCondition, ...]] = {}
    for bound in _about(event):
        unmet = tuple(bound.at_a_glance(event))
        better = [name for name in found if name in bound.dominated_by]
        if better and not unmet:
            reasons.append((bound.name, f"never smaller than {better[0]}"))
            continue
        unmet = unmet or bound.check(event, relation)
        if unmet:
            unmet_of[bound.name] = unmet
            reasons.append((bound.name, "; ".join(map(str, unmet))))
        else:
            found[bound.name] = bound_guarantee(bound, event, relation)
    if not found:
        raise UnsupportedRunError(_why_none_applies(event, unmet_of))
    (name, best), *others = found.items()
    for other, guarantee in others:
        if _is_smaller(guarantee, best):
            name, best = other, guarantee
    reasons += [(other, "not smaller for this run") for other in found if other != name]
    known = list(found.values())
    curves = [g.curve for g in known if g is best or _may_be_joined(g, best)]
    return attrs.evolve(best, curve=best_curve(curves), alternatives=tuple(reasons))


def _about(event: dp_accounting.DpEvent) -> list[Bound]:
    return [bound for bound in BOUNDS if bound.sound and isinstance(event, bound.event_type)]


def _may_be_joined(guarantee: Guarantee, best: Guarantee) -> bool:
    """Returns whether another curve may be smaller at some delta and assumes no more than the best.

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
    return is_smaller(candidate.curve, best.curve)


def check_covered(event: dp_accounting.DpEvent, relation: NeighboringRelation | str) -> None:
    """Raises UnsupportedRunError if no sound bound is about such a run under `relation`."""
    unmet: dict[str, tuple[UnmetCondition, ...]] = {}
    for bound in _about(event):
        unmet[bound.name] = bound.check(event, relation)
        if not unmet[bound.name]:
            return
    raise UnsupportedRunError(f"No theorem here covers the run. {_why_none_applies(event, unmet)}")


def _why_none_applies(
    event: dp_accounting.DpEvent, unmet: Mapping[str, tuple[UnmetCondition, ...]]
) -> str:
    """Says what the bound that is nearest to covering a run would need, in words."""
    if not unmet:
        return f"No bound is about {type(event).__name__}."
    nearest = min(unmet, key=lambda name: len(unmet[name]))
    text = f"{nearest}: {'; '.join(map(str, unmet[nearest]))}"
    if len(unmet) > 1:
        text += (
            f" ({len(unmet) - 1} more bounds do not apply either: hidden_state_accountants.compare)"
        )
    return text
