"""Optimizers and arguments that make_private refuses."""

import importlib.util
import math
import re
import sys
import types

import attrs
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hidden_state_accountants as hsa
from hidden_state_accountants import LossGeometry
from hidden_state_adapters.opacus import (
    BallProjection,
    BlockCoordinate,
    BlockCoordinateOptimizer,
    DiceSGD,
    DiceSGDOptimizer,
    HiddenStatePrivacyEngine,
)
from hidden_state_adapters.opacus.declared import RunArguments

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def sgd_of(*groups):
    def make(model):
        parameters = dict(model.named_parameters())
        return torch.optim.SGD(
            [{**g, "params": [parameters[n] for n in g["params"]]} for g in groups], lr=0.5
        )

    return make


@pytest.mark.parametrize(
    ("make_optimizer", "text"),
    [
        (lambda m: torch.optim.Adam(m.parameters()), "got Adam"),
        (lambda m: torch.optim.AdamW(m.parameters()), "got AdamW"),
        (lambda m: type("MySGD", (torch.optim.SGD,), {})(m.parameters(), lr=1.0), "got MySGD"),
        (lambda m: torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.9), "momentum = 0"),
        (lambda m: torch.optim.SGD(m.parameters(), lr=0.5, dampening=0.5), "dampening = 0"),
        (lambda m: torch.optim.SGD(m.parameters(), lr=0.5, maximize=True), "maximize = False"),
        (sgd_of({"params": ["weight"]}, {"params": ["bias"], "lr": 0.1}), "lr = 0.5 in group 0"),
        (
            sgd_of({"params": ["weight"]}, {"params": ["bias"], "weight_decay": 0.1}),
            "weight_decay = 0 in group 0",
        ),
        (sgd_of({"params": ["weight"]}), "bias is missing"),
        (
            lambda m: torch.optim.SGD([*m.parameters(), nn.Parameter(torch.zeros(1))], lr=0.5),
            "got 1 others",
        ),
        (lambda m: torch.optim.SGD(m.bfloat16().parameters(), lr=0.5), "torch.bfloat16"),
        (lambda m: torch.optim.SGD(m.half().parameters(), lr=0.5), "torch.float16"),
    ],
)
def test_optimizers_that_are_refused(make_run, make_optimizer, text):
    model = nn.Linear(5, 3)
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        make_run(model=model, optimizer=make_optimizer(model))


def test_equal_groups_and_frozen_parameters_are_fine(make_run):
    model = nn.Linear(5, 3)
    group = {"weight_decay": 0.1}
    optimizer = sgd_of({"params": ["weight"], **group}, {"params": ["bias"], **group})(model)
    run = make_run(model=model, optimizer=optimizer)
    run.epoch()
    model = nn.Sequential(nn.Linear(5, 5).requires_grad_(False), nn.Linear(5, 3))
    loss = LossGeometry.softmax_cross_entropy(10.0, bias=True)
    run = make_run(model=model, loss_geometry=loss, feature_norm=10.0)
    run.epoch()
    assert run.engine.privacy_event.num_steps == 6


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"batch_order": "no such order"}, ValueError, "batch_order to be one of full, cyclic"),
        ({"rand_on_empty": True}, hsa.UnsupportedRunError, "rand_on_empty = False"),
        ({"optimizer_class": object}, hsa.UnsupportedRunError, "Expected mechanism = None"),
        ({"clipping": "per_layer"}, hsa.UnsupportedRunError, 'clipping = "flat"'),
        ({"clipping": "adaptive"}, hsa.UnsupportedRunError, "how many gradients were not clipped"),
        ({"grad_sample_mode": "ghost_fsdp"}, hsa.UnsupportedRunError, 'Use "functorch"'),
        ({"grad_sample_mode": "no_op"}, hsa.UnsupportedRunError, 'Use "functorch"'),
        ({"no_such_argument": 1}, TypeError, "no_such_argument"),
        ({"after": BallProjection(0.1)}, hsa.UnsupportedRunError, "inside the ball"),
        ({"loss_geometry": "auto", "feature_norm": -1.0}, ValueError, "feature_norm > 0"),
        ({"max_grad_norm": [1.0, 1.0]}, hsa.UnsupportedRunError, "one fixed clip of the whole"),
        ({"max_grad_norm": 0.0}, ValueError, "clip_norm > 0"),
        ({"noise_multiplier": -1.0}, ValueError, "noise_multiplier >= 0"),
        ({"criterion": "mse"}, TypeError, "Expected criterion to be"),
        ({"loss_geometry": "convex"}, TypeError, "LossGeometry"),
        ({"max_grad_norm": 2.0}, hsa.UnsupportedRunError, r"2.00002|2.00003"),
        ({"max_grad_norm": 2.0000001}, hsa.UnsupportedRunError, "Raise max_grad_norm"),
        ({"sgd": {"lr": 5.0, "weight_decay": 0.2}}, ValueError, "weight_decay < 1"),
        ({"loader": {"shuffle": True}}, hsa.UnsupportedRunError, "shuffle=False"),
        ({"loader": {"batch_size": 7}}, hsa.UnsupportedRunError, "divides the 60 records"),
        ({"criterion": nn.CrossEntropyLoss(reduction="sum")}, hsa.UnsupportedRunError, "mean"),
    ],
)  # fmt: skip
def test_arguments_that_are_refused(make_run, arguments, error, text):
    with pytest.raises(error, match=text):
        make_run(**arguments)


def test_engine_has_its_own_accountant():
    for name in ("hidden_state", "prv", "rdp"):  # a stock script may say its default
        engine = HiddenStatePrivacyEngine(accountant=name)
        assert engine.accountant.mechanism() == "hidden_state"
    with pytest.raises(ValueError, match=r"accountant = 'hidden_state'.*got 'gdp'"):
        HiddenStatePrivacyEngine(accountant="gdp")  # no bound, and may be below


def test_secure_mode_needs_torchcsprng(make_run, monkeypatch):
    if importlib.util.find_spec("torchcsprng") is None:
        with pytest.raises(ImportError, match="torchcsprng"):
            HiddenStatePrivacyEngine(secure_mode=True)
    # A stand-in: what matters here is that the generator and the safe sum of four draws are used.
    fake = types.ModuleType("torchcsprng")
    fake.create_random_device_generator = lambda device: torch.Generator().manual_seed(3)
    monkeypatch.setitem(sys.modules, "torchcsprng", fake)
    engine = HiddenStatePrivacyEngine(secure_mode=True)
    for order in ("cyclic", "reshuffled", "poisson"):
        run = make_run(engine=engine, batch_order=order)
        assert run.optimizer.secure_mode
        assert run.optimizer.generator is engine.secure_rng
        run.epoch()


def test_every_argument_is_explained():
    taken = {field.name for field in attrs.fields(RunArguments)} | {"noise_multiplier"}
    explained = HiddenStatePrivacyEngine.make_private.__doc__
    for name in taken - {"optimizer_class", "rand_on_empty"}:
        assert re.search(rf"\b{name}\b", explained), name


def test_mechanisms_and_their_optimizers(make_run):
    none = {"loss_geometry": None, "feature_norm": None}
    plain = {"sgd": {"weight_decay": 0.0}, **none}
    for mechanism, made in (
        (DiceSGD(), DiceSGDOptimizer),
        (BlockCoordinate(), BlockCoordinateOptimizer),
    ):
        runs = [
            make_run(mechanism=mechanism, **plain),
            make_run(optimizer_class=made, **plain),
        ]
        assert [type(run.optimizer) for run in runs] == [made, made]
        assert runs[0].optimizer.run.fields == runs[1].optimizer.run.fields
    with pytest.raises(ValueError, match='"auto" is just above the longest gradient'):
        make_run(max_grad_norm="auto", criterion=None, **none)


def test_calls_that_opacus_takes():
    """`epsilon_tolerance`, and the criterion that Opacus has by default."""
    model = nn.Linear(5, 3)
    _, optimizer, criterion, _ = HiddenStatePrivacyEngine().make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.Adam(model.parameters()),
        data_loader=DataLoader(TensorDataset(torch.randn(8, 5), torch.arange(8) % 3), batch_size=4),
        target_epsilon=3.0,
        target_delta=1e-4,
        epochs=2,
        max_grad_norm=1.0,
        grad_sample_mode="ghost",
        epsilon_tolerance=0.001,
    )
    assert isinstance(criterion.criterion, nn.CrossEntropyLoss)
    assert 0 < optimizer.noise_multiplier < math.inf
