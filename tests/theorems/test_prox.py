"""A proximal map after the noise: exact runs, the plans written down after the map, refusals."""

import math

import attrs
import numpy as np
import pytest
from cases import seeds
from dp_accounting import NeighboringRelation
from runs import cyclic_run, full_run, mu_at, random_hessian
from scipy import optimize

import hidden_state_accountants as hsa
from hidden_state_accountants.bounds import Langevin, ShiftedInterpolation
from hidden_state_accountants.process.groups import run_of_groups
from hidden_state_accountants.process.noisy_process import noisy_process

REPLACE_ONE = NeighboringRelation.REPLACE_ONE
ADD_OR_REMOVE_ONE = NeighboringRelation.ADD_OR_REMOVE_ONE


def exact_mu(event, hessians, record, direction):
    """mu of x <- p_t (x - eta (gradient + noise)/b) with quadratics; the records differ by a slope.

    Means and covariances step by step; nothing of the package but the event's fields.
    """
    dimension, b, n = len(direction), event.batch_size, event.dataset_size
    mean, covariance = np.zeros(dimension), np.zeros((dimension, dimension))
    rates, decays = event.per_step("learning_rate"), event.per_step("weight_decay")
    noises = rates * event.noise_std_on_sum() / b
    for t, (eta, decay, noise) in enumerate(zip(rates, decays, noises, strict=True)):
        batch = np.arange(t * b, t * b + b) % n
        matrix = (1 - eta * decay) * np.eye(dimension) - eta * hessians[batch].sum(axis=0) / b
        p = 1 / (1 + eta * event.prox_strong_convexity)
        mean = p * (matrix @ mean + (eta / b * direction if record in batch else 0.0))
        covariance = p**2 * (matrix @ covariance @ matrix.T + noise**2 * np.eye(dimension))
    return math.sqrt(mean @ np.linalg.solve(covariance, mean))


@pytest.mark.parametrize("seed", seeds(6))
def test_no_quadratic_run_exceeds_the_claim(seed):
    """Schedules, all orders of the batches, every record: p of the step before, and no other."""
    rng = np.random.default_rng(seed)
    dimension, b, period = (int(rng.integers(1, 4)) for _ in range(3))
    steps, lipschitz = int(rng.integers(1, 20)), 0.8
    hessians = np.array([random_hessian(rng, dimension, 0.0, 1.5) for _ in range(b * period)])
    is_scheduled = bool(rng.random() < 0.6)

    def draw(low, high):
        return rng.uniform(low, high, steps) if is_scheduled else float(rng.uniform(low, high))

    event = hsa.LastIterateDpEvent(
        noise_multiplier=draw(0.5, 3),
        learning_rate=draw(0.05, 1.2),
        clip_norm=None,
        batch_size=b,
        dataset_size=b * period,
        num_steps=steps,
        batch_order="full" if period == 1 else "cyclic",
        loss=hsa.LossGeometry.convex(1.5, lipschitz),
        prox_strong_convexity=float(rng.choice([0.05, 0.5, 5.0])),
    )
    exact = 0.0
    for record in range(0, b * period, b):
        direction = rng.normal(size=dimension)
        direction *= 2 * lipschitz / np.linalg.norm(direction)
        exact = max(exact, exact_mu(event, hessians, record, direction))
    for bound in hsa.BOUNDS:
        if bound.sound and isinstance(event, bound.event_type):
            if not bound.check(event, REPLACE_ONE):
                found = bound.guarantee(event, REPLACE_ONE).rdp([2.0, 20.0])
                assert (np.array([2.0, 20.0]) * exact**2 / 2 <= found * (1 + 1e-9)).all()


@pytest.mark.parametrize("steps", [1, 2, 40])
@pytest.mark.parametrize("is_scheduled", [False, True])
def test_linear_losses_in_full_batches_attain_it(steps, is_scheduled):
    rates = np.linspace(0.2, 0.9, steps) if is_scheduled else 0.5
    event = full_run(
        learning_rate=rates,
        weight_decay=0.0,
        num_steps=steps,
        loss=hsa.LossGeometry.linear(1.0),
        prox_strong_convexity=0.4,
        noise_multiplier=np.linspace(2.0, 3.0, steps) if is_scheduled else 2.0,
    )
    exact = exact_mu(event, np.zeros((20, 1, 1)), 0, np.array([2.0]))
    found = ShiftedInterpolation().guarantee(event, REPLACE_ONE).mu
    assert found >= exact * (1 - 1e-12)
    if not is_scheduled:
        assert found == pytest.approx(exact, rel=1e-11)
        decayed = attrs.evolve(event, prox_strong_convexity=0.0, weight_decay=(1 - 1 / 1.2) / 0.5)
        same = ShiftedInterpolation().guarantee(decayed, REPLACE_ONE).mu
        assert found == pytest.approx(same, rel=1e-11)


def least_mu_squared_after_the_prox(event, position):
    """The best plan with z_t the distance after the map, where the domain is."""
    plain = noisy_process(attrs.evolve(event, prox_strong_convexity=0.0), REPLACE_ONE)
    p = 1 / (1 + event.per_step("learning_rate") * event.prox_strong_convexity)
    s = plain.sensitivity_at(position)
    c, sigma, steps = plain.contraction, plain.noise_std, event.num_steps
    distances = [0.0]
    for t in range(steps):
        d = distances[-1]
        moved = min(c[t] * d + s[t], plain.drift_contraction[t] * d + plain.drift[t])
        distances.append(min(p[t] * moved, event.domain_diameter))
    best = math.inf
    for tau in range(steps):
        length = steps - tau
        # a_t = c z_{t-1} + s - z_t/p_t >= 0 with z_tau known and z_T = 0; z_t >= 0
        matrix, offset = np.zeros((length, length - 1)), s[tau:].copy()
        offset[0] += c[tau] * distances[tau]
        for i in range(length - 1):
            matrix[i, i] -= 1 / p[tau + i]
            matrix[i + 1, i] += c[tau + i + 1]
        scale = sigma[tau:]
        if length == 1:
            best = min(best, float((offset / scale) @ (offset / scale)))
            continue
        found = optimize.lsq_linear(
            matrix / scale[:, None], -offset / scale, bounds=(0, np.inf), method="bvls", tol=1e-14
        )
        residual = (matrix @ found.x + offset) / scale
        best = min(best, float(residual @ residual))
    return best


@pytest.mark.parametrize("seed", seeds(6))
def test_the_best_plan_is_the_one_that_is_written_down_after_the_map(seed):
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
    found = mu_at(event, position, REPLACE_ONE) ** 2
    assert found == pytest.approx(least_mu_squared_after_the_prox(event, position), rel=1e-7)


def test_a_stronger_regulariser_never_costs_more_and_helps():
    for order in hsa.BatchOrder:
        size = {"batch_size": 20} if order is hsa.BatchOrder.FULL else {}
        runs = [
            cyclic_run(batch_order=order, weight_decay=0.0, prox_strong_convexity=mu, **size)
            for mu in (0.0, 0.3, 3.0)
        ]
        figures = [hsa.LastIterateAccountant().compose(run).get_epsilon(1e-5) for run in runs]
        assert figures[0] >= figures[1] >= figures[2]
        assert figures[2] < figures[0]


def test_releases_and_rough_gradients():
    event = full_run(prox_strong_convexity=0.5, release_steps=(4, 9), domain_diameter=1.0)
    parts = [
        ShiftedInterpolation()
        .guarantee(attrs.evolve(event, num_steps=n, release_steps=()), REPLACE_ONE)
        .mu
        for n in (4, 5, 15)
    ]
    whole = ShiftedInterpolation().guarantee(event, REPLACE_ONE).mu
    assert whole == pytest.approx(math.hypot(*parts), rel=1e-12)
    rough = full_run(loss=hsa.LossGeometry.hoelder(0.5, 0.7), weight_decay=0.0, num_steps=10)
    shrunk = attrs.evolve(rough, prox_strong_convexity=1.0)
    before, after = (
        hsa.LastIterateAccountant(REPLACE_ONE).compose(e).guarantee.mu for e in (rough, shrunk)
    )
    assert after <= before


def test_groups_keep_what_the_map_shrinks():
    """Sums are divided by more records, at a learning rate that is longer by as much."""
    event = full_run(prox_strong_convexity=0.5, loss=hsa.LossGeometry.convex(1.0, 1.0))
    group = run_of_groups(event, ADD_OR_REMOVE_ONE, 3)
    assert group.learning_rate > event.learning_rate
    assert group.learning_rate * group.prox_strong_convexity == pytest.approx(0.25, rel=1e-12)


def test_it_is_an_assumption_and_part_of_the_description():
    event = full_run(prox_strong_convexity=0.5)
    guarantee = hsa.LastIterateAccountant().compose(event).guarantee
    (text,) = (a.text for a in guarantee.assumptions if "proximal" in a.text)
    assert "0.5-strongly convex" in text
    assert hsa.LastIterateDpEvent.from_dict(event.to_dict()) == event
    assert "prox" not in str(full_run().to_dict())
    plain = hsa.LastIterateAccountant().compose(full_run()).guarantee
    assert not any("proximal" in a.text for a in plain.assumptions)


@pytest.mark.parametrize(
    ("value", "error"),
    [(-0.1, ValueError), (math.nan, ValueError), (math.inf, ValueError), ("1", TypeError)],
)
def test_impossible_values(value, error):
    with pytest.raises(error, match="prox_strong_convexity"):
        full_run(prox_strong_convexity=value)


def test_what_does_not_know_the_map_refuses_it():
    event = full_run(prox_strong_convexity=0.5, weight_decay=0.0)
    for bound in hsa.BOUNDS:
        if not bound.sound and bound.event_type is hsa.LastIterateDpEvent:
            names = {unmet.condition for unmet in bound.check(event, REPLACE_ONE)}
            assert "proximal map" in names
    assert not Langevin().check(
        full_run(
            prox_strong_convexity=0.5,
            loss=hsa.LossGeometry.strongly_convex(1.0, 0.1, 1.0),
        ),
        REPLACE_ONE,
    )
    report = str(hsa.audit(hsa.LastIterateAccountant(), event))
    assert "no attack applies" in report
    assert report.count("needs prox_strong_convexity = 0, got 0.5") == 2
