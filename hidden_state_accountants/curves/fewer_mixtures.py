r"""Compositions of many different Gaussian mixtures, by fewer that dominate them.

A mixture of Gaussian pairs with a revealed choice gets no less private if its quantile function
:math:`u \mapsto \mu(u)` grows anywhere (post-processing: the Gaussian pair of a smaller mu is a
garbling of that of a larger one). So mixtures that are alike may all be replaced by the one whose
quantile function is the largest of theirs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hidden_state_accountants.curves.base import GaussianMixtureCurve

MOST = 30
"""Mixtures that are composed as they are."""

Mixtures = Sequence[tuple[GaussianMixtureCurve, int]]
"""(mixture, count) pairs."""


def fewer_mixtures(parts: Mixtures) -> list[tuple[GaussianMixtureCurve, int]]:
    """At most `MOST` mixtures, with counts, whose composition dominates that of `parts`.

    Similar ones in size, the mean of mu**2, are grouped: half of the groups are about as wide in
    size, the other half about as frequent.
    """
    if len(parts) <= MOST:
        return list(parts)
    sizes = np.array([float(curve.weights @ curve.mus**2) for curve, _ in parts])
    if not (np.isfinite(sizes) & (sizes > 0)).all():
        return list(parts)
    ranks = np.argsort(np.argsort(sizes)) / len(sizes)
    spread = np.log(sizes / sizes.min())
    places = (ranks + spread / (spread.max() or 1.0)) / 2
    groups = np.minimum((places * MOST).astype(int), MOST - 1)
    return [_largest([parts[i] for i in np.flatnonzero(groups == g)]) for g in np.unique(groups)]


def _largest(parts: Mixtures) -> tuple[GaussianMixtureCurve, int]:
    """The mixture of the largest quantile function, as often as all of them together."""
    sums = [np.cumsum(curve.weights) for curve, _ in parts]
    levels = np.unique(np.concatenate(sums))
    mus = np.zeros(len(levels))
    for (curve, _), below in zip(parts, sums, strict=True):
        index = np.minimum(np.searchsorted(below, levels), len(below) - 1)
        np.maximum(mus, curve.mus[index], out=mus)
    smallest = min(curve.smallest_delta for curve, _ in parts)
    count = sum(count for _, count in parts)
    return GaussianMixtureCurve(np.diff(levels, prepend=0.0), mus, smallest), count
