"""A proximal map after the noise: exact runs, the plans written down after the map, refusals."""

import math

import attrs
import numpy as np
import pytest
from cases import seeds
from dp_accounting import NeighboringRelation
from gaussian_oracle import GaussianOracle
from runs import cyclic_batches, cyclic_run, full_run, mu_at, random_hessian
from shift_programs import windows_mu_squared

import hidden_state_accountants as hsa
from hidden_state_accountants.bounds import Langevin, ShiftedInterpolation
from hidden_state_accountants.process.groups import run_of_groups
from hidden_state_accountants.process.noisy_process import noisy_process

REPLACE_ONE = NeighboringRelation.REPLACE_ONE
ADD_OR_REMOVE_ONE = NeighboringRelation.ADD_OR_REMOVE_ONE


def prox_of(event):
    return 1 / (1 + event.per_step("learning_rate") * event.prox_strong_convexity)


def exact_mu(event, hessians, record, direction):
    """Of quadratic losses of which one differs by a slope."""
    return GaussianOracle(
        hessians,
        [(1.0, cyclic_batches(event.dataset_size, event.batch_size, event.num_steps))],
        learning_rate=event.per_step("learning_rate"),
        noise_std=event.noise_std_on_sum(),
        weight_decay=event.per_step("weight_decay"),
        prox=prox_of(event),
        batch_size=event.batch_size,
        record=record,
        slope_difference=direction,
    ).mu


@pytest.mark.parametrize("seed", seeds(6))
def test_no_quadratic_run_exceeds_the_claim(seed):
    """Every record, with schedules or not: p of the step before, and no other."""
    rng = np.random.default_rng(seed)
    dimension, b, period = (int(rng.integers(1, 4)) for _ in range(3))
    steps, is_scheduled = int(rng.integers(1, 20)), bool(rng.random() < 0.6)
    hessians = np.array([random_hessian(rng, dimension, 0.0, 1.5) for _ in range(b * period)])

    def draw(low, high):
        return rng.uniform(low, high, steps) if is_scheduled else float(rng.uniform(low, high))

    event = full_run(
        noise_multiplier=draw(0.5, 3),
        learning_rate=draw(0.05, 1.2),
        clip_norm=None,
        weight_decay=0.0,
        batch_size=b,
        dataset_size=b * period,
        num_steps=steps,
        batch_order="full" if period == 1 else "cyclic",
        loss=hsa.LossGeometry.convex(1.5, lipschitz=0.8),
        prox_strong_convexity=float(rng.choice([0.05, 0.5, 5.0])),
    )
    directions = rng.normal(size=(b * period, dimension))
    directions *= 2 * 0.8 / np.linalg.norm(directions, axis=1, keepdims=True)
    exact = max(exact_mu(event, hessians, *record) for record in enumerate(directions[: steps * b]))
    orders = np.array([2.0, 20.0])
    for bound in hsa.BOUNDS:
        if bound.sound and isinstance(event, bound.event_type):
            if not bound.check(event, REPLACE_ONE):
                found = bound.guarantee(event, REPLACE_ONE).rdp(orders)
                assert (orders * exact**2 / 2 <= found * (1 + 1e-9)).all()


@pytest.mark.parametrize("steps", [1, 40])
def test_linear_losses_in_full_batches_attain_it(steps):
    event = full_run(
        weight_decay=0.0,
        num_steps=steps,
        loss=hsa.LossGeometry.linear(1.0),
        prox_strong_convexity=0.4,
    )
    found = ShiftedInterpolation().guarantee(event, REPLACE_ONE).mu
    assert found == pytest.approx(exact_mu(event, np.zeros((20, 1, 1)), 0, [2.0]), rel=1e-11)
    decayed = attrs.evolve(event, prox_strong_convexity=0.0, weight_decay=(1 - 1 / 1.2) / 0.5)
    same = ShiftedInterpolation().guarantee(decayed, REPLACE_ONE).mu
    assert found == pytest.approx(same, rel=1e-11)


@pytest.mark.parametrize("seed", seeds(6))
def test_the_best_plan_is_the_one_that_is_written_down_after_the_map(seed):
    """Where the domain is as well."""
    rng = np.random.default_rng(seed)
    period, steps = int(rng.integers(1, 4)), int(rng.integers(1, 14))
    diameter = float(rng.choice([0.2, 1.0, math.inf]))
    rates = rng.uniform(0.1, 1.0, steps)
    event = cyclic_run(
        learning_rate=rates if diameter == math.inf else float(rates[0]),
        weight_decay=float(rng.choice([0.0, 0.3])),
        noise_multiplier=float(rng.uniform(0.5, 3)),
        batch_size=2,
        dataset_size=2 * period,
        num_steps=steps,
        batch_order="full" if period == 1 else "cyclic",
        prox_strong_convexity=float(rng.choice([0.1, 1.0])),
        domain_diameter=diameter,
    )
    position = int(rng.integers(min(period, steps)))
    plain = noisy_process(attrs.evolve(event, prox_strong_convexity=0.0), REPLACE_ONE)
    least = windows_mu_squared(
        plain.contraction,
        plain.sensitivity_at(position),
        plain.noise_std,
        plain.drift_contraction,
        plain.drift,
        diameter,
        prox_of(event),
    )
    assert mu_at(event, position, REPLACE_ONE) ** 2 == pytest.approx(least, rel=1e-7)


def test_groups_keep_what_the_map_shrinks():
    """Sums are divided by more records, at a learning rate that is longer by as much."""
    event = full_run(prox_strong_convexity=0.5, loss=hsa.LossGeometry.convex(1.0, 1.0))
    group = run_of_groups(event, ADD_OR_REMOVE_ONE, 3)
    assert group.learning_rate > event.learning_rate
    assert group.learning_rate * group.prox_strong_convexity == pytest.approx(0.25, rel=1e-12)


def test_it_is_an_assumption():
    texts = [
        [a.text for a in hsa.LastIterateAccountant().compose(event).guarantee.assumptions]
        for event in (full_run(prox_strong_convexity=0.5), full_run())
    ]
    (text,) = (text for text in texts[0] if "proximal" in text)
    assert "0.5-strongly convex" in text
    assert not any("proximal" in text for text in texts[1])


@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf])
def test_impossible_values(value):
    with pytest.raises(ValueError, match="prox_strong_convexity"):
        full_run(prox_strong_convexity=value)


def test_what_does_not_know_the_map_refuses_it():
    event = full_run(prox_strong_convexity=0.5, weight_decay=0.0)
    for bound in hsa.BOUNDS:
        if not bound.sound and bound.event_type is hsa.LastIterateDpEvent:
            names = {unmet.condition for unmet in bound.check(event, REPLACE_ONE)}
            assert "proximal map" in names
    curved = attrs.evolve(event, loss=hsa.LossGeometry.strongly_convex(1.0, 0.1, 1.0))
    assert not Langevin().check(curved, REPLACE_ONE)
    report = str(hsa.audit(hsa.LastIterateAccountant(), event))
    assert "no attack applies" in report
    assert report.count("needs prox_strong_convexity = 0, got 0.5") == 2
