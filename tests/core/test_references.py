"""The reference steps of DiceSGD and DP-MBCD are what the papers state."""

import block_coordinate as reference
import numpy as np
import pytest
from dice import adam_step, automatic_step, normalise, sgd_step, update

COMMON = {"learning_rate": 0.1, "divisor": 4, "clip_norm": 1.0}


def test_what_is_not_applied_stays_in_the_error_and_noise_does_not():
    """e_T + sum of v = sum of the unclipped means (the telescoped line 7)."""
    x, error, applied, wanted, noise = np.zeros((5, 3))
    random = np.random.default_rng(0)
    for _ in range(20):
        gradients, own = random.normal(size=(5, 3)) * 3, random.normal(size=3)
        v, _ = update(error, gradients, 4, 1.0, 0.7)
        x, error = sgd_step(x, error, gradients, own, error_clip_norm=0.7, **COMMON)
        applied, wanted, noise = applied + v, wanted + gradients.sum(axis=0) / 4, noise + own
    np.testing.assert_allclose(error + applied, wanted)
    np.testing.assert_allclose(x, -0.1 * (applied + noise))


def test_the_error_is_used_one_step_later_and_is_clipped():
    gradients = np.array([[9.0]])
    x, error = sgd_step(np.zeros(1), np.zeros(1), gradients, 0.0, error_clip_norm=0.5, **COMMON)
    assert x == pytest.approx(-0.1 * 0.25)  # the first update knows no error
    assert error == pytest.approx(8 / 4)
    x, error = sgd_step(x, error, np.zeros((0, 1)), 0.0, error_clip_norm=0.5, **COMMON)
    assert x == pytest.approx(-0.1 * (0.25 + 0.5))
    assert error == pytest.approx(1.5)


def test_adam_is_a_function_of_the_noisy_updates():
    moments, error, x = (np.zeros(2), np.zeros(2)), np.zeros(2), np.zeros(2)
    again, first, second = np.zeros((3, 2))
    random = np.random.default_rng(0)
    for step in range(1, 6):
        gradients, noise = random.normal(size=(4, 2)) * 5, random.normal(size=2)
        noisy = update(error, gradients, 4, 1.0, 0.5)[0] + noise
        x, error, moments = adam_step(
            x, error, moments, step, gradients, noise, error_clip_norm=0.5, **COMMON
        )
        first = 0.9 * first + 0.1 * noisy
        second = 0.999 * second + 0.001 * noisy**2
        again -= 0.1 * first / (1 - 0.9**step) / (np.sqrt(second / (1 - 0.999**step)) + 1e-8)
        np.testing.assert_allclose(x, again)


def test_automatic_steps_normalise_the_error_which_is_expansive():
    """Why the automatic variant has no budget: tiny errors of opposite sign stay 2 C2 apart."""
    near = [np.array([1e-9]), np.array([-1e-9])]
    for _ in range(6):
        updates, near = zip(
            *(update(e, np.zeros((0, 1)), 4, 1.0, 1.0, normalise) for e in near), strict=True
        )
        assert abs(updates[0] - updates[1]) == pytest.approx(2.0)
    gradients, noise = np.full((4, 3), 5.0), np.array([1.0, 2.0, 3.0])
    x, error = automatic_step(np.zeros(3), np.ones(3), gradients, noise, **COMMON)
    silent, same = automatic_step(np.zeros(3), np.ones(3), gradients, 0.0, **COMMON)
    np.testing.assert_allclose(x - silent, -0.1 * noise)
    np.testing.assert_array_equal(error, same)


@pytest.mark.parametrize("block", [0, 1])
def test_the_gradients_of_the_factorisation(block):
    """Against differences of the loss of each record."""
    rng = np.random.default_rng(0)
    blocks, (x, y) = [rng.normal(size=(2, 3)), rng.normal(size=(3, 2))], rng.normal(size=(2, 4, 3))

    def losses(changed):
        both = [changed if i == block else b for i, b in enumerate(blocks)]
        return ((x @ both[0].T @ both[1].T - y) ** 2).sum(axis=1) / 2

    gradients = reference.factorisation_gradients(blocks, block, (x, y))
    for index in np.ndindex(blocks[block].shape):
        step = np.zeros(blocks[block].shape)
        step[index] = 1e-6
        slope = (losses(blocks[block] + step) - losses(blocks[block] - step)) / 2e-6
        np.testing.assert_allclose(gradients[(slice(None), *index)], slope, atol=1e-7)


def test_a_step_of_the_reference():
    """Two scalar blocks and one record: by hand."""

    def gradients(blocks, i, batch):
        return np.array([blocks[1 - i] + batch])

    first, second = reference.step(
        [1.0, 2.0], gradients, 0.5, [0.1, 0.2], step_size=0.5, divisor=2, clip_norm=2.0
    )
    assert first == pytest.approx(1.0 - 0.25 * (2.0 + 0.1))  # 2.5 is clipped to 2
    assert second == pytest.approx(2.0 - 0.25 * (first + 0.5 + 0.2))  # at the new first block
