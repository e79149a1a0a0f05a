"""Noise of our own for the optimizer of a stock Opacus engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from opacus.optimizers import (
    DistributedDPOptimizer,
    DPOptimizer,
    DPOptimizerFastGradientClipping,
)
from opacus.optimizers.ddpoptimizer_fast_gradient_clipping import (
    DistributedDPOptimizerFastGradientClipping,
)

from hidden_state_accountants import Assumption, UnsupportedRunError
from hidden_state_adapters.opacus.gradients.noise import (
    GIVEN_NOISE,
    OWN_NOISE,
    SECURE_NOISE,
    OwnGenerator,
    check_noise_source,
)

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


def take_over_noise(optimizer: DPOptimizer) -> Assumption:
    """Makes the noise of an optimizer that Opacus made ours, unless the user passed a generator.

    An accountant is called by Opacus' step hook only, which comes after the noise and before the
    parameters move. So the noise of the first step is drawn again: what came from torch's default
    generator, which every script seeds, is thrown away.

    Args:
        optimizer: In its first step hook. Gradients are changed: call it before they are looked at.

    Returns:
        Where the noise comes from.

    Raises:
        UnsupportedRunError: One generator of ours cannot draw it.
    """
    name = type(optimizer).__name__
    if getattr(optimizer.add_noise, "__func__", None) not in _KNOWN:
        raise UnsupportedRunError(
            f"Expected DPOptimizer or another optimizer of Opacus for one device or DPDDP, got "
            f"{name}, which adds noise in a way of its own: it may come from torch's default "
            "generator, and whoever knows the seed of the program knows it. Train with an engine "
            "that makes a DPOptimizer."
        )
    if hasattr(optimizer, "_adjusted_noise_multiplier"):
        raise UnsupportedRunError(
            "Expected a fixed clip norm with ghost clipping, got PrivacyEngineAdaptiveClipping: it "
            "counts the clipped gradients with noise of torch's default generator, and whoever "
            "knows the seed of the program knows the count. Use opacus.PrivacyEngine."
        )
    if optimizer.generator is not None:
        return SECURE_NOISE if optimizer.secure_mode else GIVEN_NOISE
    params = optimizer.params
    check_noise_source(params, None)
    device, *others = dict.fromkeys(p.device for p in params)
    if others:
        raise UnsupportedRunError(
            f"Expected parameters on one device, got {[str(d) for d in (device, *others)]}: a "
            "stock optimizer draws its noise from one generator, which serves one device. Use "
            "hidden_state_adapters.opacus.HiddenStatePrivacyEngine."
        )
    optimizer.generator = OwnGenerator(device)
    if not getattr(optimizer, "rank", 0):  # of several processes the first alone adds noise
        for p in params:
            vars(p.summed_grad).pop("_processed", None)  # Opacus refuses to use a sum twice
        optimizer.add_noise()
        optimizer.scale_grad()
    return OWN_NOISE
