"""Composition: a criterion that is passed is refused if it mixes records; else that is declared."""

import logging
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from hidden_state_accountants import UnsupportedRunError
from hidden_state_accountants.guarantee import Status
from hidden_state_adapters.opacus import HiddenStatePrivacyEngine

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

DECLARED = (
    "the loss of a batch is the mean (or sum) of the losses of its records: no class weights or "
    "token counts in a mean, no contrastive terms"
)
LOOKED = (
    f"{DECLARED} (the criterion that was passed was looked at once, on the first batch; that the "
    "loop uses it was not)"
)
WEIGHTS = torch.tensor([1.0, 5.0, 20.0])
PAGE = Path(__file__).parents[2] / "docs/opacus.md"


class Flat(nn.Module):
    """Class weights as somebody's own module has them, where no attribute tells."""

    def forward(self, outputs, labels):
        return functional.cross_entropy(outputs, labels, weight=WEIGHTS)


def of_tokens():
    """The function on the page."""
    source = re.search(r"^def of_tokens.*?\n\n", PAGE.read_text("utf-8"), re.DOTALL | re.M)
    names = {"nn": nn}
    exec(source[0], names)
    return names["of_tokens"]


def contrastive(outputs, labels):
    outputs = functional.normalize(outputs)
    return functional.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


def by_the_positives(outputs, labels):
    """Divides by the number of positives of the batch."""
    positive = (labels == 1).float()
    losses = functional.binary_cross_entropy_with_logits(outputs[:, 0], positive, reduction="none")
    return losses.sum() / positive.sum().clamp(min=1)


def broadcast(outputs, labels):
    return ((outputs - labels.float()[:, None, None]) ** 2).mean()


def squared(outputs, labels):
    return (outputs - functional.one_hot(labels, 3)).square().mean()


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(6, 4), nn.Linear(4, 6)

    def forward(self, ids):
        return self.head(torch.tanh(self.words(ids)))


def texts(is_padded):
    ids = torch.randint(6, (12, 5), generator=torch.Generator().manual_seed(0))
    lengths = torch.arange(12)[:, None] % 4 + 1 if is_padded else 5
    return ids, ids.masked_fill(torch.arange(5) >= lengths, -100)


def records():
    inputs = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))
    return inputs, torch.tensor([0, 1, 2, 0, 1, 0] * 2)


def layers():
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def trained(module, tensors, criterion=None, loss=functional.cross_entropy, **arguments):
    torch.manual_seed(0)
    module, engine = module(), HiddenStatePrivacyEngine()
    model, optimizer, *_, loader = engine.make_private(
        module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(*tensors), batch_size=6), noise_multiplier=1.0,
        max_grad_norm=1.0, batch_order="cyclic", criterion=criterion, **arguments,
    )  # fmt: skip
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss(model(inputs), labels).backward()
        optimizer.step()
    assert engine.get_epsilon(1e-5) > 0
    (said,) = [a for a in engine.guarantee.assumptions if a.text.startswith(DECLARED)]
    assert said.status is Status.DECLARED
    return said.text


def flat(outputs, labels):
    return functional.cross_entropy(outputs.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("criterion", [Flat(), contrastive, by_the_positives, broadcast])
def test_a_criterion_that_mixes_records(criterion):
    with pytest.raises(UnsupportedRunError, match="step 1: the criterion that was passed mixes"):
        trained(layers, records(), criterion)


class WithItsLoss(nn.Module):
    """A model that returns its loss, as those of transformers do, and constants."""

    def __init__(self, module, loss, draws):
        super().__init__()
        self.module, self.loss, self.draws = module(), loss, draws

    def forward(self, inputs, labels):
        outputs = self.module(inputs)
        noise = self.draws * torch.rand(())
        return self.loss(outputs, labels) + noise, outputs, torch.tensor(0.5)


def trained_with_its_loss(module, loss, tensors, *, draws=False, **arguments):
    torch.manual_seed(0)
    model, engine = WithItsLoss(module, loss, draws), HiddenStatePrivacyEngine()
    private, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(*tensors), batch_size=6), noise_multiplier=1.0,
        max_grad_norm=1.0, batch_order="cyclic", **arguments,
    )  # fmt: skip
    for inputs, labels in loader:
        optimizer.zero_grad()
        private(inputs, labels)[0].backward()
        optimizer.step()
    assert engine.get_epsilon(1e-5) > 0


@pytest.mark.parametrize("loss", [Flat(), contrastive])
def test_a_loss_in_the_model_that_mixes_records(loss):
    with pytest.raises(UnsupportedRunError, match="a number that the model returns for a batch"):
        trained_with_its_loss(layers, loss, records())


def test_a_mean_over_tokens_in_the_model():
    """What a causal language model of transformers returns for padded labels."""
    with pytest.raises(UnsupportedRunError, match="a number that the model returns for a batch"):
        trained_with_its_loss(Words, flat, texts(is_padded=True))
    trained_with_its_loss(Words, flat, texts(is_padded=False))


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        (functional.cross_entropy, {}),
        (squared, {}),
        (nn.CrossEntropyLoss(reduction="sum"), {"loss_reduction": "sum"}),
        (nn.CrossEntropyLoss(reduction="sum"), {}),
        (Flat(), {"draws": True}),  # nobody can tell
    ],
)
def test_losses_in_the_model_that_add_up(loss, options):
    arguments = {key: value for key, value in options.items() if key != "draws"}
    trained_with_its_loss(layers, loss, records(), draws="draws" in options, **arguments)


@pytest.mark.parametrize("criterion", [nn.CrossEntropyLoss(), flat])
def test_a_mean_over_the_tokens_of_a_batch(criterion):
    """opacus 792, 632, 827: the tokens of one record rescale the gradients of all others."""
    with pytest.raises(UnsupportedRunError, match="a number of tokens in a mean"):
        trained(Words, texts(is_padded=True), criterion, flat)
    assert trained(Words, texts(is_padded=False), criterion, flat) == LOOKED


@pytest.mark.parametrize(
    ("criterion", "arguments"),
    [
        (nn.CrossEntropyLoss(), {}),
        (functional.cross_entropy, {}),
        (nn.CrossEntropyLoss(reduction="sum"), {"loss_reduction": "sum"}),
        (nn.CrossEntropyLoss(WEIGHTS, reduction="sum"), {"loss_reduction": "sum"}),
        (nn.CrossEntropyLoss(WEIGHTS, reduction="none"), {}),
        (nn.CrossEntropyLoss(WEIGHTS, reduction="none"), {"grad_sample_mode": "functorch"}),
        (squared, {}),
    ],
)
def test_a_criterion_of_single_records(criterion, arguments):
    def loss(outputs, labels):
        value = criterion(outputs, labels)
        return value.mean() if value.dim() else value

    assert trained(layers, records(), criterion, loss, **arguments) == LOOKED


def of_a_column(outputs, targets):
    return ((outputs[:, 0] - targets) ** 2).mean()


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
@pytest.mark.parametrize("criterion", [nn.MSELoss(), nn.SmoothL1Loss(), of_a_column])
def test_targets_that_would_be_broadcast(criterion, dtype):
    """Outputs of shape (n, 1), targets of shape (n,): the loop gives both the same shape."""
    inputs, labels = records()

    def loss(outputs, targets):
        return functional.mse_loss(outputs.squeeze(1), targets.float())

    network = lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))  # noqa: E731
    assert trained(network, (inputs, labels.to(dtype)), criterion, loss) == LOOKED


def test_a_criterion_that_draws_is_declared():
    def criterion(outputs, labels):
        losses = functional.cross_entropy(outputs, labels, reduction="none")
        return (torch.rand(len(labels)) * losses).mean()

    assert trained(layers, records(), criterion, criterion) == DECLARED


@pytest.mark.parametrize("padded", [True, False])
def test_a_mean_over_the_tokens_of_a_record(padded):
    criterion = of_tokens()
    assert trained(Words, texts(padded), criterion, criterion) == LOOKED


def test_without_a_criterion_the_log_says_what_is_declared(caplog):
    with caplog.at_level(logging.WARNING, "hidden_state_accountants"):
        assert trained(layers, records()) == DECLARED
        (line,) = [r.message for r in caplog.records if DECLARED in r.message]
        assert "criterion= was not passed" in line
        caplog.clear()
        trained(layers, records(), nn.CrossEntropyLoss())
        assert not caplog.records
