"""Opacus' DPOptimizer, recording the run and checking it at every step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from opacus.optimizers import DPOptimizer
from torch.optim import Optimizer

from hidden_state_accountants import RunRecorder, UnsupportedRunError
from hidden_state_adapters.opacus import optimizer_checks as checks
from hidden_state_adapters.opacus.branches import check_goes_on
from hidden_state_adapters.opacus.current_batch import CurrentBatch, at_step
from hidden_state_adapters.opacus.flat_clip import add_clipped, gradient_norms
from hidden_state_adapters.opacus.ghost_clipping import GhostClipping
from hidden_state_adapters.opacus.run_context import (
    RunContext,
    buffers_changed,
    parameters_changed,
)


class HiddenStateOptimizer(GhostClipping):
    """Noisy clipped SGD on the batches of a plan; what the engine's event describes.

    One logical step of x is

        x <- P_R((1 - lr*weight_decay) x - lr/b * (sum of clipped gradients + noise))

    with noise of standard deviation noise_multiplier * max_grad_norm. torch.optim.SGD applies its
    `weight_decay` to the parameters, outside the clip: that is decoupled decay. (A penalty in the
    loss is inside the clip and does not count.) P_R projects all parameters together on the ball
    of `projection_radius`.

    Every step is recorded with the values that it used, right before the parameters move. The
    optimizer cannot be copied or pickled: the copy's steps would be missing from epsilon.

    Formal guarantees:
      - Relation and released iterates: those of the recorded `LastIterateDpEvent`.
      - Checked at every step: the loader delivered the expected batch and the gradients have its
        number of rows, from one forward pass; plain SGD with equal groups; unchanged set of
        trainable parameters in float32 or float64; no value was changed from outside since the
        last step, neither at the step nor in the training pass; no buffer changed; gradient and
        feature norms within their declared bounds; projection; with loss_geometry="auto" one call
        of the criterion, on the model's output, with one target for each row, and no other loss.
      - Not checked: that the gradients belong to the records that the loader delivered, and the
        smoothness of the loss.

    Args:
        optimizer: A plain torch.optim.SGD.
        context: See `RunContext`.
        **kwargs: Of DPOptimizer.

    Raises:
        UnsupportedRunError: From `step`, when the run is not the declared one; the text says which
            step and what. The step is then not taken.
    """

    records_itself = True
    # GradScaler then hands its scale to `step`, which refuses, instead of skipping steps unseen.
    _step_supports_amp_scaling = True

    def __init__(self, optimizer: Optimizer, *, context: RunContext, **kwargs: Any):
        super().__init__(optimizer, **kwargs)
        self.context = context
        self._base = optimizer
        self._fixed = self._settings()
        self._hook_slot: Callable[..., Any] | None = None
        self._steps_taken = context.recorder.num_steps
        self._unfinished_step: int | None = None
        self._closed = ""
        self._failure = ""
        self._norms: torch.Tensor | None = None  # of the gradients at hand, if they were needed
        self._batch = CurrentBatch(context)
        self._start_batch()

    def _settings(self) -> dict[str, Any]:
        names = ("loss_reduction", "expected_batch_size", "secure_mode", "generator")
        return {name: getattr(self, name) for name in names}

    def _start_batch(self) -> None:
        self._batch.start()
        self._sums: list[tuple[torch.Tensor, int] | None] = [None] * len(self.params)
        self._clip_norm: float | None = None
        self._noise_multiplier = math.nan

    # What the guarantee says about now.

    def check_iterate(self) -> None:
        """Raises UnsupportedRunError unless the parameters are those the last step left."""
        self._check_alive()
        self.check_not_refused()
        self.context.cursor.check_finished()
        if bool(self.context.parameters.changed()):
            raise parameters_changed(self._steps_taken)
        if bool(self.context.parameters.buffers_changed()):
            raise buffers_changed()

    @property
    def was_refused(self) -> bool:
        """Whether a step was refused."""
        return bool(self._failure)

    def check_not_refused(self) -> None:
        """Raises UnsupportedRunError if a step of this run was refused."""
        if self._failure:  # as much as a stop that looks at the data
            raise UnsupportedRunError(
                "A refused step ended this run, and whether it was refused may depend on the data: "
                f"no epsilon covers its model. {self._failure}"
            )

    def _check_alive(self) -> None:
        if self._closed:
            raise UnsupportedRunError(self._closed)
        if self._unfinished_step is not None:
            raise UnsupportedRunError(
                f"step {self._unfinished_step} was interrupted while it changed the parameters, so "
                "the model is not the iterate that was accounted. Start the run again, or load a "
                "checkpoint into a fresh run."
            )
        if self.context.recorder.num_steps != self._steps_taken:
            raise UnsupportedRunError(
                f"The optimizer took {self._steps_taken} steps, but "
                f"{self.context.recorder.num_steps} are recorded. Restore a run with "
                "engine.load_checkpoint, which restores model, recorder and position together."
            )

    def close(self, reason: str) -> None:
        """Ends the run: `step` raises UnsupportedRunError with `reason` from now on."""
        self._closed = reason
        self.context.remove_hooks()
        self.context.parameters.release_memory()

    def resume(self) -> None:
        """Goes on from what the recorder and the module hold (after a checkpoint was loaded)."""
        self._steps_taken = self.context.recorder.num_steps
        self._unfinished_step, self._failure = None, ""
        self._start_batch()
        self.context.reset_watches()
        self.context.parameters.remember()
        self.context.parameters.remember_fixed()
        self.context.cursor.resume_at(self._steps_taken)

    # Opacus' seams.

    def attach_step_hook(self, fn: Callable[[DPOptimizer], None]) -> None:
        """Fills Opacus' single hook slot, once.

        Raises:
            UnsupportedRunError: The slot is taken.
        """
        if self._hook_slot is not None:
            raise UnsupportedRunError(
                "Expected one step hook, got a second: attach_step_hook has a single slot, and the "
                "privacy engine uses it. Do your own work after optimizer.step()."
            )
        self._hook_slot = fn
        super().attach_step_hook(fn)

    def signal_skip_step(self, do_skip: bool = True) -> None:
        """Announces a piece of a batch (BatchMemoryManager calls it)."""
        self.context.cursor.signal(do_skip)

    def _check_skip_next_step(self, pop_next: bool = True) -> bool:
        return self._batch.skips_step if pop_next else self.context.cursor.next_is_skipped

    def clip_and_accumulate(self) -> None:
        """Clips as Opacus does and notes the clip norm that was used."""
        clip_norm = float(self.max_grad_norm)
        self._check_same_clip_norm(clip_norm)
        checks.check_clip_margin(clip_norm, self.context.lipschitz)
        self._clip_norm = clip_norm
        norms, self._norms = self._norms, None
        if norms is None or self._is_ghost:
            super().clip_and_accumulate()
        else:
            add_clipped(self.params, norms, clip_norm)

    def add_noise(self) -> None:
        """Adds noise as Opacus does and notes the noise multiplier that was used."""
        self._check_same_clip_norm(float(self.max_grad_norm))
        self._noise_multiplier = float(self.noise_multiplier)
        if self._noise_multiplier and not self.secure_mode:
            draw, device = self.context.noise.draw, self.params[0].device
            at_step(self._steps_taken + 1, lambda: draw(self.generator, device))
        super().add_noise()

    def _check_same_clip_norm(self, clip_norm: float) -> None:
        if self._clip_norm is not None and clip_norm != self._clip_norm:
            raise UnsupportedRunError(
                f"step {self._steps_taken + 1} clips to {self._clip_norm:g} and then uses "
                f"{clip_norm:g}. Change max_grad_norm between logical steps only."
            )

    def pre_step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Checks the run, then clips and adds noise; true if the parameters may move.

        Raises:
            UnsupportedRunError: The run is not the declared one.
        """
        self._check_alive()
        if self._failure:
            raise UnsupportedRunError(
                f"An earlier step of this run was refused, so the run cannot go on: {self._failure}"
            )
        check_goes_on(self.context.recorder)
        step = self._steps_taken + 1
        self.context.schedule.check_more_steps(step)  # the model stays the accounted one
        try:
            self._check_optimizer(step)
            params = self.context.parameters.params
            rows = self._batch.take(step, lambda: checks.gradient_rows(params))
            self._check_sums(step)
            self._norms = gradient_norms(params) if rows else None
            self.context.check_values(step, rows, self._norms)
            proceeds = super().pre_step(closure)
            self._sums = [_version(p.summed_grad) for p in self.params]
        except BaseException as error:
            self._failure = str(error) or type(error).__name__
            raise
        self.context.reset_watches()
        return proceeds

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Takes one step, or one piece of a step under BatchMemoryManager.

        As in Opacus, a `closure` is called once before the step, and its loss is not returned.

        Returns:
            None.

        Raises:
            UnsupportedRunError: The run is not the declared one; nothing was changed.
        """
        self._check_alive()
        if hasattr(self, "grad_scale") or hasattr(self, "found_inf"):
            raise UnsupportedRunError(
                "Expected optimizer.step(), got a call through torch.amp.GradScaler: it scales the "
                "loss (which changes its smoothness) and skips steps. Train in float32 without it."
            )
        if closure is not None:
            with torch.enable_grad():
                closure()
        if not self.pre_step():
            return None
        self._record()
        self._unfinished_step = self._steps_taken + 1
        result = self.original_optimizer.step()
        if self.context.projection_radius is not None:
            checks.project_on_ball(self.context.parameters.params, self.context.projection_radius)
        self.context.parameters.remember()
        self._steps_taken += 1
        self.context.cursor.steps_taken = self._steps_taken
        self._start_batch()
        self._unfinished_step = None
        return result

    def _check_optimizer(self, step: int) -> None:
        if self.original_optimizer is not self._base:
            raise UnsupportedRunError(
                f"step {step} uses another original_optimizer than the one of make_private. Call "
                "make_private again for another optimizer."
            )
        rate = checks.sgd_options(self.original_optimizer)["lr"]
        self.context.schedule.check_rate(step, rate)
        self.context.parameters.check_structure(step)
        if self._settings() != self._fixed:
            raise UnsupportedRunError(
                f"step {step} uses {self._settings()}, expected {self._fixed} as at make_private."
            )
        if self.step_hook is not self._hook_slot:
            raise UnsupportedRunError(
                f"step {step} has another step_hook than the one of the privacy engine. Do your "
                "own work after optimizer.step()."
            )

    def _check_sums(self, step: int) -> None:
        for param, expected in zip(self.params, self._sums, strict=True):
            actual = _version(param.summed_grad)
            if (actual is None) != (expected is None) or (
                actual and expected and (actual[0] is not expected[0] or actual[1] != expected[1])
            ):
                raise UnsupportedRunError(
                    f"step {step} starts with a sum of clipped gradients that does not come from "
                    "the pieces of its batch. Call optimizer.zero_grad() after every step, and "
                    "leave summed_grad alone."
                )

    def _record(self) -> None:
        options = checks.sgd_options(self.original_optimizer)
        # The event divides by b; a "sum" optimizer does not.
        scale = 1 if self.loss_reduction == "mean" else self.context.batch_size
        recorder = self.context.recorder
        assert isinstance(recorder, RunRecorder)
        recorder.step(
            noise_multiplier=self._noise_multiplier,
            learning_rate=options["lr"] * scale,
            clip_norm=self._clip_norm,
            weight_decay=options["weight_decay"] / scale,
            batch_index=self._batch.index,
            batch_rows=self._batch.rows,
        )

    def __getstate__(self) -> dict[str, Any]:
        raise UnsupportedRunError(
            "A private optimizer cannot be copied or pickled: the steps of the copy would be "
            "missing from epsilon. Use engine.save_checkpoint, or make_private for another run."
        )


def _version(tensor: torch.Tensor | None) -> tuple[torch.Tensor, int] | None:
    return None if tensor is None else (tensor, tensor._version)
