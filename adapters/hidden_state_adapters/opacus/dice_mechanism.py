"""The steps of DiceSGD: both sums of a batch, the noise, the error feedback."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from opacus.optimizers import DPOptimizer
from opacus.optimizers.optimizer import (
    _check_processed_flag,
    _generate_noise,
    _mark_as_processed,
)
from torch import nn
from torch.optim import Optimizer

from hidden_state_accountants import BatchOrder, DiceSgdDpEvent, UnsupportedRunError, validate
from hidden_state_adapters.opacus import device_figures, dice_checks
from hidden_state_adapters.opacus import optimizer_checks as checks
from hidden_state_adapters.opacus.device_figures import Figure
from hidden_state_adapters.opacus.dice_state import (
    HiddenError,
    clip_factors,
    smallest_norm,
)
from hidden_state_adapters.opacus.flat_clip import batch_of, gradient_norms, weighted_sum
from hidden_state_adapters.opacus.ghost_clipping import (
    GhostClipping,
    take_ghost_sums,
)
from hidden_state_adapters.opacus.noise_watch import NoiseWatch


class DiceMechanism(GhostClipping):
    """The steps of `DiceSGDOptimizer` and `DiceAdamOptimizer`; see the former."""

    _base_types: ClassVar[tuple[type[Optimizer], ...]] = ()

    records_itself = True  # no accountant of a step hook knows what the error costs
    # GradScaler then hands its scale to `step`, which refuses, instead of skipping steps unseen.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        noise_multiplier: float,
        max_grad_norm: float,
        expected_batch_size: int,
        error_max_grad_norm: float | None = None,
        automatic: bool = False,
        loss_reduction: str = "mean",
        generator: torch.Generator | None = None,
        secure_mode: bool = False,
    ):
        dice_checks.check_base(type(self).__name__, optimizer, self._base_types)
        dice_checks.check_options(loss_reduction, generator, secure_mode)
        dice_checks.refuse_per_layer(
            max_grad_norm=max_grad_norm, error_max_grad_norm=error_max_grad_norm
        )
        validate.integer("expected_batch_size", expected_batch_size, minimum=1)
        self._fixed: dict[str, Any] = {}
        self.automatic = automatic
        self.error_max_grad_norm = (
            max_grad_norm if error_max_grad_norm is None else error_max_grad_norm
        )
        super().__init__(
            optimizer,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            expected_batch_size=expected_batch_size,
            loss_reduction=loss_reduction,
            generator=generator,
            secure_mode=secure_mode,
        )
        self._check_values()
        self._run_params = self.params
        self._smallest_norm = smallest_norm(self._run_params)
        dice_checks.check_clip_norms(
            self._smallest_norm, float(max_grad_norm), float(self.error_max_grad_norm)
        )
        self._base = optimizer
        self._fixed = self._settings()
        self._noise_watch = NoiseWatch()
        self._hidden = HiddenError(self._run_params)
        self._num_steps = 0
        self._rows = 0  # of the pieces of the current batch
        self._sums = dice_checks.no_sums(self._run_params)
        self._failure = ""
        self._moments = dice_checks.moments_of(optimizer)

    def _check_values(self) -> None:
        validate.magnitude("noise_multiplier", self.noise_multiplier)
        validate.magnitude("max_grad_norm", self.max_grad_norm, positive=True)
        validate.magnitude("error_max_grad_norm", self.error_max_grad_norm, positive=True)
        if not isinstance(self.automatic, bool):
            raise TypeError(f"Expected automatic to be True or False, got {self.automatic!r}.")
        dice_checks.check_parameters(self.params)
        # Checks the noise on the mean, and the values with each other.
        self._event(int(self.expected_batch_size), 1, BatchOrder.CYCLIC, math.inf)  # type: ignore[arg-type]

    def _settings(self) -> dict[str, Any]:
        names = (
            "noise_multiplier", "max_grad_norm", "error_max_grad_norm", "expected_batch_size",
            "automatic", "loss_reduction", "secure_mode",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}

    # Opacus' seams.

    def attach_step_hook(self, fn: Callable[[DPOptimizer], None]) -> None:
        """Refuses: Opacus' accountants would take the run for DP-SGD.

        Raises:
            UnsupportedRunError: Always.
        """
        raise UnsupportedRunError(
            f"Expected no step hook on {type(self).__name__}, got {fn!r}: an accountant that reads "
            "noise_multiplier takes the run for DP-SGD and leaves out what the error shows. Use "
            "optimizer.privacy_event(...) or optimizer.report(...); do your own work after step()."
        )

    def pre_step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Checks the run, clips, and at the end of a batch adds error and noise.

        Raises:
            UnsupportedRunError: The run is not covered; the text says why.
        """
        if self._failure:
            raise UnsupportedRunError(
                f"An earlier step of this run was refused, so the run cannot go on: {self._failure}"
            )
        step = self._num_steps + 1
        try:
            self._check_run(step)
            try:
                rows = checks.gradient_rows(self._run_params)
            except UnsupportedRunError as error:
                raise UnsupportedRunError(f"step {step}: {error}") from None
            self._rows += rows
            self._measure(step, rows)
            proceeds = super().pre_step(closure)
        except BaseException as error:
            self._failure = str(error) or type(error).__name__
            raise
        self._hidden.measured = None
        if proceeds:
            self._rows, self._sums = 0, dice_checks.no_sums(self._run_params)
        else:
            self._sums = dice_checks.sums_of(self._run_params)
        return proceeds

    def _check_run(self, step: int) -> None:
        if self.original_optimizer is not self._base or self.step_hook is not None:
            raise UnsupportedRunError(
                f"step {step} uses another original_optimizer, or a step_hook. Leave both alone."
            )
        settings = self._settings()
        for name, expected in self._fixed.items():
            if settings[name] != expected:
                raise UnsupportedRunError(
                    f"step {step} uses {name} = {settings[name]!r}, expected {expected!r} as at "
                    "construction: the bound on DiceSGD is about constant values. (The learning "
                    "rate may change.)"
                )
        dice_checks.check_same_parameters(step, self._base, self._run_params)
        dice_checks.check_sums(step, self._run_params, self._sums)
        dice_checks.check_moments(step, self._base, self._moments)

    def _measure(self, step: int, rows: int) -> None:
        """Norms of the gradients and of the error; one transfer from the device."""
        norms, error = gradient_norms(self._run_params), self._hidden.norm()
        largest = norms.max() if rows else 0.0
        values = self._read(step, rows, {"largest": largest, "error": error})
        if not math.isfinite(values["largest"]):
            raise UnsupportedRunError(
                f"step {step} has a per-example gradient whose norm is not finite (or a square "
                "overflows): no clip bounds it. The step was not taken. Look for a division by 0, "
                "or scale the loss down."
            )
        if not math.isfinite(values["error"]):
            raise UnsupportedRunError(f"step {step}: the error overflowed; no clip bounds it.")
        self._hidden.note_gradient_norm(values["largest"])
        self._hidden.measured = norms, error

    def _read(self, step: int, rows: int, figures: Mapping[str, Figure]) -> dict[str, float]:
        return device_figures.read(figures)

    def clip_and_accumulate(self) -> None:
        """Adds the clipped gradients to summed_grad and the rest of each to the hidden error."""
        assert self._hidden.measured is not None
        factors = clip_factors(
            self._hidden.measured[0],
            float(self.max_grad_norm),
            automatic=self.automatic,
            smallest=self._smallest_norm,
        )
        # Not the difference of two sums: what is not clipped leaves exactly nothing.
        weights = factors, 1 - factors
        sums: Iterable[list[torch.Tensor]]
        if self._is_ghost:
            sums = take_ghost_sums(self._run_params, *weights)
        else:
            sums = (self._take_sums(p, weights) for p in self._run_params)
        for index, (p, (clipped, rest)) in enumerate(zip(self._run_params, sums, strict=True)):
            self._hidden.add_rest(index, rest)
            p.summed_grad = clipped if p.summed_grad is None else p.summed_grad.add_(clipped)  # type: ignore[attr-defined]

    def _take_sums(
        self, p: nn.Parameter, weights: tuple[torch.Tensor, torch.Tensor]
    ) -> list[torch.Tensor]:
        _check_processed_flag(p.grad_sample)  # type: ignore[attr-defined]
        sample = batch_of(p).to(p.dtype)
        sums = [weighted_sum(weight, sample) for weight in weights]
        _mark_as_processed(p.grad_sample)  # type: ignore[attr-defined]
        return sums

    def add_noise(self) -> None:
        r"""Puts B times the noisy update into p.grad (`scale_grad` divides) and moves the error.

        .. math::
            \sum_i \mathrm{clip}(g_i, C_1) + B\, \mathrm{clip}(e_t, C_2) +
            \mathcal{N}(0, (B \sigma_1)^2 I), \qquad
            B \sigma_1 = \text{noise_multiplier} \cdot C_1

        Raises:
            UnsupportedRunError: The noise was used before.
        """
        step, divisor = self._num_steps + 1, int(self._fixed["expected_batch_size"])
        assert self._hidden.measured is not None
        factor = clip_factors(
            self._hidden.measured[1],
            float(self.error_max_grad_norm),
            automatic=self.automatic,
            smallest=self._smallest_norm,
        )
        std = float(self.noise_multiplier) * float(self.max_grad_norm)
        if std and not self.secure_mode:
            try:
                self._noise_watch.draw(self.generator, self._run_params[0].device)
            except UnsupportedRunError as error:
                raise UnsupportedRunError(f"step {step}: {error}") from None
        self._num_steps += 1  # it counts, whatever happens from here on
        self._hidden.note_rows(self._rows)
        for index, p in enumerate(self._run_params):
            _check_processed_flag(p.summed_grad)  # type: ignore[attr-defined]
            noise = _generate_noise(
                std=std,
                reference=p.summed_grad,  # type: ignore[attr-defined]
                generator=self.generator,
                secure_mode=self.secure_mode,
            )
            # ZBWH24, Algorithm 2, lines 5 and 6, arXiv 2311.14632; the noise comes last
            update = self._hidden.error(index) * (factor * divisor).to(p)
            update += p.summed_grad  # type: ignore[attr-defined]
            update += noise
            p.grad = update.view_as(p)
            _mark_as_processed(p.summed_grad)  # type: ignore[attr-defined]
        self._hidden.advance(factor, divisor)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Takes one step, or one piece of a step under BatchMemoryManager.

        Raises:
            UnsupportedRunError: The run is not covered; the text says why.
        """
        if hasattr(self, "grad_scale") or hasattr(self, "found_inf"):
            raise UnsupportedRunError(
                "Expected optimizer.step(), got a call through torch.amp.GradScaler: it scales the "
                "gradients before they are clipped, and skips steps. Train in float32 without it."
            )
        result = super().step(closure)
        self._moments = dice_checks.moments_of(self._base)
        return result

    def load_state_dict(self, state_dict: Any) -> None:
        """Restores the inner optimizer: its options, momentum and moments."""
        super().load_state_dict(state_dict)
        self._moments = dice_checks.moments_of(self._base)

    @property
    def num_steps(self) -> int:
        """The number of steps taken."""
        return self._num_steps

    def _event(self, size: int, steps: int, order: BatchOrder, bound: float) -> DiceSgdDpEvent:
        batch = int(self.expected_batch_size)  # type: ignore[arg-type]
        return DiceSgdDpEvent(
            # ZBWH24, Algorithm 2, arXiv 2311.14632: the noise is on the mean update
            noise_std=float(self.noise_multiplier) * float(self.max_grad_norm) / batch,
            clip_norm=float(self.max_grad_norm),
            error_clip_norm=float(self.error_max_grad_norm),
            batch_size=batch,
            dataset_size=size,
            num_steps=steps,
            batch_order=order,
            gradient_bound=bound,
            automatic=self.automatic,
        )
