"""Row counts of batches that are said to be Poisson batches."""

from __future__ import annotations

import math

from opacus.optimizers import DPOptimizer
from scipy import stats

_OVERWHELMING = 1e-12


class RowCounts:
    """Notices that the batches of a run all have one size, which Poisson batches do not have.

    The number of rows of a Poisson batch is Binomial(n, q), of which no value has a probability
    above p, that of its mode. That the first k batches are of one size, whichever, has at most
    probability p^(k - 1). Below 1e-12 that is taken for evidence; honest runs meet it as rarely,
    because only the first batches of a run count.

    Batches in several pieces, accumulated ones and ghost clipping hide their rows: from then on
    nothing is said.

    Args:
        expected: n q, rounded down: the expected rows of a batch of this process.
        sample_rate: q.
    """

    def __init__(self, expected: float, sample_rate: float):
        sample_rate = min(1.0, sample_rate)
        size = max(1, math.floor(expected / sample_rate))
        mode = math.floor((size + 1) * sample_rate)
        self._largest = float(stats.binom.pmf(min(mode, size), size, sample_rate))
        self._first: int | None = None
        self._count, self._is_over = 0, False

    def why_not_poisson(self, optimizer: DPOptimizer) -> str:
        """Counts the step that `optimizer` is about to take; the evidence so far, or ""."""
        rows = None if self._is_over else _rows(optimizer)
        self._first = rows if self._first is None else self._first
        if rows is None or rows != self._first:
            self._is_over = True
            return ""
        self._count += 1
        if self._largest ** (self._count - 1) >= _OVERWHELMING:
            return ""
        return (
            f"Expected Poisson batches, got {rows} rows in each of the first {self._count} "
            "batches, which Poisson sampling does with a probability below "
            f"{_OVERWHELMING:g}: the epsilon that stock accountants report is not one of this run. "
            "Train on the loader that make_private returned."
        )


def _rows(optimizer: DPOptimizer) -> int | None:
    """The rows of the batch, where one backward pass left them all; else None."""
    if optimizer._is_last_step_skipped:
        return None
    sample = getattr(optimizer.params[0], "grad_sample", None)
    if isinstance(sample, list):
        sample = sample[0] if len(sample) == 1 else None
    return None if sample is None else len(sample)
