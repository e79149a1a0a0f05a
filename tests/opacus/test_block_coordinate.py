"""DP-MBCD through the engine: the steps of the paper on the plan's batches, and their account."""

import itertools
import math

import block_coordinate as reference
import numpy as np
import pytest
import torch
from dp_accounting import NeighboringRelation
from opacus.schedulers import LambdaNoise
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hidden_state_accountants as hsa
from hidden_state_accountants.guarantee import Status
from hidden_state_adapters.opacus import BallProjection, BlockCoordinate, HiddenStatePrivacyEngine

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

ONE, SPECIAL = NeighboringRelation.REPLACE_ONE, NeighboringRelation.REPLACE_SPECIAL
RATE, SIZE, CLIP, DELTA, NOISE = 0.2, 4, 0.7, 1e-5, 2.0
X, Y = torch.randn(2, 12, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def factors():
    """x -> W2 W1 x: bilinear in the two blocks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 3, bias=False)).double()


class SquaredError(nn.Module):
    """Half of the squared norm of the residual of every record."""

    def __init__(self, reduction="mean"):
        super().__init__()
        self.reduction = reduction

    def forward(self, outputs, targets):
        return getattr(((outputs - targets) ** 2).sum(dim=1) / 2, self.reduction)()


class Session:
    """An engine, a model with one or two blocks, and the shortest loop."""

    def __init__(
        self, num_blocks=2, *, engine=None, model=None, module=None, relation=SPECIAL,
        data=(X, Y), loader=None, sgd=None, **options,
    ):  # fmt: skip
        self.engine = engine or HiddenStatePrivacyEngine(neighboring_relation=relation)
        self.inner = factors() if model is None else model
        self.criterion = options.setdefault("criterion", SquaredError())
        params = list(self.inner.parameters())
        groups = params if num_blocks == 1 else [{"params": [p]} for p in params]
        arguments = {
            "module": module or self.inner,
            "optimizer": torch.optim.SGD(groups, **{"lr": RATE, **(sgd or {})}),
            "data_loader": DataLoader(
                TensorDataset(*data), **{"batch_size": SIZE, **(loader or {})}
            ),
            "max_grad_norm": CLIP,
            "batch_order": "cyclic",
            "mechanism": BlockCoordinate(),
        }
        make = self.engine.make_private_with_epsilon
        if "target_epsilon" not in options:
            make = self.engine.make_private
            arguments["noise_multiplier"] = NOISE
        result = make(**arguments | options)
        self.model, self.optimizer, self.loader = result[0], result[1], result[-1]

    def backward(self, batch):
        self.optimizer.zero_grad()
        self.criterion(self.model(batch[0]), batch[1]).backward()

    def step(self, batch):
        self.optimizer.step(lambda: self.backward(batch))

    def train(self, epochs=1, loader=None):
        for _ in range(epochs):
            for batch in self.loader if loader is None else loader:
                self.step(batch)
        return self

    @property
    def values(self):
        return [p.detach().numpy().copy() for p in self.inner.parameters()]

    @property
    def event(self):
        return self.engine.privacy_event


def linear(**options):
    """One block with a convex loss: a softmax head on features of norm 1, bounded by 2."""
    if "model" not in options:
        torch.manual_seed(0)
    arguments = {
        "model": options.get("model") or nn.Linear(3, 2).double(),
        "criterion": nn.CrossEntropyLoss(),
        "data": (nn.functional.normalize(X), torch.arange(len(X)) % 2),
        "loss_geometry": "auto", "feature_norm": 1.0, "max_grad_norm": 2.1,
    }  # fmt: skip
    return Session(1, **arguments | options)


def assert_same(one, other, **tolerance):
    for mine, theirs in zip(one, other, strict=True):
        np.testing.assert_allclose(mine, theirs, **{"rtol": 0, "atol": 0, **tolerance})


def mu_of(event, relation=SPECIAL):
    return hsa.BlockCoordinateAccountant(relation).compose(event).guarantee.mu


def epsilon_of(event, relation=SPECIAL):
    return hsa.BlockCoordinateAccountant(relation).compose(event).get_epsilon(DELTA)


# --- the steps ------------------------------------------------------------------------------------


def joint_gradients(blocks, i, batch):
    """Both matrices as one block, which is clipped as one vector."""
    both = blocks[0][:6].reshape(2, 3), blocks[0][6:].reshape(3, 2)
    parts = [reference.factorisation_gradients(both, k, batch) for k in (0, 1)]
    return np.concatenate([part.reshape(SIZE, -1) for part in parts], axis=1)


@pytest.mark.parametrize("num_blocks", [1, 2])
@pytest.mark.parametrize("regulariser", [{}, {"l1": 0.1, "l2": 0.2}, {"nonnegative": True}])
def test_every_step_is_that_of_the_reference(regulariser, num_blocks):
    run = Session(num_blocks, noise_multiplier=0.0, mechanism=BlockCoordinate(**regulariser))
    blocks, gradients = run.values, reference.factorisation_gradients
    if num_blocks == 1:
        blocks, gradients = [np.concatenate([b.ravel() for b in blocks])], joint_gradients
    for batch in itertools.chain(run.loader, run.loader):
        run.step(batch)
        blocks = reference.step(
            blocks, gradients, [part.numpy() for part in batch], [0.0] * num_blocks,
            step_size=RATE, divisor=SIZE, clip_norm=CLIP, **regulariser,
        )  # fmt: skip
        flat = [np.concatenate([b.ravel() for b in side]) for side in (run.values, blocks)]
        np.testing.assert_allclose(*flat, rtol=0, atol=1e-13)
    assert run.optimizer.num_steps == 6
    assert len(run.optimizer.blocks) == num_blocks


def test_one_block_needs_no_closure():
    run, plain = (Session(1, noise_multiplier=0.0) for _ in range(2))
    run.train(2)
    for batch in itertools.chain(plain.loader, plain.loader):
        plain.backward(batch)
        plain.optimizer.step()
    assert_same(run.values, plain.values)
    assert run.event == plain.event


@pytest.mark.parametrize(("mode", "num_blocks"), [("functorch", 1), ("ew", 2)])
def test_other_ways_to_per_example_gradients(mode, num_blocks):
    run, other = (
        Session(num_blocks, noise_multiplier=0.0, grad_sample_mode=m).train(2)
        for m in ("hooks", mode)
    )
    assert_same(run.values, other.values, atol=1e-13)
    assert run.event == other.event


def test_sum_reduction_needs_a_smaller_learning_rate_only():
    run = Session(noise_multiplier=0.0, mechanism=BlockCoordinate(l1=0.02, l2=0.1)).train(2)
    total = Session(
        noise_multiplier=0.0, mechanism=BlockCoordinate(l1=0.02, l2=0.1),
        loss_reduction="sum", sgd={"lr": RATE / SIZE},
        criterion=SquaredError("sum"),
    ).train(2)  # fmt: skip
    assert_same(run.values, total.values, atol=1e-13)
    assert run.event == total.event


# --- the account ----------------------------------------------------------------------------------


@pytest.mark.parametrize("relation", [ONE, SPECIAL])
@pytest.mark.parametrize("num_blocks", [1, 2])
def test_the_event_is_the_run(num_blocks, relation):
    run = Session(num_blocks, mechanism=BlockCoordinate(l2=0.5), relation=relation).train(2)
    assert run.event == hsa.BlockCoordinateDpEvent(
        step_size=RATE, noise_variance=RATE * (NOISE * CLIP / SIZE) ** 2 / 2, clip_norm=CLIP,
        batch_size=SIZE, dataset_size=12, num_epochs=2, prox_strong_convexity=0.5,
        num_blocks=num_blocks,
    )  # fmt: skip
    factor = 2 if relation is ONE else 1
    assert mu_of(run.event, relation) == pytest.approx(factor * math.sqrt(2 * num_blocks) / NOISE)
    assert run.engine.get_epsilon(DELTA) == epsilon_of(run.event, relation)


@pytest.mark.parametrize("make", [Session, linear])
def test_noise_for_a_target(make):
    target = {"target_epsilon": 3.0, "target_delta": DELTA, "epochs": 4}
    run = make(mechanism=BlockCoordinate(l2=0.5), **target).train(4)
    assert 2.99 < run.engine.get_epsilon(DELTA) <= 3.0
    shared = {"engine": run.engine, "model": run.inner, "module": run.model}
    with pytest.raises(ValueError, match="no noise undoes it"):
        make(**shared, target_epsilon=2.0, target_delta=DELTA, epochs=4)
    make(**shared, target_epsilon=5.0, target_delta=DELTA, epochs=2).train(2)
    assert 4.99 < run.engine.get_epsilon(DELTA) <= 5.0


def test_the_noise_may_change_between_steps():
    run = Session(num_steps=6)
    scheduler = LambdaNoise(run.optimizer, noise_lambda=lambda epoch: 0.5**epoch)
    run.train()
    scheduler.step()
    run.train()
    variances = RATE * (np.array([[NOISE] * 3, [NOISE / 2] * 3]) * CLIP / SIZE) ** 2 / 2
    np.testing.assert_allclose(run.event.noise_variances(), variances)
    assert mu_of(run.event) == pytest.approx(math.sqrt(2 * (1 / 4 + 1)))
    assert run.engine.get_epsilon(DELTA) == epsilon_of(run.event)
    assert "noise multiplier: 1 to 2" in run.engine.report(DELTA)
    declared = [a.text for a in run.engine.assumptions if a.status is Status.DECLARED]
    assert "schedule of noise fixed in advance" in declared


def test_full_batches():
    run = Session(batch_order="full", loader={"batch_size": 5}).train(3)
    assert len(run.loader) == 1
    assert run.optimizer.num_steps == 3
    event = run.event
    assert (event.batch_size, event.dataset_size, event.num_epochs) == (12, 12, 3)
    assert mu_of(event) == pytest.approx(math.sqrt(3 * 2) / NOISE)
    assert run.engine.get_epsilon(DELTA) == epsilon_of(event)


# --- what is known about the loss -----------------------------------------------------------------


@pytest.mark.parametrize("relation", [ONE, SPECIAL])
def test_one_block_is_amplified(relation):
    run = linear(relation=relation).train(4)
    loss = hsa.LossGeometry.convex(smoothness=1.0, lipschitz=2.0)  # of two outputs with a bias
    assert run.event.block_loss == loss
    assert run.event.sensitivity(relation) == (4.0 if relation is ONE else 2.0)
    assert not run.event.clipping_may_act
    assert run.engine.get_epsilon(DELTA) == epsilon_of(run.event, relation)
    assert mu_of(run.event, relation) < 0.9 * run.event.sensitivity(relation) / (2.1 * NOISE) * 2
    text = run.engine.report(DELTA)
    assert "Theorem A" in text
    assert "epsilon if every iterate were released" in text
    told = linear(loss_geometry=loss, feature_norm=None, relation=relation).train(4)
    assert told.event == run.event
    assert told.engine.get_epsilon(DELTA) == run.engine.get_epsilon(DELTA)
    contracting = linear(mechanism=BlockCoordinate(l2=1.0), relation=relation).train(4)
    assert contracting.engine.get_epsilon(DELTA) < run.engine.get_epsilon(DELTA)


def test_several_blocks_are_not_amplified():
    """Weight and bias of one layer: of the declared loss the bound on the gradients is of use."""
    torch.manual_seed(0)
    model, data = nn.Linear(3, 2).double(), (nn.functional.normalize(X), torch.arange(12) % 2)
    options = {"criterion": nn.CrossEntropyLoss(), "data": data, "max_grad_norm": 2.1}
    run = Session(2, model=model, loss_geometry="auto", feature_norm=1.0, **options).train(4)
    assert mu_of(run.event) == pytest.approx(math.sqrt(4 * 2) * 2.0 / 2.1 / NOISE)
    assert run.engine.get_epsilon(DELTA) == epsilon_of(run.event)
    assert "composition" in run.engine.report(DELTA)


# --- releases and checkpoints ---------------------------------------------------------------------


def test_a_release_in_the_middle_costs_composition():
    run = linear(mechanism=BlockCoordinate(l2=1.0)).train(2)
    before = run.event
    run.engine.release()  # of the last iterate, which is released anyway
    assert run.event == before
    assert before.block_loss is not None
    run.train()
    assert run.event.block_loss is None
    assert run.event.clip_norm == 2.1
    assert mu_of(run.event) == pytest.approx(math.sqrt(3) / NOISE)  # three epochs, S = C
    assert run.engine.get_epsilon(DELTA) == epsilon_of(run.event)
    assert "composition" in run.engine.report(DELTA)
    quiet = linear(mechanism=BlockCoordinate(l2=1.0)).train(3)
    quiet.engine.release()
    assert quiet.event.block_loss is not None
    assert quiet.engine.get_epsilon(DELTA) < 0.9 * run.engine.get_epsilon(DELTA)


@pytest.mark.parametrize("stop", [2, 3])
def test_a_run_goes_on_exactly(tmp_path, stop):
    """Without noise, whose generator is in no checkpoint; within an epoch and at its end."""
    options = {"noise_multiplier": 0.0, "mechanism": BlockCoordinate(l1=0.02, l2=0.3),
               "loss_geometry": None, "feature_norm": None}  # fmt: skip
    path = tmp_path / "c.pt"
    for make in (linear, Session):
        whole, first, second = (make(**options) for _ in range(3))
        whole.train(2)
        for batch in itertools.islice(first.loader, stop):
            first.step(batch)
        first.engine.save_checkpoint(path=path, stays_private=True)
        torch.load(path, weights_only=True)
        second.engine.load_checkpoint(path=path)
        assert_same(second.values, first.values)
        while second.optimizer.num_steps < 6:
            second.train()
        assert_same(second.values, whole.values)
        assert second.event == whole.event


def test_an_account_goes_on(tmp_path):
    """Private checkpoints keep the amplification; a public one is a release."""
    whole, path = linear().train(4), tmp_path / "c.pt"
    for stays_private in (True, False):
        first, second = linear(), linear()
        first.train(2)
        first.optimizer.noise_multiplier = NOISE / 2
        first.engine.save_checkpoint(path=path, stays_private=stays_private)
        second.engine.load_checkpoint(path=path)
        assert second.optimizer.noise_multiplier == NOISE / 2
        second.optimizer.noise_multiplier = NOISE
        assert second.engine.get_epsilon(DELTA) == first.engine.get_epsilon(DELTA)
        second.train(2)
        assert (second.event == whole.event) == stays_private
        if not stays_private:
            assert second.event.block_loss is None
            assert mu_of(second.event) == pytest.approx(math.sqrt(4) / NOISE)
        alone = HiddenStatePrivacyEngine()
        second.engine.save_checkpoint(path=path)
        alone.load_checkpoint(path=path, module=linear().model)
        assert alone.get_epsilon(DELTA) == second.engine.get_epsilon(DELTA)
        assert "4 epochs x 3 fixed batches" in alone.report(DELTA)


# --- what is refused, and that no epsilon is left after it ----------------------------------------


def test_no_figures_before_the_end_of_an_epoch():
    run = Session().train()
    epsilon = run.engine.get_epsilon(DELTA)
    batches = iter(run.loader)
    for _ in range(2):
        run.step(next(batches))
        for ask in (run.engine.get_epsilon, run.engine.report, run.engine.compare):
            with pytest.raises(hsa.UnsupportedRunError, match="Finish the epoch"):
                ask(DELTA)
        with pytest.raises(hsa.UnsupportedRunError, match="Finish the epoch"):
            _ = run.event
    run.step(next(batches))
    assert run.engine.get_epsilon(DELTA) > epsilon
    with pytest.raises(ValueError, match="at least one step"):
        _ = Session().event


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"after": BallProjection(5.0)}, "after = None.*l1, l2 and nonnegative"),
        ({"schedule": RATE}, "schedule = None.*constant step size"),
        ({"num_steps": 7}, "whole epochs of 3 steps, got 7"),  # there would be no epsilon for them
        ({"sgd": {"weight_decay": 0.1}}, "weight_decay = 0.*Use l2"),
        ({"sgd": {"momentum": 0.9}}, "momentum = 0"),
        ({"batch_order": "poisson"}, 'batch_order="cyclic" or "full".*"poisson"'),
        ({"max_grad_norm": [0.7, 0.7]}, "max_grad_norm"),
    ],
)  # fmt: skip
def test_arguments_that_are_refused(options, text):
    with pytest.raises((hsa.UnsupportedRunError, ValueError, TypeError), match=text):
        Session(**options)


def in_the_second_block(change):
    """A step whose second pass does something else."""

    def misuse(run):
        batch, calls = next(iter(run.loader)), []

        def closure():
            calls.append(1)
            return run.backward(batch) if len(calls) == 1 else change(run, batch)

        run.optimizer.step(closure)

    return misuse


def two_forwards(run, batch):
    run.model(batch[0])
    run.backward(batch)


def moved(run, batch):
    next(run.inner.parameters()).data.add_(0.1)
    run.backward(batch)


def draws(run):
    """Every pass has a batch of its own."""
    drawn = iter(run.loader)
    run.optimizer.step(lambda: run.backward(next(drawn)))


def writes(run):
    """Every pass changes the batch, which stays the same object."""
    records, targets = (tensor.clone() for tensor in next(iter(run.loader)))
    run.optimizer.step(lambda: run.backward((records.mul_(0.9), targets)))


PASSES, ANOTHER = "training passes|no per-example gradients", (X[4:8], Y[4:8])
MISUSE = {
    "other inputs": (in_the_second_block(lambda r, b: r.backward(ANOTHER)), "the loader drew"),
    "another batch": (draws, "the loader drew"),
    "two forwards": (in_the_second_block(two_forwards), PASSES),
    "no forward": (in_the_second_block(lambda r, b: None), PASSES),
    "step": (in_the_second_block(lambda r, b: r.step(b)), "step was not finished"),
    "epsilon": (in_the_second_block(lambda r, b: r.engine.get_epsilon(DELTA)), "not finished"),
    "release": (in_the_second_block(lambda r, b: r.engine.release()), "not finished"),
    "moved": (in_the_second_block(moved), "changed outside|other parameters"),
}


@pytest.mark.parametrize("name", MISUSE)
def test_what_the_loop_does_otherwise(name):
    """Refused, and then there is no epsilon and no event."""
    misuse, text = MISUSE[name]
    run = Session().train()
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        misuse(run)
    for ask in (run.engine.get_epsilon, run.engine.report, run.engine.compare):
        with pytest.raises((hsa.UnsupportedRunError, ValueError)):
            ask(DELTA)
    with pytest.raises(hsa.UnsupportedRunError, match="earlier step"):
        run.train()
    with pytest.raises((hsa.UnsupportedRunError, ValueError)):
        _ = run.event


def test_what_is_no_step_of_blocks():
    run = Session()
    with pytest.raises(hsa.UnsupportedRunError, match="got no closure"):
        run.optimizer.step()
    with pytest.raises(hsa.UnsupportedRunError, match="different inputs"):
        draws(Session(loop_maps_records=True))
    with pytest.raises(hsa.UnsupportedRunError, match="different inputs"):
        writes(Session(loop_maps_records=True))
    run = Session(1)
    with (
        pytest.raises(hsa.UnsupportedRunError, match="whole batches"),
        BatchMemoryManager(
            data_loader=run.loader, max_physical_batch_size=2, optimizer=run.optimizer
        ) as pieces,
    ):
        run.train(loader=pieces)


def test_a_run_ends_at_the_end_of_an_epoch():
    """A later one would leave the engine without an epsilon for good."""
    run = Session()
    drawn = iter(run.loader)
    run.step(next(drawn))
    again = {"engine": run.engine, "model": run.inner, "module": run.model}
    for options in ({}, {"target_epsilon": 9.0, "target_delta": DELTA, "epochs": 1}):
        with pytest.raises(hsa.UnsupportedRunError, match="Finish the epoch"):
            Session(**again, **options)
    run.train(loader=drawn)
    Session(**again).train()
    assert [e.num_epochs for e in run.event.events] == [1, 1]
