"""DiceSGD through the engine: what its tests share, and how to find its error, which is nowhere."""

import io
import re

import numpy as np
import torch
from opacus_runs import flat

DELTA, RATE, CLIP, ERROR_CLIP = 1e-5, 0.3, 0.1, 0.02
BOUND = 2.0001
"""Softmax cross-entropy on features of norm 1 with a bias: sqrt(2) * sqrt(2)."""
ORDERS = ["cyclic", "full", "shuffled_once", "reshuffled", "without_replacement", "poisson"]
PRIVATE = {"include_private_state": True, "stays_private": True}


def error_of(run):
    return flat(run.optimizer.private_state()["error"])


# The error of a run on one record of MARK + 1, clipped at 1: a value that stands out.
MARK = 777.25
NEEDLE = np.float64(MARK).tobytes()
# With its point: addresses and digests have digits of their own, at random.
SHOWN = re.compile(r"77[78]\.25")


def everything_in(value):
    """All numbers that can be reached from containers and tensors."""
    if isinstance(value, torch.Tensor):
        return value.detach().reshape(-1).tolist()
    if isinstance(value, dict):
        return [n for v in value.values() for n in everything_in(v)]
    if isinstance(value, list | tuple):
        return [n for v in value for n in everything_in(v)]
    return [value] if isinstance(value, float) else []


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()
