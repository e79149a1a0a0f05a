"""The coins that decide which records join a Poisson batch of a stock loader."""

from __future__ import annotations

from typing import Any

import torch
from opacus.utils.uniform_sampler import UniformWithReplacementSampler

from hidden_state_adapters.opacus.gradients.noise import OwnGenerator


def take_over_coins(data_loader: Any) -> None:
    """Lets a loader that Opacus made toss its coins with a generator of our own.

    Opacus takes torch's default generator, which every script seeds: whoever knows the seed knows
    which batches held a record, and sampling amplifies nothing. A generator that the user gave the
    loader stays, and so do those of several processes, which have to toss the same coins.
    """
    sampler: Any = getattr(data_loader, "batch_sampler", None)
    if type(sampler) is UniformWithReplacementSampler and sampler.generator is None:
        sampler.generator = OwnGenerator(torch.device("cpu"))


def has_own_coins(batch_sampler: Any) -> bool:
    """Whether `take_over_coins` gave the sampler its generator."""
    return isinstance(getattr(batch_sampler, "generator", None), OwnGenerator)
