"""Loops that fetch one batch ahead of their steps (Lightning, accelerate, prefetchers).

The cursor follows them by what goes into the model. The cases that every optimizer goes through
are in tests/misuse/misuse.py.
"""

import itertools

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import hidden_state_accountants as hsa
from hidden_state_adapters.opacus import Batches

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

ORDERS = ["cyclic", "shuffled_once", "reshuffled", "without_replacement", "poisson", "full"]


def ahead(batches, count=1):
    """Yields batches, fetching `count` more than it has yielded; the last ones at the end."""
    fetched = []
    for batch in batches:
        fetched.append(batch)
        if len(fetched) > count:
            yield fetched.pop(0)
    yield from fetched


def event(order, steps, **settings):
    return hsa.LastIterateDpEvent(**{
        "noise_multiplier": 2.0, "learning_rate": 0.5, "clip_norm": 2.1, "batch_size": 10,
        "dataset_size": 60, "num_steps": steps, "batch_order": order, "weight_decay": 0.1,
        "loss": hsa.LossGeometry.softmax_cross_entropy(1.0, bias=True), **settings,
    })  # fmt: skip


@pytest.mark.parametrize(("order", "workers"), [*((order, 0) for order in ORDERS), ("cyclic", 2)])
def test_the_epsilon_is_that_of_a_plain_loop(make_run, order, workers):
    run = make_run(batch_order=order, loader={"num_workers": workers})
    plain = make_run(batch_order=order)
    for _ in range(2):
        run.epoch(ahead(run.loader))
        plain.epoch()
    assert run.engine.privacy_event == plain.engine.privacy_event
    settings = {"batch_size": 60} if order == "full" else {}
    assert run.engine.privacy_event == event(order, 2 * len(run.loader), **settings)
    if order == "cyclic":  # a function of the event
        assert run.engine.get_epsilon(1e-5) == plain.engine.get_epsilon(1e-5)


@pytest.mark.parametrize("order", ["without_replacement", "poisson"])
def test_a_loop_may_stop_with_one_batch_fetched(make_run, order):
    """Where each step draws its batch, the next pass deals the one that was not used."""
    run = make_run(batch_order=order)
    for batch in itertools.islice(ahead(run.loader), 3):
        run.step(batch)
    first = run.optimizer.run.plan.batch(3)
    run.epoch(ahead(run.loader))
    assert run.optimizer.run.plan.batch(3) == first
    assert run.engine.privacy_event == event(order, 9)


ONE_BATCH_A_PASS = {"loader": {"batch_size": 60}}


@pytest.mark.parametrize(
    ("order", "arguments"),
    [
        ("cyclic", {}),
        ("reshuffled", {}),
        ("without_replacement", {}),
        ("poisson", {}),
        (Batches("poisson", max_batch_size=30), ONE_BATCH_A_PASS),
    ],
)
def test_a_loop_that_fetches_beyond_the_end_of_a_pass(make_run, order, arguments):
    """A random batch is dealt again there, and would be used for the one after it."""

    def forever(loader):
        while True:
            yield from loader

    run = make_run(batch_order=order, **arguments)
    with pytest.raises(hsa.UnsupportedRunError, match=r"step \d used .* expected batch \d"):
        run.epoch(itertools.islice(ahead(forever(run.loader)), 15))
    assert run.steps < 10


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("look", [lambda loader: next(iter(loader)), list])
def test_a_look_in_the_middle_of_a_pass(make_run, order, look):
    run = make_run(batch_order=order)
    for _ in range(2):
        for number, batch in enumerate(run.loader):
            if number == 3:
                look(run.loader)
            run.step(batch)
            if number == 4:
                look(run.loader)
    settings = {"batch_size": 60} if order == "full" else {}
    assert run.engine.privacy_event == event(order, 2 * len(run.loader), **settings)
    assert run.engine.get_epsilon(1e-5) > 0


# What the loop may do to a batch that it fetched ahead.


def moved(features):
    """As to another device: the same numbers elsewhere."""
    return features.clone()


def cast(features):
    return features.double().float()


def laid_out_again(features):
    return features.t().contiguous().t()


def reshaped(features):
    return features.reshape(len(features), 5, 1)


@pytest.mark.parametrize("move", [moved, cast, laid_out_again, reshaped])
def test_the_batch_is_followed(make_run, move):
    run = make_run(model=nn.Sequential(nn.Flatten(), nn.Linear(5, 3)))
    for features, labels in ahead(run.loader):
        run.step((move(features), labels))
    assert run.engine.privacy_event == event("cyclic", 6)


class Dictionaries(Dataset):
    def __init__(self, features, labels):
        self.features, self.labels = features, labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        mask = torch.ones(5)
        return {"inputs": [self.features[index], mask], "labels": self.labels[index]}


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(5, 3)

    def forward(self, inputs, mask):
        return self.head(inputs * mask)


def test_batches_of_any_form_are_followed(make_run, dataset):
    data = Dictionaries(*dataset.tensors)

    def epoch(run, change):
        for batch in ahead(run.loader):
            run.optimizer.zero_grad()
            features, mask = batch["inputs"]
            output = run.model(change(features), mask=mask)
            run.criterion(output, batch["labels"]).backward()
            run.optimizer.step()

    run = make_run(model=Masked(), loader={"dataset": data})
    epoch(run, moved)
    assert run.engine.privacy_event == event("cyclic", 6)
    # The mask alone, which is the same in all batches, does not say which one it is.
    with pytest.raises(hsa.UnsupportedRunError, match="no new batch, expected batch 0"):
        epoch(make_run(model=Masked(), loader={"dataset": data}), lambda x: 0.5 * x)


# What is refused.


def two_ahead(run):
    run.epoch(ahead(run.loader, 2))


def transformed(run):
    for features, labels in ahead(run.loader):
        run.step((0.5 * features, labels))


def swapped(run):
    batches = iter(run.loader)
    for first, second in zip(batches, batches, strict=True):
        run.step(second)
        run.step(first)


def one_left_out(run):
    for index, batch in enumerate(ahead(run.loader)):
        if index != 2:
            run.step(batch)


def best_of_two(run):
    batches = iter(run.loader)
    for pair in zip(batches, batches, strict=True):
        run.step(max(pair, key=lambda batch: float(batch[0].sum())))


def of_another_loader(run):
    next(iter(run.loader))
    own = TensorDataset(*(part.flip(0) for part in run.loader.dataset.tensors))
    for batch, _ in zip(torch.utils.data.DataLoader(own, batch_size=10), run.loader, strict=True):
        run.step(batch)
        run.step(batch)


REFUSED = [
    (two_ahead, "step 1 used no new batch, expected batch 0.*fetches ahead"),
    (transformed, "step 1 used no new batch, expected batch 0.*in the data set, the collate_fn"),
    (swapped, "step 1 used batch 1, expected batch 0"),
    (one_left_out, "step 3 used batch 3, expected batch 2"),
    (best_of_two, r"step \d used (batch \d|no new batch), expected batch \d"),
    (of_another_loader, "not what the loader drew"),
]


@pytest.mark.parametrize(("loop", "text"), REFUSED, ids=lambda v: getattr(v, "__name__", None))
def test_another_loop_is_refused(make_run, loop, text):
    run = make_run()
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        loop(run)
    with pytest.raises(hsa.UnsupportedRunError, match="was refused"):
        run.engine.get_epsilon(1e-5)
