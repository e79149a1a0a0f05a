"""Every batch order through the engine: which one a script gets, batches, event, secrecy."""

import io
import itertools
import logging
import math
import pickle
import re

import pytest
import torch
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

import hidden_state_accountants as hsa
from hidden_state_accountants import BatchOrder
from hidden_state_adapters.opacus import (
    BallProjection,
    Batches,
    DiceSGD,
    HiddenStatePrivacyEngine,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

DELTA = 1e-5
BINS = ["balls_in_bins", "balls_in_bins_redrawn"]
SECRET = ["shuffled_once", "reshuffled", "without_replacement", "poisson", *BINS]


def event(order, **changes):
    arguments = {
        "noise_multiplier": 4.0, "learning_rate": 0.5, "clip_norm": 2.1, "batch_size": 10,
        "dataset_size": 60, "num_steps": 12, "batch_order": order, "weight_decay": 0.1,
        "loss": hsa.LossGeometry.softmax_cross_entropy(1.0, bias=True), **changes,
    }  # fmt: skip
    return hsa.LastIterateDpEvent(**arguments)


def epsilon_of(event):
    return hsa.LastIterateAccountant().compose(event).get_epsilon(DELTA)


@pytest.mark.parametrize(("order", "workers"), [*((order, 0) for order in SECRET), ("poisson", 2)])
def test_batches_and_event_of_an_order(make_run, dataset, order, workers):
    loader = {"shuffle": True, "num_workers": workers}
    run = make_run(batch_order=order, noise_multiplier=4.0, loader=loader)
    plan, used = run.optimizer.run.declared.plan, []
    for _ in range(2):
        for features, labels in run.loader:
            rows = (features[:, None] == dataset.tensors[0]).all(dim=2).nonzero()[:, 1].tolist()
            assert rows == plan.batch(run.steps)
            used.append(rows)
            run.step((features, labels))
    assert run.steps == len(used) == 12
    if order not in ("poisson", *BINS):
        assert {len(batch) for batch in used} == {10}
    if order in ("shuffled_once", "reshuffled", *BINS):
        first, second = (list(itertools.chain.from_iterable(used[i : i + 6])) for i in (0, 6))
        assert sorted(first) == sorted(second) == list(range(60))
        assert (used[:6] == used[6:]) == (order in ("shuffled_once", "balls_in_bins"))
        assert first != sorted(first)
    else:
        assert all(len(set(batch)) == len(batch) for batch in used)
        assert used[:6] != used[6:]
    assert run.engine.privacy_event == event(order)
    epsilon = run.engine.get_epsilon(DELTA)
    assert epsilon == pytest.approx(epsilon_of(event(order)), rel=1e-12)
    if order != "without_replacement":  # its worst case replaces a stand-in: 2 C
        assert epsilon < epsilon_of(event("cyclic"))
    assert f"x 10 of 60 records, {order} (2 epochs)" in run.engine.report(DELTA)


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


@pytest.mark.parametrize(
    ("order", "cap", "b", "is_rare"),
    [
        ("poisson", 12, 10, False),
        ("poisson", 40, 10, True),
        *((order, 2, 1, False) for order in BINS),  # empty ones are steps, too
    ],
)
def test_a_cap_on_batches(make_run, order, cap, b, is_rare):
    batches, loader = Batches(order, max_batch_size=cap), {"batch_size": b}
    run = make_run(batch_order=batches, loader=loader, noise_multiplier=4.0)
    plan, sizes = run.optimizer.run.declared.plan, []
    for batch in run.loader:
        sizes.append(plan.num_rows(run.steps))
        run.step(batch)
    assert max(sizes) <= cap
    expected = event(order, max_batch_size=cap, batch_size=b, num_steps=60 // b)
    assert run.engine.privacy_event == expected
    epsilon = run.engine.get_epsilon(DELTA)
    assert epsilon == pytest.approx(epsilon_of(expected), rel=1e-12)
    assert (epsilon < math.inf) == is_rare
    assert f"at most {cap}" in run.engine.report(DELTA)


@pytest.mark.parametrize(("first", "power"), [(1, -1), (0, 1), (0, -1)])
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
    plan = run.optimizer.run.declared.plan
    shown = [
        caplog.text, engine.report(DELTA), repr(engine.privacy_event), str(engine.assumptions),
        repr(plan), repr(engine.__dict__), repr(run.optimizer.run), repr(run.optimizer.__dict__),
        repr(engine.accountant.state_dict()), repr(torch.load(path, weights_only=True)),
    ]  # fmt: skip
    index = re.compile(r"(?<![\w.])10[0-5]\d(?![\w.])")
    assert not [text for text in shown if index.search(text)]
    assert index.search(repr(plan.batch(run.steps - 1)))
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


@pytest.mark.parametrize("order", ["shuffled_once", "poisson"])
def test_a_seed_that_is_declared_secret(make_run, order):
    run = make_run(batch_order=Batches(order, seed=2**80 + 1, seed_is_secret=True))
    run.epoch()
    assert run.engine.privacy_event.batch_order is BatchOrder(order)
    assert any(a.text.startswith("seed of the order: random") for a in run.engine.assumptions)
    assert str(2**80 + 1) not in repr(run.engine.__dict__) + repr(run.optimizer.run)


SEED = 123456789


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"order": "reshuffled", "seed": SEED}, hsa.UnsupportedRunError, "seed_is_secret="),
        ({"order": "cyclic", "seed": SEED}, hsa.UnsupportedRunError, "whoever knows"),
        ({"order": "shuffled_once", "seed": SEED, "seed_is_secret": "no"}, TypeError, "True or"),
        ({"order": "poisson", "seed": -SEED}, ValueError, "an integer >= 0"),
        ({"order": "reshuffled", "max_batch_size": 20}, ValueError, "max_batch_size = None"),
        ({"order": "poisson", "sampling_rate": 0.1}, ValueError, "batch_size, or neither"),
        ({"order": "poisson", "batch_size": 3}, ValueError, "batch_size, or neither"),
        ({"order": "poisson", "sampling_rate": 0.0, "batch_size": 3}, ValueError, "_rate > 0"),
        ({"order": "poisson", "sampling_rate": 1.5, "batch_size": 3}, ValueError, "_rate <= 1"),
        ({"order": "poisson", "sampling_rate": 0.1, "batch_size": 0}, ValueError, "_size >= 1"),
        ({"order": "cyclic", "sampling_rate": 0.1, "batch_size": 3}, ValueError, "POISSON"),
    ],
)
def test_batches_that_are_refused(arguments, error, text):
    with pytest.raises(error, match=text) as told:
        Batches(**arguments)
    assert str(SEED) not in str(told.value)


# --- the order that a script gets -----------------------------------------------------------------


def private(engine=None, *, records=60, target=None, loader=None, **arguments):
    """An engine, and what it made of a script that says what Opacus' tutorials say."""
    torch.manual_seed(0)
    engine, model = engine or HiddenStatePrivacyEngine(), nn.Linear(5, 3)
    data = TensorDataset(torch.randn(records, 5), torch.arange(records) % 3)
    make, noise = engine.make_private, {"noise_multiplier": 2.0}
    if target is not None:
        make = engine.make_private_with_epsilon
        noise = {"target_epsilon": target, "target_delta": DELTA, "epochs": 2}
    return engine, *make(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, **{"batch_size": 10, **(loader or {})}),
        max_grad_norm=1.0,
        **{**noise, **arguments},
    )


def epoch(model, optimizer, loader):
    for features, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(features), labels).backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("arguments", "loader", "order"),
    [
        ({}, {}, "poisson"),
        ({"poisson_sampling": True}, {"shuffle": True}, "poisson"),
        ({"poisson_sampling": False}, {}, "cyclic"),
        ({"poisson_sampling": False}, {"shuffle": True}, "reshuffled"),
        ({"poisson_sampling": False}, {"sampler": SubsetRandomSampler(range(40))}, "reshuffled"),
        ({"poisson_sampling": False}, {"batch_size": 60}, "full"),
        ({"poisson_sampling": False}, {"batch_size": 64, "shuffle": True}, "full"),
        ({"batch_order": "cyclic", "poisson_sampling": True}, {}, "cyclic"),
    ],
)
def test_the_order_of_the_batches(arguments, loader, order):
    _, _, optimizer, _ = private(loader=loader, **arguments)
    assert optimizer.run.declared.plan.order is BatchOrder(order)


@pytest.mark.parametrize(
    ("batch_size", "drop_last"), [(1, False), (7, False), (25, True), (60, True), (64, False)]
)
def test_rate_divisor_and_steps_are_those_of_opacus(batch_size, drop_last):
    """Where b does not divide n, the rate is 1/len(loader), and not b/n."""
    sizes = {"batch_size": batch_size, "drop_last": drop_last}
    _, _, stock, stock_loader = private(PrivacyEngine(), loader=sizes)
    engine, model, optimizer, loader = private(loader=sizes)
    assert len(loader) == len(stock_loader)
    assert optimizer.expected_batch_size == stock.expected_batch_size
    epoch(model, optimizer, loader)
    event = engine.privacy_event
    assert event.num_steps == len(stock_loader)
    assert event.sampling_probability == stock_loader.sample_rate


@pytest.mark.parametrize(
    ("order", "loader", "expected"),
    [
        ("without_replacement", {"batch_size": 7}, (7, 60, 9)),
        *(
            (order, {"batch_size": 16, "drop_last": True}, (16, 48, 3))
            for order in ("cyclic", "shuffled_once", "reshuffled")
        ),
    ],
)
def test_batch_sizes_that_do_not_divide(make_run, order, loader, expected):
    run = make_run(batch_order=order, loader=loader)
    run.epoch()
    event = run.engine.privacy_event
    assert (event.batch_size, event.dataset_size, event.num_steps) == expected


# --- ADD_OR_REMOVE_ONE: nothing that is shown may be computed from the number of records ----------

CONSTANTS = Batches("poisson", sampling_rate=1 / 7, batch_size=18)
DICE = {"mechanism": DiceSGD(gradient_bound=50.0)}


def add_or_remove(records, **arguments):
    engine = HiddenStatePrivacyEngine(neighboring_relation="add_or_remove_one")
    return private(engine, records=records, loader={"batch_size": 20}, **arguments)


@pytest.mark.parametrize("arguments", [{}, DICE, {"target": 1.0}, {"target": 1.0, **DICE}])
def test_rate_and_divisor_of_the_loader_are_refused(arguments):
    """They are 1/7 and 18 of 126 records, and 1/7 and 17 of 125."""
    with pytest.raises(hsa.UnsupportedRunError, match=r"sampling_rate=q, batch_size=b"):
        add_or_remove(126, **arguments)


@pytest.mark.parametrize("arguments", [{}, DICE, {"target": 1.0}])
def test_nothing_follows_from_the_number_of_records(arguments):
    found = []
    for records in (126, 125, 300):
        engine, *made = add_or_remove(records, batch_order=CONSTANTS, **arguments)
        epoch(*made)
        _, optimizer, loader = made
        found.append([
            optimizer.expected_batch_size, len(loader), optimizer.noise_multiplier,
            engine.privacy_event, engine.get_epsilon(DELTA), engine.report(DELTA),
        ])  # fmt: skip
    assert found[0][:2] == [18, 7]
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    ("order", "arguments", "name"),
    [
        (CONSTANTS, {"criterion": nn.CrossEntropyLoss(), "feature_norm": 9.0}, "loss_geometry"),
        (
            Batches("poisson", sampling_rate=1 / 7, batch_size=18, max_batch_size=100),
            {},
            "max_batch_size",
        ),
    ],
)
def test_bounds_on_the_sizes_of_batches_are_refused(order, arguments, name):
    with pytest.raises(hsa.UnsupportedRunError, match=rf"Expected {name}.* number of records"):
        add_or_remove(126, batch_order=order, **arguments)


@pytest.mark.parametrize(("rate", "passes"), [(0.9, 10), (1, 2)])
def test_batches_are_drawn_at_the_constant_rate(make_run, rate, passes):
    """Of 60 records; the hidden state is that of the number of records."""
    batches = Batches("poisson", sampling_rate=rate, batch_size=50)
    run = make_run(batch_order=batches, noise_multiplier=4.0)
    sizes = []
    for _ in range(passes):
        for batch in run.loader:
            sizes.append(len(batch[0]))
            run.step(batch)
    assert len(sizes) == passes * math.ceil(1 / rate)
    expected = len(sizes) * 60 * rate
    assert abs(sum(sizes) - expected) <= 6 * (expected * (1 - rate)) ** 0.5
    event = run.engine.privacy_event
    assert (event.sampling_rate, event.batch_size, event.dataset_size) == (rate, 50, 60)
