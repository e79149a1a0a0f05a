"""Carries over the ends of epochs: feasible for every order, optimal, and averaged rightly."""

import itertools

import attrs
import numpy as np
import pytest
from cases import seeds
from dp_accounting import NeighboringRelation
from runs import cyclic_run, probe_run
from scipy import optimize
from shift_programs import least_squares_mu_squared

import hidden_state_accountants as hsa
from hidden_state_accountants.bounds import Reshuffled
from hidden_state_accountants.bounds.shifted_interpolation import segment_mu_squared
from hidden_state_accountants.bounds.solvers.carries import (
    EpochCosts,
    best_carries,
    carried_curve,
)
from hidden_state_accountants.curves.base import GaussianMixtureCurve
from hidden_state_accountants.process.noisy_process import noisy_process

SPECIAL = NeighboringRelation.REPLACE_SPECIAL
DELTAS = (1e-2, 1e-5, 1e-9)


def process_of(rng, steps, period=3, releases=()):
    """A run whose contractions (some above 1), pushes and noises are unrelated."""
    event = cyclic_run(
        batch_order="reshuffled", num_steps=steps, dataset_size=5 * period, release_steps=releases
    )
    return attrs.evolve(
        noisy_process(event, SPECIAL),
        contraction=rng.uniform(0.4, 1.2, steps),
        sensitivity=rng.uniform(0.1, 2.0, steps),
        noise_std=rng.uniform(0.3, 2.0, steps),
        is_constant=False,
    )


def cost_of_an_epoch(process, epoch, position, start, end):
    """The least cost from a distance `start` to one of at most `end`, by a general solver."""
    steps = slice(epoch * process.period, min((epoch + 1) * process.period, process.num_steps))
    c, sigma = process.contraction[steps], process.noise_std[steps]
    pushes = np.where(np.arange(len(c)) == position, process.sensitivity[steps], 0.0)

    def shifts(z):
        return c * np.append(start, z[:-1]) + pushes - z

    result = optimize.minimize(
        lambda z: float(np.sum((shifts(z) / sigma) ** 2)),
        np.minimum(0.1, [np.inf] * (len(c) - 1) + [end]),
        bounds=[(0, None)] * (len(c) - 1) + [(0, end)],
        constraints=[{"type": "ineq", "fun": shifts}],
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 500},
    )
    assert result.success
    return result.fun


@pytest.mark.parametrize("seed", seeds(6))
@pytest.mark.parametrize("steps", [9, 7])
class TestCosts:
    def test_of_an_epoch(self, seed, steps):
        rng = np.random.default_rng(seed)
        process = process_of(rng, steps)
        epochs = EpochCosts.of(process)
        carries = np.append(rng.uniform(0, 2, 3) * (rng.random(3) < 0.8), 0.0)
        found = epochs.costs(carries) * epochs.scale
        unit = process.sensitivity.max()
        for epoch, position in itertools.product(range(3), range(3)):
            least = cost_of_an_epoch(
                process, epoch, position, carries[epoch] * unit, carries[epoch + 1] * unit
            )
            assert found[epoch, position] == pytest.approx(least, rel=1e-5, abs=1e-7)

    def test_no_order_costs_more(self, seed, steps):
        """Theorem A for every sequence of positions, whatever the carries are."""
        rng = np.random.default_rng(seed)
        process = process_of(rng, steps)
        epochs = EpochCosts.of(process)
        for carries in (best_carries(epochs), np.array([0.0, *rng.uniform(0, 2, 2), 0.0])):
            costs = epochs.costs(carries) * epochs.scale
            for positions in itertools.product(range(3), repeat=3):
                at = [3 * epoch + position for epoch, position in enumerate(positions)]
                pushes = np.where(np.isin(np.arange(steps), at), process.sensitivity, 0.0)
                exact = least_squares_mu_squared(process.contraction, pushes, process.noise_std)
                assert exact <= costs[range(3), positions].sum() * (1 + 1e-9)


@pytest.mark.parametrize("seed", seeds(6))
def test_the_search_ends_at_the_minimum(seed):
    """The objective is convex: nothing near is smaller."""
    rng = np.random.default_rng(seed)
    epochs = EpochCosts.of(process_of(rng, 23))
    carries = best_carries(epochs)
    weight = 10 / epochs.costs(carries).mean(axis=1).sum()
    least = epochs.objective(carries, weight)
    for size in (1e-3, 1e-2, 0.1):
        for _ in range(50):
            moved = carries.copy()
            moved[1:-1] = np.maximum(carries[1:-1] + size * rng.normal(size=len(carries) - 2), 0)
            assert epochs.objective(moved, weight) >= least * (1 - 1e-6)
    assert least < 0.99 * epochs.objective(0 * carries, weight)  # there is something to carry


@pytest.mark.parametrize(("period", "contraction"), [(60, 1.3), (120, 1.2), (150, 1.3)])
def test_an_epoch_that_expands_costs_what_theorem_a_says(period, contraction):
    """Between its steps lie up to 34 digits: no weight may be the difference of two others."""
    event = hsa.LastIterateDpEvent(
        noise_multiplier=3.0, learning_rate=contraction - 1, clip_norm=1.0, batch_size=10,
        dataset_size=10 * period, num_steps=2 * period, batch_order="reshuffled",
        loss=hsa.LossGeometry.smooth(smoothness=1.0, lipschitz=1.0), release_steps=[period],
    )  # fmt: skip
    process = noisy_process(event, SPECIAL)
    epochs = EpochCosts.of(process)
    found = epochs.costs(np.zeros(3))[0] * epochs.scale
    expected = segment_mu_squared(process, 0, period, range(period))
    np.testing.assert_allclose(found, expected, rtol=1e-11)


@pytest.mark.parametrize("steps", [12, 10])
def test_the_curve_is_the_mean_over_all_orders(steps):
    epochs = EpochCosts.of(process_of(np.random.default_rng(5), steps))
    carries = best_carries(epochs)
    costs = epochs.costs(carries) * epochs.scale
    totals = [
        costs[range(4), positions].sum() for positions in itertools.product(range(3), repeat=4)
    ]
    exact = GaussianMixtureCurve(np.full(81, 1 / 81), np.sqrt(totals))
    found = carried_curve(epochs, carries)
    for delta in DELTAS:
        assert exact.epsilon(delta) <= found.epsilon(delta) <= 1.002 * exact.epsilon(delta)


def test_releases_are_shared_states():
    process = process_of(np.random.default_rng(1), 12, releases=(3, 9))
    carries = best_carries(EpochCosts.of(process))
    assert (carries[[0, 1, 3, 4]] == 0).all()
    assert carries[2] > 0


def falling(steps):
    """From 0.5 to nearly 0, along a cosine."""
    return 0.25 * (1 + np.cos(np.pi * np.arange(steps) / steps))


def test_a_falling_learning_rate():
    """About what one kept order gives; without carries it is 3.06 after 45 seconds.

    The one order hides the place in all epochs (Theorem F), the fresh ones in the last alone.
    """
    fresh, kept = (
        hsa.LastIterateAccountant()
        .compose(probe_run(batch_order=order, learning_rate=falling(20_000)))
        .get_epsilon(1e-5)
        for order in ("reshuffled", "shuffled_once")
    )
    assert 0.9 * kept < fresh < 1.05 * kept


def test_maps_that_expand():
    """A clip that acts on a convex loss; 5.03 without carries."""
    event = probe_run(
        batch_order="reshuffled", loss=hsa.LossGeometry.convex(0.5), weight_decay=0.01,
        num_steps=5000,
    )  # fmt: skip
    assert hsa.LastIterateAccountant().compose(event).get_epsilon(1e-5) < 4.1


@pytest.mark.parametrize(
    "changes",
    [
        {"learning_rate": [0.5] * 4 + [0.0] * 4 + [0.3] * 16},  # nothing hides the second epoch
        {"learning_rate": [0.5, 0.0, 0.0, 0.0] * 6},
        {"learning_rate": np.geomspace(1e-70, 0.5, 24)},
        {"learning_rate": np.geomspace(0.5, 0.1, 24), "noise_multiplier": 1e-30},
        {"learning_rate": [1.0, 0.5] * 12, "weight_decay": 0.0, "clip_norm": None,
         "loss": hsa.LossGeometry.strongly_convex(1.0, 1.0, lipschitz=1.0)},
        {"noise_multiplier": [2.0] * 23 + [0.0]},
        {"noise_multiplier": [2.0] * 11 + [0.0] + [2.0] * 12},
        {"noise_multiplier": [2.0] * 11 + [0.0] + [2.0] * 12, "release_steps": (12,)},
    ],
    ids=["an empty epoch", "one batch in four", "far apart", "nearly no noise", "forgets all",
         "no noise at the end", "a step without noise", "a release without noise"],
)  # fmt: skip
def test_runs_at_the_edge(changes):
    event = cyclic_run(batch_order="reshuffled", **changes)
    found = Reshuffled().guarantee(event, SPECIAL)
    composition = hsa.bounds.Composition().guarantee(event, SPECIAL)
    for delta in DELTAS:
        assert 0 < found.epsilon(delta) <= composition.epsilon(delta) * (1 + 1e-3)
