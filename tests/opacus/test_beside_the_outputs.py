"""Composition: what reaches the parameters beside the records, and the inputs through the model."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from hidden_state_accountants import UnsupportedRunError
from hidden_state_adapters.opacus import HiddenStatePrivacyEngine

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

BESIDE = r"something beside the outputs of .*\(a penalty in the loss.* weight_decay"
KNOWN = {"criterion": nn.CrossEntropyLoss(), "feature_norm": 10.0, "max_grad_norm": "auto"}


def layers():
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def convolution():
    before = nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 4, 3), nn.GroupNorm(2, 4)
    return nn.Sequential(*before, nn.Flatten(), nn.Linear(12, 3))


def private(module, engine=None, rate=0.1, **arguments):
    records = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))
    arguments = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, **arguments}
    model, optimizer, *_, loader = (engine or HiddenStatePrivacyEngine()).make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=rate),
        data_loader=DataLoader(TensorDataset(records, torch.arange(12) % 3), batch_size=6),
        batch_order="cyclic",
        **arguments,
    )
    return model, optimizer, loader


def trained(module, penalty=0.0, between=None, **arguments):
    torch.manual_seed(0)
    own = torch.Generator().manual_seed(1)
    model, optimizer, loader = private(module, noise_generator=own, **arguments)
    for records, labels in loader:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(records), labels)
        (loss + penalty * sum(p.square().sum() for p in module.parameters())).backward()
        if between is not None:
            between()
        optimizer.step()
    return [param.detach().clone() for param in module.parameters()]


HEADS = {"head": lambda: nn.Linear(5, 3), "layers": layers, "convolution": convolution}


@pytest.mark.parametrize("penalty", [1e-3, 100.0])
def test_a_penalty_is_refused_of_a_head_and_has_no_effect_elsewhere(penalty):
    with pytest.raises(UnsupportedRunError, match=BESIDE):
        trained(nn.Linear(5, 3), penalty, **KNOWN)
    module = layers()
    again = copy.deepcopy(module)
    assert all(map(torch.equal, trained(module), trained(again, penalty)))


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("arithmetic", ["float32", "bfloat16"])
def test_ordinary_loops(kind, arithmetic):
    """Gradients that a stock script clips once more, and autocast."""
    module = HEADS[kind]()
    clip = functools.partial(nn.utils.clip_grad_norm_, list(module.parameters()), 1e-3)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=arithmetic == "bfloat16"):
        trained(module, between=clip)


@pytest.mark.parametrize("kind", HEADS)
def test_an_encoder_outside_gets_its_gradient(kind):
    """That of the loss, without noise, as in Opacus; the head moves as without the encoder."""
    torch.manual_seed(0)
    module, encoder = HEADS[kind](), nn.Linear(5, 5)
    model, optimizer, loader = private(module, noise_multiplier=0.0)
    for records, labels in loader:
        optimizer.zero_grad()
        encoder.zero_grad()
        records.requires_grad_()
        plain = HEADS[kind]()
        plain.load_state_dict(module.state_dict())
        expected = torch.autograd.grad(
            functional.cross_entropy(plain(encoder(records)), labels), [records, encoder.weight]
        )
        functional.cross_entropy(model(encoder(records)), labels).backward()
        torch.testing.assert_close([records.grad, encoder.weight.grad], list(expected))
        optimizer.step()
