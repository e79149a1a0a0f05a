"""Batches of a TensorDataset that are read at once: the same bits as record by record."""

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset, default_collate

from hidden_state_accountants import BatchOrder
from hidden_state_adapters.opacus.loader import BatchCursor, private_loader
from hidden_state_adapters.opacus.order import Batches, plan_batches

SIZE, BATCH = 12, 5


def data(**kwargs):
    features = torch.randn(SIZE, 3, 2, generator=torch.Generator().manual_seed(0), **kwargs)
    features[4, 0, 0] = torch.nan
    labels = torch.arange(SIZE) % 3
    return TensorDataset(features, labels, labels > 1, labels.to(torch.uint8))


def deal(loader, order=BatchOrder.POISSON):
    plan = plan_batches(loader, Batches(order, seed=3, seed_is_secret=True))
    return private_loader(loader, plan, BatchCursor(plan.num_batches, counts_steps=True))


@pytest.mark.parametrize(
    "dataset",
    [
        *(data(dtype=dtype) for dtype in (torch.float32, torch.float16, torch.complex64)),
        Subset(data(), range(3, 11)),
        Subset(Subset(data(), torch.tensor([7, -1, 5, -12, 2])), [3, 1, 0, -1]),
    ],
)
@pytest.mark.parametrize("batch_size", [1, 4])  # some Poisson batches are empty
def test_the_same_bits_as_record_by_record(dataset, batch_size):
    loader = deal(DataLoader(dataset, batch_size=batch_size))
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
        {"dataset": Scaled(*data().tensors)},
        {"dataset": ConcatDataset([data(), TensorDataset(torch.zeros(1, 3, 2))])},
        {"dataset": [(row, 1) for row in range(SIZE)]},
        {"dataset": data(), "num_workers": 1},
        {"dataset": data(), "collate_fn": lambda rows: default_collate(rows)},
    ],
)
def test_all_others_are_read_as_they_are(loader):
    assert deal(DataLoader(batch_size=BATCH, **loader)).rows is None
