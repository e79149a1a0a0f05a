"""The steps of DP-MBCD: every block in turn, clipped, with noise, and through its prox."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from opacus.optimizers import DPOptimizer
from opacus.optimizers.optimizer import _generate_noise
from torch import nn
from torch.optim import SGD

from hidden_state_accountants import UnsupportedRunError, validate
from hidden_state_adapters.opacus import block_coordinate_checks, dice_checks
from hidden_state_adapters.opacus import optimizer_checks as checks
from hidden_state_adapters.opacus.block_coordinate_checks import BatchWatch
from hidden_state_adapters.opacus.device_figures import any_of
from hidden_state_adapters.opacus.dice_state import clip_factors, joint_norms, smallest_norm
from hidden_state_adapters.opacus.forward_watch import ForwardWatch
from hidden_state_adapters.opacus.ghost_clipping import ghost_norms, is_ghost, take_ghost_sums
from hidden_state_adapters.opacus.noise_watch import NoiseWatch
from hidden_state_adapters.opacus.parameter_watch import ParameterWatch, check_parameters
from hidden_state_adapters.opacus.precision_checks import check_convolutions

_UNFINISHED = "a step was not finished"


class BlockCoordinateMechanism(DPOptimizer):
    """The steps of `BlockCoordinateOptimizer`; see there."""

    records_itself = True  # no accountant of a step hook knows the blocks
    # GradScaler then hands its scale to `step`, which refuses, instead of skipping steps unseen.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        optimizer: SGD,
        *,
        module: nn.Module,
        noise_multiplier: float,
        max_grad_norm: float,
        expected_batch_size: int,
        l1: float = 0.0,
        l2: float = 0.0,
        nonnegative: bool = False,
        loss_reduction: str = "mean",
        generator: torch.Generator | None = None,
        secure_mode: bool = False,
    ):
        if isinstance(optimizer, DPOptimizer):
            raise UnsupportedRunError(
                f"Expected torch.optim.SGD, got {type(optimizer).__name__}. Pass its "
                "original_optimizer."
            )
        rate = block_coordinate_checks.learning_rate(optimizer)
        inner = block_coordinate_checks.plain_module(module)
        check_parameters(inner, optimizer)
        self._blocks = block_coordinate_checks.blocks_of(optimizer)
        dice_checks.check_options(loss_reduction, generator, secure_mode)
        if module.loss_reduction != loss_reduction:
            raise UnsupportedRunError(
                f"Expected loss_reduction = {module.loss_reduction!r} as in the module, got "
                f"{loss_reduction!r}: gradients of records would be off by the batch size."
            )
        validate.magnitude("learning_rate", rate)
        validate.magnitude("noise_multiplier", noise_multiplier)
        validate.magnitude("max_grad_norm", max_grad_norm, positive=True)
        validate.integer("expected_batch_size", expected_batch_size, minimum=1)
        self.l1 = validate.magnitude("l1", l1)
        self.l2 = validate.magnitude("l2", l2)
        if not isinstance(nonnegative, bool):
            raise TypeError(f"Expected nonnegative to be True or False, got {nonnegative!r}.")
        self.nonnegative = nonnegative
        smallest = self._smallest_norm = smallest_norm([p for b in self._blocks for p in b])
        if max_grad_norm < smallest:
            raise ValueError(
                f"Expected max_grad_norm >= {smallest:.3g} in this precision, got "
                f"{max_grad_norm!r}: squares of shorter vectors underflow. Scale the loss up."
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
        self._base = optimizer
        self._fixed = self._settings()
        self._noise_watch = NoiseWatch()
        self._parameters = ParameterWatch(inner, optimizer)
        self._forward = ForwardWatch(inner, parameters=self._parameters)
        self._batch = BatchWatch(inner, self._forward)
        self._noise: list[tuple[float, int]] = []  # multiplier and number of steps in a row
        self._num_steps = 0
        self._largest_norm = 0.0
        self._is_linear = all(
            isinstance(part, nn.Linear)
            for part in inner.modules()
            if any(p.requires_grad for p in part.parameters(recurse=False))
        )
        self._coarse = ""  # why gradients are not those of a declared loss
        self._failure = ""

    def _settings(self) -> dict[str, Any]:
        names = (
            "max_grad_norm", "expected_batch_size", "l1", "l2", "nonnegative", "loss_reduction",
            "secure_mode", "generator",
        )  # fmt: skip
        settings = {name: getattr(self, name) for name in names}
        return settings | {"lr": block_coordinate_checks.learning_rate(self.original_optimizer)}

    @property
    def step_size(self) -> float:
        """The step size eta of the mean gradient."""
        scale = 1 if self._fixed["loss_reduction"] == "mean" else self._fixed["expected_batch_size"]
        return self._fixed["lr"] * scale

    # Opacus' seams.

    def attach_step_hook(self, fn: Callable[[DPOptimizer], None]) -> None:
        """Refuses: Opacus' accountants would take a step for one mechanism.

        Raises:
            UnsupportedRunError: Always.
        """
        raise UnsupportedRunError(
            f"Expected no step hook on {type(self).__name__}, got {fn!r}: an accountant behind it "
            "sees one release per step, not one for every block. Use optimizer.privacy_event(...) "
            "or optimizer.report(...); do your own work after step()."
        )

    def signal_skip_step(self, do_skip: bool = True) -> None:
        """Refuses pieces of a batch.

        Raises:
            UnsupportedRunError: do_skip is true.
        """
        if do_skip:
            raise UnsupportedRunError(
                "Expected whole batches, got a piece of one (BatchMemoryManager, "
                "signal_skip_step): every block needs the gradients of the whole batch anew."
            )

    def pre_step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Not supported.

        Raises:
            UnsupportedRunError: Always.
        """
        raise UnsupportedRunError("Expected optimizer.step(closure), got a call of pre_step.")

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Updates every block once.

        Args:
            closure: Clears the gradients, and runs forward and backward pass on the batch; called
                once for each block. Needed for several blocks. Its loss is not returned.

        Raises:
            UnsupportedRunError: The run is not covered; the text says why.
        """
        if self._failure:
            raise UnsupportedRunError(
                f"An earlier step of this run was refused, so the run cannot go on: {self._failure}"
            )
        self._failure = _UNFINISHED  # until it is
        try:
            self._step(closure)
        except BaseException as error:
            self._failure = str(error) or type(error).__name__
            raise
        self._failure = ""

    def _step(self, closure: Callable[[], Any] | None) -> None:
        if closure is None and len(self._blocks) > 1:
            raise UnsupportedRunError(
                "Expected optimizer.step(closure), got no closure: the gradients of each of the "
                f"{len(self._blocks)} blocks are taken after the update of the block before. Put "
                "zero_grad(), forward and backward pass into a function."
            )
        if hasattr(self, "grad_scale") or hasattr(self, "found_inf"):
            raise UnsupportedRunError(
                "Expected optimizer.step(), got a call through torch.amp.GradScaler: it scales the "
                "gradients before they are clipped, and skips steps. Train in float32 without it."
            )
        noise_multiplier = validate.magnitude("noise_multiplier", self.noise_multiplier)
        for block in self._blocks:
            if closure is not None:
                with torch.enable_grad():
                    closure()
            self._check_run()
            self._update(block, noise_multiplier)
        self._batch.reset()
        self._num_steps += 1
        if self._noise and self._noise[-1][0] == noise_multiplier:
            self._noise[-1] = noise_multiplier, self._noise[-1][1] + 1
        else:
            self._noise.append((noise_multiplier, 1))

    def _check_run(self) -> None:
        step = self._num_steps + 1
        if self.original_optimizer is not self._base or self.step_hook is not None:
            raise UnsupportedRunError(
                f"step {step} uses another original_optimizer, or a step_hook. Leave both alone."
            )
        settings = self._settings()
        for name, expected in self._fixed.items():
            now = settings[name]
            if now is not expected and now != expected:
                raise UnsupportedRunError(
                    f"step {step} uses {name} = {now!r}, expected {expected!r} as at construction: "
                    "the bound on DP-MBCD is about constant values. (noise_multiplier may change.)"
                )
        self._parameters.check_structure(step)
        if not self._is_linear and not self._coarse:
            self._coarse = _coarse_convolutions(self.params)
        if self._forward.passes != 1 or self._batch.differs:
            what = f"{self._forward.passes} training passes"
            if self._forward.passes == 1:
                what = "training passes on different inputs"
            raise UnsupportedRunError(
                f"step {step} follows {what} through the module or a layer of it, expected 1 for "
                "each block, all on the same batch. Evaluate in eval() mode or under "
                "torch.no_grad(); draw batch and augmentation outside of the closure."
            )
        figures = (
            self._parameters.changed(),
            self._forward.has_other_parameters,
            self._parameters.buffers_changed(),
        )
        if bool(any_of(figures)):
            raise UnsupportedRunError(
                f"step {step} found parameters or buffers that the optimizer did not leave so, now "
                "or in the training pass: the model is not the iterate that is accounted, or the "
                "gradient not its gradient. Leave the module alone during the run."
            )

    def _update(self, block: list[nn.Parameter], noise_multiplier: float) -> None:
        step, size = self._num_steps + 1, int(self._fixed["expected_batch_size"])
        try:
            rows = checks.gradient_rows(block)
            clip = float(self._fixed["max_grad_norm"])
            if noise_multiplier and not self.secure_mode:
                self._noise_watch.draw(self.generator, block[0].device)
        except UnsupportedRunError as error:
            raise UnsupportedRunError(f"step {step}: {error}") from None
        if rows != size:
            raise UnsupportedRunError(
                f"step {step} has {rows} rows, expected expected_batch_size = {size}: all batches "
                "are equal. Leave the rest of the data set out (drop_last=True)."
            )
        ghost = is_ghost(block)
        samples = [] if ghost else [self._get_flat_grad_sample(p).to(p.dtype) for p in block]
        norms = ghost_norms(block) if ghost else joint_norms(samples)
        largest = float(norms.max())
        if not math.isfinite(largest):
            raise UnsupportedRunError(
                f"step {step} has a per-example gradient whose norm is not finite (or a square "
                "overflows): no clip bounds it. Look for a division by 0, or scale the loss down."
            )
        self._largest_norm = max(self._largest_norm, largest)
        factors = clip_factors(norms, clip, automatic=False, smallest=self._smallest_norm)
        if ghost:
            totals = [total for (total,) in take_ghost_sums(block, factors)]
        else:
            totals = [torch.einsum("i,i...", factors.to(s), s) for s in samples]
        self._forget_gradients()
        for p, total in zip(block, totals, strict=True):
            noise = _generate_noise(
                std=noise_multiplier * clip,
                reference=total,
                generator=self.generator,
                secure_mode=self.secure_mode,
            )
            divisor = size if self._fixed["loss_reduction"] == "mean" else 1
            # Chen & Liu 2025, (6), arXiv 2407.08233; the noise is on the sum
            p.grad = ((total + noise) / divisor).view_as(p)
        self._base.step()  # the other blocks have no gradient
        block_coordinate_checks.apply_prox(
            block, self.step_size, self.l1, self.l2, self.nonnegative
        )
        self._forget_gradients()  # the next block needs gradients at the new values
        self._parameters.remember()
        self._forward.reset()

    def _forget_gradients(self) -> None:
        for p in self.params:
            p.grad = p.grad_sample = p.summed_grad = None


def _coarse_convolutions(params: list[nn.Parameter]) -> str:
    try:
        check_convolutions(params)
    except UnsupportedRunError as error:
        return str(error)
    return ""
