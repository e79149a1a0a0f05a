"""Composed privacy losses, quickly and roughly: good enough to choose a window, never to claim.

The characteristic function of the sum of independent losses is a product. A transform of a few
thousand numbers turns it into the law of the sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import attrs
import numpy as np
from scipy import fft, signal

from hidden_state_accountants.curves.profiles import Deltas, Profile

_CELLS = 2048
_FINER = 32  # cells of a single mechanism in one cell of the sum: its losses are much smaller
_SMALLEST = 1e-300  # delta has a logarithm
_VANISHED = -32.0  # logarithm of a characteristic function: less than its transform's error
_NODE_RATIO = 1.02  # of neighbouring losses of a single mechanism
# The losses that are looked at, by the epsilon: what is 20 above it counts as if it were infinite.
_REACH, _FAR, _ABOVE = 16.0, 3.0, 20.0


@attrs.frozen(eq=False)
class Window:
    """What dominates a segment: sampled mechanisms, and Gaussians that hide the shift.

    Attributes:
        sampled_mus: (mu, count): the sampled mechanism of a record with this mu, and how often.
        shift_mus: The mus of the Gaussians, ascending; the coins before the window choose one,
        shift_weights: with these probabilities, or
        rare: none of them: what is left to 1.
    """

    sampled_mus: tuple[tuple[float, int], ...]
    shift_mus: np.ndarray
    shift_weights: np.ndarray
    rare: float = 0.0


class QuickLosses:
    """Approximate epsilons of compositions of sampled mechanisms and Gaussian mixtures.

    Args:
        profile_of: The pair of a step whose batch is known to hold the record with a given mu.
        delta: Where epsilon is read.
        scale: About the epsilon that is looked for: larger ones are read off less well, and those
            that are several times as large not at all.
        count: How many times a window is composed.
    """

    def __init__(
        self, profile_of: Callable[[float], Profile], delta: float, scale: float, count: int = 1
    ):
        self._profile_of, self._delta, self._count = profile_of, delta, count
        reach = min(_REACH * scale, _FAR * scale + _ABOVE)
        self._steps: dict[float, np.ndarray] = {}
        self.width = 2 * reach / _CELLS
        self._frequencies = math.pi / reach * np.arange(_CELLS // 2 + 1)
        self._losses = self.width * np.arange(_CELLS // 2)

    def epsilon(self, window: Window) -> float:
        """Of what dominates a segment, `count` times; inf beyond the reach."""
        return self._crossing(self.deltas(window))

    def deltas(self, window: Window) -> np.ndarray:
        """At the epsilons 0, width, 2 width, ..."""
        total = np.zeros(len(self._frequencies), dtype=complex)
        for mu, count in window.sampled_mus:
            total += self._count * count * self._step(mu)
        alive = np.flatnonzero(total.real > _VANISHED)
        # The phase of the first frequency is pi times the mean loss over the reach. Losses beyond
        # the reach would come back from its other end, as small ones.
        near = self._is_near(window.shift_mus)
        shift = self._count * float(window.shift_weights[near] @ window.shift_mus[near] ** 2 / 2)
        if not len(alive) or shift * self._frequencies[1] - total[1].imag > math.pi:
            return np.ones(len(self._losses))  # nothing is left of the losses within the reach
        kept = 1 + int(alive[-1])
        spectrum = np.zeros(len(total), dtype=complex)
        spectrum[:kept] = np.exp(total[:kept])
        spectrum[:kept] *= (
            self._mixture(window.shift_mus, window.shift_weights, kept) ** self._count
        )
        # A law with atoms is smoothed, by few cells: a transform that is cut off would ring.
        last = math.log(max(abs(spectrum[-1]), _SMALLEST))
        spectrum *= np.exp(-max(0.0, last - _VANISHED) * np.linspace(0, 1, len(spectrum)) ** 2)
        law = fft.irfft(spectrum, _CELLS)[: _CELLS // 2]
        infinite = 1 - float(spectrum[0].real)
        above = np.cumsum(law[::-1])[::-1]
        # sum over x > epsilon of p(x) exp(epsilon - x), from the last loss on
        discounted = signal.lfilter([1.0], [1.0, -math.exp(-self.width)], law[::-1])[::-1]
        return np.asarray(np.maximum(infinite + above - discounted, _SMALLEST))

    def _crossing(self, deltas: np.ndarray) -> float:
        first = int(np.argmax(deltas <= self._delta))
        if deltas[first] > self._delta:
            return math.inf
        if first == 0:
            return 0.0
        low, high = np.log(deltas[first - 1 : first + 1]).tolist()
        share = (low - math.log(self._delta)) / (low - high) if low > high else 1.0
        return (first - 1 + share) * self.width

    def _step(self, mu: float) -> np.ndarray:
        """The logarithm of the characteristic function of one step, without infinite losses."""
        if mu not in self._steps:
            fine = self.width / _FINER
            profile = self._profile_of(mu)
            last = min(_CELLS // 2 * _FINER, math.ceil(profile.largest / fine) + 1)
            nodes = np.unique(
                np.geomspace(1, last, 2 + int(math.log(last) / math.log(_NODE_RATIO))).astype(int)
            )
            above = _masses(profile.forward, nodes * fine)
            below = _masses(profile.backward, nodes * fine)
            law = np.zeros(_CELLS * _FINER)
            np.add.at(law, nodes, above)
            np.add.at(law, -nodes, below * np.exp(-nodes * fine))
            infinite = float(profile.forward(np.array(nodes[-1] * fine)))
            law[0] += max(0.0, 1 - infinite - law.sum())
            transform = fft.rfft(law)[: len(self._frequencies)]
            self._steps[mu] = np.log(np.where(transform == 0, _SMALLEST, transform))
        return self._steps[mu]

    def _mixture(self, mus: np.ndarray, weights: np.ndarray, number: int) -> np.ndarray:
        """The characteristic function of the shift, at the first frequencies."""
        frequencies, near = self._frequencies[:number], self._is_near(mus)
        squares = mus[near, None] ** 2 / 2
        turns = np.repeat(np.exp(-1j * squares * self._frequencies[1]), number, axis=1)
        turns[:, 0] = 1.0
        np.cumprod(turns, axis=1, out=turns)  # the frequencies are multiples of one
        turns *= np.exp(-squares * frequencies**2)
        return np.asarray(weights[near] @ turns)

    def _is_near(self, mus: np.ndarray) -> np.ndarray:
        """Where mu**2 / 2 + 6 mu is within the reach; other losses are infinite."""
        return np.asarray(mus < math.sqrt(36 + 2 * self._losses[-1]) - 6)


def _masses(deltas: Deltas, losses: np.ndarray) -> np.ndarray:
    """What lies around each loss > 0, by the polygon through the divergences."""
    known = deltas(np.concatenate([[0.0], losses]))
    steps = np.diff(np.concatenate([[0.0], losses]))
    falls = known[:-1] - known[1:]
    masses = falls / -np.expm1(-steps)
    with np.errstate(over="ignore"):  # far above all losses that are looked at
        masses[:-1] -= falls[1:] / np.expm1(steps[1:])
    return np.maximum(masses, 0.0)
