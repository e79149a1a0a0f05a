"""Learning rates and the number of steps, said before training and compared with what happens."""

from __future__ import annotations

import hashlib
import math
import numbers
from collections.abc import Iterable
from typing import Any

import attrs
import numpy as np
from torch.optim import Optimizer

from hidden_state_accountants import Assumption, Schedule, UnsupportedRunError, validate
from hidden_state_accountants.guarantee import Topic, replace_assumptions
from hidden_state_accountants.runs.run import Run
from hidden_state_adapters.fixed_in_advance import fixed_in_advance, steps_in_advance

_ROUNDING = 1e-6  # schedulers multiply step by step, some in float32


@attrs.frozen(eq=False)
class DeclaredSchedule:
    """Learning rates and number of steps that `make_private` was told.

    The theorems are about such that do not depend on the records. What is declared before the first
    step and then compared at every step needs no trust.

    Attributes:
        num_steps: Number of steps N, or None if it was not declared.
        learning_rates: Rates of the optimizer, shape (N,); shape (1,) for one constant; None if
            they were not declared.
        target_rate: Learning rate that the noise was found for, where none were declared; or None.
    """

    num_steps: int | None = None
    learning_rates: np.ndarray | None = None
    target_rate: float | None = None

    @classmethod
    def of(cls, schedule: Any, num_steps: int | None) -> DeclaredSchedule:
        """Reads the arguments of `make_private`.

        Raises:
            TypeError, ValueError: They have an impossible value, or differ in length.
        """
        if num_steps is not None:
            num_steps = validate.integer("num_steps", num_steps, minimum=1)
        if schedule is None:
            return cls(num_steps)
        if isinstance(schedule, numbers.Real):
            one = Schedule.from_sequence([float(schedule)], "schedule")
            return cls(num_steps, one.to_array())
        if not isinstance(schedule, Schedule | Iterable):
            raise TypeError(
                "Expected schedule to be a number, one number per step or a "
                f"hidden_state_accountants.Schedule, got {type(schedule).__name__}. Of a function "
                "f pass [f(k) for k in range(num_steps)]."
            )
        if not isinstance(schedule, Schedule):
            schedule = Schedule.from_sequence(schedule, "schedule")
        length, rates = schedule.num_steps, schedule.to_array()
        if num_steps not in (None, length):
            raise ValueError(
                f"Expected a schedule of num_steps = {num_steps} steps, got {length}. Give one "
                "learning rate per logical step (not per epoch)."
            )
        return cls(length, rates[:1] if len(schedule.values) == 1 else rates)

    def learning_rate(self, num_steps: int, scale: float) -> float | Schedule | None:
        """Returns the rates of the first `num_steps` steps, times `scale`; None if undeclared."""
        rates = self.learning_rates
        if rates is None:
            return None
        if len(rates) == 1:
            return float(rates[0]) * scale
        return Schedule.from_sequence(rates[:num_steps] * scale, "learning_rate")

    def at_rate_of(self, optimizer: Optimizer) -> DeclaredSchedule:
        """Returns the schedule for which noise is found: without declared rates that of the moment.

        Raises:
            UnsupportedRunError: A scheduler of torch's is on the optimizer, and no learning rates
                were declared.
        """
        if self.learning_rates is not None:
            return self
        first = optimizer.param_groups[0]
        if "initial_lr" in first:
            raise UnsupportedRunError(
                "Expected schedule=, got an optimizer with a scheduler: its learning rate is "
                f"{float(first['lr']):g} at this moment (started from {first['initial_lr']:g}), "
                "and noise found for it would miss the target. Pass one rate for every logical "
                "step."
            )
        return attrs.evolve(self, target_rate=float(first["lr"]))

    def admit(self, step: int) -> None:
        """Raises UnsupportedRunError if all declared steps were taken; the model stays covered."""
        total = self.num_steps
        if total is not None and step > total:
            raise UnsupportedRunError(
                f"Expected num_steps = {total} steps, as declared to make_private, got step "
                f"{step}: the model of step {total} stays accounted. For more steps call "
                "make_private again (the runs compose)."
            )

    def check_rate(self, step: int, optimizer: Optimizer) -> None:
        """Raises UnsupportedRunError if a step uses another rate than the declared one."""
        rates, expected = self.learning_rates, self.target_rate
        if rates is not None:
            expected = float(rates[0 if len(rates) == 1 else step - 1])
        rate = float(optimizer.param_groups[0]["lr"])
        if expected is not None and not math.isclose(rate, expected, rel_tol=_ROUNDING):
            raise UnsupportedRunError(
                f"step {step} uses learning rate {rate:.8g}, expected {expected:.8g}, as declared "
                "by schedule= (or as make_private_with_epsilon found the noise for). Pass "
                "schedule=, one rate for every logical step."
            )

    def assumptions(self, run: Run, proven: Iterable[Assumption]) -> tuple[Assumption, ...]:
        """Returns the assumptions of a bound on a run, with what was compared marked as checked."""
        proven, is_known = tuple(proven), self.learning_rates is not None
        is_declared = is_known or self.num_steps is not None
        if not is_declared or all(a.topic is not Topic.FIXED_IN_ADVANCE for a in proven):
            return proven
        rates = "learning rate of every step as declared in advance" if is_known else ""
        steps = steps_in_advance(run.num_steps, self.num_steps)
        return replace_assumptions(proven, *fixed_in_advance(run, steps, rates))

    def fields(self) -> dict[str, Any]:
        """Returns plain types that are equal for equal declarations, and short."""
        rates, found = self.learning_rates, None
        if rates is not None:
            found = (
                f"{len(rates)} rates, {hashlib.sha256(rates.astype('<f8').tobytes()).hexdigest()}"
            )
        return {"schedule": found, "num_steps": self.num_steps}
