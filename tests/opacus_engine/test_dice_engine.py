"""DiceSGD through the engine: the paper's steps on the plan's batches, no epsilon for others."""

import copy
import io
import itertools
import math
import pickle

import dp_accounting
import numpy as np
import pytest
import torch
from dice import adam_step, automatic_step, sgd_step
from dp_accounting import NeighboringRelation
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hidden_state_accountants as hsa
from hidden_state_adapters.opacus import (
    DiceAdamOptimizer,
    DiceSGDOptimizer,
    HiddenStatePrivacyEngine,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

DELTA, RATE, CLIP, ERROR_CLIP = 1e-5, 0.3, 0.1, 0.02
ORDERS = ["cyclic", "full", "shuffled_once", "reshuffled", "without_replacement", "poisson"]
SECRET = ORDERS[2:]
PRIVATE = {"include_private_state": True, "stays_private": True}
# Softmax cross-entropy on features of norm 1 with a bias: sqrt(2) * sqrt(2).
BOUND = 2.0001


@pytest.fixture
def make_dice(make_run, dataset):
    """A run of DiceSGD in float64; arguments as for make_run, `base` makes the inner optimizer."""
    features, labels = dataset.tensors
    data = TensorDataset(features.double(), labels)

    def make(variant="sgd", *, base=None, loader=None, **kwargs):
        torch.manual_seed(0)
        model = kwargs.pop("model", None) or nn.Linear(5, 3).double()
        kind = torch.optim.Adam if variant == "adam" else torch.optim.SGD
        optimizer = kind(model.parameters(), **{"lr": RATE, **(base or {})})
        arguments = {
            "optimizer_class": DiceAdamOptimizer if variant == "adam" else DiceSGDOptimizer,
            "error_max_grad_norm": CLIP if variant == "automatic" else ERROR_CLIP,
            "automatic": variant == "automatic",
            "max_grad_norm": CLIP,
            "noise_multiplier": 20.0,
            "loss_geometry": None,
            **kwargs,
        }
        loader = {"dataset": data, **(loader or {})}
        return make_run(model=model, optimizer=optimizer, loader=loader, **arguments)

    return make


def flat(tensors):
    return torch.cat([t.detach().reshape(-1) for t in tensors]).cpu().numpy().astype(float)


def weights(run):
    return flat(run.plain_model.parameters())


def error_of(run):
    private = run.optimizer.run_state_dict(include_private_state=True)["private"]
    return flat(private["error"])


def take(run, count):
    """Takes steps until `count` are taken, in whole epochs or not."""
    while run.steps < count:
        for batch in run.loader:
            run.step(batch)
            if run.steps == count:
                return


class Reference:
    """The steps of tests/reference/dice.py on one vector."""

    def __init__(self, variant, x, divisor):
        self.variant, self.x, self.error = variant, x, np.zeros_like(x)
        self.moments, self.steps, self.divisor = (0.0, 0.0), 0, divisor

    def step(self, gradients, noise):
        self.steps += 1
        common = {"learning_rate": RATE, "divisor": self.divisor, "clip_norm": CLIP}
        state = self.x, self.error
        if self.variant == "automatic":
            self.x, self.error = automatic_step(*state, gradients, noise, **common)
        elif self.variant == "sgd":
            self.x, self.error = sgd_step(
                *state, gradients, noise, error_clip_norm=ERROR_CLIP, **common
            )
        else:
            self.x, self.error, self.moments = adam_step(
                *state, self.moments, self.steps, gradients, noise,
                error_clip_norm=ERROR_CLIP, **common,
            )  # fmt: skip


def per_example(run):
    samples = [
        p.grad_sample.reshape(len(p.grad_sample), math.prod(p.shape))
        for p in run.plain_model.parameters()
    ]
    return torch.cat(samples, dim=1).cpu().numpy()


def softmax_gradients(run, rows):
    """By hand, from the records that the plan names: weight rows first, then biases."""
    features, labels = (t[rows] for t in run.loader.dataset.tensors)
    with torch.no_grad():
        outputs = features @ run.plain_model.weight.T + run.plain_model.bias
    slopes = torch.softmax(outputs, dim=1) - nn.functional.one_hot(labels, 3)
    parts = (slopes[:, :, None] * features[:, None, :]).flatten(start_dim=1), slopes
    return torch.cat(parts, dim=1).numpy()


# --- the steps ------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["sgd", "adam", "automatic"])
@pytest.mark.parametrize("order", ORDERS)
def test_every_step_is_that_of_the_paper(make_dice, variant, order):
    """On the records that the plan has for the step, with given noise, to rounding."""
    run = make_dice(
        variant, batch_order=order, noise_multiplier=0.7,
        noise_generator=torch.Generator().manual_seed(5), loader={"batch_size": 3},
    )  # fmt: skip
    plan, same_noise = run.optimizer.context.plan, torch.Generator().manual_seed(5)
    divisor = 60 if order == "full" else 3
    reference = Reference(variant, weights(run), divisor)
    sizes = []
    for step in range(25):
        if step % len(run.loader) == 0:
            batches = iter(run.loader)
        run.backward(next(batches))
        rows = plan.batch(step)
        sizes.append(len(rows))
        gradients = softmax_gradients(run, rows)
        np.testing.assert_allclose(per_example(run), gradients, atol=1e-12)
        run.optimizer.step()
        noise = [
            torch.normal(0.0, 1.0, p.shape, generator=same_noise, dtype=p.dtype)
            for p in run.plain_model.parameters()
        ]
        reference.step(gradients, 0.7 * CLIP / divisor * flat(noise))
        np.testing.assert_allclose(weights(run), reference.x, atol=1e-12)
    np.testing.assert_allclose(error_of(run), reference.error, atol=1e-12)
    assert np.linalg.norm(reference.error) > ERROR_CLIP  # both clips acted
    assert run.steps == run.optimizer.num_steps == 25
    assert (order == "poisson") == (len(set(sizes)) > 1)
    assert run.engine.privacy_event.num_steps == 25


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("order", ORDERS)
def test_pieces_of_a_batch_are_one_step(make_dice, order, workers):
    """BatchMemoryManager: the same end, the same account."""
    seed = {} if order in ("cyclic", "full") else {"order_seed": 3, "order_is_secret": True}
    ends, events = [], []
    for size in (100, 4):
        run = make_dice(
            batch_order=order, noise_generator=torch.Generator().manual_seed(1), **seed,
            loader={"num_workers": workers if size == 4 else 0},
        )  # fmt: skip
        with BatchMemoryManager(
            data_loader=run.loader, max_physical_batch_size=size, optimizer=run.optimizer
        ) as loader:
            for _ in range(2):
                for batch in loader:
                    run.step(batch)
        ends.append(np.concatenate([weights(run), error_of(run)]))
        events.append(run.engine.privacy_event)
    np.testing.assert_allclose(*ends, atol=1e-12)
    assert events[0] == events[1]
    assert events[0].num_steps == (2 if order == "full" else 12)


@pytest.mark.parametrize("mode", ["functorch", "ew"])
def test_other_ways_to_per_example_gradients(make_dice, mode):
    runs = [make_dice(noise_multiplier=0.0, grad_sample_mode=m) for m in ("hooks", mode)]
    for run in runs:
        run.epoch()
    np.testing.assert_allclose(*map(weights, runs), atol=1e-12)
    np.testing.assert_allclose(*map(error_of, runs), atol=1e-12)


@pytest.mark.parametrize("order", ["cyclic", "poisson"])
def test_ghost_clipping(make_dice, order):
    """The same steps and errors without per-example gradients, empty batches included."""
    seed = {} if order == "cyclic" else {"order_seed": 1, "order_is_secret": True}
    arguments = {
        "batch_order": order, "noise_multiplier": 0.0, "max_grad_norm": CLIP,
        "optimizer_class": DiceSGDOptimizer, "error_max_grad_norm": ERROR_CLIP,
        "gradient_bound": BOUND, "criterion": nn.CrossEntropyLoss(), **seed,
    }  # fmt: skip
    run, ghost = make_dice(loader={"batch_size": 2}, **arguments), HiddenStatePrivacyEngine()
    plain = nn.Linear(5, 3).double()
    plain.load_state_dict(run.plain_model.state_dict())
    model, optimizer, criterion, loader = ghost.make_private(
        module=plain, optimizer=torch.optim.SGD(plain.parameters(), lr=RATE),
        data_loader=DataLoader(run.loader.dataset, batch_size=2), grad_sample_mode="ghost",
        **arguments,
    )  # fmt: skip
    run.epoch()
    for features, labels in loader:
        optimizer.zero_grad()
        criterion(model(features), labels).backward()
        optimizer.step()
    np.testing.assert_allclose(flat(plain.parameters()), weights(run), atol=1e-12)
    state = optimizer.run_state_dict(include_private_state=True)
    np.testing.assert_allclose(flat(state["private"]["error"]), error_of(run), atol=1e-12)
    assert ghost.privacy_event == run.engine.privacy_event


def test_sum_reduction_needs_a_smaller_learning_rate_only(make_dice):
    mean = make_dice(noise_multiplier=0.0)
    total = make_dice(
        noise_multiplier=0.0, loss_reduction="sum", base={"lr": RATE / 10},
        criterion=nn.CrossEntropyLoss(reduction="sum"),
    )  # fmt: skip
    for run in (mean, total):
        run.epoch()
    np.testing.assert_allclose(weights(mean), weights(total), atol=1e-12)
    assert mean.engine.privacy_event == total.engine.privacy_event


class Residual(nn.Module):
    """x - xi: its squared half has the gradient of Appendix B.1 within reach of the data."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(1, 1, bias=False).double()
        nn.init.zeros_(self.line.weight)

    def forward(self, xi):
        return self.line(torch.ones_like(xi)) - xi


@pytest.mark.parametrize(("dice", "end"), [(True, 0.0), (False, -0.75)])
def test_the_bias_of_clipping_vanishes(dice, end):
    """Appendix B.1 (arXiv 2311.14632), Huber losses bent at 2, records -1, -1 and 2, from 0.

    DP-SGD ends where 2 (x + 1) = 1/2: two records pull with x + 1 each until the clip at 1/2, one
    with 1/2.
    """
    model, records = Residual(), torch.tensor([[-1.0], [-1.0], [2.0]], dtype=torch.float64)
    extra = {"optimizer_class": DiceSGDOptimizer} if dice else {}
    model, optimizer, loader = HiddenStatePrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(records), batch_size=3), noise_multiplier=0.0,
        max_grad_norm=0.5, batch_order="full", **extra,
    )  # fmt: skip
    for _ in range(600):
        for (batch,) in loader:
            optimizer.zero_grad()
            nn.HuberLoss(delta=2.0)(model(batch), torch.zeros_like(batch)).backward()
            optimizer.step()
    assert float(next(model.parameters())) == pytest.approx(end, abs=1e-3)


# --- the account ----------------------------------------------------------------------------------


@pytest.mark.parametrize("relation", list(NeighboringRelation))
@pytest.mark.parametrize("order", ORDERS)
def test_event_and_epsilon(make_dice, order, relation):
    engine = HiddenStatePrivacyEngine(neighboring_relation=relation)
    if relation is NeighboringRelation.ADD_OR_REMOVE_ONE and order != "poisson":
        with pytest.raises(hsa.UnsupportedRunError, match="ADD_OR_REMOVE_ONE"):
            make_dice(engine=engine, batch_order=order)
        return
    run = make_dice(engine=engine, batch_order=order, gradient_bound=BOUND)
    with pytest.raises(ValueError, match="at least one step"):
        _ = run.engine.privacy_event
    run.epoch()
    batch = 60 if order == "full" else 10
    event = hsa.DiceSgdDpEvent(
        noise_std=20.0 * CLIP / batch, clip_norm=CLIP, error_clip_norm=ERROR_CLIP,
        batch_size=batch, dataset_size=60, num_steps=60 // batch, batch_order=order,
        gradient_bound=BOUND,
    )  # fmt: skip
    assert run.engine.privacy_event == event
    accountant = hsa.DiceSgdAccountant(relation).compose(event)
    assert run.engine.get_epsilon(DELTA) == accountant.get_epsilon(DELTA)
    assert 0 < run.engine.get_epsilon(DELTA) < math.inf


def updates(gradients, order, automatic):
    """The mean updates without noise of 5 epochs with constant gradients, and their event."""
    engine, model = HiddenStatePrivacyEngine(), nn.Linear(3, 1, bias=False).double()
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=DataLoader(TensorDataset(gradients), batch_size=2), noise_multiplier=1.0,
        max_grad_norm=0.5, error_max_grad_norm=0.2, batch_order=order, automatic=automatic,
        optimizer_class=DiceSGDOptimizer, noise_generator=torch.Generator().manual_seed(0),
        gradient_bound=float(gradients.norm(dim=1).max()),
    )  # fmt: skip
    seen = []
    for _ in range(5):
        for (rows,) in loader:
            optimizer.zero_grad()
            model(rows).mean().backward()
            optimizer.step()
            seen.append(flat([p.grad for p in model.parameters()]))
    return np.array(seen), engine


@pytest.mark.parametrize("order", ["cyclic", "full"])
@pytest.mark.parametrize("automatic", [False, True])
@pytest.mark.parametrize("size", [0.1, 0.7, 3.0, 300.0])
def test_what_one_record_does_is_within_the_bound(size, automatic, order):
    """The same noise on neighbouring data sets: the squared differences of all updates together.

    The outlier is preceded by records that pull the error the other way.
    """
    gradients = torch.zeros(6, 3, dtype=torch.float64)
    gradients[:2, 0], gradients[2, 0] = -size, size
    without = gradients.clone()
    without[2] = 0.0
    (first, engine), (second, _) = (updates(g, order, automatic) for g in (gradients, without))
    guarantee = engine.accountant.guarantee
    allowed = guarantee.mu * engine.privacy_event.noise_std
    shown = np.linalg.norm(first - second)
    assert 0.05 * allowed < shown <= allowed * (1 + 1e-9)


def test_poisson_with_a_batch_size_that_does_not_divide(make_dice):
    """b/N is drawn as it is, so that the accounted probability is the drawn one."""
    run = make_dice(batch_order="poisson", loader={"batch_size": 7})
    run.epoch()
    event = run.engine.privacy_event
    assert (event.batch_size, event.dataset_size, event.num_steps) == (7, 60, 9)
    assert event.noise_std == 20.0 * CLIP / 7
    draws = [len(run.optimizer.context.plan.batch(k)) for k in range(9, 4009)]
    assert abs(np.mean(draws) - 7) < 5 * math.sqrt(60 * 7 / 60 * 53 / 60 / 4000)


def test_a_public_order_is_accounted_as_cyclic(make_dice):
    run = make_dice(batch_order="shuffled_once", order_seed=1)
    run.epoch()
    assert run.engine.privacy_event.batch_order is hsa.BatchOrder.CYCLIC


def test_cost_of_a_release_and_learning_rates(make_dice):
    """Every iterate is covered, and the update rule sees noisy updates only."""
    plain, run = make_dice(), make_dice(base={"momentum": 0.9, "weight_decay": 0.1})
    scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 1, 0.5)
    for _ in range(2):
        plain.epoch()
        run.epoch()
        run.engine.release()
        scheduler.step()
    assert run.engine.get_epsilon(DELTA) == plain.engine.get_epsilon(DELTA)
    assert run.engine.privacy_event == plain.engine.privacy_event
    assert run.optimizer.param_groups[0]["lr"] == RATE / 4


def test_one_after_the_other(make_run, make_dice, dataset):
    """A cyclic run, then DiceSGD from its model, then a cyclic run again: all compose."""
    generators = [{"noise_generator": torch.Generator().manual_seed(k)} for k in range(3)]
    first = make_run(**generators[0])
    first.epoch()
    engine, model = first.engine, first.model
    second = make_dice(engine=engine, model=model, loader={"dataset": dataset}, **generators[1])
    assert engine.get_epsilon(DELTA) == pytest.approx(alone(engine.accountant.recorders[0]))
    second.epoch()
    with pytest.raises(hsa.UnsupportedRunError, match="This run ended"):
        first.optimizer.step()
    third = make_run(engine=engine, model=model, **generators[2])
    third.epoch()
    with pytest.raises(hsa.UnsupportedRunError, match="This run ended"):
        second.optimizer.step()
    event = engine.privacy_event
    assert isinstance(event, dp_accounting.ComposedDpEvent)
    kinds = [type(part).__name__ for part in event.events]
    assert kinds == ["LastIterateDpEvent", "DiceSgdDpEvent", "LastIterateDpEvent"]
    together = hsa.LastIterateAccountant().compose(event).get_epsilon(DELTA)
    assert engine.get_epsilon(DELTA) == pytest.approx(together, rel=1e-9)
    assert together > max(alone(r) for r in engine.accountant.recorders)
    table = engine.compare(DELTA)
    assert table.best(table.runs[1][0]).accountant == "dice_sgd"
    text = engine.report(DELTA)
    assert f"epsilon = {engine.get_epsilon(DELTA):.4f}" in text
    assert "(3 runs)" in text


def alone(recorder):
    return hsa.LastIterateAccountant().compose(recorder.event()).get_epsilon(DELTA)


def test_a_history_never_looks_like_dp_sgd(make_dice):
    """Rows (noise multiplier, rate, steps) would be read as DP-SGD, which shows less."""
    run = make_dice()
    run.epoch()
    assert run.engine.accountant.history == [(0.0, 10 / 60, 6)]
    assert len(run.engine.accountant) == 6


def test_compare(make_dice):
    run = make_dice(batch_order="poisson")
    run.epoch()
    table = run.engine.compare(DELTA)
    best = table.best()
    assert best.accountant == "dice_sgd"
    assert best.epsilon == pytest.approx(run.engine.get_epsilon(DELTA))
    assert any("published" in row.accountant for row in table.rows)


@pytest.mark.parametrize("variant", ["sgd", "adam"])
def test_report(make_dice, variant):
    run = make_dice(
        variant, batch_order="poisson", error_max_grad_norm=CLIP, noise_multiplier=100.0,
        gradient_bound=BOUND,
    )  # fmt: skip
    run.epoch()
    text = run.engine.report(DELTA)
    claimed = hsa.DiceSgdAccountant(analysis="published").compose(run.engine.privacy_event)
    assert f"epsilon = {run.engine.get_epsilon(DELTA):.4f} at delta = 1e-05" in text
    assert f"would claim epsilon = {claimed.get_epsilon(DELTA):.4f}; do not use it" in text
    assert f"update rule {'Adam' if variant == 'adam' else 'SGD'}" in text
    assert "the sizes of the batches are shown to nobody" in text
    assert "every record drawn by itself for every step with probability b/n" in text
    assert text.count("\n") < 20
    by_status = {a.status.value: "" for a in run.engine.assumptions}
    for a in run.engine.assumptions:
        by_status[a.status.value] += a.text + "\n"
    assert "both clips exactly" in by_status["checked"]
    assert "error of the feedback is never released" in by_status["declared"]
    assert "plain SGD" not in by_status["checked"]
    assert make_dice().engine.assumptions  # before the first step, too


def test_report_of_several_runs(make_run, make_dice, dataset):
    first = make_run()
    first.epoch()
    run = make_dice(engine=first.engine, model=first.model, loader={"dataset": dataset})
    run.epoch()
    text = run.engine.report(DELTA)
    assert f"epsilon = {run.engine.get_epsilon(DELTA):.4f}" in text
    assert "runs: 2; epsilon and theorem are those of all together" in text
    assert "composition of: " in text


def test_the_number_of_steps_can_be_declared(make_dice):
    run = make_dice(num_steps=6)
    fixed = "number of steps and hyper-parameters fixed in advance"
    for batch in run.loader:
        run.step(batch)
        assert run.steps == 6 or fixed in [a.text for a in run.engine.assumptions]
    texts = [a.text for a in run.engine.assumptions]
    assert "all of the 6 steps declared in advance" in texts
    assert fixed not in texts
    before = run.engine.get_epsilon(DELTA)
    batch = next(iter(run.loader))
    with pytest.raises(hsa.UnsupportedRunError, match="Expected num_steps = 6 steps"):
        run.step(batch)
    assert run.engine.get_epsilon(DELTA) == before  # the model is still the accounted one


def test_looks_at_private_data(make_dice):
    run = make_dice()
    run.epoch()
    with run.engine.evaluate_on_private_data(stays_private=True):
        assert not run.model.training
    assert any("evaluate_on_private_data" in a.text for a in run.engine.assumptions)
    with run.engine.evaluate_on_private_data():
        pass
    for ask in (run.engine.get_epsilon, run.engine.report, run.engine.compare):
        with pytest.raises(hsa.UnsupportedRunError, match="was looked at"):
            ask(DELTA)


# --- noise for a target ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "variant", "spends"),
    [("cyclic", "sgd", True), ("cyclic", "automatic", True), ("poisson", "sgd", False)],
)
def test_noise_for_a_target(make_run, dataset, order, variant, spends):
    """Met from below, together with what an earlier run spent, and not by 1% less noise."""
    first, spent = make_run(noise_generator=torch.Generator().manual_seed(1)), 0.0
    if spends:
        first.epoch()
        spent = first.engine.get_epsilon(DELTA)
    engine, model, target = first.engine, first.model, spent + 1.0
    model, optimizer, loader = engine.make_private_with_epsilon(
        target_epsilon=target, target_delta=DELTA, epochs=2, module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=RATE),
        data_loader=DataLoader(dataset, batch_size=10), max_grad_norm=CLIP, batch_order=order,
        optimizer_class=DiceSGDOptimizer, error_max_grad_norm=ERROR_CLIP,
        automatic=variant == "automatic", gradient_bound=BOUND,
    )  # fmt: skip
    for _ in range(2):
        for features, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(features), labels).backward()
            optimizer.step()
    epsilon = engine.get_epsilon(DELTA)
    assert 0.99 * target < epsilon <= target
    accountant, event = hsa.LastIterateAccountant(), engine.privacy_event
    if spends:
        before, event = event.events
        accountant.compose(before)
    less = event.to_dict() | {"noise_std": 0.99 * event.noise_std}
    accountant.compose(hsa.DiceSgdDpEvent.from_dict(less))
    assert accountant.get_epsilon(DELTA) > target


def test_a_target_that_is_spent(make_dice):
    run = make_dice(noise_multiplier=1.0)
    run.epoch()
    with pytest.raises(ValueError, match="what the runs before spent"):
        run.engine.make_private_with_epsilon(
            target_epsilon=1.0, target_delta=DELTA, epochs=2, module=run.model,
            optimizer=torch.optim.SGD(run.model.parameters(), lr=RATE), max_grad_norm=CLIP,
            data_loader=run.loader, optimizer_class=DiceSGDOptimizer,
        )  # fmt: skip


def test_a_target_and_a_number_of_steps_have_to_agree(make_dice):
    run = make_dice()
    arguments = {
        "module": nn.Linear(5, 3), "data_loader": run.loader, "max_grad_norm": CLIP,
        "optimizer_class": DiceSGDOptimizer, "target_epsilon": 1.0, "target_delta": DELTA,
    }  # fmt: skip
    arguments["optimizer"] = torch.optim.SGD(arguments["module"].parameters(), lr=RATE)
    with pytest.raises(ValueError, match="Expected num_steps = 12"):
        run.engine.make_private_with_epsilon(epochs=2, num_steps=11, **arguments)


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"optimizer_class": object}, hsa.UnsupportedRunError, "BlockCoordinateOptimizer is built"),
        ({"optimizer_class": type("Own", (DiceSGDOptimizer,), {})}, hsa.UnsupportedRunError, "Own"),
        ({"optimizer_class": None}, hsa.UnsupportedRunError, "error_max_grad_norm, automatic and"),
        ({"optimizer_class": DiceAdamOptimizer}, hsa.UnsupportedRunError, "Adam or torch.optim.Ad"),
        ({"loss_geometry": hsa.LossGeometry.convex(1.0)}, hsa.UnsupportedRunError, "of the loss"),
        ({"loss_geometry": "auto", "feature_norm": 1.0}, hsa.UnsupportedRunError, "loss_geometry"),
        ({"projection_radius": 5.0}, hsa.UnsupportedRunError, "not in the algorithm"),
        ({"batch_order": "poisson", "max_batch_size": 30}, hsa.UnsupportedRunError, "capped batch"),
        ({"learning_rate_schedule": 0.1}, hsa.UnsupportedRunError, "learning rate costs nothing"),
        ({"max_grad_norm": [0.1, 0.1]}, hsa.UnsupportedRunError, "max_grad_norm to be one number"),
        ({"error_max_grad_norm": [0.1]}, hsa.UnsupportedRunError, "error_max_grad_norm to be one"),
        ({"error_max_grad_norm": 0.0}, ValueError, "error_max_grad_norm > 0"),
        ({"max_grad_norm": 1e-20, "model": nn.Linear(5, 3)}, ValueError, "underflow"),
        ({"gradient_bound": 0.0}, ValueError, "gradient_bound"),
        ({"gradient_bound": "1"}, TypeError, "gradient_bound"),
        ({"automatic": 1}, TypeError, "automatic to be True or False"),
        ({"noise_multiplier": -1.0}, ValueError, "noise_multiplier >= 0"),
        ({"noise_multiplier": "1"}, TypeError, "noise_multiplier"),
        ({"noise_generator": 3}, TypeError, "torch.Generator"),
        ({"loss_reduction": "none"}, (ValueError, hsa.UnsupportedRunError), "none"),
        ({"num_steps": 0}, ValueError, "num_steps >= 1"),
        ({"clipping": "per_layer"}, hsa.UnsupportedRunError, "flat"),
        ({"batch_order": "reshuffled", "order_seed": 3}, hsa.UnsupportedRunError, "order_seed"),
        ({"loader": {"batch_size": 7}}, hsa.UnsupportedRunError, "divides the 60 records"),
        ({"loader": {"shuffle": True}}, hsa.UnsupportedRunError, "shuffle=True"),
    ],
)  # fmt: skip
def test_arguments_that_are_refused(make_dice, arguments, error, text):
    with pytest.raises(error, match=text):
        make_dice(**arguments)


def test_a_refused_call_leaves_model_and_optimizer_alone(make_dice):
    model = nn.Linear(5, 3).double()
    with pytest.raises(hsa.UnsupportedRunError):
        make_dice(model=model, projection_radius=5.0)
    assert not model._forward_hooks
    make_dice(model=model).epoch()


def test_moments_of_another_run_are_refused(make_run):
    """They may hold gradients without noise: the first step would show them."""
    model = nn.Linear(5, 3)
    used = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 5)).sum().backward()
    used.step()
    with pytest.raises(hsa.UnsupportedRunError, match="took no step, got one with a state"):
        make_run(model=model, optimizer=used, optimizer_class=DiceSGDOptimizer, loss_geometry=None)


def skip_a_batch(run):
    batches = iter(run.loader)
    next(batches)
    run.step(next(batches))


def own_loader(run):
    run.step(next(iter(DataLoader(run.loader.dataset, batch_size=10))))


def a_batch_twice(run):
    batch = next(iter(run.loader))
    run.step(batch)
    run.step(batch)


def fewer_rows(run):
    run.step([part[:9] for part in next(iter(run.loader))])


def more_rows(run):
    run.step([torch.cat([part, part[:1]]) for part in next(iter(run.loader))])


def two_forwards(run):
    batch = next(iter(run.loader))
    run.model(batch[0])
    run.step(batch)


def two_backwards(run):
    run.optimizer.zero_grad()
    features, labels = next(iter(run.loader))
    for _ in range(2):
        run.criterion(run.model(features), labels).backward()
    run.optimizer.step()


def restarted(run):
    first, second = iter(run.loader), iter(run.loader)
    run.step(next(second))
    run.step(next(first))


def changed_parameters(run):
    with torch.no_grad():
        run.plain_model.bias.add_(1.0)
    run.step(next(iter(run.loader)))


def loaded_parameters(run):
    run.plain_model.load_state_dict({k: v + 1 for k, v in run.plain_model.state_dict().items()})
    run.step(next(iter(run.loader)))


def perturbed_gradients(run):
    batch = next(iter(run.loader))
    old = run.plain_model.bias.detach().clone()
    run.plain_model.bias.data += 1.0
    run.backward(batch)
    run.plain_model.bias.data = old
    run.optimizer.step()


def another_base(run):
    batch = next(iter(run.loader))
    run.backward(batch)
    run.optimizer.original_optimizer = torch.optim.SGD(run.plain_model.parameters(), lr=1.0)
    run.optimizer.step()


def another_generator(run):
    run.backward(next(iter(run.loader)))
    run.optimizer.generator = torch.Generator()
    run.optimizer.step()


def seeded_again(run):
    run.optimizer.generator.manual_seed(4)
    run.step(next(iter(run.loader)))


def base_hook(run):
    run.optimizer.original_optimizer.register_step_pre_hook(lambda *_: None)
    run.step(next(iter(run.loader)))


def changed(name, value):
    def apply(run):
        setattr(run.optimizer, name, value)
        run.step(next(iter(run.loader)))

    apply.__name__ = name
    return apply


def long_gradient(run):
    features, labels = next(iter(run.loader))
    run.step([10 * features, labels])


def another_bound(run):
    run.optimizer.gradient_bound = 1e6
    long_gradient(run)


def moments_from_elsewhere(run):
    other = torch.optim.SGD(run.plain_model.parameters(), lr=1.0, momentum=0.9)
    run.backward(next(iter(run.loader)))
    for p in run.plain_model.parameters():
        other.state[p]["momentum_buffer"] = p.grad  # as if it had trained without noise
    run.optimizer.load_state_dict(other.state_dict())


def moments_without_noise(run):
    """The inner optimizer steps on the gradient of the records, and the model is put back."""
    batch = next(iter(run.loader))
    old = copy.deepcopy(run.plain_model.state_dict())
    run.backward(batch)
    base = run.optimizer.original_optimizer
    base.param_groups[0]["momentum"] = 0.9
    base.step()
    run.plain_model.load_state_dict(old)
    run.optimizer.step()


def nan_gradient(run):
    features, labels = next(iter(run.loader))
    run.step([math.nan * features, labels])


def frozen(run):
    run.backward(next(iter(run.loader)))
    run.plain_model.bias.requires_grad_(False)
    run.optimizer.step()


def steps_twice_on_it(run):
    run.backward(next(iter(run.loader)))
    run.optimizer.step()
    run.optimizer.step()


def moves_by_itself(run):
    run.backward(next(iter(run.loader)))
    run.optimizer.pre_step()
    run.optimizer.original_optimizer.step()
    run.optimizer.step()


MISUSE = [
    (skip_a_batch, "used batch 1, expected batch 0"),
    (own_loader, "used no new batch, expected batch 0"),
    (a_batch_twice, "used batch 0, expected batch 1|no new batch"),
    (fewer_rows, "used 9 rows, expected batch_size = 10"),
    (more_rows, "used 11 rows, expected batch_size = 10"),
    (two_forwards, "follows 2 training passes|no per-example gradients"),
    (two_backwards, "gradients of 2 batches"),
    (restarted, "second iterator"),
    (changed_parameters, "parameters were changed outside"),
    (loaded_parameters, "parameters were changed outside"),
    (perturbed_gradients, "gradients at other parameters"),
    (another_base, "another original_optimizer"),
    (another_generator, "another noise generator"),
    (seeded_again, "noise generator is in a state"),
    (base_hook, "without step hooks"),
    (changed("max_grad_norm", 0.05), "uses max_grad_norm = 0.05, expected 0.1"),
    (changed("error_max_grad_norm", 0.05), "uses error_max_grad_norm = 0.05"),
    (changed("noise_multiplier", 0.1), "uses noise_multiplier = 0.1"),
    (changed("expected_batch_size", 20), "uses expected_batch_size = 20"),
    (changed("automatic", True), "uses automatic = True"),
    (changed("step_hook", print), "step_hook"),
    (moments_from_elsewhere, "moments from elsewhere|with momentum or moments"),
    (moments_without_noise, "momentum or moments that the last step did not leave"),
    (another_bound, "expected at most the declared gradient_bound = 2.0001"),
    (changed("grad_scale", 1.0), "GradScaler"),
    (long_gradient, "expected at most the declared gradient_bound = 2.0001"),
    (nan_gradient, "norm is not finite"),
    (frozen, "expected the 2 of the construction"),
    (steps_twice_on_it, "sum of clipped gradients that does not come from the pieces"),
    (moves_by_itself, "interrupted while it changed the parameters"),
]

# Refused before a step looked at the records; the model is still that of the last step.
NOTHING_HAPPENED = ["restarted", "moments_from_elsewhere", "grad_scale"]


@pytest.mark.parametrize("epochs", [0, 1])
@pytest.mark.parametrize(("misuse", "text"), MISUSE, ids=[m.__name__ for m, _ in MISUSE])
def test_what_the_loop_does_otherwise(make_dice, misuse, text, epochs):
    """At the first step and in the middle: refused, and then there is no epsilon and no event."""
    generator = torch.Generator().manual_seed(4)
    if misuse is seeded_again and not epochs:
        pytest.skip("nothing to repeat")
    run = make_dice(gradient_bound=BOUND, noise_generator=generator)
    for _ in range(epochs):
        run.epoch()
    run.engine.get_epsilon(DELTA) if epochs else None
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        misuse(run)
    if not run.steps or misuse.__name__ in NOTHING_HAPPENED:
        return
    for ask in (run.engine.get_epsilon, run.engine.report, run.engine.compare):
        with pytest.raises(hsa.UnsupportedRunError):
            ask(DELTA)
    with pytest.raises(hsa.UnsupportedRunError):
        run.engine.release()
    with pytest.raises(hsa.UnsupportedRunError):
        run.step(next(iter(run.loader)))
    with pytest.raises(hsa.UnsupportedRunError):
        make_dice(engine=run.engine)


@pytest.mark.parametrize("make", ["make_dice", "make_run"])
def test_a_second_attempt_after_a_refused_first_step(make, request):
    """A refusal may depend on the records: that it did not is the user's word."""
    make = request.getfixturevalue(make)
    run = make()
    with pytest.raises(hsa.UnsupportedRunError, match="expected batch_size = 10"):
        fewer_rows(run)
    again = make(
        engine=run.engine, model=run.model, noise_generator=torch.Generator().manual_seed(2)
    )
    again.epoch()
    assert any("earlier attempt" in a.text for a in again.engine.assumptions)


def test_no_event_after_a_refused_step(make_dice):
    run = make_dice(gradient_bound=BOUND)
    run.epoch()
    with pytest.raises(hsa.UnsupportedRunError):
        long_gradient(run)
    with pytest.raises(hsa.UnsupportedRunError, match="was refused or interrupted"):
        _ = run.engine.privacy_event


def test_an_empty_poisson_batch_is_a_step(make_dice):
    """Skipping it, which shows that it was empty, is noticed."""
    run = make_dice(batch_order="poisson", loader={"batch_size": 1})

    def skip_empty_batches():
        for batch in itertools.chain(run.loader, run.loader):
            if len(batch[0]):
                run.step(batch)

    with pytest.raises(hsa.UnsupportedRunError, match="expected batch"):
        skip_empty_batches()


def test_an_interrupted_step_ends_the_run(make_dice):
    run = make_dice()
    run.epoch()

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    run.backward(next(iter(run.loader)))
    run.optimizer.original_optimizer.step = interrupt
    with pytest.raises(KeyboardInterrupt):
        run.optimizer.step()
    with pytest.raises(hsa.UnsupportedRunError, match="step 7 was interrupted"):
        run.engine.get_epsilon(DELTA)


def test_a_changed_model_is_not_the_iterate(make_dice, tmp_path):
    run = make_dice()
    run.epoch()
    with torch.no_grad():
        run.plain_model.bias.add_(1.0)
    for ask in (
        lambda: run.engine.get_epsilon(DELTA),
        run.engine.release,
        lambda: run.engine.save_checkpoint(path=tmp_path / "c.pt"),
        lambda: make_dice(engine=run.engine),
    ):
        with pytest.raises(hsa.UnsupportedRunError, match="changed outside"):
            ask()


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(5, 3).double()
        self.register_buffer("seen", torch.zeros(5, dtype=torch.float64))

    def forward(self, x):
        if self.training:
            self.seen += x.detach().sum(dim=0)
        return self.line(x)


def test_buffers_that_collect_data(make_dice):
    run = make_dice(model=Counting())
    with pytest.raises(hsa.UnsupportedRunError, match="buffer of the module was changed"):
        run.epoch()


def test_the_slot_for_hooks_is_taken(make_dice):
    run = make_dice()
    with pytest.raises(hsa.UnsupportedRunError, match="leaves out what the error shows"):
        run.optimizer.attach_step_hook(print)


def test_the_account_by_hand_has_to_agree(make_dice):
    run = make_dice()
    run.epoch()
    event = run.engine.privacy_event
    by_hand = run.optimizer.privacy_event(dataset_size=60, batch_order="cyclic")
    assert by_hand == event
    for wrong in (
        {"dataset_size": 600, "batch_order": "cyclic"},
        {"dataset_size": 60, "batch_order": "poisson"},
        {"dataset_size": 60, "batch_order": "cyclic", "gradient_bound": BOUND},
    ):
        with pytest.raises(hsa.UnsupportedRunError, match="which was recorded"):
            run.optimizer.privacy_event(**wrong)


# --- going on elsewhere ---------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [3, 6])
@pytest.mark.parametrize(
    ("order", "variant"), [*[(order, "sgd") for order in ORDERS], ("cyclic", "adam")]
)
def test_a_run_goes_on_exactly(make_dice, tmp_path, order, variant, stop):
    """The noise is 0: then model and error depend on batches, error and moments only."""
    arguments = {"batch_order": order, "noise_multiplier": 0.0}
    if order in SECRET:
        arguments |= {"order_seed": 7, "order_is_secret": True}
    base = {"momentum": 0.9} if variant == "sgd" else None
    whole, first, second = (make_dice(variant, base=base, **arguments) for _ in range(3))
    take(whole, 12)
    take(first, stop)
    path = tmp_path / "c.pt"
    first.engine.save_checkpoint(path=path, **PRIVATE)
    torch.load(path, weights_only=True)
    second.engine.load_checkpoint(path=path)
    np.testing.assert_array_equal(error_of(second), error_of(first))
    take(second, 12)
    np.testing.assert_array_equal(weights(second), weights(whole))
    np.testing.assert_array_equal(error_of(second), error_of(whole))
    assert second.engine.privacy_event == whole.engine.privacy_event


def test_pieces_go_on_too(make_dice, tmp_path):
    """Saved between two batches that came in pieces; in the middle of one nothing can go on."""
    run, other, path = make_dice(), make_dice(), tmp_path / "c.pt"
    with BatchMemoryManager(
        data_loader=run.loader, max_physical_batch_size=4, optimizer=run.optimizer
    ) as pieces:
        for count, batch in enumerate(pieces, 1):
            run.step(batch)
            if count == 6:  # of 3 pieces each
                run.engine.save_checkpoint(path=path, **PRIVATE)
                break
            if count > 3:
                with pytest.raises(ValueError, match="a piece of one"):
                    run.engine.save_checkpoint(path=path, **PRIVATE)
    other.engine.load_checkpoint(path=path)
    with BatchMemoryManager(
        data_loader=other.loader, max_physical_batch_size=4, optimizer=other.optimizer
    ) as pieces:
        other.epoch(pieces)
    assert other.steps == 6


def test_without_the_private_state(make_dice, tmp_path, caplog):
    """What is released can be saved, but the run cannot go on from it, and says so."""
    first, second = make_dice(), make_dice()
    first.epoch()
    path = tmp_path / "c.pt"
    for arguments in ({}, {"stays_private": True}):
        caplog.clear()
        first.engine.save_checkpoint(path=path, **arguments)
        assert "lacks the error of the feedback, which is data of the records" in caplog.text
        assert "cannot go on from it" in caplog.text
        assert "private" not in torch.load(path, weights_only=True)["hidden_state_run"]
        with pytest.raises(hsa.UnsupportedRunError, match="lacks the error of the feedback"):
            second.engine.load_checkpoint(path=path)
    assert second.steps == 0
    second.epoch()  # nothing was loaded
    fresh = HiddenStatePrivacyEngine()
    fresh.load_checkpoint(path=path, module=make_dice().model)  # as an ended run
    assert fresh.get_epsilon(DELTA) == first.engine.get_epsilon(DELTA)
    assert fresh.privacy_event == first.engine.privacy_event
    assert "update rule any" in fresh.report(DELTA)


MARK = 777.25  # the error of the one record below, a value that stands out
NEEDLE = np.float64(MARK).tobytes()


def marked():
    """An engine whose run has an error of MARK in one coordinate."""
    engine, model = HiddenStatePrivacyEngine(), nn.Linear(1, 1, bias=False).double()
    records = TensorDataset(torch.full((1, 1), MARK + 1, dtype=torch.float64))
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.Adam(model.parameters(), lr=0.1),
        data_loader=DataLoader(records, batch_size=1), noise_multiplier=1.0, max_grad_norm=1.0,
        optimizer_class=DiceAdamOptimizer, noise_generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    for (batch,) in loader:
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = optimizer.run_state_dict(include_private_state=True)
    assert float(state["private"]["error"][0]) == MARK
    return engine, model, optimizer, loader


def everything_in(value):
    """All numbers that can be reached from containers and tensors."""
    if isinstance(value, torch.Tensor):
        return value.detach().reshape(-1).tolist()
    if isinstance(value, dict):
        return [n for v in value.values() for n in everything_in(v)]
    if isinstance(value, list | tuple):
        return [n for v in value for n in everything_in(v)]
    return [value] if isinstance(value, float) else []


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def test_the_error_is_nowhere_by_default(tmp_path):
    engine, model, optimizer, _ = marked()
    path = tmp_path / "c.pt"
    for arguments in ({}, {"stays_private": True}):
        engine.save_checkpoint(path=path, **arguments)
        content = torch.load(path, weights_only=True)
        assert not {MARK, MARK + 1} & set(everything_in(content))  # nor the gradient's norm
        assert NEEDLE not in saved(content)
    engine.save_checkpoint(path=path, **PRIVATE)
    assert NEEDLE in saved(torch.load(path, weights_only=True))
    states = [optimizer.state_dict(), dict(optimizer.state), model.state_dict(),
              engine.accountant.state_dict()]  # fmt: skip
    assert not {MARK, MARK + 1} & set(everything_in(states))
    texts = [repr(engine), repr(optimizer), str(vars(optimizer)), engine.report(DELTA),
             str(vars(engine)), str(engine.compare(DELTA))]  # fmt: skip
    for text in texts:
        assert "777" not in text
        assert "778" not in text


def test_nothing_that_holds_the_error_can_be_copied():
    engine, model, optimizer, _ = marked()
    for value in (engine, optimizer, vars(optimizer)["_hidden"]):
        for copier in (pickle.dumps, copy.deepcopy, saved):
            with pytest.raises((hsa.UnsupportedRunError, TypeError, AttributeError)):
                copier(value)
    assert NEEDLE not in saved(copy.deepcopy(model._module).state_dict())


def test_the_error_is_not_released(make_dice, tmp_path):
    run = make_dice()
    run.epoch()
    with pytest.raises(ValueError, match="nor the error of DiceSGD"):
        run.engine.save_checkpoint(path=tmp_path / "c.pt", include_private_state=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("clip_norm|max_grad_norm", {"max_grad_norm": 0.2}),
        ("noise_std|noise_multiplier", {"noise_multiplier": 10.0}),
        ("error_clip_norm", {"error_max_grad_norm": 0.05}),
        ("gradient_bound", {"gradient_bound": BOUND}),
        ("automatic", {"automatic": True}),
        ("batch_order", {"batch_order": "poisson"}),
        ("batch_size", {"loader": {"batch_size": 20}}),
        ("order_of_the_records", {"loader": {"sampler": list(reversed(range(60)))}}),
        ("num_steps", {"num_steps": 12}),
        ("optimizer_class", {"variant": "adam"}),
    ],
)
def test_the_field_that_differs_is_named(make_dice, tmp_path, field, arguments):
    run, path = make_dice(), tmp_path / "c.pt"
    run.epoch()
    run.engine.save_checkpoint(path=path, **PRIVATE)
    other = make_dice(**arguments)
    with pytest.raises(ValueError, match=f"of another run: expected ({field}) = "):
        other.engine.load_checkpoint(path=path)
    assert other.steps == 0
    assert not error_or_zero(other).any()
    other.epoch()


def error_or_zero(run):
    return flat([run.optimizer._hidden.error(i) for i in range(2)])


def test_runs_of_the_other_kind(make_run, make_dice, tmp_path, dataset):
    plain, path = make_run(), tmp_path / "c.pt"
    plain.epoch()
    plain.engine.save_checkpoint(path=path)
    dice = make_dice(model=nn.Linear(5, 3), loader={"dataset": dataset})
    with pytest.raises(ValueError, match=r"of another run|state of a DiceRecorder"):
        dice.engine.load_checkpoint(path=path)
    dice.epoch()
    dice.engine.save_checkpoint(path=path, **PRIVATE)
    with pytest.raises(ValueError, match=r"of another run|state of a RunRecorder"):
        make_run().engine.load_checkpoint(path=path)


def test_several_runs_in_a_checkpoint(make_run, make_dice, tmp_path, dataset):
    engines = []
    for k in range(2):
        first = make_run(noise_generator=torch.Generator().manual_seed(k))
        if not engines:
            first.epoch()
        engines.append(
            make_dice(engine=first.engine, model=first.model, loader={"dataset": dataset})
        )
    run, fresh = engines
    run.epoch()
    path = tmp_path / "c.pt"
    run.engine.save_checkpoint(path=path, **PRIVATE)
    fresh.engine.load_checkpoint(path=path)
    fresh.epoch()
    kinds = [type(e).__name__ for e in fresh.engine.privacy_event.events]
    assert kinds == ["LastIterateDpEvent", "DiceSgdDpEvent"]
    assert fresh.engine.privacy_event.events[1].num_steps == 12


def test_damaged_private_state(make_dice, tmp_path):
    run, path = make_dice(), tmp_path / "c.pt"
    run.epoch()
    run.engine.save_checkpoint(path=path, **PRIVATE)
    content = torch.load(path, weights_only=True)
    private = content["hidden_state_run"]["private"]
    for dice in (
        {},
        private["dice"] | {"num_steps": 5},
        private["dice"] | {"settings": {}},
        private["dice"] | {"private": private["dice"]["private"] | {"error": []}},
    ):
        content["hidden_state_run"]["private"] = {"dice": dice}
        torch.save(content, path)
        other = make_dice()
        with pytest.raises(ValueError, match=r"damaged|another run|shapes"):
            other.engine.load_checkpoint(path=path)
        assert other.steps == 0
        other.epoch()


@pytest.mark.parametrize("make", ["make_dice", "make_run"])
def test_a_run_goes_on_once(make, tmp_path, request):
    """No bound covers what two continuations show together."""
    make_dice = request.getfixturevalue(make)
    run, path = make_dice(), tmp_path / "c.pt"
    run.epoch()
    run.engine.save_checkpoint(path=path, **PRIVATE)
    second, third = make_dice(), make_dice()
    second.engine.load_checkpoint(path=path)
    with pytest.raises(hsa.UnsupportedRunError, match="loaded by another engine"):
        run.epoch()
    assert run.engine.get_epsilon(DELTA) == second.engine.get_epsilon(DELTA)
    third.engine.load_checkpoint(path=path)  # `second` showed nothing yet
    with pytest.raises(hsa.UnsupportedRunError, match="loaded by another engine"):
        second.epoch()
    assert any("in one place only" in a.text for a in third.engine.assumptions)
    third.epoch()
    fourth = make_dice()
    with pytest.raises(ValueError, match="that of step 6: 12 steps were taken"):
        fourth.engine.load_checkpoint(path=path)
    third.engine.release()
    with pytest.raises(ValueError, match="after step 12 was released and would be forgotten"):
        fourth.engine.load_checkpoint(path=path, discard_later_steps=True)


@pytest.mark.parametrize("make", ["make_dice", "make_run"])
def test_a_script_that_seeds_and_goes_on(make, tmp_path, request):
    """Started again with the same seed it would repeat the noise of its first steps."""
    make, path = request.getfixturevalue(make), tmp_path / "c.pt"
    run, again = (make(noise_generator=torch.Generator().manual_seed(4)) for _ in range(2))
    run.epoch()
    run.engine.save_checkpoint(path=path, **PRIVATE)
    again.engine.load_checkpoint(path=path)
    with pytest.raises(hsa.UnsupportedRunError, match="step 7: the noise generator is in a state"):
        again.epoch()


def test_the_state_by_hand_is_not_loaded_past_the_record(make_dice):
    run, other = make_dice(), make_dice()
    run.epoch()
    state = run.optimizer.run_state_dict(include_private_state=True)
    with pytest.raises(hsa.UnsupportedRunError, match=r"Expected engine\.load_checkpoint"):
        other.optimizer.load_run_state_dict(state)


@pytest.mark.cuda
def test_cuda(make_dice, tmp_path):
    """The same steps as on the CPU, the error on the device, and a checkpoint that goes on."""
    ends = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(3)
        runs = [
            make_dice(model=nn.Linear(5, 3).double().to(device), noise_multiplier=0.0)
            for _ in range(2)
        ]
        for run, other in (runs, (runs[1], None)):
            for features, labels in run.loader:
                run.step((features.to(device), labels.to(device)))
            if other is not None:
                run.engine.save_checkpoint(path=tmp_path / "c.pt", **PRIVATE)
                other.engine.load_checkpoint(path=tmp_path / "c.pt")
        assert run.optimizer._hidden.error(0).device.type == device
        ends.append(np.concatenate([weights(run), error_of(run)]))
        assert run.engine.privacy_event.num_steps == 12
    np.testing.assert_allclose(*ends, atol=1e-12)
