"""The reference of DP-MBCD is what it says, and a run of an optimizer becomes the right event."""

import block_coordinate as reference
import numpy as np
import pytest
from dp_accounting import NeighboringRelation

import hidden_state_accountants as hsa
from hidden_state_accountants.bounds.chen_liu_2025 import block_contraction
from hidden_state_accountants.runs.run import BlockCoordinateRun, Step

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
