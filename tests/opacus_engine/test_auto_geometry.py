import math
from functools import partial

import pytest
import torch
from torch import nn

import hidden_state_accountants as hsa
from hidden_state_accountants import LossGeometry
from hidden_state_adapters.opacus import (
    EnvelopeBCEWithLogitsLoss,
    EnvelopeCrossEntropyLoss,
    EnvelopeHingeLoss,
    EnvelopeSquaredErrorLoss,
)
from hidden_state_adapters.opacus.geometry import auto_loss_geometry

LINEAR = nn.Linear(4, 1)
MANY = nn.Linear(4, 3)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("criterion", "outputs", "expected"),
    [
        (nn.CrossEntropyLoss(), 3, LossGeometry.softmax_cross_entropy),
        (nn.CrossEntropyLoss(label_smoothing=0.2), 3, LossGeometry.softmax_cross_entropy),
        (nn.BCEWithLogitsLoss(), 1, LossGeometry.logistic),
        (nn.MSELoss(), 1, lambda norm, bias: LossGeometry.squared_error(norm, bias, scale=2.0)),
        (nn.HuberLoss(delta=0.3), 1, lambda norm, bias: LossGeometry.huber(norm, 0.3, bias)),
        (EnvelopeCrossEntropyLoss(0.3, 2.0), 3,
         partial(LossGeometry.envelope_softmax_cross_entropy, clip_norm=0.3, smoothing=2.0)),
        (EnvelopeBCEWithLogitsLoss(0.3, 2.0), 1,
         partial(LossGeometry.envelope_logistic, clip_norm=0.3, smoothing=2.0)),
        (EnvelopeHingeLoss(0.3, 2.0), 1,
         partial(LossGeometry.envelope_hinge, clip_norm=0.3, smoothing=2.0)),
        (EnvelopeSquaredErrorLoss(0.3, 2.0, 3.0), 3,
         partial(LossGeometry.envelope_squared_error, clip_norm=0.3, smoothing=2.0, scale=3.0)),
    ],
)  # fmt: skip
def test_known_criteria(criterion, outputs, expected, bias):
    for model in (
        nn.Linear(4, outputs, bias=bias),
        nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(4, outputs, bias=bias)), nn.Identity()),
    ):
        assert auto_loss_geometry(model, criterion, 1.5) == expected(1.5, bias)


def test_smooth_l1():
    loss = auto_loss_geometry(nn.Linear(4, 1, bias=False), nn.SmoothL1Loss(beta=0.5), 2.0)
    assert loss == LossGeometry.generalized_linear(8.0, 2.0)
    with pytest.raises(hsa.UnsupportedRunError, match="beta > 0"):
        auto_loss_geometry(LINEAR, nn.SmoothL1Loss(beta=0.0), 1.0)


TARGETS = {
    nn.CrossEntropyLoss: lambda n: torch.randint(0, 3, (n,)),
    nn.BCEWithLogitsLoss: lambda n: torch.randint(0, 2, (n, 1)).double(),
    EnvelopeCrossEntropyLoss: lambda n: torch.randint(0, 3, (n,)),
    EnvelopeBCEWithLogitsLoss: lambda n: torch.randint(0, 2, (n, 1)).double(),
    EnvelopeHingeLoss: lambda n: 2.0 * torch.randint(0, 2, (n, 1)).double() - 1,
}


@pytest.mark.parametrize(
    "criterion",
    [
        nn.CrossEntropyLoss(), nn.CrossEntropyLoss(label_smoothing=0.3), nn.BCEWithLogitsLoss(),
        nn.MSELoss(), nn.HuberLoss(delta=0.7), nn.SmoothL1Loss(beta=0.25),
        EnvelopeCrossEntropyLoss(1.2, 0.7), EnvelopeBCEWithLogitsLoss(0.4, 0.7),
        EnvelopeHingeLoss(0.4, 0.7),
        EnvelopeSquaredErrorLoss(0.4, 0.7, 2.0),
    ],
    ids=str,
)  # fmt: skip
def test_constants_hold_for_torch_gradients(criterion):
    """Gradients of single records, and their differences at random pairs of parameters."""
    torch.manual_seed(0)
    norm, n = 1.5, 200
    model = nn.Linear(4, 3 if "CrossEntropy" in type(criterion).__name__ else 1).double()
    loss = auto_loss_geometry(model, criterion, norm)
    features = torch.randn(n, 4, dtype=torch.float64)
    features *= norm / features.norm(dim=1, keepdim=True)
    targets = TARGETS.get(type(criterion), lambda n: torch.randn(n, 1, dtype=torch.float64))(n)
    names = [name for name, _ in model.named_parameters()]

    def gradient(values, x, y):
        def value(values):
            parameters = dict(zip(names, values, strict=True))
            return criterion(torch.func.functional_call(model, parameters, x[None]), y[None])

        return torch.cat([g.flatten() for g in torch.func.grad(value)(values)])

    largest, steepest = 0.0, 0.0
    for x, y in zip(features, targets, strict=True):
        here = tuple(3 * torch.randn_like(p) for p in model.parameters())
        shift = tuple(0.01 * torch.randn_like(p) for p in here)
        there = tuple(p + q for p, q in zip(here, shift, strict=True))
        distance = math.sqrt(sum(float((q**2).sum()) for q in shift))
        a, b = gradient(here, x, y), gradient(there, x, y)
        largest = max(largest, float(a.norm()))
        steepest = max(steepest, float((a - b).norm()) / distance)
    assert steepest <= loss.smoothness * (1 + 1e-9)
    assert steepest > 0.3 * loss.smoothness
    if loss.lipschitz is not None:
        assert 0.5 * loss.lipschitz < largest <= loss.lipschitz * (1 + 1e-9)


def hooked():
    model = nn.Linear(4, 3)
    model.register_forward_hook(lambda module, args, output: 2 * output)
    return model


def half_frozen():
    model = nn.Linear(4, 3)
    model.bias.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("model", "criterion", "feature_norm", "text"),
    [
        (MANY, None, 1.0, "needs the criterion"),
        (MANY, nn.CrossEntropyLoss(), None, "feature_norm="),
        (MANY, nn.NLLLoss(), 1.0, "knows nn.CrossEntropyLoss"),
        (MANY, nn.CrossEntropyLoss, 1.0, "got type"),
        (MANY, nn.CrossEntropyLoss(weight=torch.ones(3)), 1.0, "weight = None"),
        (MANY, nn.CrossEntropyLoss(ignore_index=0), 1.0, "ignore_index"),
        (MANY, nn.CrossEntropyLoss(reduction="sum"), 1.0, "reduction = 'mean'"),
        (MANY, nn.CrossEntropyLoss(reduction="none"), 1.0, "reduction = 'mean'"),
        (LINEAR, nn.BCEWithLogitsLoss(pos_weight=torch.ones(1)), 1.0, "pos_weight = None"),
        (LINEAR, nn.BCEWithLogitsLoss(weight=torch.ones(1)), 1.0, "weight = None"),
        (MANY, nn.BCEWithLogitsLoss(), 1.0, "one output"),
        (MANY, nn.MSELoss(), 1.0, "one output"),
        (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), nn.CrossEntropyLoss(), 1.0,
         "got trainable Linear, Linear"),
        (nn.Sequential(MANY, nn.ReLU()), nn.CrossEntropyLoss(), 1.0, "ReLU"),
        (nn.Sequential(nn.Sequential(MANY), nn.Identity(), nn.Tanh()), nn.CrossEntropyLoss(), 1.0,
         "Tanh after it"),
        (nn.Conv1d(4, 3, 1), nn.CrossEntropyLoss(), 1.0, "got trainable Conv1d"),
        (nn.Linear(4, 3).requires_grad_(False), nn.CrossEntropyLoss(), 1.0, "got trainable -"),
        (hooked(), nn.CrossEntropyLoss(), 1.0, "a forward hook on Linear"),
        (half_frozen(), nn.CrossEntropyLoss(), 1.0, "frozen parameters"),
        (nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), nn.CrossEntropyLoss(), 1.0,
         "ParametrizedLinear"),
    ],
)  # fmt: skip
def test_what_auto_does_not_know(model, criterion, feature_norm, text):
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        auto_loss_geometry(model, criterion, feature_norm)


def test_the_way_out_is_spelled_out():
    with pytest.raises(hsa.UnsupportedRunError) as error:
        auto_loss_geometry(MANY, nn.NLLLoss(), 1.0)
    assert "LossGeometry.convex(smoothness)" in str(error.value)
    assert "..." not in str(error.value)


def test_sum_goes_with_sum():
    criterion = nn.CrossEntropyLoss(reduction="sum")
    assert auto_loss_geometry(MANY, criterion, 1.0, "sum") == LossGeometry.softmax_cross_entropy(
        1.0, bias=True
    )


@pytest.mark.parametrize("norm", [0.0, -1.0, float("inf"), float("nan")])
def test_feature_norm_is_validated(norm):
    with pytest.raises(ValueError, match="feature_norm"):
        auto_loss_geometry(MANY, nn.CrossEntropyLoss(), norm)
