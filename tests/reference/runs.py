"""Events that several test files share."""

import math

import attrs
import numpy as np
from dp_accounting import NeighboringRelation

import hidden_state_accountants as hsa
from hidden_state_accountants.bounds.shifted_interpolation import worst_mu_squared
from hidden_state_accountants.process.noisy_process import noisy_process


def mu_at(event, position, relation=NeighboringRelation.REPLACE_SPECIAL):
    """Theorem A for the records of one batch of an epoch."""
    process = attrs.evolve(noisy_process(event, relation), positions=(position,))
    return math.sqrt(worst_mu_squared(process))


def cyclic_run(**changes):
    """A small cyclic run whose update contracts."""
    arguments = {
        "noise_multiplier": 2.0,
        "learning_rate": 0.5,
        "clip_norm": 1.0,
        "batch_size": 5,
        "dataset_size": 20,
        "num_steps": 24,
        "batch_order": hsa.BatchOrder.CYCLIC,
        "loss": hsa.LossGeometry.convex(1.0, lipschitz=1.0),
        "weight_decay": 0.2,
    }
    return hsa.LastIterateDpEvent(**(arguments | changes))


def full_run(**changes):
    """The same in full batches."""
    return cyclic_run(**({"batch_size": 20, "batch_order": hsa.BatchOrder.FULL} | changes))


def probe_run(**changes):
    """The reference run of the theory: a softmax probe, clip on, 200 epochs of 100 batches."""
    arguments = {
        "batch_size": 500,
        "dataset_size": 50_000,
        "num_steps": 20_000,
        "loss": hsa.LossGeometry.softmax_cross_entropy(1.0),
        "weight_decay": 0.1,
    }
    return cyclic_run(**(arguments | changes))


def dice_run(**changes):
    """Two epochs of four batches."""
    arguments = {
        "noise_std": 0.5,
        "clip_norm": 1.0,
        "error_clip_norm": 0.01,
        "batch_size": 5,
        "dataset_size": 20,
        "num_steps": 8,
        "batch_order": "cyclic",
    }
    return hsa.DiceSgdDpEvent(**(arguments | changes))


def block_run(**changes):
    """Five batches of four records, six epochs."""
    arguments = {
        "step_size": 0.1,
        "noise_variance": 1.0,
        "gradient_sensitivity": 2.0,
        "batch_size": 4,
        "dataset_size": 20,
        "num_epochs": 6,
        "block_loss": hsa.LossGeometry.generalized_linear(1.0),
    }
    return hsa.BlockCoordinateDpEvent(**(arguments | changes))


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
