"""Private loaders: batches of the plan, options that stay, orders that are refused."""

import logging

import pytest
import torch
from torch.utils.data import (
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
from hidden_state_adapters.opacus.loader import BatchCursor, private_loader
from hidden_state_adapters.opacus.order import Batches, plan_batches


def numbers(size):
    return TensorDataset(torch.arange(size))


def deal(dataset, order="cyclic", **options):
    loader = DataLoader(dataset, **options)
    plan = plan_batches(loader, Batches(order))
    return private_loader(loader, plan, BatchCursor(plan.num_batches))


def batches(loader):
    return [batch[0].tolist() for batch in loader]


def test_options_of_the_loader_are_kept():
    def collate(rows):
        return [torch.stack([row[0] for row in rows]) + 100]

    def init(worker):
        pass

    loader = deal(
        numbers(4), batch_size=2, collate_fn=collate, num_workers=1, worker_init_fn=init,
        timeout=30, prefetch_factor=3, persistent_workers=True,
    )  # fmt: skip
    assert batches(loader) == batches(loader) == [[100, 101], [102, 103]]
    assert (loader.worker_init_fn, loader.timeout, loader.prefetch_factor) == (init, 30, 3)
    assert loader.persistent_workers


def test_batch_size_that_does_not_divide(caplog):
    with pytest.raises(hsa.UnsupportedRunError, match=r"divides the 10 records, got 4.*drop_last"):
        deal(numbers(10), batch_size=4)
    with caplog.at_level(logging.INFO, "hidden_state_accountants"):
        loader = deal(numbers(10), batch_size=4, drop_last=True)
    assert batches(loader) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [record.message for record in caplog.records] == [
        "drop_last=True: batches of 4 use the first 8 of 10 records; dataset_size is 8"
    ]


def test_explicit_orders():
    assert batches(deal(numbers(4), batch_size=2, sampler=[3, 1, 2, 0])) == [[3, 1], [2, 0]]
    loader = deal(Subset(numbers(9), [8, 7, 0, 1]), batch_size=2)
    assert batches(loader) == [[8, 7], [0, 1]]
    again = plan_batches(loader, Batches("cyclic"))  # a private loader is fine
    assert [again.batch(step) for step in range(2)] == [[0, 1], [2, 3]]
    full = deal(numbers(10), "full", batch_size=4, shuffle=True)
    assert batches(full) == [list(range(10))]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


PAIR, FOUR = numbers(2), numbers(4)


@pytest.mark.parametrize(
    ("dataset", "options", "text"),
    [
        (FOUR, {"shuffle": True}, 'got shuffle=True.*"reshuffled".*"poisson".*shuffle=F'),
        (PAIR, {"sampler": WeightedRandomSampler([1.0], 2)}, "WeightedRandomSampler"),
        (FOUR, {"sampler": SequentialSampler(numbers(3))}, "SequentialSampler"),
        (FOUR, {"batch_size": 1, "batch_sampler": [[0, 1], [1, 2]]}, "batch_sampler=list"),
        (FOUR, {"batch_size": None}, "batch_size=None"),
        (Stream(), {}, "IterableDataset"),
        (FOUR, {"sampler": [0, 1, 1, 2]}, "index twice"),
        (Subset(Subset(FOUR, [1, 1, 2]), [0, 1]), {}, "index twice"),
        (ConcatDataset([PAIR, PAIR]), {}, "a record twice"),
        (PAIR, {"batch_size": 4, "drop_last": True}, r"batch_size <= 2.*Lower it"),
        (
            PAIR,
            {"batch_size": 4, "drop_last": True, "order": "poisson"},
            "at least one batch, got a batch_size of 4",
        ),
    ],
)
def test_orders_that_are_refused(dataset, options, text):
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        deal(dataset, **{"batch_size": 2, **options})


# --- batches of a TensorDataset that are read at once ---------------------------------------------

SIZE = 12


def rows_of_all_kinds(dtype=torch.float32):
    features = torch.randn(SIZE, 3, 2, generator=torch.Generator().manual_seed(0), dtype=dtype)
    features[4, 0, 0] = torch.nan
    labels = torch.arange(SIZE) % 3
    return TensorDataset(features, labels, labels > 1, labels.to(torch.uint8))


ROWS = rows_of_all_kinds()


def deal_poisson(loader):
    plan = plan_batches(loader, Batches("poisson", seed=3, seed_is_secret=True))
    return private_loader(loader, plan, BatchCursor(plan.num_batches, counts_steps=True))


@pytest.mark.parametrize(
    "dataset",
    [
        rows_of_all_kinds(torch.complex64),
        rows_of_all_kinds(torch.float16),
        Subset(Subset(ROWS, torch.tensor([7, -1, 5, -12, 2])), [3, 1, 0, -1]),
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
        {"dataset": Scaled(*ROWS.tensors)},
        {"dataset": ConcatDataset([ROWS, TensorDataset(torch.zeros(1, 3, 2))])},
        {"dataset": [(row, 1) for row in range(SIZE)]},
        {"dataset": ROWS, "num_workers": 1},
        {"dataset": ROWS, "collate_fn": lambda rows: default_collate(rows)},
    ],
)
def test_all_others_are_read_as_they_are(loader):
    assert deal_poisson(DataLoader(batch_size=5, **loader)).rows is None
