"""DiceSGD through the engine: what its tests share."""

from opacus_runs import flat

DELTA, RATE, CLIP, ERROR_CLIP = 1e-5, 0.3, 0.1, 0.02
BOUND = 2.0001
"""Softmax cross-entropy on features of norm 1 with a bias: sqrt(2) * sqrt(2)."""
ORDERS = ["cyclic", "full", "shuffled_once", "reshuffled", "without_replacement", "poisson"]
PRIVATE = {"include_private_state": True, "stays_private": True}


def error_of(run):
    return flat(run.optimizer.private_state()["error"])
