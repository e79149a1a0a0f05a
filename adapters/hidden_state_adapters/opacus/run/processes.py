"""How many processes train together."""

from __future__ import annotations

from typing import Any

import torch

from hidden_state_accountants import UnsupportedRunError
from hidden_state_adapters.opacus.data.reading import draws_from_shares


def num_processes(optimizer: Any = None) -> int:
    """The number of processes of the group, as far as torch or a distributed optimizer says."""
    is_group = torch.distributed.is_available() and torch.distributed.is_initialized()
    count = torch.distributed.get_world_size() if is_group else 1
    return max(count, getattr(optimizer, "world_size", 1))


def check_processes(data_loader: Any, count: int) -> None:
    """Refuses several processes whose batches together cannot be read.

    The processes add up their sums, so a step uses the batches of all of them at once. Opacus'
    Poisson sampler for several processes makes one Poisson batch of them, since every process
    draws from a share of the records. Of other loaders a process sees its own batches only: the
    participations of a record in those of the others go unseen.

    Raises:
        UnsupportedRunError: There are several processes with another loader.
    """
    if count == 1 or draws_from_shares(data_loader):
        return
    raise UnsupportedRunError(
        f"Expected one process, got {count} with {type(data_loader).__name__} loaders of their "
        "own: a step uses the batches of all processes, and the size and order of a batch across "
        "them cannot be read. Train in a single process, or with Poisson batches (DPDDP and "
        "poisson_sampling=True), which are accounted by composition."
    )
