"""A linear head on a frozen, public feature map; recurrent layers in another order."""

import copy

import pytest
import torch
from opacus import GradSampleModule, PrivacyEngine
from opacus.layers import DPGRU, DPLSTM, DPRNN
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import hidden_state_accountants as hsa
from hidden_state_accountants import LossGeometry
from hidden_state_adapters.opacus import HiddenStatePrivacyEngine

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

DELTA, CONVEX = 1e-5, LossGeometry.convex(1.0)


class Unit(nn.Module):
    def forward(self, features):
        return nn.functional.normalize(features)


class Probe(nn.Module):
    """A frozen network, features of norm 1, a linear head; `end` is what becomes of its output."""

    def __init__(self, outputs=3, bias=True, middle=None, end=lambda head, x: head(x)):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), middle or nn.Identity(), Unit())
        self.backbone.requires_grad_(False).eval()
        self.head = nn.Linear(8, outputs, bias=bias)
        self.end = end

    def forward(self, features):
        return self.end(self.head, self.backbone(features))


@pytest.mark.parametrize(
    ("criterion", "outputs", "bias"),
    [(nn.CrossEntropyLoss(), 3, True), (nn.BCEWithLogitsLoss(reduction="sum"), 1, False)],
)
def test_a_head_is_trained_as_on_its_features(make_run, dataset, criterion, outputs, bias):
    """A sum has the event of the mean."""
    features, labels = dataset.tensors
    labels = labels if outputs == 3 else (labels > 0).float().reshape(-1, 1)
    scale = 10 if criterion.reduction == "sum" else 1
    arguments = {
        "noise_multiplier": 0.0, "max_grad_norm": 0.7, "criterion": criterion,
        "loss_reduction": criterion.reduction,
        "sgd": {"lr": 0.5 / scale, "weight_decay": 0.1 * scale},
    }  # fmt: skip
    model = Probe(outputs, bias)
    head, frozen = copy.deepcopy(model.head), copy.deepcopy(model.backbone)
    data, mapped = (TensorDataset(x, labels) for x in (features, model.backbone(features)))
    run = make_run(model=model, loader={"dataset": data}, **arguments)
    plain = make_run(model=head, loader={"dataset": mapped}, **arguments)
    for _ in range(2):
        run.epoch()
        plain.epoch()
    event = run.engine.privacy_event
    assert event == plain.engine.privacy_event
    assert event.per_step("learning_rate")[0] == pytest.approx(0.5)
    assert event.num_steps == 12
    for a, b in zip(model.head.parameters(), head.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)
    for a, b in zip(model.backbone.parameters(), frozen.parameters(), strict=True):
        assert torch.equal(a, b)
    assert any("frozen part of the model is public" in a.text for a in run.engine.assumptions)


ENDS = {
    "squared": lambda head, x: head(x) ** 2,
    "temperature": lambda head, x: head(x) / 0.1,
    "shifted": lambda head, x: head(x) + x[:, :3],
    "in place": lambda head, x: head(x).mul_(5.0),
    "twice": lambda head, x: head(x) - head(x.flip(0)),
    "by hand": lambda head, x: nn.functional.linear(x, head.weight, head.bias),
    "mixed": lambda head, x: head(x).flip(0),
    "other columns": lambda head, x: head(x).flip(1),
}


@pytest.mark.parametrize("end", ENDS)
def test_the_loss_is_that_of_the_output_of_the_head(make_run, end):
    run = make_run(model=Probe(end=ENDS[end]), max_grad_norm=1.0)
    text = "another loss|reaches its parameters|gradients of 2 batches|in-place|mixes the records"
    with pytest.raises((hsa.UnsupportedRunError, RuntimeError), match=text):
        run.epoch()
    assert run.steps == 0


class Shift(nn.Module):
    """Draws in train() mode, by hand."""

    def forward(self, features):
        return features + torch.rand(1) if self.training else features


def trained_batch_norm():
    layer = nn.BatchNorm1d(8)
    layer.running_mean += 0.1
    return layer


@pytest.mark.parametrize(
    "make",
    [lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout()), nn.RReLU, Shift, trained_batch_norm],
)
def test_the_engine_keeps_the_backbone_in_eval_mode(make_run, make):
    """Whatever model.train() says: the loop that people have."""
    model = Probe(middle=make())
    other = copy.deepcopy(model)
    run = make_run(model=model, noise_multiplier=0.0)
    plain = make_run(model=other, noise_multiplier=0.0)
    for _ in range(2):
        run.model.train()
        run.epoch()
        plain.epoch()
    assert model.head.training
    assert run.engine.privacy_event == plain.engine.privacy_event
    for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("loss", [None, CONVEX])
def test_without_a_known_loss(make_run, loss):
    """By composition dropout in frozen layers is that of the loop, as in Opacus."""
    backbone = nn.Sequential(nn.Linear(5, 8), trained_batch_norm(), nn.Dropout())
    model = nn.Sequential(backbone.requires_grad_(False), nn.Dropout(), nn.Linear(8, 3))
    run = make_run(model=model, loss_geometry=loss)
    run.model.train()
    run.epoch()
    assert [part.training for part in backbone[1:]] == [False, loss is None]
    assert model[1].training  # between trained layers dropout is the user's own
    run.engine.get_epsilon(DELTA)
    assert run.steps == 6


@pytest.mark.parametrize(
    ("layer", "text"),
    [
        (nn.BatchNorm1d(5, affine=False), r"BatchNorm1d '0' in train\(\) mode"),
        (nn.BatchNorm1d(5, track_running_stats=False).eval().requires_grad_(False),
         "BatchNorm1d '0' without running statistics"),
    ],
)  # fmt: skip
def test_batch_statistics_are_refused(make_run, layer, text):
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        make_run(model=nn.Sequential(layer, nn.Linear(5, 3)), loss_geometry=CONVEX)


def test_batch_statistics_of_a_later_epoch_are_refused(make_run):
    """What has no parameters is not frozen: its statistics may be meant."""
    layer = nn.BatchNorm1d(5, affine=False).eval()
    run = make_run(model=nn.Sequential(layer, nn.Linear(5, 3)), loss_geometry=None)
    run.epoch()
    run.model.train()
    with pytest.raises(hsa.UnsupportedRunError, match=r"BatchNorm1d '0' in train\(\) mode"):
        run.epoch()


# --- packed sequences -----------------------------------------------------------------------------

LENGTHS = torch.tensor([2, 4, 1, 3, 4, 2])
TEXTS = torch.randint(1, 9, (6, 4), generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(6) % 3


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


def train(name, model):
    """With an engine of ours or of Opacus."""
    engine = HiddenStatePrivacyEngine()
    if name == "stock":
        engine = PrivacyEngine(accountant="hidden_state")
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


@pytest.mark.parametrize(
    ("name", "kind", "way"),
    [
        ("ours", DPRNN, "packed"),
        ("ours", DPGRU, "sorted by the model"),
        ("stock", DPLSTM, "packed"),
    ],
)
def test_packed_sequences_are_refused(name, kind, way):
    with pytest.raises(hsa.UnsupportedRunError, match=f"batch at {kind.__name__}, got a Packed"):
        train(name, Reader(kind, way))


@pytest.mark.parametrize("name", ["ours", "stock"])
def test_frozen_layers_and_passes_without_gradients_may_be_packed(name):
    frozen, model = Reader(), Reader(way="padded")
    frozen.cells.requires_grad_(False)
    frozen.words.requires_grad_(False)
    assert train(name, frozen) > 0
    assert train(name, model) > 0
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
