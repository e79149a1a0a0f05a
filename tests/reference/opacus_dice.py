"""How to find the error of DiceSGD, which should be nowhere."""

import io
import re

import numpy as np
import torch

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
