"""Private loaders: batches of the plan, options that stay, orders that are refused."""

import itertools
import logging

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    IterableDataset,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

import hidden_state_accountants as hsa
from hidden_state_accountants import BatchOrder
from hidden_state_adapters.opacus.loader import (
    BatchCursor,
    private_loader,
)
from hidden_state_adapters.opacus.order import Batches, plan_batches


def numbers(size):
    return TensorDataset(torch.arange(size))


def deal(loader, order=BatchOrder.CYCLIC):
    plan = plan_batches(loader, Batches(order))
    return private_loader(loader, plan, BatchCursor(plan.num_batches))


def batches(loader):
    return [batch[0].tolist() for batch in loader]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_same_batches_in_every_epoch(workers):
    loader = deal(DataLoader(numbers(12), batch_size=4, num_workers=workers))
    expected = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert batches(loader) == batches(loader) == expected
    assert len(loader) == 3
    assert isinstance(loader.batch_sampler, BatchSampler)


def test_the_cursor_moves_on_yield_in_the_main_process():
    loader = deal(DataLoader(numbers(12), batch_size=2, num_workers=2, persistent_workers=True))
    cursor = loader.batch_sampler.cursor
    for _ in range(2):
        for index, _ in enumerate(loader):
            assert cursor.take() == (index, False)
            cursor.steps_taken += 1
        assert cursor.take() == (None, False)


def test_options_of_the_loader_are_kept():
    def collate(rows):
        return [torch.stack([row[0] for row in rows]) + 100]

    def init(worker):
        pass

    loader = deal(
        DataLoader(
            numbers(4), batch_size=2, collate_fn=collate, num_workers=1, worker_init_fn=init,
            timeout=30, prefetch_factor=3, persistent_workers=True,
        )
    )  # fmt: skip
    assert batches(loader) == [[100, 101], [102, 103]]
    assert (loader.worker_init_fn, loader.timeout, loader.prefetch_factor) == (init, 30, 3)
    assert loader.persistent_workers


def test_batch_size_that_does_not_divide(caplog):
    with pytest.raises(hsa.UnsupportedRunError, match=r"divides the 10 records, got 4.*drop_last"):
        deal(DataLoader(numbers(10), batch_size=4))
    with caplog.at_level(logging.INFO, "hidden_state_accountants"):
        loader = deal(DataLoader(numbers(10), batch_size=4, drop_last=True))
    assert batches(loader) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [record.message for record in caplog.records] == [
        "drop_last=True: batches of 4 use the first 8 of 10 records; dataset_size is 8"
    ]
    with pytest.raises(hsa.UnsupportedRunError, match=r"batch_size <= 3.*Lower it"):
        deal(DataLoader(numbers(3), batch_size=4, drop_last=True))


@pytest.mark.parametrize("shuffle", [False, True])
def test_full_is_one_batch_of_everything(shuffle):
    loader = deal(DataLoader(numbers(10), batch_size=4, shuffle=shuffle), BatchOrder.FULL)
    assert batches(loader) == [list(range(10))]


def test_explicit_orders():
    order = [3, 1, 2, 0]
    assert batches(deal(DataLoader(numbers(4), batch_size=2, sampler=order))) == [[3, 1], [2, 0]]
    subset = Subset(numbers(9), [8, 7, 0, 1])
    loader = deal(DataLoader(subset, batch_size=2))
    assert batches(loader) == [[8, 7], [0, 1]]
    assert batches(deal(loader)) == [[8, 7], [0, 1]]  # a private loader is fine again


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


@pytest.mark.parametrize(
    ("loader", "text"),
    [
        (lambda: DataLoader(numbers(4), batch_size=2, shuffle=True), "shuffle=False"),
        (
            lambda: DataLoader(numbers(2), batch_size=2, sampler=WeightedRandomSampler([1.0], 2)),
            "WeightedRandomSampler",
        ),
        (
            lambda: DataLoader(numbers(4), batch_size=2, sampler=SequentialSampler(numbers(3))),
            "SequentialSampler",
        ),
        (
            lambda: DataLoader(
                numbers(4), batch_sampler=[[0, 1], [1, 2]]
            ),
            "batch_sampler=list",
        ),
        (lambda: DataLoader(numbers(4), batch_size=None), "batch_size=None"),
        (lambda: DataLoader(Stream(), batch_size=2), "IterableDataset"),
        (lambda: DataLoader(numbers(4), batch_size=2, sampler=[0, 1, 1, 2]), "index twice"),
        (lambda: DataLoader(Subset(numbers(4), [0, 0]), batch_size=2), "index twice"),
        (
            lambda: DataLoader(Subset(Subset(numbers(4), [1, 1, 2]), [0, 1]), batch_size=2),
            "index twice",
        ),
        (lambda: DataLoader(ConcatDataset([(d := numbers(2)), d]), batch_size=2), "a record twice"),
    ],
)  # fmt: skip
def test_orders_that_are_refused(loader, text):
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        deal(loader())


@pytest.mark.parametrize("workers", [0, 1])
def test_a_look_within_a_pass_is_over_when_its_iterator_is_gone(workers):
    loader = deal(DataLoader(numbers(8), batch_size=2, num_workers=workers))
    dealt = []
    for (batch,) in loader:
        dealt.append(batch.tolist())
        next(iter(loader))
        for other in loader:
            next(iter(loader))
            assert len(other[0]) == 2
        assert loader.batch_sampler.cursor.take() == (len(dealt) - 1, False)
        loader.batch_sampler.cursor.steps_taken += 1
    assert dealt == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize(("order", "workers"), [("cyclic", 0), ("reshuffled", 2)])
@pytest.mark.parametrize("taken", [1, 3])
def test_an_epoch_that_is_left_early_goes_on(order, workers, taken):
    """Every record acts once in an epoch, however many passes the loop makes of it."""
    loader = deal(DataLoader(numbers(8), batch_size=2, num_workers=workers), BatchOrder(order))
    cursor, used = loader.batch_sampler.cursor, []
    while len(used) < 8:
        for batch in itertools.islice(loader, taken):
            number = len(used)
            assert cursor.take() == (number % 4, False)
            cursor.steps_taken = number + 1
            used.append(batch)
    for epoch in (used[:4], used[4:8]):
        assert sorted(torch.cat([x for (x,) in epoch]).tolist()) == list(range(8))


# --- batches of a TensorDataset that are read at once ---------------------------------------------

SIZE, BATCH = 12, 5


def rows_of_all_kinds(dtype=torch.float32):
    features = torch.randn(SIZE, 3, 2, generator=torch.Generator().manual_seed(0), dtype=dtype)
    features[4, 0, 0] = torch.nan
    labels = torch.arange(SIZE) % 3
    return TensorDataset(features, labels, labels > 1, labels.to(torch.uint8))


def deal_poisson(loader):
    plan = plan_batches(loader, Batches("poisson", seed=3, seed_is_secret=True))
    return private_loader(loader, plan, BatchCursor(plan.num_batches, counts_steps=True))


@pytest.mark.parametrize(
    "dataset",
    [
        *(
            rows_of_all_kinds(dtype=dtype)
            for dtype in (torch.float32, torch.float16, torch.complex64)
        ),
        Subset(rows_of_all_kinds(), range(3, 11)),
        Subset(Subset(rows_of_all_kinds(), torch.tensor([7, -1, 5, -12, 2])), [3, 1, 0, -1]),
    ],
)
@pytest.mark.parametrize("batch_size", [1, 4])  # some Poisson batches are empty
def test_the_same_bits_as_record_by_record(dataset, batch_size):
    loader = deal_poisson(DataLoader(dataset, batch_size=batch_size))
    assert loader.rows is not None
    found, loader.rows = list(loader), None
    for a, b in zip(list(loader), found, strict=True):
        assert type(a) is type(b) is list
        for x, y in zip(a, b, strict=True):
            assert (x.dtype, x.shape) == (y.dtype, y.shape)
            assert x.numpy().tobytes() == y.numpy().tobytes()
            assert x.data_ptr() != y.data_ptr() or not x.numel()


class Scaled(TensorDataset):
    def __getitem__(self, index):
        features, *others = super().__getitem__(index)
        return features / 255, *others


@pytest.mark.parametrize(
    "loader",
    [
        {"dataset": Scaled(*rows_of_all_kinds().tensors)},
        {"dataset": ConcatDataset([rows_of_all_kinds(), TensorDataset(torch.zeros(1, 3, 2))])},
        {"dataset": [(row, 1) for row in range(SIZE)]},
        {"dataset": rows_of_all_kinds(), "num_workers": 1},
        {"dataset": rows_of_all_kinds(), "collate_fn": lambda rows: default_collate(rows)},
    ],
)
def test_all_others_are_read_as_they_are(loader):
    assert deal_poisson(DataLoader(batch_size=BATCH, **loader)).rows is None
