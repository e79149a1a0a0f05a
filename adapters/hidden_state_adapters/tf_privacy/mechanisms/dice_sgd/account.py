"""What is said of a run of DiceSGD, whoever makes its steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hidden_state_accountants import Assumption
from hidden_state_accountants.guarantee import Topic
from hidden_state_accountants.runs.statement import Statement
from hidden_state_adapters.tf_privacy.continuation import RunState
from hidden_state_adapters.tf_privacy.declared import EVERY_FEATURE, Declared
from hidden_state_adapters.tf_privacy.mechanism import Mechanism
from hidden_state_adapters.tf_privacy.mechanisms.dice_sgd.error import HiddenError
from hidden_state_adapters.tf_privacy.units import Units

CHECKED = (
    "constant noise, clip norms and divisor; both clips exactly min(1, C/|v|) v or normalised; "
    "finite gradients, one row each, in float32 or float64; the same variables, changed by this "
    "optimizer only; every noisy update applied once; a noise generator that was left alone"
)


class DiceAccount(Mechanism):
    """A base beside what makes the steps, whose error is kept in `_error`."""

    hidden_state = "the error of DiceSGD, which is data of the examples without noise"
    _declarable = "gradient_bound"
    _error: HiddenError

    def checked(self, units: Units) -> list[str]:
        """What every step checks."""
        return [CHECKED, "the error of the feedback is in no file that was not asked to hold it"]

    def private_state(self) -> dict[str, Any]:
        """The error, beside what else the steps keep."""
        return {**super().private_state(), **self._error.private_state()}

    def resume(self, state: RunState, variables: Sequence[Any]) -> None:
        """As every mechanism's, with the error of the private state."""
        self._error.resume(
            variables,
            state.private or {"error": []},
            steps=state.num_batches,
            rows=state.units.batch_size,
            first_iteration=state.iterations - state.num_batches,
            largest_norm=state.declared.longest_gradient,  # each was compared with it
        )
        super().resume(state, variables)

    def derived(self, declared: Declared) -> list[Assumption]:
        """Of the loss only the bound on its gradients counts."""
        bound = declared.longest_gradient
        if not declared.source or math.isinf(bound):
            return []
        text = f"per-example gradient norms at most {bound:g}: {declared.source}"
        return [Assumption.checked(text, Topic.GRADIENT_NORM), EVERY_FEATURE]

    def told(self, statement: Statement) -> str:
        """The lines to paste, with what the paper would have claimed."""
        before = self._error.read_run().first_iteration
        if not before or len(statement.events) > 1:
            return statement.lines()
        return (
            f"{statement.lines()}\nNOT in these figures: {before} steps before this optimizer was "
            "loaded. They are another run; compose both events in one accountant."
        )
