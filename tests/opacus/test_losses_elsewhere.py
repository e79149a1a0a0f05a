"""Losses of a loop: as an object, a function, a chain of functions, inside the model, on `.logits`.

The gradient at the outputs of the linear head is compared with the formula of the loss.
"""

import copy
import functools
import types

import attrs
import pytest
import torch
import torch.nn.functional as F
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import TensorDataset

import hidden_state_accountants as hsa
from hidden_state_adapters.opacus import (
    EnvelopeCrossEntropyLoss,
    HiddenStatePrivacyEngine,
)
from hidden_state_adapters.opacus.criteria import as_module, auto_loss_geometry

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

DELTA = 1e-5
SMOOTHED = functools.partial(F.cross_entropy, label_smoothing=0.1)
WEIGHTS = torch.tensor([0.5, 1.0, 2.0])


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
    ("classes", F.cross_entropy, nn.CrossEntropyLoss()),
    ("classes", F.cross_entropy, by_hand),
    ("classes", SMOOTHED, SMOOTHED),
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
@pytest.mark.parametrize("order", ["cyclic", "poisson"])
def test_every_kind_of_gradients(make_loader, mode, order):
    if (mode, order) == ("ew", "poisson"):
        pytest.skip("torch's expanded weights stop at an empty batch")
    torch.manual_seed(0)
    plain, engine = nn.Linear(5, 3), HiddenStatePrivacyEngine()
    model, optimizer, *_, loader = engine.make_private(
        module=plain, optimizer=torch.optim.SGD(plain.parameters(), lr=0.5),
        data_loader=make_loader(), noise_multiplier=2.0, max_grad_norm=2.1, batch_order=order,
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


# Weights, of which the constants are accounted.

WEIGHTED = [
    # Features of norm 1 and a bias: B**2 = 2.
    ("classes", nn.CrossEntropyLoss(WEIGHTS, reduction="sum"), 2 * 2 / 2, 2 * 2),
    ("classes", nn.CrossEntropyLoss(WEIGHTS, reduction="sum", label_smoothing=0.2), 2.0, 4.0),
    ("labels", nn.BCEWithLogitsLoss(pos_weight=WEIGHTS, reduction="sum"), 2 * 2 / 4, 12**0.5),
    ("labels", nn.BCEWithLogitsLoss(WEIGHTS, reduction="sum"), 2 * 2 / 4, 10.5**0.5),
    ("labels", nn.BCEWithLogitsLoss(pos_weight=WEIGHTS), 2 * 2 / 4 / 3, 12**0.5 / 3),
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
    criterion = nn.BCEWithLogitsLoss(pos_weight=WEIGHTS)
    run = make_run(loader={"dataset": data}, criterion=criterion, max_grad_norm=10.0)
    with pytest.raises(hsa.UnsupportedRunError, match="not made for targets"):
        epoch(run, criterion)


# Losses inside of the model, outputs with .logits.


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


# Another loss.


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


@pytest.mark.parametrize("criterion", [nn.CrossEntropyLoss(), EnvelopeCrossEntropyLoss(2.0)])
def test_the_targets_are_the_last_tensor_that_may_be_some(make_run, criterion):
    """As many features as outputs: a batch has two tensors of the form of probabilities."""
    features = F.normalize(torch.randn(60, 3), dim=1)
    data = TensorDataset(features, labels_of("classes"))
    arguments = {"loader": {"dataset": data}, "criterion": criterion, "max_grad_norm": 2.1}
    run = make_run(model=nn.Linear(3, 3), **arguments)
    for features, labels in run.loader:
        run.optimizer.zero_grad()
        criterion(run.model(features), labels).backward()
        run.optimizer.step()
    assert run.engine.get_epsilon(DELTA) > 0
