"""Warnings: a delta that protects nobody, a bound that was computed from the records."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from hidden_state_adapters.opacus import HiddenStatePrivacyEngine, fit_head

ALL, NONE = "is not below 1/n for n = 60 records", "is the largest norm of the data"


def said(act, text):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act()
    return [str(w.message) for w in caught if text in str(w.message)]


def data(*, normalised=False):
    features = torch.randn(60, 5, generator=torch.Generator().manual_seed(0))
    if normalised:
        features = nn.functional.normalize(features)
    return TensorDataset(features, torch.arange(60) % 3)


@pytest.mark.parametrize("subset", [False, True])
def test_equal_records(make_run, caplog, subset):
    x, y = data().tensors
    twice = torch.cat([x[:30], x[:30]])
    for tensors, count in (([x, y], 0), ([twice, y], 1), ([twice, torch.arange(60)], 0)):
        caplog.clear()
        made = TensorDataset(*tensors)
        make_run(loader={"dataset": Subset(made, range(0, 60, 2)) if subset else made})
        assert sum("records of the data are equal" in text for text in caplog.messages) == count


def test_a_large_delta(make_run):
    run = make_run()
    run.epoch()
    for ask in (run.engine.get_epsilon, run.engine.report):
        assert len(said(lambda ask=ask: ask(1 / 60), ALL)) == 1
        assert not said(lambda ask=ask: ask(1e-3), ALL)


def test_a_large_delta_of_a_target():
    model = nn.Linear(5, 3)

    def make(delta):
        HiddenStatePrivacyEngine().make_private_with_epsilon(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
            data_loader=DataLoader(data(), batch_size=10),
            max_grad_norm=1.0,
            target_epsilon=2.0,
            target_delta=delta,
            epochs=1,
        )

    assert len(said(lambda: make(0.02), ALL)) == 1
    assert not said(lambda: make(1e-4), ALL)


def test_a_large_delta_of_a_fit():
    features, labels = data(normalised=True).tensors

    def fit(delta):
        fit_head(features, labels, epsilon=1.0, delta=delta, classes=3)

    assert len(said(lambda: fit(0.02), ALL)) == 1
    assert not said(lambda: fit(1e-4), ALL)


def head_run(dataset, feature_norm):
    model = nn.Linear(5, 3)
    HiddenStatePrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        data_loader=DataLoader(dataset, batch_size=10),
        noise_multiplier=2.0,
        max_grad_norm="auto",
        criterion=nn.CrossEntropyLoss(),
        feature_norm=feature_norm,
    )


def test_the_largest_norm_of_the_data():
    longest = float(data().tensors[0].norm(dim=1).max())
    assert len(said(lambda: head_run(data(), longest), NONE)) == 1
    assert not said(lambda: head_run(data(), 4.5), NONE)
    assert not said(lambda: head_run(data(normalised=True), 1.0), NONE)
