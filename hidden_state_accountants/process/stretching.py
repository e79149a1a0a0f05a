r"""Bounds on how much several steps in a row stretch a distance.

The modulus of a step depends on the number of gradients that it sums. In a long run nearly all
POISSON batches are about as large as on average, so that products of moduli are much smaller than
those of the largest batch that may occur. On the event that no size leaves the planned range,
:math:`\log c_t \le A_t + B_t k_t`, and Chernoff's bound on the sum of the sizes holds for any
:math:`\theta > 0`:

.. math:: \sum_{i < t \le j} \log c_t \le \sum_{i < t \le j} \Big( A_t + \frac1\theta
          \log E\,e^{\theta B_t k_t} \Big) + \frac{1}{\theta} \log\frac1f
          \quad \text{except with probability } f.

A bound of this kind is a line in the number of steps, and so is the product of the largest moduli:
the smallest line counts (docs/theory/random_distance.md).
"""

from __future__ import annotations

import bisect
import math

import attrs
import numpy as np
from dp_accounting import NeighboringRelation
from scipy import stats

from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.process.noisy_process import (
    SMALLEST_MODULUS,
    clips_act,
    update_lipschitz,
)

_MOST_MODULI = 4_000_000  # steps that are looked at, times sizes
_NODES = 1024  # steps of a schedule that are looked at
_SAME = 1e-12  # moduli whose logarithms differ by less do not depend on the size
_RATIO = 1.7  # of neighbouring thetas
_MOST_LOGS = 8_000_000  # thetas times steps
_RARE = 1e-15  # probability of a batch that is larger than reckoned with


@attrs.frozen
class BatchSizes:
    """The sizes |R_t| of the batches without the record, outside of which a run rarely gets.

    `largest` counts the record, too. The records that are declared are those of either data set
    under ADD_OR_REMOVE_ONE, so that R_t has `fewest` records to draw from, each at `rate`, in the
    smaller case and `others` in the larger one. A size of the run is outside with probability
    `failure` at most.
    """

    smallest: int
    largest: int
    fewest: int
    others: int
    rate: float
    failure: float

    @classmethod
    def of(
        cls, event: LastIterateDpEvent, relation: NeighboringRelation, failure: float
    ) -> BatchSizes:
        """The sizes that a run without a cap leaves with probability `failure` at most.

        A cap cuts the largest size, and the probability that it ever acts counts.
        """
        largest = largest_size(event, relation, failure / 2)
        others = event.dataset_size - (relation is not NeighboringRelation.ADD_OR_REMOVE_ONE)
        fewest = event.dataset_size - 1
        rate = event.sampling_probability
        below = stats.binom(fewest, rate).cdf
        smallest = bisect.bisect_left(
            range(fewest + 1), True, key=lambda k: event.num_steps * below(k) > failure / 2
        )
        smallest = min(smallest, largest - 1)
        failed = event.overfull_delta(relation, largest)
        if smallest:
            failed += event.num_steps * float(below(smallest - 1))
        return cls(smallest, largest, fewest, others, rate, failed)


def largest_size(event: LastIterateDpEvent, relation: NeighboringRelation, failure: float) -> int:
    """The smallest size that batches with the record exceed with probability `failure` at most."""
    # binom.isf goes through 1 - failure, which loses all digits
    size = bisect.bisect_left(
        range(event.dataset_size + 1),
        True,
        lo=1,
        key=lambda k: event.overfull_delta(relation, k) <= failure,
    )
    return size if event.max_batch_size is None else min(size, event.max_batch_size)


def likely_size(event: LastIterateDpEvent, relation: NeighboringRelation) -> tuple[int, float]:
    """The largest size of batches but for rare ones, and a bound on the probability of those."""
    largest = largest_size(event, relation, _RARE)
    return largest, event.overfull_delta(relation, largest)


@attrs.frozen(eq=False)
class ModulusLines:
    """log c_t <= intercept_t + slope_t * |R_t| for all sizes that are reckoned with; shape (T,)."""

    intercept: np.ndarray
    slope: np.ndarray


def modulus_lines(
    event: LastIterateDpEvent,
    relation: NeighboringRelation,
    sizes: BatchSizes,
) -> ModulusLines | None:
    """Lines above the logarithms of the moduli; None if no modulus depends on the size.

    The modulus is that of the run without the record, whose batch is R_t; where the record is
    replaced, both data sets have it, and the larger one of |R_t| and |R_t| + 1 gradients counts.

    Any line above is valid: the chord and the slope at the expected size are tried. In a long
    schedule a few steps are looked at: moduli are convex in the learning rate, so that no step
    between two of them has a larger one. None, too, where there are too many to look at.
    """
    steps = event.one_step_if_constant()
    eta, decay, clipped = (
        steps.per_step("learning_rate"), steps.per_step("weight_decay"), clips_act(steps)
    )  # fmt: skip
    order = np.lexsort((eta, decay, clipped))
    eta, decay, clipped = eta[order], decay[order], clipped[order]
    changes = np.flatnonzero((decay[1:] != decay[:-1]) | (clipped[1:] != clipped[:-1]))
    is_node = np.arange(len(eta)) % math.ceil(len(eta) / _NODES) == 0
    is_node[changes] = is_node[changes + 1] = is_node[-1] = True
    number = np.arange(sizes.smallest, sizes.largest + 1)
    if is_node.sum() * len(number) > _MOST_MODULI:
        return None
    looked_at = [values[is_node, None] for values in (eta, decay, clipped)]
    logs = _log_moduli(steps, relation, looked_at, number)
    if np.ptp(logs, axis=1).max() < _SAME:
        return None
    # A step between two nodes has their decay and their clip: no modulus is above both of theirs.
    rows = np.concatenate([logs, np.maximum(logs[:-1], logs[1:])])
    intercept, slope = _lines(number[:-1], rows, sizes.others * sizes.rate)
    if not slope.any():
        return None
    node = np.cumsum(is_node) - 1
    found = np.empty((2, len(eta)))
    found[:, order] = np.stack([intercept, slope])[:, np.where(is_node, node, len(logs) + node)]
    return ModulusLines(*np.broadcast_to(found, (2, event.num_steps)))


def _log_moduli(
    event: LastIterateDpEvent,
    relation: NeighboringRelation,
    steps: list[np.ndarray],
    number: np.ndarray,
) -> np.ndarray:
    """log c at every number of gradients but the last, shape (steps, numbers - 1).

    The steps are learning rates, weight decays, and where the clips act, of shape (steps, 1).
    """
    assert event.loss is not None
    rates, decays, clipped = steps
    share = np.maximum(number, 1) / event.batch_size
    moduli = update_lipschitz(event.loss, rates * share, decays / share, clipped)
    moduli = np.where(number > 0, moduli, np.abs(1 - rates * decays))
    if relation is NeighboringRelation.REPLACE_ONE:
        moduli = np.maximum(moduli[:, :-1], moduli[:, 1:])
    else:
        moduli = moduli[:, :-1]
    return np.log(np.maximum(moduli, SMALLEST_MODULUS))


def _lines(number: np.ndarray, logs: np.ndarray, mean: float) -> tuple[np.ndarray, np.ndarray]:
    """Per row the lower one, at the mean, of two lines above all points."""
    middle = int(np.clip(round(mean) - number[0], 1, len(number) - 2)) if len(number) > 2 else 0
    slopes = [np.zeros(len(logs))]
    if len(number) > 1:
        slopes.append((logs[:, -1] - logs[:, 0]) / (number[-1] - number[0]))
    if len(number) > 2:
        slopes.append((logs[:, middle + 1] - logs[:, middle - 1]) / 2)
    intercepts = [(logs - slope[:, None] * number).max(axis=1) for slope in slopes]
    heights = np.stack([a + b * mean for a, b in zip(intercepts, slopes, strict=True)])
    best = np.argmin(heights, axis=0)
    rows = np.arange(len(logs))
    return np.stack(intercepts)[best, rows], np.stack(slopes)[best, rows]


@attrs.frozen(eq=False)
class Stretching:
    """Bounds on log(c_{i+1} ... c_j) that hold at once for the windows (i, j] of one plan.

    A line bounds each step by its `logs`, shape (lines, T), or (lines, 1) if all steps are equal,
    and adds its offset to every window that is not empty.
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

        `largest` are the c_t of the largest batch, `lines` bounds on log c_t in terms of the size.
        Each of the windows, at most T, may fail with a T-th of the probability `failure`.
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
