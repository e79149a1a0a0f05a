"""The batches that a plan deals of the examples of a run."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tensorflow as tf

from hidden_state_accountants import BatchOrder, UnsupportedRunError
from hidden_state_accountants.events.batch_order import BINS
from hidden_state_adapters.batch_plans import (
    BatchPlan,
    BinsPlan,
    FixedPlan,
    RandomKeys,
    ReshuffledPlan,
    SampledPlan,
    poisson_plan,
)

FEWEST_ROWS = 2  # of a batch on the device, padding included


class Dealer:
    """Draws the batch of a step when it is asked for, once.

    Attributes:
        period: Batches of an epoch.

    Args:
        plan: Which examples each step uses.
        multiple: Indices of a batch are `filled` up to one of it.
        period: Batches of an epoch.
    """

    def __init__(self, plan: BatchPlan, multiple: int, period: int):
        self._plan, self._multiple, self.period = plan, multiple, period

    def deal(self, step: int) -> tuple[Any, Any]:
        """Returns the rows of a step, and the examples of its batch filled up with the first."""
        if step % self.period == 0:
            self._plan.start_pass(step)
        chosen = self._plan.batch(step)
        rows = len(chosen)
        indices = np.zeros(filled(rows, self._multiple), np.int64)
        indices[:rows] = chosen
        return np.int64(rows), indices

    def deal_all(self, first: int, last: int) -> tuple[Any, Any]:
        """Returns those of several steps, stacked, with as many indices as the largest batch."""
        rows, indices = zip(*map(self.deal, range(first, last)), strict=True)
        stacked = np.zeros((len(rows), max(map(len, indices))), np.int64)
        for place, own in zip(stacked, indices, strict=True):
            place[: len(own)] = own
        return np.array(rows), stacked


def plan_of(
    order: BatchOrder,
    examples: int,
    batch_size: int,
    *,
    max_batch_size: int | None,
    drop_remainder: bool,
    sampling_rate: float | None = None,
) -> BatchPlan:
    """The batches of a run, drawn by the operating system where they are random.

    Args:
        order: The batch order that is accounted.
        examples: Their number.
        batch_size: b; FULL has one batch of all examples, whatever it is.
        max_batch_size: The cap of POISSON batches and balls in bins, or None.
        drop_remainder: Leaves out the last examples that do not fill a batch of an order with equal
            batches.
        sampling_rate: Constant rate of POISSON batches; None to compute it, and the divisor, from
            the number of examples.

    Raises:
        UnsupportedRunError: Equal batches cannot be made.
    """
    keys = RandomKeys()
    records = range(examples)
    if sampling_rate is not None:
        plan = SampledPlan(records, batch_size, order, keys, sampling_rate=sampling_rate)
        plan.dataset_size = max(batch_size, round(batch_size / sampling_rate))
        return plan
    if order is BatchOrder.FULL:
        return FixedPlan(records, len(records), order)
    if batch_size > examples:
        raise UnsupportedRunError(
            f"Expected batch_size <= {examples}, the number of examples, got {batch_size}. Lower "
            "it."
        )
    if order in BINS:
        return BinsPlan(records, batch_size, order, keys, max_batch_size)
    if order is BatchOrder.POISSON:
        return poisson_plan(records, -(-examples // batch_size), keys, max_batch_size)
    if order is BatchOrder.WITHOUT_REPLACEMENT:
        return SampledPlan(records, batch_size, order, keys)
    used = examples // batch_size * batch_size
    if used != examples:
        if not drop_remainder:
            raise UnsupportedRunError(
                f"Expected a batch_size that divides the {examples} examples, got {batch_size}: "
                f"{order.value} batches must all have the same size. Choose another size, pass "
                f"drop_remainder=True to use only the first {used} examples, or use "
                'batch_order="poisson" (the default) or "without_replacement", which take any '
                "batch size."
            )
        records = range(used)
    if order is BatchOrder.RESHUFFLED:
        return ReshuffledPlan(records, batch_size, keys)
    return FixedPlan(
        records, batch_size, order, keys if order is BatchOrder.SHUFFLED_ONCE else None
    )


def multiple_of_sizes(*, is_compiled: bool, expected: int) -> int:
    """What the rows of every batch are filled up to a multiple of.

    XLA compiles every size anew, so that random sizes, which spread by the root of their mean, are
    filled up to a few: more than 7 are rare, and half a spread of rows is in vain.

    Args:
        is_compiled: Whether XLA compiles the step, and sizes are random.
        expected: Rows of a batch, on average.
    """
    return math.ceil(math.sqrt(expected)) if is_compiled else 1


def filled(rows: Any, multiple: int) -> Any:
    """How many rows a batch is filled up to, as a tensor if `rows` is one; see above.

    A batch has at least `FEWEST_ROWS` on the device: not every operation takes none, and TensorFlow
    cannot vectorize every one over a single row.
    """
    parts, fewest = -(-rows // multiple), -(-FEWEST_ROWS // multiple)
    return multiple * (tf.maximum(parts, fewest) if tf.is_tensor(parts) else max(parts, fewest))
