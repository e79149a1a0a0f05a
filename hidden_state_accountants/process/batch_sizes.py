r"""The sizes of POISSON batches: which ones to reckon with, and what each does to the modulus.

The modulus of a step depends on the number of gradients that it sums. In a long run nearly all
batches are about as large as on average, so that products of moduli are much smaller than those of
the largest batch that may occur (docs/theory/random_distance.md).
"""

from __future__ import annotations

import bisect
import functools

import attrs
import numpy as np
from dp_accounting import NeighboringRelation
from scipy import stats

from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.process import geometry
from hidden_state_accountants.process.noisy_process import clips_act

_MOST_MODULI = 4_000_000  # distinct steps times sizes
_SAME = 1e-12  # moduli whose logarithms differ by less do not depend on the size


@attrs.frozen
class BatchSizes:
    """The sizes |R_t| of the batches without the record, outside of which a run rarely gets.

    Attributes:
        smallest: Of R_t.
        largest: Of R_t and the record together.
        fewest: How many records may be in R_t, in the smaller case. Under ADD_OR_REMOVE_ONE the
            records that are declared are those of either data set.
        others: How many may be, in the larger case.
        rate: The probability that one of them is.
        failure: Bounds the probability that a size of the run is outside.
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
    """The smallest size that batches with the record exceed with probability `failure` at most.

    P(|R_t| + 1 > size) = P(Binomial(others, q) >= size) is the same for both data sets.
    """
    # binom.isf goes through 1 - failure, which loses all digits
    size = bisect.bisect_left(
        range(event.dataset_size + 1),
        True,
        lo=1,
        key=lambda k: event.overfull_delta(relation, k) <= failure,
    )
    return size if event.max_batch_size is None else min(size, event.max_batch_size)


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

    Any line above is valid: the chord and the slope at the expected size are tried. None, too,
    where there are too many different steps to look at every size.
    """
    num_steps = event.num_steps
    event = event.one_step_if_constant()
    assert event.loss is not None
    steps = np.stack(
        [event.per_step("learning_rate"), event.per_step("weight_decay"), clips_act(event)]
    )
    number = np.arange(sizes.smallest, sizes.largest + 1)
    most = _MOST_MODULI // len(number)
    if max(len(np.unique(row)) for row in steps) > most:  # rows are slow to sort
        return None
    rows, index = np.unique(steps, axis=1, return_inverse=True)
    if rows.shape[1] > most:
        return None
    eta, decay, clipped = (row[:, None] for row in rows)
    share = np.maximum(number, 1) / event.batch_size
    moduli = geometry.update_lipschitz(event.loss, eta * share, decay / share, clipped > 0)
    moduli = np.where(number > 0, moduli, np.abs(1 - eta * decay))
    if relation is NeighboringRelation.REPLACE_ONE:
        moduli = np.maximum(moduli[:, :-1], moduli[:, 1:])
    else:
        moduli = moduli[:, :-1]
    logs = np.log(np.maximum(moduli, geometry.SMALLEST_MODULUS))
    if np.ptp(logs, axis=1).max() < _SAME:
        return None
    number = number[:-1]
    intercept, slope = _lines(number, logs, sizes.others * sizes.rate)
    if not slope.any():
        return None
    per_step = functools.partial(np.broadcast_to, shape=(num_steps,))
    return ModulusLines(per_step(intercept[index.ravel()]), per_step(slope[index.ravel()]))


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
