"""Runs of equal steps: every short cut against the scan of all steps."""

import itertools

import attrs
import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from runs import cyclic_run, full_run

import hidden_state_accountants as hsa
from hidden_state_accountants.bounds import shifted_interpolation
from hidden_state_accountants.bounds.data_order import late_mu_squared
from hidden_state_accountants.bounds.shifted_interpolation import (
    mu_squared_by_position,
    worst_mu_squared,
)
from hidden_state_accountants.bounds.solvers import shifts
from hidden_state_accountants.bounds.solvers.shifts import (
    least_mu_squared,
    mu_squared_of_equal_steps,
)
from hidden_state_accountants.process.distances import distance_after, distance_by_moduli
from hidden_state_accountants.process.noisy_process import noisy_process

SPECIAL = NeighboringRelation.REPLACE_SPECIAL
MODULI = (0.0, 1e-3, 0.3, 0.9, 1 - 1e-4, 1 - 1e-9, 1.0, 1 + 1e-9, 1.001, 1.4)

EQUAL_STEPS = ("full", "cyclic", "without_replacement", "poisson")


def scanned(event):
    """The process of a constant run, of which nobody says that its steps are equal."""
    return attrs.evolve(noisy_process(event, SPECIAL), is_constant=False)


@pytest.mark.parametrize("c", MODULI)
@pytest.mark.parametrize("period", [1, 2, 7])
def test_closed_form_is_the_isotonic_regression(c, period):
    for steps in (1, 2, 6, 7, 8, 20, 61):
        for position in range(min(period, steps)):
            sensitivity = np.zeros(steps)
            sensitivity[position::period] = 1.7
            scan = least_mu_squared(np.full(steps, c), sensitivity, np.full(steps, 0.6))
            participations = int((sensitivity > 0).sum())
            closed = mu_squared_of_equal_steps(
                c,
                1.7 / 0.6,
                period=period,
                participations=[participations],
                last=[steps - position - (participations - 1) * period],
            )
            assert closed == pytest.approx([scan], rel=1e-12)


def test_a_record_that_never_takes_part_or_moves_nothing_costs_nothing():
    def mu_squared(shift, participations):
        return mu_squared_of_equal_steps(
            0.9, shift, period=3, participations=[participations], last=[1]
        )

    assert mu_squared(2.0, 0) == mu_squared(0.0, 4) == [0.0]
    assert mu_squared(np.inf, 0) == [0.0]
    assert mu_squared(np.inf, 4) == [np.inf]


@pytest.mark.parametrize("c", [1e-3, 0.3, 0.9, 1 - 1e-9, 1.0])
@pytest.mark.parametrize(("period", "steps"), [(1, 30), (4, 3), (4, 9), (4, 29), (5, 60)])
def test_late_participations_are_one_block(c, period, steps):
    first = (steps - 1) // period * period
    found = late_mu_squared(c, 1.7 / 0.6, period, steps)
    for position, mu_squared in enumerate(found):
        sensitivity = np.zeros(steps)
        sensitivity[period - 1 : first : period] = 1.7
        sensitivity[first + position : first + position + 1] = 1.7
        scan = least_mu_squared(np.full(steps, c), sensitivity, np.full(steps, 0.6))
        assert mu_squared == pytest.approx(scan, rel=1e-12)


RUNS = {
    "cyclic": cyclic_run(num_steps=403),
    "convex": cyclic_run(num_steps=403, weight_decay=0.0),
    "expanding": cyclic_run(num_steps=403, learning_rate=2.2, weight_decay=0.0),
    "projected": cyclic_run(num_steps=403, weight_decay=0.0, domain_diameter=0.7),
    "projected, expanding": cyclic_run(num_steps=403, learning_rate=3.5, domain_diameter=1.0),
    "clipped, with decay": cyclic_run(num_steps=403, loss=hsa.LossGeometry.convex(3.0)),
    "full": full_run(num_steps=403),
    "full, projected": full_run(num_steps=403, weight_decay=0.0, domain_diameter=0.7),
    "full, expanding": full_run(num_steps=403, learning_rate=2.2, weight_decay=0.4),
}


@pytest.fixture
def short_is_long(monkeypatch):
    monkeypatch.setattr(shifts, "_TAILS", (32, 128, 256))
    monkeypatch.setattr(shifted_interpolation, "LONG", 100)


@pytest.mark.parametrize("name", RUNS)
def test_long_runs_equal_their_scan(name, short_is_long):
    scan = worst_mu_squared(scanned(RUNS[name]))
    assert worst_mu_squared(noisy_process(RUNS[name], SPECIAL)) == pytest.approx(scan, rel=1e-9)


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("releases", [(), (150, 399)])
def test_all_positions_of_long_runs_equal_their_scan(name, releases, short_is_long):
    event = attrs.evolve(RUNS[name], release_steps=releases)
    scan = mu_squared_by_position(scanned(event))
    found = mu_squared_by_position(noisy_process(event, SPECIAL))
    assert found == pytest.approx(scan, rel=1e-9)


def test_segments_that_are_shorter_than_an_epoch():
    """All positions at once, and each by itself: between two releases few of them take part."""
    event = cyclic_run(num_steps=14, release_steps=(5, 7, 8, 13))
    event = attrs.evolve(event, learning_rate=np.linspace(0.5, 0.2, 14))
    period = event.batches_per_epoch
    assert period > 2
    together = mu_squared_by_position(noisy_process(event, SPECIAL))
    alone = [
        mu_squared_by_position(attrs.evolve(noisy_process(event, SPECIAL), positions=(p,)))[0]
        for p in range(period)
    ]
    assert len(set(alone)) == period
    assert together == pytest.approx(np.array(alone), rel=1e-12)


@pytest.mark.parametrize("changes", [{}, {"weight_decay": 0.0, "domain_diameter": 0.7}])
def test_reshuffled_long_runs_equal_their_scan(changes, short_is_long, monkeypatch):
    event = cyclic_run(batch_order="reshuffled", num_steps=403, **changes)
    found = hsa.bounds.Reshuffled().guarantee(event, SPECIAL)
    monkeypatch.undo()
    scan = hsa.bounds.Reshuffled().guarantee(event, SPECIAL)
    for delta in (1e-9, 1e-3):
        assert found.epsilon(delta) == pytest.approx(scan.epsilon(delta), rel=1e-9)


@pytest.mark.parametrize("c", [0.0, 0.5, 1.0, 1.2])
@pytest.mark.parametrize("kappa", [0.0, 0.8, 1.0])
def test_distances_before_a_tail_are_never_below_the_tracked_ones(c, kappa):
    process = attrs.evolve(
        noisy_process(RUNS["cyclic"], SPECIAL),
        contraction=np.array([c]),
        sensitivity=np.array([0.3]),
        drift_contraction=np.array([kappa]),
        drift=np.array([0.9]),
        domain_diameter=5.0,
    )
    by_moduli = by_drift = 0.0
    for step in range(1, 24):
        by_moduli = c * by_moduli + (0.3 if (step - 1) % process.period == 0 else 0.0)
        by_drift = min(5.0, kappa * by_drift + 0.9)
        found = distance_by_moduli(process, step)
        assert found >= by_moduli
        least = min(by_drift, found)
        assert least <= distance_after(process, step) <= least * (1 + 1e-8)


@pytest.mark.parametrize(
    ("order", "diameter"),
    [
        *itertools.product(EQUAL_STEPS, (np.inf, 0.7)),
        *(
            pytest.param(*slow, marks=pytest.mark.exhaustive)
            for slow in itertools.product(("shuffled_once", "reshuffled"), (np.inf, 0.7))
        ),
    ],
)
def test_a_run_of_a_hundred_million_steps(order, diameter):
    """No array is as long as the run: some of 800 megabytes each would not go unnoticed."""
    make = full_run if order == "full" else cyclic_run

    def epsilon(steps):
        event = make(num_steps=steps, domain_diameter=diameter, batch_order=order)
        return hsa.LastIterateAccountant().compose(event).get_epsilon(1e-5)

    # The sizes of Poisson batches are bounded for all steps at once; of reshuffled ones distances
    # are carried over the ends of epochs in runs of up to 100,000 steps only.
    growth = 1.07 if order == "reshuffled" else 1.03
    assert epsilon(10**5) * (1 - 1e-3) <= epsilon(10**8) <= growth * epsilon(10**5)


@pytest.mark.parametrize("order", ["full", "cyclic", "reshuffled"])
def test_composition_of_a_hundred_million_steps(order):
    make = full_run if order == "full" else cyclic_run
    event = make(num_steps=10**8, batch_order=order, loss=None)
    guarantee = hsa.LastIterateAccountant().compose(event).guarantee
    assert guarantee.mu == pytest.approx((10**8 / event.batches_per_epoch) ** 0.5 / 2, rel=1e-12)
