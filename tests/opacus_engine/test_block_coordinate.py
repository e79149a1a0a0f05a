"""DP-MBCD in PyTorch: the paper's steps and the event of what ran."""

import math

import block_coordinate as reference
import numpy as np
import pytest
import torch
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from opacus.schedulers import ExponentialNoise
from opacus_block_coordinate import (
    CLIP,
    ONE,
    RATE,
    SIZE,
    SPECIAL,
    batches,
    closure_of,
    factors,
    make,
    train,
    trained,
    values,
)
from torch import nn

import hidden_state_accountants as hsa
from hidden_state_accountants.figures import fixed_up
from hidden_state_adapters.opacus.gradients.ghost_module import GhostGradSampleModule
from hidden_state_adapters.opacus.mechanisms import block_coordinate

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


PROXES = [
    {},
    {"l1": 0.3},
    {"l2": 0.5},
    {"nonnegative": True},
    {"l1": 0.1, "l2": 0.2, "nonnegative": True},
]


# --- the steps of the paper -----------------------------------------------------------------------


@pytest.mark.parametrize("noise_multiplier", [0.0, 0.7])
@pytest.mark.parametrize("regulariser", PROXES)
def test_every_step_is_that_of_the_reference(regulariser, noise_multiplier):
    """Two blocks, each with gradients at the new value of the other; given noise; to rounding."""
    model, optimizer = make(
        noise_multiplier=noise_multiplier,
        generator=torch.Generator().manual_seed(5),
        **regulariser,
    )
    same_noise = torch.Generator().manual_seed(5)
    blocks, clipped = values(model), 0
    for batch in batches(12):
        optimizer.step(closure_of(model, optimizer, batch))
        rows = [b.numpy() for b in batch]
        noise = [
            noise_multiplier * CLIP
            * torch.normal(0.0, 1.0, b.shape, generator=same_noise, dtype=torch.float64).numpy()
            for b in blocks
        ]  # fmt: skip
        gradients = reference.factorisation_gradients(blocks, 0, rows)
        clipped += (np.linalg.norm(gradients.reshape(SIZE, -1), axis=1) > CLIP).sum()
        blocks = reference.step(
            blocks, reference.factorisation_gradients, rows, noise,
            step_size=RATE, divisor=SIZE, clip_norm=CLIP, **regulariser,
        )  # fmt: skip
        for mine, theirs in zip(values(model), blocks, strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-13)
    assert 0 < clipped < 12 * SIZE  # some are clipped, some not
    assert optimizer.num_steps == 12


def test_the_run_that_keras_makes_too():
    start, data, end = reference.shared_run()
    shared = reference.SHARED
    model = factors()
    with torch.no_grad():
        for p, value in zip(model.parameters(), start, strict=True):
            p.copy_(torch.from_numpy(value))
    model, optimizer = make(
        model, sgd={"lr": shared["step_size"]}, max_grad_norm=shared["clip_norm"],
        expected_batch_size=shared["divisor"], l1=shared["l1"], l2=shared["l2"],
    )  # fmt: skip
    train(model, optimizer, [tuple(map(torch.from_numpy, batch)) for batch in data])
    for mine, theirs in zip(values(model), end, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-13)


def test_float32_and_sum_reduction():
    """With a summed loss the step size is lr * b; the same iterates."""
    ends = []
    for dtype, reduction in [("float64", "mean"), ("float64", "sum"), ("float32", "mean")]:
        dtype = getattr(torch, dtype)
        model, optimizer = make(
            factors(dtype, reduction), sgd={"lr": RATE / (SIZE if reduction == "sum" else 1)},
            loss_reduction=reduction, l1=0.02, l2=0.1,
        )  # fmt: skip
        data = [(x.to(dtype), y.to(dtype)) for x, y in batches(8)]
        train(model, optimizer, data, reduction=reduction)
        assert optimizer.step_size == pytest.approx(RATE)
        ends.append(np.concatenate([v.ravel() for v in values(model)]))
    np.testing.assert_allclose(ends[0], ends[1], atol=1e-13)
    np.testing.assert_allclose(ends[0], ends[2], atol=1e-5)


def test_one_block_needs_no_closure():
    """All parameters in one group are clipped as one vector: DPOptimizer's steps."""
    ends = []
    for with_closure in (True, False):
        model, optimizer = make(num_blocks=1)
        for batch in batches(5):
            closure = closure_of(model, optimizer, batch)
            if with_closure:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
        ends.append(values(model))
    model = factors()
    stock = DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=RATE), noise_multiplier=0.0, max_grad_norm=CLIP,
        expected_batch_size=SIZE,
    )  # fmt: skip
    for batch in batches(5):
        closure_of(model, stock, batch)()
        stock.step()
    for one, other, third in zip(*ends, values(model), strict=True):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_allclose(one, third, atol=1e-5)  # its clip has 1e-6 beside the norm


@pytest.mark.parametrize("mode", ["functorch", "hooks", "ghost"])
def test_modes_of_gradients_per_record(mode):
    model = factors(force_functorch=mode == "functorch")
    if mode == "ghost":
        model = GhostGradSampleModule(model.to_standard_module())
    model, optimizer = make(model)
    train(model, optimizer, batches(3))
    plain, other = make()
    train(plain, other, batches(3))
    for mine, theirs in zip(values(model), values(plain), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-13)


@pytest.mark.parametrize("secure_mode", [False, True])
def test_the_noise_has_the_stated_deviation(secure_mode):
    """eta z C / b on the block, fresh in every step and block."""
    model = GradSampleModule(
        nn.Sequential(nn.Linear(100, 100, bias=False), nn.Linear(100, 100, bias=False)).double()
    )
    _, optimizer = make(
        model, noise_multiplier=3.0, expected_batch_size=2, secure_mode=secure_mode,
        generator=torch.Generator().manual_seed(1),
    )  # fmt: skip
    x = torch.zeros(2, 100, dtype=torch.float64)  # no gradients
    draws = []
    for _ in range(4):
        before = values(model)

        def closure():
            optimizer.zero_grad()
            model(x).sum().backward()

        optimizer.step(closure)
        draws += [(a - b).ravel() for a, b in zip(values(model), before, strict=True)]
    draws, std = np.array(draws), RATE * 3.0 * CLIP / 2
    assert abs(draws.std() / std - 1) < 5 / math.sqrt(2 * draws.size)
    assert abs(draws.mean()) < 5 * std / math.sqrt(draws.size)
    correlation = np.corrcoef(draws)[np.triu_indices(len(draws), 1)]
    assert abs(correlation).max() < 5 / math.sqrt(draws.shape[1])


# --- the event ------------------------------------------------------------------------------------


def test_the_event_is_the_run():
    _, optimizer = trained(l2=0.5)
    event = optimizer.privacy_event(dataset_size=12, neighboring_relation=ONE)
    assert event == hsa.BlockCoordinateDpEvent(
        step_size=RATE, noise_variance=RATE * (2.0 * CLIP / SIZE) ** 2 / 2,
        clip_norm=CLIP, batch_size=SIZE, dataset_size=12, num_epochs=2,
        prox_strong_convexity=0.5, num_blocks=2,
    )  # fmt: skip
    assert (event.sensitivity(ONE), event.sensitivity(SPECIAL)) == (2 * CLIP, CLIP)
    special = optimizer.privacy_event(dataset_size=12)  # the accountant knows the relation
    assert special == event
    # Two blocks, two epochs, no contraction: mu^2 = 4 (S / (z C))^2.
    guarantee = hsa.BlockCoordinateAccountant(SPECIAL).compose(special).guarantee
    assert guarantee.mu == pytest.approx(2 / 2.0)
    assert hsa.BlockCoordinateAccountant(ONE).compose(event).guarantee.mu == pytest.approx(2.0)


def test_the_noise_may_change_between_steps():
    model, optimizer = make(noise_multiplier=2.0)
    scheduler = ExponentialNoise(optimizer, gamma=0.5)
    for index, batch in enumerate(batches(6)):
        optimizer.step(closure_of(model, optimizer, batch))
        if index == 2:
            scheduler.step()
    event = optimizer.privacy_event(dataset_size=12, neighboring_relation=SPECIAL)
    variances = RATE * (np.array([[2.0] * 3, [1.0] * 3]) * CLIP / SIZE) ** 2 / 2
    np.testing.assert_allclose(event.noise_variances(), variances)
    mu = hsa.BlockCoordinateAccountant(SPECIAL).compose(event).guarantee.mu
    assert mu == pytest.approx(math.sqrt(2 * (1 / 4 + 1)))


@pytest.mark.parametrize("relation", [ONE, SPECIAL])
@pytest.mark.parametrize("lipschitz", [None, 0.2, 0.6, 0.7, 5.0])
def test_a_bound_on_the_gradients(lipschitz, relation):
    """Where no clip acts the sensitivity is the bound and a convex block is not stretched."""
    model, optimizer = make(num_blocks=1, noise_multiplier=2.0)
    train(model, optimizer, [(0.01 * x, 0.01 * y) for x, y in batches(6)])
    loss = hsa.LossGeometry.convex(2.0, lipschitz=lipschitz)
    event = optimizer.privacy_event(dataset_size=12, neighboring_relation=relation, block_loss=loss)
    factor = 2 if relation is ONE else 1
    assert event.sensitivity(relation) == factor * min(CLIP, lipschitz or math.inf)
    is_clipped = lipschitz is None or lipschitz > CLIP
    assert event.clipping_may_act == is_clipped
    guarantee = hsa.BlockCoordinateAccountant(relation).compose(event).guarantee
    composed = factor * math.sqrt(2) / 2.0  # two epochs
    if is_clipped:
        assert "Theorem A" in guarantee.theorem
    else:
        assert guarantee.mu < composed * lipschitz / CLIP


def test_a_bound_that_does_not_hold():
    """In the first step."""
    model, optimizer = trained(1, num_blocks=1)
    train(model, optimizer, [(0.0 * x, 0.0 * y) for x, y in batches(2)])
    loss = hsa.LossGeometry.convex(2.0, lipschitz=0.01)
    with pytest.raises(hsa.UnsupportedRunError, match="the largest gradient of this run"):
        optimizer.privacy_event(dataset_size=12, neighboring_relation=ONE, block_loss=loss)


@pytest.mark.parametrize("is_convolution", [False, True])
def test_coarse_convolutions_are_not_those_of_a_declared_loss(monkeypatch, is_convolution):
    def refuse(params):
        raise hsa.UnsupportedRunError("coarse")

    monkeypatch.setattr(block_coordinate, "check_convolutions", refuse)
    layer = nn.Conv1d(3, 3, 1) if is_convolution else nn.Linear(1, 1)
    model = GradSampleModule(layer.double())
    _, optimizer = make(model, num_blocks=1, noise_multiplier=1.0)
    model(torch.ones(SIZE, 3 if is_convolution else 1, 1, dtype=torch.float64)).mean().backward()
    optimizer.step()
    loss = hsa.LossGeometry.convex(1.0)
    assert optimizer.report(1e-5, dataset_size=SIZE)
    if is_convolution:
        with pytest.raises(hsa.UnsupportedRunError, match="coarse"):
            optimizer.report(1e-5, dataset_size=SIZE, block_loss=loss)
    else:
        assert optimizer.report(1e-5, dataset_size=SIZE, block_loss=loss)


def test_the_report():
    _, optimizer = trained(num_blocks=1, l2=0.5)
    loss = hsa.LossGeometry.generalized_linear(1.0)
    for relation in (ONE, SPECIAL):
        event = optimizer.privacy_event(
            dataset_size=12, neighboring_relation=relation, block_loss=loss
        )
        epsilon = hsa.BlockCoordinateAccountant(relation).compose(event).get_epsilon(1e-5)
        text = optimizer.report(
            1e-5, dataset_size=12, neighboring_relation=relation, block_loss=loss
        )
        assert f"epsilon = {fixed_up(epsilon, 4)} at delta = 1e-05" in text
        assert relation.name in text
        assert "Theorem A" in text
        assert "2 epochs x 3 fixed batches of 4 records x 1 blocks" in text
    assert "composition" in trained()[1].report(1e-5, dataset_size=12)


class Line(nn.Module):
    """w x: (w x - y)^2 / 2 is a quadratic of curvature x^2."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(1, 1, bias=False).double()
        nn.init.zeros_(self.line.weight)

    def forward(self, x):
        return self.line(x)


@pytest.mark.parametrize("l2", [0.0, 1.0])
@pytest.mark.parametrize("replaced", range(3))
def test_one_scalar_block_against_its_exact_law(replaced, l2):
    """What really happens to two neighbouring data sets is within the report, and near it."""
    x = torch.ones(3, 2, 1, dtype=torch.float64)
    y = torch.zeros(3, 2, 1, dtype=torch.float64)
    ends, noise, epochs = [], 5.0, 4
    for target in (0.5, -0.5):
        model, optimizer = make(
            GradSampleModule(Line()), num_blocks=1, max_grad_norm=0.7, l2=l2,
            expected_batch_size=2,
        )  # fmt: skip
        y[replaced, 0] = target
        train(model, optimizer, list(zip(x, y, strict=True)) * epochs)
        ends.append(float(model._module.line.weight))
        assert optimizer._largest_norm < 0.7  # all of it is linear
    factor = 1 / (1 + RATE * l2)
    std = factor * RATE * noise * 0.7 / 2
    decay = (factor * (1 - RATE)) ** (2 * np.arange(3 * epochs))
    exact_mu = abs(ends[0] - ends[1]) / (std * math.sqrt(decay.sum()))
    model, optimizer = make(
        GradSampleModule(Line()), num_blocks=1, noise_multiplier=noise, max_grad_norm=0.7, l2=l2,
        expected_batch_size=2,
    )  # fmt: skip
    train(model, optimizer, list(zip(x, y, strict=True)) * epochs)
    event = optimizer.privacy_event(
        dataset_size=6, neighboring_relation=ONE, block_loss=hsa.LossGeometry.squared_error(1.0)
    )
    mu = hsa.BlockCoordinateAccountant(ONE).compose(event).guarantee.mu
    assert exact_mu <= mu
    if replaced == 2:  # the worst position; the record uses 1.0 of the sensitivity 1.4
        assert exact_mu > 0.5 * mu


def test_two_blocks_cost_twice_the_square():
    mus = []
    for num_blocks in (1, 2):
        _, optimizer = trained(num_blocks=num_blocks)
        event = optimizer.privacy_event(dataset_size=12, neighboring_relation=SPECIAL)
        assert event.num_blocks == num_blocks
        mus.append(hsa.BlockCoordinateAccountant(SPECIAL).compose(event).guarantee.mu)
    assert mus[1] == pytest.approx(math.sqrt(2) * mus[0])


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.cuda
def test_cuda():
    ends = []
    for device in ("cpu", "cuda"):
        model = factors()
        model.to(device)
        model, optimizer = make(model, l1=0.05, l2=0.1, nonnegative=True)
        train(model, optimizer, [(x.to(device), y.to(device)) for x, y in batches(6)])
        assert {p.device.type for p in model.parameters()} == {device}
        ends.append(values(model))
    for one, other in zip(*ends, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-10)
