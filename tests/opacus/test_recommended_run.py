"""What hsa.recommend gives is what the engine takes."""

import pathlib
import re
import textwrap

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import hidden_state_accountants as hsa
from hidden_state_accountants.losses.arrays import NUMPY
from hidden_state_accountants.losses.linear import BY_NAME
from hidden_state_adapters.opacus import HiddenStatePrivacyEngine, recommended_criterion

pytestmark = pytest.mark.filterwarnings("ignore:Secure RNG", "ignore:Full backward hook")
PAGE = pathlib.Path(__file__).parents[2] / "docs" / "recommend.md"


def records(targets, width=4):
    features = torch.nn.functional.normalize(torch.randn(len(targets), width, dtype=torch.float64))
    return TensorDataset(features, targets)


def zero_linear(outputs, bias, width=4):
    model = torch.nn.Linear(width, outputs, bias=bias, dtype=torch.float64)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    return model


@pytest.mark.parametrize(
    ("order", "epsilon", "momentum", "bias", "loss"),
    [
        ("cyclic", 1.0, False, True, "softmax_cross_entropy"),
        ("poisson", 1.0, False, False, "logistic"),
        ("full", 1.0, False, True, "squared_error"),
        ("full", 50.0, True, False, "softmax_cross_entropy"),
    ],
)
def test_the_engine_takes_a_recommended_run(order, epsilon, momentum, bias, loss):
    options = dict(orders=[order], epochs=2, bias=bias, loss=loss, momentum=momentum)
    run = hsa.recommend(200, epsilon, 1e-5, classes=3, **options).best
    assert (run.momentum > 0) == momentum
    softmax = loss == "softmax_cross_entropy"
    data = records(torch.randint(3, (200,)) if softmax else torch.rand(200, 1).double())
    model = zero_linear(3 if softmax else 1, bias)
    criterion = recommended_criterion(run)
    engine = HiddenStatePrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(
            model.parameters(), lr=run.event.learning_rate, momentum=run.momentum
        ),
        data_loader=DataLoader(data, batch_size=run.event.batch_size),
        criterion=criterion,
        **run.make_private_arguments(),
    )
    for _ in range(run.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
    assert 0.98 * epsilon < engine.get_epsilon(1e-5) <= epsilon
    assert engine.accountant.recorders[-1].num_steps == run.event.num_steps


@pytest.mark.parametrize("loss", ["softmax_cross_entropy", "logistic", "squared_error"])
def test_the_criterion_is_the_loss_that_is_named(loss):
    """Against the slopes that the estimators train with."""
    run = hsa.recommend(200, 1.0, 1e-5, classes=3, orders=["full"], epochs=2, loss=loss).best
    z = torch.randn(7, 3 if loss.startswith("softmax") else 1, dtype=torch.float64)
    z.requires_grad_()
    if loss.startswith("softmax"):
        labels = torch.arange(7) % 3
        targets = np.eye(3)[labels]
    else:
        labels = torch.rand(7, 1, dtype=torch.float64)
        targets = labels.numpy()
    recommended_criterion(run)(z, labels).backward()
    expected = BY_NAME[loss](NUMPY, z.shape[1]).slopes(z.detach().numpy(), targets)
    np.testing.assert_allclose(7 * z.grad.numpy(), expected, atol=1e-12)


def test_the_lines_of_the_page_run():
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    code = code.replace("classes=10, ", "classes=10, epochs=4, ")  # quicker
    names = {
        "hsa": hsa,
        "torch": torch,
        "DataLoader": DataLoader,
        "HiddenStatePrivacyEngine": HiddenStatePrivacyEngine,
        "recommended_criterion": recommended_criterion,
        "data": records(torch.randint(10, (403,))),
        "model": zero_linear(10, False),
    }
    exec(textwrap.dedent(code), names)
    assert 0.98 < names["engine"].get_epsilon(1e-5) <= 1
