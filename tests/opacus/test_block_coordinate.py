"""DP-MBCD through the engine: the paper's steps on the plan's batches, account, checkpoints."""

import functools
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
from hidden_state_accountants import UnsupportedRunError
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


def half_squares(outputs, targets):
    return ((outputs - targets) ** 2).sum(dim=1).mean() / 2


class Session:
    """An engine, a model with one or two blocks, and the shortest loop."""

    def __init__(
        self, num_blocks=2, *, engine=None, model=None, module=None, relation=SPECIAL,
        data=(X, Y), loader=None, sgd=None, **options,
    ):  # fmt: skip
        self.engine = engine or HiddenStatePrivacyEngine(neighboring_relation=relation)
        self.inner = factors() if model is None else model
        self.criterion = options.get("criterion", half_squares)
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
        if len(self.optimizer.blocks) > 1:
            self.optimizer.step(lambda: self.backward(batch))
        else:
            self.backward(batch)
            self.optimizer.step()

    def train(self, epochs=1, loader=None):
        for _ in range(epochs):
            for batch in self.loader if loader is None else loader:
                self.step(batch)
        return self

    @property
    def weights(self):
        return np.concatenate([p.detach().numpy().ravel() for p in self.inner.parameters()])

    @property
    def event(self):
        return self.engine.privacy_event


def linear(num_blocks=1, **options):
    """A convex loss: a softmax head on features of norm 1, bounded by 2."""
    if "model" not in options:
        torch.manual_seed(0)
    arguments = {
        "model": options.get("model") or nn.Linear(3, 2).double(),
        "criterion": nn.CrossEntropyLoss(),
        "data": (nn.functional.normalize(X), torch.arange(len(X)) % 2),
        "loss_geometry": "auto", "feature_norm": 1.0, "max_grad_norm": 2.1,
    }  # fmt: skip
    return Session(num_blocks, **arguments | options)


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
    blocks, gradients = [run.weights], joint_gradients
    if num_blocks == 2:
        blocks, gradients = run.weights.reshape(2, 6), reference.factorisation_gradients
        blocks = [blocks[0].reshape(2, 3), blocks[1].reshape(3, 2)]
    for batch in itertools.chain(run.loader, run.loader):
        run.step(batch)
        blocks = reference.step(
            blocks, gradients, [part.numpy() for part in batch], [0.0] * num_blocks,
            step_size=RATE, divisor=SIZE, clip_norm=CLIP, **regulariser,
        )  # fmt: skip
        expected = np.concatenate([b.ravel() for b in blocks])
        np.testing.assert_allclose(run.weights, expected, rtol=0, atol=1e-13)
    assert len(run.optimizer.blocks) == num_blocks


@pytest.mark.parametrize(("num_blocks", "mode"), [(1, "functorch"), (2, "ew")])
def test_other_ways_to_per_example_gradients(num_blocks, mode):
    usual, run = (
        Session(num_blocks, noise_multiplier=0.0, grad_sample_mode=each).train(2)
        for each in ("hooks", mode)
    )
    np.testing.assert_allclose(run.weights, usual.weights, rtol=0, atol=1e-13)


def test_a_sum_has_the_event_of_the_mean():
    mean, total = (
        Session(loss_reduction=reduction, sgd={"lr": rate}).train()
        for reduction, rate in (("mean", RATE), ("sum", RATE / SIZE))
    )
    assert total.event == mean.event


def test_a_sum_takes_the_steps_of_the_mean():
    options = {"noise_multiplier": 0.0, "mechanism": BlockCoordinate(l1=0.02, l2=0.1)}
    mean = Session(**options).train()
    total = Session(
        loss_reduction="sum", sgd={"lr": RATE / SIZE},
        criterion=lambda outputs, targets: ((outputs - targets) ** 2).sum() / 2, **options,
    ).train()  # fmt: skip
    np.testing.assert_allclose(total.weights, mean.weights, rtol=0, atol=1e-13)


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
    declared = [a.text for a in run.engine.assumptions if a.status is Status.DECLARED]
    assert "schedule of noise fixed in advance" in declared


def test_impossible_noise_is_refused_before_the_first_block_moves():
    run = Session()
    run.optimizer.noise_multiplier, before = 1e-320, run.weights
    with pytest.raises(ValueError, match="Expected noise_multiplier between"):
        run.train()
    np.testing.assert_array_equal(run.weights, before)


def test_full_batches():
    event = Session(batch_order="full", loader={"batch_size": 5}).train(3).event
    assert (event.batch_size, event.dataset_size, event.num_epochs) == (12, 12, 3)
    assert mu_of(event) == pytest.approx(math.sqrt(3 * 2) / NOISE)


# --- what is known about the loss -----------------------------------------------------------------


@pytest.mark.parametrize("relation", [ONE, SPECIAL])
def test_one_block_is_amplified(relation):
    run = linear(relation=relation).train(4)
    loss = hsa.LossGeometry.convex(smoothness=1.0, lipschitz=2.0)  # of two outputs with a bias
    assert run.event.block_loss == loss
    assert run.event.sensitivity(relation) == (4.0 if relation is ONE else 2.0)
    epsilon = run.engine.get_epsilon(DELTA)
    assert epsilon == epsilon_of(run.event, relation)
    assert mu_of(run.event, relation) < 0.9 * run.event.sensitivity(relation) / (2.1 * NOISE) * 2
    assert "Theorem A" in run.engine.report(DELTA)
    told = linear(loss_geometry=loss, feature_norm=None, relation=relation).train(4)
    assert told.event == run.event
    contracting = linear(mechanism=BlockCoordinate(l2=1.0), relation=relation).train(4)
    assert contracting.engine.get_epsilon(DELTA) < epsilon


def test_several_blocks_are_not_amplified():
    """Weight and bias of one layer: of the declared loss the bound on the gradients is of use."""
    run = linear(num_blocks=2).train(4)
    assert mu_of(run.event) == pytest.approx(math.sqrt(4 * 2) * 2.0 / 2.1 / NOISE)
    assert run.engine.get_epsilon(DELTA) == epsilon_of(run.event)
    assert "composition" in run.engine.report(DELTA)
    data = X / 9, torch.arange(len(X)) % 2
    short = {"data": data, "noise_multiplier": 0.0, "max_grad_norm": 0.1}
    known, plain = linear(2, **short), linear(2, **short, loss_geometry=None, feature_norm=None)
    np.testing.assert_allclose(known.train().weights, plain.train().weights, rtol=0, atol=1e-13)


# --- releases and checkpoints ---------------------------------------------------------------------


def test_a_release_in_the_middle_costs_composition():
    run, quiet = (linear(mechanism=BlockCoordinate(l2=1.0)).train(2) for _ in range(2))
    run.engine.release()  # of the last iterate, which is released anyway
    assert run.event == quiet.event
    assert run.event.block_loss is not None
    run.train()
    assert run.event.block_loss is None
    assert run.event.clip_norm == 2.1
    assert mu_of(run.event) == pytest.approx(math.sqrt(3) / NOISE)  # three epochs, S = C
    quiet.train().engine.release()
    assert quiet.engine.get_epsilon(DELTA) < 0.9 * run.engine.get_epsilon(DELTA)


@pytest.mark.parametrize("make", [linear, Session])
@pytest.mark.parametrize("stop", [2, 3])
def test_a_run_goes_on_exactly(tmp_path, stop, make):
    """Without noise, whose generator is in no checkpoint; within an epoch and at its end."""
    options = {"noise_multiplier": 0.0, "mechanism": BlockCoordinate(l1=0.02, l2=0.3),
               "loss_geometry": None, "feature_norm": None}  # fmt: skip
    whole, first, second = (make(**options) for _ in range(3))
    first.train(loader=itertools.islice(first.loader, stop))
    first.engine.save_checkpoint(path=tmp_path / "c.pt", stays_private=True)
    torch.load(tmp_path / "c.pt", weights_only=True)
    second.engine.load_checkpoint(path=tmp_path / "c.pt")
    for run in (whole, second):
        while run.optimizer.num_steps < 6:
            run.train()
    np.testing.assert_array_equal(second.weights, whole.weights)
    assert second.event == whole.event


@pytest.mark.parametrize("stays_private", [True, False])
def test_an_account_goes_on(tmp_path, stays_private):
    """Private checkpoints keep the amplification; a public one is a release."""
    first, second, path = linear(), linear(), tmp_path / "c.pt"
    first.train(2)
    first.optimizer.noise_multiplier = NOISE / 2
    first.engine.save_checkpoint(path=path, stays_private=stays_private)
    second.engine.load_checkpoint(path=path)
    assert second.optimizer.noise_multiplier == NOISE / 2
    second.optimizer.noise_multiplier = NOISE
    assert second.engine.get_epsilon(DELTA) == first.engine.get_epsilon(DELTA)
    second.train(2)
    if stays_private:
        assert second.event == linear().train(4).event
    else:
        assert second.event.block_loss is None
        assert mu_of(second.event) == pytest.approx(math.sqrt(4) / NOISE)


# --- what is refused, and that no epsilon is left after it ----------------------------------------


def questions(run):
    """What must not be answered."""
    asks = run.engine.get_epsilon, run.engine.report, run.engine.compare
    return [*(functools.partial(ask, DELTA) for ask in asks), lambda: run.event]


def test_no_figures_and_no_other_run_before_the_end_of_an_epoch():
    run = Session().train()
    epsilon, batches = run.engine.get_epsilon(DELTA), iter(run.loader)
    again = {"engine": run.engine, "model": run.inner, "module": run.model}
    target = {"target_epsilon": 9.0, "target_delta": DELTA, "epochs": 1}
    later = (lambda: Session(**again), lambda: Session(**again, **target))
    for _ in range(2):
        run.step(next(batches))
        for ask in (*questions(run), *later):
            with pytest.raises(UnsupportedRunError, match="Finish the epoch"):
                ask()
    run.step(next(batches))
    assert run.engine.get_epsilon(DELTA) > epsilon
    Session(**again).train()
    assert [e.num_epochs for e in run.event.events] == [2, 1]


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
    with pytest.raises((UnsupportedRunError, ValueError, TypeError), match=text):
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


def draws(run):
    """Every pass has a batch of its own."""
    drawn = iter(run.loader)
    run.optimizer.step(lambda: run.backward(next(drawn)))


def writes(run):
    """Every pass changes the batch, which stays the same object."""
    records, targets = (tensor.clone() for tensor in next(iter(run.loader)))
    run.optimizer.step(lambda: run.backward((records.mul_(0.9), targets)))


PASSES, ANOTHER = "training passes|no per-example gradients", (X[4:8], Y[4:8])
MAPPED = {"loop_maps_records": True}
MISUSE = [
    (in_the_second_block(lambda r, b: r.backward(ANOTHER)), {}, "the loader drew"),
    (draws, {}, "the loader drew"),
    (draws, MAPPED, "different inputs"),
    (writes, MAPPED, "different inputs"),
    (in_the_second_block(two_forwards), {}, PASSES),
    (in_the_second_block(lambda r, b: None), {}, PASSES),
    (in_the_second_block(lambda r, b: r.step(b)), {}, "step was not finished"),
    (in_the_second_block(lambda r, b: r.engine.get_epsilon(DELTA)), {}, "not finished"),
    (in_the_second_block(lambda r, b: r.engine.release()), {}, "not finished"),
]


@pytest.mark.parametrize(("misuse", "options", "text"), MISUSE)
def test_what_is_no_step_of_blocks(misuse, options, text):
    """Refused, and then there is no epsilon and no event."""
    run = Session(**options).train()
    with pytest.raises(UnsupportedRunError, match=text):
        misuse(run)
    for ask in questions(run):
        with pytest.raises(UnsupportedRunError):
            ask()
    with pytest.raises(UnsupportedRunError, match="earlier step"):
        run.train()


def test_steps_of_blocks_need_a_closure_and_whole_batches():
    with pytest.raises(UnsupportedRunError, match="got no closure"):
        Session().optimizer.step()
    run = Session(1)
    with (
        BatchMemoryManager(
            data_loader=run.loader, max_physical_batch_size=2, optimizer=run.optimizer
        ) as pieces,
        pytest.raises(UnsupportedRunError, match="whole batches"),
    ):
        run.train(loader=pieces)


def test_a_block_that_moved_stays_with_the_run():
    """A step that was interrupted between its blocks is in no epsilon, and stays in the model."""
    run = Session()
    before = run.weights

    def stop(*_):
        raise KeyError("stop")

    with pytest.raises(KeyError):
        in_the_second_block(stop)(run)
    assert (run.weights != before).tolist() == [True] * 6 + [False] * 6
    for again in (
        lambda: run.engine.get_epsilon(DELTA),
        lambda: Session(engine=run.engine, model=run.inner, module=run.model),
    ):
        with pytest.raises(UnsupportedRunError, match="interrupted while it changed"):
            again()
