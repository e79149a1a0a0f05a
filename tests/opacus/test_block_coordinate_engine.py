"""DP-MBCD through the engine: the steps of the paper on the plan's batches, and their account."""

import itertools
import math

import block_coordinate as reference
import numpy as np
import pytest
import torch
from opacus.schedulers import LambdaNoise
from opacus_block_coordinate import (
    CLIP,
    DELTA,
    NOISE,
    ONE,
    RATE,
    SIZE,
    SPECIAL,
    Session,
    SquaredError,
    X,
    linear,
)
from torch import nn

import hidden_state_accountants as hsa
from hidden_state_accountants.guarantee import Status
from hidden_state_adapters.opacus import BlockCoordinate, HiddenStatePrivacyEngine

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

REGULARISERS = [
    {},
    {"l1": 0.1},
    {"l2": 0.2},
    {"nonnegative": True},
    {"l1": 0.1, "l2": 0.2, "nonnegative": True},
]


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
@pytest.mark.parametrize("regulariser", REGULARISERS)
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


@pytest.mark.parametrize("mode", ["functorch", "ew"])
@pytest.mark.parametrize("num_blocks", [1, 2])
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


def test_a_declared_number_of_steps():
    run = Session(num_steps=6).train()

    def texts(status):
        return [a.text for a in run.engine.assumptions if a.status is status]

    assert any("training ends after step 3 of the 6" in text for text in texts(Status.DECLARED))
    run.train()
    assert "all of the 6 steps declared in advance" in texts(Status.CHECKED)
    assert "constant step size, noise, clip norm" in texts(Status.CHECKED)
    assert not any("fixed in advance" in text for text in texts(Status.DECLARED))
    with pytest.raises(hsa.UnsupportedRunError, match="Expected num_steps = 6 steps"):
        run.train()
    assert run.engine.get_epsilon(DELTA) == epsilon_of(run.event)


def test_steps_that_never_finish_an_epoch():
    """There would be no epsilon for them, and no further step."""
    with pytest.raises(hsa.UnsupportedRunError, match="whole epochs of 3 steps, got 7"):
        Session(num_steps=7)


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


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("clip_norm", {"max_grad_norm": 0.5}),
        ("mechanism", {"mechanism": BlockCoordinate(l1=0.1)}),
        ("mechanism", {"mechanism": BlockCoordinate(nonnegative=True)}),
        ("prox_strong_convexity", {"mechanism": BlockCoordinate(l2=0.1)}),
        ("step_size", {"sgd": {"lr": 0.1}}),
        ("num_blocks", {"num_blocks": 1}),
        ("noise_multiplier", {"noise_multiplier": 3.0}),
        ("num_steps", {"num_steps": 6}),
        ("batch_size", {"loader": {"batch_size": 6}}),
        ("type", {"num_blocks": 1, "mechanism": None}),
    ],
)
def test_the_field_that_differs_is_named(tmp_path, field, options):
    run, path = Session().train(), tmp_path / "c.pt"
    run.engine.save_checkpoint(path=path, stays_private=True)
    other = Session(**options)
    with pytest.raises(ValueError, match=f"of another run: expected {field} = "):
        other.engine.load_checkpoint(path=path)
    assert other.optimizer.num_steps == 0
