"""Learning rates and the number of steps, said before training and compared with what happens."""

from __future__ import annotations

import hashlib
import math
import numbers
from collections.abc import Iterable
from typing import Any

import attrs
import numpy as np

from hidden_state_accountants import Assumption, RunRecorder, Schedule, UnsupportedRunError

# Schedulers multiply step by step, some in float32.
_ROUNDING = 1e-6
_FIXED_IN_ADVANCE = (
    "number of steps, schedules and released steps fixed in advance",
    "number of steps and schedules fixed in advance",
)
_OTHERS = {"noise_multiplier": "noise", "clip_norm": "clip norm", "weight_decay": "decay"}


def _read_only(values: np.ndarray) -> np.ndarray:
    values.flags.writeable = False
    return values


@attrs.frozen(eq=False)
class DeclaredSchedule:
    """What `make_private` was told about the learning rates and the number of steps.

    The theorems are about a number of steps and learning rates that do not depend on the records.
    What is declared before the first step and then compared at every step needs no trust.

    Attributes:
        num_steps: N, or None if it was not declared.
        learning_rates: Of the optimizer, shape (N,); shape (1,) for one constant; None if they were
            not declared.
    """

    num_steps: int | None = None
    learning_rates: np.ndarray | None = None

    def learning_rate(self, num_steps: int, scale: float) -> float | Schedule | None:
        """The learning rates of the first `num_steps` steps, times `scale`; None if undeclared."""
        if self.learning_rates is None:
            return None
        if len(self.learning_rates) == 1:
            return float(self.learning_rates[0]) * scale
        return Schedule.from_sequence(self.learning_rates[:num_steps] * scale, "learning_rate")

    def check_more_steps(self, step: int) -> None:
        """Raises UnsupportedRunError if all declared steps were taken before `step`."""
        if self.num_steps is not None and step > self.num_steps:
            raise UnsupportedRunError(
                f"Expected num_steps = {self.num_steps} steps, as declared to make_private, got "
                f"step {step}. The model is that of step {self.num_steps}, which is accounted. "
                "Stop here; for more steps call make_private again (the runs compose)."
            )

    def check_rate(self, step: int, rate: float) -> None:
        """Raises UnsupportedRunError if `step` uses another learning rate than the declared one."""
        if self.learning_rates is None:
            return
        index = 0 if len(self.learning_rates) == 1 else step - 1
        declared = float(self.learning_rates[index])
        if not math.isclose(rate, declared, rel_tol=_ROUNDING):
            raise UnsupportedRunError(
                f"step {step} uses learning rate {rate:.8g}, expected {declared:.8g} as declared "
                "by learning_rate_schedule. The step was not taken. Give make_private the "
                "schedule that the loop follows; step the scheduler once per logical step."
            )

    def assumptions(
        self, recorder: RunRecorder, proven: Iterable[Assumption]
    ) -> tuple[Assumption, ...]:
        """The assumptions of a bound, with what was compared marked as checked.

        Args:
            recorder: Of the run.
            proven: What the bound assumes about the recorded event.
        """
        proven = tuple(proven)
        if self.num_steps is None and self.learning_rates is None:
            return proven
        kept = tuple(a for a in proven if a.text not in _FIXED_IN_ADVANCE)
        return kept if kept == proven else (*kept, *self._own_assumptions(recorder))

    def _own_assumptions(self, recorder: RunRecorder) -> list[Assumption]:
        event, lines = recorder.event(), []
        steps, total = event.num_steps, self.num_steps
        if total is None:
            lines.append(Assumption.declared("number of steps fixed in advance"))
        elif steps == total:
            lines.append(Assumption.checked(f"all of the {total} steps declared in advance"))
        else:
            lines.append(
                Assumption.declared(
                    f"training ends after step {steps} of the {total} that were declared, for a "
                    "reason that does not depend on the records"
                )
            )
        varying = [n for f, n in _OTHERS.items() if isinstance(getattr(event, f), Schedule)]
        constant = [n for n in _OTHERS.values() if n not in varying]
        if self.learning_rates is not None:
            lines.append(Assumption.checked("learning rate of every step as declared in advance"))
        elif isinstance(event.learning_rate, Schedule):
            varying.insert(0, "learning rate")
        else:
            constant.insert(0, "learning rate")
        if constant:
            lines.append(Assumption.checked(f"constant {', '.join(constant)}"))
        if varying:
            lines.append(Assumption.declared(f"schedule of {', '.join(varying)} fixed in advance"))
        if event.release_steps:
            lines.append(Assumption.declared("released steps fixed in advance"))
        return lines

    def fields(self) -> dict[str, Any]:
        """Plain types that are equal for equal declarations, and short."""
        rates = self.learning_rates
        if rates is None:
            return {"learning_rate_schedule": None, "num_steps": self.num_steps}
        return {
            "learning_rate_schedule": {
                "length": len(rates),
                "first": float(rates[0]),
                "last": float(rates[-1]),
                "sha256": hashlib.sha256(rates.astype("<f8").tobytes()).hexdigest(),
            },
            "num_steps": self.num_steps,
        }


def declared_schedule(learning_rate_schedule: Any, num_steps: int | None) -> DeclaredSchedule:
    """Checks the arguments of `make_private`; see there.

    Raises:
        TypeError, ValueError: They have an impossible value, or differ in length.
    """
    if num_steps is not None:
        if isinstance(num_steps, bool) or not isinstance(num_steps, numbers.Integral):
            raise TypeError(f"Expected num_steps to be an integer or None, got {num_steps!r}.")
        if num_steps < 1:
            raise ValueError(f"Expected num_steps >= 1, got {num_steps}.")
        num_steps = int(num_steps)
    if learning_rate_schedule is None:
        return DeclaredSchedule(num_steps)
    if isinstance(learning_rate_schedule, numbers.Real):
        one = Schedule.from_sequence([float(learning_rate_schedule)], "learning_rate_schedule")
        return DeclaredSchedule(num_steps, _read_only(one.to_array()))
    if callable(learning_rate_schedule) or not isinstance(learning_rate_schedule, Iterable):
        if not isinstance(learning_rate_schedule, Schedule):
            raise TypeError(
                "Expected learning_rate_schedule to be a number, one number per step or a "
                f"hidden_state_accountants.Schedule, got {type(learning_rate_schedule).__name__}. "
                "Of a function f pass [f(k) for k in range(num_steps)]."
            )
        schedule = learning_rate_schedule
    else:
        schedule = Schedule.from_sequence(learning_rate_schedule, "learning_rate_schedule")
    length = schedule.num_steps
    if num_steps is not None and num_steps != length:
        raise ValueError(
            f"Expected a learning_rate_schedule of num_steps = {num_steps} steps, got {length}. "
            "Give one learning rate per logical step (not per epoch), or leave num_steps out."
        )
    rates = schedule.to_array()
    # One constant is stored once; num_steps then says how long it holds.
    return DeclaredSchedule(length, _read_only(rates[:1] if len(schedule.values) == 1 else rates))
