"""Hölder gradients: the modulus, the solver against general programs, what the bound sums up."""

import math

import attrs
import mpmath
import numpy as np
import pytest
from cases import seeds
from dp_accounting import NeighboringRelation
from grid_oracle import GridOracle
from hypothesis import given
from hypothesis import strategies as st
from runs import cyclic_run, full_run
from shift_programs import nonlinear_mu_squared

import hidden_state_accountants as hsa
from hidden_state_accountants.bounds import Hoelder, ShiftedInterpolation
from hidden_state_accountants.bounds import hoelder as module
from hidden_state_accountants.bounds.solvers.optimal_shifts import ShiftProblem, least_mu
from hidden_state_accountants.bounds.solvers.shifts import least_mu_squared
from hidden_state_accountants.curves.base import GaussianCurve
from hidden_state_accountants.process.noisy_process import noisy_process

REPLACE_ONE = NeighboringRelation.REPLACE_ONE
REPLACE_SPECIAL = NeighboringRelation.REPLACE_SPECIAL
ADD_OR_REMOVE = NeighboringRelation.ADD_OR_REMOVE_ONE
LOSS = hsa.LossGeometry.hoelder(0.05, 0.5)


def mu(event, relation=REPLACE_SPECIAL):
    return Hoelder().guarantee(event, relation).curve.mu


def at_positions(event, relation=REPLACE_SPECIAL):
    process = noisy_process(event, relation, is_linear=False)
    alone = [attrs.evolve(process, positions=(p,)) for p in process.positions]
    return [float(module.mus_of(event, one, relation)[0]) for one in alone]


# --- the modulus ----------------------------------------------------------------------------------


@pytest.mark.parametrize("relation", list(NeighboringRelation))
@pytest.mark.parametrize("seed", seeds(6))
def test_the_modulus_holds_on_simulated_steps(seed, relation):
    """x |x|**(e - 1) has Hölder constant 2**(1 - e); clipped, moved, in two dimensions."""
    rng = np.random.default_rng(seed)
    b, exponent, constant = int(rng.integers(1, 4)), rng.uniform(0.1, 1.0), rng.uniform(0.2, 3)
    event = full_run(
        batch_size=b,
        dataset_size=b,
        num_steps=1,
        learning_rate=rng.uniform(0.1, 2),
        weight_decay=rng.choice([0.0, 0.3]),
        clip_norm=rng.uniform(0.2, 1),
        loss=hsa.LossGeometry.hoelder(constant, exponent),
    )
    process = noisy_process(event, relation, is_linear=False)
    problem = module.shift_problem(event, process, relation, slice(0, 1), np.array([True]))
    centres = rng.normal(size=(b + 1, 2))
    signs = rng.choice([-1.0, 1.0], size=b + 1)

    def gradient(record, x):
        u = x - centres[record]
        g = signs[record] * constant * 2 ** (exponent - 1) * np.linalg.norm(u) ** (exponent - 1) * u
        return g * min(1.0, event.clip_norm / np.linalg.norm(g))

    def step(x, records):
        total = sum((gradient(r, x) for r in records), np.zeros(2))
        return (1 - event.learning_rate * event.weight_decay) * x - event.learning_rate * total / b

    common = list(range(b - 1))
    pairs = {
        REPLACE_ONE: [(range(b), [*common, b])],
        REPLACE_SPECIAL: [(range(b), common)],
        ADD_OR_REMOVE: [(range(b), common), (range(b), range(b + 1))],
    }[relation]
    largest = 0.0
    for _ in range(300):
        x = rng.normal(size=2)
        y = x + rng.normal(size=2) * 10 ** rng.uniform(-4, 1)
        for mine, others in pairs:
            bound = problem.reach(0, float(np.linalg.norm(x - y)))
            largest = max(largest, float(np.linalg.norm(step(x, mine) - step(y, others))) / bound)
    assert 0.3 < largest <= 1


def test_the_terms_that_both_data_sets_share():
    """One record in a batch of four: three terms are the same; no more is shared elsewhere."""
    event = cyclic_run(batch_size=4, dataset_size=8, loss=LOSS, clip_norm=2.0, domain_diameter=7.0)
    process = noisy_process(event, REPLACE_ONE, is_linear=False)
    holds = np.array([True, False, True, False])
    problem = module.shift_problem(event, process, REPLACE_ONE, slice(0, 4), holds)
    eta = 0.5
    np.testing.assert_allclose(problem.coefficient, eta * 0.05 * np.array([0.75, 1, 0.75, 1]))
    np.testing.assert_allclose(problem.cap, eta * 4 * np.array([0.75, 1, 0.75, 1]))
    np.testing.assert_allclose(problem.sensitivity, [eta, 0, eta, 0])
    np.testing.assert_allclose(problem.decay, 0.9)
    assert (problem.exponent, problem.diameter) == (LOSS.exponent, 7.0)
    full = full_run(loss=LOSS)
    process = noisy_process(full, ADD_OR_REMOVE, is_linear=False)
    problem = module.shift_problem(full, process, ADD_OR_REMOVE, slice(0, 4), np.ones(4, bool))
    np.testing.assert_allclose(problem.coefficient, eta * 0.05)  # a record is added to all 20
    np.testing.assert_allclose(problem.cap, eta * 2)
    np.testing.assert_allclose(problem.sensitivity, eta / 20)


# --- the solver -----------------------------------------------------------------------------------


def random_problem(rng, steps, exponents=(0.4, 0.6, 0.8, 0.95), **changes):
    is_schedule = rng.random() < 0.5

    def draw(low, high):
        return np.exp(rng.uniform(math.log(low), math.log(high), steps if is_schedule else 1))

    arrays = {
        "decay": draw(0.5, 1),
        "coefficient": draw(0.01, 3),
        "cap": draw(0.3, 30),
        "sensitivity": draw(0.3, 3) * (np.arange(steps) % rng.integers(1, 4) == 0),
        "noise_std": draw(0.3, 3),
    } | changes
    return ShiftProblem(
        **{name: np.broadcast_to(value, steps) + 0.0 for name, value in arrays.items()},
        exponent=float(rng.choice(exponents)),
        diameter=math.inf if rng.random() < 0.5 else float(rng.uniform(0.3, 4)),
    )


def update(problem, step, z):
    bend = min(problem.coefficient[step] * max(z, 0.0) ** problem.exponent, problem.cap[step])
    return problem.decay[step] * z + bend + problem.sensitivity[step]


@pytest.mark.parametrize("seed", seeds(6))
def test_general_programs_find_nothing_better(seed):
    rng = np.random.default_rng([7, seed])
    problem = random_problem(rng, int(rng.integers(2, 5)))
    distances = [0.0]
    for t in range(problem.num_steps):
        distances.append(min(update(problem, t, distances[-1]), problem.diameter))
    starts = {t: d for t, d in enumerate(distances[:-1]) if t == 0 or d == problem.diameter}
    best = nonlinear_mu_squared(lambda t, z: update(problem, t, z), problem.noise_std, starts)
    assert best**0.5 * (1 - 1e-5) <= least_mu(problem) <= best**0.5 * (1 + 1e-7)


@pytest.mark.parametrize("seed", seeds(6))
def test_linear_moduli_against_the_taut_string(seed):
    rng = np.random.default_rng([8, seed])
    steps = int(rng.integers(1, 300))
    problem = random_problem(rng, steps, exponents=[1.0], cap=1e250)
    if seed % 2:  # contracting
        problem = attrs.evolve(
            problem, coefficient=np.minimum(problem.coefficient, 1 - problem.decay)
        )
    distances = problem.tracked_distance()
    exact = least_mu_squared(
        problem.decay + problem.coefficient,
        problem.sensitivity,
        problem.noise_std,
        known_shift=np.where(distances >= problem.diameter, distances, np.nan),
    )
    assert 1 <= least_mu(problem) / math.sqrt(exact) < 1 + 1e-4


@pytest.mark.parametrize("diameter", [math.inf, 0.05])
def test_exponent_1_is_the_smooth_case(diameter):
    """All terms of a batch that a record is added to are in both data sets."""
    smooth, rough = (
        full_run(loss=loss, domain_diameter=diameter)
        for loss in (hsa.LossGeometry.smooth(0.05), hsa.LossGeometry.hoelder(0.05, 1.0))
    )
    linear = ShiftedInterpolation().guarantee(smooth, ADD_OR_REMOVE).mu
    assert ShiftedInterpolation().guarantee(rough, ADD_OR_REMOVE).mu == linear
    assert mu(rough, ADD_OR_REMOVE) == pytest.approx(linear, rel=1e-4)


@given(st.integers(0, 10**6), st.lists(st.floats(allow_subnormal=False), min_size=6, max_size=6))
def test_any_plan_is_made_feasible_and_its_cost_is_rounded_up(seed, plan):
    problem = random_problem(np.random.default_rng(seed), 6)
    start = seed % 6
    distance = float(problem.tracked_distance()[start])
    found, z = problem.mu_of(start, distance, np.array(plan[start:]))
    assert z[-1] == 0
    with mpmath.workdps(40):
        before, total = mpmath.mpf(distance), mpmath.mpf(0)
        for t, after in enumerate(z.tolist(), start=start):
            power = mpmath.mpf(problem.coefficient[t]) * before ** mpmath.mpf(problem.exponent)
            reached = problem.decay[t] * before + min(power, mpmath.mpf(problem.cap[t]))
            reached += problem.sensitivity[t]
            assert after >= 0
            shift = max(reached - after, 0)
            total += (shift / mpmath.mpf(problem.noise_std[t])) ** 2
            before = mpmath.mpf(after)
        assert mpmath.sqrt(total) <= found <= mpmath.sqrt(total) * (1 + 1e-11)


def test_steps_without_noise():
    problem = random_problem(
        np.random.default_rng(0), 6, sensitivity=1.0, coefficient=0.1, decay=0.9
    )
    problem = attrs.evolve(problem, diameter=math.inf)

    def without_noise(*steps):
        noise = problem.noise_std.copy()
        noise[list(steps)] = 0.0
        return attrs.evolve(problem, noise_std=noise)

    assert least_mu(problem) < least_mu(without_noise(2)) < math.inf  # it waits for the next step
    assert least_mu(without_noise(5)) == least_mu(without_noise(*range(6))) == math.inf
    # All shifts wait for the last step.
    distance = 0.0
    for t in range(6):
        distance = update(problem, t, distance)
    last = least_mu(without_noise(*range(5)))
    assert last == pytest.approx(distance / problem.noise_std[5], rel=1e-12)
    # Where nothing is left to hide no noise is needed.
    nobody = attrs.evolve(without_noise(5), sensitivity=np.eye(6)[0])
    assert 0 < least_mu(nobody) < math.inf
    assert least_mu(attrs.evolve(problem, sensitivity=np.zeros(6))) == 0.0


# --- the bound ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", seeds(6))
def test_the_batch_processed_last_is_the_worst(seed):
    rng = np.random.default_rng([10, seed])
    event = cyclic_run(
        noise_multiplier=float(rng.uniform(0.5, 4)),
        num_steps=30,
        weight_decay=float(rng.choice([0.0, 0.1, 0.8])),
        loss=hsa.LossGeometry.hoelder(
            float(np.exp(rng.uniform(-6, 1))), float(rng.choice([0.2, 0.5, 0.8, 0.95]))
        ),
        domain_diameter=float(rng.choice([math.inf, rng.uniform(0.1, 3)])),
    )
    positions = at_positions(event)
    assert mu(event) >= max(positions) * (1 - 1e-6)
    assert mu(event) == positions[29 % 4]


def test_schedules_take_the_worst_position():
    rates, noise = [0.5] * 20 + [0.01] * 2, [2.0] * 20 + [40.0] * 2
    event = cyclic_run(loss=LOSS, learning_rate=rates, noise_multiplier=noise, num_steps=22)
    positions = at_positions(event)
    assert mu(event) == max(positions)
    assert int(np.argmax(positions)) == 3 != 21 % 4


def test_releases_add_up():
    parts = [mu(full_run(loss=LOSS, num_steps=n)) for n in (7, 8, 9)]
    found = mu(full_run(loss=LOSS, release_steps=[7, 15]))
    assert found == pytest.approx(math.hypot(*parts), rel=1e-12)
    parts = [mu(full_run(loss=LOSS, num_steps=12, noise_multiplier=z)) for z in (4.0, 1.0)]
    noise = [4.0] * 12 + [1.0] * 12
    found = mu(full_run(loss=LOSS, release_steps=[12], noise_multiplier=noise))
    assert found == pytest.approx(math.hypot(*parts), rel=1e-12)
    composition = pytest.approx(math.sqrt(24) / 2, rel=1e-12)
    assert mu(full_run(loss=LOSS, release_steps=range(1, 24))) == composition
    assert mu(full_run(loss=LOSS, weight_decay=0.0)) == composition
    # Of four batches per epoch the releases split every other one: one position, one sum.
    event = cyclic_run(loss=LOSS, release_steps=[6, 14], weight_decay=0.05)
    assert mu(event) == max(at_positions(event))
    assert mu(event) > mu(attrs.evolve(event, release_steps=()))


@pytest.mark.parametrize("num_steps", [2, 22])
def test_a_secret_order_is_the_mean_over_the_positions(num_steps):
    secret = cyclic_run(loss=LOSS, batch_order="shuffled_once", num_steps=num_steps)
    guarantee = Hoelder().guarantee(secret, REPLACE_SPECIAL)
    public = attrs.evolve(secret, batch_order="cyclic")
    deltas = [GaussianCurve(mu).delta(0.5) for mu in at_positions(public)]
    assert guarantee.delta(0.5) == pytest.approx(sum(deltas) / 4, rel=1e-9)
    assert any("SHUFFLED_ONCE" in str(a) for a in guarantee.assumptions)
    assert not any(str(a).startswith("order of the batches") for a in guarantee.assumptions)


@pytest.mark.parametrize(
    ("changes", "relation", "condition"),
    [
        ({"batch_order": "poisson"}, REPLACE_SPECIAL, "batch order"),
        ({"batch_order": "reshuffled"}, REPLACE_SPECIAL, "batch order"),
        ({}, ADD_OR_REMOVE, "neighboring relation"),
        ({"batch_size": 6}, REPLACE_SPECIAL, "equal batches"),
        ({"loss": None}, REPLACE_SPECIAL, "loss geometry"),
        ({"loss": hsa.LossGeometry.convex(1.0)}, REPLACE_SPECIAL, "loss"),
        ({"num_steps": module.MOST_STEPS + 2}, REPLACE_SPECIAL, "steps to optimise"),
    ],
)
def test_refusals(changes, relation, condition):
    event = cyclic_run(**({"loss": LOSS, "weight_decay": 0.1} | changes))
    (unmet,) = Hoelder().check(event, relation)
    assert unmet.condition == condition
    with pytest.raises(hsa.UnsupportedRunError, match=condition):
        Hoelder().guarantee(event, relation)


def test_a_modulus_without_its_bend_is_refuted():
    """kappa z alone is not a modulus: its mu is below the exact divergence of a Hölder loss."""
    event = full_run(
        num_steps=14,
        weight_decay=1.0,
        noise_multiplier=0.6,
        clip_norm=3.0,
        loss=hsa.LossGeometry.hoelder(0.6, 0.5),
    )

    def repel(x):
        return -0.6 * np.sign(x) * np.sqrt(np.abs(x) / 2)

    grid = GridOracle(event, [lambda x: repel(x) + 3.0, *[repel] * 19], lambda x: repel(x) - 3.0)
    lower = max(estimate.lower_bound for estimate in grid.renyi(2.0))
    without = attrs.evolve(event, loss=hsa.LossGeometry.hoelder(1e-9, 0.5))
    assert mu(without, REPLACE_ONE) ** 2 < lower <= mu(event, REPLACE_ONE) ** 2
