"""grad_sample_mode="ghost": Opacus' own two backward passes, accounted by composition."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hidden_state_accountants as hsa
from hidden_state_adapters.opacus import DiceSGDOptimizer, HiddenStatePrivacyEngine

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

CLIP = 0.3


def private(engine, *, outputs=3, criterion=None, **arguments):
    """(model, private model, optimizer, criterion, loader)"""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(12, 5, generator=generator), torch.arange(12) % 3)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, outputs))
    arguments = {"noise_multiplier": 0.0, "max_grad_norm": CLIP, **arguments}
    result = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        criterion=criterion or nn.CrossEntropyLoss(),
        data_loader=DataLoader(data, batch_size=4),
        grad_sample_mode="ghost",
        **arguments,
    )
    return model, *result


def train(model, optimizer, criterion, batches):
    for features, labels in batches:
        optimizer.zero_grad()
        criterion(model(features), labels).backward()
        optimizer.step()


def test_it_is_accounted():
    engine = HiddenStatePrivacyEngine()
    _, model, optimizer, criterion, loader = private(
        engine, batch_order="cyclic", noise_multiplier=2.0
    )
    train(model, optimizer, criterion, loader)
    assert engine.privacy_event.num_steps == 3
    assert 0 < engine.get_epsilon(1e-5) < 5


def test_another_criterion_leaves_nothing_clipped():
    """The plain one makes one pass: its gradients are those of no clip."""
    _, model, optimizer, _, loader = private(HiddenStatePrivacyEngine(), batch_order="cyclic")
    with pytest.raises(hsa.UnsupportedRunError, match="the criterion that make_private returned"):
        train(model, optimizer, nn.CrossEntropyLoss(), loader)


def test_losses_in_a_column_would_not_be_clipped():
    _, model, _, criterion, loader = private(
        HiddenStatePrivacyEngine(), outputs=1, criterion=nn.BCEWithLogitsLoss(),
        batch_order="cyclic",
    )  # fmt: skip
    features, labels = next(iter(loader))
    with pytest.raises(
        hsa.UnsupportedRunError, match=r"one loss for each record.*got \(1,\) for each"
    ):
        criterion(model(features), (labels > 0).float()[:, None])


def test_the_clip_norm_stays():
    _, model, optimizer, criterion, loader = private(
        HiddenStatePrivacyEngine(), batch_order="cyclic"
    )
    optimizer.max_grad_norm = 0.5 * CLIP  # the noise would follow it, Opacus' clip would not
    with pytest.raises(hsa.UnsupportedRunError, match=r"max_grad_norm = 0\.15"):
        train(model, optimizer, criterion, loader)


@pytest.mark.parametrize(
    "asked",
    [{"optimizer_class": DiceSGDOptimizer}, {"loss_geometry": hsa.LossGeometry.smooth(1.0)}],
)
def test_mechanisms_need_the_gradient_of_every_record(asked):
    with pytest.raises(hsa.UnsupportedRunError, match='Expected grad_sample_mode = "hooks"'):
        private(HiddenStatePrivacyEngine(), batch_order="cyclic", **asked)
