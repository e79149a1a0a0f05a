"""All positions at once against one position by itself, where a domain or the drift helps."""

import attrs
import numpy as np
import pytest
from cases import seeds

import hidden_state_accountants as hsa
from hidden_state_accountants.bounds.shifted_interpolation import (
    mu_squared_by_position,
    segment_mu_squared,
)
from hidden_state_accountants.bounds.solvers.all_positions import (
    mu_squared_after_batches,
    mu_squared_by_windows,
    mu_squared_from_start,
)
from hidden_state_accountants.process.noisy_process import NoisyProcess


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


@pytest.mark.parametrize("seed", seeds(6))
def test_equals_one_position_by_itself(seed):
    rng = np.random.default_rng(seed)
    process = random_process(rng)
    stop = process.num_steps
    start = int(rng.integers(stop)) if rng.random() < 0.3 else 0
    found = mu_squared_by_windows(process, start, stop)
    for offset, mu_squared in enumerate(found):
        position = (start + offset) % process.period
        alone = segment_mu_squared(process, start, stop, [position])[0]
        assert alone * (1 - 1e-12) <= mu_squared <= max(alone * (1 + 1e-11), 1e-100)


@pytest.mark.parametrize("seed", seeds(6))
def test_whichever_scan_a_run_needs(seed):
    process = random_process(np.random.default_rng(seed))
    found = mu_squared_by_position(process)
    for position, mu_squared in enumerate(found):
        alone = segment_mu_squared(process, 0, process.num_steps, [position])[0]
        assert alone * (1 - 1e-12) <= mu_squared <= alone * (1 + 1e-9) + 1e-100


@pytest.mark.parametrize("exponent", [-3e3, 3e3])
def test_products_far_beyond_floating_point(exponent):
    """A stretch of steps that multiplies distances by e**exponent, in either order."""
    steps, period = 600, 7
    stretch = np.full(steps - 100, np.exp(exponent / steps))
    calm = np.full(100, 0.95)
    for c in (np.concatenate((stretch, calm)), np.concatenate((calm, stretch))):
        ones = np.ones(steps)
        process = NoisyProcess(
            c, ones, ones, ones, 4 * ones, 300.0, period, range(period), (), is_constant=False
        )
        found = mu_squared_by_windows(process, 0, steps)
        alone = [segment_mu_squared(process, 0, steps, [p])[0] for p in range(period)]
        assert found == pytest.approx(np.array(alone), rel=1e-11)
        assert (found >= np.array(alone) * (1 - 1e-12)).all()


@pytest.mark.parametrize("seed", seeds(6))
def test_without_windows_equals_one_position_by_itself(seed):
    rng = np.random.default_rng(seed)
    process = random_process(rng)
    moduli = np.maximum(process.contraction, 1e-3) ** rng.choice([0.3, 1.0, 20.0])
    far = np.full(process.num_steps, 1e300)
    process = attrs.evolve(process, contraction=moduli, drift=far, domain_diameter=np.inf)
    found = mu_squared_from_start(process, 0, process.num_steps)
    if found is None:  # some hundred nats
        assert np.abs(np.cumsum(np.log(moduli[::-1]))).max() > 150
        found = segment_mu_squared(process, 0, process.num_steps, process.positions)
    for position, mu_squared in enumerate(found):
        alone = segment_mu_squared(process, 0, process.num_steps, [position])[0]
        assert alone * (1 - 1e-12) <= mu_squared <= alone * (1 + 1e-9)


@pytest.mark.parametrize("seed", seeds(6))
def test_windows_after_batches_equal_one_position_by_itself(seed):
    """No modulus above 1, and a domain that only a batch with the record reaches."""
    rng = np.random.default_rng(seed)
    process = random_process(rng)
    moduli = np.maximum(process.contraction, 0.05).clip(max=1.0) ** rng.choice([0.1, 1.0, 20.0])
    steps, radius = process.num_steps, float(rng.uniform(0.3, 3.0))
    process = attrs.evolve(
        process,
        contraction=moduli,
        drift_contraction=moduli,
        drift=np.full(steps, 2.0 + radius),
        domain_diameter=radius,
    )
    anywhere = np.append(np.nan, np.full(steps, radius))
    found = mu_squared_after_batches(process, 0, steps, anywhere)
    last = mu_squared_after_batches(process, 0, steps, anywhere, is_whole=False)
    if found is None:  # some hundred nats
        assert np.abs(np.cumsum(np.log(moduli[::-1]))).max() > 150
        return
    for position, mu_squared in enumerate(found):
        alone = segment_mu_squared(process, 0, steps, [position])[0]
        # Epochs that hardly count enter as one shift.
        assert alone * (1 - 1e-12) <= mu_squared <= alone * (1 + 1e-9) + 1e-100
        assert last[position] in (mu_squared, np.inf)


@pytest.mark.parametrize("rate", [-0.95, 0.95])
def test_products_of_blocks_stay_in_range(rate):
    """285 nats: S W of a block is e**855 or its inverse."""
    steps, period = 300, 3
    ones, far = np.ones(steps), np.full(steps, 1e300)
    c, noise_std = np.exp(rate * ones), np.exp(np.linspace(0.0, 5.0, steps))
    process = NoisyProcess(
        c, ones, noise_std, far, far, np.inf, period, range(period), (), is_constant=False
    )
    found = mu_squared_from_start(process, 0, steps)
    for position in range(period):
        alone = segment_mu_squared(process, 0, steps, [position])[0]
        assert found[position] == pytest.approx(alone, rel=1e-9)


def test_what_underflows_is_not_forgotten():
    """The second position has mu = 1e-170, whose square no double holds."""
    ones = np.ones(2)
    process = NoisyProcess(
        ones, np.array([1.0, 1e-170]), ones, ones, np.full(2, np.inf), np.inf, 2, range(2), (),
        is_constant=False,
    )  # fmt: skip
    first, second = mu_squared_by_windows(process, 0, 2)
    assert first == pytest.approx(0.5)
    assert 1e-340 < second < 1e-90


def test_windows_are_looked_for_where_one_may_help():
    """The domain, or the drift, is below c D + s, D the largest distance of any position."""
    ones = np.ones(40)
    free = NoisyProcess(
        0.9 * ones, ones, ones, 0.9 * ones, 9 * ones, np.inf, 4, range(4), (), is_constant=False
    )
    assert mu_squared_from_start(free, 0, 40) is not None
    largest = 0.9 / (1 - 0.9**4) + 1
    for radius, is_none in ((0.97 * largest, True), (1.01 * largest, False)):
        process = attrs.evolve(free, domain_diameter=radius)
        assert (mu_squared_from_start(process, 0, 40) is None) == is_none
    drift = 9 * ones
    drift[30] = 0.5
    assert mu_squared_from_start(attrs.evolve(free, drift=drift), 0, 40) is None


def test_a_distance_at_the_start_is_shifted_as_well():
    ones = np.ones(20)
    process = NoisyProcess(
        0.95 * ones, ones, ones, ones, 9 * ones, np.inf, 4, range(4), (), is_constant=True
    )
    found = mu_squared_by_windows(process, 8, 20, initial=2.0)
    for position, mu_squared in enumerate(found):
        moves = np.arange(12) % 4 == position
        mu = hsa.shifted_gdp_mu(0.95, moves.astype(float), 1.0, initial_shift=2.0)
        assert mu_squared == pytest.approx(mu**2, rel=1e-11)
