"""Noise of our own for the optimizer of a stock Opacus engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from opacus.optimizers import (
    DistributedDPOptimizer,
    DPOptimizer,
    DPOptimizerFastGradientClipping,
)
from opacus.optimizers.ddpoptimizer_fast_gradient_clipping import (
    DistributedDPOptimizerFastGradientClipping,
)

from hidden_state_accountants import Assumption, UnsupportedRunError
from hidden_state_adapters.opacus.gradients.noise import OWN_NOISE, OwnNoise, check_noise_source
from hidden_state_adapters.opacus.guards.noise import NoiseMemory, assumption_on_noise

_KNOWN: set[Callable[..., Any]] = {
    kind.add_noise
    for kind in (
        DPOptimizer,
        DPOptimizerFastGradientClipping,
        DistributedDPOptimizer,
        DistributedDPOptimizerFastGradientClipping,
    )
}
"""What adds noise from `optimizer.generator` to sums that are still there afterwards.

Clipping per layer inherits it.
"""


class StockNoise:
    """Sees to the noise of one optimizer that Opacus made.

    An accountant is called by Opacus' step hook only, which comes after the noise and before the
    parameters move. At its first call the optimizer is given a generator of our own, and the noise
    of that step is drawn again: what came from torch's default generator, which every script
    seeds, is thrown away.

    A generator that the user passed stays. It may not come back to an earlier state.
    """

    def __init__(self) -> None:
        self._own, self._memory = OwnNoise(), NoiseMemory()
        self._optimizer: Any = None
        self._device: torch.device | None = None  # of our own noise
        self._generator: torch.Generator | None = None  # of the last step

    def take_over(self, optimizer: DPOptimizer) -> Assumption:
        """Makes the noise of a step ours, unless the user passed a generator.

        Args:
            optimizer: In its step hook. Gradients are changed: call it before they are looked at.

        Returns:
            Where the noise comes from.

        Raises:
            UnsupportedRunError: The noise would not be ours, or be that of another step.
        """
        if self._optimizer is None:
            self._begin(optimizer)
        self._check_same(optimizer)
        if self._device is not None:
            self._give(optimizer, self._own.generator(self._device))
            return OWN_NOISE
        if self._generator is not None and not optimizer.secure_mode:
            self._memory.note(self._generator)
        return assumption_on_noise(optimizer)

    def _begin(self, optimizer: DPOptimizer) -> None:
        _refuse_other_noise(optimizer)
        if optimizer.generator is None:
            self._device = _device_of_noise(optimizer)
        self._optimizer, self._generator = optimizer, optimizer.generator

    def _check_same(self, optimizer: DPOptimizer) -> None:
        if optimizer is not self._optimizer:
            raise UnsupportedRunError(
                "Expected the steps of one optimizer, got those of a second through the same hook: "
                "a copy would repeat its noise. Call make_private for each."
            )
        if optimizer.generator is not self._generator:
            raise UnsupportedRunError(
                "The optimizer has another noise generator than in its first step: its noise may "
                "be that of an earlier step, or of a seed that is known. Leave "
                "optimizer.generator alone; pass noise_generator= to make_private."
            )

    def _give(self, optimizer: DPOptimizer, generator: torch.Generator) -> None:
        if optimizer.generator is generator:
            return
        optimizer.generator = self._generator = generator
        if getattr(optimizer, "rank", 0):  # of several processes the first alone adds noise
            return
        for p in optimizer.params:
            vars(p.summed_grad).pop("_processed", None)  # Opacus refuses to use a sum twice
        optimizer.add_noise()
        optimizer.scale_grad()


def _refuse_other_noise(optimizer: DPOptimizer) -> None:
    """Raises UnsupportedRunError if noise may be drawn elsewhere than from its generator."""
    if getattr(optimizer.add_noise, "__func__", None) not in _KNOWN:
        raise UnsupportedRunError(
            f"Expected DPOptimizer or another optimizer of Opacus for one device or DPDDP, got "
            f"{type(optimizer).__name__}, which adds noise in a way of its own: it may come from "
            "torch's default generator, and whoever knows the seed of the program knows it. Train "
            "with an engine that makes a DPOptimizer."
        )
    if hasattr(optimizer, "_adjusted_noise_multiplier"):
        raise UnsupportedRunError(
            "Expected a fixed clip norm with ghost clipping, got PrivacyEngineAdaptiveClipping: it "
            "counts the clipped gradients with noise of torch's default generator, and whoever "
            "knows the seed of the program knows the count. Use opacus.PrivacyEngine."
        )


def _device_of_noise(optimizer: DPOptimizer) -> torch.device:
    """Where the noise of a stock optimizer is drawn.

    Raises:
        UnsupportedRunError: One generator of ours cannot draw it.
    """
    params = optimizer.params
    check_noise_source(params, None)
    devices = {p.device for p in params}
    if len(devices) > 1:
        raise UnsupportedRunError(
            f"Expected parameters on one device, got {sorted(map(str, devices))}: a stock "
            "optimizer draws its noise from one generator, which serves one device. Use "
            "hidden_state_adapters.opacus.HiddenStatePrivacyEngine."
        )
    return devices.pop()
