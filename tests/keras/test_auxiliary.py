"""Networks with auxiliary variables in Keras: values, gradients, files, and a private run."""

import auxiliary as reference
import numpy as np
import pytest

pytest.importorskip("tensorflow_privacy")
import tensorflow as tf

from hidden_state_adapters.tf_privacy import (
    AuxiliaryNetwork,
    BlockCoordinateKerasOptimizer,
    cyclic_dataset,
)

RECORDS, BATCH, CLIP, RATE = 8, 4, 0.5, 0.25


@pytest.fixture(autouse=True)
def double_precision():
    tf.keras.backend.set_floatx("float64")
    yield
    tf.keras.backend.set_floatx("float32")


def network(sweeps=1):
    model = AuxiliaryNetwork(
        reference.WIDTHS, radius=reference.RADIUS, penalty=reference.PENALTY, sweeps=sweeps
    )
    model.set_weights([matrix.T for matrix in reference.weights()])
    return model


@pytest.mark.parametrize("sweeps", [1, 3])
def test_values_and_gradients(sweeps):
    model = network(sweeps)
    inputs, targets = reference.records(6)
    with tf.GradientTape() as tape:
        found = model.lagrangian(inputs, targets)
    gradients = tape.gradient(found, model.trainable_variables)
    matrices = reference.weights()
    ends = [
        reference.lagrangian(matrices, x, y, sweeps) for x, y in zip(inputs, targets, strict=True)
    ]
    np.testing.assert_allclose(found, [value for value, _ in ends], rtol=1e-6)
    for d, gradient in enumerate(gradients):
        np.testing.assert_allclose(gradient, sum(g[d] for _, g in ends).T, atol=1e-5)


def test_a_run_without_noise_is_algorithm_4_with_clipped_gradients():
    model = network()
    inputs, targets = reference.records(RECORDS)
    optimizer = BlockCoordinateKerasOptimizer(CLIP, 0.0, learning_rate=RATE)
    for _ in range(2):
        for x, y in cyclic_dataset(inputs, targets, batch_size=BATCH):
            optimizer.minimize(lambda x=x, y=y: model.lagrangian(x, y), model.blocks)
    matrices = reference.weights()
    for t in range(2 * RECORDS // BATCH):
        rows = (np.arange(BATCH) + t * BATCH) % RECORDS
        for d in range(len(matrices)):
            total = np.zeros_like(matrices[d])
            for i in rows:
                gradient = reference.lagrangian(matrices, inputs[i], targets[i], 1)[1][d]
                total += gradient * min(1.0, CLIP / max(np.linalg.norm(gradient), 1e-300))
            matrices[d] = matrices[d] - RATE / BATCH * total
    for found, matrix in zip(model.get_weights(), matrices, strict=True):
        np.testing.assert_allclose(found, matrix.T, atol=1e-4)
    assert optimizer.num_blocks == 3


def test_predictions_and_files():
    model = network()
    inputs, _ = reference.records(4)
    matrices = reference.weights()
    expected = []
    for row in inputs:
        x = reference.shortened(row)
        for matrix in matrices[:-1]:
            x = reference.shortened(np.maximum(matrix @ x, 0))
        expected.append(matrices[-1] @ x)
    np.testing.assert_allclose(model(inputs), expected, rtol=1e-12)
    again = AuxiliaryNetwork.from_config(model.get_config())
    again.set_weights(model.get_weights())
    np.testing.assert_array_equal(again(inputs), model(inputs))
    assert again.radius == reference.RADIUS


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"widths": [3]}, "widths of inputs and outputs at least"),
        ({"widths": [3, 2], "radius": 0.0}, "radius"),
        ({"widths": [3, 2], "penalty": 0.0}, "penalty"),
        ({"widths": [3, 2], "sweeps": 0}, "sweeps"),
    ],
)
def test_impossible_values(arguments, text):
    with pytest.raises(ValueError, match=text):
        AuxiliaryNetwork(**arguments)
