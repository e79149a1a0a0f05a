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
from dp_accounting import NeighboringRelation
from opacus.accountants import RDPAccountant
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hidden_state_accountants as hsa
from hidden_state_accountants import LossGeometry
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


def numpy_softmax_loop(model, features, labels, *, epochs, b, lr, decay, clip, radius=math.inf):
    """x <- P_R((1 - lr*wd) x - lr/b * sum clip(g)) on all parameters as one vector."""
    weight, bias = (p.detach().numpy().astype(float) for p in model.parameters())
    x, y = features.numpy().astype(float), labels.numpy()
    for step in range(epochs * (len(x) // b)):
        rows = slice(step * b % len(x), step * b % len(x) + b)
        logits = x[rows] @ weight.T + bias
        p = np.exp(logits - logits.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        p[np.arange(b), y[rows]] -= 1
        gradient = np.concatenate([p[:, :, None] * x[rows][:, None, :], p[:, :, None]], axis=2)
        norms = np.linalg.norm(gradient.reshape(b, -1), axis=1)
        factor = np.minimum(1, clip / (norms + 1e-6))
        total = np.einsum("i,ijk->jk", factor, gradient)
        weight = (1 - lr * decay) * weight - lr / b * total[:, :-1]
        bias = (1 - lr * decay) * bias - lr / b * total[:, -1]
        norm = math.sqrt((weight**2).sum() + (bias**2).sum())
        weight, bias = (part * min(1.0, radius / norm) for part in (weight, bias))
    return weight, bias


@pytest.mark.parametrize(
    ("dtype", "tolerance", "radius", "pieces"),
    [
        (torch.float64, 1e-12, None, None),
        (torch.float64, 1e-12, 0.2, 3),
        (torch.float32, 2e-6, 0.2, None),
    ],
)
def test_trajectory_is_that_of_the_event(make_run, dataset, dtype, tolerance, radius, pieces):
    features, labels = dataset.tensors[0].to(dtype), dataset.tensors[1]
    model = nn.Linear(5, 3).to(dtype)
    with torch.no_grad():
        model.weight.mul_(0.1)
        model.bias.mul_(0.1)
    start = nn.Linear(5, 3).to(dtype)
    start.load_state_dict(model.state_dict())
    run = make_run(
        model=model,
        loader={"dataset": TensorDataset(features, labels)},
        noise_multiplier=0.0,
        max_grad_norm=0.6,
        after=None if radius is None else BallProjection(radius),
        sgd={"lr": 1.5},
    )
    for _ in range(3):
        if pieces is None:
            run.epoch()
        else:
            with BatchMemoryManager(
                data_loader=run.loader, max_physical_batch_size=pieces, optimizer=run.optimizer
            ) as loader:
                run.epoch(loader)
    weight, bias = numpy_softmax_loop(
        start, features, labels, epochs=3, b=10, lr=1.5, decay=0.1, clip=0.6,
        radius=radius or math.inf,
    )  # fmt: skip
    np.testing.assert_allclose(run.plain_model.weight.detach().numpy(), weight, atol=tolerance)
    np.testing.assert_allclose(run.plain_model.bias.detach().numpy(), bias, atol=tolerance)
    if radius is not None:
        assert math.hypot(np.linalg.norm(weight), np.linalg.norm(bias)) == pytest.approx(radius)
        joint = math.sqrt(sum(float((p.detach().double() ** 2).sum()) for p in model.parameters()))
        assert joint <= radius
    assert run.engine.get_epsilon(DELTA) == math.inf


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_noise_of_a_step(make_run, reduction):
    lr, noise, clip, b = 0.5, 3.0, 2.1, 10
    if reduction == "sum":
        lr /= b
    run = make_run(
        sgd={"lr": lr, "weight_decay": 0.0},
        noise_multiplier=noise,
        criterion=nn.CrossEntropyLoss(reduction=reduction),
        loss_reduction=reduction,
    )
    moves = []
    for _ in range(100):
        for features, labels in run.loader:
            before = [p.detach().clone() for p in run.plain_model.parameters()]
            run.step((features, labels))
            clipped = [p.summed_grad for p in run.optimizer.params]
            scale = lr / b if reduction == "mean" else lr
            for p, old, gradient in zip(run.optimizer.params, before, clipped, strict=True):
                moves.append((p.detach() - old + scale * gradient).flatten())
    draws = torch.cat(moves)
    event = run.engine.privacy_event
    assert event.learning_rate == pytest.approx(0.5)
    expected = 0.5 * noise * clip / b
    assert float(draws.std()) == pytest.approx(expected, rel=6 / math.sqrt(2 * len(draws)))
    assert abs(float(draws.mean())) < 6 * expected / math.sqrt(len(draws))


def test_full_batches(make_run):
    run = make_run(batch_order="full", loader={"shuffle": True}, max_grad_norm=1.0)
    for _ in range(3):
        run.epoch()
    batch = next(iter(run.loader))
    for _ in range(2):  # the one batch may be kept
        run.step(batch)
    event = hsa.LastIterateDpEvent(
        noise_multiplier=2.0, learning_rate=0.5, clip_norm=1.0, batch_size=60, dataset_size=60,
        num_steps=5, batch_order="full", weight_decay=0.1,
        loss=LossGeometry.softmax_cross_entropy(1.0, bias=True),
    )  # fmt: skip
    assert run.engine.privacy_event == event
    exact = hsa.LastIterateAccountant().compose(event).get_epsilon(DELTA)
    assert run.engine.get_epsilon(DELTA) == pytest.approx(exact, rel=1e-12)


def test_report_and_assumptions(make_run):
    run = make_run(after=BallProjection(5.0))
    for _ in range(2):
        for batch in run.loader:
            run.step(batch)
            if run.steps == 3:
                run.engine.release()
    text = run.engine.report(DELTA)
    assert 20 <= len(text.splitlines()) <= 45
    for part in (
        f"epsilon = {fixed_up(run.engine.get_epsilon(DELTA), 4)} at delta = 1e-05",
        "REPLACE_SPECIAL",
        "Theorem A",
        "c = 0.95",
        "12 steps x 10 of 60 records, cyclic (2 epochs)",
        "epsilon if every iterate were released: ",
        "and after steps 3",
        "radius 5",
        "noise/sensitivity 2.1",  # noise 2 * 2.1 on a sum that a record moves by at most 2
        "indices of the batches",
        "the formula of the loss and the last private iterate",
        "per-example gradient norms at most 2",
        "feature norms at most 1",
    ):
        assert part in text, part
    by_status = {status: [] for status in Status}
    for assumption in run.engine.assumptions:
        assert isinstance(assumption, hsa.Assumption)
        by_status[assumption.status].append(assumption.text)
    assert any("ball of radius 5" in text for text in by_status[Status.CHECKED])
    assert not any("projected" in text for text in by_status[Status.DECLARED])
    assert any("number of steps" in text for text in by_status[Status.DECLARED])
    assert any("LossGeometry" in text for text in by_status[Status.DECLARED])


def test_before_the_first_step(make_run):
    run = make_run()
    assert run.engine.get_epsilon(DELTA) == 0
    with pytest.raises(ValueError, match="at least one step"):
        run.engine.report(DELTA)
    with pytest.raises(ValueError, match="at least one step"):
        _ = run.engine.privacy_event
    with pytest.raises(hsa.UnsupportedRunError, match="make_private first"):
        HiddenStatePrivacyEngine().release()


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


def test_noise_generator_is_used(make_run):
    weights = []
    for _ in range(2):
        run = make_run(noise_generator=torch.Generator().manual_seed(7))
        torch.rand(3)
        run.epoch()
        weights.append(run.plain_model.weight.detach())
    torch.testing.assert_close(*weights, rtol=0, atol=0)


def test_the_accountant_of_a_run_cannot_be_replaced(make_run):
    """The steps would be missing from the new one, and epsilon be 0."""
    with pytest.raises(ValueError, match=r"accountant = 'hidden_state'.*got 'gdp'"):
        HiddenStatePrivacyEngine(accountant="gdp")  # no bound, and may be below
    HiddenStatePrivacyEngine(accountant="rdp")  # a stock script may say its default
    engine = HiddenStatePrivacyEngine()
    with pytest.raises(hsa.UnsupportedRunError, match="got RDPAccountant, which knows no run"):
        engine.accountant = RDPAccountant()
    engine.accountant = HiddenStateAccountant("replace_one")
    run = make_run(engine=engine)
    run.epoch()
    assert run.engine.guarantee.neighboring_relation is NeighboringRelation.REPLACE_ONE
    with pytest.raises(hsa.UnsupportedRunError, match="got another HiddenStateAccountant"):
        engine.accountant = HiddenStateAccountant()
    assert engine.get_epsilon(DELTA) > 0


def test_checkpoints_that_do_not_fit(make_run, tmp_path):
    run = make_run()
    run.epoch()
    path = tmp_path / "checkpoint.pt"
    run.engine.save_checkpoint(path=path, module=run.model, optimizer=run.optimizer)
    with pytest.raises(ValueError, match="without steps, got one with 6"):
        run.engine.load_checkpoint(path=path, module=run.model, optimizer=run.optimizer)
    run.epoch()  # nothing was overwritten
    other = make_run(loader={"batch_size": 15})
    with pytest.raises(ValueError, match="batch_size = 15, got 10"):
        other.engine.load_checkpoint(path=path, module=other.model, optimizer=other.optimizer)
    other.epoch()  # nothing was loaded
    fresh = make_run()
    with pytest.raises(hsa.UnsupportedRunError, match="module of the current run"):
        fresh.engine.load_checkpoint(path=path, module=run.model)


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
    lines = [str(assumption) for assumption in run.engine.assumptions]
    assert "declared: feature norms at most 10" in lines


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"batch_order": "no such order"}, ValueError, "batch_order to be one of full, cyclic"),
        ({"rand_on_empty": True}, hsa.UnsupportedRunError, "rand_on_empty = False"),
        ({"optimizer_class": object}, hsa.UnsupportedRunError, "Expected mechanism = None"),
        ({"clipping": "per_layer"}, hsa.UnsupportedRunError, 'clipping = "flat"'),
        ({"clipping": "adaptive"}, hsa.UnsupportedRunError, "how many gradients were not clipped"),
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
        ({"sgd": {"lr": 5.0, "weight_decay": 0.2}}, ValueError, "weight_decay < 1"),
        ({"loader": {"shuffle": True}}, hsa.UnsupportedRunError, "shuffle=False"),
        ({"loader": {"batch_size": 7}}, hsa.UnsupportedRunError, "divides the 60 records"),
        ({"criterion": nn.CrossEntropyLoss(reduction="sum")}, hsa.UnsupportedRunError, "mean"),
    ],
)  # fmt: skip
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
    for mechanism in ("dice", DiceSGD):
        with pytest.raises(TypeError, match=r"Expected mechanism to be DiceSGD\(...\)"):
            make_run(mechanism=mechanism, **plain)
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
