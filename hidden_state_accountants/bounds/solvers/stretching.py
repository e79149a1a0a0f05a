r"""How much several steps in a row can stretch a distance.

Where the sizes of the batches are random, a product of moduli is bounded with high probability: on
the event that no size leaves the planned range, :math:`\log c_t \le A_t + B_t k_t`, and Chernoff's
bound on the sum of the sizes holds for any :math:`\theta > 0`:

.. math:: \sum_{i < t \le j} \log c_t \le \sum_{i < t \le j} \Big( A_t + \frac1\theta
          \log E\,e^{\theta B_t k_t} \Big) + \frac{1}{\theta} \log\frac1f
          \quad \text{except with probability } f.

A bound of this kind is a line in the number of steps, and so is the product of the largest moduli:
the smallest line counts (docs/theory/random_distance.md).
"""

from __future__ import annotations

import math

import attrs
import numpy as np

from hidden_state_accountants.process.batch_sizes import BatchSizes, ModulusLines
from hidden_state_accountants.process.noisy_process import SMALLEST_MODULUS

_RATIO = 1.7  # of neighbouring thetas
_COARSER = 2  # lines for one of a rough bound
_MOST_LOGS = 8_000_000  # thetas times steps


@attrs.frozen(eq=False)
class Stretching:
    """Bounds on log(c_{i+1} ... c_j) that hold at once for the windows (i, j] of one plan.

    Attributes:
        logs: Slopes of the lines: per line the bound on each step, shape (lines, T), or (lines, 1)
            if all steps are equal.
        offsets: What each line adds to every window that is not empty, shape (lines,).
        num_steps: T.
    """

    logs: np.ndarray
    offsets: np.ndarray
    num_steps: int
    _sums: np.ndarray | None = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        sums = None
        if self.logs.shape[1] > 1:
            sums = np.concatenate([np.zeros((len(self.logs), 1)), np.cumsum(self.logs, axis=1)], 1)
        object.__setattr__(self, "_sums", sums)

    @classmethod
    def of_moduli(cls, contraction: np.ndarray, is_constant: bool) -> Stretching:
        """The product of given moduli c_t, shape (T,)."""
        moduli = contraction[:1] if is_constant else contraction
        return cls(
            np.log(np.maximum(moduli, SMALLEST_MODULUS))[None, :], np.zeros(1), len(contraction)
        )

    @classmethod
    def of_sizes(
        cls,
        largest: np.ndarray,
        lines: ModulusLines,
        sizes: BatchSizes,
        failure: float,
        is_constant: bool,
    ) -> Stretching:
        """The product of moduli that depend on the sizes of batches.

        Args:
            largest: c_t of the largest batch, shape (T,).
            lines: Bounds on log c_t in terms of the size.
            sizes: The law of the sizes.
            failure: The probability with which a plan may fail: of each of its windows, at most T,
                a T-th.
            is_constant: Whether all steps are equal.
        """
        num_steps, shown = len(largest), slice(0, 1) if is_constant else slice(None)
        intercept, slope = lines.intercept[shown], lines.slope[shown]
        spread = np.abs(slope[slope != 0]) * math.sqrt(sizes.others * sizes.rate)
        needed = math.log(num_steps / failure)
        # The theta that is best for L equal steps is sqrt(2 needed / L) / spread.
        high = math.sqrt(2 * needed) / float(spread.min())
        low = math.sqrt(2 * needed / num_steps) / float(spread.max()) / _RATIO
        number = 2 + math.ceil(math.log(high / low) / math.log(_RATIO))
        number = min(number, max(2, _MOST_LOGS // len(intercept)))
        thetas = np.geomspace(low, high, number)[:, None]
        with np.errstate(over="ignore"):
            each = np.log1p(sizes.rate * np.expm1(thetas * slope))
            means = np.maximum(sizes.fewest * each, sizes.others * each)
        plain = np.log(np.maximum(largest[shown], SMALLEST_MODULUS))
        logs = np.concatenate([plain[None, :], intercept + means / thetas])
        offsets = np.append(0.0, needed / thetas[:, 0])
        finite = np.isfinite(logs).all(axis=1)  # exp(theta B) may overflow for uneven steps
        return cls(logs[finite], offsets[finite], num_steps)

    def between(self, start: int, stop: int) -> Stretching:
        """The same for steps start + 1 .. stop alone."""
        logs = self.logs if self._sums is None else self.logs[:, start:stop]
        return Stretching(logs, self.offsets, stop - start)

    def rough(self) -> Stretching:
        """Somewhat larger bounds by fewer lines, good enough to choose a window."""
        kept = np.arange(len(self.logs)) % _COARSER == 0
        return Stretching(self.logs[kept], self.offsets[kept], self.num_steps)

    def log_product(self, start: int | range, stop: int | range) -> np.ndarray:
        """The bound for the windows (start, stop], of the shape of the range if there is one."""
        starts, stops = _indices(start), _indices(stop)
        smallest = np.full(np.broadcast_shapes(starts.shape, stops.shape), np.inf)
        here, there = _places(start), _places(stop)
        for line, offset in enumerate(self.offsets.tolist()):
            if self._sums is None:
                total = self.logs[line, 0] * (stops - starts)
            else:
                total = self._sums[line, there] - self._sums[line, here]
            np.minimum(smallest, total + offset, out=smallest)
        return np.where(stops > starts, smallest, 0.0)


def _indices(steps: int | range) -> np.ndarray:
    return np.arange(steps.start, steps.stop) if isinstance(steps, range) else np.array(steps)


def _places(steps: int | range) -> int | slice:
    return slice(steps.start, steps.stop) if isinstance(steps, range) else steps
