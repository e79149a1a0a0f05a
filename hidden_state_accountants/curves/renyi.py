"""From Renyi divergences to (epsilon, delta)."""

from __future__ import annotations

import math

import numpy as np
from dp_accounting import rdp
from dp_accounting.rdp import rdp_privacy_accountant

STOCK_ORDERS = np.asarray(rdp_privacy_accountant.DEFAULT_RDP_ORDERS, dtype=np.float64)
"""Those of dp-accounting: a sampled event takes seconds at others that are large or no integers."""
ORDERS = np.union1d(1 + np.geomspace(1e-3, 1e6, 400), STOCK_ORDERS)
"""The orders at which a curve that is known by its divergences alone is converted."""
_SMALLEST_DIVERGENCE = 1e-15  # dp-accounting takes the log of 1 - exp(-divergence)


def epsilon_from_rdp(orders: np.ndarray, divergences: np.ndarray, delta: float) -> float:
    """dp-accounting's conversion; inf where no divergence is finite."""
    finite = np.isfinite(divergences)
    if delta >= 1:
        return 0.0
    if not finite.any():
        return math.inf
    divergences = np.maximum(divergences[finite], _SMALLEST_DIVERGENCE)
    return float(rdp.compute_epsilon(orders[finite], divergences, delta)[0])


def delta_from_rdp(orders: np.ndarray, divergences: np.ndarray, epsilon: float) -> float:
    """dp-accounting's conversion; 1 where no divergence is finite."""
    finite = np.isfinite(divergences)
    if not finite.any():
        return 1.0
    if epsilon == math.inf:
        return 0.0  # a finite divergence leaves no mass at infinity
    divergences = np.maximum(divergences[finite], _SMALLEST_DIVERGENCE)
    return float(rdp_privacy_accountant.compute_delta(orders[finite], divergences, epsilon)[0])
