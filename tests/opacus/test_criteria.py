"""Criteria as losses of a linear head: what is known, slopes, and loops that compute another one.

The gradient at the outputs of the head is compared with the formula of the loss, which a loop may
compute by an object, a function, a chain of functions, inside of the model, on `.logits`.
"""

import functools

import pytest
import torch
import torch.nn.functional as F
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import TensorDataset

import hidden_state_accountants as hsa
from hidden_state_accountants import LossGeometry
from hidden_state_adapters.opacus import (
    BlockCoordinate,
    EnvelopeBCEWithLogitsLoss,
    EnvelopeCrossEntropyLoss,
    EnvelopeHingeLoss,
    EnvelopeSquaredErrorLoss,
)
from hidden_state_adapters.opacus.criteria import KnownCriterion, auto_loss_geometry

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

DELTA = 1e-5
LINEAR, MANY = nn.Linear(4, 1), nn.Linear(4, 3)
ENVELOPE = {"clip_norm": 0.3, "smoothing": 2.0}
SMOOTHED = functools.partial(F.cross_entropy, label_smoothing=0.1)
SMOOTH_L1 = functools.partial(F.smooth_l1_loss, beta=0.5)
WEIGHTS = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
SUM = {"reduction": "sum"}
CONVEX = LossGeometry.convex(1.0)


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


def hooked():
    model = nn.Linear(4, 3)
    model.register_forward_hook(lambda module, args, output: 2 * output)
    return model


@pytest.mark.parametrize(
    ("model", "criterion", "text"),
    [
        (MANY, nn.MultiMarginLoss(), "knows nn.CrossEntropyLoss"),
        (MANY, F.l1_loss, "got <function l1_loss"),
        (MANY, functools.partial(F.cross_entropy, None), "got functools.partial"),
        (MANY, nn.CrossEntropyLoss(weight=torch.ones(3)),
         r'the label of one record rescales all others. Use CrossEntropyLoss\(.*reduction="sum"'),
        (MANY, nn.CrossEntropyLoss(ignore_index=0), "ignore_index"),
        (MANY, nn.CrossEntropyLoss(reduction="sum"), "reduction = 'mean'"),
        (LINEAR, nn.BCEWithLogitsLoss(pos_weight=torch.ones(7)), "pos_weight with a finite"),
        (MANY, nn.BCEWithLogitsLoss(weight=torch.ones(7, 1)), "of single records belong"),
        (MANY, nn.BCEWithLogitsLoss(pos_weight=-torch.ones(3)), "finite number >= 0"),
        (MANY, nn.BCEWithLogitsLoss(weight=torch.zeros(3)), "not all 0"),
        (nn.Sequential(nn.Linear(4, 4), MANY), nn.CrossEntropyLoss(), "got trainable Linear, Lin"),
        (nn.Sequential(MANY, nn.LogSoftmax(1)), nn.MSELoss(), "LogSoftmax after it"),
        (nn.Sequential(nn.Sequential(MANY), nn.Identity(), nn.Tanh()), nn.CrossEntropyLoss(),
         "Tanh after it"),
        (nn.Conv1d(4, 3, 1), nn.CrossEntropyLoss(), "got trainable Conv1d"),
        (nn.Linear(4, 3).requires_grad_(False), nn.CrossEntropyLoss(), "got trainable -"),
        (hooked(), nn.CrossEntropyLoss(), "a forward hook on Linear"),
        (LINEAR, nn.SmoothL1Loss(beta=0.0), "got SmoothL1Loss"),
        (MANY, EnvelopeHingeLoss(**ENVELOPE), "got EnvelopeHingeLoss.* of 3 outputs"),
        (nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), nn.CrossEntropyLoss(),
         "ParametrizedLinear"),
    ],
)  # fmt: skip
def test_what_auto_does_not_know(model, criterion, text):
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        auto_loss_geometry(model, criterion, 1.0)


def test_with_a_declared_geometry_the_criterion_may_be_anything(make_run):
    criterion = functools.partial(torch.add, torch.ones(()))
    make_run(criterion=criterion, loss_geometry=CONVEX)


def mlp():
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def test_a_convex_loss_is_that_of_one_trained_layer(make_run, make_loader):
    """62.24 became 14.60 where the refusal of criterion= was followed."""
    text = "got Linear, Linear: no loss is convex"
    blocks = {"mechanism": BlockCoordinate(), "loss_geometry": CONVEX}
    for loss in (CONVEX, LossGeometry.linear(1.0), LossGeometry.weakly_convex(1.0, 0.0)):
        with pytest.raises(hsa.UnsupportedRunError, match=text):
            make_run(model=mlp(), loss_geometry=loss)
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        make_run(model=mlp(), sgd={"weight_decay": 0.0}, **blocks)
    make_run(model=mlp(), loss_geometry=LossGeometry.weakly_convex(1.0, 0.5))
    frozen, module = mlp(), mlp()
    frozen[0].requires_grad_(False)
    make_run(model=frozen, loss_geometry=CONVEX)
    layers = [{"params": part.parameters()} for part in (module[0], module[2])]
    make_run(model=module, optimizer=torch.optim.SGD(layers, lr=0.1), **blocks)
    with pytest.raises(hsa.UnsupportedRunError, match="Leave out criterion= and") as error:
        make_run(model=mlp())
    assert "LossGeometry" not in str(error.value)
    engine, module = PrivacyEngine(accountant="hidden_state"), mlp()
    engine.make_private(
        module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data_loader=make_loader(), noise_multiplier=1.0, max_grad_norm=1.0, poisson_sampling=False,
    )  # fmt: skip
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        engine.accountant.declare_run(loss_geometry=CONVEX)


# --- losses of a loop -----------------------------------------------------------------------------


def labels_of(kind, records=60):
    """Targets of a kind: classes, one or several labels, one or several numbers."""
    generator = torch.Generator().manual_seed(1)
    return {
        "classes": torch.arange(records) % 3,
        "probabilities": torch.randn(records, 3, generator=generator).softmax(dim=1),
        "label": (torch.arange(records) % 2).float().reshape(-1, 1),
        "labels": torch.randint(0, 2, (records, 3), generator=generator).float(),
        "number": torch.randn(records, 1, generator=generator),
        "numbers": torch.randn(records, 3, generator=generator),
    }[kind]


@pytest.fixture
def make(make_run, dataset):
    """A run on targets of a kind; other arguments as for make_run."""

    def make(kind="classes", **arguments):
        data = TensorDataset(dataset.tensors[0], labels_of(kind))
        outputs = 1 if kind in ("label", "number") else 3
        arguments = {"model": nn.Linear(5, outputs), "max_grad_norm": 2.1, **arguments}
        return make_run(loader={"dataset": data}, **arguments)

    return make


def epoch(run, loss):
    for features, labels in run.loader:
        run.optimizer.zero_grad()
        loss(run.model(features), labels).backward()
        run.optimizer.step()


def likelihood(z, y):
    return F.nll_loss(F.log_softmax(z, dim=1), y)


def logistic(z, y):
    return -F.logsigmoid(torch.where(y > 0, z, -z)).mean()


def of_lists(loss):
    return lambda z, y: loss(z[:, 0], y.squeeze(1))


ENTROPY, LOGISTIC = nn.CrossEntropyLoss(), nn.BCEWithLogitsLoss()
HONEST = [
    ("classes", F.cross_entropy, ENTROPY,
     lambda z, y: -(F.one_hot(y, 3) * torch.log_softmax(z, 1)).sum(dim=1).mean()),
    ("classes", SMOOTHED, nn.CrossEntropyLoss(label_smoothing=0.1), SMOOTHED),
    ("probabilities", F.cross_entropy, ENTROPY, F.cross_entropy),
    ("classes", F.nll_loss, ENTROPY, likelihood),
    ("classes", nn.NLLLoss(), ENTROPY, likelihood),
    ("label", F.binary_cross_entropy_with_logits, LOGISTIC, logistic),
    ("labels", F.binary_cross_entropy_with_logits, LOGISTIC, LOGISTIC),
    ("number", F.mse_loss, nn.MSELoss(), F.mse_loss),
    ("numbers", F.mse_loss, nn.MSELoss(), F.mse_loss),
    ("number", F.huber_loss, nn.HuberLoss(), F.huber_loss),
    ("numbers", SMOOTH_L1, nn.SmoothL1Loss(beta=0.5), SMOOTH_L1),
    # Other shapes of the same outputs.
    ("number", F.mse_loss, nn.MSELoss(), of_lists(F.mse_loss)),
    ("label", LOGISTIC, LOGISTIC, of_lists(LOGISTIC)),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "criterion", "module", "loss"), HONEST)
def test_the_same_loss_is_accounted_the_same(make, kind, criterion, module, loss):
    run, plain = make(kind, criterion=criterion), make(kind, criterion=module)
    epoch(run, loss)
    epoch(plain, module)
    event = run.engine.privacy_event
    assert event == plain.engine.privacy_event
    assert event.num_steps == 6
    expected = hsa.LastIterateAccountant().compose(event).get_epsilon(DELTA)
    assert run.engine.get_epsilon(DELTA) == pytest.approx(expected, rel=1e-12)


def focal(z, y):
    loss = F.cross_entropy(z, y)  # of the whole batch: one record changes the gradients of all
    return loss * (1 - torch.exp(-loss.detach()))


def hooked_output(change):
    def loss(z, y):
        z.register_hook(change)
        return F.cross_entropy(z, y)

    return loss


ANOTHER = "step 1: the loop has gradients of another loss"
PAIRED = "paired with other targets than those of their records"
THIRD = torch.arange(10) == 3
OTHERS = [
    ("classes", nn.CrossEntropyLoss(**SUM), 'as many times as long .* as with reduction="sum"'),
    ("classes", lambda z, y: F.cross_entropy(z[:5], y[:5]),
     "its rows are scaled by 0 to 2: weights of records"),
    ("classes", lambda z, y: F.cross_entropy(z, y) - F.cross_entropy(z.flip(0), y), ANOTHER),
    ("classes", nn.CrossEntropyLoss(torch.tensor([0.1, 0.1, 5.0])),
     "each class is scaled by one number: class weights"),
    ("classes", SMOOTHED, "label_smoothing = 0.1. Pass the criterion that has it"),
    ("classes", lambda z, y: F.cross_entropy(z, y.masked_fill(THIRD, -100)),
     "its rows are scaled by 0 to 1.11"),
    ("classes", lambda z, y: F.cross_entropy(z, torch.full((10, 3), 2 / 3)), "or other targets"),
    ("classes", lambda z, y: F.cross_entropy(z, z.softmax(dim=1)), "or other targets than those"),
    ("classes", lambda z, y: F.cross_entropy(z, (y + 1) % 3), rf"{PAIRED}.*targets="),
    ("classes", lambda z, y: F.cross_entropy(z, y.flip(0)), PAIRED),
    ("classes", lambda z, y: 5 * F.cross_entropy(z, y), "5 times as long: a scaled or doubled"),
    ("classes", lambda z, y: F.cross_entropy(z, y) / 4, "its gradients are 0.25 times as long"),
    ("classes", lambda z, y: F.cross_entropy(z, y) / 10, "divided by the number of records twice"),
    ("classes", focal, "its gradients are 0.[67].* times as long"),
    # The modulus grows by 1/0.9**2, and few gradients reach their bound.
    ("classes", lambda z, y: F.cross_entropy(z / 0.9, y), ANOTHER),
    ("classes", lambda z, y: F.cross_entropy(z, y) + 0.1 * z.square().mean(), ANOTHER),
    ("classes", hooked_output(lambda gradient: 0.9 * gradient), "0.9 times as long: .*a hook"),
    ("classes", hooked_output(lambda gradient: gradient.mul_(0.9)), "0.9 times as long: .*a hook"),
    ("probabilities", lambda z, y: F.cross_entropy(z, y.flip(1)), ANOTHER),
    # Row i of the gradient depends on the targets of all records.
    ("number", lambda z, y: F.mse_loss(z, y.squeeze(1)), ANOTHER),
    ("label", lambda z, y: LOGISTIC(z[:, 0].roll(1, 0), y.squeeze(1)), ANOTHER),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "loss", "text"), OTHERS, ids=[row[2] for row in OTHERS])
def test_another_loss_is_refused(make, kind, loss, text):
    known = {"number": nn.MSELoss(), "label": LOGISTIC}
    run = make(kind, criterion=known.get(kind, ENTROPY))
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        epoch(run, loss)
    assert run.steps == 0


def test_a_criterion_that_changes_is_another_one(make):
    criterion = nn.CrossEntropyLoss()
    run = make(criterion=criterion)
    epoch(run, criterion)
    criterion.weight = torch.tensor([0.1, 0.1, 5.0])
    with pytest.raises(hsa.UnsupportedRunError, match=r"step 7: .*: class weights"):
        epoch(run, criterion)


SINGLE = WEIGHTS.float()


@pytest.mark.parametrize(
    ("kind", "criterion", "smoothness", "lipschitz"),
    [
        # Features of norm 1 and a bias: B**2 = 2.
        ("classes", nn.CrossEntropyLoss(SINGLE, **SUM), 2 * 2 / 2, 2 * 2),
        ("classes", nn.CrossEntropyLoss(SINGLE, label_smoothing=0.2, **SUM), 2.0, 4.0),
        ("labels", nn.BCEWithLogitsLoss(pos_weight=SINGLE, **SUM), 2 * 2 / 4, 12**0.5),
        ("labels", nn.BCEWithLogitsLoss(SINGLE, **SUM), 2 * 2 / 4, 10.5**0.5),
        ("labels", nn.BCEWithLogitsLoss(pos_weight=SINGLE), 2 * 2 / 4 / 3, 12**0.5 / 3),
        ("label", nn.BCEWithLogitsLoss(pos_weight=torch.tensor([3.0])), 3 * 2 / 4, 3 * 2**0.5),
    ],
)
def test_weights(make, kind, criterion, smoothness, lipschitz):
    arguments = {"criterion": criterion, "max_grad_norm": 6.0}
    if criterion.reduction == "sum":
        arguments |= {"loss_reduction": "sum", "sgd": {"lr": 0.05, "weight_decay": 1.0}}
    run = make(kind, **arguments)
    epoch(run, criterion)
    event = run.engine.privacy_event
    assert event.loss.smoothness == pytest.approx(smoothness)
    assert event.loss.lipschitz == pytest.approx(lipschitz)
    assert event.per_step("learning_rate")[0] == pytest.approx(0.5)


def test_labels_beyond_one(make_run, dataset):
    """With a weight of positive labels, a label of 2 has a larger curvature."""
    data = TensorDataset(dataset.tensors[0], 1.0001 * labels_of("labels"))
    criterion = nn.BCEWithLogitsLoss(pos_weight=SINGLE)
    run = make_run(loader={"dataset": data}, criterion=criterion, max_grad_norm=10.0)
    with pytest.raises(hsa.UnsupportedRunError, match="targets of the batch, its last tensor"):
        epoch(run, criterion)


class Classifier(nn.Module):
    """As transformers' models for sequence classification."""

    def __init__(self, outputs):
        super().__init__()
        self.classifier = nn.Linear(5, outputs)

    def forward(self, inputs, labels=None):
        logits = self.classifier(inputs)
        if labels is None:
            return {"logits": logits}
        if len(logits[0]) == 1:
            return {"loss": F.mse_loss(logits.squeeze(), labels.squeeze()), "logits": logits}
        return {"loss": F.cross_entropy(logits.view(-1, 3), labels.view(-1)), "logits": logits}


@pytest.mark.parametrize("is_inside", [True, False])
@pytest.mark.parametrize(
    ("kind", "criterion", "outputs"), [("classes", ENTROPY, 3), ("number", nn.MSELoss(), 1)]
)
def test_models_with_a_loss_or_logits(make, kind, criterion, outputs, is_inside):
    run = make(kind, model=Classifier(outputs), criterion=criterion)
    for inputs, labels in run.loader:
        run.optimizer.zero_grad()
        output = run.model(inputs, labels if is_inside else None)
        (output["loss"] if is_inside else criterion(output["logits"], labels)).backward()
        run.optimizer.step()
    event = run.engine.privacy_event
    assert event.num_steps == 6
    assert event.loss == auto_loss_geometry(nn.Linear(5, outputs), criterion, 1.0)


def test_labels_that_the_loop_maps(make):
    """By a function that the engine is told, of every target by itself."""

    def shifted(labels):
        return (labels + 1) % 3

    run = make(criterion=F.cross_entropy, targets=shifted)
    epoch(run, lambda z, y: F.cross_entropy(z, shifted(y)))
    assert run.steps == 6
    with pytest.raises(hsa.UnsupportedRunError, match="map every target by itself"):
        epoch(make(criterion=F.cross_entropy, targets=lambda y: y.flip(0)), F.cross_entropy)
