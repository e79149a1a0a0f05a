"""Weights of classes and of records: public numbers, at most 1, on gradients that are short."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hidden_state_accountants import validate


def class_weights(given: Any, classes: np.ndarray) -> np.ndarray | None:
    """Weights of the sorted classes over the largest one, shape (classes,); None for none."""
    if given is None:
        return None
    if isinstance(given, str):
        raise ValueError(
            f"Expected class_weight to be a dictionary from labels to numbers, got {given!r}: how "
            "often a label occurs is private. Take the numbers from public knowledge of how "
            "frequent the classes are: {label: 1/frequency}."
        )
    if not isinstance(given, Mapping):
        raise TypeError(
            f"Expected class_weight to be a dictionary from labels to numbers, got {given!r}."
        )
    unknown = [label for label in given if label not in classes.tolist()]
    if unknown:
        raise ValueError(
            f"Expected class_weight for labels among classes = {classes.tolist()!r}, got one for "
            f"{unknown[0]!r}."
        )
    weights = [
        validate.real(f"class_weight[{label!r}]", given.get(label, 1.0), above=0)
        for label in classes.tolist()
    ]
    return np.array(weights) / max(weights)


def sample_weights(given: Any, records: int) -> np.ndarray | None:
    """Weights of the records in [0, 1], shape (records,); None for none."""
    if given is None:
        return None
    weights = np.asarray(given, dtype=np.float64)
    if weights.shape != (records,):
        raise ValueError(
            f"Expected sample_weight of shape ({records},), got shape {weights.shape}."
        )
    if not ((weights >= 0) & (weights <= 1)).all():
        raise ValueError(
            "Expected every sample_weight in [0, 1], got another value: the guarantee is about a "
            "record of weight 1. Divide the weights by the largest one that there can be, which is "
            "public, not by the largest one of these records."
        )
    return weights
