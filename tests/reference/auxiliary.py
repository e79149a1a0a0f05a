"""Algorithm 4 of Chen & Liu 2025 in NumPy, one record at a time, from its definitions."""

import itertools

import numpy as np
from scipy import optimize

WIDTHS, RADIUS, PENALTY = (5, 4, 3, 2), 0.9, 0.7


def weights(seed=0):
    """W_0 to W_D, each of shape (outputs, inputs)."""
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(n, m)) for m, n in itertools.pairwise(WIDTHS)]


def records(count, seed=1):
    """Inputs (count, 5) and targets (count, 2)."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(count, WIDTHS[0])), rng.normal(size=(count, WIDTHS[-1]))


def shortened(x):
    return x * min(1.0, RADIUS / max(np.linalg.norm(x), 1e-300))


def auxiliary(matrices, inputs, target, sweeps):
    """x_0 to x_D and u_0 to u_{D-1} of one record; minimisers by a search, not by a formula."""
    last = len(matrices) - 1
    x, u = [shortened(inputs)], []
    for matrix in matrices[:-1]:
        u.append(matrix @ x[-1])
        x.append(shortened(np.maximum(u[-1], 0)))
    for _ in range(sweeps):
        for d in range(last, 0, -1):

            def of_x(v, d=d):
                near = PENALTY / 2 * np.sum((v - np.maximum(u[d - 1], 0)) ** 2)
                if d == last:
                    return near + np.sum((matrices[d] @ v - target) ** 2) / 2
                return near + PENALTY / 2 * np.sum((u[d] - matrices[d] @ v) ** 2)

            x[d] = shortened(optimize.minimize(of_x, x[d], tol=1e-14).x)
        for d in range(last):
            before, after = matrices[d] @ x[d], x[d + 1]
            u[d] = np.array([least_u(b, a) for b, a in zip(before, after, strict=True)])
    return x, u


def least_u(before, after):
    """argmin of (after - relu(u))^2 + (u - before)^2, on a grid with every stationary point."""
    grid = np.concatenate([np.linspace(-5, 5, 4001), [before, 0.0, (before + after) / 2]])
    return grid[np.argmin((after - np.maximum(grid, 0)) ** 2 + (grid - before) ** 2)]


def lagrangian(matrices, inputs, target, sweeps):
    """F of one record without the squares that have no weights, and its gradient in every W."""
    x, u = auxiliary(matrices, inputs, target, sweeps)
    aims, scales = [*u, target], [PENALTY] * len(u) + [1.0]
    left = [m @ v - aim for m, v, aim in zip(matrices, x, aims, strict=True)]
    total = sum(s / 2 * rest @ rest for s, rest in zip(scales, left, strict=True))
    return total, [s * np.outer(r, v) for s, r, v in zip(scales, left, x, strict=True)]
