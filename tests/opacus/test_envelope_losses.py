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
from torch.nn import functional
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


# --- values and gradients -------------------------------------------------------------------------


@pytest.mark.parametrize("is_on_host", [True, False])
@pytest.mark.parametrize(("clip_norm", "smoothing"), [(0.3, 0.7), (5.0, 10.0)])
@pytest.mark.parametrize("name", CASES)
def test_they_are_those_of_numpy(name, clip_norm, smoothing, is_on_host, monkeypatch):
    """With NumPy on the host, and with torch's operations as on other devices."""
    monkeypatch.setattr(losses, "_is_on_host", lambda tensor: is_on_host)
    kind, reference, predictions, targets, more = CASES[name]
    criterion = kind(clip_norm, smoothing, reduction="none", **more)
    found = losses_and_gradients(criterion, *as_tensors(predictions, targets))
    expected = reference(predictions, targets, clip_norm=clip_norm, smoothing=smoothing, **more)
    np.testing.assert_allclose(found[0], expected.value, rtol=1e-12)
    np.testing.assert_allclose(found[1], expected.gradient, atol=1e-13)


@pytest.mark.cuda
@pytest.mark.parametrize("name", CASES)
def test_they_are_those_of_numpy_on_cuda(name):
    kind, reference, predictions, targets, more = CASES[name]
    criterion = kind(0.3, 0.7, reduction="none", **more)
    given = [tensor.cuda() for tensor in as_tensors(predictions, targets)]
    found = losses_and_gradients(criterion, *given)
    expected = reference(predictions, targets, clip_norm=0.3, smoothing=0.7, **more)
    np.testing.assert_allclose(found[0].cpu(), expected.value, rtol=1e-12)
    np.testing.assert_allclose(found[1].cpu(), expected.gradient, atol=1e-13)


@pytest.mark.parametrize("name", CASES)
def test_reductions_are_those_of_torch(name):
    kind, _, predictions, targets, more = CASES[name]
    given = as_tensors(predictions, targets)
    found = {
        reduction: losses_and_gradients(kind(0.3, 0.7, reduction=reduction, **more), *given)
        for reduction in ("none", "sum", "mean")
    }
    torch.testing.assert_close(found["sum"][0], found["none"][0].sum())
    torch.testing.assert_close(found["mean"][0], found["none"][0].mean())
    torch.testing.assert_close(found["sum"][1], found["none"][1])
    torch.testing.assert_close(found["mean"][1] * 40, found["none"][1])


@pytest.mark.parametrize("name", CASES)
def test_single_precision_is_the_rounded_double(name):
    kind, _, predictions, targets, more = CASES[name]
    criterion = kind(0.3, 0.7, reduction="none", **more)
    single = as_tensors(predictions, targets, torch.float32)
    double = [t.double() if t.is_floating_point() else t for t in single]
    found = losses_and_gradients(criterion, *single)
    expected = losses_and_gradients(criterion, *double)
    assert {tensor.dtype for tensor in found} == {torch.float32}
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b.float(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("criterion", "plain", "name"),
    [
        (EnvelopeCrossEntropyLoss(2.0), functional.cross_entropy, "probabilities"),
        (EnvelopeCrossEntropyLoss(2.0), functional.cross_entropy, "classes"),
        (EnvelopeBCEWithLogitsLoss(2.0), functional.binary_cross_entropy_with_logits, "logistic"),
    ],
)
def test_without_clip_and_smoothing_they_are_those_of_torch(criterion, plain, name):
    given = as_tensors(*CASES[name][2:4])
    found = losses_and_gradients(criterion, *given)
    expected = losses_and_gradients(plain, *given)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", CASES)
def test_an_empty_batch(name):
    kind, _, predictions, targets, more = CASES[name]
    given = as_tensors(predictions[:0], targets[:0])
    value, gradient = losses_and_gradients(kind(0.3, 0.7, reduction="sum", **more), *given)
    assert value == 0
    assert gradient.shape == predictions[:0].shape


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
        (lambda: EnvelopeCrossEntropyLoss(0.0), "clip_norm > 0"),
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


def test_what_is_asked_twice_is_computed_once():
    """By a loop and by the step, which has a copy; other settings or numbers are others."""
    loss, calls = EnvelopeCrossEntropyLoss(0.3, 1.0), []
    copied, evaluate = copy.deepcopy(loss), EnvelopeCrossEntropyLoss._evaluate
    loss._evaluate = lambda *tensors: calls.append(0) or evaluate(loss, *tensors)
    predictions, targets = torch.randn(4, 3), torch.arange(4) % 3
    loss(predictions, targets)
    slopes = copied.slopes(predictions, targets)
    torch.testing.assert_close(slopes, loss.slopes(predictions, targets), rtol=0, atol=0)
    assert len(calls) == 1
    predictions[0, 0] += 1
    assert not torch.equal(copied.slopes(predictions, targets), slopes)
    copied.clip_norm = 0.3 + 1e-9
    copied.slopes(predictions, targets)
    loss.slopes(predictions, targets)
    assert len(calls) == 2


# --- in the engine --------------------------------------------------------------------------------

CLIP, RATE, DECAY = 0.3, 9.0, 0.01


@pytest.fixture
def envelope_run(make_run, dataset):
    """A learning rate that needs a smoothing, with a clip norm as small as the margin allows."""
    features, labels = dataset.tensors
    features = features.double() / (1 + 1e-7)  # rounded in float32

    def make(criterion=None, targets=labels, rate=RATE, outputs=3, **changes):
        if criterion is None:
            smoothing = hsa.envelope_smoothing(
                RATE, curvature=0.5, feature_norm=1.0, bias=True, weight_decay=DECAY
            )
            criterion = EnvelopeCrossEntropyLoss(CLIP, smoothing)
        longest = criterion.geometry(1.0, bias=True).lipschitz
        return make_run(**{
            "criterion": criterion, "loader": {"dataset": TensorDataset(features, targets)},
            "model": nn.Linear(5, outputs).double(), "sgd": {"lr": rate, "weight_decay": DECAY},
            "max_grad_norm": longest * (1 + 2e-6) + 1.1e-6, **changes,
        })  # fmt: skip

    return make


def contraction(event):
    process = noisy_process(event, NeighboringRelation.REPLACE_SPECIAL)
    (c,) = set(process.contraction.tolist())
    return c


LABELS = torch.arange(60) % 3


@pytest.mark.parametrize(
    ("criterion", "targets", "rate", "outputs"),
    [
        (None, LABELS, RATE, 3),
        (EnvelopeBCEWithLogitsLoss(0.3, 1.0), (LABELS > 0).double()[:, None], 0.5, 1),
        (EnvelopeHingeLoss(0.3, 1.0), (2.0 * (LABELS > 0) - 1).double()[:, None], 0.5, 1),
        (EnvelopeSquaredErrorLoss(0.3, 1.0), LABELS.double()[:, None], 0.5, 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_private_run_contracts_as_decay_does(envelope_run, criterion, targets, rate, outputs):
    run = envelope_run(criterion, targets, rate, outputs)
    run.epoch()
    event = run.engine.privacy_event
    assert event.num_steps == 6
    assert event.loss == run.criterion.geometry(1.0, bias=True)
    assert contraction(event) == pytest.approx(1 - rate * DECAY, rel=1e-12)
    texts = {a.text for a in run.engine.assumptions}
    assert f"per-example gradient norms at most {CLIP * math.sqrt(2):g}" in texts


def test_the_update_is_that_of_numpy(envelope_run):
    run = envelope_run(noise_multiplier=0.0)
    weights = [p.detach().numpy().copy() for p in run.model.parameters()]
    x, y = next(iter(run.loader))
    run.step((x, y))
    logits = x.numpy() @ weights[0].T + weights[1]
    gradient = envelope.softmax_cross_entropy(
        logits, y.numpy(), clip_norm=CLIP, smoothing=run.criterion.smoothing
    ).gradient
    means = [gradient.T @ x.numpy() / 10, gradient.mean(axis=0)]
    for param, old, mean in zip(run.model.parameters(), weights, means, strict=True):
        expected = (1 - RATE * DECAY) * old - RATE * mean
        np.testing.assert_allclose(param.detach().numpy(), expected, atol=1e-13)


@pytest.mark.parametrize(("name", "value"), [("clip_norm", 0.1), ("smoothing", 0.0)])
def test_settings_that_change_during_a_run_are_noticed(envelope_run, name, value):
    run = envelope_run()
    run.epoch()
    setattr(run.criterion, name, value)
    with pytest.raises(hsa.UnsupportedRunError, match="gradients of another loss"):
        run.epoch()


def test_a_gradient_that_is_longer_than_its_bound_is_noticed(make_run):
    """As if the loss were another one than its geometry says."""
    declared = EnvelopeCrossEntropyLoss(CLIP / 2).geometry(1.0, bias=True)
    run = make_run(
        criterion=EnvelopeCrossEntropyLoss(CLIP), loss_geometry=declared, max_grad_norm=1.0
    )
    with pytest.raises(hsa.UnsupportedRunError, match="per-example gradient of norm"):
        run.epoch()


def test_the_constants_do_not_cover_more_outputs_of_losses_of_one(make_run):
    with pytest.raises(hsa.UnsupportedRunError, match=r"got EnvelopeBCEWithLogitsLoss.* of 3 outp"):
        make_run(criterion=EnvelopeBCEWithLogitsLoss(0.3))
