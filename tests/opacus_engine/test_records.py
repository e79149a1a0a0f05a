"""The records are the same ones during the whole run, and each is there once."""

import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

import hidden_state_accountants as hsa
from hidden_state_adapters.opacus import HiddenStatePrivacyEngine

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

CHECKED = "checked: tensors of the data set without writes"
DECLARED = "declared: the data set holds the same records"


class Loop:
    def __init__(self, dataset, **loader):
        self.engine, self.criterion = HiddenStatePrivacyEngine(), nn.CrossEntropyLoss()
        model = nn.Linear(5, 3)
        self.model, self.optimizer, self.loader = self.engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(dataset, batch_size=2, **loader),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            batch_order="cyclic",
        )

    def step(self, batch):
        features, labels = batch
        self.optimizer.zero_grad()
        self.criterion(self.model(features), labels).backward()
        self.optimizer.step()

    def epoch(self):
        for batch in self.loader:
            self.step(batch)
        return self

    @property
    def lines(self):
        lines = [str(a) for a in self.engine.assumptions]
        return [line for line in lines if line.startswith((CHECKED, DECLARED))]


class Rows(Dataset):
    """Of no kind that torch knows."""

    def __init__(self):
        self.rows = data()

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def data(rows=6):
    return TensorDataset(torch.randn(rows, 5), torch.arange(rows) % 3)


def subset_of(dataset):
    return Subset(Subset(dataset, range(6)), [3, 1, 2, 0])


def two_of(dataset):
    return ConcatDataset([dataset, data(2)])


@pytest.mark.parametrize("wrap", [lambda d: d, subset_of, two_of], ids=["plain", "subset", "two"])
@pytest.mark.parametrize("tensor", [0, 1])
@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.div_(2, rounding_mode="floor"),
        lambda x: x.copy_(x.flip(0)),
        lambda x: x[:1].zero_(),
    ],
    ids=["rounded", "moved", "one"],
)
def test_tensors_that_are_written(write, tensor, wrap):
    dataset = data()
    loop = Loop(wrap(dataset)).epoch()
    write(dataset.tensors[tensor])
    with pytest.raises(hsa.UnsupportedRunError, match=r"step \d+ follows a write to the tensors"):
        loop.epoch()
    with pytest.raises(hsa.UnsupportedRunError, match="a write to the tensors of the data set"):
        loop.engine.get_epsilon(1e-5)


def test_a_batch_that_is_written():
    """It is a copy, unless the loop gets views of the data set."""
    dataset = data()
    loop = Loop(dataset)
    for features, labels in loop.loader:
        loop.step((features.mul_(0.5), labels))
    views = Loop(dataset, collate_fn=lambda rows: [part[:2] for part in dataset.tensors])
    features, labels = next(iter(views.loader))
    with pytest.raises(hsa.UnsupportedRunError, match="step 1 follows a write"):
        views.step((features.mul_(0.5), labels))


def test_other_tensors():
    """Equal ones are the same records, on another device for example."""
    dataset = data()
    loop = Loop(dataset).epoch()
    dataset.tensors = tuple(tensor.clone() for tensor in dataset.tensors)
    loop.epoch()
    assert loop.engine.get_epsilon(1e-5) > 0
    dataset.tensors = tuple(tensor.flip(0) for tensor in dataset.tensors)
    with pytest.raises(hsa.UnsupportedRunError, match="a write to the tensors"):
        loop.epoch()


def test_memory_that_moves_is_no_write():
    """As it does for workers that are spawned."""
    dataset = data()
    loop = Loop(dataset).epoch()
    before = dataset.tensors[0].data_ptr()
    dataset.tensors[0].share_memory_()
    assert dataset.tensors[0].data_ptr() != before
    assert loop.epoch().engine.get_epsilon(1e-5) > 0


def test_tensors_without_a_count():
    with torch.inference_mode():
        dataset = data()
    assert Loop(dataset).epoch().engine.get_epsilon(1e-5) > 0


def test_written_before_and_after_the_run():
    dataset = data()
    loop = Loop(dataset)
    dataset.tensors[0].mul_(2.0)
    with pytest.raises(hsa.UnsupportedRunError, match="step 1 follows a write"):
        loop.epoch()
    done = Loop(dataset).epoch()
    dataset.tensors[0].mul_(2.0)
    assert done.engine.get_epsilon(1e-5) > 0


@pytest.mark.parametrize(
    ("dataset", "lines"),
    [
        (data(), [CHECKED]),
        (Rows(), [DECLARED]),
        (Subset(Rows(), range(4)), [DECLARED]),
        (ConcatDataset([Rows(), data()]), [CHECKED, DECLARED]),
    ],
)
def test_what_is_not_seen_is_declared(dataset, lines):
    found = Loop(dataset).epoch().lines
    assert [line[: len(start)] for line, start in zip(found, lines, strict=True)] == lines


# --- each once ------------------------------------------------------------------------------------


def twice():
    dataset = data()
    return [dataset, TensorDataset(*dataset.tensors)]


def overlapping(dataset):
    return [Subset(dataset, [0, 1, 2]), Subset(dataset, [2, 3, 4])]


@pytest.mark.parametrize(
    "parts",
    [
        twice(),
        [ConcatDataset([part]) for part in twice()],
        [Subset(part, range(4)) for part in twice()],
        overlapping(data()),
        overlapping(Rows()),
        [(rows := Rows()), rows],
    ],
)
def test_records_that_are_there_twice(parts):
    with pytest.raises(hsa.UnsupportedRunError, match="holds a record twice"):
        Loop(ConcatDataset(parts))


def halves(dataset):
    return [Subset(dataset, [0, 2, 4]), Subset(dataset, [5, 3, 1])]


LABELS = torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    "parts",
    [
        [data(), data()],
        halves(data()),
        halves(Rows()),
        torch.utils.data.random_split(data(), [2, 4]),
        [TensorDataset(torch.randn(4, 5), LABELS), TensorDataset(torch.randn(4, 5), LABELS)],
    ],
)
def test_records_that_are_there_once(parts):
    assert Loop(ConcatDataset(parts)).epoch().engine.get_epsilon(1e-5) > 0


def test_the_guarantee_of_an_engine_says_what_was_checked():
    loop = Loop(data()).epoch()
    guarantee = loop.engine.guarantee
    assert guarantee.epsilon(1e-5) == loop.engine.get_epsilon(1e-5)
    assert guarantee.assumptions == loop.engine.assumptions
    assert "Checked by the software" in guarantee.statement(1e-5)
    torch.nn.init.zeros_(next(loop.model.parameters()))
    with pytest.raises(hsa.UnsupportedRunError, match="parameters"):
        _ = loop.engine.guarantee
