"""The black-box audit: calibrated on mechanisms that are known exactly, and able to refute."""

import math

import numpy as np
import pytest
from scipy import stats

from hidden_state_accountants.auditing.monte_carlo import monte_carlo_audit
from hidden_state_accountants.curves.gaussian import delta_from_mu, epsilon_from_mu
from hidden_state_accountants.figures import text_down

DELTA = 1e-2


def gaussian(mean, dimension=None, std=1.0):
    size = () if dimension is None else (dimension,)
    return lambda rng: rng.normal(mean, std, size)


def first_coordinate(release):
    return float(np.ravel(release)[0])


@pytest.mark.parametrize("confidence", [0.6, 0.95])
def test_all_four_intervals_hold_with_the_stated_confidence(confidence):
    repetitions, failures = 200, 0
    for seed in range(repetitions):
        audit = monte_carlo_audit(
            gaussian(0.0),
            gaussian(-1.0),
            trials=120,
            delta=DELTA,
            confidence=confidence,
            statistic=first_coordinate,
            seed=seed,
        )
        covered = True
        for test, means in ((audit.forward, (0.0, -1.0)), (audit.backward, (-1.0, 0.0))):
            hit, alarm = (stats.norm.sf(test.threshold, test.sign * mean) for mean in means)
            covered &= test.probability <= hit and alarm <= test.false_alarm_probability
        failures += not covered
    allowed = stats.binom.ppf(0.9999, repetitions, 1 - confidence)
    assert failures <= allowed
    if confidence == 0.6:  # and the intervals are not much wider than they have to be
        assert failures >= 0.08 * repetitions


@pytest.mark.parametrize("dimension", [None, 20, 2000])
def test_power(dimension):
    """It reaches a decent fraction of the true epsilon, also with fewer runs than dimensions."""
    mu = 1.5
    trials = 6000 if dimension != 2000 else 1500
    shift = np.zeros(dimension or 1)
    shift[0] = mu if dimension != 2000 else 4 * mu
    audit = monte_carlo_audit(
        lambda rng: rng.normal(size=dimension or 1),
        lambda rng: shift + rng.normal(size=dimension or 1),
        trials=trials,
        delta=DELTA,
        seed=1,
    )
    assert audit.epsilon > (0.5 * epsilon_from_mu(mu, DELTA) if dimension != 2000 else 2.0)
    assert audit.epsilon <= epsilon_from_mu(float(shift[0]), DELTA)


def test_forgotten_noise_is_found():
    """Twice too little noise: the claim for the declared noise is refuted, a true claim is not."""
    declared, steps = 0.5, 4

    def train(pull, std):
        def run(rng):
            weights = np.zeros(5)
            for _ in range(steps):
                gradient = np.zeros(5)
                gradient[0] = pull
                weights = weights - 0.1 * (gradient + std * rng.normal(size=5))
            return weights

        return run

    std = math.sqrt(steps) / declared  # mu = sqrt(T) * sensitivity / std
    for factor, refuted in ((1.0, False), (0.5, True)):
        found = monte_carlo_audit(
            train(0.0, factor * std), train(1.0, factor * std), trials=8000, delta=1e-3, seed=3
        )
        claims = [(eps, delta_from_mu(declared, eps)) for eps in np.linspace(0, 4, 41)]
        assert any(found.delta(eps) > delta for eps, delta in claims) == refuted


def test_epsilon_and_delta_are_one_statement():
    audit = monte_carlo_audit(gaussian(0.0), gaussian(2.0), trials=1000, delta=DELTA, seed=5)
    assert audit.epsilon > 0.5
    assert audit.delta(audit.epsilon) == pytest.approx(DELTA, rel=1e-9)
    assert audit.delta(0.0) > audit.delta(1.0) > 0
    assert audit.delta(1e6) == 0


def test_deterministic_trainers():
    same = monte_carlo_audit(lambda rng: [1.0, 2.0], lambda rng: [1.0, 2.0], trials=50, delta=0.0)
    assert same.epsilon == 0
    other = monte_carlo_audit(lambda rng: [1.0, 2.0], lambda rng: [1.0, 3.0], trials=200, delta=0.0)
    certain = 0.0125 ** (1 / 100)  # all that 100 tested runs can show
    assert other.epsilon == pytest.approx(math.log(certain / (1 - certain)), rel=1e-9)


def test_seeds_progress_and_buffers():
    buffer, lines = np.zeros(2), []

    def reuses_its_buffer(rng):
        buffer[:] = rng.normal(size=2)
        return buffer

    audits = [
        monte_carlo_audit(
            reuses_its_buffer,
            gaussian(1.0, 2),
            trials=300,
            delta=DELTA,
            seed=7,
            progress=lines.append,
        ),
        monte_carlo_audit(gaussian(0.0, 2), gaussian(1.0, 2), trials=300, delta=DELTA, seed=7),
    ]
    assert audits[0] == audits[1]
    assert len(lines) == 21
    assert lines[-1] == f"audit: epsilon >= {text_down(audits[0].epsilon, 4)} with confidence 0.95"


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"trials": 3}, ValueError, "Expected trials >= 4"),
        ({"delta": 1.1}, ValueError, "delta <= 1"),
        ({"delta": math.nan}, ValueError, "delta"),
        ({"confidence": 1.1}, ValueError, "confidence <= 1"),
        ({"confidence": 0.0}, ValueError, "confidence > 0"),
        ({"trials": 10.5}, TypeError, "trials"),
        ({"train": lambda rng: math.nan}, ValueError, "finite arrays of one shape"),
        ({"train": lambda rng: np.zeros(rng.integers(1, 9))}, ValueError, "of one shape"),
        ({"train": lambda rng: np.zeros(2)}, ValueError, "one shape"),
        ({"statistic": lambda release: math.inf}, ValueError, "finite"),
    ],
)
def test_bad_input(changes, error, match):
    arguments = {
        "train": gaussian(0.0),
        "train_neighbour": gaussian(0.0),
        "trials": 20,
        "delta": 0.1,
        "seed": 0,
    } | changes
    train, neighbour = arguments.pop("train"), arguments.pop("train_neighbour")
    with pytest.raises(error, match=match):
        monte_carlo_audit(train, neighbour, **arguments)
