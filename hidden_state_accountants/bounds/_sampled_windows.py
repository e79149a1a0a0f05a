"""The search of Theorem B: where the window starts, which steps hide the shift, the split."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import numpy as np

from hidden_state_accountants.bounds._taut_string import least_mu_squared

_ORDERS = np.array([2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 256, 512.0])
"""Whole numbers: the divergence of a sampled mechanism takes long at others."""
_DELTA = 1e-6  # where the candidates are compared
_SPLITS = 1 - np.geomspace(0.003, 0.9, 12)


@attrs.frozen(eq=False)
class SampledSteps:
    """The steps of a segment that starts from a shared state.

    Attributes:
        contraction: c_t, shape (T,).
        distance: D_tau, a bound on |X_tau - X'_tau|, shape (T + 1,).
        noise_std: sigma_t, shape (T,).
        step_mu: mu of a step whose batch is known to hold the record, shape (T,); few values.
    """

    contraction: np.ndarray
    distance: np.ndarray
    noise_std: np.ndarray
    step_mu: np.ndarray


@attrs.frozen
class Window:
    """What dominates the segment.

    Attributes:
        sampled_mus: (mu, count): sampled Gaussian mechanisms.
        shift_mu: The mu of the Gaussian that hides the shift.
    """

    sampled_mus: tuple[tuple[float, int], ...]
    shift_mu: float


def best_window(
    steps: SampledSteps, sampled_rdp: Callable[[float, np.ndarray], np.ndarray]
) -> Window:
    """The window with the smallest epsilon by Renyi divergences; the whole segment is one.

    Args:
        steps: The segment.
        sampled_rdp: Renyi divergences, at an array of orders, of the sampled mechanism of a mu.
    """
    total = len(steps.contraction)
    orders = _ORDERS
    levels = np.unique(steps.step_mu)
    # counts[i, k]: how many of the last k steps have mu = levels[i]
    backwards = steps.step_mu[::-1]
    counts = np.stack([np.append(0, np.cumsum(backwards == level)) for level in levels])
    plain = np.stack([_rdp(sampled_rdp, level, orders) for level in levels])
    split = np.stack(
        [
            np.stack([_rdp(sampled_rdp, level / np.sqrt(beta), orders) for level in levels])
            for beta in _SPLITS
        ]
    )  # (splits, levels, orders)
    best = _epsilons(orders, counts[:, total] @ plain), total, 0, 1.0
    log_shift = _LogShift(steps)
    lengths = _grid(total)
    for length in lengths[:-1]:  # the whole segment starts from a shared state: nothing to hide
        shifted = np.array([k for k in lengths if k <= length])
        shift = np.exp(np.minimum(log_shift.mu_squared(length, shifted), 700.0))
        divergences = ((counts[:, [length]] - counts[:, shifted]).T @ plain)[:, None, :]
        divergences = divergences + np.einsum("ls,blo->sbo", counts[:, shifted], split)
        divergences = divergences + (shift[:, None] / (1 - _SPLITS))[:, :, None] * orders / 2
        epsilons = _epsilons(orders, divergences)
        index = np.unravel_index(np.argmin(epsilons), epsilons.shape)
        if epsilons[index] < best[0]:
            best = epsilons[index], length, int(shifted[index[0]]), float(_SPLITS[index[1]])
    _, length, shifted_steps, beta = best
    sampled: dict[float, int] = {}
    for level, row in zip(levels.tolist(), counts, strict=True):
        for mu, count in (
            (level, int(row[length] - row[shifted_steps])),
            (level / beta**0.5, int(row[shifted_steps])),
        ):
            if count:
                sampled[mu] = sampled.get(mu, 0) + count
    shift_mu = 0.0
    if shifted_steps:
        shift_mu = (_shift_mu_squared(steps, length, shifted_steps) / (1 - beta)) ** 0.5
    return Window(tuple(sampled.items()), shift_mu)


class _LogShift:
    """`_shift_mu_squared` for many windows, in logarithms: good enough to choose one.

    One pool hides everything: mu**2 = z**2 / sum_t (sigma_t / (c_{m+1} ... c_t))**2, z the distance
    before the first of these steps, m + 1.
    """

    def __init__(self, steps: SampledSteps):
        with np.errstate(divide="ignore"):
            log_c = np.log(np.maximum(steps.contraction, 1e-300))
            log_noise = 2 * np.log(steps.noise_std)
            self._distance = np.log(steps.distance)
        self._product = np.append(0.0, np.cumsum(log_c))
        weights = (log_noise - 2 * self._product[1:])[::-1]
        self._weight = np.append(-np.inf, np.logaddexp.accumulate(weights))

    def mu_squared(self, length: int, shifted: np.ndarray) -> np.ndarray:
        """The log for windows of `length` steps whose last `shifted` hide the distance."""
        total = len(self._product) - 1
        at_start = self._distance[total - length] - self._product[total - length]
        return 2 * at_start - self._weight[shifted]


def _shift_mu_squared(steps: SampledSteps, length: int, shifted: int) -> float:
    """mu**2 of undoing the distance at the start of the window in its last `shifted` steps."""
    total = len(steps.contraction)
    distance = float(steps.distance[total - length])
    for c in steps.contraction[total - length : total - shifted].tolist():
        distance *= c
    inside = slice(total - shifted, total)
    return least_mu_squared(
        steps.contraction[inside],
        np.zeros(shifted),
        steps.noise_std[inside],
        initial_shift=distance,
    )


def _rdp(
    sampled_rdp: Callable[[float, np.ndarray], np.ndarray], mu: float, orders: np.ndarray
) -> np.ndarray:
    return sampled_rdp(float(mu), orders) if mu > 0 else np.zeros(orders.shape)


def _epsilons(orders: np.ndarray, divergences: np.ndarray) -> np.ndarray:
    # Canonne, Kamath, Steinke 2020 (arXiv 2004.00010 v5), Proposition 12
    shares = np.log1p(-1 / orders) - (np.log(_DELTA) + np.log(orders)) / (orders - 1)
    return np.maximum(0.0, np.min(divergences + shares, axis=-1))


def _grid(largest: int) -> list[int]:
    """About four lengths per factor of two, from 1 to `largest`."""
    return sorted({int(v) for v in np.geomspace(1, largest, 2 + 4 * largest.bit_length()).round()})
