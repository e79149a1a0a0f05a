"""DiceSGD through the engine: the paper's steps on the plan's batches, account and checkpoints."""

import copy
import functools
import io
import itertools
import pickle
import re

import attrs
import numpy as np
import pytest
import torch
from dice import adam_step, automatic_step, sgd_step
from dp_accounting import NeighboringRelation
from opacus_dice import (
    BOUND,
    CLIP,
    DELTA,
    ERROR_CLIP,
    ORDERS,
    PRIVATE,
    RATE,
    error_of,
)
from opacus_runs import flat, in_pieces, weights
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hidden_state_accountants as hsa
from hidden_state_accountants import UnsupportedRunError
from hidden_state_adapters.opacus import (
    BallProjection,
    Batches,
    DiceAdamOptimizer,
    DiceSGD,
    DiceSGDOptimizer,
    HiddenStatePrivacyEngine,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def state_of(run):
    return np.concatenate([weights(run), error_of(run)])


# --- the steps ------------------------------------------------------------------------------------


def softmax_gradients(run, rows):
    """By hand, from the records that the plan names: weight rows first, then biases."""
    features, labels = (t[rows] for t in run.loader.dataset.tensors)
    with torch.no_grad():
        outputs = features @ run.plain_model.weight.T + run.plain_model.bias
    slopes = torch.softmax(outputs, dim=1) - nn.functional.one_hot(labels, 3)
    parts = (slopes[:, :, None] * features[:, None, :]).flatten(start_dim=1), slopes
    return torch.cat(parts, dim=1).numpy()


def step_of_the_paper(variant, state, step, gradients, noise, divisor):
    """From (iterate, error, moments) to the next."""
    common = {"learning_rate": RATE, "divisor": divisor, "clip_norm": CLIP}
    if variant == "automatic":
        return *automatic_step(*state[:2], gradients, noise, **common), None
    common["error_clip_norm"] = ERROR_CLIP
    if variant == "sgd":
        return *sgd_step(*state[:2], gradients, noise, **common), None
    return adam_step(*state, step, gradients, noise, **common)


@pytest.mark.parametrize("variant", ["sgd", "adam", "automatic"])
@pytest.mark.parametrize("order", ORDERS)
def test_every_step_is_that_of_the_paper(make_dice, variant, order):
    """On the records that the plan has for the step, with given noise, to rounding."""
    run = make_dice(
        variant, batch_order=order, noise_multiplier=0.7,
        noise_generator=torch.Generator().manual_seed(5), loader={"batch_size": 3},
    )  # fmt: skip
    plan, same_noise = run.optimizer.run.declared.plan, torch.Generator().manual_seed(5)
    divisor = 60 if order == "full" else 3
    state, sizes = (weights(run), np.zeros(18), (0.0, 0.0)), set()
    batches = itertools.chain.from_iterable(itertools.repeat(run.loader))
    for step in range(25):
        run.backward(next(batches))
        rows = plan.batch(step)
        sizes.add(len(rows))
        gradients = softmax_gradients(run, rows)
        run.optimizer.step()
        noise = [
            torch.normal(0.0, 1.0, p.shape, generator=same_noise, dtype=p.dtype)
            for p in run.plain_model.parameters()
        ]
        noise = 0.7 * CLIP / divisor * flat(noise)
        state = step_of_the_paper(variant, state, step + 1, gradients, noise, divisor)
        np.testing.assert_allclose(weights(run), state[0], atol=1e-12)
    np.testing.assert_allclose(error_of(run), state[1], atol=1e-12)
    assert np.linalg.norm(state[1]) > ERROR_CLIP  # both clips acted
    assert (order == "poisson") == (len(sizes) > 1)
    assert run.engine.privacy_event.num_steps == 25


@pytest.mark.parametrize(("order", "workers"), [("cyclic", 0), ("full", 0), ("poisson", 2)])
def test_pieces_of_a_batch_are_one_step(make_dice, order, workers):
    batches = Batches(order, seed=3, seed_is_secret=True) if order == "poisson" else order
    ends, events = [], []
    for size in (100, 4):
        run = make_dice(
            batch_order=batches, noise_generator=torch.Generator().manual_seed(1),
            loader={"num_workers": workers if size == 4 else 0},
        )  # fmt: skip
        with in_pieces(run, size) as loader:
            for _ in range(2):
                run.epoch(loader)
        ends.append(state_of(run))
        events.append(run.engine.privacy_event)
    np.testing.assert_allclose(*ends, atol=1e-12)
    assert events[0] == events[1]
    assert events[0].num_steps == (2 if order == "full" else 12)


def test_a_gradient_of_the_first_piece_is_too_long(make_dice, dataset):
    features, labels = dataset.tensors
    data = TensorDataset(torch.cat([4 * features[:1], features[1:]]).double(), labels)
    run = make_dice(gradient_bound=BOUND, loader={"dataset": data})
    refused = pytest.raises(UnsupportedRunError, match="Expected gradient_bound >= ")
    with in_pieces(run, 4) as loader, refused:
        run.epoch(loader)


KNOWN = {"feature_norm": 1.0, "loss_geometry": "auto", "criterion": nn.CrossEntropyLoss()}
SUM = {
    "loss_reduction": "sum", "base": {"lr": RATE / 10},
    "criterion": nn.CrossEntropyLoss(reduction="sum"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("way", "bound"),
    [
        ({"grad_sample_mode": "functorch"}, np.inf),
        ({"grad_sample_mode": "ew"}, np.inf),
        (SUM, np.inf),
        (KNOWN, pytest.approx(2.0)),  # the Lipschitz constant of the loss
    ],
)
def test_other_ways_to_the_same_steps(make_dice, way, bound):
    usual, run = (
        make_dice(noise_multiplier=0.0, **more) for more in ({"grad_sample_mode": "hooks"}, way)
    )
    usual.epoch()
    run.epoch()
    np.testing.assert_allclose(state_of(run), state_of(usual), atol=1e-12)
    event = run.engine.privacy_event
    assert event.gradient_bound == bound
    assert attrs.evolve(event, gradient_bound=np.inf) == usual.engine.privacy_event


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
        ends.append(state_of(run))
        assert run.engine.privacy_event.num_steps == 12
    np.testing.assert_allclose(*ends, atol=1e-12)


# --- the account ----------------------------------------------------------------------------------


@pytest.mark.parametrize("relation", list(NeighboringRelation))
@pytest.mark.parametrize("order", ORDERS)
def test_event_and_epsilon(make_dice, order, relation):
    """Every iterate is covered, and the update rule sees noisy updates only."""
    engine = HiddenStatePrivacyEngine(neighboring_relation=relation)
    adds = relation is NeighboringRelation.ADD_OR_REMOVE_ONE
    if adds and order != "poisson":
        with pytest.raises(UnsupportedRunError, match="ADD_OR_REMOVE_ONE"):
            make_dice(engine=engine, batch_order=order)
        return
    rate = 1 / 6 if adds else None
    dealt = Batches("poisson", sampling_rate=rate, batch_size=10) if adds else order
    rule = {"momentum": 0.9, "weight_decay": 0.1}
    run = make_dice(engine=engine, batch_order=dealt, gradient_bound=BOUND, base=rule)
    scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 1, 0.5)
    run.epoch()
    scheduler.step()
    run.engine.release()
    run.epoch()
    batch = 60 if order == "full" else 10
    event = hsa.DiceSgdDpEvent(
        noise_std=20.0 * CLIP / batch, clip_norm=CLIP, error_clip_norm=ERROR_CLIP,
        batch_size=batch, dataset_size=60, num_steps=120 // batch, batch_order=order,
        gradient_bound=BOUND, sampling_rate=rate,
    )  # fmt: skip
    assert run.engine.privacy_event == event
    accountant = hsa.DiceSgdAccountant(relation).compose(event)
    assert run.engine.get_epsilon(DELTA) == accountant.get_epsilon(DELTA)


@pytest.mark.parametrize(("order", "automatic"), [("cyclic", False), ("full", True)])
@pytest.mark.parametrize("size", [0.1, 3.0, 300.0])
def test_what_one_record_does_is_within_the_bound(make_dice, size, automatic, order):
    """The same noise on neighbouring data sets: the squared differences of all updates together.

    The outlier is preceded by records that pull the error the other way.
    """
    gradients = torch.zeros(6, 3, dtype=torch.float64)
    gradients[:2, 0], gradients[2, 0] = -size, size
    without = gradients.clone()
    without[2] = 0.0
    ends = []
    for rows in (gradients, without):
        run = make_dice(
            model=nn.Linear(3, 1, bias=False).double(), base={"lr": 0.0}, automatic=automatic,
            error_max_grad_norm=0.2, gradient_bound=size, max_grad_norm=0.5, noise_multiplier=1.0,
            noise_generator=torch.Generator().manual_seed(0), batch_order=order,
            loader={"dataset": TensorDataset(rows), "batch_size": 2},
        )  # fmt: skip
        updates = []
        for (batch,) in itertools.chain.from_iterable([run.loader] * 5):
            run.optimizer.zero_grad()
            run.model(batch).mean().backward()
            run.optimizer.step()
            updates.append(flat([p.grad for p in run.optimizer.params]))
        ends.append(np.array(updates))
    allowed = run.engine.accountant.guarantee.mu * run.engine.privacy_event.noise_std
    assert 0.05 * allowed < np.linalg.norm(ends[0] - ends[1]) <= allowed * (1 + 1e-9)


def test_one_after_the_other(make_run, make_dice, dataset):
    """A cyclic run, then DiceSGD from its model, then a cyclic run again: all compose."""
    generators = [{"noise_generator": torch.Generator().manual_seed(k)} for k in range(3)]
    first = make_run(**generators[0])
    first.epoch()
    shared = {"engine": first.engine, "model": first.model}
    make_dice(**shared, loader={"dataset": dataset}, **generators[1]).epoch()
    make_run(**shared, **generators[2]).epoch()
    event = first.engine.privacy_event
    kinds = [type(part).__name__ for part in event.events]
    assert kinds == ["LastIterateDpEvent", "DiceSgdDpEvent", "LastIterateDpEvent"]
    together, *alone = (
        hsa.LastIterateAccountant().compose(part).get_epsilon(DELTA)
        for part in (event, *event.events)
    )
    assert first.engine.get_epsilon(DELTA) == pytest.approx(together, rel=1e-9)
    assert together > max(alone)


def test_noise_for_a_target(make_run, dataset):
    """Met from below, together with what an earlier run spent."""
    first = make_run(noise_generator=torch.Generator().manual_seed(1))
    first.epoch()
    engine, model, target = first.engine, first.model, first.engine.get_epsilon(DELTA) + 1.0
    model, optimizer, loader = engine.make_private_with_epsilon(
        target_epsilon=target, target_delta=DELTA, epochs=2, module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=RATE),
        data_loader=DataLoader(dataset, batch_size=10), max_grad_norm=CLIP, batch_order="cyclic",
        mechanism=DiceSGD(ERROR_CLIP, automatic=True, gradient_bound=BOUND),
    )  # fmt: skip
    for features, labels in itertools.chain(loader, loader):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(features), labels).backward()
        optimizer.step()
    assert 0.99 * target < engine.get_epsilon(DELTA) <= target


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"optimizer_class": object}, UnsupportedRunError, "checks their steps only"),
        ({"optimizer_class": type("Own", (DiceSGDOptimizer,), {})}, UnsupportedRunError, "Own"),
        ({"optimizer_class": DiceAdamOptimizer}, UnsupportedRunError, "Adam or torch.optim.Ad"),
        ({"loss_geometry": hsa.LossGeometry.convex(1.0)}, UnsupportedRunError, "of the loss"),
        ({"after": BallProjection(5.0)}, UnsupportedRunError, "not in the algorithm"),
        ({"batch_order": Batches("poisson", max_batch_size=30)}, UnsupportedRunError,
         "capped batch"),
        ({"schedule": 0.1}, UnsupportedRunError, "learning rate costs nothing"),
        ({"max_grad_norm": [0.1, 0.1]}, UnsupportedRunError, "one max_grad_norm"),
        ({"error_max_grad_norm": 0.0}, ValueError, "error_max_grad_norm > 0"),
        ({"max_grad_norm": 1e-20, "model": nn.Linear(5, 3)}, ValueError, "underflow"),
        ({"gradient_bound": 0.0}, ValueError, "gradient_bound"),
    ],
)  # fmt: skip
def test_arguments_that_are_refused(make_dice, arguments, error, text):
    with pytest.raises(error, match=text):
        make_dice(**arguments)


def test_a_second_attempt_after_a_refused_first_step(make_dice):
    """A refusal may depend on the records: that it did not is the user's word."""
    run = make_dice()
    with pytest.raises(UnsupportedRunError, match="expected batch_size = 10"):
        run.step([part[:9] for part in next(iter(run.loader))])
    again = make_dice(
        engine=run.engine, model=run.model, noise_generator=torch.Generator().manual_seed(2)
    )
    again.epoch()
    assert any("earlier attempt" in a.text for a in again.engine.assumptions)


# --- checkpoints ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "variant", "stop"), [*[(order, "sgd", 3) for order in ORDERS], ("cyclic", "adam", 6)]
)
def test_a_run_goes_on_exactly(make_dice, tmp_path, order, variant, stop):
    """The noise is 0: then model and error depend on batches, error and moments only."""
    arguments = {"batch_order": order, "noise_multiplier": 0.0}
    if order in ORDERS[2:]:
        arguments["batch_order"] = Batches(order, seed=7, seed_is_secret=True)
    base = {"momentum": 0.9} if variant == "sgd" else None
    whole, first, second = (make_dice(variant, base=base, **arguments) for _ in range(3))
    path = tmp_path / "c.pt"
    while first.steps < stop:
        first.epoch(itertools.islice(first.loader, stop))
    first.engine.save_checkpoint(path=path, **PRIVATE)
    torch.load(path, weights_only=True)
    second.engine.load_checkpoint(path=path)
    np.testing.assert_array_equal(error_of(second), error_of(first))
    for run in (whole, second):
        while run.steps < 12:
            run.epoch()
    np.testing.assert_array_equal(state_of(second), state_of(whole))
    assert second.engine.privacy_event == whole.engine.privacy_event


@pytest.mark.parametrize("kind", ["sgd", "dice"])
@pytest.mark.parametrize("clears", [True, False])
def test_pieces_from_before_a_checkpoint_was_loaded(make_run, make_dice, tmp_path, kind, clears):
    """They are no part of the next step."""
    make = functools.partial(make_run if kind == "sgd" else make_dice, noise_multiplier=0.0)
    first, run = make(), make()
    first.epoch()
    first.engine.save_checkpoint(path=tmp_path / "c.pt", **PRIVATE)
    with in_pieces(run, 5) as loader:
        run.step(next(iter(loader)))  # half a batch, which waits for the rest
    run.engine.load_checkpoint(path=tmp_path / "c.pt")
    features, labels = next(iter(run.loader))
    if clears:
        run.optimizer.zero_grad()
    for p in run.plain_model.parameters():
        p.grad_sample = None
    run.criterion(run.model(features), labels).backward()
    run.optimizer.step()
    first.step(next(iter(first.loader)))
    np.testing.assert_array_equal(weights(run), weights(first))
    assert run.steps == 7


def test_without_the_private_state(make_dice, tmp_path, caplog):
    """What is released can be saved, but the run cannot go on from it, and says so."""
    first, second, path = make_dice(), make_dice(), tmp_path / "c.pt"
    first.epoch()
    for arguments in ({}, {"stays_private": True}):
        caplog.clear()
        first.engine.save_checkpoint(path=path, **arguments)
        assert "lacks the error of the feedback, which is data of the records" in caplog.text
        assert "private" not in torch.load(path, weights_only=True)["hidden_state_run"]
        with pytest.raises(UnsupportedRunError, match="lacks the error of the feedback"):
            second.engine.load_checkpoint(path=path)
    second.epoch()  # nothing was loaded
    fresh = HiddenStatePrivacyEngine()
    fresh.load_checkpoint(path=path, module=make_dice().model)  # as an ended run
    assert fresh.get_epsilon(DELTA) == first.engine.get_epsilon(DELTA)
    assert fresh.privacy_event == first.engine.privacy_event
    with pytest.raises(ValueError, match="nor the error of DiceSGD"):
        first.engine.save_checkpoint(path=tmp_path / "d.pt", include_private_state=True)
    assert [*tmp_path.iterdir()] == [path]


MARK = 777.25
# With its point: addresses and digests have digits of their own, at random.
SHOWN = re.compile(r"77[78]\.25")


def holds(value, number):
    """Whether a file of it does, as a number or in a tensor."""
    file = io.BytesIO()
    torch.save(value, file)
    return any(np.array(number, order).tobytes() in file.getvalue() for order in ("<f8", ">f8"))


def test_the_error_is_nowhere_by_default(make_dice, tmp_path):
    """An error of MARK, of a gradient of norm MARK + 1: in no file, state, text or copy."""
    records = TensorDataset(torch.full((1, 1), MARK + 1, dtype=torch.float64))
    run = make_dice(
        "adam", model=nn.Linear(1, 1, bias=False).double(), max_grad_norm=1.0,
        error_max_grad_norm=1.0, loader={"dataset": records, "batch_size": 1},
    )  # fmt: skip
    engine, optimizer, path = run.engine, run.optimizer, tmp_path / "c.pt"
    run.model(next(iter(run.loader))[0]).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert float(optimizer._errors[0]) == MARK
    engine.save_checkpoint(path=path, **PRIVATE)
    assert holds(torch.load(path, weights_only=True), MARK)
    states = [
        optimizer.state_dict(),
        dict(optimizer.state),
        run.model.state_dict(),
        engine.accountant.state_dict(),
        copy.deepcopy(run.plain_model).state_dict(),
    ]
    for arguments in ({}, {"stays_private": True}):
        engine.save_checkpoint(path=path, **arguments)
        states.append(torch.load(path, weights_only=True))
    assert not any(holds(states, number) for number in (MARK, MARK + 1))
    for text in (engine, optimizer, vars(optimizer), engine.report(DELTA), vars(engine)):
        assert not SHOWN.search(str(text))
    copiers = pickle.dumps, copy.deepcopy, functools.partial(torch.save, f=io.BytesIO())
    for value, copier in itertools.product((engine, optimizer), copiers):
        with pytest.raises((UnsupportedRunError, TypeError, AttributeError)):
            copier(value)


FIELDS = [
    ("error_clip_norm", {"error_max_grad_norm": 0.05}),
    ("gradient_bound", {"gradient_bound": BOUND}),
    ("automatic", {"automatic": True}),
    ("optimizer_class", {"variant": "adam"}),
]


def test_checkpoints_of_other_runs(make_run, make_dice, tmp_path, dataset):
    run, plain = make_dice(), make_run()
    for each, path in ((run, tmp_path / "dice.pt"), (plain, tmp_path / "plain.pt")):
        each.epoch()
        each.engine.save_checkpoint(path=path, **PRIVATE)
    for field, arguments in FIELDS:
        other = make_dice(**arguments)
        with pytest.raises(ValueError, match=f"of another run: expected {field} = "):
            other.engine.load_checkpoint(path=tmp_path / "dice.pt")
        assert not error_of(other).any()
        other.epoch()
    dice = make_dice(model=nn.Linear(5, 3), loader={"dataset": dataset})
    for other, name in ((dice, "plain.pt"), (make_run(), "dice.pt")):
        with pytest.raises(ValueError, match=r"of another run|state of a "):
            other.engine.load_checkpoint(path=tmp_path / name)


def test_private_state_of_half_a_step_or_damaged(make_dice, tmp_path):
    run, path = make_dice(), tmp_path / "c.pt"
    run.epoch()
    run.engine.save_checkpoint(path=path, **PRIVATE)
    with in_pieces(run, 5) as pieces:
        run.step(next(iter(pieces)))
    with pytest.raises(ValueError, match="a piece of one"):
        run.engine.save_checkpoint(path=path, **PRIVATE)
    content = torch.load(path, weights_only=True)
    error = content["hidden_state_run"]["private"]["error"]
    broken = [torch.full_like(part, torch.nan) for part in error]
    for private in ({}, {"error": error[:1]}, {"error": broken}):
        content["hidden_state_run"]["private"] = private
        torch.save(content, path)
        other = make_dice()
        with pytest.raises(ValueError, match=r"damaged|of shapes"):
            other.engine.load_checkpoint(path=path)
        other.epoch()
