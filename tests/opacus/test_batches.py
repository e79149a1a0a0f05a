"""Every batch order through the engine: which one a script gets, batches, event, secrecy."""

import io
import itertools
import logging
import math
import pickle
import re
import warnings

import pytest
import torch
from opacus import PrivacyEngine
from opacus.accountants import PRVAccountant
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

import hidden_state_accountants as hsa
from hidden_state_accountants import BatchOrder
from hidden_state_adapters.opacus import BallProjection, Batches, HiddenStatePrivacyEngine

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
            assert indices(features) == run.optimizer.run.declared.plan.batch(run.steps)
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
    plan, loader = run.optimizer.run.declared.plan, run.loader
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
    plan = run.optimizer.run.declared.plan
    run.epoch()
    sizes = [plan.num_rows(step) for step in range(60)]
    assert run.steps == 60
    assert (min(sizes), max(sizes)) == (0, 2)
    changes = {"max_batch_size": 2, "batch_size": 1, "num_steps": 60}
    assert run.engine.privacy_event == event(order, **changes)
    assert run.engine.get_epsilon(DELTA) == math.inf  # the cap acts too often


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("power", [-1, 1])
def test_no_text_tells_how_many_records_a_poisson_batch_has(make_run, first, power):
    """A loop that leaves a record out, or multiplies by the size of the batch, or divides twice."""
    run = make_run(batch_order="poisson", loader={"batch_size": 30})
    features, labels = next(iter(run.loader))
    loss = run.criterion(run.model(features[first:]), labels[first:])
    (len(labels) ** power * loss).backward()
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
    plan = run.optimizer.run.declared.plan
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
    batches = [[run.optimizer.run.declared.plan.batch(k) for k in range(6)] for run in runs]
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


def test_a_seed_is_in_no_error_message_and_no_log(make_run, caplog):
    seed = 123456789
    with caplog.at_level(logging.DEBUG), pytest.raises(hsa.UnsupportedRunError) as error:
        make_run(batch_order=Batches("reshuffled", seed=seed))
    assert str(seed) not in str(error.value) + caplog.text


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"order": "reshuffled", "seed": 1}, hsa.UnsupportedRunError, "whoever knows"),
        ({"order": "poisson", "seed": 1}, hsa.UnsupportedRunError, "seed_is_secret="),
        ({"order": "cyclic", "seed": 1}, hsa.UnsupportedRunError, "Leave it out"),
        ({"order": "shuffled_once", "seed": 1, "seed_is_secret": "no"}, TypeError, "True or False"),
        ({"order": "poisson", "seed": -1}, ValueError, "an integer >= 0"),
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


# --- the order that a script gets -----------------------------------------------------------------


def private(engine=None, *, loader=None, make="make_private", **arguments):
    """An engine, and what it made of a script that says what Opacus' tutorials say."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    data = TensorDataset(torch.randn(60, 5), torch.arange(60) % 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = engine or HiddenStatePrivacyEngine()
        if make == "make_private":
            arguments["noise_multiplier"] = 2.0
        made = getattr(engine, make)(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(data, **{"batch_size": 10, **(loader or {})}),
            max_grad_norm=1.0,
            **arguments,
        )
    return engine, *made


@pytest.mark.parametrize(
    ("arguments", "loader", "order"),
    [
        ({}, {}, "poisson"),
        ({"poisson_sampling": True}, {"shuffle": True}, "poisson"),
        ({"batch_order": None}, {"shuffle": True}, "poisson"),
        ({"poisson_sampling": False}, {}, "cyclic"),
        ({"poisson_sampling": False}, {"sampler": list(range(0, 60, 2))}, "cyclic"),
        ({"poisson_sampling": False}, {"shuffle": True}, "reshuffled"),
        ({"poisson_sampling": False}, {"sampler": SubsetRandomSampler(range(40))}, "reshuffled"),
        ({}, {"sampler": SubsetRandomSampler(range(40))}, "poisson"),
        ({"poisson_sampling": False}, {"batch_size": 60}, "full"),
        ({"poisson_sampling": False}, {"batch_size": 64, "shuffle": True}, "full"),
        ({"batch_order": "cyclic", "poisson_sampling": False}, {}, "cyclic"),
        ({"batch_order": "cyclic", "poisson_sampling": True}, {}, "cyclic"),
        ({"batch_order": "shuffled_once", "poisson_sampling": False}, {}, "shuffled_once"),
    ],
)
def test_the_order_of_the_batches(arguments, loader, order):
    _, _, optimizer, _ = private(loader=loader, **arguments)
    assert optimizer.run.declared.plan.order is BatchOrder(order)


def test_a_target_is_met_on_poisson_batches():
    *_, optimizer, _ = private(
        make="make_private_with_epsilon", target_epsilon=2.0, target_delta=1e-5, epochs=2
    )
    assert optimizer.run.declared.plan.order is BatchOrder.POISSON
    stock = PrivacyEngine()
    *_, other, _ = private(
        stock, make="make_private_with_epsilon", target_epsilon=2.0, target_delta=1e-5, epochs=2
    )
    assert optimizer.noise_multiplier <= other.noise_multiplier


@pytest.mark.parametrize("batch_size", [1, 7, 25, 60, 64])
@pytest.mark.parametrize("drop_last", [False, True])
def test_rate_divisor_and_steps_are_those_of_opacus(batch_size, drop_last):
    """Where b does not divide n, the rate is 1/len(loader), and not b/n."""
    if drop_last and batch_size > 60:
        pytest.skip("no batch at all")
    sizes = {"batch_size": batch_size, "drop_last": drop_last}
    _, _, stock, stock_loader = private(PrivacyEngine(), loader=sizes)
    engine, model, optimizer, loader = private(loader=sizes)
    assert len(loader) == len(stock_loader)
    assert optimizer.expected_batch_size == stock.expected_batch_size
    for features, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(features), labels).backward()
        optimizer.step()
    event = engine.privacy_event
    assert event.num_steps == len(stock_loader)
    assert event.sampling_probability == stock_loader.sample_rate
    prv = PRVAccountant()
    prv.history = [(2.0, stock_loader.sample_rate, len(stock_loader))]
    assert engine.get_epsilon(1e-5) <= prv.get_epsilon(1e-5)


def test_no_batch_at_all():
    with pytest.raises(hsa.UnsupportedRunError, match="at least one batch, got a batch_size of 64"):
        private(loader={"batch_size": 64, "drop_last": True})


@pytest.mark.parametrize("size", [7, 60])
@pytest.mark.parametrize("order", ["poisson", "without_replacement"])
def test_orders_that_take_any_batch_size(make_run, order, size):
    run = make_run(batch_order=order, loader={"batch_size": size})
    run.epoch()
    event = run.engine.privacy_event
    divisor = int(60 / -(-60 // size)) if order == "poisson" else size  # as Opacus rounds
    assert (event.batch_size, event.dataset_size) == (divisor, 60)
    assert event.num_steps == -(-60 // size)


@pytest.mark.parametrize("order", ["cyclic", "shuffled_once", "reshuffled"])
def test_the_other_orders_leave_a_rest_out(make_run, order):
    run = make_run(batch_order=order, loader={"batch_size": 16, "drop_last": True})
    run.epoch()
    event = run.engine.privacy_event
    assert (event.batch_size, event.dataset_size, event.num_steps) == (16, 48, 3)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"loader": {"shuffle": True}}, 'got shuffle=True.*"reshuffled".*"poisson".*shuffle=F'),
        (
            {"loader": {"batch_size": 16}},
            "divides the 60 records, got 16.*drop_last=True",
        ),
        ({"loader": {"batch_size": 16}, "batch_order": "reshuffled"}, 'must all .*"without_repl'),
    ],
)
def test_the_cause_is_named(make_run, arguments, text):
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        make_run(**arguments)
