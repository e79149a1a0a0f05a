"""The smallest noise multiplier that meets a target."""

from __future__ import annotations

import math
from typing import Any

import attrs
import dp_accounting
from dp_accounting import NeighboringRelation

from hidden_state_accountants import validate
from hidden_state_accountants.bounds.dice_sgd.curves import largest_mu
from hidden_state_accountants.calibration.target import (
    MakeAccountant,
    MakeEvent,
    Target,
    check_tolerance,
    close_in,
    event_maker,
    gaussian_log_mu,
    log_crossing,
    make_target,
    unreachable,
)
from hidden_state_accountants.errors import UnsupportedRunError
from hidden_state_accountants.events.dice_sgd import DiceSgdDpEvent

_NOISE_FIELDS = ("noise_multiplier", "noise_std", "noise_variance")
_SO_MUCH_NOISE = 1e9  # times what composition needs: more would not help either
_MUCH_NOISE = 4.0
_SO_LITTLE_NOISE = 1e-12
_BELOW = 0.01  # how far below the noise that seems to meet it a target is likely to be missed


def calibrate_noise(
    target_epsilon: float,
    delta: float,
    make_event: MakeEvent | dp_accounting.DpEvent,
    *,
    neighboring_relation: NeighboringRelation | str = NeighboringRelation.REPLACE_SPECIAL,
    make_accountant: MakeAccountant | None = None,
    group_size: int = 1,
    for_one_position: bool = False,
    tolerance: float = 1e-6,
) -> float:
    """The smallest noise multiplier that meets (target_epsilon, delta).

    The bracket starts at the noise that plain Gaussian composition needs, which the default
    accountant never exceeds, and shrinks by steps along the Gaussian curve of the last figure: a
    few evaluations where the guarantee is Gaussian.

    Formal guarantees: the accountant was asked for the run with the returned noise and its epsilon
    is at most `target_epsilon`. If epsilon falls with the noise, as it does for every accountant
    of this package, no noise multiplier below ``(1 - tolerance)`` times the result meets it.

    Args:
        target_epsilon: >= 0, finite.
        delta: In (0, 1).
        make_event: Maps a noise multiplier to a run; or a run whose own is replaced (noise_std of a
            DiceSgdDpEvent, noise_variance of a BlockCoordinateDpEvent).
        neighboring_relation: Of the default accountant.
        make_accountant: Makes a fresh accountant; `LastIterateAccountant` by default.
        group_size: Of the default accountant: how many records one person has at most.
        for_one_position: Whether runs with a `record_position` are meant: the target is then met
            for the records of one batch only.
        tolerance: Relative, in [1e-12, 0.5].

    Returns:
        0 if the run needs no noise.

    Raises:
        UnsupportedRunError: The accountant does not cover the run.
        ValueError: No noise meets the target; the text says why.
    """
    field = next((name for name in _NOISE_FIELDS if hasattr(make_event, name)), _NOISE_FIELDS[0])
    make = event_maker(make_event, field)
    relation = validate.neighboring_relation(neighboring_relation)
    target = make_target(
        field, target_epsilon, delta, make, make_accountant, relation, group_size, for_one_position
    )
    tolerance = check_tolerance(tolerance)
    start = group_size * _composition_noise(make, target, relation)
    if not target.meets(start):
        more = start * min(math.exp(target.log_mu(start)) * 1.05, 16.0)
        if not target.meets(more) and not target.meets(start * _SO_MUCH_NOISE):
            raise ValueError(unreachable(target, start * _SO_MUCH_NOISE))
    meets = min(z for z in target.seen if target.meets(z))
    misses = max((z for z in target.seen if not target.meets(z)), default=0.0)
    while misses == 0.0:  # downwards, with care: a little noise can cost gigabytes
        lower = meets * math.exp(target.log_mu(meets)) * (1 - tolerance / 3)
        if not target.is_gaussian:
            lower = max(lower, meets / 8 if meets > 4 else meets / 2)
            below = math.exp(log_crossing(target, sorted(target.seen)[:2])) * (1 - _BELOW)
            lower = below if lower < below < meets else lower
        if target.epsilon_of(meets) == 0:  # says nothing about how far away the target is
            lower = meets / 8
        if lower < start * _SO_LITTLE_NOISE:
            return 0.0 if target.meets(0.0) else meets
        meets, misses = (lower, 0.0) if target.meets(lower) else (meets, lower)
    result = close_in(target, meets, misses, tolerance)
    target.check_monotone(increasing=False)
    return result


def _composition_noise(make: MakeEvent, target: Target, relation: NeighboringRelation) -> float:
    """The noise multiplier with which plain Gaussian composition meets the target; a start.

    Of DiceSGD: with which a record that takes part in every step does.
    """
    mu = 0.0
    try:
        event: Any = make(1.0)
        if isinstance(event, DiceSgdDpEvent):
            mu = largest_mu(event, relation)
        event = _as_composition(event, relation)
        mu = mu or gaussian_mu(event)
    except (UnsupportedRunError, TypeError):
        pass
    log_mu = gaussian_log_mu(target.epsilon, target.delta)
    if not 0 < mu < math.inf or not math.isfinite(log_mu):
        return 1.0
    noise = min(max(mu / math.exp(log_mu) * (1 + 1e-12), 1e-60), 1e60)
    # Where there is much noise a sampled record counts about as its share.
    return min(noise, max(_MUCH_NOISE, 2 * _sampling_rate(event) * noise))


def _as_composition(event: Any, relation: NeighboringRelation) -> dp_accounting.DpEvent:
    """The event with its runs as standard events."""
    if isinstance(event, dp_accounting.ComposedDpEvent):
        return dp_accounting.ComposedDpEvent([_as_composition(e, relation) for e in event.events])
    if hasattr(event, "as_composition"):
        event = attrs.evolve(event, max_batch_size=None)
        return event.as_composition(relation, for_one_position=True)
    return event


def _sampling_rate(event: dp_accounting.DpEvent) -> float:
    """The probability with which a record takes part in sampled steps; 1 if any is not sampled."""
    if isinstance(event, dp_accounting.ComposedDpEvent):
        return max(map(_sampling_rate, event.events))
    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        return _sampling_rate(event.event)
    if isinstance(event, dp_accounting.PoissonSampledDpEvent):
        return float(event.sampling_probability)
    if isinstance(event, dp_accounting.SampledWithoutReplacementDpEvent):
        return float(event.sample_size / event.source_dataset_size)
    return 1.0


def gaussian_mu(event: dp_accounting.DpEvent) -> float:
    """The mu of composed Gaussian events, whose sampling is ignored; 0 if there is none."""
    if isinstance(event, dp_accounting.GaussianDpEvent):
        return 1 / event.noise_multiplier if event.noise_multiplier > 0 else math.inf
    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        return math.sqrt(event.count) * gaussian_mu(event.event)
    if isinstance(event, dp_accounting.ComposedDpEvent):
        return math.hypot(*map(gaussian_mu, event.events))
    inner = getattr(event, "event", None)
    return gaussian_mu(inner) if isinstance(inner, dp_accounting.DpEvent) else 0.0
