"""Networks with auxiliary variables: values, gradients, blocks, and a private run."""

import auxiliary as reference
import numpy as np
import pytest
import torch
from auxiliary_network import AuxiliaryNetwork
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hidden_state_adapters.opacus import (
    BlockCoordinateOptimizer,
    HiddenStatePrivacyEngine,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

RECORDS, BATCH, CLIP, RATE = 8, 4, 0.5, 0.25


def network(sweeps=1, seed=0):
    model = AuxiliaryNetwork(
        reference.WIDTHS, radius=reference.RADIUS, penalty=reference.PENALTY, sweeps=sweeps
    ).double()
    with torch.no_grad():
        for layer, matrix in zip(model.layers, reference.weights(seed), strict=True):
            layer.weight.copy_(torch.from_numpy(matrix))
    return model


@pytest.mark.parametrize("sweeps", [1, 3])
def test_values_and_gradients(sweeps):
    model = network(sweeps)
    inputs, targets = reference.records(6)
    found = model(torch.from_numpy(inputs), torch.from_numpy(targets))
    found.sum().backward()
    matrices = reference.weights()
    ends = [
        reference.lagrangian(matrices, x, y, sweeps) for x, y in zip(inputs, targets, strict=True)
    ]
    np.testing.assert_allclose(found.detach(), [value for value, _ in ends], rtol=1e-6)
    for d, layer in enumerate(model.layers):
        expected = sum(gradients[d] for _, gradients in ends)
        np.testing.assert_allclose(layer.weight.grad, expected, atol=1e-5)


def test_predictions_are_those_of_the_network():
    inputs, _ = reference.records(4)
    matrices = reference.weights()
    expected = []
    for row in inputs:
        x = reference.shortened(row)
        for matrix in matrices[:-1]:
            x = reference.shortened(np.maximum(matrix @ x, 0))
        expected.append(matrices[-1] @ x)
    found = network()(torch.from_numpy(inputs)).detach()
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def private(noise, epochs=2, seed=0):
    inputs, targets = map(torch.from_numpy, reference.records(RECORDS))
    plain = network(seed=seed)
    engine = HiddenStatePrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=plain, optimizer=torch.optim.SGD(plain.blocks(), lr=RATE),
        data_loader=DataLoader(TensorDataset(inputs, targets), batch_size=BATCH),
        noise_multiplier=noise, max_grad_norm=CLIP, batch_order="cyclic",
        optimizer_class=BlockCoordinateOptimizer,
    )  # fmt: skip
    for _ in range(epochs):
        for x, y in loader:

            def closure(x=x, y=y):
                optimizer.zero_grad()
                model(x, y).mean().backward()

            optimizer.step(closure)
    return engine, plain


def test_a_run_without_noise_is_algorithm_4_with_clipped_gradients():
    _, plain = private(0.0)
    inputs, targets = reference.records(RECORDS)
    matrices = reference.weights()
    for t in range(2 * RECORDS // BATCH):
        rows = (np.arange(BATCH) + t * BATCH) % RECORDS
        for d in range(len(matrices)):
            total = np.zeros_like(matrices[d])
            for i in rows:
                gradient = reference.lagrangian(matrices, inputs[i], targets[i], 1)[1][d]
                total += gradient * min(1.0, CLIP / max(np.linalg.norm(gradient), 1e-300))
            matrices[d] = matrices[d] - RATE / BATCH * total
    for layer, matrix in zip(plain.layers, matrices, strict=True):
        np.testing.assert_allclose(layer.weight.detach(), matrix, atol=1e-4)


def test_epsilon_is_that_of_all_layers_in_all_steps():
    engine, _ = private(4.0)
    event = engine.privacy_event
    assert (event.num_blocks, event.num_epochs) == (3, 2)
    # A record is in one batch of every epoch, and moves the sum of every layer there.
    (guarantee,) = (run.guarantee("replace_special") for run in engine.accountant.recorders)
    assert guarantee.mu == pytest.approx(np.sqrt(3 * 2) / 4.0, rel=1e-9)
    assert engine.get_epsilon(1e-5) == pytest.approx(guarantee.epsilon(1e-5), rel=1e-9)


def test_one_layer_is_least_squares():
    model = AuxiliaryNetwork([3, 2], radius=float("inf")).double()
    x, y = torch.randn(5, 3, dtype=torch.double), torch.randn(5, 2, dtype=torch.double)
    expected = (nn.functional.linear(x, model.layers[0].weight) - y).square().sum(dim=1) / 2
    torch.testing.assert_close(model(x, y), expected)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"widths": [3]}, ValueError, "widths of inputs and outputs at least"),
        ({"widths": [3, 0]}, ValueError, "widths"),
        ({"widths": [3, 2], "radius": 0.0}, ValueError, "radius"),
        ({"widths": [3, 2], "penalty": 0.0}, ValueError, "penalty"),
        ({"widths": [3, 2], "sweeps": 0}, ValueError, "sweeps"),
    ],
)
def test_impossible_values(arguments, error, text):
    with pytest.raises(error, match=text):
        AuxiliaryNetwork(**arguments)
