"""The largest number of epochs that meets a target."""

from __future__ import annotations

import math
from typing import Any

import attrs
import dp_accounting
from dp_accounting import NeighboringRelation

from hidden_state_accountants import validate
from hidden_state_accountants.calibration.target import (
    MakeAccountant,
    MakeEvent,
    Target,
    beyond_the_crossing,
    make_target,
)
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.figures import text_up

_MOST_GUESSES = 20  # then only halving


def calibrate_epochs(
    target_epsilon: float,
    delta: float,
    make_event: MakeEvent | dp_accounting.DpEvent,
    *,
    neighboring_relation: NeighboringRelation | str = NeighboringRelation.REPLACE_SPECIAL,
    make_accountant: MakeAccountant | None = None,
    group_size: int = 1,
    for_one_position: bool = False,
    max_epochs: int = 10_000,
) -> int:
    """The largest number of epochs, up to `max_epochs`, that meets (target_epsilon, delta).

    Epsilon grows with the epochs of a run with constant parameters: a longer run ends like the
    shorter one, from a state that already depends on the data. A bound that levels off below the
    target gives `max_epochs`: no number is too many for it. A schedule that belongs to one length
    may break this; the figures that the search meets are checked.

    Formal guarantees: those of `calibrate_noise`.

    Args:
        target_epsilon: >= 0, finite.
        delta: In (0, 1).
        make_event: Maps a number of epochs to a run; or a run without schedules and releases.
        neighboring_relation: Of the default accountant.
        make_accountant: Makes a fresh accountant; `LastIterateAccountant` by default.
        group_size: Of the default accountant: how many records one person has at most.
        for_one_position: Whether runs with a `record_position` are meant: the target is then met
            for the records of one batch only.
        max_epochs: >= 1.

    Raises:
        UnsupportedRunError: The accountant does not cover the run.
        ValueError: One epoch is too many, or epsilon falls with the number of epochs.
    """
    make = _epoch_maker(make_event)
    relation = validate.neighboring_relation(neighboring_relation)
    target = make_target(
        "epochs",
        target_epsilon,
        delta,
        make,
        make_accountant,
        relation,
        group_size,
        for_one_position,
    )
    most = validate.integer("max_epochs", max_epochs, minimum=1)
    if not target.meets(1):
        least = text_up(target.epsilon_of(1), 6)
        raise ValueError(
            f"Expected target_epsilon >= {least}, what one epoch costs at delta "
            f"{target.delta:g}, got {target.epsilon:g}. Add noise."
        )
    meets, misses = 1, most + 1
    while misses - meets > 1:
        if misses > most:
            middle = _more(target, meets, most)
        else:
            middle = (meets + misses) // 2
            guess = beyond_the_crossing(target, meets, misses, 0.5 / misses)
            if len(target.seen) < _MOST_GUESSES and meets < guess < misses:
                middle = min(max(round(guess), meets + 1), misses - 1)
        if target.meets(middle):
            meets = middle
        else:
            misses = middle
    target.check_monotone(increasing=True)
    return meets


def _more(target: Target, meets: int, most: int) -> int:
    """Where the target is met exactly if mu keeps growing as a power of the epochs."""
    before = max((n for n in target.seen if n < meets), default=None)
    power = 0.5  # of composition
    if before is not None:
        power = (target.log_mu(meets) - target.log_mu(before)) / math.log(meets / before)
    growth = math.log(16.0)
    if power > 0:
        growth = min(growth, -target.log_mu(meets) / power)
    return min(max(int(meets * math.exp(growth)), meets + 1), most)


def _epoch_maker(make_event: Any) -> MakeEvent:
    if hasattr(make_event, "num_epochs"):
        return lambda epochs: attrs.evolve(make_event, num_epochs=epochs)
    if isinstance(make_event, LastIterateDpEvent):
        if make_event.has_schedules or make_event.release_steps:
            raise ValueError(
                "Expected a run without schedules and release_steps, which belong to one length, "
                "got one with them. Pass a function of the number of epochs."
            )
    if hasattr(make_event, "num_steps"):
        per_epoch = make_event.batches_per_epoch
        return lambda epochs: attrs.evolve(make_event, num_steps=epochs * per_epoch)
    if not callable(make_event):
        raise TypeError(f"Expected make_event to be a function or a run, got {make_event!r}.")
    return make_event
