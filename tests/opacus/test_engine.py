"""The engine trains the event that it accounts, and refuses what it cannot."""

import importlib.util
import math
import re
import sys
import types

import attrs
import numpy as np
import pytest
import torch
from dice import clip
from dp_accounting import NeighboringRelation
from opacus.accountants import RDPAccountant
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hidden_state_accountants as hsa
from hidden_state_accountants.figures import fixed_up
from hidden_state_accountants.guarantee import Status
from hidden_state_adapters.opacus import (
    BallProjection,
    BlockCoordinate,
    BlockCoordinateOptimizer,
    DiceSGD,
    DiceSGDOptimizer,
    HiddenStateAccountant,
    HiddenStatePrivacyEngine,
)
from hidden_state_adapters.opacus.declared import RunArguments

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


DELTA = 1e-5


def softmax_gradient(x, record):
    """Of the cross-entropy at the weights and biases (3, 6)."""
    features, label = record
    extended = np.append(features, 1.0)
    logits = x.reshape(3, 6) @ extended
    p = np.exp(logits - logits.max())
    return np.outer(p / p.sum() - np.eye(3)[label], extended).ravel()


@pytest.mark.parametrize(
    ("dtype", "tolerance", "radius", "pieces"),
    [(torch.float64, 1e-5, np.inf, None), (torch.float32, 1e-5, 0.2, 3)],
)
def test_trajectory_is_that_of_the_event(make_run, dataset, dtype, tolerance, radius, pieces):
    features, labels = dataset.tensors[0].to(dtype), dataset.tensors[1]
    model = nn.Linear(5, 3).to(dtype)
    for p in model.parameters():
        p.data.mul_(0.1)
    start = torch.cat([model.weight, model.bias[:, None]], dim=1).detach().double().numpy()
    run = make_run(
        model=model,
        loader={"dataset": TensorDataset(features, labels)},
        noise_multiplier=0.0,
        max_grad_norm=0.6,
        after=BallProjection(radius) if pieces else None,
        sgd={"lr": 1.5},
    )
    for _ in range(3):
        if pieces is None:
            run.epoch()
            continue
        with BatchMemoryManager(
            data_loader=run.loader, max_physical_batch_size=pieces, optimizer=run.optimizer
        ) as loader:
            run.epoch(loader)
    records = list(zip(features.double().numpy(), labels.numpy(), strict=True))
    expected = start.ravel()
    for t in range(18):
        batch = records[t * 10 % 60 : t * 10 % 60 + 10]
        total = sum(clip(softmax_gradient(expected, record), 0.6) for record in batch)
        expected = clip((1 - 1.5 * 0.1) * expected - 1.5 / 10 * total, radius)
    found = torch.cat([model.weight, model.bias[:, None]], dim=1).detach().numpy().ravel()
    np.testing.assert_allclose(found, expected, atol=tolerance)  # Opacus: C / (norm + 1e-6)
    if pieces:
        assert np.linalg.norm(expected) == pytest.approx(radius)
        assert np.linalg.norm(found.astype(float)) <= radius
    assert run.engine.get_epsilon(DELTA) == math.inf


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_noise_of_a_step(make_run, reduction):
    lr, noise, clip, b = 0.5, 3.0, 2.1, 10
    scale = lr / b
    run = make_run(
        sgd={"lr": lr if reduction == "mean" else scale, "weight_decay": 0.0},
        noise_multiplier=noise,
        criterion=nn.CrossEntropyLoss(reduction=reduction),
        loss_reduction=reduction,
    )
    moves = []
    for _ in range(100):
        for batch in run.loader:
            before = [p.detach().clone() for p in run.optimizer.params]
            run.step(batch)
            for p, old in zip(run.optimizer.params, before, strict=True):
                moves.append((p.detach() - old + scale * p.summed_grad).flatten())
    draws = torch.cat(moves)
    assert run.engine.privacy_event.learning_rate == pytest.approx(lr)
    expected = scale * noise * clip
    assert float(draws.std()) == pytest.approx(expected, rel=6 / math.sqrt(2 * len(draws)))
    assert abs(float(draws.mean())) < 6 * expected / math.sqrt(len(draws))


def test_report_and_assumptions(make_run, tmp_path):
    run = make_run(after=BallProjection(5.0))
    assert run.engine.get_epsilon(DELTA) == 0
    for ask in (lambda: run.engine.report(DELTA), lambda: run.engine.privacy_event):
        with pytest.raises(ValueError, match="at least one step"):
            ask()
    for _ in range(2):
        for batch in run.loader:
            run.step(batch)
            if run.steps == 3:
                run.engine.release()
    epsilon = run.engine.get_epsilon(DELTA)
    run.engine.release()  # of the current iterate: changes nothing
    event = run.engine.privacy_event
    assert event.release_steps == (3,)
    exact = hsa.LastIterateAccountant().compose(event).get_epsilon(DELTA)
    assert run.engine.get_epsilon(DELTA) == epsilon == pytest.approx(exact, rel=1e-12)
    text = run.engine.report(DELTA)
    assert 20 <= len(text.splitlines()) <= 45
    for part in (
        f"epsilon = {fixed_up(epsilon, 4)} at delta = 1e-05",
        "Theorem A",
        "c = 0.95",
        "12 steps x 10 of 60 records, cyclic (2 epochs)",
        "and after steps 3",
        "noise/sensitivity 2.1",  # noise 2 * 2.1 on a sum that a record moves by at most 2
        "indices of the batches",
        "the formula of the loss and the last private iterate",
        "per-example gradient norms at most 2",
        "feature norms at most 1",
    ):
        assert part in text, part
    texts = {status: [] for status in Status}
    for assumption in run.engine.assumptions:
        texts[assumption.status].append(assumption.text)
    assert any("ball of radius 5" in text for text in texts[Status.CHECKED])
    run.engine.guarantee.save(tmp_path / "model.json")
    assert "batch size, hyper-parameters" in (tmp_path / "model.md").read_text()
    for declared in ("number of steps", "LossGeometry"):
        assert any(declared in text for text in texts[Status.DECLARED])


@pytest.mark.parametrize("arguments", [{"wrap_model": False}, {"grad_sample_mode": "functorch"}])
def test_ways_to_get_per_example_gradients(make_run, arguments):
    run, usual = make_run(noise_multiplier=0.0, **arguments), make_run(noise_multiplier=0.0)
    if "wrap_model" in arguments:
        run.model = run.plain_model
    for each in (run, usual):
        each.epoch()
    assert run.engine.privacy_event == usual.engine.privacy_event
    for a, b in zip(run.plain_model.parameters(), usual.plain_model.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_the_accountant_of_a_run_cannot_be_replaced(make_run):
    """The steps would be missing from the new one, and epsilon be 0."""
    with pytest.raises(ValueError, match=r"accountant = 'hidden_state'.*got 'gdp'"):
        HiddenStatePrivacyEngine(accountant="gdp")  # no bound, and may be below
    engine = HiddenStatePrivacyEngine(accountant="rdp")  # a stock script may say its default
    with pytest.raises(hsa.UnsupportedRunError, match="make_private first"):
        engine.release()
    with pytest.raises(hsa.UnsupportedRunError, match="got RDPAccountant, which knows no run"):
        engine.accountant = RDPAccountant()
    engine.accountant = HiddenStateAccountant("replace_one")
    run = make_run(engine=engine)
    run.epoch()
    assert run.engine.guarantee.neighboring_relation is NeighboringRelation.REPLACE_ONE
    with pytest.raises(hsa.UnsupportedRunError, match="got another HiddenStateAccountant"):
        engine.accountant = HiddenStateAccountant()
    assert engine.get_epsilon(DELTA) > 0


# --- arguments ----------------------------------------------------------------------------------


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
        (lambda m: type("MySGD", (torch.optim.SGD,), {})(m.parameters(), lr=1.0), "got MySGD"),
        (lambda m: torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.9), "momentum = 0"),
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
    ],
)
def test_optimizers_that_are_refused(make_run, make_optimizer, text):
    model = nn.Linear(5, 3)
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        make_run(model=model, optimizer=make_optimizer(model))


UNSUPPORTED = hsa.UnsupportedRunError
NOTHING_KNOWN = {"loss_geometry": None, "criterion": None}


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"batch_order": "no such order"}, ValueError, "batch_order to be one of full, cyclic"),
        ({"rand_on_empty": True}, UNSUPPORTED, "rand_on_empty = False"),
        ({"optimizer_class": object}, UNSUPPORTED, "Expected mechanism = None"),
        ({"mechanism": DiceSGD}, TypeError, r"Expected mechanism to be DiceSGD\(...\)"),
        ({"clipping": "per_layer"}, UNSUPPORTED, 'clipping = "flat"'),
        ({"clipping": "adaptive"}, UNSUPPORTED, "how many gradients were not clipped"),
        ({"grad_sample_mode": "no_op"}, UNSUPPORTED, 'Use "functorch"'),
        ({"no_such_argument": 1}, TypeError, "no_such_argument"),
        ({"after": BallProjection(0.1)}, UNSUPPORTED, "inside the ball"),
        ({"loss_geometry": "auto", "feature_norm": -1.0}, ValueError, "feature_norm > 0"),
        ({"max_grad_norm": [1.0, 1.0]}, UNSUPPORTED, "one fixed clip of the whole"),
        ({"max_grad_norm": 0.0}, ValueError, "clip_norm > 0"),
        ({"max_grad_norm": "auto", **NOTHING_KNOWN}, ValueError, '"auto" is just above the long'),
        ({"noise_multiplier": -1.0}, ValueError, "noise_multiplier >= 0"),
        ({"criterion": "mse"}, TypeError, "Expected criterion to be"),
        ({"loss_geometry": "convex"}, TypeError, "LossGeometry"),
        ({"max_grad_norm": 2.0}, UNSUPPORTED, r"2.00002|2.00003"),
        ({"sgd": {"lr": 5.0, "weight_decay": 0.2}}, ValueError, "weight_decay < 1"),
        ({"num_steps": 0}, ValueError, "num_steps >= 1"),
        ({"num_steps": 2.0}, TypeError, "num_steps to be an integer"),
        ({"schedule": [0.5], "num_steps": 6}, ValueError, "per logical step"),
        ({"schedule": [-0.5]}, ValueError, "schedule"),
        ({"schedule": [0.5] * 5 + [11.0]}, ValueError, "weight_decay"),
        ({"loader": {"shuffle": True}}, UNSUPPORTED, "shuffle=False"),
        ({"loader": {"batch_size": 7}}, UNSUPPORTED, "divides the 60 records"),
        ({"criterion": nn.CrossEntropyLoss(reduction="sum")}, UNSUPPORTED, "mean"),
    ],
)
def test_arguments_that_are_refused(make_run, arguments, error, text):
    with pytest.raises(error, match=text):
        make_run(**arguments)


def test_secure_mode_needs_torchcsprng(make_run, monkeypatch):
    if importlib.util.find_spec("torchcsprng") is None:
        with pytest.raises(ImportError, match="torchcsprng"):
            HiddenStatePrivacyEngine(secure_mode=True)
    # A stand-in: what matters here is that the generator and the safe sum of four draws are used.
    fake = types.ModuleType("torchcsprng")
    fake.create_random_device_generator = lambda device: torch.Generator().manual_seed(3)
    monkeypatch.setitem(sys.modules, "torchcsprng", fake)
    run = make_run(engine=HiddenStatePrivacyEngine(secure_mode=True))
    assert run.optimizer.secure_mode
    assert run.optimizer.generator is run.engine.secure_rng
    run.epoch()
    assert "secure_mode: its generator reads" in run.engine.report(DELTA)


def test_every_argument_is_explained():
    taken = {field.name for field in attrs.fields(RunArguments)} | {"noise_multiplier"}
    explained = HiddenStatePrivacyEngine.make_private.__doc__
    for name in taken - {"optimizer_class", "rand_on_empty"}:
        assert re.search(rf"\b{name}\b", explained), name


@pytest.mark.parametrize(
    ("mechanism", "made"),
    [(DiceSGD(), DiceSGDOptimizer), (BlockCoordinate(), BlockCoordinateOptimizer)],
)
def test_mechanisms_and_their_optimizers(make_run, mechanism, made):
    plain = {"sgd": {"weight_decay": 0.0}, **NOTHING_KNOWN}
    runs = [make_run(mechanism=mechanism, **plain), make_run(optimizer_class=made, **plain)]
    assert [type(run.optimizer) for run in runs] == [made, made]
    assert runs[0].optimizer.run.fields == runs[1].optimizer.run.fields


def test_calls_that_opacus_takes():
    """`epsilon_tolerance`, and the criterion that Opacus has by default."""
    model = nn.Linear(5, 3)
    _, optimizer, criterion, _ = HiddenStatePrivacyEngine().make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.Adam(model.parameters()),
        data_loader=DataLoader(TensorDataset(torch.randn(8, 5), torch.arange(8) % 3), batch_size=4),
        target_epsilon=3.0, target_delta=1e-4, epochs=2, epsilon_tolerance=0.001,
        max_grad_norm=1.0, grad_sample_mode="ghost",
    )  # fmt: skip
    assert isinstance(criterion.criterion, nn.CrossEntropyLoss)
    assert 0 < optimizer.noise_multiplier < math.inf


@pytest.mark.cuda
def test_on_a_gpu(make_run):
    model = nn.Linear(5, 3).cuda()
    run = make_run(model=model, after=BallProjection(5.0))
    for _ in range(2):
        for features, labels in run.loader:
            run.step((features.cuda(), labels.cuda()))
    assert run.engine.privacy_event.num_steps == 12
    assert run.engine.get_epsilon(DELTA) < math.inf
    features, labels = next(iter(run.loader))
    with pytest.raises(hsa.UnsupportedRunError, match="features of norm"):
        run.step((2 * features.cuda(), labels.cuda()))
