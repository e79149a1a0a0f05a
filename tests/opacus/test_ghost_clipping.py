"""grad_sample_mode="ghost": Opacus' own two backward passes, accounted by composition."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hidden_state_accountants as hsa
from hidden_state_adapters.opacus import DiceSGDOptimizer, HiddenStatePrivacyEngine

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

CLIP = 0.3


def private(engine, *, outputs=3, criterion=None, model=None, **arguments):
    """(model, private model, optimizer, criterion, loader)"""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(12, 5, generator=generator), torch.arange(12) % 3)
    model = model or nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, outputs))
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


def test_another_criterion_leaves_nothing_clipped():
    """The plain one makes one pass: its gradients are those of no clip."""
    _, model, optimizer, _, loader = private(HiddenStatePrivacyEngine(), batch_order="cyclic")
    with pytest.raises(hsa.UnsupportedRunError, match="the criterion that make_private returned"):
        train(model, optimizer, nn.CrossEntropyLoss(), loader)


@pytest.mark.parametrize(
    "loss",
    [
        lambda losses, weights: 0.5 * (2 * losses) + (weights**2).sum() / 2,
        lambda losses, weights: (weights**2).sum() - (-losses),
    ],
)
def test_a_penalty_on_the_weights_is_refused(loss):
    """It is in no norm, but in the sum, times the clip factors of all records together."""
    inner, model, _, criterion, loader = private(HiddenStatePrivacyEngine(), batch_order="cyclic")
    features, labels = next(iter(loader))
    with pytest.raises(hsa.UnsupportedRunError, match="a penalty, another use"):
        loss(criterion(model(features), labels), inner[0].weight).backward()


class _Tied(nn.Module):
    """Uses the weights of a layer once more, below another layer or above all."""

    def __init__(self, is_above):
        super().__init__()
        self.first, self.last, self.is_above = nn.Linear(5, 3), nn.Linear(3, 3), is_above

    def forward(self, features):
        hidden = self.first(features).relu_()
        again = nn.functional.linear(hidden, self.first.weight[:, :3])
        return self.last(hidden) + again if self.is_above else self.last(again)


@pytest.mark.parametrize("is_above", [True, False])
def test_another_use_of_the_weights_is_refused(is_above):
    _, model, optimizer, criterion, loader = private(
        HiddenStatePrivacyEngine(), model=_Tied(is_above), batch_order="cyclic"
    )
    with pytest.raises(hsa.UnsupportedRunError, match="another use of the weights"):
        train(model, optimizer, criterion, loader)


def test_a_penalty_on_outputs_of_layers_is_a_loss_of_the_record():
    _, model, optimizer, criterion, loader = private(
        HiddenStatePrivacyEngine(), batch_order="cyclic"
    )
    for features, labels in loader:
        outputs = model(features)
        (criterion(outputs, labels) + 0.1 * outputs.square().sum(dim=1)).backward()
        optimizer.step()


@pytest.mark.parametrize(
    "change",
    [
        lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda model: model[0].weight.grad.mul_(100),
        lambda model: setattr(model[2].bias, "grad", model[2].bias.grad * 100),
        lambda model: model[0].weight.register_hook(lambda grad: 100 * grad),
        lambda model: model[0].weight.register_post_accumulate_grad_hook(lambda param: None),
    ],
)
def test_sums_that_are_changed_before_the_noise_are_refused(change):
    inner, model, optimizer, criterion, loader = private(
        HiddenStatePrivacyEngine(), batch_order="cyclic"
    )
    features, labels = next(iter(loader))
    criterion(model(features), labels).backward()
    change(inner)
    with pytest.raises(hsa.UnsupportedRunError, match="step 1: expected the clipped sums"):
        optimizer.step()


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
