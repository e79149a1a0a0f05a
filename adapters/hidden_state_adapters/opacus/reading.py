"""The batches of a loader that somebody else made, as it shows them."""

from __future__ import annotations

import math
from typing import Any

import attrs
import torch
from opacus.utils.uniform_sampler import (
    DistributedUniformWithReplacementSampler,
    UniformWithReplacementSampler,
)
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler

from hidden_state_accountants import BatchOrder, UnsupportedRunError
from hidden_state_adapters.opacus.loader import OrderedBatchSampler
from hidden_state_adapters.opacus.order import (
    Batches,
    plan_batches,
    refuse_repeated_records,
)

# A seed that was drawn by the operating system has 64 bits, one that a person wrote has not.
_LEAST_SECRET_SEED = 2**32
_SEED_OF_NEW_GENERATORS = torch.Generator().initial_seed()  # a constant of torch


@attrs.frozen(eq=False, kw_only=True)
class LoaderReading:
    """The batches of a loader.

    Attributes:
        order: FULL, CYCLIC, RESHUFFLED or POISSON.
        dataset_size: n, the records that it deals.
        batch_size: b; for POISSON what make_private divides by: n / num_batches, rounded down.
        num_batches: Batches of one pass.
        sampling_rate: The probability with which a record joins a POISSON batch, which is a little
            more than the rate that the sampler was given (see `drawn_rate`); else None.
        sampler: Deals the batches.
    """

    order: BatchOrder
    dataset_size: int
    batch_size: int
    num_batches: int
    sampling_rate: float | None = None
    sampler: Any = attrs.field(repr=False)

    @property
    def description(self) -> str:
        """The batches in words."""
        b, n = self.batch_size, self.dataset_size
        return {
            BatchOrder.FULL: f"all {n} records in every batch",
            BatchOrder.CYCLIC: f"batches of {b} of {n} records, each once per epoch, in the same "
            "order in every epoch",
            BatchOrder.RESHUFFLED: f"batches of {b} of {n} records, each once per epoch, in an "
            "order that is drawn anew for every epoch",
            BatchOrder.POISSON: f"each of {n} records in every batch with probability "
            f"{self.sampling_rate or 0:.8g}, independently",
        }[self.order]

    @property
    def fields(self) -> dict[str, Any]:
        """The arguments of a `RunRecorder` that it decides."""
        is_exact = self.sampling_rate == self.batch_size / self.dataset_size
        return {
            "batch_order": self.order,
            "dataset_size": self.dataset_size,
            "batch_size": self.batch_size,
            "sampling_rate": None if is_exact else self.sampling_rate,
        }


def poisson_rate(data_loader: Any) -> float:
    """The rate of Poisson batches, of which one batch of all records is one; inf for others."""
    try:
        reading = read_loader(data_loader)
    except UnsupportedRunError:
        return math.inf
    if reading.order is BatchOrder.FULL:
        return 1.0
    return math.inf if reading.sampling_rate is None else reading.sampling_rate


def _is_poisson_sampler(batches: Any) -> bool:
    kinds = (UniformWithReplacementSampler, DistributedUniformWithReplacementSampler)
    return type(batches) in kinds


def draws_from_shares(data_loader: Any) -> bool:
    """Tells whether every process draws Poisson batches from a share of the records of its own."""
    batches = getattr(data_loader, "batch_sampler", None)
    return type(batches) is DistributedUniformWithReplacementSampler


def read_loader(data_loader: Any) -> LoaderReading:
    """Reads the batches of a torch DataLoader or of Opacus' DPDataLoader.

    Args:
        data_loader: With torch's sampler of batches over a sampler that is fixed or
            RandomSampler, or with one of Opacus' Poisson samplers.

    Raises:
        UnsupportedRunError: It is another loader, which cannot be read, or it deals batches that
            no bound here is about; the text says what to use.
    """
    if not isinstance(data_loader, DataLoader):
        raise UnsupportedRunError(
            f"Expected a torch.utils.data.DataLoader, got {type(data_loader).__name__}: its "
            "batches cannot be read. Put the records into a DataLoader."
        )
    if _is_poisson_sampler(data_loader.batch_sampler):
        return _read_poisson(data_loader)
    if isinstance(data_loader.batch_sampler, OrderedBatchSampler):
        raise UnsupportedRunError(
            f"Expected a loader of your own, got the {type(data_loader).__name__} that "
            "HiddenStatePrivacyEngine made for another run. Pass the one that it was made from."
        )
    return _read_equal_batches(data_loader)


def drawn_rate(rate: float, dtype: torch.dtype = torch.float32) -> float:
    """The probability that `torch.rand(..., dtype=dtype) < rate`, which is how Opacus samples.

    torch draws multiples of 2**-24 in float32 (of 2**-53 in float64) and compares them with `rate`
    in that precision, so that a record joins a batch with the rate rounded up: by 5e-6 of it at
    0.01, by 1.4e-3 at 1e-5.
    """
    numbers = 2 / torch.finfo(dtype).eps
    return min(1.0, math.ceil(float(torch.tensor(rate, dtype=dtype)) * numbers) / numbers)


def _read_poisson(data_loader: DataLoader) -> LoaderReading:
    refuse_repeated_records(data_loader.dataset)
    batches: Any = data_loader.batch_sampler
    size = batches.total_size if draws_from_shares(data_loader) else batches.num_samples
    # As in Opacus' make_private, to the last bit.
    batch_size = int(size * (1 / len(data_loader)))
    return LoaderReading(
        order=BatchOrder.POISSON,
        dataset_size=size,
        batch_size=max(1, batch_size),
        num_batches=len(data_loader),
        sampling_rate=drawn_rate(float(batches.sample_rate), torch.get_default_dtype()),
        sampler=batches,
    )


def _read_equal_batches(data_loader: DataLoader) -> LoaderReading:
    sampler: Any = getattr(data_loader.batch_sampler, "sampler", None)
    shuffles = type(sampler) in (RandomSampler, SubsetRandomSampler)
    plan = plan_batches(
        data_loader, Batches(BatchOrder.RESHUFFLED if shuffles else BatchOrder.CYCLIC)
    )
    size = len(plan.records)
    if shuffles and size < len(sampler):
        raise UnsupportedRunError(
            f"Expected a batch_size that divides the {len(sampler)} records, got "
            f"{plan.batch_size}: with shuffle=True, drop_last=True leaves out other records in "
            "every epoch, and no bound here is about that. Leave the same records out with "
            f"torch.utils.data.Subset(dataset, range({size})), or use poisson_sampling=True."
        )
    is_full = plan.num_batches == 1
    if shuffles and not is_full:
        _refuse_known_seed(sampler)
    return LoaderReading(
        order=BatchOrder.FULL if is_full else plan.order,
        dataset_size=size,
        batch_size=plan.batch_size,
        num_batches=plan.num_batches,
        sampler=data_loader.batch_sampler,
    )


def _refuse_known_seed(sampler: Any) -> None:
    """Raises UnsupportedRunError if a script seeded what shuffles."""
    seed = (sampler.generator or torch.default_generator).initial_seed()
    if seed >= _LEAST_SECRET_SEED and seed != _SEED_OF_NEW_GENERATORS:
        return
    raise UnsupportedRunError(
        "the loader shuffles with a generator that a script seeded "
        f"({'with ' + str(seed) if seed < _LEAST_SECRET_SEED else 'torch.Generator()'}): whoever "
        "knows the seed knows which steps used a record, and no bound here is about such orders. "
        "Do not seed torch, or give the DataLoader "
        "generator=torch.Generator().manual_seed(secrets.randbits(63)), or use "
        'HiddenStatePrivacyEngine with batch_order="reshuffled", which draws secret orders from '
        "the operating system; without secrets, shuffle=False."
    )
