"""Noise and batches from a generator that no seed of a program reaches."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from hidden_state_accountants import Assumption

_WORDS = 624  # of a Mersenne Twister
_FRACTIONS = 2.0**53  # that Generator.random returns, over this number

OWN_NOISE = Assumption.checked(
    "noise and batches from a generator of their own, whose whole state the operating system drew "
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

    def permutation(self, count: int) -> np.ndarray:
        """A uniform order of range(count)."""
        return self._generator.permutation(count)

    def members(self, count: int, rate: float) -> np.ndarray:
        """The indices of range(count) that join, each by itself.

        With the probability `rate`, rounded down to a multiple of 2**-53.
        """
        return np.flatnonzero(
            self._generator.random(count) < np.floor(rate * _FRACTIONS) / _FRACTIONS
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "Expected a noise generator to stay where it is, got an attempt to copy or pickle it: "
            "noise that is known or repeated protects nobody."
        )
