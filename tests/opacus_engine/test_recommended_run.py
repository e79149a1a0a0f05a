"""What hsa.recommend prints is what the engine takes."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import hidden_state_accountants as hsa
from hidden_state_adapters import opacus
from hidden_state_adapters.opacus import HiddenStatePrivacyEngine


@pytest.mark.filterwarnings("ignore:Secure RNG", "ignore:Full backward hook")
@pytest.mark.parametrize("order", ["cyclic", "poisson", "full"])
@pytest.mark.parametrize("bias", [False, True])
def test_the_engine_takes_a_recommended_run(order, bias):
    found = hsa.recommend(200, 1.0, 1e-5, classes=3, orders=[order], epochs=2, bias=bias)
    event = found.best.event
    features = torch.nn.functional.normalize(torch.randn(200, 4, dtype=torch.float64))
    data = TensorDataset(features, torch.randint(3, (200,)))
    model = torch.nn.Linear(4, 3, bias=bias, dtype=torch.float64)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    criterion = torch.nn.CrossEntropyLoss()
    if found.best.smoothing is not None:
        criterion = eval(found.best.criterion, vars(opacus))
    engine = HiddenStatePrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=event.learning_rate),
        data_loader=DataLoader(data, batch_size=event.batch_size),
        noise_multiplier=event.noise_multiplier,
        max_grad_norm=event.clip_norm,
        batch_order=order,
        criterion=criterion,
        loss_geometry="auto",
        feature_norm=1.0,
    )
    steps = 0
    while steps < event.num_steps:
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
            steps += 1
    assert steps == event.num_steps
    assert 0.98 < engine.get_epsilon(1e-5) <= 1
