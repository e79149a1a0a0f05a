"""The reference steps of DiceSGD have the properties that the paper states."""

import numpy as np
import pytest
from dice import adam_step, automatic_step, normalise, sgd_step, update

COMMON = {"learning_rate": 0.1, "divisor": 4, "clip_norm": 1.0}


def test_what_is_not_applied_stays_in_the_error():
    """e_T + sum of v = sum of the unclipped means (the telescoped line 7)."""
    x, error, applied, wanted = np.zeros(3), np.zeros(3), np.zeros(3), np.zeros(3)
    random = np.random.default_rng(0)
    for _ in range(20):
        gradients = random.normal(size=(5, 3)) * 3
        v, _ = update(error, gradients, 4, 1.0, 0.7)
        x, error = sgd_step(x, error, gradients, 0.0, error_clip_norm=0.7, **COMMON)
        applied, wanted = applied + v, wanted + gradients.sum(axis=0) / 4
    np.testing.assert_allclose(error + applied, wanted)
    np.testing.assert_allclose(x, -0.1 * applied)


def test_the_error_is_used_one_step_later_and_is_clipped():
    gradients = np.array([[9.0]])
    x, error = sgd_step(np.zeros(1), np.zeros(1), gradients, 0.0, error_clip_norm=0.5, **COMMON)
    assert x == pytest.approx(-0.1 * 0.25)  # the first update knows no error
    assert error == pytest.approx(8 / 4)
    x, error = sgd_step(x, error, np.zeros((0, 1)), 0.0, error_clip_norm=0.5, **COMMON)
    assert x == pytest.approx(-0.1 * (0.25 + 0.5))
    assert error == pytest.approx(1.5)


def test_noise_moves_the_iterate_and_not_the_error():
    random = np.random.default_rng(0)
    gradients, noise = random.normal(size=(4, 3)) * 5, random.normal(size=3)
    for step in (
        lambda w: sgd_step(np.zeros(3), np.ones(3), gradients, w, error_clip_norm=0.5, **COMMON),
        lambda w: automatic_step(np.zeros(3), np.ones(3), gradients, w, **COMMON),
    ):
        silent, noisy = step(np.zeros(3)), step(noise)
        np.testing.assert_allclose(noisy[0] - silent[0], -0.1 * noise)
        np.testing.assert_array_equal(noisy[1], silent[1])


def test_adam_is_a_function_of_the_noisy_updates():
    moments, error, x, history = (np.zeros(2), np.zeros(2)), np.zeros(2), np.zeros(2), []
    random = np.random.default_rng(0)
    for step in range(1, 6):
        gradients, noise = random.normal(size=(4, 2)) * 5, random.normal(size=2)
        v, _ = update(error, gradients, 4, 1.0, 0.5)
        history.append(v + noise)
        x, error, moments = adam_step(
            x, error, moments, step, gradients, noise, error_clip_norm=0.5, **COMMON
        )
    again, first, second = np.zeros(2), np.zeros(2), np.zeros(2)
    for step, noisy in enumerate(history, start=1):
        first = 0.9 * first + 0.1 * noisy
        second = 0.999 * second + 0.001 * noisy**2
        again -= 0.1 * first / (1 - 0.9**step) / (np.sqrt(second / (1 - 0.999**step)) + 1e-8)
    np.testing.assert_allclose(x, again)


def test_normalising_the_error_is_expansive():
    """Why the automatic variant has no budget: tiny errors of opposite sign stay 2 C2 apart."""
    near = [np.array([1e-9]), np.array([-1e-9])]
    for _ in range(6):
        updates, near = zip(
            *(update(e, np.zeros((0, 1)), 4, 1.0, 1.0, normalise) for e in near), strict=True
        )
        assert abs(updates[0] - updates[1]) == pytest.approx(2.0)
