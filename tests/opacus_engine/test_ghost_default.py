"""A linear head is clipped without its per-example gradients unless the user asks otherwise."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hidden_state_adapters.opacus import GhostGradSampleModule, HiddenStatePrivacyEngine

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def private_run(model, **arguments):
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(12, 5, generator=generator), torch.arange(12) % 3)
    return HiddenStatePrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=4),
        batch_order="cyclic",
        **{"noise_multiplier": 1.0, "max_grad_norm": 1.0} | arguments,
    )


@pytest.mark.parametrize("model", [nn.Linear(5, 3), nn.Sequential(nn.Flatten(), nn.Linear(5, 3))])
def test_a_linear_head_is_clipped_without_its_gradients(model):
    private, *rest = private_run(model)
    assert type(private) is GhostGradSampleModule
    assert len(rest) == 2  # the criterion is not returned, as by "hooks"


@pytest.mark.parametrize(
    ("model", "arguments"),
    [
        (nn.Linear(5, 3), {"grad_sample_mode": "hooks"}),
        (nn.Linear(5, 3), {"wrap_model": False}),
        (nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)), {}),
    ],
)
def test_others_are_not(model, arguments):
    private, *_ = private_run(model, **arguments)
    assert type(private) is not GhostGradSampleModule


def test_the_trajectories_agree():
    """Without noise, to rounding; and weights are as they were after the wrapper is gone."""
    left = []
    for mode in ({}, {"grad_sample_mode": "hooks"}):
        torch.manual_seed(0)
        model = nn.Linear(5, 3)
        private, optimizer, loader = private_run(model, noise_multiplier=0.0, **mode)
        for features, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(private(features), labels).backward()
            optimizer.step()
        left.append(model.weight.detach().clone())
        plain = private.to_standard_module()
        plain.zero_grad()
        plain(features).sum().backward()
        assert plain.weight.grad is not None
    torch.testing.assert_close(*left)


def test_no_sum_of_gradients_is_made_twice():
    """`grad` is made by the step; hooks on parameters and passes without privacy get theirs."""
    model = nn.Linear(5, 3)
    private, optimizer, loader = private_run(model)
    features, _ = next(iter(loader))
    private(features).sum().backward()
    assert model.weight.grad is None
    optimizer.zero_grad()
    seen = []
    handle = model.weight.register_hook(seen.append)
    private(features).sum().backward()
    handle.remove()
    assert len(seen) == 1
    optimizer.zero_grad()
    private.disable_hooks()
    private(features).sum().backward()
    assert model.weight.grad is not None
