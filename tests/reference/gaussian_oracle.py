"""Exact distribution of the last iterate of noisy gradient descent on quadratic losses.

Record i has the loss 1/2 (x - centre_i)^T H_i (x - centre_i) + slope_i . x in d dimensions, and the
neighbouring data set changes the slope of one record, so that both last iterates are Gaussian with
the same covariance. Everything here is plain linear algebra, on purpose without the package.
"""

import numpy as np


class QuadraticRun:
    """A run of x <- (1 - lr*wd) x - lr/b * (sum of gradients + N(0, noise_std**2 I)).

    Args:
        hessians: Shape (n, d, d), symmetric.
        batches: The records of each step; any order.
        learning_rate, noise_std, weight_decay: Numbers or arrays of shape (T,).
        batch_size: b, the divisor.
    """

    def __init__(
        self, hessians, batches, *, learning_rate, noise_std, batch_size, weight_decay=0.0
    ):
        steps = len(batches)
        self.hessians = np.asarray(hessians, dtype=float)
        self.batches = batches
        self.learning_rate = np.broadcast_to(learning_rate, steps)
        self.noise_std = np.broadcast_to(noise_std, steps)
        self.weight_decay = np.broadcast_to(weight_decay, steps)
        self.batch_size = batch_size

    def map_matrix(self, t):
        dimension = self.hessians.shape[1]
        eta = self.learning_rate[t]
        curvature = self.hessians[self.batches[t]].sum(axis=0) / self.batch_size
        return (1 - eta * self.weight_decay[t]) * np.eye(dimension) - eta * curvature

    def mu(self, record, slope_difference):
        """Exact mu between the last iterates if `record`'s gradient moves by `slope_difference`."""
        difference, covariance = self.mean_and_covariance(record, slope_difference)
        return float(np.sqrt(difference @ np.linalg.solve(covariance, difference)))

    def mean_and_covariance(self, record, slope_difference):
        slope_difference = np.asarray(slope_difference, dtype=float)
        dimension = len(slope_difference)
        difference = np.zeros(dimension)
        covariance = np.zeros((dimension, dimension))
        for t, batch in enumerate(self.batches):
            matrix = self.map_matrix(t)
            scale = self.learning_rate[t] / self.batch_size
            times = np.count_nonzero(np.asarray(batch) == record)
            difference = matrix @ difference - scale * times * slope_difference
            covariance = matrix @ covariance @ matrix.T
            covariance += (scale * self.noise_std[t]) ** 2 * np.eye(dimension)
        return difference, covariance


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
