"""Composition: what reaches the parameters beside the records, and the inputs through the model."""

import functools

import pytest
import torch
from opacus.layers import DPLSTM
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from hidden_state_accountants import UnsupportedRunError
from hidden_state_adapters.opacus import HiddenStatePrivacyEngine

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

BESIDE = "something beside the outputs of .*: a penalty in the loss.* weight_decay"


class Words(nn.Module):
    """Embeddings of which one is padding, and used twice; a recurrent layer."""

    def __init__(self):
        super().__init__()
        self.words, self.recurrent = nn.Embedding(9, 4, padding_idx=0), DPLSTM(4, 4)
        self.head = nn.Linear(4, 3)
        self.again = nn.Linear(4, 9, bias=False)
        self.again.weight = self.words.weight

    def forward(self, records):
        ids = (3 * records).long().clamp(0, 8)
        hidden = self.recurrent(self.words(ids).transpose(0, 1))[0][-1]
        return self.head(hidden) + self.again(hidden)[:, :3]


class Token(nn.Module):
    """A parameter of its own, in front of other layers."""

    def __init__(self):
        super().__init__()
        self.token, self.head = nn.Parameter(torch.ones(1, 5)), nn.Linear(5, 3)

    def forward(self, records):
        return self.head(records * self.token)


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


def trains(module, penalty=0.0, between=None, from_step=0, epochs=1, **arguments):
    reduction = arguments.get("loss_reduction", "mean")
    model, optimizer, loader = private(module, **arguments)
    step = 0
    for records, labels in epochs * list(loader):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(records), labels, reduction=reduction)
        weight = penalty * (step >= from_step)
        (loss + weight * sum(p.square().sum() for p in module.parameters())).backward()
        if between is not None:
            between()
        optimizer.step()
        step += 1


HEADS = {"head": lambda: nn.Linear(5, 3), "layers": layers, "convolution": convolution}


def circle():
    """Opacus takes the padding of every convolution for zeros."""
    module = convolution()
    module[1] = nn.Conv1d(1, 4, 3, padding=1, padding_mode="circular")
    module[-1] = nn.Linear(20, 3)
    return module


OTHERS = {"words": Words, "token": Token, "circle": circle}
WAYS = [
    {},
    {"loss_reduction": "sum"},
    {"grad_sample_mode": "functorch"},
    {"grad_sample_mode": "ew"},
    {"clipping": "per_layer"},
]


@pytest.mark.parametrize("kind", [*HEADS, *OTHERS])
@pytest.mark.parametrize("penalty", [1e-3, 100.0])
def test_a_penalty_has_no_effect_and_is_refused(kind, penalty):
    torch.manual_seed(0)
    with pytest.raises(UnsupportedRunError, match=BESIDE):
        trains({**HEADS, **OTHERS}[kind](), penalty)


def test_a_hook_on_a_parameter_has_no_effect_and_is_refused():
    module = layers()
    module[0].weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    with pytest.raises(UnsupportedRunError, match=r"a hook on a parameter.* Leave it out"):
        trains(module)


@pytest.mark.parametrize("options", WAYS)
def test_of_every_way_to_a_gradient(options):
    torch.manual_seed(0)
    norms = {"max_grad_norm": [1.0] * 4} if "clipping" in options else {}
    trains(layers(), **options, **norms)
    with pytest.raises(UnsupportedRunError, match=BESIDE):
        trains(layers(), 0.01, **options, **norms)


def test_a_penalty_that_is_zero_at_first():
    module = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    for param in module.parameters():
        nn.init.zeros_(param)
    with pytest.raises(UnsupportedRunError, match=f"step 2: {BESIDE}"):
        trains(module, 0.1)


@pytest.mark.parametrize("kind", [*HEADS, *OTHERS])
@pytest.mark.parametrize("arithmetic", ["float32", "bfloat16"])
def test_ordinary_loops(kind, arithmetic):
    """Gradients that a stock script clips once more, and autocast."""
    torch.manual_seed(0)
    module = {**HEADS, **OTHERS}[kind]()
    clip = functools.partial(nn.utils.clip_grad_norm_, list(module.parameters()), 1e-3)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=arithmetic == "bfloat16"):
        trains(module, between=clip)


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
