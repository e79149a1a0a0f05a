"""Divergences of mixtures of Gaussians, the laws of attacks on linear losses."""

import math

import numpy as np
from scipy import special

import hidden_state_accountants as hsa


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


def half_lines(first, second, weights, epsilon):
    """A lower bound on H_e between two mixtures of N(m, 1): the best half-line of a grid."""
    ends = np.concatenate([first, second])
    y = np.linspace(ends.min() - 12, ends.max() + 12, 1501)[:, None]
    best = 0.0
    for sign in (1, -1):
        p, q = (special.ndtr(sign * (m - y)) @ weights for m in (first, second))
        best = max(best, float((p - math.exp(epsilon) * q).max()))
    return best


def run_of_linear_losses(rng, order, batches, rates, noise):
    """A run of linear losses with batches of two, and a decay of 0 or a random one.

    Returns:
        The run, the standard deviation of its last iterate, and how far a slope of 1 in each step
        moves it.
    """
    run = hsa.LastIterateDpEvent(
        noise_multiplier=noise, learning_rate=rates, clip_norm=1.0, batch_size=2,
        dataset_size=2 * batches, num_steps=len(rates), batch_order=order,
        loss=hsa.LossGeometry.linear(1.0),
        weight_decay=float(rng.choice([0.0, rng.uniform(0, 1) / rates.max()])),
    )  # fmt: skip
    kept = np.append(np.cumprod((1 - rates * run.weight_decay)[:0:-1])[::-1], 1.0)
    moves = kept * rates / 2
    return run, math.sqrt(((moves * noise) ** 2).sum()), moves


def random_linear_run(rng, order, *, is_redrawn):
    """A random run, the scale of its iterates' law, and what a slope of 1 moves them by.

    Returns:
        The run, the standard deviation, and the moves by epoch and batch.
    """
    period, steps = int(rng.integers(1, 7)), int(rng.integers(1, 13))
    if is_redrawn:
        period, steps = int(rng.integers(2, 5)), int(rng.integers(1, 11))
    rates = np.exp(rng.normal(size=steps) * rng.choice([0.0, 1.5]))
    noise = np.exp(rng.normal(size=steps) * rng.choice([0.0, 0.7])) * rng.choice([0.3, 1.0, 2.0])
    run, deviation, moves = run_of_linear_losses(rng, order, period, rates, noise)
    by_epoch = np.pad(moves, (0, -steps % period)).reshape(-1, period)
    return run, deviation, by_epoch
