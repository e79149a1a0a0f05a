"""A linear head alone needs no per-example gradients: they follow from what goes in and out."""

import pytest
import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hidden_state_accountants import UnsupportedRunError
from hidden_state_adapters.opacus import DiceSGDOptimizer, HiddenStatePrivacyEngine
from hidden_state_adapters.opacus.wrappers import HeadModule

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

RECORDS, BATCH = 12, 4


class Twice(nn.Module):
    """The head at two positions of every record."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(5, 3)

    def forward(self, features):
        return self.head(features) + self.head(torch.tanh(features))


class AtEveryPosition(nn.Module):
    """The head on a sequence, in the middle of the model."""

    def __init__(self, dim=1):
        super().__init__()
        self.head, self.dim = nn.Linear(5, 3), dim

    def forward(self, features):
        return self.head(features).tanh().mean(self.dim)


class OnItsOutputs(nn.Module):
    """Shares the weights of two layers."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(5, 5, bias=False)

    def forward(self, features):
        return self.head(torch.sigmoid(self.head(features)) / 3)


def data(shape=(5,)):
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(RECORDS, *shape, generator=generator), torch.arange(12) % 3)


MODELS = {
    "on its outputs": (OnItsOutputs, (5,)),
    "head": (lambda: nn.Linear(5, 3), (5,)),
    "without a bias": (lambda: nn.Linear(5, 3, bias=False), (5,)),
    "behind a frozen layer": (
        lambda: nn.Sequential(nn.Linear(5, 5).requires_grad_(False), nn.Linear(5, 3)),
        (5,),
    ),
    "twice": (Twice, (5,)),
    "at every position": (AtEveryPosition, (7, 5)),
}


def trained(name, engine, **arguments):
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model, is_sum = make(), arguments.get("loss_reduction") == "sum"
    arguments = {"noise_multiplier": 0.0, "max_grad_norm": 0.3, **arguments}
    private, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5),
        data_loader=DataLoader(data(shape), batch_size=BATCH),
        **arguments,
    )
    for _ in range(2):
        for features, labels in loader:
            optimizer.zero_grad()
            reduction = "sum" if is_sum else "mean"
            nn.functional.cross_entropy(private(features), labels, reduction=reduction).backward()
            optimizer.step()
    return private, torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", MODELS)
def test_the_trajectory_is_that_of_opacus(name, reduction):
    options = {"loss_reduction": reduction}
    _, own = trained(name, HiddenStatePrivacyEngine(), batch_order="cyclic", **options)
    _, stock = trained(name, PrivacyEngine(), poisson_sampling=False, **options)
    torch.testing.assert_close(own, stock, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "on its outputs"])
def test_dice_sgd_is_that_of_per_example_gradients(name):
    options = {"batch_order": "cyclic", "optimizer_class": DiceSGDOptimizer}
    ends = [
        trained(name, HiddenStatePrivacyEngine(), **options, **mode)[1]
        for mode in ({}, {"grad_sample_mode": "hooks"})
    ]
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-6)


def test_a_head_on_its_own_outputs_is_no_linear_model():
    """It was accounted as convex."""
    options = {"criterion": nn.CrossEntropyLoss(), "feature_norm": 1.0, "max_grad_norm": "auto"}
    with pytest.raises(UnsupportedRunError, match="features that do not depend on the linear head"):
        trained("on its outputs", HiddenStatePrivacyEngine(), noise_multiplier=1.0, **options)


def test_the_norm_of_features_goes_with_a_known_loss():
    with pytest.raises(UnsupportedRunError, match=r"feature_norm = None here, got 1\.0"):
        trained("head", HiddenStatePrivacyEngine(), feature_norm=1.0)


def test_records_in_the_second_dimension():
    ends = []
    for mode in ({}, {"grad_sample_mode": "hooks"}):
        torch.manual_seed(0)
        model = AtEveryPosition(dim=0)
        private, optimizer, loader = HiddenStatePrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
            data_loader=DataLoader(data((7, 5)), batch_size=BATCH),
            noise_multiplier=0.0,
            max_grad_norm=0.3,
            batch_order="cyclic",
            batch_first=False,
            **mode,
        )
        for features, labels in loader:
            optimizer.zero_grad()
            outputs = private(features.movedim(0, 1))
            nn.functional.cross_entropy(outputs, labels).backward()
            optimizer.step()
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("model", "arguments"),
    [
        (nn.Linear(5, 3), {"grad_sample_mode": "hooks"}),
        (nn.Linear(5, 3), {"wrap_model": False}),
        (nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)), {}),
    ],
)
def test_other_models_and_whoever_asks_have_gradients_of_opacus(model, arguments):
    private, *_ = HiddenStatePrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data(), batch_size=BATCH),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        **arguments,
    )
    assert type(private) is not HeadModule
