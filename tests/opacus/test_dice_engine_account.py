"""DiceSGD through the engine: the event, its epsilon, the report, and noise for a target."""

import math

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting import NeighboringRelation
from opacus_dice_engine import CLIP, DELTA, ERROR_CLIP, ORDERS, RATE, flat
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hidden_state_accountants as hsa
from hidden_state_accountants.figures import fixed_up
from hidden_state_adapters.opacus import (
    Batches,
    DiceSGD,
    HiddenStatePrivacyEngine,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


# Softmax cross-entropy on features of norm 1 with a bias: sqrt(2) * sqrt(2).
BOUND = 2.0001


# --- the account ----------------------------------------------------------------------------------


@pytest.mark.parametrize("relation", list(NeighboringRelation))
@pytest.mark.parametrize("order", ORDERS)
def test_event_and_epsilon(make_dice, order, relation):
    engine = HiddenStatePrivacyEngine(neighboring_relation=relation)
    if relation is NeighboringRelation.ADD_OR_REMOVE_ONE and order != "poisson":
        with pytest.raises(hsa.UnsupportedRunError, match="ADD_OR_REMOVE_ONE"):
            make_dice(engine=engine, batch_order=order)
        return
    adds = relation is NeighboringRelation.ADD_OR_REMOVE_ONE
    rate = 1 / 6 if adds else None
    dealt = Batches("poisson", sampling_rate=rate, batch_size=10) if adds else order
    run = make_dice(engine=engine, batch_order=dealt, gradient_bound=BOUND)
    with pytest.raises(ValueError, match="at least one step"):
        _ = run.engine.privacy_event
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
    assert 0 < run.engine.get_epsilon(DELTA) < math.inf


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
    """Rate and divisor are those of Opacus' engine, and the accounted rate is the drawn one."""
    run = make_dice(batch_order="poisson", loader={"batch_size": 7})
    run.epoch()
    event = run.engine.privacy_event
    assert (event.batch_size, event.dataset_size, event.num_steps) == (6, 60, 9)
    assert event.sampling_rate == 1 / 9
    assert event.noise_std == 20.0 * CLIP / 6
    draws = [len(run.optimizer.run.plan.batch(k)) for k in range(9, 4009)]
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


def alone(recorder):
    return hsa.LastIterateAccountant().compose(recorder.event()).get_epsilon(DELTA)


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
    assert f"epsilon = {fixed_up(engine.get_epsilon(DELTA), 4)}" in text
    assert "(3 runs)" in text


def test_the_number_of_steps_can_be_declared(make_dice):
    run = make_dice(num_steps=6)
    for batch in run.loader:
        run.step(batch)
        texts = [a.text for a in run.engine.assumptions]
        early = f"training ends after step {run.steps} of the 6 that were declared"
        assert run.steps == 6 or any(text.startswith(early) for text in texts)
    assert "all of the 6 steps declared in advance" in texts
    assert not any("fixed in advance" in text for text in texts)
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
