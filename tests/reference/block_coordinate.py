"""DP-MBCD (Chen & Liu 2025, arXiv 2407.08233, Algorithm 1) with per-record clipping of each block.

Blocks are arrays of any shape. `gradients(blocks, i, batch)` gives the gradients of the records of
a batch for block i at the current blocks, stacked along the first axis.
"""

import numpy as np


def prox(x, step_size, l1=0.0, l2=0.0, nonnegative=False):
    """argmin_u l1 |u| + l2 u^2 / 2 + [u >= 0] + (u - x)^2 / (2 step_size)."""
    soft = np.sign(x) * np.maximum(np.abs(x) - step_size * l1, 0.0) / (1 + step_size * l2)
    return np.maximum(soft, 0.0) if nonnegative else soft


def step(blocks, gradients, batch, noise, *, step_size, divisor, clip_norm, **regulariser):
    """One update of every block in turn; `noise` is added to the sum of each block."""
    blocks = list(blocks)
    for i, block in enumerate(blocks):
        rows = gradients(blocks, i, batch)
        norms = np.sqrt((rows.reshape(len(rows), -1) ** 2).sum(axis=1))
        factors = np.minimum(1.0, clip_norm / np.maximum(norms, 1e-300))
        total = np.tensordot(factors, rows, axes=1) + noise[i]
        blocks[i] = prox(block - step_size / divisor * total, step_size, **regulariser)
    return blocks


def factorisation_gradients(blocks, i, batch):
    """Of |W2 W1 x - y|^2 / 2 for every record (x, y): bilinear, convex in each block."""
    (first, second), (x, y) = blocks, batch
    residual = x @ first.T @ second.T - y
    left, right = ((residual @ second, x), (residual, x @ first.T))[i]
    return left[:, :, None] * right[:, None, :]


# One run without noise, in float64, for both frameworks. Numbers that float32 holds exactly: Keras
# keeps learning rates in float32.
SHARED = {"step_size": 0.25, "divisor": 4, "clip_norm": 0.75, "l1": 0.125, "l2": 0.25}


def shared_run(steps=6):
    """The start, the batches of every step, and the blocks after the last one."""
    random = np.random.default_rng(3)
    blocks = start = [random.normal(size=shape) for shape in ((2, 3), (3, 2))]
    records = random.normal(size=(3, 2, 4, 3))
    batches = [tuple(records[t % 3]) for t in range(steps)]
    for batch in batches:
        blocks = step(blocks, factorisation_gradients, batch, (0.0, 0.0), **SHARED)
    return start, batches, blocks
