"""Rows of recurrent layers that are not in the order of the batch."""

import pytest
import torch
from opacus import GradSampleModule, PrivacyEngine
from opacus.layers import DPGRU, DPLSTM, DPRNN
from opacus_stock import DELTA
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import hidden_state_adapters.opacus  # registers the accountant
from hidden_state_accountants import UnsupportedRunError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

LENGTHS = torch.tensor([2, 4, 1, 3, 4, 2])
TEXTS = torch.randint(1, 9, (6, 4), generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(6) % 3
ENGINES = {
    "ours": hidden_state_adapters.opacus.HiddenStatePrivacyEngine,
    "stock": lambda: PrivacyEngine(accountant="hidden_state"),
}


class Reader(nn.Module):
    """Classifies texts by the last state of a recurrent layer."""

    def __init__(self, kind=DPRNN, way="packed"):
        super().__init__()
        self.way = way
        self.words, self.cells = nn.Embedding(9, 4), kind(4, 5, batch_first=True)
        self.out = nn.Linear(5, 3)

    def forward(self, texts, lengths):
        words = self.words(texts)
        if self.way == "padded":
            outputs, _ = self.cells(words)
            return self.out(outputs[torch.arange(len(lengths)), lengths - 1])
        order = torch.arange(len(lengths))
        if self.way == "sorted by the model":
            order = lengths.argsort(descending=True, stable=True)
        packed = nn.utils.rnn.pack_padded_sequence(
            words[order], lengths[order], batch_first=True, enforce_sorted=self.way != "packed"
        )
        _, states = self.cells(packed)
        states = states[0] if isinstance(states, tuple) else states
        return self.out(states[-1][order.argsort()])


def train(engine, model):
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(TEXTS, LENGTHS, LABELS), batch_size=6),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    for texts, lengths, labels in loader:
        optimizer.zero_grad()
        functional.cross_entropy(model(texts, lengths), labels).backward()
        optimizer.step()
    return engine.get_epsilon(DELTA)


@pytest.mark.parametrize("way", ["packed", "sorted by the model"])
@pytest.mark.parametrize("kind", [DPRNN, DPGRU, DPLSTM])
@pytest.mark.parametrize("name", ENGINES)
def test_packed_sequences_are_refused(name, kind, way):
    engine = ENGINES[name]()
    with pytest.raises(UnsupportedRunError, match=f"padded batch at {kind.__name__}, got a Packed"):
        train(engine, Reader(kind, way))


@pytest.mark.parametrize("name", ENGINES)
def test_padded_sequences_are_not(name):
    assert train(ENGINES[name](), Reader(DPLSTM, "padded")) > 0


@pytest.mark.parametrize("name", ENGINES)
def test_frozen_layers_and_passes_without_gradients_may_be_packed(name):
    model = Reader()
    model.cells.requires_grad_(False)
    model.words.requires_grad_(False)
    assert train(ENGINES[name](), model) > 0

    engine, model = ENGINES[name](), Reader(way="padded")
    assert train(engine, model) > 0
    model.way = "packed"
    with torch.no_grad():
        model(TEXTS, LENGTHS)


@pytest.mark.parametrize(
    ("way", "is_right"), [("packed", False), ("sorted by the model", False), ("padded", True)]
)
def test_what_opacus_has_in_a_row(way, is_right):
    """If this fails, Opacus puts its rows back, and the refusal can go."""
    torch.manual_seed(0)
    model = Reader(way=way)
    private = GradSampleModule(model)
    functional.cross_entropy(private(TEXTS, LENGTHS), LABELS).backward()
    found = {name: p.grad_sample.clone() for name, p in model.named_parameters()}
    private.disable_hooks()
    model.zero_grad()
    functional.cross_entropy(model(TEXTS[:1], LENGTHS[:1]), LABELS[:1]).backward()
    distance = max((found[name][0] - p.grad).norm() for name, p in model.named_parameters())
    assert (distance < 1e-5) == is_right
