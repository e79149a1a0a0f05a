"""Bounds on the distance of two runs that share all noise, wherever the record is."""

from __future__ import annotations

import math

import numpy as np

from hidden_state_accountants.process.noisy_process import NoisyProcess

_BLOCK = 256  # steps whose distances are computed at once
_ROUNDING = 1e-12  # relative; more than all rounding errors of a block together
_LARGEST_PRODUCT = 1e150  # of the moduli of a block, and its inverse: far from underflow
_LARGEST_LOG = 700.0  # whose exponential is a double
_UP = 1e-9  # relative; more than the rounding of a geometric sum


def distance_after(process: NoisyProcess, num_steps: int) -> float:
    r"""No two runs are farther apart after so many steps, whole epochs if the steps differ.

    .. math:: D \le \min\Big(s \sum_e c^{\ell e},\; \text{drift} \sum_t \kappa^t,\; R\Big)

    for equal steps that do not expand, wherever in each epoch the record is.
    """
    distance = min(distance_by_moduli(process, num_steps), process.domain_diameter)
    if not process.is_constant:
        return distance
    kappa, drift = float(process.drift_contraction[0]), float(process.drift[0])
    log = math.log(kappa) if kappa else -math.inf
    return min(distance, drift * _geometric_sum(log, num_steps) * (1 + _UP))


def distance_by_moduli(process: NoisyProcess, num_steps: int) -> float:
    """The same by the moduli alone, with the record in the step of an epoch that counts most."""
    period, distance = process.period, 0.0
    if process.is_constant:
        c, s = float(process.contraction[0]), float(process.sensitivity[0])
        if not s or not num_steps:
            return 0.0
        log = period * math.log(c) if c else -math.inf
        first = math.exp(min(max(log, 0.0), _LARGEST_LOG))  # the rest of an epoch may expand
        return s * first * _geometric_sum(log, -(-num_steps // period)) * (1 + _UP)
    moduli = process.contraction[:num_steps].reshape(-1, period)
    later = np.ones_like(moduli)
    later[:, :-1] = np.cumprod(moduli[:, :0:-1], axis=1)[:, ::-1]
    largest_own = (process.sensitivity[:num_steps].reshape(-1, period) * later).max(axis=1)
    whole = moduli[:, 0] * later[:, 0]
    for kept, own in zip(whole.tolist(), largest_own.tolist(), strict=True):
        distance = (kept * distance + own) * (1 + 4e-16 * (period + 4))
    return distance


def _geometric_sum(log: float, number: int) -> float:
    """1 + r + r**2 + ... of so many terms, r = exp(log); inf beyond the range of a double."""
    if log * number > _LARGEST_LOG:
        return math.inf
    return math.expm1(number * log) / math.expm1(log) if log else float(number)


def tracked_distances(
    process: NoisyProcess, steps: slice, sensitivity: np.ndarray, initial: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Bounds on |X_tau - X'_tau|, step by step, and where the domain or the drift cuts them.

        D_t = min(c_t D_{t-1} + s_t,  kappa_t D_{t-1} + drift_t,  R),  D_0 = initial

    Both of shape (T + 1,) for tau = 0..T.
    """
    if not process.is_constant:
        straight = _uncut_distances(process, steps, sensitivity, initial)
        if straight is not None:
            return straight, np.zeros(len(straight), dtype=bool)
    distances, is_cut = [initial], [False]
    values = zip(
        process.contraction[steps].tolist(),
        sensitivity.tolist(),
        process.drift_contraction[steps].tolist(),
        process.drift[steps].tolist(),
        strict=True,
    )
    for c, s, kappa, offset in values:
        distance = distances[-1]
        stretched = c * distance + s
        capped = min(kappa * distance + offset, process.domain_diameter)
        is_cut.append(capped < stretched)
        distances.append(capped if capped < stretched else stretched)
        if process.is_constant and distances[-1] == distance and process.period == 1:
            break  # and so it is in all later steps
    rest = len(sensitivity) + 1 - len(distances)
    return np.pad(distances, (0, rest), "edge"), np.pad(is_cut, (0, rest), "edge")


def _uncut_distances(
    process: NoisyProcess, steps: slice, sensitivity: np.ndarray, initial: float
) -> np.ndarray | None:
    """`tracked_distances` where nothing cuts them, many steps at once; None otherwise."""
    c, kappa, offset = (
        array[steps] for array in (process.contraction, process.drift_contraction, process.drift)
    )
    distances = [np.array([initial])]
    with np.errstate(all="ignore"):
        for first in range(0, len(c), _BLOCK):
            block = slice(first, first + _BLOCK)
            products, before = np.cumprod(c[block]), float(distances[-1][-1])
            if not 1 / _LARGEST_PRODUCT < products.min() <= products.max() < _LARGEST_PRODUCT:
                return None
            found = products * (before + np.cumsum(sensitivity[block] / products))
            found *= 1 + _ROUNDING
            last = np.append(before, found[:-1])
            limit = np.minimum(kappa[block] * last + offset[block], process.domain_diameter)
            if not (np.isfinite(found) & (found * (1 + 1e-9) < limit)).all():
                return None
            distances.append(found)
    return np.concatenate(distances)
