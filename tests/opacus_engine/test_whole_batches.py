import pytest
import torch
from opacus.data_loader import CollateFnWithEmpty
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset, default_collate

from hidden_state_adapters.opacus.data.whole_batches import reads_at_once

SIZE, BATCH = 12, 5


def data(**kwargs):
    features = torch.randn(SIZE, 3, 2, generator=torch.Generator().manual_seed(0), **kwargs)
    features[4, 0, 0] = torch.nan
    labels = torch.arange(SIZE) % 3
    return TensorDataset(features, labels, labels > 1, labels.to(torch.uint8))


def assert_same(loader):
    at_once = reads_at_once(loader)
    assert at_once is not None
    expected, found = list(loader), list(at_once)
    assert len(expected) == len(found) > 0
    for a, b in zip(expected, found, strict=True):
        assert type(a) is type(b) is list
        for x, y in zip(a, b, strict=True):
            assert (x.dtype, x.shape, x.stride()) == (y.dtype, y.shape, y.stride())
            assert x.numpy().tobytes() == y.numpy().tobytes()
            assert x.data_ptr() != y.data_ptr() or not x.numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.complex64])
def test_the_same_bits_as_record_by_record(dtype):
    assert_same(DataLoader(data(dtype=dtype), batch_size=BATCH))


@pytest.mark.parametrize(
    "indices",
    [
        range(3, 11),
        [7, 0, 5, 2, 9],
        [7, -1, 5, -12],
        torch.tensor([7, 0, 5, 2, 9]),
        torch.tensor([7, 0, 5, 2, 9]).numpy(),
    ],
    ids=["range", "list", "from the end", "tensor", "array"],
)
def test_subsets(indices):
    assert_same(DataLoader(Subset(data(), indices), batch_size=2))
    assert_same(DataLoader(Subset(Subset(data(), indices), [3, 1, 0]), batch_size=2))


def test_batches_without_records():
    collate = CollateFnWithEmpty(default_collate)
    assert_same(DataLoader(data(), batch_sampler=[[], [3, 1], []], collate_fn=collate))


class Scaled(TensorDataset):
    def __getitem__(self, index):
        features, *others = super().__getitem__(index)
        return features / 255, *others


def channels_last():
    return TensorDataset(torch.randn(SIZE, 3, 4, 4).to(memory_format=torch.channels_last))


@pytest.mark.parametrize(
    "loader",
    [
        {"dataset": Scaled(*data().tensors)},
        {"dataset": ConcatDataset([data(), data()])},
        {"dataset": Subset(Scaled(*data().tensors), range(5))},
        {"dataset": [(row, 1) for row in range(SIZE)]},
        {"dataset": channels_last()},
        {"dataset": TensorDataset(torch.zeros(SIZE, 2).requires_grad_())},
        {"dataset": TensorDataset(torch.nn.Parameter(torch.zeros(SIZE, 2), requires_grad=False))},
        {"dataset": data(), "num_workers": 1},
        {"dataset": data(), "collate_fn": lambda rows: default_collate(rows)},
        {"dataset": data(), "collate_fn": CollateFnWithEmpty(list)},
    ],
)
def test_all_others_are_read_as_they_are(loader):
    assert reads_at_once(DataLoader(batch_size=BATCH, **loader)) is None


def test_functions_of_torch_that_a_program_replaced(monkeypatch):
    whole = TensorDataset.__getitem__
    monkeypatch.setattr(
        TensorDataset, "__getitem__", lambda self, i: tuple(2 * x for x in whole(self, i))
    )
    loader = DataLoader(TensorDataset(torch.ones(SIZE)), batch_size=BATCH)
    assert reads_at_once(loader) is None


@pytest.mark.parametrize("order", ["cyclic", "poisson", "reshuffled"])
def test_a_private_loader_reads_no_records(make_run, monkeypatch, order):
    read = []
    one = TensorDataset.__getitem__
    monkeypatch.setattr(
        TensorDataset, "__getitem__", lambda self, i: read.append(i) or one(self, i)
    )
    run = make_run(batch_order=order)
    read.clear()
    run.epoch()
    assert run.steps == 6
    assert len(read) == 2  # compared when the pass starts
