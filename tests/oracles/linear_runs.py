"""Runs of linear losses that an oracle has the law of in closed form."""

from __future__ import annotations

from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.events.loss_geometry import LossKind
from hidden_state_accountants.process.conditions import UnmetCondition


def constant_linear_conditions(
    event: LastIterateDpEvent, most_steps: int
) -> tuple[UnmetCondition, ...]:
    """What keeps a run from being one of linear losses with constant parameters and no decay."""
    strongly_convex = event.loss is not None and event.loss.kind is LossKind.STRONGLY_CONVEX
    return tuple(
        UnmetCondition(condition, required, actual)
        for holds, condition, required, actual in (
            (not event.has_schedules, "constant parameters", "no schedules", "a schedule"),
            (event.weight_decay == 0, "weight decay", "0", str(event.weight_decay)),
            (
                event.prox_strong_convexity == 0,
                "proximal map",
                "prox_strong_convexity = 0",
                f"{event.prox_strong_convexity:g}",
            ),
            (not strongly_convex, "losses", "a class with linear losses", "strongly convex"),
            (
                event.noise_multiplier != 0 and event.learning_rate != 0,
                "noise",
                "noise_multiplier > 0 and learning_rate > 0",
                "0",
            ),
            (
                event.num_steps <= most_steps,
                "num_steps",
                f"at most {most_steps}",
                str(event.num_steps),
            ),
        )
        if not holds
    )
