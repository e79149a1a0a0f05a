"""A linear head on a frozen, public feature map; recurrent layers in another order."""

import copy

import numpy as np
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

DELTA = 1e-5
DECLARED = {"loss_geometry": LossGeometry.convex(1.0), "feature_norm": None}


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

    def train(self, mode=True):
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, features):
        return self.end(self.head, self.backbone(features))


CRITERIA = [
    (nn.CrossEntropyLoss, {}, 3, lambda b: LossGeometry.softmax_cross_entropy(1.0, b)),
    (nn.BCEWithLogitsLoss, {}, 1, lambda b: LossGeometry.logistic(1.0, b)),
    (nn.MSELoss, {}, 1, lambda b: LossGeometry.squared_error(1.0, b, scale=2.0)),
    (nn.HuberLoss, {"delta": 0.5}, 1, lambda b: LossGeometry.huber(1.0, 0.5, b)),
]


def signs(labels):
    return (labels > 0).float().reshape(-1, 1)


@pytest.mark.parametrize(("reduction", "bias"), [("mean", True), ("sum", False)])
@pytest.mark.parametrize(
    ("make", "options", "outputs", "geometry"), CRITERIA, ids=lambda v: getattr(v, "__name__", "")
)
def test_losses(make_run, make, options, outputs, geometry, bias, reduction):
    scale = 10 if reduction == "sum" else 1
    run = make_run(
        model=Probe(outputs, bias),
        criterion=make(reduction=reduction, **options),
        loss_reduction=reduction,
        targets=None if outputs == 3 else signs,
        sgd={"lr": 0.5 / scale, "weight_decay": 0.1 * scale},
    )
    frozen = [p.clone() for p in run.plain_model.backbone.parameters()]
    for features, labels in run.loader:
        run.step((features, labels if outputs == 3 else signs(labels)))
    event = run.engine.privacy_event
    assert event.loss == geometry(bias)
    assert event.learning_rate == pytest.approx(0.5)
    assert event.num_steps == 6
    for p, old in zip(run.plain_model.backbone.parameters(), frozen, strict=True):
        assert torch.equal(p, old)
    expected = hsa.LastIterateAccountant().compose(event).get_epsilon(DELTA)
    assert run.engine.get_epsilon(DELTA) == pytest.approx(expected, rel=1e-12)
    assert any("frozen part of the model is public" in a.text for a in run.engine.assumptions)


def test_only_the_head_moves_as_if_trained_on_the_features(make_run):
    model = Probe()
    arguments = {"noise_multiplier": 0.0, "max_grad_norm": 0.7}
    run = make_run(model=model, **arguments)
    head = copy.deepcopy(nn.Linear(8, 3))
    head.load_state_dict(model.head.state_dict())
    features, labels = run.loader.dataset.tensors
    data = torch.utils.data.TensorDataset(model.backbone(features), labels)
    plain = make_run(model=head, loader={"dataset": data}, **arguments)
    for _ in range(2):
        run.epoch()
        plain.epoch()
    assert run.engine.privacy_event == plain.engine.privacy_event
    for a, b in zip(model.head.parameters(), head.parameters(), strict=True):
        np.testing.assert_allclose(a.detach(), b.detach(), atol=1e-6)


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


class AlwaysTrains(Probe):
    def train(self, mode=True):
        return nn.Module.train(self, mode)


class Shift(nn.Module):
    """Draws in train() mode, by hand."""

    def forward(self, features):
        return features + torch.rand(1) if self.training else features


def trained_batch_norm():
    layer = nn.BatchNorm1d(8)
    layer.running_mean += 0.1
    return layer


MIDDLES = {
    "dropout": lambda: nn.Dropout(0.5),
    "rrelu": nn.RReLU,
    "own": Shift,
    "nested": lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout()),
    "batch norm": trained_batch_norm,
}


@pytest.mark.parametrize("middle", MIDDLES)
def test_the_engine_keeps_the_backbone_in_eval_mode(make_run, middle):
    """Whatever model.train() says: the loop that people have."""
    model, other = AlwaysTrains(middle=MIDDLES[middle]()), Probe(middle=MIDDLES[middle]())
    other.load_state_dict(model.state_dict())
    model.train()
    run = make_run(model=model, noise_multiplier=0.0)
    for _ in range(2):
        run.model.train()
        run.epoch()
    assert model.head.training
    # As a loop that takes care itself.
    plain = make_run(model=other, noise_multiplier=0.0)
    plain.epoch()
    plain.epoch()
    assert run.engine.privacy_event == plain.engine.privacy_event
    for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("arguments", [{"loss_geometry": None}, DECLARED])
def test_without_a_known_loss(make_run, arguments):
    """By composition dropout in frozen layers is that of the loop, as in Opacus."""
    backbone = nn.Sequential(nn.Linear(5, 8), trained_batch_norm(), nn.Dropout())
    model = nn.Sequential(backbone.requires_grad_(False), nn.Dropout(), nn.Linear(8, 3))
    run = make_run(model=model, **arguments)
    run.model.train()
    run.epoch()
    is_composed = arguments["loss_geometry"] is None
    assert [part.training for part in backbone[1:]] == [False, is_composed]
    assert model[1].training  # between trained layers dropout is the user's own
    run.engine.get_epsilon(DELTA)
    assert run.steps == 6


def test_statistics_cannot_be_written(make_run):
    model = AlwaysTrains(middle=trained_batch_norm())
    run = make_run(model=model)
    run.epoch()
    with torch.no_grad():
        model.train()
        model.backbone(torch.randn(7, 5))  # past the model
    with pytest.raises(hsa.UnsupportedRunError, match="buffer or frozen parameter"):
        run.engine.get_epsilon(DELTA)


def trained_backbone(run):
    optimizer = torch.optim.SGD(run.plain_model.backbone.parameters(), lr=0.1)
    run.epoch()
    for p in run.plain_model.backbone.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    run.epoch()


def other_backbone(run):
    run.epoch()
    state = {k: v + 1.0 for k, v in run.plain_model.backbone.state_dict().items()}
    run.plain_model.backbone.load_state_dict(state)
    run.epoch()


def unfrozen_backbone(run):
    run.epoch()
    run.plain_model.backbone.requires_grad_(True)
    run.epoch()


def test_a_layer_that_is_partly_unfrozen(make_run):
    """Opacus' hook says: 'Parameter' object has no attribute '_forward_counter'."""
    model = Probe()
    model.head = nn.Linear(model.head.in_features, model.head.out_features)
    model.head.bias.requires_grad_(False)
    run = make_run(model=model, loss_geometry=None)
    run.epoch()
    model.head.bias.requires_grad_(True)
    with pytest.raises(hsa.UnsupportedRunError, match="Linear 'head' that make_private got"):
        run.epoch()
    assert run.steps == 6


@pytest.mark.parametrize(
    ("loop", "text"),
    [
        (trained_backbone, "buffer or frozen parameter backbone.0.weight"),
        (other_backbone, "buffer or frozen parameter backbone.0.weight"),
        (unfrozen_backbone, r"step 7 trains \['backbone.0.weight'"),
    ],
)
def test_the_backbone_stays_as_it_is(make_run, loop, text):
    run = make_run(model=Probe())

    def commit_and_ask():
        loop(run)
        run.engine.get_epsilon(DELTA)

    with pytest.raises(hsa.UnsupportedRunError, match=text):
        commit_and_ask()


# Packed sequences.

LENGTHS = torch.tensor([2, 4, 1, 3, 4, 2])
TEXTS = torch.randint(1, 9, (6, 4), generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(6) % 3
ENGINES = {
    "ours": HiddenStatePrivacyEngine,
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


@pytest.mark.parametrize(
    ("kind", "way"),
    [(DPRNN, "packed"), (DPGRU, "sorted by the model"), (DPLSTM, "packed")],
)
@pytest.mark.parametrize("name", ENGINES)
def test_packed_sequences_are_refused(name, kind, way):
    engine = ENGINES[name]()
    with pytest.raises(hsa.UnsupportedRunError, match=f"batch at {kind.__name__}, got a Packed"):
        train(engine, Reader(kind, way))


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
