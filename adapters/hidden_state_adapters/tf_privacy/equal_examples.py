"""Whether an example is in the data more than once."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import tensorflow as tf

_logger = logging.getLogger("hidden_state_accountants")


def warn_of_equal_examples(arrays: Any) -> None:
    """Logs a warning if two examples are equal, their targets included.

    Nothing is wrong if they belong to different persons, which nobody can see here.

    Args:
        arrays: A structure of arrays whose first axis is that of the examples; what is no array
            (a sparse matrix) is not looked at.
    """
    given = tf.nest.flatten(arrays)
    if not all(isinstance(part, np.ndarray | tf.Tensor) for part in given):
        return
    parts = [np.ascontiguousarray(part) for part in given]
    seen: set[int] = set()
    for row in zip(*parts, strict=True):
        seen.add(hash(b"".join(np.asarray(part).tobytes() for part in row)))
    if len(seen) < len(parts[0]):
        _logger.warning(
            "some examples of the data are equal. Epsilon protects one example: who is in the "
            "data k times, or is oversampled, has about k times this epsilon. Keep one example "
            "for each person. (Equal examples of different persons are fine.)"
        )
