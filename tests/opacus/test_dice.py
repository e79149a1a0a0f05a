"""DiceSGD through the engine: the paper's steps on the plan's batches, their account, refusals."""

import math

import dp_accounting
import numpy as np
import pytest
import torch
from dice import adam_step, automatic_step, sgd_step
from dp_accounting import NeighboringRelation
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus_dice import (
    BOUND,
    CLIP,
    DELTA,
    ERROR_CLIP,
    ORDERS,
    PRIVATE,
    RATE,
    error_of,
    flat,
    weights,
)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hidden_state_accountants as hsa
from hidden_state_adapters.opacus import (
    BallProjection,
    Batches,
    DiceAdamOptimizer,
    DiceSGD,
    DiceSGDOptimizer,
    HiddenStatePrivacyEngine,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


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
        grad_sample_mode="hooks",
    )  # fmt: skip
    plan, same_noise = run.optimizer.run.declared.plan, torch.Generator().manual_seed(5)
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


@pytest.mark.parametrize(("order", "workers"), [("cyclic", 0), ("full", 0), ("poisson", 2)])
def test_pieces_of_a_batch_are_one_step(make_dice, order, workers):
    """BatchMemoryManager: the same end, the same account."""
    batches = Batches(order, seed=3, seed_is_secret=True) if order == "poisson" else order
    ends, events = [], []
    for size in (100, 4):
        run = make_dice(
            batch_order=batches, noise_generator=torch.Generator().manual_seed(1),
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


def test_a_known_loss_of_a_linear_head(make_dice):
    """Its gradients follow from the formula, and its Lipschitz constant is the gradient bound."""
    known = {"feature_norm": 1.0, "loss_geometry": "auto", "criterion": nn.CrossEntropyLoss()}
    runs = [make_dice(noise_multiplier=0.0, **more) for more in ({}, known)]
    for run in runs:
        run.epoch()
    np.testing.assert_allclose(*map(weights, runs), atol=1e-12)
    np.testing.assert_allclose(*map(error_of, runs), atol=1e-12)
    assert runs[1].engine.privacy_event.gradient_bound == pytest.approx(2.0)


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
        assert run.optimizer._errors[0].device.type == device
        ends.append(np.concatenate([weights(run), error_of(run)]))
        assert run.engine.privacy_event.num_steps == 12
    np.testing.assert_allclose(*ends, atol=1e-12)


# --- the account ----------------------------------------------------------------------------------


@pytest.mark.parametrize("relation", list(NeighboringRelation))
@pytest.mark.parametrize("order", ORDERS)
def test_event_and_epsilon(make_dice, order, relation):
    engine = HiddenStatePrivacyEngine(neighboring_relation=relation)
    adds = relation is NeighboringRelation.ADD_OR_REMOVE_ONE
    if adds and order != "poisson":
        with pytest.raises(hsa.UnsupportedRunError, match="ADD_OR_REMOVE_ONE"):
            make_dice(engine=engine, batch_order=order)
        return
    rate = 1 / 6 if adds else None
    dealt = Batches("poisson", sampling_rate=rate, batch_size=10) if adds else order
    run = make_dice(engine=engine, batch_order=dealt, gradient_bound=BOUND)
    run.epoch()
    batch = 60 if order == "full" else 10
    event = hsa.DiceSgdDpEvent(
        noise_std=20.0 * CLIP / batch, clip_norm=CLIP, error_clip_norm=ERROR_CLIP,
        batch_size=batch, dataset_size=60, num_steps=60 // batch, batch_order=order,
        gradient_bound=BOUND, sampling_rate=rate,
    )  # fmt: skip
    assert run.engine.privacy_event == event
    accountant = hsa.DiceSgdAccountant(relation).compose(event)
    assert run.engine.get_epsilon(DELTA) == accountant.get_epsilon(DELTA)


def updates(gradients, order, automatic):
    """The mean updates without noise of 5 epochs with constant gradients, and their event."""
    engine, model = HiddenStatePrivacyEngine(), nn.Linear(3, 1, bias=False).double()
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=DataLoader(TensorDataset(gradients), batch_size=2), noise_multiplier=1.0,
        max_grad_norm=0.5, batch_order=order, noise_generator=torch.Generator().manual_seed(0),
        mechanism=DiceSGD(0.2, automatic, float(gradients.norm(dim=1).max())),
    )  # fmt: skip
    seen = []
    for _ in range(5):
        for (rows,) in loader:
            optimizer.zero_grad()
            model(rows).mean().backward()
            optimizer.step()
            seen.append(flat([p.grad for p in model.parameters()]))
    return np.array(seen), engine


@pytest.mark.parametrize(("order", "automatic"), [("cyclic", False), ("full", True)])
@pytest.mark.parametrize("size", [0.1, 3.0, 300.0])
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
    """Rate and divisor are those of Opacus' engine, and the accounted rate is the drawn one."""
    run = make_dice(batch_order="poisson", loader={"batch_size": 7})
    run.epoch()
    event = run.engine.privacy_event
    assert (event.batch_size, event.dataset_size, event.num_steps) == (6, 60, 9)
    assert event.sampling_rate == 1 / 9
    assert event.noise_std == 20.0 * CLIP / 6
    draws = [len(run.optimizer.run.declared.plan.batch(k)) for k in range(9, 4009)]
    assert abs(np.mean(draws) - 60 / 9) < 5 * math.sqrt(60 / 9 * 8 / 9 / 4000)


def test_a_public_order_is_accounted_as_cyclic(make_dice):
    run = make_dice(batch_order=Batches("shuffled_once", seed=1))
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
    shared = {"engine": first.engine, "model": first.model}
    second = make_dice(**shared, loader={"dataset": dataset}, **generators[1])
    second.epoch()
    with pytest.raises(hsa.UnsupportedRunError, match="This run ended"):
        first.optimizer.step()
    make_run(**shared, **generators[2]).epoch()
    with pytest.raises(hsa.UnsupportedRunError, match="This run ended"):
        second.optimizer.step()
    event = first.engine.privacy_event
    assert isinstance(event, dp_accounting.ComposedDpEvent)
    kinds = [type(part).__name__ for part in event.events]
    assert kinds == ["LastIterateDpEvent", "DiceSgdDpEvent", "LastIterateDpEvent"]
    together, *alone = (
        hsa.LastIterateAccountant().compose(part).get_epsilon(DELTA)
        for part in (event, *event.events)
    )
    assert first.engine.get_epsilon(DELTA) == pytest.approx(together, rel=1e-9)
    assert together > max(alone)
    table = first.engine.compare(DELTA)
    assert table.best(table.runs[1][0]).accountant == "dice_sgd"
    assert "(3 runs)" in first.engine.report(DELTA)


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
        mechanism=DiceSGD(ERROR_CLIP, automatic=variant == "automatic", gradient_bound=BOUND),
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


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"optimizer_class": object}, hsa.UnsupportedRunError, "checks their steps only"),
        ({"optimizer_class": type("Own", (DiceSGDOptimizer,), {})}, hsa.UnsupportedRunError, "Own"),
        ({"optimizer_class": DiceAdamOptimizer}, hsa.UnsupportedRunError, "Adam or torch.optim.Ad"),
        ({"loss_geometry": hsa.LossGeometry.convex(1.0)}, hsa.UnsupportedRunError, "of the loss"),
        ({"after": BallProjection(5.0)}, hsa.UnsupportedRunError, "not in the algorithm"),
        ({"batch_order": Batches("poisson", max_batch_size=30)}, hsa.UnsupportedRunError,
         "capped batch"),
        ({"schedule": 0.1}, hsa.UnsupportedRunError, "learning rate costs nothing"),
        ({"max_grad_norm": [0.1, 0.1]}, hsa.UnsupportedRunError, "one max_grad_norm"),
        ({"error_max_grad_norm": 0.0}, ValueError, "error_max_grad_norm > 0"),
        ({"max_grad_norm": 1e-20, "model": nn.Linear(5, 3)}, ValueError, "underflow"),
        ({"gradient_bound": 0.0}, ValueError, "gradient_bound"),
    ],
)  # fmt: skip
def test_arguments_that_are_refused(make_dice, arguments, error, text):
    with pytest.raises(error, match=text):
        make_dice(**arguments)


def test_moments_of_another_run_are_refused(make_run):
    """They may hold gradients without noise: the first step would show them."""
    model = nn.Linear(5, 3)
    used = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 5)).sum().backward()
    used.step()
    with pytest.raises(hsa.UnsupportedRunError, match="took no step, got one with a state"):
        make_run(model=model, optimizer=used, optimizer_class=DiceSGDOptimizer, loss_geometry=None)


def test_moments_from_elsewhere_are_refused(make_dice):
    run = make_dice(grad_sample_mode="hooks")
    other = torch.optim.SGD(run.plain_model.parameters(), lr=1.0, momentum=0.9)
    run.backward(next(iter(run.loader)))
    for p in run.plain_model.parameters():
        other.state[p]["momentum_buffer"] = p.grad  # as if it had trained without noise
    with pytest.raises(hsa.UnsupportedRunError, match="with momentum or moments"):
        run.optimizer.load_state_dict(other.state_dict())


def test_a_gradient_beyond_the_bound_ends_the_run(make_dice):
    """What every optimizer refuses is in tests/misuse/misuse.py."""
    run = make_dice(gradient_bound=BOUND, grad_sample_mode="hooks")
    run.epoch()
    features, labels = next(iter(run.loader))
    run.optimizer.zero_grad()
    (10 * run.criterion(run.model(features), labels)).backward()
    with pytest.raises(hsa.UnsupportedRunError, match=r"gradient_bound >= .*, the largest"):
        run.optimizer.step()
    for ask in (run.engine.get_epsilon, run.engine.report, run.engine.compare):
        with pytest.raises(hsa.UnsupportedRunError):
            ask(DELTA)
    with pytest.raises(hsa.UnsupportedRunError):
        make_dice(engine=run.engine)


@pytest.mark.parametrize("make", ["make_dice", "make_run"])
def test_a_second_attempt_after_a_refused_first_step(make, request):
    """A refusal may depend on the records: that it did not is the user's word."""
    make = request.getfixturevalue(make)
    run = make()
    with pytest.raises(hsa.UnsupportedRunError, match="expected batch_size = 10"):
        run.step([part[:9] for part in next(iter(run.loader))])
    again = make(
        engine=run.engine, model=run.model, noise_generator=torch.Generator().manual_seed(2)
    )
    again.epoch()
    assert any("earlier attempt" in a.text for a in again.engine.assumptions)
