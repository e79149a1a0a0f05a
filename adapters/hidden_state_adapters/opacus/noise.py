"""Noise from generators of our own, which no seed of a program reaches."""

from __future__ import annotations

import os
import secrets
from typing import Any

import numpy as np
import torch
from opacus.optimizers import DPOptimizer

from hidden_state_accountants import Assumption, UnsupportedRunError

OWN_NOISE = Assumption.checked(
    "noise from a generator of its own, whose state the operating system drew and no seed of the "
    "program reaches (a fast generator, not a cryptographic one: that is secure_mode=True)"
)
GIVEN_NOISE = Assumption.declared(
    "noise_generator has a random seed that nobody else ever knows, and gives no other noise"
)
DEFAULT_NOISE = Assumption.declared(
    "the seed of torch's default generator, which the noise of a step hook that was attached by "
    "hand comes from, is random, and nobody else ever knows it"
)
SECURE_NOISE = Assumption.declared(
    "secure_mode: its generator reads the operating system's cryptographic source"
)

_WORDS = 624  # of a Mersenne Twister
_PLACE = slice(24, 24 + 8 * _WORDS)  # of the words in the bytes of torch's state


class OwnGenerator(torch.Generator):
    """A torch.Generator whose state the operating system draws, once, and nobody knows.

    It can be neither seeded, read, copied nor pickled: noise that is known or repeated protects
    nobody. On a CPU all 19937 bits of the Mersenne Twister are drawn, of which `manual_seed` would
    read 32; on a CUDA device Philox gets a seed of 64 bits and an offset of 60; elsewhere the
    seed has 64 bits. None of them is cryptographic: `secure_mode` is.
    """

    def __init__(self, device: torch.device):
        if self.device.type not in ("cpu", "cuda"):
            super().manual_seed(secrets.randbits(64))
            return
        state = super().get_state()
        if self.device.type == "cpu":
            words = np.frombuffer(os.urandom(4 * _WORDS), dtype=np.uint32).astype(np.uint64)
            state[_PLACE] = torch.from_numpy(words.view(np.uint8))
        else:
            seed_and_offset = [secrets.randbits(64), 4 * secrets.randbits(60)]
            state = torch.from_numpy(np.array(seed_and_offset, dtype=np.uint64).view(np.uint8))
        super().set_state(state)

    def _refuse(self, *args: Any) -> Any:
        raise UnsupportedRunError(
            "The noise generator of a run cannot be seeded, read, copied or pickled: noise that is "
            "known or repeated protects nobody. For noise of your own pass noise_generator=."
        )

    manual_seed = seed = get_state = set_state = clone_state = _refuse
    get_offset = set_offset = graphsafe_get_state = graphsafe_set_state = _refuse
    __reduce__ = __reduce_ex__ = _refuse


def whose_noise(optimizer: DPOptimizer) -> Assumption:
    """Lists the generator that the noise comes from."""
    if isinstance(optimizer.generator, OwnGenerator):
        return OWN_NOISE
    if optimizer.generator is None:
        return DEFAULT_NOISE
    return SECURE_NOISE if optimizer.secure_mode else GIVEN_NOISE
