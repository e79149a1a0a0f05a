"""Criteria as losses of a linear head: what is known, slopes, and loops that compute another one.

The gradient at the outputs of the head is compared with the formula of the loss, which a loop may
compute by an object, a function, a chain of functions, inside of the model, on `.logits`.
"""

import copy
import functools
import types

import attrs
import pytest
import torch
import torch.nn.functional as F
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hidden_state_accountants as hsa
from hidden_state_accountants import LossGeometry
from hidden_state_adapters.opacus import (
    BlockCoordinate,
    EnvelopeBCEWithLogitsLoss,
    EnvelopeCrossEntropyLoss,
    EnvelopeHingeLoss,
    EnvelopeSquaredErrorLoss,
    HiddenStatePrivacyEngine,
)
from hidden_state_adapters.opacus.criteria import KnownCriterion, as_module, auto_loss_geometry

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

DELTA = 1e-5
LINEAR, MANY = nn.Linear(4, 1), nn.Linear(4, 3)
ENVELOPE = {"clip_norm": 0.3, "smoothing": 2.0}
SMOOTHED = functools.partial(F.cross_entropy, label_smoothing=0.1)
WEIGHTS = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
SUM = {"reduction": "sum"}


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
        (nn.Sequential(MANY, nn.ReLU()), nn.CrossEntropyLoss(), 1.0, "ReLU after it"),
        (nn.Sequential(MANY, nn.LogSoftmax(1)), nn.MSELoss(), 1.0, "LogSoftmax after it"),
        (nn.Sequential(nn.Sequential(MANY), nn.Identity(), nn.Tanh()), nn.CrossEntropyLoss(), 1.0,
         "Tanh after it"),
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


def test_arguments_beside_the_criterion():
    geometry = auto_loss_geometry(MANY, nn.CrossEntropyLoss(**SUM), 1.0, "sum")
    assert geometry == LossGeometry.softmax_cross_entropy(1.0, bias=True)
    for norm, error in ((0.0, ValueError), (float("nan"), ValueError), (None, TypeError)):
        with pytest.raises(error, match="feature_norm"):
            auto_loss_geometry(MANY, nn.CrossEntropyLoss(), norm)


# Several layers.


def mlp():
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def begun(module, groups=None, engine=None, **arguments):
    engine = engine or HiddenStatePrivacyEngine()
    given = {"batch_order": "cyclic"} if isinstance(engine, HiddenStatePrivacyEngine) else {}
    params = [p for p in module.parameters() if p.requires_grad]
    data = TensorDataset(torch.randn(8, 4), torch.arange(8) % 2)
    engine.make_private(
        module=module,
        optimizer=torch.optim.SGD(params if groups is None else groups, lr=0.1),
        data_loader=DataLoader(data, batch_size=4),
        noise_multiplier=1.0,
        max_grad_norm=0.5,
        **given,
        **arguments,
    )
    return engine


CONVEX = LossGeometry.convex(1.0)


def test_a_convex_loss_is_that_of_one_trained_layer():
    """62.24 became 14.60 where the refusal of criterion= was followed."""
    text = "got Linear, Linear: no loss is convex"
    for loss in (CONVEX, LossGeometry.linear(1.0), LossGeometry.weakly_convex(1.0, 0.0)):
        with pytest.raises(hsa.UnsupportedRunError, match=text):
            begun(mlp(), loss_geometry=loss)
    begun(mlp(), loss_geometry=LossGeometry.weakly_convex(1.0, 0.5))
    module = mlp()
    module[0].requires_grad_(False)
    begun(module, loss_geometry=CONVEX)
    module = mlp()
    blocks = {"mechanism": BlockCoordinate(), "loss_geometry": CONVEX}
    begun(module, [{"params": part.parameters()} for part in (module[0], module[2])], **blocks)
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        begun(mlp(), **blocks)
    engine = begun(mlp(), engine=PrivacyEngine(accountant="hidden_state"), poisson_sampling=False)
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        engine.accountant.declare_run(loss_geometry=CONVEX)
    with pytest.raises(hsa.UnsupportedRunError, match="Leave out criterion= and") as error:
        begun(mlp(), criterion=nn.CrossEntropyLoss(), feature_norm=1.0)
    assert "LossGeometry" not in str(error.value)


# Losses of a loop.


def labels_of(kind, records=60):
    """Targets of a kind: classes, one or several labels, one or several numbers."""
    generator = torch.Generator().manual_seed(1)
    return {
        "classes": torch.arange(records) % 3,
        "one label": (torch.arange(records) % 2).float().reshape(-1, 1),
        "labels": torch.randint(0, 2, (records, 3), generator=generator).float(),
        "number": torch.randn(records, 1, generator=generator),
        "numbers": torch.randn(records, 3, generator=generator),
    }[kind]


@pytest.fixture
def make(make_run, dataset):
    """A run on targets of a kind; other arguments as for make_run."""

    def make(kind="classes", **arguments):
        data = TensorDataset(dataset.tensors[0], labels_of(kind))
        outputs = 1 if kind in ("one label", "number") else 3
        loader = {"dataset": data, **arguments.pop("loader", {})}
        arguments = {"model": nn.Linear(5, outputs), "max_grad_norm": 2.1, **arguments}
        return make_run(loader=loader, **arguments)

    return make


def epoch(run, loss, loader=None):
    for features, labels in run.loader if loader is None else loader:
        run.optimizer.zero_grad()
        loss(run.model(features), labels).backward()
        run.optimizer.step()


def negative_log_likelihood(output, labels):
    return F.nll_loss(F.log_softmax(output, dim=1), labels)


def by_hand(output, labels):
    return -(F.one_hot(labels, 3) * torch.log_softmax(output, 1)).sum(dim=1).mean()


def logistic_by_hand(output, labels):
    return -F.logsigmoid(torch.where(labels > 0, output, -output)).mean()


HONEST = [
    ("classes", nn.CrossEntropyLoss(), F.cross_entropy),
    ("classes", F.cross_entropy, F.cross_entropy),
    ("classes", F.cross_entropy, by_hand),
    ("classes", nn.CrossEntropyLoss(label_smoothing=0.1), SMOOTHED),
    ("classes", F.nll_loss, negative_log_likelihood),
    ("classes", nn.NLLLoss(), negative_log_likelihood),
    ("one label", F.binary_cross_entropy_with_logits, F.binary_cross_entropy_with_logits),
    ("one label", nn.BCEWithLogitsLoss(), logistic_by_hand),
    ("labels", F.binary_cross_entropy_with_logits, F.binary_cross_entropy_with_logits),
    ("number", F.mse_loss, F.mse_loss),
    ("numbers", F.mse_loss, F.mse_loss),
    ("number", F.huber_loss, F.huber_loss),
    ("numbers", functools.partial(F.smooth_l1_loss, beta=0.5),
     functools.partial(F.smooth_l1_loss, beta=0.5)),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "criterion", "loss"), HONEST)
def test_the_same_loss_is_accounted_the_same(make, kind, criterion, loss):
    run, plain = make(kind, criterion=criterion), make(kind, criterion=object_of(criterion))
    epoch(run, loss)
    epoch(plain, plain.criterion)
    event = run.engine.privacy_event
    assert event == plain.engine.privacy_event
    assert event.num_steps == 6
    expected = hsa.LastIterateAccountant().compose(event).get_epsilon(DELTA)
    assert run.engine.get_epsilon(DELTA) == pytest.approx(expected, rel=1e-12)


def object_of(criterion):
    known = as_module(criterion)
    return nn.CrossEntropyLoss() if isinstance(criterion, nn.NLLLoss) else known


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew", "ghost"])
def test_every_kind_of_gradients(make_loader, mode):
    torch.manual_seed(0)
    plain, engine = nn.Linear(5, 3), HiddenStatePrivacyEngine()
    model, optimizer, *_, loader = engine.make_private(
        module=plain, optimizer=torch.optim.SGD(plain.parameters(), lr=0.5),
        data_loader=make_loader(), noise_multiplier=2.0, max_grad_norm=2.1, batch_order="cyclic",
        criterion=F.cross_entropy, loss_geometry="auto", feature_norm=1.0, grad_sample_mode=mode,
    )  # fmt: skip
    run = types.SimpleNamespace(engine=engine, model=model, optimizer=optimizer, loader=loader)
    epoch(run, F.cross_entropy)
    assert engine.privacy_event.num_steps == 6
    with pytest.raises(hsa.UnsupportedRunError, match="gradients of another loss"):
        epoch(run, lambda output, labels: 0.9 * F.cross_entropy(output, labels))


def test_probabilities_as_the_loader_delivers_them(make_run, dataset):
    data = TensorDataset(dataset.tensors[0], torch.randn(60, 3).softmax(dim=1))
    run = make_run(criterion=F.cross_entropy, loader={"dataset": data})
    epoch(run, F.cross_entropy)
    assert run.steps == 6
    with pytest.raises(hsa.UnsupportedRunError, match="gradients of another loss"):
        epoch(run, lambda output, labels: F.cross_entropy(output, labels.flip(1)))


def test_pieces_of_batches(make):
    run = make(criterion=F.cross_entropy)
    with BatchMemoryManager(
        data_loader=run.loader, max_physical_batch_size=4, optimizer=run.optimizer
    ) as pieces:
        epoch(run, F.cross_entropy, pieces)
    assert run.steps == 6
    run = make("number", criterion=F.mse_loss)
    with BatchMemoryManager(
        data_loader=run.loader, max_physical_batch_size=4, optimizer=run.optimizer
    ) as pieces:
        epoch(run, F.mse_loss, pieces)
        with pytest.raises(hsa.UnsupportedRunError, match="gradients of another loss"):
            epoch(run, lambda output, labels: F.mse_loss(output, labels.flip(0)), pieces)
    assert run.steps == 6


SINGLE = WEIGHTS.float()
WEIGHTED = [
    # Features of norm 1 and a bias: B**2 = 2.
    ("classes", nn.CrossEntropyLoss(SINGLE, reduction="sum"), 2 * 2 / 2, 2 * 2),
    ("classes", nn.CrossEntropyLoss(SINGLE, reduction="sum", label_smoothing=0.2), 2.0, 4.0),
    ("labels", nn.BCEWithLogitsLoss(pos_weight=SINGLE, reduction="sum"), 2 * 2 / 4, 12**0.5),
    ("labels", nn.BCEWithLogitsLoss(SINGLE, reduction="sum"), 2 * 2 / 4, 10.5**0.5),
    ("labels", nn.BCEWithLogitsLoss(pos_weight=SINGLE), 2 * 2 / 4 / 3, 12**0.5 / 3),
    ("one label", nn.BCEWithLogitsLoss(pos_weight=torch.tensor([3.0])), 3 * 2 / 4, 3 * 2**0.5),
]  # fmt: skip


@pytest.mark.parametrize("is_called", [True, False])
@pytest.mark.parametrize(("kind", "criterion", "smoothness", "lipschitz"), WEIGHTED)
def test_weights(make, kind, criterion, smoothness, lipschitz, is_called):
    criterion, copied = copy.deepcopy(criterion), copy.deepcopy(criterion)
    arguments = {"criterion": criterion, "max_grad_norm": 6.0}
    if criterion.reduction == "sum":
        arguments |= {"loss_reduction": "sum", "sgd": {"lr": 0.05, "weight_decay": 1.0}}
    run = make(kind, **arguments)
    epoch(run, criterion if is_called else copied)
    event = run.engine.privacy_event
    assert event.loss.smoothness == pytest.approx(smoothness)
    assert event.loss.lipschitz == pytest.approx(lipschitz)
    assert event.per_step("learning_rate")[0] == pytest.approx(0.5)
    for name in ("weight", "pos_weight"):
        if getattr(copied, name, None) is not None:
            getattr(copied, name)[0] += 1.0
            getattr(criterion, name)[0] += 1.0
    with pytest.raises(hsa.UnsupportedRunError, match="gradients of another loss"):
        epoch(run, criterion if is_called else copied)


def test_labels_beyond_one(make_run, dataset):
    """With a weight of positive labels, a label of 2 has a larger curvature."""
    data = TensorDataset(dataset.tensors[0], 1.0001 * labels_of("labels"))
    criterion = nn.BCEWithLogitsLoss(pos_weight=WEIGHTS.float())
    run = make_run(loader={"dataset": data}, criterion=criterion, max_grad_norm=10.0)
    with pytest.raises(hsa.UnsupportedRunError, match="targets of the batch, its last tensor"):
        epoch(run, criterion)


@attrs.define
class Output:
    loss: torch.Tensor | None
    logits: torch.Tensor


class Classifier(nn.Module):
    """As transformers' models for sequence classification."""

    def __init__(self, outputs=3, scale=1.0):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(5, 6), nn.ReLU()).requires_grad_(False)
        self.classifier = nn.Linear(6, outputs)
        self.scale = scale

    def forward(self, inputs, labels=None):
        logits = self.classifier(F.normalize(self.backbone(inputs)))
        loss = None
        if labels is not None:
            if len(logits[0]) == 1:
                loss = nn.MSELoss()(logits.squeeze(), labels.squeeze())
            elif labels.is_floating_point():
                loss = nn.BCEWithLogitsLoss()(logits, labels)
            else:
                loss = nn.CrossEntropyLoss()(self.scale * logits.view(-1, 3), labels.view(-1))
        return Output(loss, logits)


def inside(run):
    for inputs, labels in run.loader:
        run.optimizer.zero_grad()
        run.model(inputs, labels=labels).loss.backward()
        run.optimizer.step()


def on_logits(run):
    for inputs, labels in run.loader:
        run.optimizer.zero_grad()
        run.criterion(run.model(inputs).logits, labels).backward()
        run.optimizer.step()


OF_THE_MODEL = [
    ("classes", nn.CrossEntropyLoss(), 3),
    ("labels", nn.BCEWithLogitsLoss(), 3),
    ("number", nn.MSELoss(), 1),
]


@pytest.mark.parametrize("loop", [inside, on_logits])
@pytest.mark.parametrize(("kind", "criterion", "outputs"), OF_THE_MODEL)
def test_models_with_a_loss_or_logits(make, kind, criterion, outputs, loop):
    run = make(kind, model=Classifier(outputs), criterion=criterion)
    loop(run)
    event = run.engine.privacy_event
    assert event.num_steps == 6
    assert event.loss == auto_loss_geometry(nn.Linear(6, outputs), criterion, 1.0)


def test_log_softmax_at_the_end_of_the_model(make):
    for criterion in (nn.NLLLoss(), F.nll_loss):
        run = make(model=nn.Sequential(nn.Linear(5, 3), nn.LogSoftmax(1)), criterion=criterion)
        epoch(run, F.nll_loss)
        assert run.steps == 6


def shifted(labels):
    return (labels + 1) % 3


def test_labels_that_the_loop_maps(make):
    """By a function that the engine is told; other pairs of records and labels are refused."""

    def loss(output, labels):
        return F.cross_entropy(output, shifted(labels))

    run = make(criterion=F.cross_entropy, targets=shifted)
    epoch(run, loss)
    assert run.steps == 6
    with pytest.raises(hsa.UnsupportedRunError, match=r"other targets.*targets="):
        epoch(make(criterion=F.cross_entropy), loss)
    with pytest.raises(hsa.UnsupportedRunError, match="paired with other targets"):
        epoch(make(criterion=F.cross_entropy), lambda z, y: F.cross_entropy(z, y.flip(0)))
    with pytest.raises(hsa.UnsupportedRunError, match="map every target by itself"):
        epoch(make(criterion=F.cross_entropy, targets=lambda y: y.flip(0)), F.cross_entropy)
