"""What one call of `PrivacyEngine.make_private` made: loader, model and optimizer."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import attrs
import torch
from opacus.optimizers import (
    DistributedDPOptimizer,
    DPOptimizer,
    DPOptimizerFastGradientClipping,
)
from opacus.optimizers.ddpoptimizer_fast_gradient_clipping import (
    DistributedDPOptimizerFastGradientClipping,
)
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from torch import nn

from hidden_state_accountants import Assumption, UnsupportedRunError
from hidden_state_adapters.opacus.data.reading import drawn_rate, poisson_rate
from hidden_state_adapters.opacus.gradients.noise import (
    GIVEN_NOISE,
    OWN_NOISE,
    SECURE_NOISE,
    OwnGenerator,
    check_noise_source,
)
from hidden_state_adapters.opacus.run.group import num_processes
from hidden_state_adapters.opacus.sources.packed import refuse_packed_sequences
from hidden_state_adapters.opacus.stock.run import StockRun, check_processes, has_own_coins

_KINDS = (
    DPOptimizer,
    DPOptimizerFastGradientClipping,
    DistributedDPOptimizer,
    DistributedDPOptimizerFastGradientClipping,
)
_KNOWN: set[Any] = {kind.add_noise for kind in _KINDS}
"""What adds noise from `optimizer.generator` to sums that are still there afterwards."""


@attrs.define(eq=False)
class StepCount:
    """The steps that were recorded; all that is remembered of them with the parameters."""

    num_steps: int = 0


@attrs.define(eq=False)
class MadePrivate:
    """What `make_private` returned, and who records its steps.

    Attributes:
        sample_rate: What Opacus says of the sampling: 1 / len(data_loader).
        data_loader: None if it could not be found (a hook that was attached by hand).
        module: Likewise.
        optimizer: Likewise.
        is_calibrated: Whether make_private_with_epsilon found the noise.
        run: The declared run, or None.
        count: The recorded steps.
    """

    sample_rate: float
    data_loader: Any = None
    module: Any = None
    optimizer: DPOptimizer | None = None
    is_calibrated: bool = False
    run: StockRun | None = None
    count: StepCount = attrs.field(factory=StepCount)
    _writes: int = attrs.field(init=False)

    @_writes.default
    def _count_writes(self) -> int:
        return sum(p._version for p in getattr(self.optimizer, "params", ()))

    @classmethod
    def by_caller(cls, accountant: Any, sample_rate: float) -> MadePrivate:
        """What the engine with this accountant is making now.

        Opacus hands nothing but the sampling rate to its accountants, so everything else is read
        where make_private has it: in its own variables. Where they are not found (a hook that was
        attached by hand), there is nothing to declare.
        """
        frame = _frame_of("make_private", accountant, sys._getframe(1))
        if frame is None:
            return cls(sample_rate)
        made = frame.f_locals
        return cls(
            sample_rate,
            data_loader=made.get("data_loader"),
            module=made.get("module"),
            optimizer=made.get("optimizer"),
            is_calibrated=_frame_of("make_private_with_epsilon", accountant, frame) is not None,
        )

    def prepare(self) -> None:
        """Refuses noise that was found for other batches, and draws coins of our own.

        Opacus' Poisson sampler takes torch's default generator, which every script seeds: whoever
        knows the seed knows which batches held a record, and sampling amplifies nothing. A
        generator that the user gave the loader stays, and so do those of several processes, which
        have to toss the same coins.

        Raises:
            UnsupportedRunError: The noise was found for other batches, empty ones are filled, or a
                layer lets a record do more than the clip says.
        """
        if self.is_calibrated and poisson_rate(self.data_loader) > 1:
            raise UnsupportedRunError(
                "Expected a Poisson loader (poisson_sampling=True) in make_private_with_epsilon of "
                f"a PrivacyEngine, got {type(self.data_loader).__name__} with other batches: "
                "Opacus finds the noise for Poisson batches, and with these epsilon would miss the "
                "target. Use make_private_with_epsilon of HiddenStatePrivacyEngine, or find the "
                "noise with hidden_state_accountants.calibrate_noise and call make_private."
            )
        if getattr(getattr(self.data_loader, "collate_fn", None), "rand_on_empty", False):
            raise UnsupportedRunError(
                "Expected rand_on_empty = False, got True: it puts a made-up record into an empty "
                "batch, so that one record more or less changes the sum by two clip norms. Leave "
                "it out: empty batches are steps like others."
            )
        if isinstance(self.inner, nn.Module):
            _check_layers(self.inner)
        sampler: Any = getattr(self.data_loader, "batch_sampler", None)
        if type(sampler) is UniformWithReplacementSampler and sampler.generator is None:
            sampler.generator = OwnGenerator(torch.device("cpu"))

    @property
    def inner(self) -> Any:
        """The model itself, behind Opacus' wrapper or its hooks; None if it is not known."""
        return getattr(self.module, "_module", self.module)

    @property
    def has_own_coins(self) -> bool:
        """Whether `prepare` gave the sampler its generator."""
        return has_own_coins(getattr(self.data_loader, "batch_sampler", None))

    def check_undeclared(self) -> None:
        """Raises UnsupportedRunError if a loader that is known does not deal Poisson batches."""
        if self.data_loader is None:
            return
        check_processes(self.data_loader, num_processes(self.optimizer))
        if poisson_rate(self.data_loader) > drawn_rate(self.sample_rate) * (1 + 1e-9):
            raise UnsupportedRunError(
                "Expected a Poisson loader that samples at a rate of 1 / len(data_loader) = "
                f"{self.sample_rate:g} for a run that was not declared, got a "
                f"{type(self.data_loader).__name__} with other batches (poisson_sampling=False?): "
                "the epsilon that stock accountants report is not one of this run. Call "
                "engine.accountant.declare_run() before the first step: it reads the loader, and "
                "without further arguments epsilon is that of composition."
            )

    def check_moved(self) -> None:
        """Raises UnsupportedRunError if no step was recorded, but the parameters were written."""
        if self._count_writes() != self._writes:
            raise UnsupportedRunError(
                "Expected a step of the optimizer that make_private returned, got none, but "
                "parameters that were written since: by another optimizer, by hand, or with "
                "another step hook (attach_step_hook has a single slot). Train with that "
                "optimizer; load public weights before make_private."
            )


def _check_layers(module: nn.Module) -> None:
    """Raises UnsupportedRunError for embeddings that write to their rows in a forward pass.

    Recurrent layers raise it from then on when they are called with packed sequences.
    """
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None:
            raise UnsupportedRunError(
                f"Expected layers that leave their parameters alone, got {type(layer).__name__} "
                f"{name} with max_norm = {layer.max_norm:g}: it shortens the rows that a batch "
                "uses, without noise. Leave max_norm out; max_grad_norm bounds what a record does."
            )
    refuse_packed_sequences(module)


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
    if optimizer.generator is not None:
        return SECURE_NOISE if optimizer.secure_mode else GIVEN_NOISE
    params = optimizer.params
    check_noise_source(params, None)
    optimizer.generator = OwnGenerator(params[0].device)
    if not getattr(optimizer, "rank", 0):  # of several processes the first alone adds noise
        for p in params:
            vars(p.summed_grad).pop("_processed", None)  # Opacus refuses to use a sum twice
        optimizer.add_noise()
        optimizer.scale_grad()
    return OWN_NOISE


def _frame_of(name: str, accountant: Any, frame: FrameType | None) -> FrameType | None:
    """The running call of a method of the `opacus.PrivacyEngine` that has the accountant."""
    while frame is not None:
        is_of_opacus = frame.f_globals.get("__name__") == "opacus.privacy_engine"
        if is_of_opacus and frame.f_code.co_name == name:
            engine = frame.f_locals.get("self")
            return frame if getattr(engine, "accountant", None) is accountant else None
        frame = frame.f_back
    return None
