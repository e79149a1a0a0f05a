"""Whether the subsets that a data set is made of hold the same indices as at the start."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, Subset


class FixedSubsets:
    """Remembers the indices of every torch.utils.data.Subset in a data set.

    Args:
        dataset: What the indices of batches point into.
    """

    def __init__(self, dataset: Any):
        self._known = [(part, _indices(part)) for part in _subsets(dataset)]

    def why_not(self) -> str:
        """What is wrong with the indices now, or "": they are others than at the start."""
        if all(np.array_equal(_indices(part), indices) for part, indices in self._known):
            return ""
        return (
            "Expected the indices of torch.utils.data.Subset as they were at make_private, "
            "got others: the batches of the run are no longer those that are accounted. "
            "Build a new Subset and call make_private again for another order."
        )


def _indices(part: Subset) -> np.ndarray:
    """A copy, from a sequence, an array or a tensor."""
    indices = part.indices
    return np.array(indices.tolist() if hasattr(indices, "tolist") else indices)


def _subsets(dataset: Any) -> Iterator[Subset]:
    if isinstance(dataset, Subset):
        yield dataset
        yield from _subsets(dataset.dataset)
    elif isinstance(dataset, ConcatDataset):
        for part in dataset.datasets:
            yield from _subsets(part)
