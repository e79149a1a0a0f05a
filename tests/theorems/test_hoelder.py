"""Hölder gradients: the modulus, the solver against general programs, the bound against oracles."""

import itertools
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
from scipy import optimize

import hidden_state_accountants as hsa
from hidden_state_accountants.bounds import ChienLi, Hoelder
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
    event = cyclic_run(batch_size=4, dataset_size=8, loss=LOSS, clip_norm=2.0)
    process = noisy_process(event, REPLACE_ONE, is_linear=False)
    holds = np.array([True, False, True, False])
    problem = module.shift_problem(event, process, REPLACE_ONE, slice(0, 4), holds)
    eta = 0.5
    np.testing.assert_allclose(problem.coefficient, eta * 0.05 * np.array([0.75, 1, 0.75, 1]))
    np.testing.assert_allclose(problem.cap, eta * 4 * np.array([0.75, 1, 0.75, 1]))
    np.testing.assert_allclose(problem.sensitivity, [eta, 0, eta, 0])
    np.testing.assert_allclose(problem.decay, 0.9)
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


def nonlinear_program_mu(problem, tries=5):
    """SLSQP from several points, for every start and every set of distances that are 0."""
    steps, best = problem.num_steps, math.inf
    distances = [0.0]
    for t in range(steps):
        distances.append(min(update(problem, t, distances[-1]), problem.diameter))
    starts = [t for t in range(steps) if t == 0 or distances[t] == problem.diameter]
    patterns = [
        (t, pattern) for t in starts for pattern in itertools.product([0, 1], repeat=steps - t - 1)
    ]
    for start, pattern in patterns:
        free = np.flatnonzero(pattern)

        def shifts(values, start=start, free=free):
            z = np.zeros(steps - start)
            z[free] = values
            before = [distances[start], *z[:-1]]
            reached = [update(problem, start + i, v) for i, v in enumerate(before)]
            return (np.array(reached) - z) / problem.noise_std[start:]

        def total(values, shifts=shifts):
            return float(np.sum(shifts(values) ** 2))

        if not len(free):
            best = min(best, total([]))
            continue
        for share in np.linspace(0.1, 0.9, tries):
            z, first = distances[start], []
            for i, is_free in enumerate(pattern):
                z = update(problem, start + i, z) * share * is_free
                first += [z] * is_free
            for _ in range(2):  # from where it stopped too early
                result = optimize.minimize(
                    total,
                    first,
                    bounds=[(1e-9, None)] * len(free),
                    constraints=[{"type": "ineq", "fun": shifts}],
                    method="SLSQP",
                    options={"ftol": 1e-15, "maxiter": 500},
                )
                first = result.x
                if shifts(first).min() > -1e-8:
                    best = min(best, result.fun)
    return math.sqrt(best)


@pytest.mark.parametrize("seed", seeds(6))
def test_general_programs_find_nothing_better(seed):
    rng = np.random.default_rng([7, seed])
    problem = random_problem(rng, int(rng.integers(2, 5)))
    found, best = least_mu(problem), nonlinear_program_mu(problem)
    assert best * (1 - 1e-5) <= found <= best * (1 + 1e-7)


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
    rng = np.random.default_rng(0)
    problem = attrs.evolve(
        random_problem(rng, 6, sensitivity=1.0, coefficient=0.1, decay=0.9), diameter=math.inf
    )

    def without_noise(*steps):
        noise = problem.noise_std.copy()
        noise[list(steps)] = 0.0
        return attrs.evolve(problem, noise_std=noise)

    whole = least_mu(problem)
    assert whole < least_mu(without_noise(2)) < math.inf  # the shift waits for the next step
    assert least_mu(without_noise(5)) == math.inf
    assert least_mu(without_noise(*range(6))) == math.inf
    # Two steps of which the first has no noise are one step.
    two = without_noise(0)
    two = attrs.evolve(
        two,
        **{
            n: getattr(two, n)[:2]
            for n in ("decay", "coefficient", "cap", "sensitivity", "noise_std")
        },
    )
    expected = update(two, 1, update(two, 0, 0.0)) / two.noise_std[1]
    assert least_mu(two) == pytest.approx(expected, rel=1e-12)
    # Where nothing is left to hide no noise is needed.
    nobody = attrs.evolve(without_noise(5), sensitivity=np.eye(6)[0])
    assert 0 < least_mu(nobody) < math.inf
    assert least_mu(attrs.evolve(problem, sensitivity=np.zeros(6))) == 0.0


# --- the bound ------------------------------------------------------------------------------------


def random_event(seed, **changes):
    rng = np.random.default_rng([10, seed])
    batch, period = int(rng.integers(1, 6)), int(rng.integers(1, 6))
    eta = float(rng.uniform(0.05, 1.5))
    arguments = {
        "noise_multiplier": float(rng.uniform(0.5, 4)),
        "learning_rate": eta,
        "clip_norm": float(rng.uniform(0.2, 2)),
        "batch_size": batch,
        "dataset_size": batch * period,
        "num_steps": int(rng.integers(1, 60)),
        "batch_order": "full" if period == 1 else "cyclic",
        "loss": hsa.LossGeometry.hoelder(
            float(np.exp(rng.uniform(-6, 1))), float(rng.choice([0.2, 0.5, 0.8, 0.95]))
        ),
        "weight_decay": float(rng.choice([0.0, 0.05, 0.4])) / eta,
        "domain_diameter": float(rng.choice([math.inf, rng.uniform(0.1, 3)])),
    }
    return hsa.LastIterateDpEvent(**(arguments | changes))


def test_figures():
    """Chien & Li's constraint a_t >= s_t costs; so does composition."""
    event = full_run(loss=LOSS, num_steps=1000)
    assert mu(event) < 0.2 * math.sqrt(1000) / 2
    event = full_run(loss=LOSS, num_steps=1000, weight_decay=0.0, domain_diameter=0.2)
    published = ChienLi("published").guarantee(event, REPLACE_SPECIAL).rdp(np.array([2.0]))[0]
    assert mu(event) ** 2 < 0.99 * published


def test_without_decay_and_domain_full_batches_are_composition():
    event = full_run(loss=LOSS, weight_decay=0.0)
    assert mu(event) == pytest.approx(math.sqrt(24) / 2, rel=1e-12)


@pytest.mark.parametrize("seed", seeds(6))
def test_the_batch_processed_last_is_the_worst(seed):
    event = random_event(seed, batch_order="cyclic", batch_size=2, dataset_size=8, num_steps=30)
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
    event = full_run(loss=LOSS, release_steps=[7, 15])
    parts = [mu(full_run(loss=LOSS, num_steps=n)) for n in (7, 8, 9)]
    assert mu(event) == pytest.approx(math.hypot(*parts), rel=1e-12)
    every = full_run(loss=LOSS, release_steps=range(1, 24))
    assert mu(every) == pytest.approx(math.sqrt(24) / 2, rel=1e-12)


def test_releases_within_epochs_keep_the_position():
    """Of four batches per epoch the releases split every other epoch: one position, one sum."""
    event = cyclic_run(loss=LOSS, release_steps=[6, 14], num_steps=24, weight_decay=0.05)
    assert mu(event) == max(at_positions(event))
    loose = mu(attrs.evolve(event, release_steps=()))
    assert loose < mu(event) < mu(attrs.evolve(event, release_steps=range(1, 24)))


def test_steps_without_learning_rate_do_nothing():
    rates = np.full(30, 0.5)
    rates[[3, 11, 12, 20, 28, 29]] = 0.0
    event = full_run(loss=LOSS, learning_rate=rates, num_steps=30)
    assert mu(event) == pytest.approx(mu(full_run(loss=LOSS)), rel=1e-9)


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


# --- exact divergences ----------------------------------------------------------------------------


def power(constant, exponent, centre, odd):
    def gradient(x):
        u = x - centre
        value = constant * np.abs(u) ** exponent
        return value * np.sign(u) * 2 ** (exponent - 1) if odd else value

    return gradient


@pytest.mark.parametrize("relation", list(NeighboringRelation))
@pytest.mark.parametrize("seed", range(6))
def test_claims_dominate_the_exact_divergence(seed, relation):
    rng = np.random.default_rng([11, seed])
    batch, period = int(rng.integers(1, 3)), int(rng.integers(1, 4))
    period = 1 if relation is ADD_OR_REMOVE else period
    size, steps = batch * period, int(rng.integers(2, 14))
    is_schedule = rng.random() < 0.5
    constant, exponent = float(rng.uniform(0.1, 1.0)), float(rng.choice([0.3, 0.5, 0.8]))

    def draw(low, high):
        return rng.uniform(low, high, steps) if is_schedule else float(rng.uniform(low, high))

    event = hsa.LastIterateDpEvent(
        noise_multiplier=draw(0.8, 3.0),
        learning_rate=draw(0.2, 1.0),
        clip_norm=draw(0.3, 1.5),
        weight_decay=draw(0.0, 0.9),
        batch_size=batch,
        dataset_size=size,
        num_steps=steps,
        batch_order="full" if period == 1 else "cyclic",
        loss=hsa.LossGeometry.hoelder(constant, exponent),
        domain_diameter=float(rng.choice([math.inf, rng.uniform(0.2, 2.0)])),
    )
    width = event.domain_diameter

    def gradient(level=0.0):
        # Added to a constant, so that records pull the iterate apart.
        curve = power(constant, exponent, rng.normal() / 2, rng.random() < 0.5)
        sign = rng.choice([-1.0, 1.0])
        return lambda x: sign * curve(x) + level

    record = int(rng.integers(size))
    gradients = [gradient() for _ in range(size)]
    gradients[record] = gradient(2.0)
    grid = GridOracle(
        event,
        gradients,
        gradient(-2.0) if relation is REPLACE_ONE else None,
        record=record,
        domain=None if width == math.inf else (-0.3 * width, 0.7 * width),
    )
    guarantee = Hoelder().guarantee(event, relation)
    for order, claim in zip((1.5, 2.0, 8.0), guarantee.rdp([1.5, 2.0, 8.0]), strict=True):
        for estimate in grid.renyi(order):
            assert estimate.lower_bound <= claim
            assert estimate.value - 2 * estimate.error <= claim * (1 + 1e-3)
    for epsilon in (0.0, 0.5, 2.0):
        for estimate in grid.delta(epsilon):
            assert estimate.lower_bound <= guarantee.delta(epsilon)


def test_a_modulus_without_its_bend_is_refuted():
    """kappa z alone is not a modulus: its mu is below the exact divergence of a Hölder loss."""
    constant, exponent = 0.6, 0.5
    event = full_run(
        batch_size=20,
        num_steps=14,
        learning_rate=0.5,
        weight_decay=1.0,
        noise_multiplier=0.6,
        clip_norm=3.0,
        loss=hsa.LossGeometry.hoelder(constant, exponent),
    )
    repel = power(-constant, exponent, 0.0, odd=True)
    grid = GridOracle(event, [lambda x: repel(x) + 3.0, *[repel] * 19], lambda x: repel(x) - 3.0)
    lower = max(estimate.lower_bound for estimate in grid.renyi(2.0))
    claim = mu(event, REPLACE_ONE)
    without = mu(attrs.evolve(event, loss=hsa.LossGeometry.hoelder(1e-9, exponent)), REPLACE_ONE)
    assert without**2 < lower <= claim**2
