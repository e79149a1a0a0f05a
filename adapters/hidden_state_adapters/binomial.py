"""The number of n records that join a batch, drawn from uniform bits."""

from __future__ import annotations

import bisect
import itertools

_WEIGHT_BITS = 256
DRAWN_BITS = 256  # uniform ones for each number


class Binomial:
    r"""The number of successes among independent trials, by inversion of its distribution function.

    The weights are integers, found from the largest one by the ratios of neighbours, each rounded
    down, so that after j of them a weight is too small by less than j + 1. With J weights that are
    not 0, of which the largest is :math:`2^{256}`, the distance from the binomial law in total
    variation is therefore below :math:`(J + 2)^2 2^{-256}`: less than :math:`2^{-200}` for up to a
    hundred million of them, where J is about 38 standard deviations.

    Args:
        trials: Number of trials, >= 0.
        share: The probability of a success times 2**64, in 0 to 2**64; it is met exactly.
    """

    def __init__(self, trials: int, share: int):
        rest = 2**64 - share
        mode = min(trials, (trials + 1) * share >> 64)

        def above() -> list[int]:
            weights, weight, at = [], 2**_WEIGHT_BITS, mode
            while at < trials and (weight := weight * (trials - at) * share // ((at + 1) * rest)):
                weights.append(weight)
                at += 1
            return weights

        def below() -> list[int]:
            weights, weight, at = [], 2**_WEIGHT_BITS, mode
            while at and (weight := weight * at * rest // ((trials - at + 1) * share)):
                weights.append(weight)
                at -= 1
            return weights

        smaller = below()
        self._smallest = mode - len(smaller)
        weights = [*reversed(smaller), 2**_WEIGHT_BITS, *above()]
        self._upto = list(itertools.accumulate(weights))

    def at(self, uniform: int) -> int:
        """The number that belongs to a uniform integer below 2**`DRAWN_BITS`."""
        place = uniform * self._upto[-1] >> DRAWN_BITS
        return self._smallest + bisect.bisect_right(self._upto, place)
