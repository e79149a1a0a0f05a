"""A collate_fn that makes a record depend on the others of its batch."""

import random

import pytest
import torch
from opacus.data_loader import CollateFnWithEmpty
from torch import nn
from torch.nn.utils import rnn
from torch.utils.data import DataLoader, TensorDataset, default_collate

import hidden_state_accountants as hsa
from hidden_state_adapters.opacus import HiddenStatePrivacyEngine
from hidden_state_adapters.opacus.guards.collation import CollationGuard


class Sentences(torch.utils.data.Dataset):
    """Records of different lengths."""

    def __init__(self, count=12):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if index >= self.count:
            raise IndexError(index)
        return torch.arange(1.0, index + 2), index % 3


def points(count=12):
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(count, 5, generator=generator), torch.arange(count) % 3)


def by(change):
    def collate(records):
        features, labels = default_collate(records)
        return change(features), labels

    return collate


def pad(side):
    def collate(records):
        rows = [row for row, _ in records]
        return rnn.pad_sequence(rows, batch_first=True, padding_side=side), torch.tensor(
            [label for _, label in records]
        )

    return collate


def mixup(records):
    features, labels = default_collate(records)
    share = random.random()
    return share * features + (1 - share) * features[torch.randperm(len(features))], labels


def packed(records):
    return rnn.pack_sequence([row for row, _ in records], enforce_sorted=False)


def broken(records):
    raise RuntimeError("whole batches of 64 only")


def line(collate, dataset=None):
    loader = DataLoader(points() if dataset is None else dataset, 4, collate_fn=collate)
    return [str(assumption) for assumption in CollationGuard(loader).assumptions]


MIXES = {
    "largest": by(lambda x: x / x.norm(dim=1).max()),
    "mean": by(lambda x: x - x.mean(0)),
    "position": by(lambda x: x + torch.arange(len(x))[:, None] * x.sum()),
    "mixup": mixup,
}


@pytest.mark.parametrize("count", [6, 7, 12, 100])
@pytest.mark.parametrize("name", MIXES)
def test_what_mixes_is_refused(name, count):
    with pytest.raises(hsa.UnsupportedRunError, match="collate_fn that takes every record by"):
        line(MIXES[name], points(count))
    with pytest.raises(hsa.UnsupportedRunError, match="collate_fn that takes every record by"):
        line(CollateFnWithEmpty(MIXES[name]), points(count))


def test_the_engine_refuses_it_before_training():
    model = nn.Linear(5, 3)
    with pytest.raises(hsa.UnsupportedRunError, match="collate_fn that takes every record by"):
        HiddenStatePrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(points(), 4, collate_fn=MIXES["largest"]),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )


def noisy(x):
    return x + torch.randn(x.shape) + random.random()


@pytest.mark.parametrize("collate", [by(torch.tanh), by(noisy), by(lambda x: x.T.contiguous())])
def test_what_does_not_is_checked(collate):
    """Random numbers are those of before."""
    state = torch.get_rng_state(), random.getstate()
    (found,) = line(collate)
    assert found.startswith("checked: collate_fn made the same of some records")
    assert torch.equal(torch.get_rng_state(), state[0])
    assert random.getstate() == state[1]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_an_assumption(side):
    (found,) = line(pad(side), Sentences())
    assert found.startswith("declared: the model computes the same for a record however far")


class Counts:
    calls = 0

    def __call__(self, records):
        self.calls += 1
        features, labels = default_collate(records)
        return features + self.calls, labels


@pytest.mark.parametrize("collate", [packed, broken, Counts()])
def test_what_cannot_be_looked_at_is_an_assumption(collate):
    (found,) = line(collate)
    assert found == "declared: collate_fn takes every record of a batch by itself"


@pytest.mark.parametrize("count", [1, 5])
def test_few_records_show_too_little(count):
    (found,) = line(by(torch.tanh), points(count))
    assert found.startswith("declared: ")


@pytest.mark.parametrize("collate", [None, default_collate, CollateFnWithEmpty(default_collate)])
def test_the_default_needs_no_line(collate):
    assert line(collate) == []
