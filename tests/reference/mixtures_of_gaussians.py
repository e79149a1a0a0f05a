"""Linear losses under secret orders: their laws, which are mixtures of Gaussians, exactly."""

import itertools
import math

import numpy as np
from scipy import special

import hidden_state_accountants as hsa

Order = hsa.BatchOrder
SAMPLED = (Order.POISSON, Order.WITHOUT_REPLACEMENT)
REDRAWN = (Order.RESHUFFLED, Order.BALLS_IN_BINS_REDRAWN)
OF_RANDOM_SIZE = (Order.POISSON, Order.BALLS_IN_BINS, Order.BALLS_IN_BINS_REDRAWN)


def patterns(order, steps, period, rate):
    """The batches that may hold a record, 0 or 1 by pattern and step; and the probabilities."""
    if order in SAMPLED:
        found = np.array(list(itertools.product([0, 1], repeat=steps)))
        return found, rate ** found.sum(axis=1) * (1 - rate) ** (1 - found).sum(axis=1)
    step = np.arange(steps)
    epoch = step // period if order in REDRAWN else 0 * step
    places = np.array(list(itertools.product(range(period), repeat=int(epoch[-1]) + 1)))
    found = (step % period == places[:, epoch]).astype(int)
    return found, np.full(len(found), 1 / len(found))


def divergence(first, second, epsilon, weights):
    """H_e between two mixtures of N(m, 1), by half-lines and intervals.

    A lower bound on it that is exact where the grid finds every sign change.
    """
    ends = np.concatenate([first, second])
    grid = np.linspace(ends.min() - 9, ends.max() + 9, 3001)
    density = [np.exp(-((grid[:, None] - m) ** 2) / 2) @ weights for m in (first, second)]
    is_inside = np.append(density[0] > math.exp(epsilon) * density[1], False)
    changes = np.flatnonzero(np.diff(is_inside.astype(int), prepend=0))
    edges = np.append(grid, np.inf)[changes].reshape(-1, 2)
    edges[edges == grid[0]] = -np.inf
    masses = [special.ndtr(edges[:, :, None] - m) @ weights @ [-1, 1] for m in (first, second)]
    return float(masses[0].sum() - math.exp(epsilon) * masses[1].sum())


def random_linear_run(rng, order, is_replaced):
    """A run of linear losses in batches of two, and its last iterate's law on both data sets.

    The record has slope 1, its replacement `other`, and everybody else `g`.

    Returns:
        The run; the means for each pattern of the record, on the one data set and on the other, in
        standard deviations; the probabilities of the patterns.
    """
    if order in SAMPLED:
        period, steps = int(rng.choice([2, 10, 40])), int(rng.integers(1, 8))
        noise = np.full(steps, rng.uniform(0.3, 1.2))
    else:
        period, steps = int(rng.integers(1, 7)), int(rng.integers(1, 13))
        if order in REDRAWN:
            period, steps = int(rng.integers(2, 5)), int(rng.integers(1, 11))
        noise = np.exp(rng.normal(size=steps) * rng.choice([0.0, 0.7]))
        noise *= rng.choice([0.3, 1.0, 2.0])
    rates = np.exp(rng.normal(size=steps) * rng.choice([0.0, 1.5]))
    run = hsa.LastIterateDpEvent(
        noise_multiplier=noise,
        learning_rate=rates,
        clip_norm=1.0,
        batch_size=2,
        dataset_size=2 * period,
        num_steps=steps,
        batch_order=order,
        loss=hsa.LossGeometry.linear(1.0),
        weight_decay=float(rng.choice([0.0, rng.uniform(0, 1) / rates.max()])),
    )
    kept = np.append(np.cumprod((1 - rates * run.weight_decay)[:0:-1])[::-1], 1.0)
    found, weights = patterns(order, steps, period, 1 / period)
    moves = found @ (kept * rates) / math.sqrt(((kept * rates * noise) ** 2).sum())
    g = 0.0 if order in OF_RANDOM_SIZE else float(rng.choice([-1.0, 1.0, rng.uniform(-1, 1)]))
    other = float(rng.choice([-1.0, 0.0, 0.5])) if is_replaced else 0.0
    return run, (1 - g) * moves, (other - g) * moves, weights
