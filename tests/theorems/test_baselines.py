"""Earlier bounds: typed anew, never below the best plan of Theorem A, rows of a comparison."""

import math

import numpy as np
import pytest
from cases import seeds
from dp_accounting import NeighboringRelation
from runs import cyclic_run, full_run
from shift_programs import least_squares_mu_squared

import hidden_state_accountants as hsa
from hidden_state_accountants.bounds import (
    AltschulerTalwar,
    AmplificationByIteration,
    ChienLi,
    Composition,
    ShiftedInterpolation,
    YeShokri,
)
from hidden_state_accountants.process.noisy_process import noisy_process

REPLACE_ONE = NeighboringRelation.REPLACE_ONE
ORDERS = np.array([1.5, 3.0, 20.0])


def figure_1_run(loss, **changes):
    """Chien & Li's Figure 1: K = 2, sigma = 1, D = 1, n = 5, eta = 0.1."""
    arguments = {
        "noise_multiplier": 25.0,
        "learning_rate": 0.1,
        "clip_norm": 2.0,
        "batch_size": 5,
        "dataset_size": 5,
        "num_steps": 200,
        "batch_order": "full",
        "loss": loss,
        "domain_diameter": 1.0,
    }
    return hsa.LastIterateDpEvent(**(arguments | changes))


def per_alpha(bound, event, relation=REPLACE_ONE):
    return float(bound.guarantee(event, relation).rdp([3.0])[0]) / 3.0


def random_run(seed):
    """A contracting run in full or cyclic batches, with or without a domain."""
    rng = np.random.default_rng(seed)
    b, period = int(rng.integers(1, 4)), int(rng.integers(1, 6))
    return cyclic_run(
        noise_multiplier=float(rng.uniform(0.5, 4)),
        learning_rate=float(rng.uniform(0.05, 1.0)),
        weight_decay=float(rng.choice([0.05, 0.4, 0.9])),
        batch_size=b,
        dataset_size=b * period,
        num_steps=int(rng.integers(1, 26)),
        batch_order="full" if period == 1 else "cyclic",
        loss=hsa.LossGeometry.convex(float(rng.uniform(0.0, 1.0)), lipschitz=1.0),
        domain_diameter=float(rng.choice([0.3, 3.0, math.inf])),
        record_position=None if period == 1 else int(rng.integers(period)),
    )


def best_mu_squared(event, relation=REPLACE_ONE):
    """The optimum over all plans, by a general solver, from the common start or any later one."""
    process = noisy_process(event, relation)
    (position,) = process.positions
    s = process.sensitivity_at(position)
    c, sigma = process.contraction, process.noise_std
    starts = range(len(s)) if event.domain_diameter < math.inf else [0]
    return min(
        least_squares_mu_squared(
            c[tau:], s[tau:], sigma[tau:], event.domain_diameter if tau else 0.0
        )
        for tau in starts
    )


def typed_feldman(event, s, position):
    """Participation by participation: equal shifts up to the next one, or up to the end."""
    period, total = event.batches_per_epoch, 0.0
    for step in range(position, event.num_steps, period):
        total += s * s / min(period, event.num_steps - step)
    return total


def typed_altschuler_talwar(event, s, c, diameter, position):
    """All windows, all splits of the noise on a grid, shifts of the diameter solved for."""
    holds = np.array([t % event.batches_per_epoch == position for t in range(event.num_steps)])
    least = s * s * holds.sum()
    for window in range(1, event.num_steps + 1):
        powers = c ** np.arange(window - 1, -1, -1.0)
        past = (diameter * c**window) ** 2 / float(powers @ powers)
        now = s * s * holds[event.num_steps - window :].sum()
        least = min(least, past + now + 2 * math.sqrt(past * now))
    return least


@pytest.mark.parametrize("seed", seeds(6))
def test_baselines_are_what_is_typed_anew_and_never_below_the_best_plan(seed):
    event = random_run(seed)
    process = noisy_process(event, REPLACE_ONE)
    s, c = float(process.sensitivity[0] / process.noise_std[0]), float(process.contraction[0])
    diameter = event.domain_diameter / float(process.noise_std[0])
    position = event.record_position or 0
    least = best_mu_squared(event)

    feldman = AmplificationByIteration().guarantee(event, REPLACE_ONE).mu ** 2
    assert feldman == pytest.approx(typed_feldman(event, s, position), rel=1e-12)
    diameters = AltschulerTalwar().guarantee(event, REPLACE_ONE).mu ** 2
    if diameter < math.inf:
        typed = typed_altschuler_talwar(event, s, c, diameter, position)
        assert diameters == pytest.approx(typed, rel=1e-10)
    else:
        composed = Composition().guarantee(event, REPLACE_ONE).mu
        assert diameters == pytest.approx(composed**2, rel=1e-12)
    dynamics = 2 * per_alpha(YeShokri(), event)
    assert min(feldman, diameters, dynamics) >= least * (1 - 1e-9)


@pytest.mark.parametrize(("period", "epochs"), [(2, 1), (3, 4), (6, 2), (6, 3)])
def test_mini_batches_of_ye_and_shokri_are_those_of_their_code(period, epochs):
    event = cyclic_run(batch_size=5, dataset_size=5 * period, num_steps=period * epochs)
    process = noisy_process(event, REPLACE_ONE)
    c = float(process.contraction[0])
    unit = float(process.sensitivity[0] / process.noise_std[0]) ** 2 / 2

    def first_epoch(j):
        return unit * c ** (2 * (j - 1)) * (1 - c**2) / (1 - c ** (2 * j))

    half = period // 2
    forgets = c ** (2 * (period - half))
    earlier = first_epoch(half) * (1 - forgets ** (epochs - 1)) / (1 - forgets)
    assert per_alpha(YeShokri(), event) == pytest.approx(earlier + first_epoch(1), rel=1e-12)
    secret = hsa.LastIterateDpEvent.from_dict(event.to_dict() | {"batch_order": "shuffled_once"})
    claimed = YeShokri().guarantee(secret, REPLACE_ONE).rdp(ORDERS)
    for alpha, found in zip(ORDERS, claimed, strict=True):
        mean = np.mean([np.exp((alpha - 1) * alpha * first_epoch(j)) for j in range(1, period + 1)])
        expected = alpha * earlier + math.log(mean) / (alpha - 1)
        assert found == pytest.approx(expected, rel=1e-10)
    shuffled = hsa.LastIterateAccountant(REPLACE_ONE).compose(secret).guarantee
    assert (shuffled.rdp(ORDERS) <= claimed).all()


@pytest.mark.parametrize("steps", [1, 2, 30, 3000])
def test_full_batches_of_ye_and_shokri_are_twice_the_truth_in_the_limit(steps):
    loss = hsa.LossGeometry.strongly_convex(1.0, 1.0, 2.0)
    event = figure_1_run(loss, num_steps=steps, domain_diameter=math.inf)
    claimed = per_alpha(YeShokri(), event)
    assert claimed == pytest.approx(0.16**2 * 19 * (1 - 0.95**steps) / 4, rel=1e-9)
    exact = per_alpha(ShiftedInterpolation(), event)
    assert claimed >= exact
    assert steps < 3000 or claimed == pytest.approx(2 * exact, rel=1e-9)


def test_a_modulus_that_rounds_to_one_forgets_nothing():
    """(1 + c)/2 is 1 there, but 1 - c is not 0."""
    loss = hsa.LossGeometry.smooth(0.5, lipschitz=1.0)
    event = full_run(loss=loss, learning_rate=0.1, weight_decay=0.5, clip_norm=0.5)
    assert noisy_process(event, REPLACE_ONE).contraction[0] == np.nextafter(1, 0)
    composed = per_alpha(Composition(), event)
    assert per_alpha(YeShokri(), event) == pytest.approx(2 * composed, rel=1e-12)


def test_chien_and_li_for_convex_losses_is_altschuler_and_talwar():
    event = figure_1_run(hsa.LossGeometry.convex(1.0, 2.0))
    assert per_alpha(AltschulerTalwar(), event) == pytest.approx(0.16006, abs=5e-6)
    same = per_alpha(ChienLi("published"), event)
    assert per_alpha(AltschulerTalwar(), event) == pytest.approx(same, rel=1e-12)


def test_strongly_convex_losses_of_figure_1():
    event = figure_1_run(hsa.LossGeometry.strongly_convex(1.0, 1.0, 2.0))
    found = [
        per_alpha(bound, event)
        for bound in (ShiftedInterpolation(), ChienLi("published"), AltschulerTalwar(), YeShokri())
    ]
    assert found == pytest.approx([0.06080, 0.06666, 0.08062, 0.12160], abs=5e-6)


def test_the_worst_position_is_none_of_the_others():
    event = cyclic_run(domain_diameter=0.5, num_steps=22)
    everywhere = [
        hsa.LastIterateDpEvent.from_dict(event.to_dict() | {"record_position": p})
        for p in range(event.batches_per_epoch)
    ]
    for bound in (AmplificationByIteration(), AltschulerTalwar(), YeShokri()):
        largest = max(per_alpha(bound, one) for one in everywhere)
        assert per_alpha(bound, event) == pytest.approx(largest, rel=1e-12)


def test_what_no_baseline_covers_is_refused():
    expands = full_run(loss=hsa.LossGeometry.convex(1.0), weight_decay=0.0)
    for bound in (AmplificationByIteration(), AltschulerTalwar(), YeShokri()):
        (unmet,) = bound.check(expands, REPLACE_ONE)
        assert unmet.condition == "contraction"
        assert {u.condition for u in bound.check(cyclic_run(release_steps=[8]), REPLACE_ONE)} == {
            "releases"
        }
    still = full_run(loss=hsa.LossGeometry.convex(1.0, 1.0), weight_decay=0.0)
    assert YeShokri().check(still, REPLACE_ONE)
    assert not AmplificationByIteration().check(still, REPLACE_ONE)


@pytest.mark.parametrize("noise", [0.0, 2.0])
def test_without_noise_or_in_very_long_runs(noise):
    for order in ("cyclic", "shuffled_once"):
        event = cyclic_run(
            noise_multiplier=noise, num_steps=4_000_000, batch_order=order, domain_diameter=1.0
        )
        for bound in (AmplificationByIteration(), AltschulerTalwar(), YeShokri()):
            if not bound.check(event, REPLACE_ONE):
                assert math.isinf(per_alpha(bound, event)) == (noise == 0)


def test_they_are_rows_of_a_comparison_and_never_the_choice():
    table = hsa.compare(cyclic_run(), delta=1e-5)
    rows = {row.accountant: row for row in table.rows}
    for name in ("amplification_by_iteration", "altschuler_talwar", "ye_shokri"):
        assert rows[name].epsilon >= rows["shifted_interpolation"].epsilon
    chosen = hsa.LastIterateAccountant().compose(cyclic_run()).guarantee
    assert ("ye_shokri", "never smaller than shifted_interpolation") in chosen.alternatives
