"""Which batches a script gets that says nothing about their order: those of Opacus' engine."""

import warnings

import pytest
import torch
from opacus import PrivacyEngine
from opacus.accountants import PRVAccountant
from torch import nn
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

import hidden_state_accountants as hsa
from hidden_state_accountants import BatchOrder
from hidden_state_adapters.opacus import HiddenStatePrivacyEngine

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

RECORDS = 60


def private(engine=None, *, loader=None, make="make_private", **arguments):
    """An engine, and what it made of a script that says what Opacus' tutorials say."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    data = TensorDataset(torch.randn(RECORDS, 5), torch.arange(RECORDS) % 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = engine or HiddenStatePrivacyEngine()
        if make == "make_private":
            arguments["noise_multiplier"] = 2.0
        made = getattr(engine, make)(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(data, **{"batch_size": 10, **(loader or {})}),
            max_grad_norm=1.0,
            **arguments,
        )
    return engine, *made


def order_of(optimizer):
    return optimizer.run.plan.order


@pytest.mark.parametrize(
    ("arguments", "loader", "order"),
    [
        ({}, {}, "poisson"),
        ({"poisson_sampling": True}, {"shuffle": True}, "poisson"),
        ({"batch_order": None}, {"shuffle": True}, "poisson"),
        ({"poisson_sampling": False}, {}, "cyclic"),
        ({"poisson_sampling": False}, {"sampler": list(range(0, RECORDS, 2))}, "cyclic"),
        ({"poisson_sampling": False}, {"shuffle": True}, "reshuffled"),
        ({"poisson_sampling": False}, {"sampler": SubsetRandomSampler(range(40))}, "reshuffled"),
        ({}, {"sampler": SubsetRandomSampler(range(40))}, "poisson"),
        ({"poisson_sampling": False}, {"batch_size": 60}, "full"),
        ({"poisson_sampling": False}, {"batch_size": 64, "shuffle": True}, "full"),
        ({"batch_order": "cyclic"}, {}, "cyclic"),
        ({"batch_order": "cyclic", "poisson_sampling": False}, {}, "cyclic"),
        ({"batch_order": "shuffled_once", "poisson_sampling": False}, {}, "shuffled_once"),
    ],
)
def test_the_order_of_the_batches(arguments, loader, order):
    _, _, optimizer, _ = private(loader=loader, **arguments)
    assert order_of(optimizer) is BatchOrder(order)


def test_a_target_is_met_on_poisson_batches():
    *_, optimizer, _ = private(
        make="make_private_with_epsilon", target_epsilon=2.0, target_delta=1e-5, epochs=2
    )
    assert order_of(optimizer) is BatchOrder.POISSON
    stock = PrivacyEngine()
    *_, other, _ = private(
        stock, make="make_private_with_epsilon", target_epsilon=2.0, target_delta=1e-5, epochs=2
    )
    assert optimizer.noise_multiplier <= other.noise_multiplier


@pytest.mark.parametrize("batch_size", [1, 7, 16, 25, 59, 60, 64])
@pytest.mark.parametrize("drop_last", [False, True])
def test_rate_divisor_and_steps_are_those_of_opacus(batch_size, drop_last):
    """Where b does not divide n, the rate is 1/len(loader), and not b/n."""
    if drop_last and batch_size > RECORDS:
        pytest.skip("no batch at all")
    sizes = {"batch_size": batch_size, "drop_last": drop_last}
    _, _, stock, stock_loader = private(PrivacyEngine(), loader=sizes)
    engine, model, optimizer, loader = private(loader=sizes)
    assert len(loader) == len(stock_loader)
    assert optimizer.expected_batch_size == stock.expected_batch_size
    for features, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(features), labels).backward()
        optimizer.step()
    event = engine.privacy_event
    assert event.num_steps == len(stock_loader)
    assert event.sampling_probability == stock_loader.sample_rate
    prv = PRVAccountant()
    prv.history = [(2.0, stock_loader.sample_rate, len(stock_loader))]
    assert engine.get_epsilon(1e-5) <= prv.get_epsilon(1e-5)


def test_no_batch_at_all():
    with pytest.raises(hsa.UnsupportedRunError, match=r"at least one batch.*drop_last=True"):
        private(loader={"batch_size": 64, "drop_last": True})
