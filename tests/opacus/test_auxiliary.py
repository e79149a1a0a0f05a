"""Algorithm 4 of Chen & Liu 2025: values and gradients of the network, and a private run."""

import itertools

import numpy as np
import pytest
import torch
from auxiliary_network import AuxiliaryNetwork
from scipy import optimize
from torch.utils.data import DataLoader, TensorDataset

from hidden_state_adapters.opacus import BlockCoordinateOptimizer, HiddenStatePrivacyEngine

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

RECORDS, BATCH, CLIP, RATE = 8, 4, 0.5, 0.25
WIDTHS, RADIUS, PENALTY = (5, 4, 3, 2), 0.9, 0.7

# One record at a time, from the definitions.


def weights():
    """W_0 to W_D, each of shape (outputs, inputs)."""
    rng = np.random.default_rng(0)
    return [rng.normal(size=(n, m)) for m, n in itertools.pairwise(WIDTHS)]


def inputs_and_targets(count):
    """Inputs (count, 5) and targets (count, 2)."""
    rng = np.random.default_rng(1)
    return rng.normal(size=(count, WIDTHS[0])), rng.normal(size=(count, WIDTHS[-1]))


def shortened(x):
    return x * min(1.0, RADIUS / max(np.linalg.norm(x), 1e-300))


def auxiliary(matrices, inputs, target, sweeps):
    """x_0 to x_D and u_0 to u_{D-1} of one record; minimisers by a search, not by a formula."""
    last = len(matrices) - 1
    x, u = [shortened(inputs)], []
    for matrix in matrices[:-1]:
        u.append(matrix @ x[-1])
        x.append(shortened(np.maximum(u[-1], 0)))
    for _ in range(sweeps):
        for d in range(last, 0, -1):

            def of_x(v, d=d):
                near = PENALTY / 2 * np.sum((v - np.maximum(u[d - 1], 0)) ** 2)
                if d == last:
                    return near + np.sum((matrices[d] @ v - target) ** 2) / 2
                return near + PENALTY / 2 * np.sum((u[d] - matrices[d] @ v) ** 2)

            x[d] = shortened(optimize.minimize(of_x, x[d], tol=1e-14).x)
        for d in range(last):
            before, after = matrices[d] @ x[d], x[d + 1]
            u[d] = np.array([least_u(b, a) for b, a in zip(before, after, strict=True)])
    return x, u


def least_u(before, after):
    """argmin of (after - relu(u))^2 + (u - before)^2, on a grid with every stationary point."""
    grid = np.concatenate([np.linspace(-5, 5, 4001), [before, 0.0, (before + after) / 2]])
    return grid[np.argmin((after - np.maximum(grid, 0)) ** 2 + (grid - before) ** 2)]


def lagrangian(matrices, inputs, target, sweeps):
    """F of one record without the squares that have no weights, and its gradient in every W."""
    x, u = auxiliary(matrices, inputs, target, sweeps)
    aims, scales = [*u, target], [PENALTY] * len(u) + [1.0]
    left = [m @ v - aim for m, v, aim in zip(matrices, x, aims, strict=True)]
    total = sum(s / 2 * rest @ rest for s, rest in zip(scales, left, strict=True))
    return total, [s * np.outer(r, v) for s, r, v in zip(scales, left, x, strict=True)]


def network(sweeps=1):
    model = AuxiliaryNetwork(WIDTHS, radius=RADIUS, penalty=PENALTY, sweeps=sweeps).double()
    with torch.no_grad():
        for layer, matrix in zip(model.layers, weights(), strict=True):
            layer.weight.copy_(torch.from_numpy(matrix))
    return model


@pytest.mark.parametrize("sweeps", [1, 3])
def test_values_gradients_and_predictions(sweeps):
    model, matrices = network(sweeps), weights()
    inputs, targets = inputs_and_targets(6)
    found = model(torch.from_numpy(inputs), torch.from_numpy(targets))
    found.sum().backward()
    ends = [lagrangian(matrices, x, y, sweeps) for x, y in zip(inputs, targets, strict=True)]
    np.testing.assert_allclose(found.detach(), [value for value, _ in ends], rtol=1e-6)
    for d, layer in enumerate(model.layers):
        expected = sum(gradients[d] for _, gradients in ends)
        np.testing.assert_allclose(layer.weight.grad, expected, atol=1e-5)
    x = shortened(inputs[0])
    for matrix in matrices[:-1]:
        x = shortened(np.maximum(matrix @ x, 0))
    predicted = model(torch.from_numpy(inputs)).detach()[0]
    np.testing.assert_allclose(predicted, matrices[-1] @ x, rtol=1e-12)


@pytest.mark.parametrize("noise", [0.0, 4.0])
def test_a_private_run(noise):
    """Without noise the clipped steps of the paper; every layer counts in every epoch."""
    inputs, targets = inputs_and_targets(RECORDS)
    plain, engine = network(), HiddenStatePrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=plain, optimizer=torch.optim.SGD(plain.blocks(), lr=RATE),
        data_loader=DataLoader(
            TensorDataset(torch.from_numpy(inputs), torch.from_numpy(targets)), batch_size=BATCH
        ),
        noise_multiplier=noise, max_grad_norm=CLIP, batch_order="cyclic",
        optimizer_class=BlockCoordinateOptimizer,
    )  # fmt: skip
    for _ in range(2):
        for x, y in loader:

            def closure(x=x, y=y):
                optimizer.zero_grad()
                model(x, y).mean().backward()

            optimizer.step(closure)
    assert (engine.privacy_event.num_blocks, engine.privacy_event.num_epochs) == (3, 2)
    if noise:
        (guarantee,) = (run.guarantee("replace_special") for run in engine.accountant.recorders)
        assert guarantee.mu == pytest.approx(np.sqrt(3 * 2) / noise, rel=1e-9)
        return
    matrices = weights()
    for t in range(2 * RECORDS // BATCH):
        rows = (np.arange(BATCH) + t * BATCH) % RECORDS
        for d in range(len(matrices)):
            total = np.zeros_like(matrices[d])
            for i in rows:
                gradient = lagrangian(matrices, inputs[i], targets[i], 1)[1][d]
                total += gradient * min(1.0, CLIP / max(np.linalg.norm(gradient), 1e-300))
            matrices[d] = matrices[d] - RATE / BATCH * total
    for layer, matrix in zip(plain.layers, matrices, strict=True):
        np.testing.assert_allclose(layer.weight.detach(), matrix, atol=1e-4)
