"""What is said about a DiceSGD run, and how it goes on elsewhere."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dp_accounting import NeighboringRelation

from hidden_state_accountants import (
    BatchOrder,
    DiceSgdAccountant,
    DiceSgdDpEvent,
    UnsupportedRunError,
    validate,
)
from hidden_state_accountants.runs.dice_sgd import DiceSgdRun, text_report
from hidden_state_adapters.opacus.dice_mechanism import DiceMechanism

_SCHEMA = 1
CHECKED = (
    "constant noise, clip norms and divisor; both clips exactly min(1, C/|v|) v or normalised; "
    "finite gradients, one row each, in float32 or float64, in at most one backward pass per piece "
    "of a batch; the same parameters; noise that was not used before"
)


class DiceOptimizer(DiceMechanism):
    """Base of `DiceSGDOptimizer` and `DiceAdamOptimizer`; see the former."""

    def privacy_event(
        self,
        *,
        dataset_size: int,
        batch_order: BatchOrder | str,
        num_steps: int | None = None,
        gradient_bound: float = math.inf,
    ) -> DiceSgdDpEvent:
        """The run that really happened, for `hidden_state_accountants.DiceSgdAccountant`.

        Args:
            dataset_size: N.
            batch_order: How the records were dealt into the batches. The optimizer does not see the
                loader: it only checks the number of rows.
            num_steps: The number that was fixed in advance; None takes the number of steps taken.
            gradient_bound: G, a bound on the norm of every per-example gradient before clipping
                that holds for ALL records that could have been in the data. The gradients of this
                run are checked against it. inf if none is known.

        Raises:
            ValueError: No step was taken, or no run can have these values.
            UnsupportedRunError: The run was another one.
        """
        self.check_not_refused()
        if self._settings() != self._fixed:
            raise UnsupportedRunError(
                f"The optimizer has {self._settings()}, expected {self._fixed} as in its steps."
            )
        run = DiceSgdRun.of_totals(
            noise_multiplier=float(self.noise_multiplier),
            clip_norm=float(self.max_grad_norm),
            error_clip_norm=float(self.error_max_grad_norm),
            batch_size=int(self.expected_batch_size),  # type: ignore[arg-type]
            automatic=self.automatic,
            num_steps=self._num_steps,
            fewest_rows=int(self._hidden.fewest_rows) if self._num_steps else 0,
            most_rows=self._hidden.most_rows,
            largest_norm=self._hidden.largest_gradient_norm,
        )
        return run.event(
            dataset_size=dataset_size,
            batch_order=batch_order,
            num_steps=num_steps,
            gradient_bound=gradient_bound,
        )

    @property
    def was_refused(self) -> bool:
        """Whether a step was refused or interrupted."""
        return bool(self._failure)

    def check_not_refused(self) -> None:
        """Raises UnsupportedRunError if a step of this run was refused or interrupted."""
        if self._failure:
            raise UnsupportedRunError(
                "A step of this run was refused or interrupted. What ended the run may depend on "
                "the records, and the bound is about a number of steps that does not. Start again "
                f"with another optimizer. It was: {self._failure}"
            )

    def report(
        self,
        delta: float,
        *,
        dataset_size: int,
        batch_order: BatchOrder | str,
        num_steps: int | None = None,
        gradient_bound: float = math.inf,
        neighboring_relation: NeighboringRelation = NeighboringRelation.REPLACE_SPECIAL,
    ) -> str:
        """A few lines to paste: the proven epsilon, and what the paper would have claimed.

        Args:
            delta: In [0, 1].
            dataset_size: N; see `privacy_event` for this and the next three.
            batch_order: Of the records that the loader delivered.
            num_steps: T.
            gradient_bound: G.
            neighboring_relation: REPLACE_SPECIAL, REPLACE_ONE, or for full and Poisson batches
                ADD_OR_REMOVE_ONE.

        Raises:
            ValueError, UnsupportedRunError: As `privacy_event`, or no bound covers the run.
        """
        event = self.privacy_event(
            dataset_size=dataset_size,
            batch_order=batch_order,
            num_steps=num_steps,
            gradient_bound=gradient_bound,
        )
        return text_report(
            event,
            DiceSgdAccountant(neighboring_relation).compose(event).guarantee,
            delta,
            update_rule=type(self._base).__name__,
            checked=CHECKED,
        )

    # The error stays here.

    def run_state_dict(self, *, include_private_state: bool = False) -> dict[str, Any]:
        """What the run needs to go on elsewhere, beside `state_dict()` and the model.

        It holds the error: data of the records without noise. Whoever sees it, beside the noisy
        updates, gets no guarantee at all. Keep it where the records are, and delete it when the
        run is over. (`state_dict()` holds learning rate, moments and the like, computed from noisy
        updates only. What stays of the account is `privacy_event(...).to_dict()`.)

        Args:
            include_private_state: True says that you know this.

        Raises:
            ValueError: include_private_state is False, or the batch is not finished.
            UnsupportedRunError: A step was refused.
        """
        if include_private_state is not True:
            raise ValueError(
                "Expected include_private_state=True: the run can only go on with the error, which "
                "holds data of the records without noise. Keep what you get as secret as the "
                "records. For the account alone, keep privacy_event(...).to_dict()."
            )
        self.check_not_refused()
        if not self._num_steps or self._rows or any(self._sums):
            raise ValueError("Expected the end of a step, got no step yet, or a piece of one.")
        return {
            "schema": _SCHEMA,
            "num_steps": self._num_steps,
            "settings": dict(self._fixed),
            "private": self._hidden.private_state(),
        }

    def load_run_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `run_state_dict` returned, into an optimizer that took no step.

        Load model and `state_dict()` of the same moment, too, and each state only once: no bound
        here covers what two continuations of a run show together.

        Raises:
            ValueError: The state is damaged or of another run (the text names the field), or steps
                were taken here. Nothing is changed then.
        """
        if self._num_steps or self._rows:
            raise ValueError(
                f"Expected an optimizer without steps, got one with {self._num_steps}: they stay "
                "accounted. Construct another one."
            )
        missing = {"schema", "num_steps", "settings", "private"} - set(state)
        if missing or state["schema"] != _SCHEMA:
            raise ValueError(
                f"Expected a state of run_state_dict with schema {_SCHEMA}, got schema "
                f"{state.get('schema')!r}, missing keys {sorted(missing)}."
            )
        for name, expected in self._fixed.items():
            if state["settings"].get(name) != expected:
                raise ValueError(
                    f"The state is of another run: expected {name} = {expected!r}, got "
                    f"{state['settings'].get(name)!r}."
                )
        steps = validate.integer("num_steps", state["num_steps"], minimum=1)
        self._hidden.load_private_state(state["private"])
        self._num_steps = steps

    def __getstate__(self) -> dict[str, Any]:
        raise UnsupportedRunError(
            f"{type(self).__name__} cannot be copied or pickled: it holds data of the records "
            "without noise, and the steps of a copy would be missing from epsilon. Save "
            "state_dict(), and run_state_dict(include_private_state=True) if the run has to go on."
        )

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in self._fixed.items())
        return f"{type(self).__name__}({settings}, of {self._base!r})"
