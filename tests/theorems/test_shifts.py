"""The engine against scipy's isotonic regression, general solvers and exact arithmetic."""

import math

import attrs
import mpmath
import numpy as np
import pytest
from cases import first, seeds
from dp_accounting import NeighboringRelation
from hypothesis import given
from hypothesis import strategies as st
from runs import cyclic_run, full_run
from scipy import optimize
from shift_programs import least_squares_mu_squared, windows_mu_squared

import hidden_state_accountants as hsa
from hidden_state_accountants.bounds import shifted_interpolation
from hidden_state_accountants.bounds.data_order import late_mu_squared
from hidden_state_accountants.bounds.shifted_interpolation import (
    mu_squared_by_position,
    segment_mu_squared,
    worst_mu_squared,
)
from hidden_state_accountants.bounds.solvers import shifts
from hidden_state_accountants.bounds.solvers.shifts import (
    BlockStack,
    least_mu_squared,
    mu_squared_of_equal_steps,
)
from hidden_state_accountants.process.distances import distance_after, distance_by_moduli
from hidden_state_accountants.process.noisy_process import NoisyProcess, noisy_process


def random_problem(rng, steps):
    contraction = np.exp(rng.normal(0, 0.5, steps))
    sensitivity = rng.exponential(size=steps) * (rng.random(steps) < 0.6)
    return contraction, sensitivity, np.exp(rng.normal(0, 0.5, steps))


@pytest.mark.parametrize("seed", seeds(6))
def test_equals_least_squares(seed):
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, int(rng.integers(1, 13)))
    shift = float(rng.exponential()) * (rng.random() < 0.5)
    engine = hsa.shifted_gdp_mu(*problem, shift) ** 2
    assert engine == pytest.approx(least_squares_mu_squared(*problem, shift), rel=1e-11)


@pytest.mark.parametrize("seed", seeds(6))
def test_equals_scipy_isotonic_regression(seed):
    rng = np.random.default_rng(seed)
    c, s, sigma = random_problem(rng, int(rng.integers(1, 400)))
    c = c ** (1 / 4)
    suffix = np.append(np.cumprod(c[:0:-1])[::-1], 1.0)
    r, w = s * suffix, (sigma * suffix) ** 2
    fit = optimize.isotonic_regression(r / w, weights=w).x
    assert hsa.shifted_gdp_mu(c, s, sigma) ** 2 == pytest.approx(float(fit**2 @ w), rel=1e-11)


@pytest.mark.parametrize("c", [0.3, 0.95, 0.9999, 1.0, 1.05])
@pytest.mark.parametrize("steps", [1, 2, 40, 3000])
def test_full_batch_closed_form(c, steps):
    """Without contraction, and without a domain, composition."""
    closed = math.sqrt(steps)
    if c < 1:
        closed = math.sqrt((1 + c) / (1 - c) * -math.expm1(steps * math.log(c)) / (1 + c**steps))
    assert hsa.shifted_gdp_mu(c, np.full(steps, 3.0), 2.0) == pytest.approx(1.5 * closed, rel=1e-10)


@pytest.mark.parametrize("c", [0.3, 0.95, 0.9999])
@pytest.mark.parametrize(("period", "epochs"), [(2, 3), (40, 50), (7, 1)])
def test_cyclic_closed_form_of_the_last_batch(c, period, epochs):
    sensitivity = np.zeros(period * epochs)
    sensitivity[period - 1 :: period] = 1.0
    tail = c ** (period * (epochs - 1))
    closed = math.sqrt(
        1 + c ** (2 * period - 2) * (1 - c * c) / (1 - c**period) ** 2 * (1 - tail) / (1 + tail)
    )
    assert hsa.shifted_gdp_mu(c, sensitivity, 1.0) == pytest.approx(closed, rel=1e-10)


@pytest.mark.parametrize("seed", seeds(6))
def test_minimum_over_windows_equals_brute_force(seed):
    rng = np.random.default_rng(seed)
    steps = int(rng.integers(1, 11))
    c, s, sigma = random_problem(rng, steps)
    kappa, drift = c * rng.uniform(0.1, 1.2, steps), s + rng.exponential(2.0, steps)
    diameter = float(rng.choice([np.inf, rng.exponential(2.0)]))
    arrays = c, s, sigma, kappa, drift, diameter
    process = NoisyProcess(*arrays, 1, (0,), (), is_constant=False)
    assert worst_mu_squared(process) == pytest.approx(windows_mu_squared(*arrays), rel=1e-10)


def test_windows_of_a_long_run_with_many_blocks():
    # Rising slopes keep every step a block of its own: cost_with has to jump.
    steps, diameter = 3000, 40.0
    c, s = np.full(steps, 1.002), np.ones(steps)
    known = np.full(steps + 1, diameter)
    engine = least_mu_squared(c, s, np.ones(steps), known_shift=known)
    brute = min(
        least_mu_squared(c[tau:], s[tau:], np.ones(steps - tau), initial_shift=diameter)
        for tau in range(steps - 400, steps, 1)
    )
    assert engine == pytest.approx(brute, rel=1e-12)


@pytest.mark.parametrize("seed", seeds(6))
@pytest.mark.parametrize("grows_left", [True, False])
def test_cost_with_equals_pushing(seed, grows_left):
    rng = np.random.default_rng(seed)
    stack = BlockStack(grows_left=grows_left)
    ramp = np.linspace(*((3, 0.1) if grows_left else (0.1, 3)), 200)
    shifts, weights = ramp * rng.exponential(size=200), rng.exponential(size=200)
    exponents = rng.integers(-3, 3, 200) * (rng.random(200) < 0.5)
    for block in zip(shifts.tolist(), weights.tolist(), exponents.tolist(), strict=True):
        expected = stack.cost_with(block)
        stack.push(block)
        assert stack.cost == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("exponent", [-1e5, -3e3, 3e3, 1e5])
def test_products_far_beyond_floating_point(exponent):
    # A stretch of steps that multiplies distances by e**exponent, in either order.
    steps = 2000
    stretch = np.full(steps, math.exp(exponent / steps))
    calm = np.full(20, 0.9)
    sensitivity = np.ones(steps + 20)
    for c in (np.concatenate((stretch, calm)), np.concatenate((calm, stretch))):
        mu = hsa.shifted_gdp_mu(c, sensitivity, 1.0)
        exact = math.sqrt(_exact_mu_squared(c, sensitivity))
        assert mu == pytest.approx(exact, rel=1e-11)


def _exact_mu_squared(contraction, sensitivity):
    """Pool adjacent violators with 60 digits and any exponent."""
    with mpmath.workdps(60):
        blocks = []  # (shift, weight) in the frame of the last step
        product = mpmath.mpf(1)
        for c, s in zip(contraction[::-1].tolist(), sensitivity[::-1].tolist(), strict=True):
            block = (s * product, product**2)
            while blocks and block[0] * blocks[-1][1] >= blocks[-1][0] * block[1]:
                top = blocks.pop()
                block = (block[0] + top[0], block[1] + top[1])
            blocks.append(block)
            product *= c
        return float(sum(s * s / w for s, w in blocks))


def test_degenerate_steps():
    mu = hsa.shifted_gdp_mu
    c, s, sigma = [0.9, 0.8, 0.7], [1.0, 2.0, 0.5], [1.0, 0.5, 2.0]
    padded = [np.insert(np.array(a), [0, 1, 3], v) for a, v in ((c, 1.0), (s, 0.0), (sigma, 0.0))]
    assert mu(*padded) == pytest.approx(mu(c, s, sigma), rel=1e-14)  # no learning rate
    forgets = mu([0.9, 0.0, 0.9], [9.0, 1.0, 1.0], 1.0, 5.0)
    assert forgets == pytest.approx(mu([0.9, 0.9], [1.0, 1.0], 1.0), rel=1e-14)
    assert mu([1.0, 1.0], [1.0, 1.0], [0.0, 1.0]) == pytest.approx(2.0)  # waits for later noise
    assert mu([1.0, 1.0], [1.0, 1.0], [1.0, 0.0]) == mu([1.0], [1.0], [0.0]) == math.inf
    assert mu([1.0, 1.0], [0.0, 0.0], [0.0, 0.0]) == 0.0


@given(
    st.lists(
        st.tuples(
            st.one_of(st.just(0.0), st.floats(1e-300, 1e300)),
            st.one_of(st.just(0.0), st.floats(1e-6, 1e6)),
            st.one_of(st.just(0.0), st.floats(1e-6, 1e6)),
        ),
        min_size=1,
        max_size=30,
    )
)
def test_never_nan_and_never_above_composition(steps):
    c, s, sigma = (np.array(column) for column in zip(*steps, strict=True))
    mu = hsa.shifted_gdp_mu(c, s, sigma)
    assert mu >= 0  # also false for NaN
    with np.errstate(divide="ignore", invalid="ignore"):
        composition = math.sqrt(np.sum(np.where(s > 0, (s / sigma) ** 2, 0.0)))
    assert mu <= composition * (1 + 1e-12)


def test_scale_invariance():
    rng = np.random.default_rng(0)
    c, s, sigma = random_problem(rng, 30)
    mu = hsa.shifted_gdp_mu(c, s, sigma, 0.3)
    for unit in (1e-120, 1e120):
        assert hsa.shifted_gdp_mu(c, s * unit, sigma * unit, 0.3 * unit) == pytest.approx(mu)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (([0.5, np.nan], 1.0, 1.0), ValueError, "finite contraction >= 0 at every step"),
        (([0.5], [-1.0], 1.0), ValueError, "got -1.0 at index 0"),
        (([0.5], [1.0], [np.inf]), ValueError, "noise_std"),
        (([0.5, 0.5], [1.0] * 3, 1.0), ValueError, "arrays of one length"),
        (([], 1.0, 1.0), TypeError, "non-empty"),
        (("abc", 1.0, 1.0), TypeError, "contraction"),
        (([0.5], 1.0, 1.0, -1.0), ValueError, "initial_shift"),
        (([0.5], 1.0, 1.0, math.inf), ValueError, "initial_shift"),
    ],
)
def test_bad_input(arguments, error, text):
    with pytest.raises(error, match=text):
        hsa.shifted_gdp_mu(*arguments)


# --- all positions at once ------------------------------------------------------------------------


def random_process(rng):
    steps = int(rng.integers(1, 300))
    period = int(rng.integers(1, min(steps + 5, 40)))
    spread = rng.choice([0.03, 0.5])
    contraction = np.exp(rng.normal(rng.choice([-0.05, 0.0, 0.05]), spread, steps))
    contraction[rng.random(steps) < rng.choice([0.0, 0.03])] = 0.0
    sensitivity = rng.uniform(0.2, 1.0, steps) * (rng.random(steps) < 0.9)
    noise_std = rng.uniform(0.3, 1.0, steps) * (rng.random(steps) < 0.95)
    noise_std[-1] += 0.1
    return NoisyProcess(
        contraction,
        sensitivity,
        noise_std,
        drift_contraction=rng.uniform(0.9, 1.0, steps),
        drift=np.maximum(rng.uniform(1.0, 8.0, steps), sensitivity),
        domain_diameter=float(rng.choice([np.inf, rng.uniform(0.5, 10.0)])),
        period=period,
        positions=range(min(period, steps)),
        release_steps=(),
        is_constant=False,
    )


@pytest.mark.parametrize("seed", seeds(12))
def test_all_positions_equal_one_by_itself(seed):
    rng = np.random.default_rng(seed)
    process = attrs.evolve(random_process(rng), domain_diameter=np.inf)
    if seed % 2:  # else a modulus of 0 leaves no products
        moduli = np.maximum(process.contraction, 1e-3) ** rng.choice([0.3, 1.0, 20.0])
        process = attrs.evolve(process, contraction=moduli)
    found = segment_mu_squared(process, 0, process.num_steps, process.positions)
    for position, mu_squared in enumerate(found):
        arrays = process.contraction, process.sensitivity_at(position), process.noise_std
        alone = least_mu_squared(*arrays)
        assert alone * (1 - 1e-12) <= mu_squared <= alone * (1 + 1e-9) + 1e-100


@pytest.mark.parametrize("seed", seeds(12))
def test_the_worst_position_is_looked_at_through_its_windows(seed, monkeypatch):
    """A domain and the drift; positions that cost less without windows are not looked at."""
    monkeypatch.setattr(shifted_interpolation, "_MOST_SCANNED", 0)  # as of a long run
    process = random_process(np.random.default_rng(seed))
    each = [worst_mu_squared(attrs.evolve(process, positions=(p,))) for p in process.positions]
    without = mu_squared_by_position(process) if len(each) > 1 else np.array(each)
    assert (np.array(each) <= without * (1 + 1e-9) + 1e-100).all()
    assert worst_mu_squared(process) == pytest.approx(max(each), rel=1e-9)


@pytest.mark.parametrize("rate", [-0.95, 0.95])
def test_products_of_blocks_stay_in_range(rate):
    """285 nats: S W of a block is e**855 or its inverse."""
    steps, period = 300, 3
    ones, far = np.ones(steps), np.full(steps, 1e300)
    c, noise_std = np.exp(rate * ones), np.exp(np.linspace(0.0, 5.0, steps))
    process = NoisyProcess(
        c, ones, noise_std, far, far, np.inf, period, range(period), (), is_constant=False
    )
    found = mu_squared_by_position(process)
    for position in range(period):
        alone = least_mu_squared(c, process.sensitivity_at(position), noise_std)
        assert found[position] == pytest.approx(alone, rel=1e-9)


SPECIAL = NeighboringRelation.REPLACE_SPECIAL
MODULI = (0.0, 1e-3, 0.3, 0.9, 1 - 1e-4, 1 - 1e-9, 1.0, 1 + 1e-9, 1.001, 1.4)


@pytest.mark.parametrize("c", MODULI)
@pytest.mark.parametrize("period", [1, 2, 7])
def test_closed_form_is_the_isotonic_regression(c, period):
    def closed_form(shift, participations, last=1):
        return mu_squared_of_equal_steps(
            c, shift, period=period, participations=[participations], last=[last]
        )

    assert closed_form(2.0, 0) == closed_form(0.0, 4) == closed_form(np.inf, 0) == [0.0]
    assert closed_form(np.inf, 4) == [np.inf]
    for steps in (1, 2, 6, 7, 8, 20, 61):
        for position in range(min(period, steps)):
            sensitivity = np.zeros(steps)
            sensitivity[position::period] = 1.7
            scan = least_mu_squared(np.full(steps, c), sensitivity, np.full(steps, 0.6))
            participations = int((sensitivity > 0).sum())
            last = steps - position - (participations - 1) * period
            assert closed_form(1.7 / 0.6, participations, last) == pytest.approx([scan], rel=1e-12)


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
@pytest.mark.parametrize("releases", [(), (150, 399)])
def test_long_runs_equal_their_scan(name, releases, short_is_long):
    """A process of which nobody says that its steps are equal is scanned."""
    process = noisy_process(attrs.evolve(RUNS[name], release_steps=releases), SPECIAL)
    scanned = attrs.evolve(process, is_constant=False)
    for engine in (worst_mu_squared, mu_squared_by_position):
        assert engine(process) == pytest.approx(engine(scanned), rel=1e-9)


def test_segments_that_are_shorter_than_an_epoch():
    """All positions at once, and each by itself: between two releases few of them take part."""
    rates = np.linspace(0.5, 0.2, 14)
    event = cyclic_run(num_steps=14, release_steps=(5, 7, 8, 13), learning_rate=rates)
    process = noisy_process(event, SPECIAL)
    alone = [mu_squared_by_position(attrs.evolve(process, positions=(p,)))[0] for p in range(4)]
    assert len(set(alone)) == process.period == 4
    assert mu_squared_by_position(process) == pytest.approx(np.array(alone), rel=1e-12)


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


def test_distances_before_a_tail_of_steps_that_differ():
    c, s = np.random.default_rng(0).uniform(0.5, 1.2, (2, 8))
    process = attrs.evolve(
        noisy_process(RUNS["cyclic"], SPECIAL),
        contraction=c,
        sensitivity=s,
        drift=np.append(0.1, np.full(7, 9.0)),
        is_constant=False,
    )
    apart = np.zeros(4)  # by a record at each position
    for step in range(8):
        apart = c[step] * apart + s[step] * (np.arange(4) == step % 4)
        if step == 3:
            assert distance_after(process, 4) == pytest.approx(apart.max(), rel=1e-12)
    assert distance_after(process, 8) >= apart.max()


@pytest.mark.parametrize(
    "order",
    first(
        4,
        ["full", "cyclic", "without_replacement", "poisson", "shuffled_once", "reshuffled"],
    ),
)
@pytest.mark.parametrize("diameter", [np.inf, 0.7])
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
