"""The clipped gradients of a linear model, summed over all records."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hidden_state_accountants.losses.arrays import NUMPY
from hidden_state_accountants.losses.linear import BY_NAME
from hidden_state_adapters.sklearn.records import Records

Targets = Callable[[slice], np.ndarray]
_TINY = 1e-300


def gradient_sum(
    loss: str,
    clip_norm: float,
    records: Records,
    targets: Targets,
    weights: np.ndarray,
    weights_of_records: np.ndarray | None = None,
) -> np.ndarray:
    """The sum of the clipped and weighted gradients of all records, of the shape of the weights."""
    total, slopes = np.zeros_like(weights), BY_NAME[loss](NUMPY, weights.shape[1]).slopes
    for block in records.blocks():
        y = slopes(records.predictions(block, weights), targets(block))
        # The gradient is an outer product: its norm is that of y times that of the record.
        norms = np.sqrt(np.einsum("ij,ij->i", y, y)) * records.norms[block]
        factors = np.minimum(clip_norm / np.maximum(norms, _TINY), 1.0)
        if weights_of_records is not None:
            factors = factors * weights_of_records[block]
        y *= factors[:, None]
        records.add_gradients(block, y, total)
    return total
