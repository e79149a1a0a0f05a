"""The smallest weight decay that meets a target."""

from __future__ import annotations

import math

import attrs
import numpy as np
from dp_accounting import NeighboringRelation

from hidden_state_accountants import validate
from hidden_state_accountants.calibration.target import (
    MakeAccountant,
    check_tolerance,
    close_in,
    event_maker,
    make_target,
    unreachable,
)
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.events.loss_geometry import LossKind
from hidden_state_accountants.process.geometry import update_lipschitz

_GRID = 1000


def calibrate_weight_decay(
    target_epsilon: float,
    delta: float,
    event: LastIterateDpEvent,
    *,
    neighboring_relation: NeighboringRelation | str = NeighboringRelation.REPLACE_SPECIAL,
    make_accountant: MakeAccountant | None = None,
    group_size: int = 1,
    for_one_position: bool = False,
    tolerance: float = 1e-6,
) -> float:
    r"""The smallest constant weight decay that meets (target_epsilon, delta).

    More decay contracts more, and so lowers epsilon, only up to a point: beyond it the update
    overshoots. The search stays where the modulus :math:`c(\eta, w)` falls with w at every
    learning rate :math:`\eta` of the run. For losses of smoothness M that is (theory, moduli)

    .. math:: \eta w \le 1 - \tfrac{\eta M}{2}\ \text{(convex, not clipped)}, \qquad
              \eta w \le 1 - \tfrac{3 \eta M}{8}\ \text{(convex, clipped)}.

    Sensitivity and noise do not depend on w, so that there epsilon falls with w.

    Formal guarantees: those of `calibrate_noise`.

    Args:
        target_epsilon: >= 0, finite.
        delta: In (0, 1).
        event: The run; its own weight decay is replaced.
        neighboring_relation: Of the default accountant.
        make_accountant: Makes a fresh accountant; `LastIterateAccountant` by default.
        group_size: Of the default accountant: how many records one person has at most.
        for_one_position: Whether runs with a `record_position` are meant: the target is then met
            for the records of one batch only.
        tolerance: Relative, in [1e-12, 0.5].

    Returns:
        0 if the run needs no decay.

    Raises:
        UnsupportedRunError: The accountant does not cover the run.
        ValueError: No decay in that range meets the target; the text says why.
    """
    if not isinstance(event, LastIterateDpEvent):
        raise TypeError(f"Expected event to be a LastIterateDpEvent, got {event!r}.")
    relation = validate.neighboring_relation(neighboring_relation)
    make = event_maker(attrs.evolve(event, weight_decay=0.0), "weight_decay")
    target = make_target(
        "weight_decay",
        target_epsilon,
        delta,
        make,
        make_accountant,
        relation,
        group_size,
        for_one_position,
    )
    tolerance = check_tolerance(tolerance)
    if target.meets(0.0):
        return 0.0
    most = largest_useful_decay(event)
    if not target.meets(most):
        raise ValueError(unreachable(target, most))
    meets, misses = most, 0.0
    for _ in range(60):  # to a bracket whose ends can be compared on a logarithmic scale
        middle = meets / 16
        if not target.meets(middle):
            misses = middle
            break
        meets = middle
    result = close_in(target, meets, misses, tolerance)
    target.check_monotone(increasing=False)
    return result


def largest_useful_decay(event: LastIterateDpEvent) -> float:
    """The decay up to which every step's modulus falls with it, from a grid."""
    loss, rates = event.loss, event.per_step("learning_rate")
    if not rates.any() or loss is None or (loss.kind is LossKind.HOELDER and loss.exponent != 1):
        return 0.0
    clipped = np.zeros(event.num_steps, dtype=bool)
    if event.clip_norm is not None:
        limit = math.inf if loss.lipschitz is None else loss.lipschitz
        clipped = event.per_step("clip_norm") < limit
    decays = np.linspace(0.0, (1 - 1e-9) / float(rates.max()), _GRID + 1)
    falls = np.ones(_GRID, dtype=bool)
    kinds = np.unique(np.stack([rates, clipped]), axis=1).T
    for rate, flag in kinds[np.linspace(0, len(kinds) - 1, min(len(kinds), 50)).astype(int)]:
        flags = np.full(decays.shape, bool(flag))
        falls &= np.diff(update_lipschitz(loss, np.full(decays.shape, rate), decays, flags)) <= 0
    return float(decays[_GRID if falls.all() else np.argmin(falls)])
