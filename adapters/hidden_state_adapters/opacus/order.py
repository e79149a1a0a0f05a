"""The records that a data loader asks for and their order: of the user's, or of a foreign one."""

from __future__ import annotations

import math
import numbers
from collections.abc import Hashable, Iterator, Sequence, Sized
from typing import Any

import attrs
import numpy as np
import torch
from opacus.utils.uniform_sampler import (
    DistributedUniformWithReplacementSampler,
    UniformWithReplacementSampler,
)
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)

from hidden_state_accountants import BatchOrder, UnsupportedRunError, validate
from hidden_state_accountants.events.batch_order import (
    OF_RANDOM_SIZE,
    parse_batch_order,
    parse_sampling_rate,
)
from hidden_state_adapters.batch_plans import BatchPlan, RandomKeys, SampledPlan, plan_of
from hidden_state_adapters.opacus.loader import OrderedBatchSampler

_FIXED_ORDER = (
    "Pass a DataLoader(dataset, batch_size=b, shuffle=False); for another public order of "
    "torch.utils.data.Subset(dataset, order)."
)
# A seed that was drawn by the operating system has 64 bits, one that a person wrote has not.
_LEAST_SECRET_SEED = 2**32
_SEED_OF_NEW_GENERATORS = torch.Generator().initial_seed()  # a constant of torch
_POISSON_SAMPLERS = (UniformWithReplacementSampler, DistributedUniformWithReplacementSampler)


@attrs.frozen
class Batches:
    """A batch order with its options: for `batch_order`.

    Args:
        order: A BatchOrder, or its name.
        seed: Fixes a random order, which is then known to whoever knows the seed: "shuffled_once"
            is accounted as cyclic, the others are refused.
        seed_is_secret: The seed is random and nobody else will ever know it.
        max_batch_size: Cap on "poisson" batches and balls in bins: a uniform subset of this size
            stays. The chance that the cap acts is added to delta.
        sampling_rate: Constant probability with which a record joins one of those batches; a pass
            has 1/sampling_rate batches, rounded up. Goes with `batch_size`. None takes both from
            the loader, which computes them from the number of records.
        batch_size: Constant divisor of the noisy sums of those batches.

    Raises:
        TypeError, ValueError: An argument has an impossible value.
        UnsupportedRunError: The seed gives away an order that has to stay secret.
    """

    order: BatchOrder = attrs.field(converter=parse_batch_order)
    seed: int | None = attrs.field(default=None, repr=False, kw_only=True)
    seed_is_secret: bool = attrs.field(default=False, kw_only=True, validator=validate.FLAG)
    max_batch_size: int | None = attrs.field(default=None, kw_only=True)
    sampling_rate: float | None = attrs.field(default=None, kw_only=True)
    batch_size: int | None = attrs.field(default=None, kw_only=True)

    def __attrs_post_init__(self) -> None:
        if (self.sampling_rate is None) is not (self.batch_size is None):
            raise ValueError(
                "Expected sampling_rate and batch_size, or neither, got sampling_rate = "
                f"{self.sampling_rate!r} and batch_size = {self.batch_size!r}: one of them alone "
                "would leave the other to the number of records. Pass both."
            )
        if self.sampling_rate is not None:
            rate = parse_sampling_rate(self.order, self.sampling_rate)
            object.__setattr__(self, "sampling_rate", rate)
            validate.integer("batch_size", self.batch_size, minimum=1)
        order, seed = self.order, self.seed
        if self.max_batch_size is not None and order not in OF_RANDOM_SIZE:
            raise ValueError(
                f'Expected max_batch_size = None with batch_order="{order.value}", got '
                f"{self.max_batch_size}: only Poisson batches and balls in bins vary in size. "
                "Leave it out."
            )
        if seed is None:
            return
        if isinstance(seed, bool) or not isinstance(seed, numbers.Integral) or seed < 0:
            raise ValueError("Expected seed to be an integer >= 0 or None, got another value.")
        if order is not BatchOrder.SHUFFLED_ONCE and not self.seed_is_secret:
            raise UnsupportedRunError(
                f'Expected seed = None with batch_order="{order.value}", got a seed: whoever knows '
                "it knows which steps used a record. Leave it out; or, of a random seed that "
                "nobody else will ever know, pass seed_is_secret=True."
            )


def plan_batches(
    data_loader: DataLoader, batches: Batches, *, secret: bytes | None = None
) -> BatchPlan:
    """Returns the batches of a run over the records that the user's loader asks for.

    CYCLIC takes its batch size and order; FULL puts every record into one batch; POISSON takes its
    records and, unless `batches` has constants, its number of batches; all others take its batch
    size and records. The order of the plan is the one to account: CYCLIC for SHUFFLED_ONCE with a
    public seed.

    Args:
        data_loader: The user's loader.
        batches: Batch order with its options.
        secret: What several processes draw the same order from, where there is no seed.

    Raises:
        UnsupportedRunError: The loader samples, streams or repeats records, shuffles where the
            order has to be fixed, or b does not divide the number of records of an order that
            deals equal batches and the loader does not say ``drop_last=True``.
    """
    order, rate = batches.order, batches.sampling_rate
    records = _record_order(data_loader, order)
    refuse_repeated_records(data_loader.dataset)
    sampler: Any = data_loader.batch_sampler
    num_batches = None
    if order is BatchOrder.POISSON and rate is None:
        num_batches = len(data_loader)
        if num_batches == 0:
            raise UnsupportedRunError(
                f"Expected at least one batch, got a batch_size of {sampler.batch_size} for "
                f"{len(records)} records. Lower the batch size."
            )
    plan = plan_of(
        order,
        records,
        batches.batch_size or sampler.batch_size,
        RandomKeys(batches.seed, secret if batches.seed is None else None),
        max_batch_size=batches.max_batch_size,
        sampling_rate=rate,
        num_batches=num_batches,
        drops=data_loader.drop_last or getattr(sampler, "drop_last", False),
        how="drop_last=True",
    )
    if order is BatchOrder.SHUFFLED_ONCE and plan.is_seeded and not batches.seed_is_secret:
        plan.order = BatchOrder.CYCLIC
    return plan


def default_order(data_loader: DataLoader, poisson_sampling: bool | None) -> BatchOrder:
    """Returns the order where none is told: that of Opacus' engine, or the loader's."""
    if poisson_sampling is not False:
        return BatchOrder.POISSON
    batches = getattr(data_loader, "batch_sampler", None)
    if isinstance(batches, OrderedBatchSampler):
        return batches.plan.order
    sampler = getattr(batches, "sampler", None)
    if isinstance(sampler, Sized) and getattr(batches, "batch_size", 0) >= len(sampler):
        return BatchOrder.FULL
    shuffles = type(sampler) in (RandomSampler, SubsetRandomSampler)
    return BatchOrder.RESHUFFLED if shuffles else BatchOrder.CYCLIC


def _record_order(data_loader: DataLoader, batch_order: BatchOrder) -> Sequence[int]:
    """Returns the records that a loader asks for, in its order if that is fixed."""
    batches, dataset = data_loader.batch_sampler, data_loader.dataset
    if isinstance(batches, OrderedBatchSampler):
        return batches.plan.records
    if isinstance(dataset, IterableDataset) or type(batches) is not BatchSampler:
        got = "batch_size=None" if batches is None else f"batch_sampler={type(batches).__name__}"
        got = "an IterableDataset" if isinstance(dataset, IterableDataset) else got
        raise UnsupportedRunError(
            f"Expected a map-style data set in batches of a batch_size, got {got}: which records "
            f"a batch holds cannot be read. {_FIXED_ORDER}"
        )
    sampler = batches.sampler
    size = len(dataset)  # type: ignore[arg-type]
    is_whole = type(sampler) is RandomSampler and not sampler.replacement
    is_whole = is_whole and sampler.num_samples == size
    if (is_whole or type(sampler) is SubsetRandomSampler) and batch_order is BatchOrder.CYCLIC:
        raise UnsupportedRunError(
            'Expected records in a fixed order with batch_order="cyclic", got '
            f"{'shuffle=True' if is_whole else 'SubsetRandomSampler'}. Pass "
            'batch_order="reshuffled" for a new secret order in every epoch, or "poisson" for '
            "Opacus' sampling; for a fixed, public order shuffle=False."
        )
    # Elsewhere the order of the loader does not matter.
    if is_whole or (type(sampler) is SequentialSampler and sampler.data_source is dataset):
        return range(size)
    indices = sampler.indices if type(sampler) is SubsetRandomSampler else sampler
    if isinstance(indices, list | tuple | range) or indices is not sampler:
        _refuse_repeated_indices(indices, dataset, "the sampler")
        return indices if isinstance(indices, range) else tuple(int(index) for index in indices)
    raise UnsupportedRunError(
        f"Expected records in the fixed order of the data set, got sampler="
        f"{type(sampler).__name__}: a sampler may repeat, leave out or reorder records (several "
        f"processes need none: each gets its part of every batch). {_FIXED_ORDER}"
    )


def refuse_repeated_records(dataset: Any) -> None:
    """Raises UnsupportedRunError if a data set holds a record twice, as far as torch says."""
    if isinstance(dataset, Subset):
        _refuse_repeated_indices(dataset.indices, dataset.dataset, "torch.utils.data.Subset")
        refuse_repeated_records(dataset.dataset)
    elif isinstance(dataset, ConcatDataset):
        for part in dataset.datasets:
            refuse_repeated_records(part)
        if _has_repeated_records(dataset):
            raise UnsupportedRunError(
                "Expected every record once per epoch, got a ConcatDataset that holds a record "
                "twice: one person would count once but act twice. Remove the copy."
            )


def _has_repeated_records(dataset: ConcatDataset) -> bool:
    """Tells whether parts share a record: an element of a data set, or rows in memory."""
    found: dict[Hashable, list[np.ndarray]] = {}
    for source, places in _places(dataset, np.arange(len(dataset))):
        found.setdefault(source, []).append(places)
    return any(len(np.unique(np.concatenate(p), axis=0)) < sum(map(len, p)) for p in found.values())


def _places(dataset: Any, indices: np.ndarray) -> Iterator[tuple[Hashable, np.ndarray]]:
    """Yields sources of records, and a row of integers for the place of each at `indices`."""
    if isinstance(dataset, Subset):
        own = _from_the_start(np.asarray(dataset.indices)[indices], dataset.dataset)
        yield from _places(dataset.dataset, own)
    elif isinstance(dataset, ConcatDataset):
        ends = [0, *dataset.cumulative_sizes]
        for part, start, end in zip(dataset.datasets, ends, ends[1:], strict=False):
            yield from _places(part, indices[(start <= indices) & (indices < end)] - start)
    elif isinstance(dataset, TensorDataset):
        storages = tuple(tensor.untyped_storage().data_ptr() for tensor in dataset.tensors)
        rows = [t.storage_offset() + indices * t.stride(0) for t in dataset.tensors]
        yield storages, np.stack(rows, axis=1)
    else:
        yield id(dataset), indices[:, None]


def _from_the_start(indices: Sequence[int], dataset: Any) -> np.ndarray:
    """Places in `dataset`; -1 is its last one."""
    places = np.array([int(index) for index in indices], dtype=np.int64)
    if (places < 0).any():
        places[places < 0] += len(dataset)
    return places


def _refuse_repeated_indices(indices: Sequence[int], dataset: Any, where: str) -> None:
    if len(np.unique(_from_the_start(indices, dataset))) < len(indices):
        raise UnsupportedRunError(
            f"Expected every record once per epoch, got an index twice in {where}: the record "
            "would act twice and be accounted once. Remove the repetition."
        )


# Loaders that somebody else made


def description_of(plan: BatchPlan) -> str:
    """Returns the batches of a foreign loader in words."""
    b, n = plan.batch_size, plan.dataset_size
    if plan.order is BatchOrder.FULL:
        return f"all {n} records in every batch"
    if plan.order is BatchOrder.POISSON:
        rate = plan.sampling_rate or b / n
        return f"each of {n} records in every batch with probability {rate:.8g}, independently"
    order = "in the same order in every epoch"
    if plan.order is BatchOrder.RESHUFFLED:
        order = "in an order that is drawn anew for every epoch"
    return f"batches of {b} of {n} records, each once per epoch, {order}"


def poisson_rate(data_loader: Any) -> float:
    """Returns the rate of Poisson batches, of which one of all records is one; inf for others."""
    try:
        plan = read_loader(data_loader)
    except UnsupportedRunError:
        return math.inf
    if plan.order not in (BatchOrder.FULL, BatchOrder.POISSON):
        return math.inf
    return plan.sampling_rate or plan.batch_size / plan.dataset_size


def draws_from_shares(data_loader: Any) -> bool:
    """Tells whether every process draws Poisson batches from a share of the records of its own."""
    batches = getattr(data_loader, "batch_sampler", None)
    return type(batches) is DistributedUniformWithReplacementSampler


def read_loader(data_loader: Any) -> BatchPlan:
    """Reads the batches of a torch DataLoader or of Opacus' DPDataLoader; nobody deals the plan.

    Its order is FULL, CYCLIC, RESHUFFLED or POISSON, its batch_size what Opacus divides by.

    Raises:
        UnsupportedRunError: It is another loader, which cannot be read, or it deals batches that
            no bound here is about.
    """
    batches = getattr(data_loader, "batch_sampler", None)
    if not isinstance(data_loader, DataLoader) or isinstance(batches, OrderedBatchSampler):
        raise UnsupportedRunError(
            f"Expected a torch.utils.data.DataLoader of your own, got {type(data_loader).__name__}:"
            " its batches cannot be read. Put the records into a DataLoader."
        )
    is_poisson = type(batches) in _POISSON_SAMPLERS
    return _read_poisson(data_loader) if is_poisson else _read_equal_batches(data_loader)


def drawn_rate(rate: float, dtype: torch.dtype = torch.float32) -> float:
    """Returns the probability that `torch.rand(..., dtype=dtype) < rate`, as Opacus samples.

    torch draws multiples of 2**-24 in float32 (of 2**-53 in float64) and compares them with `rate`
    in that precision, so that a record joins with the rate rounded up: by 1.4e-3 of it at 1e-5.
    """
    numbers = 2 / torch.finfo(dtype).eps
    return min(1.0, math.ceil(float(torch.tensor(rate, dtype=dtype)) * numbers) / numbers)


def _read_poisson(data_loader: DataLoader) -> BatchPlan:
    refuse_repeated_records(data_loader.dataset)
    batches: Any = data_loader.batch_sampler
    size = batches.total_size if draws_from_shares(data_loader) else batches.num_samples
    # As in Opacus' make_private, to the last bit.
    batch_size = max(1, int(size * (1 / len(data_loader))))
    rate: float | None = drawn_rate(float(batches.sample_rate), torch.get_default_dtype())
    rate = None if rate == batch_size / size else rate
    return SampledPlan(range(size), batch_size, BatchOrder.POISSON, RandomKeys(), None, rate)


def _read_equal_batches(data_loader: DataLoader) -> BatchPlan:
    sampler: Any = getattr(data_loader.batch_sampler, "sampler", None)
    shuffles = type(sampler) in (RandomSampler, SubsetRandomSampler)
    plan = plan_batches(
        data_loader, Batches(BatchOrder.RESHUFFLED if shuffles else BatchOrder.CYCLIC)
    )
    size = len(plan.records)
    if shuffles and size < len(sampler):
        raise UnsupportedRunError(
            f"Expected a batch_size that divides the {len(sampler)} records, got "
            f"{plan.batch_size}: drop_last=True leaves out other records in every epoch. Leave the "
            f"same ones out with torch.utils.data.Subset(dataset, range({size}))."
        )
    if plan.num_batches == 1:
        plan.order = BatchOrder.FULL
    elif shuffles:
        seed = (sampler.generator or torch.default_generator).initial_seed()
        if seed < _LEAST_SECRET_SEED or seed == _SEED_OF_NEW_GENERATORS:
            raise UnsupportedRunError(
                "Expected a secret order, got a loader that shuffles with a generator that a "
                "script seeded: whoever knows the seed knows which steps used a record. Give the "
                "DataLoader generator=torch.Generator().manual_seed(secrets.randbits(63))."
            )
    return plan
