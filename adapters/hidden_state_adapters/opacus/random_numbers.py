"""Looks that leave no trace in the random numbers of a script."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch


@contextlib.contextmanager
def random_numbers_as_before(values: Iterable[Any] = ()) -> Iterator[None]:
    """Afterwards torch, numpy and Python draw what they would have drawn anyway.

    Args:
        values: Tensors among these say which GPUs may draw some.
    """
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    devices = {x.device.index for x in tensors if x.device.type == "cuda"}
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng(devices=list(devices)):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
