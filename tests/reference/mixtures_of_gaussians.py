"""Divergences of mixtures of Gaussians, the laws of attacks on linear losses."""

import math

import numpy as np
from scipy import special


def divergence(first, second, deviation, epsilon, weights=None):
    """H_e between two mixtures of Gaussians of one variance, by half-lines and intervals.

    A lower bound on it that is exact where the grid finds every sign change.
    """

    def of(means):
        return np.full(len(means), 1 / len(means)) if weights is None else weights

    ends = np.concatenate([first, second])
    grid = np.linspace(ends.min() - 9 * deviation, ends.max() + 9 * deviation, 3001)
    density = [
        np.exp(-(((grid[:, None] - m) / deviation) ** 2) / 2) @ of(m) for m in (first, second)
    ]
    is_inside = np.append(density[0] > math.exp(epsilon) * density[1], False)
    changes = np.flatnonzero(np.diff(is_inside.astype(int), prepend=0))
    edges = np.append(grid, np.inf)[changes].reshape(-1, 2)
    edges[edges == grid[0]] = -np.inf
    masses = [
        special.ndtr((edges[:, :, None] - m) / deviation) @ of(m) @ [-1, 1] for m in (first, second)
    ]
    return float(masses[0].sum() - math.exp(epsilon) * masses[1].sum())
