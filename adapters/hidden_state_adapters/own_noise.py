"""Noise from a generator that no seed of a program reaches."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from hidden_state_accountants import Assumption

_WORDS = 624  # of a Mersenne Twister

OWN_NOISE = Assumption.checked(
    "noise from a generator of its own, whose whole state the operating system drew "
    "for this fit and which is gone after it; no seed of the program reaches it (a fast generator, "
    "not a cryptographic one)"
)


class OwnGenerator:
    """A NumPy generator whose state the operating system draws, once, and nobody knows.

    All 19937 bits of the Mersenne Twister are drawn. Who knows the state knows the noise, so it
    can be neither copied nor pickled.
    """

    def __init__(self) -> None:
        bits = np.random.MT19937()
        words = np.frombuffer(os.urandom(4 * _WORDS), dtype=np.uint32)
        bits.state = {"bit_generator": "MT19937", "state": {"key": words, "pos": _WORDS}}
        self._generator = np.random.Generator(bits)

    def normal(self, std: float, shape: tuple[int, ...]) -> np.ndarray:
        """Gaussian noise, float64."""
        return std * self._generator.standard_normal(shape)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "Expected a noise generator to stay where it is, got an attempt to copy or pickle it: "
            "noise that is known or repeated protects nobody."
        )
