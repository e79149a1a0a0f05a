"""The records that the user's data loader asks for, and their order."""

from __future__ import annotations

import numbers
from collections.abc import Hashable, Iterator, Sequence, Sized
from typing import Any

import attrs
import numpy as np
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    DistributedSampler,
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
from hidden_state_adapters.batch_plans import BatchPlan, RandomKeys, plan_of
from hidden_state_adapters.opacus.loader import OrderedBatchSampler

_FIXED_ORDER = (
    "Pass a DataLoader(dataset, batch_size=b, shuffle=False); for another order use "
    "torch.utils.data.Subset(dataset, order) with an order that does not depend on the records. "
    "It counts as public."
)


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
    seed_is_secret: bool = attrs.field(default=False, kw_only=True)
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
        self._check_seed()

    def _check_seed(self) -> None:
        """Refuses a seed where it would give away an order that has to stay secret.

        Whoever knows the seed knows the order. SHUFFLED_ONCE is then a fixed order and accounted
        as CYCLIC. The others then have a known place of every record in every epoch or step; no
        bound here is about such runs, and composition over all of them is no better than CYCLIC.
        """
        order, seed, is_secret = self.order, self.seed, self.seed_is_secret
        if not isinstance(is_secret, bool):
            raise TypeError(f"Expected seed_is_secret to be True or False, got {is_secret!r}.")
        if self.max_batch_size is not None and order not in OF_RANDOM_SIZE:
            raise ValueError(
                f'Expected max_batch_size = None with batch_order="{order.value}", got '
                f"{self.max_batch_size}: only Poisson batches and balls in bins vary in size. "
                "Leave it out."
            )
        if seed is None:
            if is_secret:
                raise ValueError(
                    "Expected seed_is_secret = False without a seed, got True: an order that is "
                    "drawn without a seed is secret anyway. Leave it out."
                )
            return
        if isinstance(seed, bool) or not isinstance(seed, numbers.Integral):
            raise TypeError(f"Expected seed to be an integer or None, got {type(seed).__name__}.")
        if seed < 0:
            raise ValueError("Expected seed >= 0, got a negative number.")
        if order in (BatchOrder.CYCLIC, BatchOrder.FULL):
            raise ValueError(
                f'Expected seed = None with batch_order="{order.value}", which draws nothing. Use '
                'Batches("shuffled_once", seed=...).'
            )
        if order is not BatchOrder.SHUFFLED_ONCE and not is_secret:
            raise UnsupportedRunError(
                f'Expected seed = None with batch_order="{order.value}", got a seed: whoever knows '
                "it knows which steps used a record, and the guarantee rests on nobody knowing. "
                "Leave it out (the order then comes from the operating system's random source), "
                'use "shuffled_once" (a seed makes it public, accounted as cyclic), or say that it '
                "is secret if it is random and never written down: seed_is_secret=True."
            )


def plan_batches(
    data_loader: DataLoader, batches: Batches, *, secret: bytes | None = None
) -> BatchPlan:
    """The batches of a run over the records and with the batch size that `data_loader` asks for.

    Args:
        data_loader: The user's loader. CYCLIC takes its batch size and order; FULL puts every
            record into one batch, whatever the batch size; POISSON takes its records and, unless
            `batches` has constants, its number of batches; all others take its batch size and
            records and draw the order themselves.
        batches: Batch order with its options.
        secret: What several processes draw the same order from, where there is no seed.

    Returns:
        The plan. Its `order` is the one to account: CYCLIC for SHUFFLED_ONCE with a public seed.

    Raises:
        UnsupportedRunError: The loader samples, streams or repeats records, shuffles where the
            order has to be fixed, or b does not divide the number of records of an order that
            deals equal batches and the loader does not say ``drop_last=True``.
    """
    order, rate = batches.order, batches.sampling_rate
    records = _record_order(data_loader, order)
    refuse_repeated_records(data_loader.dataset)
    if not records:
        raise UnsupportedRunError("Expected at least one record, got an empty data set.")
    sampler: Any = data_loader.batch_sampler
    num_batches = None
    if order is BatchOrder.POISSON and rate is None:
        num_batches = len(data_loader)
        if num_batches == 0:
            raise UnsupportedRunError(
                f"Expected at least one batch, got a batch_size of {sampler.batch_size} for "
                f"{len(records)} records and drop_last=True. Lower the batch size, or leave "
                "drop_last out."
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
    """The order of the batches where `make_private` is told none: that of Opacus' own engine.

    Args:
        data_loader: The user's loader.
        poisson_sampling: Argument of Opacus, which takes True where nothing is said. False leaves
            the batches to the loader.
    """
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
    if isinstance(data_loader.dataset, IterableDataset):
        raise UnsupportedRunError(
            "Expected a data set with an index, got an IterableDataset: its order cannot be "
            f"checked. Load it into a map-style data set. {_FIXED_ORDER}"
        )
    batches, sampler = data_loader.batch_sampler, data_loader.sampler
    if isinstance(batches, OrderedBatchSampler):
        return batches.plan.records
    if batches is None:
        raise UnsupportedRunError(
            "Expected a DataLoader with a batch_size, got batch_size=None: without batches there "
            f"is no step to account. {_FIXED_ORDER}"
        )
    if type(batches) is not BatchSampler:
        raise UnsupportedRunError(
            f"Expected a DataLoader with a batch_size, got batch_sampler={_name(batches)}, whose "
            f"batches may overlap or vary in size. {_FIXED_ORDER}"
        )
    sampler = batches.sampler
    size = len(data_loader.dataset)  # type: ignore[arg-type]
    is_whole = type(sampler) is RandomSampler and not sampler.replacement
    is_whole = is_whole and sampler.num_samples == size
    if (is_whole or type(sampler) is SubsetRandomSampler) and batch_order is BatchOrder.CYCLIC:
        raise UnsupportedRunError(
            f'Expected records in a fixed order with batch_order="{batch_order.value}", got '
            f"{'shuffle=True' if is_whole else 'SubsetRandomSampler'}, which draws a new order in "
            'every epoch. Pass batch_order="reshuffled" for a new secret order in every epoch, or '
            'batch_order="poisson" for Opacus\' sampling; both are drawn here. For a fixed, public '
            "order pass shuffle=False."
        )
    # Elsewhere the order of the loader does not matter.
    if is_whole or (
        type(sampler) is SequentialSampler and sampler.data_source is data_loader.dataset
    ):
        return range(size)
    indices = sampler.indices if type(sampler) is SubsetRandomSampler else sampler
    if isinstance(indices, list | tuple | range) or indices is not sampler:
        name = "the sampler" if indices is sampler else "SubsetRandomSampler"
        _refuse_repeated_indices(indices, data_loader.dataset, name)
        return indices if isinstance(indices, range) else tuple(int(index) for index in indices)
    shuffles = "a sampler may repeat, leave out or reorder records"
    if isinstance(sampler, DistributedSampler):
        shuffles = (
            "it repeats records so that all processes get equally many. Leave it out: make_private "
            "gives every process its part of every batch"
        )
    raise UnsupportedRunError(
        f"Expected records in the fixed order of the data set, got sampler={_name(sampler)}: "
        f"{shuffles}. {_FIXED_ORDER}"
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
                "twice (the same data set, the same tensors behind two, or subsets or slices that "
                "overlap): one person would count once but act twice. Remove the copy."
            )


def _has_repeated_records(dataset: ConcatDataset) -> bool:
    """Tells whether parts share a record: an element of a data set, or rows in memory."""
    found: dict[Hashable, list[np.ndarray]] = {}
    for part in dataset.datasets:
        for source, places in _places(part):
            found.setdefault(source, []).append(places)
    return any(
        len(np.unique(np.concatenate(groups), axis=0)) < sum(map(len, groups))
        for groups in found.values()
        if len(groups) > 1
    )


def _places(dataset: Any) -> Iterator[tuple[Hashable, np.ndarray]]:
    """Yields sources of records, and a row of integers for each record: its place in the source."""
    if isinstance(dataset, ConcatDataset):
        for part in dataset.datasets:
            yield from _places(part)
    else:
        indices: Any = np.arange(len(dataset))
        while isinstance(dataset, Subset):
            indices = _from_the_start(np.asarray(dataset.indices)[indices], dataset.dataset)
            dataset = dataset.dataset
        if not isinstance(dataset, TensorDataset):
            yield id(dataset), indices[:, None]
            return
        rows = [t.storage_offset() + indices * t.stride(0) for t in dataset.tensors]
        storages = tuple(tensor.untyped_storage().data_ptr() for tensor in dataset.tensors)
        yield storages, np.stack(rows, axis=1)


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


def _name(sampler: Any) -> str:
    return type(sampler).__name__
