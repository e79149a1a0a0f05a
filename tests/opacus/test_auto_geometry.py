import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hidden_state_accountants as hsa
from hidden_state_accountants import LossGeometry
from hidden_state_adapters.opacus import (
    EnvelopeBCEWithLogitsLoss,
    EnvelopeCrossEntropyLoss,
    EnvelopeHingeLoss,
    EnvelopeSquaredErrorLoss,
)
from hidden_state_adapters.opacus.criteria import KnownCriterion, auto_loss_geometry

LINEAR = nn.Linear(4, 1)
MANY = nn.Linear(4, 3)
ENVELOPE = {"clip_norm": 0.3, "smoothing": 2.0}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("criterion", "outputs", "expected"),
    [
        (nn.CrossEntropyLoss(), 3, LossGeometry.softmax_cross_entropy),
        (nn.CrossEntropyLoss(label_smoothing=0.2), 3, LossGeometry.softmax_cross_entropy),
        (nn.BCEWithLogitsLoss(), 1, LossGeometry.logistic),
        (nn.MSELoss(), 1, lambda norm, bias: LossGeometry.squared_error(norm, bias, scale=2.0)),
        (nn.MSELoss(), 4, lambda norm, bias: LossGeometry.squared_error(norm, bias, scale=0.5)),
        (nn.HuberLoss(delta=0.3), 1, lambda norm, bias: LossGeometry.huber(norm, 0.3, bias)),
        (nn.SmoothL1Loss(beta=0.5), 1,
         lambda _, bias: LossGeometry.generalized_linear(2 * (2.25 + bias), (2.25 + bias) ** 0.5)),
        (EnvelopeCrossEntropyLoss(**ENVELOPE), 3,
         functools.partial(LossGeometry.envelope_softmax_cross_entropy, **ENVELOPE)),
        (EnvelopeBCEWithLogitsLoss(**ENVELOPE), 1,
         functools.partial(LossGeometry.envelope_logistic, **ENVELOPE)),
        (EnvelopeHingeLoss(**ENVELOPE), 1,
         functools.partial(LossGeometry.envelope_hinge, **ENVELOPE)),
        (EnvelopeSquaredErrorLoss(scale=3.0, **ENVELOPE), 3,
         functools.partial(LossGeometry.envelope_squared_error, scale=3.0, **ENVELOPE)),
    ],
)  # fmt: skip
def test_known_criteria(criterion, outputs, expected, bias):
    for model in (
        nn.Linear(4, outputs, bias=bias),
        nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(4, outputs, bias=bias)), nn.Identity()),
    ):
        assert auto_loss_geometry(model, criterion, 1.5) == expected(1.5, bias)


TARGETS = {
    nn.CrossEntropyLoss: lambda n, outputs: torch.randint(0, outputs, (n,)),
    nn.BCEWithLogitsLoss: lambda n, outputs: torch.randint(0, 2, (n, outputs)).double(),
    EnvelopeCrossEntropyLoss: lambda n, outputs: torch.randint(0, outputs, (n,)),
    EnvelopeBCEWithLogitsLoss: lambda n, outputs: torch.randint(0, 2, (n, outputs)).double(),
    EnvelopeHingeLoss: lambda n, outputs: 2.0 * torch.randint(0, 2, (n, outputs)).double() - 1,
}
WEIGHTS = torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64)
SUM = {"reduction": "sum"}
CRITERIA = [
    (nn.CrossEntropyLoss(), 3),
    (nn.CrossEntropyLoss(label_smoothing=0.3), 3),
    (nn.CrossEntropyLoss(WEIGHTS, **SUM), 3),
    (nn.CrossEntropyLoss(WEIGHTS, label_smoothing=0.3, **SUM), 3),
    *[
        (criterion, outputs)
        for outputs in (1, 3)
        for criterion in (
            nn.BCEWithLogitsLoss(), nn.BCEWithLogitsLoss(**SUM), nn.MSELoss(), nn.MSELoss(**SUM),
            nn.HuberLoss(delta=0.7), nn.HuberLoss(delta=0.7, **SUM), nn.SmoothL1Loss(beta=0.25),
        )
    ],
    (nn.BCEWithLogitsLoss(pos_weight=WEIGHTS), 3),
    (nn.BCEWithLogitsLoss(WEIGHTS, pos_weight=WEIGHTS.flip(0), **SUM), 3),
    (nn.BCEWithLogitsLoss(pos_weight=WEIGHTS[2:]), 1),
    (nn.BCEWithLogitsLoss(pos_weight=WEIGHTS[0]), 3),
    (EnvelopeCrossEntropyLoss(1.2, 0.7), 3),
    (EnvelopeBCEWithLogitsLoss(0.4, 0.7), 1),
    (EnvelopeHingeLoss(0.4, 0.7), 1),
    (EnvelopeSquaredErrorLoss(0.4, 0.7, 2.0), 1),
]  # fmt: skip


@pytest.mark.parametrize(("criterion", "outputs"), CRITERIA, ids=str)
def test_slopes_are_those_of_torch(criterion, outputs):
    """That the constants hold for them is tested in core/test_linear_losses.py."""
    torch.manual_seed(0)
    n = 200
    output = (3 * torch.randn(n, outputs, dtype=torch.float64)).requires_grad_()
    make = TARGETS.get(type(criterion), lambda n, k: torch.randn(n, k, dtype=torch.float64))
    target = make(n, outputs)
    criterion(output, target).backward()
    known = KnownCriterion.of(criterion, outputs)
    assert known.takes(target, output)
    expected = output.grad * (n if criterion.reduction == "mean" else 1)
    torch.testing.assert_close(known.slopes(output.detach(), target), expected)


@pytest.mark.parametrize("criterion", [c for c, k in CRITERIA[:4]], ids=str)
def test_a_label_that_is_no_class_has_no_slopes(criterion):
    output, labels = torch.randn(4, 3, dtype=torch.float64), torch.tensor([0, -100, 2, 3])
    slopes = KnownCriterion.of(criterion, 3).slopes(output, labels)
    assert slopes.isnan().any(dim=1).tolist() == [False, True, False, True]


FUNCTIONS = [
        (F.cross_entropy, nn.CrossEntropyLoss()),
        (functools.partial(F.cross_entropy, label_smoothing=0.1),
         nn.CrossEntropyLoss(label_smoothing=0.1)),
        (F.nll_loss, nn.CrossEntropyLoss()),
        (nn.NLLLoss(), nn.CrossEntropyLoss()),
        (F.binary_cross_entropy_with_logits, nn.BCEWithLogitsLoss()),
        (functools.partial(F.binary_cross_entropy_with_logits, pos_weight=WEIGHTS),
         nn.BCEWithLogitsLoss(pos_weight=WEIGHTS)),
        (F.mse_loss, nn.MSELoss()),
        (functools.partial(F.huber_loss, delta=0.2), nn.HuberLoss(delta=0.2)),
        (F.smooth_l1_loss, nn.SmoothL1Loss()),
]  # fmt: skip


@pytest.mark.parametrize(("function", "module"), FUNCTIONS)
def test_functions_are_their_modules(function, module):
    assert auto_loss_geometry(MANY, function, 1.0) == auto_loss_geometry(MANY, module, 1.0)


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
        (MANY, nn.MultiMarginLoss(), 1.0, "knows nn.CrossEntropyLoss"),
        (MANY, F.l1_loss, 1.0, "got <function l1_loss"),
        (MANY, functools.partial(F.cross_entropy, None), 1.0, "got functools.partial"),
        (MANY, nn.CrossEntropyLoss, 1.0, "got <class 'torch.*CrossEntropyLoss'>"),
        (MANY, nn.CrossEntropyLoss(weight=torch.ones(3)), 1.0,
         r'the label of one record rescales all others. Use CrossEntropyLoss\(.*reduction="sum"'),
        (MANY, nn.CrossEntropyLoss(ignore_index=0), 1.0, "ignore_index"),
        (MANY, nn.CrossEntropyLoss(reduction="sum"), 1.0, "reduction = 'mean'"),
        (MANY, nn.CrossEntropyLoss(reduction="none"), 1.0, "reduction = 'mean'"),
        (LINEAR, nn.BCEWithLogitsLoss(pos_weight=torch.ones(7)), 1.0, "pos_weight with a finite"),
        (LINEAR, nn.BCEWithLogitsLoss(weight=torch.ones(7)), 1.0, "of single records belong"),
        (MANY, nn.BCEWithLogitsLoss(weight=torch.ones(7, 1)), 1.0, "weight with a finite number"),
        (MANY, nn.BCEWithLogitsLoss(pos_weight=-torch.ones(3)), 1.0, "finite number >= 0"),
        (MANY, nn.BCEWithLogitsLoss(weight=torch.zeros(3)), 1.0, "not all 0"),
        (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), nn.CrossEntropyLoss(), 1.0,
         "got trainable Linear, Linear"),
        (nn.Conv1d(4, 3, 1), nn.CrossEntropyLoss(), 1.0, "got trainable Conv1d"),
        (nn.Linear(4, 3).requires_grad_(False), nn.CrossEntropyLoss(), 1.0, "got trainable -"),
        (hooked(), nn.CrossEntropyLoss(), 1.0, "a forward hook on Linear"),
        (LINEAR, nn.SmoothL1Loss(beta=0.0), 1.0, "got SmoothL1Loss"),
        (MANY, EnvelopeHingeLoss(**ENVELOPE), 1.0, "got EnvelopeHingeLoss.* of 3 outputs"),
        (half_frozen(), nn.CrossEntropyLoss(), 1.0, "got trainable Linear in part"),
        (nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), nn.CrossEntropyLoss(), 1.0,
         "ParametrizedLinear"),
    ],
)  # fmt: skip
def test_what_auto_does_not_know(model, criterion, feature_norm, text):
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        auto_loss_geometry(model, criterion, feature_norm)


def test_other_callables_are_left_alone(make_run):
    """With a declared geometry the criterion may be anything."""
    criterion = functools.partial(torch.add, torch.ones(()))
    loss = LossGeometry.convex(1.0)
    make_run(criterion=criterion, loss_geometry=loss, feature_norm=None)


def test_sum_goes_with_sum():
    criterion = nn.CrossEntropyLoss(reduction="sum")
    assert auto_loss_geometry(MANY, criterion, 1.0, "sum") == LossGeometry.softmax_cross_entropy(
        1.0, bias=True
    )


@pytest.mark.parametrize("norm", [0.0, -1.0, float("inf"), float("nan")])
def test_feature_norm_is_validated(norm):
    with pytest.raises(ValueError, match="feature_norm"):
        auto_loss_geometry(MANY, nn.CrossEntropyLoss(), norm)
