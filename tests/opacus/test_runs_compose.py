"""Two and three runs of one engine, beside what Opacus' own accountant says of them."""

import dp_accounting
import pytest
import torch
from dp_accounting import pld
from torch import nn

import hidden_state_accountants as hsa
from hidden_state_adapters.opacus import HiddenStatePrivacyEngine

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

DELTA, NOISE, EPOCHS = 1e-5, 2.0, 2


def train(engine, make_loader, model, **arguments):
    """One run; its private model, the number of its steps, and its sampling rate."""
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=0.1)
    make = (
        engine.make_private_with_epsilon if "target_epsilon" in arguments else engine.make_private
    )
    if make == engine.make_private:
        arguments = {"noise_multiplier": NOISE, **arguments}
    private, optimizer, loader = make(
        module=model, optimizer=optimizer, data_loader=make_loader(), max_grad_norm=2.1,
        criterion=criterion, loss_geometry="auto", feature_norm=1.0, **arguments,
    )  # fmt: skip
    steps = 0
    for _ in range(EPOCHS):
        for features, labels in loader:
            optimizer.zero_grad()
            criterion(private(features), labels).backward()
            optimizer.step()
            steps += 1
    return private, steps, 1 / len(loader)


def stock_epsilon(steps, rate):
    step = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(NOISE))
    return pld.PLDAccountant().compose(step, steps).get_epsilon(DELTA)


@pytest.mark.parametrize("order", ["poisson", "without_replacement"])
def test_two_and_three_runs(make_loader, order):
    torch.manual_seed(0)
    engine, model = HiddenStatePrivacyEngine(), nn.Linear(5, 3)
    epsilons, steps, rate = [], 0, 0.0
    for _ in range(3):
        model, of_run, rate = train(engine, make_loader, model, batch_order=order)
        steps += of_run
        epsilons.append(engine.get_epsilon(DELTA))
    if order == "poisson":  # of a record that is zeroed, which is removed there
        assert epsilons[-1] <= 1.0001 * stock_epsilon(steps, rate)
    once, twice, thrice = epsilons
    assert once < twice < thrice < 3 * once


def test_a_target_for_a_second_run(make_loader):
    torch.manual_seed(0)
    engine, model = HiddenStatePrivacyEngine(), nn.Linear(5, 3)
    model, *_ = train(engine, make_loader, model, batch_order="poisson")
    target = 1.3 * engine.get_epsilon(DELTA)
    train(
        engine, make_loader, model, batch_order="poisson", epochs=EPOCHS,
        target_epsilon=target, target_delta=DELTA,
    )  # fmt: skip
    assert 0.98 * target <= engine.get_epsilon(DELTA) <= target


@pytest.mark.parametrize("order", ["poisson", "without_replacement"])
def test_groups_of_two(order):
    event = hsa.LastIterateDpEvent(
        noise_multiplier=2.0, learning_rate=0.5, clip_norm=1.4143, batch_size=25,
        dataset_size=2500, num_steps=300, batch_order=order, weight_decay=0.004,
        loss=hsa.LossGeometry.softmax_cross_entropy(feature_norm=1.0),
    )  # fmt: skip
    of_two = hsa.LastIterateAccountant(group_size=2).compose(event).get_epsilon(DELTA)
    alone = hsa.LastIterateAccountant().compose(event).get_epsilon(DELTA)
    assert alone < of_two < 2.5 * alone
    if order == "poisson":  # two records are in the batches twice as often, with twice the weight
        step = dp_accounting.PoissonSampledDpEvent(0.02, dp_accounting.GaussianDpEvent(1.0))
        assert of_two < pld.PLDAccountant().compose(step, 300).get_epsilon(DELTA)
