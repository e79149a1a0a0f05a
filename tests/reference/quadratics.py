"""Quadratic runs that several test files share."""

import numpy as np


def cyclic_batches(dataset_size, batch_size, num_steps):
    """The records of each step of a cyclic run."""
    period = dataset_size // batch_size
    return [
        np.arange(t % period * batch_size, (t % period + 1) * batch_size) for t in range(num_steps)
    ]


def random_hessian(rng, dimension, lowest, highest):
    """Symmetric with eigenvalues in [lowest, highest], both attained if dimension > 1."""
    rotation, _ = np.linalg.qr(rng.normal(size=(dimension, dimension)))
    eigenvalues = rng.uniform(lowest, highest, dimension)
    eigenvalues[0] = highest
    eigenvalues[-1] = lowest if dimension > 1 else highest
    return rotation @ np.diag(eigenvalues) @ rotation.T
