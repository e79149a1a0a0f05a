"""Warnings about numbers that have to be public, or that protect nobody."""

from __future__ import annotations

import logging
import warnings

import numpy as np

from hidden_state_accountants.figures import large_delta

_logger = logging.getLogger("hidden_state_accountants")

_ROUNDING = 1e-6


def warn_of_delta(delta: float, records: int) -> None:
    """Warns of a delta of 1/n and more, n being the number of records."""
    if text := large_delta(delta, records):
        warnings.warn(text, UserWarning, stacklevel=2)


def warn_of_longest(norms: np.ndarray, feature_norm: float) -> None:
    """Warns of a bound that one record alone reaches: the largest norm of the data does.

    Of records that were normalised all reach it, of records that were clipped several.
    """
    at_bound = np.abs(norms - feature_norm) <= _ROUNDING * feature_norm
    if len(norms) > 1 and np.count_nonzero(at_bound) == 1:
        warnings.warn(
            f"feature_norm = {feature_norm:.8g} is the largest norm of the data. If it was computed"
            " from the records, it is a statistic of them that epsilon does not cover: a bound has "
            "to be public. Take one that is known without the records, or bring every record to "
            "it by itself (normalise or clip).",
            UserWarning,
            stacklevel=2,
        )


def warn_of_equal() -> None:
    """Logs that some records of the data are equal, which oversampling makes."""
    _logger.warning(
        "some records of the data are equal. Epsilon protects one record: who is in the data k "
        "times, or is oversampled, has about k times this epsilon. Keep one record for each "
        "person. (Equal records of different persons are fine.)"
    )
