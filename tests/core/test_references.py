"""The reference steps of DiceSGD and DP-MBCD are what the papers state."""

import block_coordinate as reference
import numpy as np
import pytest
from dice import adam_step, automatic_step, normalise, sgd_step, update
from dp_accounting import NeighboringRelation

import hidden_state_accountants as hsa
from hidden_state_accountants.bounds.chen_liu_2025 import block_contraction
from hidden_state_accountants.runs.run import BlockCoordinateRun, Step

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


ONE, SPECIAL = NeighboringRelation.REPLACE_ONE, NeighboringRelation.REPLACE_SPECIAL
TOTALS = {
    "step_size": 0.5, "clip_norm": 1.0, "noise_multiplier": 3.0, "batch_size": 4, "num_steps": 6,
    "num_blocks": 1, "prox_strong_convexity": 0.0, "largest_norm": 0.4, "dataset_size": 12,
}  # fmt: skip


def run(**changes):
    given = TOTALS | changes
    counted = {name: given.pop(name) for name in ("noise_multiplier", "largest_norm", "num_steps")}
    found = BlockCoordinateRun(**given)
    steps, same = counted.pop("num_steps"), {"clip_norm": given["clip_norm"]}
    step = Step(**counted, **same, learning_rate=given["step_size"], rows=given["batch_size"])
    found.add_counted(step, steps)
    return found


@pytest.mark.parametrize(
    "weights",
    [
        {},
        {"l1": 0.3},
        {"l2": 0.5},
        {"nonnegative": True},
        {"l1": 0.1, "l2": 0.2, "nonnegative": True},
    ],
)
def test_the_prox_is_a_minimum_and_contracts_as_claimed(weights):
    grid, eta = np.linspace(-3, 3, 60_001), 0.4
    l1, l2, nonnegative = ({"l1": 0.0, "l2": 0.0, "nonnegative": False} | weights).values()
    points = np.linspace(-2, 2, 41)
    for x in points[::4]:
        value = l1 * abs(grid) + l2 * grid**2 / 2 + (grid - x) ** 2 / (2 * eta)
        if nonnegative:
            value[grid < 0] = np.inf
        best = grid[value.argmin()]
        assert reference.prox(x, eta, **weights) == pytest.approx(best, abs=1e-3)
    slopes = np.diff(reference.prox(points, eta, **weights)) / np.diff(points)
    assert slopes.max() == pytest.approx(1 / (1 + eta * l2))
    assert slopes.min() >= 0


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


@pytest.mark.parametrize(("relation", "factor"), [(ONE, 2), (SPECIAL, 1)])
def test_sensitivity_and_noise(relation, factor):
    event = run().event()
    assert event.sensitivity(relation) == factor
    assert (event.num_epochs, event.batch_size, event.block_loss) == (2, 4, None)
    # The noise on the block is eta / b times that on the sum.
    assert np.sqrt(2 * event.step_size * event.noise_variance) == pytest.approx(0.5 / 4 * 3.0)
    mu = hsa.BlockCoordinateAccountant(relation).compose(event).guarantee.mu
    assert mu == pytest.approx(factor * np.sqrt(2) / 3.0)


@pytest.mark.parametrize("relation", [ONE, SPECIAL])
@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (hsa.LossGeometry.convex(1.0), 2 / np.sqrt(4 - 0.5)),  # clipped
        (hsa.LossGeometry.convex(1.0, lipschitz=1.1), 2 / np.sqrt(4 - 0.5)),
        (hsa.LossGeometry.convex(1.0, lipschitz=1.0), 1.0),  # never clipped
        (hsa.LossGeometry.convex(1.0, lipschitz=0.6), 1.0),
        (hsa.LossGeometry.strongly_convex(1.0, 0.5, lipschitz=0.6), 0.75),
        (hsa.LossGeometry.strongly_convex(1.0, 0.5), 2 / np.sqrt(4 - 0.5)),
        (hsa.LossGeometry.generalized_linear(1.0), 1.0),
        (hsa.LossGeometry.linear(0.6), 1.0),
        (hsa.LossGeometry.hoelder(1.0, 0.5, lipschitz=0.6), None),
    ],
)
def test_the_contraction_of_one_block(loss, expected, relation):
    """Whether a clip acts is decided by lipschitz <= C, under either relation."""
    event = run(block_loss=loss).event()
    assert block_contraction(event) == (None if expected is None else pytest.approx(expected))
    assert event.sensitivity(relation) == (2 if relation is ONE else 1) * min(
        1.0, np.inf if loss.lipschitz is None else loss.lipschitz
    )


def test_several_blocks_do_not_contract():
    loss = hsa.LossGeometry.strongly_convex(1.0, 0.5, lipschitz=0.6)
    event = run(num_blocks=3, prox_strong_convexity=5.0, block_loss=loss).event()
    guarantee = hsa.BlockCoordinateAccountant(SPECIAL).compose(event).guarantee
    assert guarantee.mu == pytest.approx(np.sqrt(3 * 2) * 0.6 / 3.0)
    assert "composition" in guarantee.theorem


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"dataset_size": 13}, "which leaves 1 records over"),
        ({"dataset_size": 16}, "whole epochs of 4 steps, got 6"),
        ({"num_steps": 0}, "at least one step"),
        ({"block_loss": hsa.LossGeometry.convex(1.0, lipschitz=0.39)}, "read off a run"),
        ({"largest_norm": np.nan, "block_loss": hsa.LossGeometry.linear(1.0)}, "read off a run"),
        ({"step_size": 1e-60, "noise_multiplier": 1e-20}, "noise_variance"),
        ({"block_loss": 1.0}, "LossGeometry"),
    ],
)
def test_runs_without_an_event(changes, text):
    with pytest.raises((ValueError, TypeError), match=text):
        run(**changes).event()
