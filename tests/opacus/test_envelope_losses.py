"""Envelope losses in torch and in the engine."""

import copy
import math

import envelopes as envelope
import numpy as np
import pytest
import torch
from dp_accounting import NeighboringRelation
from envelopes import batch
from torch import nn
from torch.utils.data import TensorDataset

import hidden_state_accountants as hsa
from hidden_state_accountants.process.noisy_process import noisy_process
from hidden_state_adapters.opacus import (
    EnvelopeBCEWithLogitsLoss,
    EnvelopeCrossEntropyLoss,
    EnvelopeHingeLoss,
    EnvelopeSquaredErrorLoss,
    losses,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def losses_and_gradients(criterion, predictions, targets):
    predictions = predictions.clone().requires_grad_()
    value = criterion(predictions, targets)
    (gradient,) = torch.autograd.grad(value.sum(), predictions)
    return value.detach(), gradient


RANDOM = np.random.default_rng(0)
LOGITS, TARGETS = batch(40, 6, 4.0, 0, soft=True)
LINE, PAIRS = RANDOM.normal(size=(40, 1)) * 4, RANDOM.normal(size=(2, 40, 3)) * 2
CASES = {
    "probabilities": (
        EnvelopeCrossEntropyLoss, envelope.softmax_cross_entropy, LOGITS, TARGETS, {},
    ),
    "classes": (
        EnvelopeCrossEntropyLoss, envelope.softmax_cross_entropy, LOGITS,
        RANDOM.integers(6, size=40), {},
    ),
    "logistic": (
        EnvelopeBCEWithLogitsLoss, envelope.logistic, LINE, RANDOM.random(size=(40, 1)), {},
    ),
    "hinge": (
        EnvelopeHingeLoss, envelope.hinge, LINE, RANDOM.choice([-1.0, 1.0], size=(40, 1)), {},
    ),
    "squared": (EnvelopeSquaredErrorLoss, envelope.squared_error, *PAIRS, {"scale": 3.0}),
}  # fmt: skip


def as_tensors(predictions, targets, dtype=torch.float64):
    is_class = targets.dtype.kind == "i"
    kind = torch.int64 if is_class else dtype
    return torch.tensor(predictions, dtype=dtype), torch.tensor(targets, dtype=kind)


@pytest.mark.parametrize("where", ["host", "cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize(
    ("clip_norm", "smoothing", "dtype", "tolerance"),
    [(0.3, 0.7, torch.float64, 1e-12), (5.0, 10.0, torch.float32, 1e-6)],
)
@pytest.mark.parametrize("name", CASES)
def test_they_are_those_of_numpy(name, clip_norm, smoothing, dtype, tolerance, where, monkeypatch):
    """With NumPy on the host, and with torch's operations elsewhere."""
    monkeypatch.setattr(losses, "_is_on_host", lambda tensor: where == "host")
    kind, reference, predictions, targets, more = CASES[name]
    settings = {"clip_norm": clip_norm, "smoothing": smoothing, **more}
    criterion = kind(reduction="none", **settings)
    device = "cuda" if where == "cuda" else "cpu"
    given = (tensor.to(device) for tensor in as_tensors(predictions, targets, dtype))
    found = losses_and_gradients(criterion, *given)
    assert {tensor.dtype for tensor in found} == {dtype}
    expected = reference(predictions, targets, **settings)
    np.testing.assert_allclose(found[0].cpu(), expected.value, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(found[1].cpu(), expected.gradient, atol=tolerance)


@pytest.mark.parametrize("name", CASES)
def test_reductions_and_empty_batches(name):
    kind, _, predictions, targets, more = CASES[name]
    given, empty = (as_tensors(predictions[:n], targets[:n]) for n in (40, 0))
    none, total, mean = (
        losses_and_gradients(kind(0.3, 0.7, reduction=reduction, **more), *given)
        for reduction in ("none", "sum", "mean")
    )
    nothing = losses_and_gradients(kind(0.3, 0.7, reduction="sum", **more), *empty)
    torch.testing.assert_close(total, (none[0].sum(), none[1]))
    torch.testing.assert_close(mean, (none[0].mean(), none[1] / 40))
    assert nothing[0] == 0
    assert nothing[1].shape == predictions[:0].shape


SOFTMAX, LOGISTIC = EnvelopeCrossEntropyLoss(0.3), EnvelopeBCEWithLogitsLoss(0.3)
HINGE, SQUARED = EnvelopeHingeLoss(0.3, 1.0), EnvelopeSquaredErrorLoss(0.3)
COLUMN, ROW = torch.zeros(4, 1), torch.zeros(4)


@pytest.mark.parametrize(
    ("criterion", "predictions", "targets", "text"),
    [
        (SOFTMAX, ROW, torch.zeros(4).long(), "shape \\(records, classes\\)"),
        (SOFTMAX, COLUMN, torch.zeros(4).long(), "two classes or more"),
        (SOFTMAX, torch.zeros(4, 3), torch.zeros(3).long(), "each record of"),
        (SOFTMAX, torch.zeros(4, 3), torch.full((4,), 3), "from 0 to 2, got 3 to 3"),
        (SOFTMAX, torch.zeros(4, 3), torch.full((4,), -100), "No class is ignored"),
        (SOFTMAX, torch.zeros(4, 3), torch.zeros(4, 3), "sum to 1"),
        (SOFTMAX, torch.zeros(1, 2), torch.tensor([[1.5, -0.5]]), "targets >= 0"),
        (SOFTMAX, torch.zeros(4, 3), torch.ones(4, 1), "a target for each"),
        (LOGISTIC, COLUMN, ROW, "Use target.reshape\\(output.shape\\)"),
        (LOGISTIC, ROW, ROW - 1, "targets from 0 to 1"),
        (HINGE, COLUMN, ROW, "of shape \\(1,\\) for a record, got \\(\\)"),
        (HINGE, ROW, ROW, "targets -1 and 1"),
        (SQUARED, torch.zeros(2, 2, 2), torch.zeros(2, 2, 2), "\\(records, outputs\\)"),
    ],
)
def test_bad_predictions_and_targets(criterion, predictions, targets, text):
    with pytest.raises(ValueError, match=text):
        criterion(predictions, targets)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: EnvelopeCrossEntropyLoss(0.001), "clip_norm >= 0.01 for softmax"),
        (lambda: EnvelopeCrossEntropyLoss(0.3, -1.0), "smoothing >= 0"),
        (lambda: EnvelopeCrossEntropyLoss(0.3, reduction="batchmean"), "one of mean, sum, none"),
        (lambda: EnvelopeHingeLoss(0.3), "smoothing > 0 for the hinge loss"),
        (lambda: EnvelopeSquaredErrorLoss(0.3, scale=0.0), "scale > 0"),
    ],
)
def test_bad_settings(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_what_was_asked_before_is_not_taken_for_what_is_asked():
    """The step asks again what the loop asked."""
    loss, predictions, targets = EnvelopeCrossEntropyLoss(0.3, 1.0), *as_tensors(LOGITS, TARGETS)
    first = loss.slopes(predictions, targets)
    assert torch.equal(copy.deepcopy(loss).slopes(predictions, targets), first)
    predictions[0, 0] += 1
    second = loss.slopes(predictions, targets)
    assert torch.equal(second[1:], first[1:])
    assert not torch.equal(second[0], first[0])
    loss.clip_norm = 0.3 + 1e-9
    assert not torch.equal(loss.slopes(predictions, targets), second)


# --- in the engine --------------------------------------------------------------------------------

CLIP, RATE, DECAY, LABELS = 0.3, 9.0, 0.01, torch.arange(60) % 3
# That a learning rate needs.
SMOOTHING = hsa.envelope_smoothing(
    RATE, curvature=0.5, feature_norm=1.0, bias=True, weight_decay=DECAY
)


@pytest.fixture
def envelope_run(make_run, dataset):
    """With a clip norm as small as the margin allows."""
    features = dataset.tensors[0].double() / (1 + 1e-7)  # rounded in float32

    def make(criterion, targets=LABELS, rate=RATE, outputs=3):
        longest = criterion.geometry(1.0, bias=True).lipschitz
        return make_run(
            criterion=criterion,
            loader={"dataset": TensorDataset(features, targets)},
            model=nn.Linear(5, outputs).double(),
            sgd={"lr": rate, "weight_decay": DECAY},
            max_grad_norm=longest * (1 + 2e-6) + 1.1e-6,
        )

    return make


@pytest.mark.parametrize(
    ("criterion", "targets", "rate", "outputs"),
    [
        (EnvelopeCrossEntropyLoss(CLIP, SMOOTHING), LABELS, RATE, 3),
        (EnvelopeBCEWithLogitsLoss(CLIP, 1.0), (LABELS > 0).double()[:, None], 0.5, 1),
        (EnvelopeHingeLoss(CLIP, 1.0), (2.0 * (LABELS > 0) - 1).double()[:, None], 0.5, 1),
        (EnvelopeSquaredErrorLoss(CLIP, 1.0), LABELS.double()[:, None], 0.5, 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_private_run_contracts_as_decay_does(envelope_run, criterion, targets, rate, outputs):
    run = envelope_run(criterion, targets, rate, outputs)
    run.epoch()
    event = run.engine.privacy_event
    assert event.num_steps == 6
    assert event.loss == criterion.geometry(1.0, bias=True)
    process = noisy_process(event, NeighboringRelation.REPLACE_SPECIAL)
    np.testing.assert_allclose(process.contraction, 1 - rate * DECAY, rtol=1e-12)
    texts = {a.text for a in run.engine.assumptions}
    assert f"per-example gradient norms at most {CLIP * math.sqrt(2):g}" in texts


def test_a_gradient_that_is_longer_than_its_bound_is_noticed(make_run):
    """As if the loss were another one than its geometry says."""
    declared = EnvelopeCrossEntropyLoss(CLIP / 1.001).geometry(1.0, bias=True)
    run = make_run(
        criterion=EnvelopeCrossEntropyLoss(CLIP), loss_geometry=declared, max_grad_norm=1.0
    )
    with pytest.raises(hsa.UnsupportedRunError, match="per-example gradient of norm"):
        run.epoch()
