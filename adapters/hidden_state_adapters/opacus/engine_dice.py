"""The DiceSGD optimizers that `HiddenStatePrivacyEngine` makes: they see their batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from opacus.optimizers import DPOptimizer
from torch.optim import Optimizer

from hidden_state_accountants import DiceSgdDpEvent, UnsupportedRunError
from hidden_state_adapters.opacus import optimizer_checks as checks
from hidden_state_adapters.opacus.branches import check_goes_on
from hidden_state_adapters.opacus.current_batch import CurrentBatch
from hidden_state_adapters.opacus.device_figures import Figure
from hidden_state_adapters.opacus.dice_adam import DiceAdamOptimizer
from hidden_state_adapters.opacus.dice_checks import holds_tensors
from hidden_state_adapters.opacus.dice_optimizer import DiceOptimizer
from hidden_state_adapters.opacus.dice_recorder import DiceRecorder
from hidden_state_adapters.opacus.dice_sgd import DiceSGDOptimizer
from hidden_state_adapters.opacus.run_context import (
    RunContext,
    buffers_changed,
    parameters_changed,
)

# Rounding in float32 of a norm that is exactly at its bound.
_SLACK = 1e-6


class EngineDiceOptimizer(DiceOptimizer):
    """What an engine's run adds to a DiceSGD optimizer: its batches, its record, its model.

    Formal guarantees:
      - Those of `DiceSGDOptimizer`, for the recorded `DiceSgdDpEvent`.
      - Checked at every step, beside what is checked there: the loader delivered the expected batch
        and the gradients have its number of rows, from one forward pass; per-example gradients
        within the declared bound; no parameter was changed from outside since the last step,
        neither at the step nor in the training pass; no buffer changed; the same generator.
      - Not checked: that the gradients belong to the records that the loader delivered.

    Args:
        optimizer: As `DiceSGDOptimizer` or `DiceAdamOptimizer`, without a state.
        context: See `RunContext`; its recorder is a `DiceRecorder`.
        **kwargs: As `DiceSGDOptimizer`.
    """

    def __init__(self, optimizer: Optimizer, *, context: RunContext, **kwargs: Any):
        super().__init__(optimizer, **kwargs)
        self.context = context
        assert isinstance(context.recorder, DiceRecorder)
        self._recorder = context.recorder
        self._noise_watch = context.noise  # over all runs of the engine
        self._generator = self.generator
        self._batch = CurrentBatch(context)
        self._has_hook = self._is_unfinished = self._is_loading = False
        self._closed = ""

    # What the guarantee says about now.

    def check_iterate(self) -> None:
        """Raises UnsupportedRunError unless the parameters are those the last step left."""
        self._check_alive()
        self.check_not_refused()
        self.context.cursor.check_finished()
        if bool(self.context.parameters.changed()):
            raise parameters_changed(self._num_steps)
        if bool(self.context.parameters.buffers_changed()):
            raise buffers_changed()

    def _check_alive(self) -> None:
        if self._closed:
            raise UnsupportedRunError(self._closed)
        if self._is_unfinished:
            raise UnsupportedRunError(
                f"step {self._num_steps} was interrupted while it changed the parameters. Start "
                "the run again, or load a checkpoint into a fresh run."
            )
        if self._recorder.num_steps != self._num_steps:
            raise UnsupportedRunError(
                f"The optimizer took {self._num_steps} steps, but {self._recorder.num_steps} are "
                "recorded. Restore a run with engine.load_checkpoint, which restores model, error, "
                "recorder and position together."
            )

    def close(self, reason: str) -> None:
        """Ends the run: `step` raises UnsupportedRunError with `reason` from now on."""
        self._closed = reason
        self.context.remove_hooks()
        self.context.parameters.release_memory()

    # Going on elsewhere. The error is as secret as the records.

    def private_state(self) -> dict[str, Any]:
        """Plain types and tensors that restore error and secret order. Secret."""
        state = self.context.plan.private_state(self._num_steps)
        if self._num_steps:
            state = {**state, "dice": self.run_state_dict(include_private_state=True)}
        return state

    def load_private_state(self, state: Mapping[str, Any], num_steps: int) -> None:
        """Restores what `private_state` returned; `resume` follows.

        Raises:
            ValueError: The state is of another run, or damaged.
        """
        if num_steps:
            found = state.get("dice", {}).get("num_steps")
            if found != num_steps:
                raise ValueError(
                    f"The checkpoint is damaged: {num_steps} steps are recorded, but the error is "
                    f"that of step {found}."
                )
            super().load_run_state_dict(state["dice"])
            self._is_loading = True
        self.context.plan.load_private_state(state)

    def load_run_state_dict(self, state: Mapping[str, Any]) -> None:
        """Refuses: the record of the steps belongs to the error.

        Raises:
            UnsupportedRunError: Always.
        """
        raise UnsupportedRunError(
            "Expected engine.load_checkpoint, got load_run_state_dict: model, error, recorded "
            "steps and position are restored together. Save with engine.save_checkpoint("
            "include_private_state=True, stays_private=True)."
        )

    def load_state_dict(self, state_dict: Any) -> None:
        """Restores the inner optimizer, as a part of `engine.load_checkpoint`.

        Raises:
            UnsupportedRunError: Otherwise: moments from elsewhere may hold gradients without noise.
        """
        if not self._is_loading and holds_tensors(state_dict["state"]):
            raise UnsupportedRunError(
                "Expected engine.load_checkpoint, got load_state_dict with momentum or moments: "
                "from elsewhere they may hold gradients without noise, which the steps would show."
            )
        super().load_state_dict(state_dict)

    def resume(self) -> None:
        """Goes on from what recorder, error and module hold (after a checkpoint was loaded)."""
        self._is_loading = False
        self._batch.start()
        self.context.reset_watches()
        self.context.parameters.remember()
        self.context.parameters.remember_fixed()
        self.context.cursor.resume_at(self._num_steps)

    # Opacus' seams.

    def attach_step_hook(self, fn: Callable[[DPOptimizer], None]) -> None:
        """Takes the engine's hook, which has nothing to do here; refuses any other.

        Raises:
            UnsupportedRunError: The engine's hook was there before.
        """
        if self._has_hook:
            super().attach_step_hook(fn)
        self._has_hook = True

    def signal_skip_step(self, do_skip: bool = True) -> None:
        """Announces a piece of a batch (BatchMemoryManager calls it)."""
        self.context.cursor.signal(do_skip)

    def _check_skip_next_step(self, pop_next: bool = True) -> bool:
        return self._batch.skips_step if pop_next else self.context.cursor.next_is_skipped

    def pre_step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Checks the run, clips, and at the end of a batch adds error and noise.

        Raises:
            UnsupportedRunError: The run is not the declared one; the text says why.
        """
        self._check_alive()
        check_goes_on(self._recorder)
        self.context.schedule.check_more_steps(self._num_steps + 1)  # the model stays accounted
        proceeds = super().pre_step(closure)
        if proceeds:
            self._recorder.step()
            self._is_unfinished = True
            self._batch.start()
        self.context.reset_watches()
        return proceeds

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Takes one step, or one piece of a step under BatchMemoryManager.

        Raises:
            UnsupportedRunError: The run is not the declared one; nothing was changed.
        """
        self._check_alive()
        result = super().step(closure)
        if self._is_unfinished:
            self.context.parameters.remember()
            self.context.cursor.steps_taken = self._num_steps
            self._is_unfinished = False
        return result

    def _check_run(self, step: int) -> None:
        super()._check_run(step)
        if self.generator is not self._generator:
            raise UnsupportedRunError(
                f"step {step} uses another noise generator than the one of make_private: its noise "
                "may be that of earlier steps. Leave it alone."
            )
        checks.refuse_step_hooks(self._base)
        self.context.parameters.check_structure(step)
        self._batch.take(step, lambda: checks.gradient_rows(self._run_params))

    def _read(self, step: int, rows: int, figures: Mapping[str, Figure]) -> dict[str, float]:
        return self.context.check_values(step, rows, more=figures)

    def clip_and_accumulate(self) -> None:
        """As `DiceMechanism`; no gradient of the piece may exceed the declared bound.

        Raises:
            UnsupportedRunError: A gradient is not finite, or too long.
        """
        super().clip_and_accumulate()
        largest, bound = self._hidden.largest_gradient_norm, self._recorder.declared.gradient_bound
        if not largest <= bound * (1 + _SLACK):
            raise UnsupportedRunError(
                f"step {self._num_steps + 1} has a per-example gradient of norm {largest:.8g}, "
                f"expected at most the declared gradient_bound = {bound:.8g}. The "
                "step was not taken. The bound has to be proven from the loss and the norm of the "
                "features, not read off a run. Correct it, or leave it out."
            )

    # The by-hand account has to say what the engine saw.

    def privacy_event(self, **arguments: Any) -> DiceSgdDpEvent:
        """As for an optimizer made by hand; see `engine.privacy_event`, which asks for nothing.

        Raises:
            UnsupportedRunError: The arguments are not what the engine saw.
        """
        event = super().privacy_event(**arguments)
        recorded = self._recorder.event()
        if event != recorded:
            raise UnsupportedRunError(f"Expected {recorded}, which was recorded, got {event}.")
        return event


class EngineDiceSGDOptimizer(EngineDiceOptimizer, DiceSGDOptimizer):
    """`DiceSGDOptimizer` of an engine's run; see `EngineDiceOptimizer`."""


class EngineDiceAdamOptimizer(EngineDiceOptimizer, DiceAdamOptimizer):
    """`DiceAdamOptimizer` of an engine's run; see `EngineDiceOptimizer`."""
