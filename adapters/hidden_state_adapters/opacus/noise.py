"""Noise from generators of our own, which no seed of a program reaches."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
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

_KNOWN = ("cpu", "cuda")  # types of devices whose state can be drawn in full
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
        if self.device.type not in _KNOWN:
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
            "known or repeated protects nobody. Seed the rest of the program as you like; for "
            "noise of your own pass noise_generator=."
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


def check_noise_source(
    params: Iterable[torch.Tensor], generator: Any, *, is_secure: bool = False
) -> None:
    """Checks, before a run starts, that its noise can be drawn.

    Args:
        params: Trainable parameters.
        generator: Generator of the user, or None.
        is_secure: True for the generator of torchcsprng, which serves all devices.

    Raises:
        TypeError: `generator` is no torch.Generator.
        ValueError: It is on another device than the parameters.
        UnsupportedRunError: The parameters are where no noise can be drawn.
    """
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(
            "Expected noise_generator to be a torch.Generator or None, got "
            f"{type(generator).__name__}."
        )
    devices = list(dict.fromkeys(p.device for p in params))
    if len(devices) > 1:
        raise UnsupportedRunError(
            f"Expected all trainable parameters on one device, got {devices}: one generator draws "
            "the noise of a run. Move the model before make_private."
        )
    for device in devices:
        if device.type not in _KNOWN and not _makes_generators(device):
            raise UnsupportedRunError(
                f"Expected parameters where torch draws random numbers, got {device}: private "
                "noise is not supported there. Move the model before make_private, with "
                'model.to("cpu").'
            )
        if generator is not None and not is_secure and not _serves(generator.device, device):
            raise ValueError(
                f"Expected a noise_generator on {device}, where the parameters are, got one on "
                f"{generator.device}. Leave it out, or make it with torch.Generator({str(device)!r}"
                ")."
            )


def _makes_generators(device: torch.device) -> bool:
    try:
        torch.Generator(device)
    except (RuntimeError, NotImplementedError, AssertionError):  # each backend has its own
        return False
    return True


def _serves(own: torch.device, device: torch.device) -> bool:
    return own.type == device.type and own.index in (None, device.index)
