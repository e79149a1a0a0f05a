"""Every batch order through the engine: batches, divisor, event, epsilon, secrecy."""

import io
import itertools
import logging
import math
import pickle
import re

import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import TensorDataset

import hidden_state_accountants as hsa
from hidden_state_accountants import BatchOrder
from hidden_state_adapters.opacus import (
    BallProjection,
    Batches,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

DELTA = 1e-5
BINS = ["balls_in_bins", "balls_in_bins_redrawn"]
ORDERS = [
    "cyclic", "full", "shuffled_once", "reshuffled", "without_replacement", "poisson", *BINS,
]  # fmt: skip
SECRET = ORDERS[2:]


def event(order, **changes):
    arguments = {
        "noise_multiplier": 4.0, "learning_rate": 0.5, "clip_norm": 2.1, "batch_size": 10,
        "dataset_size": 60, "num_steps": 12, "batch_order": order, "weight_decay": 0.1,
        "loss": hsa.LossGeometry.softmax_cross_entropy(1.0, bias=True), **changes,
    }  # fmt: skip
    return hsa.LastIterateDpEvent(**arguments)


@pytest.mark.parametrize("order", SECRET)
def test_the_event_is_that_of_the_order(make_run, order):
    run = make_run(batch_order=order, noise_multiplier=4.0, loader={"shuffle": True})
    assert len(run.loader) == 6
    for _ in range(2):
        run.epoch()
    assert run.engine.privacy_event == event(order)
    expected = hsa.LastIterateAccountant().compose(event(order)).get_epsilon(DELTA)
    assert run.engine.get_epsilon(DELTA) == pytest.approx(expected, rel=1e-12)
    cyclic = hsa.LastIterateAccountant().compose(event("cyclic")).get_epsilon(DELTA)
    if order != "without_replacement":  # its worst case replaces a stand-in: 2 C
        assert run.engine.get_epsilon(DELTA) < cyclic
    lines = [str(assumption) for assumption in run.engine.assumptions]
    assert any(line.startswith("checked: indices of the batches") for line in lines)
    assert "public: batch size, hyper-parameters" in lines
    assert f"x 10 of 60 records, {order} (2 epochs)" in run.engine.report(DELTA)


def numbered_records():
    """Says which record it is: the first of two features is the index."""
    features = torch.stack([torch.arange(60) / 100.0, torch.ones(60)], dim=1)
    return {"dataset": TensorDataset(features, torch.arange(60) % 2)}


LINEAR = {"loss_geometry": hsa.LossGeometry.convex(10.0), "feature_norm": 2.0}


def flat(batches):
    return list(itertools.chain.from_iterable(batches))


def indices(features):
    return (features[:, 0] * 100).round().long().tolist()


@pytest.mark.parametrize(("order", "workers"), [*((order, 0) for order in SECRET), ("poisson", 2)])
def test_batches_hold_the_records_of_the_plan(make_run, order, workers):
    run = make_run(
        model=nn.Linear(2, 2), batch_order=order, **LINEAR,
        loader={**numbered_records(), "num_workers": workers},
    )  # fmt: skip
    used = []
    for _ in range(2):
        for features, labels in run.loader:
            assert indices(features) == run.optimizer.run.plan.batch(run.steps)
            used.append(indices(features))
            run.step((features, labels))
    assert run.steps == len(used) == 12
    if order not in ("poisson", *BINS):
        assert {len(batch) for batch in used} == {10}
    if order in ("shuffled_once", "reshuffled", *BINS):
        first, second = flat(used[:6]), flat(used[6:])
        assert sorted(first) == sorted(second) == list(range(60))
        assert (used[:6] == used[6:]) == (order in ("shuffled_once", "balls_in_bins"))
        assert first != sorted(first)
    else:
        assert all(len(set(batch)) == len(batch) for batch in used)
        assert used[:6] != used[6:]


@pytest.mark.parametrize(
    ("mode", "pieces", "workers"),
    [("hooks", None, 0), ("hooks", 2, 1), ("functorch", None, 0), ("functorch", 2, 0)],
)
def test_empty_batches_are_steps(make_run, mode, pieces, workers):
    run = make_run(
        batch_order="poisson", grad_sample_mode=mode, after=BallProjection(5.0),
        loader={"batch_size": 1, "num_workers": workers},
    )  # fmt: skip
    sizes = []
    plan, loader = run.optimizer.run.plan, run.loader
    if pieces:
        loader = BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=pieces, optimizer=run.optimizer
        ).__enter__()
    for batch in loader:
        if run.steps == len(sizes):
            sizes.append(len(plan.batch(run.steps)))
        run.step(batch)
    assert run.steps == len(run.loader) == len(sizes) == 60
    assert 0 in sizes
    assert max(sizes) > 1
    assert all(bool(torch.isfinite(p).all()) for p in run.plain_model.parameters())


def test_a_cap_on_poisson_batches(make_run):
    run = make_run(batch_order=Batches("poisson", max_batch_size=12), noise_multiplier=4.0)
    for _ in range(5):
        run.epoch()
    expected = event("poisson", max_batch_size=12, num_steps=30)
    assert run.engine.privacy_event == expected
    assert run.engine.get_epsilon(DELTA) == math.inf  # the cap acts too often
    assert "at most 12" in run.engine.report(DELTA)
    run = make_run(batch_order=Batches("poisson", max_batch_size=40), noise_multiplier=4.0)
    run.epoch()
    expected = event("poisson", max_batch_size=40, num_steps=6)
    exact = hsa.LastIterateAccountant().compose(expected).get_epsilon(DELTA)
    assert run.engine.get_epsilon(DELTA) == pytest.approx(exact, rel=1e-12)
    assert exact < math.inf


@pytest.mark.parametrize("order", BINS)
def test_a_cap_and_empty_batches_of_balls_in_bins(make_run, order):
    run = make_run(
        batch_order=Batches(order, max_batch_size=2), loader={"batch_size": 1},
        noise_multiplier=4.0,
    )  # fmt: skip
    plan = run.optimizer.run.plan
    run.epoch()
    sizes = [plan.num_rows(step) for step in range(60)]
    assert run.steps == 60
    assert (min(sizes), max(sizes)) == (0, 2)
    changes = {"max_batch_size": 2, "batch_size": 1, "num_steps": 60}
    assert run.engine.privacy_event == event(order, **changes)
    assert run.engine.get_epsilon(DELTA) == math.inf  # the cap acts too often


def without_a_record(run, features, labels):
    return run.criterion(run.model(features[1:]), labels[1:])


def sum_of_losses(run, features, labels):
    return len(labels) * run.criterion(run.model(features), labels)


def divided_twice(run, features, labels):
    return run.criterion(run.model(features), labels) / len(labels)


@pytest.mark.parametrize("loss", [without_a_record, sum_of_losses, divided_twice])
def test_no_text_tells_how_many_records_a_poisson_batch_has(make_run, loss):
    run = make_run(batch_order="poisson", loader={"batch_size": 30})
    features, labels = next(iter(run.loader))
    loss(run, features, labels).backward()
    with pytest.raises(hsa.UnsupportedRunError, match=r"rows|records") as told:
        run.optimizer.step()
    numbers = {int(number) for number in re.findall(r"\d+", str(told.value))}
    assert not numbers & {len(labels), len(labels) - 1}


@pytest.mark.parametrize("order", SECRET)
def test_a_secret_order_is_in_no_output(make_run, order, tmp_path, caplog):
    # Records 1000 to 1059 of a larger data set, so that an index is recognised where it appears.
    features, labels = make_run().loader.dataset.tensors
    data = TensorDataset(features.repeat(20, 1), labels.repeat(20))
    subset = {"dataset": data, "sampler": range(1000, 1060)}
    with caplog.at_level(logging.DEBUG):
        run = make_run(batch_order=order, loader=subset)
        run.epoch()
        engine = run.engine
        path = tmp_path / "checkpoint.pt"
        engine.save_checkpoint(path=path, module=run.model, optimizer=run.optimizer)
    shown = [
        caplog.text, engine.report(DELTA), repr(engine.privacy_event), str(engine.assumptions),
        repr(run.loader.batch_sampler.plan), repr(engine.__dict__), repr(run.optimizer.run),
        repr(run.optimizer.__dict__), repr(engine.accountant.state_dict()),
        repr(torch.load(path, weights_only=True)),
    ]  # fmt: skip
    assert not [text for text in shown if re.search(r"(?<![\w.])10[0-5]\d(?![\w.])", text)]
    plan = run.optimizer.run.plan
    assert re.search(r"(?<![\w.])10[0-5]\d(?![\w.])", repr(plan.batch(run.steps - 1)))
    for secret in (run.loader, run.loader.batch_sampler):
        with pytest.raises((hsa.UnsupportedRunError, AttributeError, pickle.PicklingError)):
            torch.save(secret, io.BytesIO())


def test_a_public_seed_makes_one_shuffle_cyclic(make_run):
    runs = [make_run(batch_order=Batches("shuffled_once", seed=seed)) for seed in (5, 5, 6)]
    for run in runs:
        run.epoch()
    assert runs[0].engine.privacy_event.batch_order is BatchOrder.CYCLIC
    assert "order of the batches" in runs[0].engine.report(DELTA)
    batches = [[run.optimizer.run.plan.batch(k) for k in range(6)] for run in runs]
    assert batches[0] == batches[1] != batches[2]
    plain = make_run()
    plain.epoch()
    assert runs[0].engine.get_epsilon(DELTA) == plain.engine.get_epsilon(DELTA)


@pytest.mark.parametrize("order", SECRET)
def test_a_seed_that_is_declared_secret(make_run, order):
    run = make_run(batch_order=Batches(order, seed=2**80 + 1, seed_is_secret=True))
    run.epoch()
    assert run.engine.privacy_event.batch_order is BatchOrder(order)
    assert any(a.text.startswith("seed of the order: random") for a in run.engine.assumptions)
    assert str(2**80 + 1) not in repr(run.engine.__dict__) + repr(run.optimizer.run)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"order": "reshuffled", "seed": 1}, hsa.UnsupportedRunError, "whoever knows"),
        ({"order": "poisson", "seed": 1}, hsa.UnsupportedRunError, "whoever knows"),
        ({"order": "without_replacement", "seed": 1}, hsa.UnsupportedRunError, "seed_is_secret="),
        ({"order": "cyclic", "seed": 1}, hsa.UnsupportedRunError, "Leave it out"),
        ({"order": "shuffled_once", "seed": 1, "seed_is_secret": "no"}, TypeError, "True or False"),
        ({"order": "poisson", "seed": -1}, ValueError, "an integer >= 0"),
        ({"order": "poisson", "seed": 0.5}, ValueError, "an integer >= 0"),
        ({"order": "reshuffled", "max_batch_size": 20}, ValueError, "max_batch_size = None"),
    ],
)
def test_batches_that_are_refused(arguments, error, text):
    with pytest.raises(error, match=text):
        Batches(**arguments)


def test_epsilon_is_read_after_every_epoch_in_reasonable_time(make_run):
    run = make_run(batch_order="poisson", noise_multiplier=4.0)
    values = []
    for _ in range(4):
        run.epoch()
        values.append(run.engine.get_epsilon(DELTA))
        guarantee = run.engine.accountant.guarantee
        assert run.engine.accountant.guarantee.curve is guarantee.curve  # not computed again
    assert values == sorted(values)
    assert values[0] > 0
