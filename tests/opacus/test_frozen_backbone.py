"""loss_geometry="auto" for a linear head on a frozen, public feature map."""

import copy
import logging

import numpy as np
import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn

import hidden_state_accountants as hsa
from hidden_state_accountants import LossGeometry
from hidden_state_adapters.opacus import BlockCoordinateOptimizer
from hidden_state_adapters.opacus.criteria import auto_loss_geometry

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


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("bias", [True, False])
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


def test_pieces_and_poisson(make_run):
    run = make_run(model=Probe(), batch_order="poisson", loader={"batch_size": 1})
    with BatchMemoryManager(
        data_loader=run.loader, max_physical_batch_size=1, optimizer=run.optimizer
    ) as pieces:
        run.epoch(pieces)
    assert run.steps == 60


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
def test_the_engine_keeps_the_backbone_in_eval_mode(make_run, caplog, middle):
    """Whatever model.train() says: the loop that people have."""
    model, other = AlwaysTrains(middle=MIDDLES[middle]()), Probe(middle=MIDDLES[middle]())
    other.load_state_dict(model.state_dict())
    model.train()
    with caplog.at_level(logging.WARNING, "hidden_state_accountants"):
        run = make_run(model=model, noise_multiplier=0.0)
        for _ in range(2):
            run.model.train()
            run.epoch()
    lines = [r.message for r in caplog.records if "kept in eval() mode" in r.message]
    assert len(lines) == 1
    assert "backbone.2" in lines[0]
    assert model.head.training
    # As a loop that takes care itself.
    plain = make_run(model=other, noise_multiplier=0.0)
    plain.epoch()
    plain.epoch()
    assert run.engine.privacy_event == plain.engine.privacy_event
    for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_nothing_is_logged_where_nothing_is_switched(make_run, caplog):
    with caplog.at_level(logging.WARNING, "hidden_state_accountants"):
        run = make_run(model=Probe(middle=nn.Dropout().eval()))
        run.epoch()
    assert not [r for r in caplog.records if "kept in eval() mode" in r.message]
    assert any("in eval() mode" in a.text for a in run.engine.assumptions)


@pytest.mark.parametrize("arguments", [{"loss_geometry": None}, DECLARED])
def test_without_a_known_loss(make_run, caplog, arguments):
    """By composition dropout in frozen layers is that of the loop, as in Opacus."""
    backbone = nn.Sequential(nn.Linear(5, 8), trained_batch_norm(), nn.Dropout())
    model = nn.Sequential(backbone.requires_grad_(False), nn.Dropout(), nn.Linear(8, 3))
    with caplog.at_level(logging.WARNING, "hidden_state_accountants"):
        run = make_run(model=model, **arguments)
        run.model.train()
        run.epoch()
    is_composed = arguments["loss_geometry"] is None
    assert [part.training for part in backbone[1:]] == [False, is_composed]
    assert model[1].training  # between trained layers dropout is the user's own
    (line,) = [r.message for r in caplog.records if "kept in eval() mode" in r.message]
    assert ("0.2 (Dropout)" in line) != is_composed
    assert "0.1 (BatchNorm1d)" in line
    run.engine.get_epsilon(DELTA)
    assert run.steps == 6


def test_statistics_cannot_be_written(make_run):
    model = AlwaysTrains(middle=trained_batch_norm())
    run = make_run(model=model)
    run.epoch()
    with torch.no_grad():
        model.train()
        model.backbone(torch.randn(7, 5))  # past the model
    with pytest.raises(hsa.UnsupportedRunError, match="A buffer of the module was changed"):
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


def replaced_parameter(run):
    run.epoch()
    layer = run.plain_model.backbone[0]
    layer.weight = nn.Parameter(layer.weight + 1.0, requires_grad=False)
    run.epoch()


def other_memory(run):
    run.epoch()
    layer = run.plain_model.backbone[0]
    layer.weight.data = layer.weight.data + 1.0
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
    with pytest.raises(hsa.UnsupportedRunError, match="step 7 trains"):
        run.epoch()
    assert run.steps == 6


@pytest.mark.parametrize(
    ("loop", "text"),
    [
        (trained_backbone, "another value of the frozen parameter backbone.0.weight"),
        (other_backbone, "another value of the frozen parameter backbone.0.weight"),
        (replaced_parameter, "another value of the frozen parameter backbone.0.weight"),
        (other_memory, "another value of the frozen parameter backbone.0.weight"),
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


def test_a_backbone_that_was_swapped_and_restored_is_fine(make_run):
    run = make_run(model=Probe())
    run.epoch()
    state = copy.deepcopy(run.plain_model.state_dict())
    run.plain_model.load_state_dict({k: v + 1.0 for k, v in state.items()})
    run.plain_model.load_state_dict(state)
    run.epoch()
    assert run.steps == 12


def test_a_parameter_that_was_replaced_by_an_equal_one_is_fine(make_run):
    run = make_run(model=Probe())
    run.epoch()
    layer = run.plain_model.backbone[0]
    layer.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=False)
    run.epoch()
    assert run.steps == 12
    layer.weight.add_(1.0)
    with pytest.raises(hsa.UnsupportedRunError, match="of the frozen parameter backbone"):
        run.engine.release()


def test_long_features_are_noticed(make_run):
    model = Probe()
    model.backbone[-1] = nn.Identity()
    run = make_run(model=model, feature_norm=0.01)
    with pytest.raises(hsa.UnsupportedRunError, match="step 1 used features of norm"):
        run.epoch()


def test_checkpoints_with_a_backbone(make_run, tmp_path):
    run, path = make_run(model=Probe()), tmp_path / "c.pt"
    run.epoch()
    run.engine.save_checkpoint(path=path)
    resumed = make_run(model=Probe())
    resumed.engine.load_checkpoint(path=path)
    resumed.epoch()
    assert resumed.steps == 12


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(5, 4).requires_grad_(False), nn.ReLU(), nn.Linear(4, 3)),
        nn.Sequential(nn.Dropout(), nn.Flatten(), nn.Sequential(nn.Linear(5, 3), nn.Identity())),
        Probe(),
    ],
)
def test_models_that_auto_knows(model):
    assert auto_loss_geometry(
        model, nn.CrossEntropyLoss(), 1.0
    ) == LossGeometry.softmax_cross_entropy(1.0, bias=True)


@pytest.mark.parametrize("blocks", [False, True])
def test_gradients_that_were_there_before_have_no_effect(make_run, blocks):
    """Neither those of the frozen part, nor those of the steps before (no zero_grad)."""
    weights = []
    for is_honest in (True, False):
        model = nn.Sequential(nn.Linear(5, 5), Unit(), nn.Linear(5, 3))
        model.load_state_dict(
            {
                name: torch.linspace(-1, 1, value.numel()).reshape(value.shape)
                for name, value in model.state_dict().items()
            }
        )
        if not is_honest:
            model(torch.ones(1, 5)).sum().backward()
        model[0].requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        kind = {"optimizer_class": BlockCoordinateOptimizer} if blocks else {}
        run = make_run(model=model, optimizer=optimizer, noise_multiplier=0.0, **kind)
        frozen = model[0].weight.clone()
        for features, labels in run.loader:
            if is_honest:
                run.optimizer.zero_grad()
            run.criterion(run.model(features), labels).backward()
            run.optimizer.step()
        assert torch.equal(model[0].weight, frozen)
        weights.append(model[2].weight.detach().clone())
    assert torch.equal(*weights)
