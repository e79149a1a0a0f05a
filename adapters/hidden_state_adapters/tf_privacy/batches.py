"""The batches of a plan, filled up for the device."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tensorflow as tf

from hidden_state_adapters.batch_plans import BatchPlan

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


def multiple_of_sizes(*, is_compiled: bool, expected: int) -> int:
    """Returns the number that the rows of every batch are filled up to a multiple of.

    XLA compiles every size anew, so that random sizes, which spread by the root of their mean, are
    filled up to a few: more than 7 are rare, and half a spread of rows is in vain.
    """
    return math.ceil(math.sqrt(expected)) if is_compiled else 1


def filled(rows: Any, multiple: int) -> Any:
    """Returns the number of rows that a batch is filled up to, a tensor if `rows` is one.

    A batch has at least `FEWEST_ROWS` on the device: not every operation takes none, and TensorFlow
    cannot vectorize every one over a single row.
    """
    parts, fewest = -(-rows // multiple), -(-FEWEST_ROWS // multiple)
    return multiple * (tf.maximum(parts, fewest) if tf.is_tensor(parts) else max(parts, fewest))
