"""Quadratic runs that several test files share."""

import numpy as np
from gaussian_oracle import GaussianOracle


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


def largest_exact_mu(rng, event, hessians, difference):
    """The largest exact mu over the batches of a constant run, in random directions.

    Args:
        rng: Draws one direction for each batch.
        event: A FULL or CYCLIC run with constant hyper-parameters.
        hessians: Those of its quadratics.
        difference: How far the record's slope moves.
    """
    exact = 0.0
    for record in range(0, event.dataset_size, event.batch_size):
        direction = rng.normal(size=hessians.shape[1])
        oracle = GaussianOracle(
            hessians,
            [(1.0, cyclic_batches(event.dataset_size, event.batch_size, event.num_steps))],
            learning_rate=event.learning_rate,
            noise_std=event.noise_std_on_sum()[0],
            weight_decay=event.weight_decay,
            batch_size=event.batch_size,
            record=record,
            slope_difference=difference * direction / np.linalg.norm(direction),
        )
        exact = max(exact, oracle.mu)
    return exact
