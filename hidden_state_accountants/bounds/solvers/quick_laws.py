"""The law of a sum of coins, quickly and roughly: good enough to choose a window, never to claim.

The characteristic function of the sum is a product; one transform of a few hundred numbers gives
its logarithm, and another one the law.
"""

from __future__ import annotations

import math

import numpy as np

from hidden_state_accountants.bounds.solvers.distance_law import DistanceLaw

_CELLS, _FEW_CELLS = 1024, 256
_RARE_RATE = 0.3  # below it the series converges in a few dozen terms
_ERROR = 1e-10  # of the logarithm of the characteristic function
_NOISE = 1e-13  # of a transform
_BULK = 1e-6  # survival probability where the bulk ends


def quick_law(
    weights: np.ndarray, rate: float, largest: float, levels: int, certain: float = 0.0
) -> DistanceLaw:
    """About the law of min(certain + S, largest); S as in `law_of_sum`.

    Args:
        weights: w_j >= 0, any shape (n,).
        rate: q in (0, 1].
        largest: >= 0, finite.
        levels: How many there may be.
        certain: >= 0.
    """
    weights = np.minimum(weights[weights > 0], largest)
    total, mean = float(weights.sum()), rate * float(weights.sum())
    if not len(weights) or rate == 1 or certain + mean >= largest:
        return DistanceLaw.certain(min(certain + total, largest))
    deviation = math.sqrt(rate * float(weights @ weights))
    reach = min(total, mean + 7 * deviation + 3 * float(weights.max()))
    size = _CELLS if rate < _RARE_RATE else _FEW_CELLS
    width = reach / (size - 1)
    cells = np.rint(weights / width).astype(int)
    law = np.fft.irfft(np.exp(_log_characteristic(np.bincount(cells, minlength=size), rate)), size)
    law[law < _NOISE] = 0.0
    places = width * np.arange(size) + (mean - rate * width * float(cells.sum()))
    places = np.clip(places + certain, 0.0, largest)
    return _fewer(places, law / law.sum(), levels)


def _log_characteristic(counts: np.ndarray, rate: float) -> np.ndarray:
    r"""At the frequencies of a real transform; `counts` are the numbers of coins of each size.

    .. math:: \log(1 - q + q z) = \log(1 - q) + \sum_k (-1)^{k+1} (q/(1-q))^k z^k / k
    """
    size, number = len(counts), int(counts.sum())
    half = np.arange(size // 2 + 1)
    if rate >= _RARE_RATE:
        sizes = np.flatnonzero(counts)
        turns = np.exp(-2j * math.pi / size * (half[:, None] * sizes % size))
        with np.errstate(divide="ignore"):
            return np.asarray(np.log(1 + rate * (turns - 1)) @ counts[sizes])
    odds = rate / (1 - rate)
    terms = max(2, math.ceil(math.log(_ERROR / number) / math.log(odds)))
    transform = np.fft.fft(counts)
    total = np.full(len(half), number * math.log1p(-rate), dtype=complex)
    for k in range(1, terms + 1):
        total -= (-odds) ** k / k * transform[half * k % size]
    return total


def _fewer(places: np.ndarray, law: np.ndarray, levels: int) -> DistanceLaw:
    """Most levels for the bulk, the others for the tail; each is the root mean square of many."""
    above = np.cumsum(law[::-1])[::-1]
    kept = np.flatnonzero(law)
    first, last = float(places[kept[0]]), float(places[kept[-1]])
    end = float(places[np.flatnonzero(above > _BULK)[-1]])
    bulk = first + (end - first) * np.linspace(0, 1, 3 * levels // 4) ** 2
    edges = np.unique(np.concatenate([bulk, np.linspace(end, last, levels // 4)]))
    index = np.searchsorted(edges, places[kept])
    masses = np.bincount(index, law[kept])
    squares = np.bincount(index, law[kept] * places[kept] ** 2)
    used = masses > 0
    return DistanceLaw(np.sqrt(squares[used] / masses[used]), masses[used])
