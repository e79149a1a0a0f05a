"""DP-MBCD: exact laws of block runs against the sound and against the published account."""

import math

import numpy as np
import pytest
from block_zero_curvature import BlockZeroCurvature
from cases import seeds
from dp_accounting import NeighboringRelation
from hypothesis import given
from hypothesis import strategies as st
from quadratics import random_hessian
from scipy import special

import hidden_state_accountants as hsa
from hidden_state_accountants.bounds.chen_liu_2025 import BlockCoordinate, published_rates

REPLACE_ONE = NeighboringRelation.REPLACE_ONE
REPLACE_SPECIAL = NeighboringRelation.REPLACE_SPECIAL


def silent(line):
    """Progress that nobody reads."""


def counterexample(**changes):
    """Theory section 6: eta = 0.1, o = 1, U = 0.5 (S_g = 1), b = 1, 25 batches, 100 epochs."""
    arguments = {
        "step_size": 0.1,
        "noise_variance": 1.0,
        "gradient_sensitivity": 1.0,
        "batch_size": 1,
        "dataset_size": 25,
        "num_epochs": 100,
        "block_loss": hsa.LossGeometry.generalized_linear(1.0),
    }
    return hsa.BlockCoordinateDpEvent(**(arguments | changes))


def claims(event, relation=REPLACE_ONE):
    return {
        name: BlockCoordinate(name).guarantee(event, relation) for name in ("sound", "published")
    }


def brute_force_mixture(event, curvature):
    """Means and variances per position, step by step."""
    o, length = event.noise_variances(), event.batches_per_epoch
    prox = 1 / (1 + event.step_size * event.prox_strong_convexity)
    means, variances = np.zeros(length), np.zeros(length)
    for j0 in range(length):
        for k in range(event.num_epochs):
            for j in range(length):
                own = j == j0
                slope = 1 - event.step_size * curvature * own / event.batch_size
                push = event.step_size * event.gradient_sensitivity / (2 * event.batch_size) * own
                means[j0] = prox * (slope * means[j0] + push)
                variances[j0] = prox**2 * (slope**2 * variances[j0] + 2 * event.step_size * o[k, j])
    return means, variances


def brute_force_renyi(means, variances, order):
    far = (2 * order * means.max()) + 12 * math.sqrt(variances.max())
    x = np.linspace(-far, far, 40_001)

    def log_density(sign):
        exponent = -((x[:, None] - sign * means) ** 2) / (2 * variances)
        terms = exponent - 0.5 * np.log(2 * np.pi * variances) - math.log(len(means))
        return special.logsumexp(terms, axis=1)

    total = special.logsumexp(order * log_density(1) + (1 - order) * log_density(-1))
    return (total + math.log(x[1] - x[0])) / (order - 1)


class TestTheCounterexample:
    def test_the_figures_of_the_theory(self):
        event = counterexample()
        claimed = claims(event)
        evidence = BlockZeroCurvature(record_curvature=1.0).evidence(event, REPLACE_ONE, silent)
        assert claimed["published"].rdp([2.0])[0] / 2 == pytest.approx(0.00532, abs=5e-6)
        assert evidence.renyi(2.0) / 2 == pytest.approx(0.02090, abs=5e-6)
        assert claimed["sound"].rdp([2.0])[0] / 2 > evidence.renyi(2.0) / 2

    def test_by_position(self):
        """The published figure of the last position holds, those of the others do not."""
        means, variances = brute_force_mixture(counterexample(), 1.0)
        exact = (2 * means) ** 2 / (2 * variances)
        published = published_rates(0.1, np.ones((100, 25)), 1.0, 1, 0.9, 1.0)
        assert (exact[0], exact[24]) == pytest.approx((0.0190, 0.0232), abs=5e-5)
        assert (published[0], published[24]) == pytest.approx((0.00016, 0.0252), abs=5e-5)
        assert exact[24] <= published[24]
        assert (exact[:24] > published[:24]).sum() >= 20

    def test_a_linear_record_is_worse_still_and_without_limit(self):
        """Then nothing contracts at all: exactly mu = E s / sqrt(T) sigma, growing with E."""
        shares = []
        for epochs in (100, 400):
            event = counterexample(num_epochs=epochs)
            evidence = BlockZeroCurvature().evidence(event, REPLACE_ONE, silent)
            mu = epochs * 0.1 / math.sqrt(25 * epochs * 0.2)
            assert evidence.renyi(3.0) == pytest.approx(3 * mu**2 / 2, rel=1e-12)
            claimed = claims(event)
            assert evidence.epsilon(1e-5) > 2 * claimed["published"].epsilon(1e-5)
            assert evidence.epsilon(1e-5) <= claimed["sound"].epsilon(1e-5)
            shares.append(evidence.renyi(2.0) / claimed["published"].rdp([2.0])[0])
        assert shares[0] == pytest.approx(0.1 / 0.0053157, rel=1e-3)
        assert shares[1] == pytest.approx(4 * shares[0], rel=0.05)


class TestAttack:
    @pytest.mark.parametrize("curvature", [0.0, 0.7])
    @pytest.mark.parametrize("prox", [0.0, 0.4])
    def test_law_against_brute_force(self, curvature, prox):
        noise = np.exp(np.random.default_rng(3).normal(0, 0.6, (7, 6)))
        event = counterexample(
            batch_size=2, dataset_size=12, num_epochs=7, noise_variance=noise,
            prox_strong_convexity=prox, step_size=0.5, gradient_sensitivity=3.0,
        )  # fmt: skip
        attack = BlockZeroCurvature(record_curvature=curvature)
        evidence = attack.evidence(event, REPLACE_ONE, silent)
        means, variances = brute_force_mixture(event, curvature)
        for order in (1.5, 2.0, 8.0):
            expected = brute_force_renyi(means, variances, order)
            assert evidence.renyi(order) == pytest.approx(expected, rel=1e-8)
        # delta is that of a half-line: compare the best over a grid of another spacing
        for epsilon in (0.0, 0.3):
            c = np.linspace(-20, 20, 30_011)[:, None]
            gain = special.ndtr((means - c) / np.sqrt(variances)) - math.exp(
                epsilon
            ) * special.ndtr((-means - c) / np.sqrt(variances))
            assert evidence.delta(epsilon) == pytest.approx(gain.mean(axis=1).max(), rel=1e-5)

    def test_replace_special(self):
        """The record's constant gradient S_g against none: centres 2 m_j against 0."""
        event = counterexample(prox_strong_convexity=0.2)
        evidence = BlockZeroCurvature().evidence(event, REPLACE_SPECIAL, silent)
        means, variances = brute_force_mixture(event, 0.0)
        std = math.sqrt(variances[0])
        np.testing.assert_allclose(variances, variances[0], rtol=1e-12)
        c = np.linspace(-8 * std, 8 * std, 40_011)[:, None]
        gain = special.ndtr((2 * means - c) / std).mean(axis=1)
        gain -= math.exp(0.1) * special.ndtr(-c[:, 0] / std)
        assert evidence.delta(0.1) == pytest.approx(gain.max(), rel=1e-5)
        claim = claims(event, REPLACE_SPECIAL)["sound"]
        assert 0 < evidence.renyi(2.0) <= claim.rdp([2.0])[0]
        assert evidence.delta(0.1) <= claim.delta(0.1)

    def test_large_orders_stay_lower_bounds(self):
        event = counterexample(prox_strong_convexity=0.2)
        evidence = BlockZeroCurvature().evidence(event, REPLACE_ONE, silent)
        bound = claims(event)["sound"].rdp([1e9])[0]
        assert 0 < evidence.renyi(1e9) <= bound
        for order in (50.0, 1e3, 1e4, 1e5):
            assert 0 < evidence.renyi(order) <= claims(event)["sound"].rdp([order])[0]


class TestSoundAccount:
    @given(st.data())
    def test_no_attack_beats_it(self, data):
        epochs, batches = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 6))
        size = data.draw(st.integers(1, 3))
        rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
        eta = float(rng.uniform(0.01, 1.9))
        event = hsa.BlockCoordinateDpEvent(
            step_size=eta,
            noise_variance=np.exp(rng.normal(0, 1, (epochs, batches))),
            gradient_sensitivity=float(rng.uniform(0.1, 3)),
            batch_size=size,
            dataset_size=size * batches,
            num_epochs=epochs,
            block_loss=hsa.LossGeometry.generalized_linear(1.0),
            prox_strong_convexity=float(rng.choice([0.0, 0.3])),
            num_blocks=int(rng.choice([1, 1, 2])),
        )
        for curvature in (0.0, 0.5, 1.0):
            evidence = BlockZeroCurvature(record_curvature=curvature).evidence(
                event, REPLACE_ONE, silent
            )
            claim = BlockCoordinate().guarantee(event, REPLACE_ONE)
            for order in (1.2, 2.0, 6.0):
                assert evidence.renyi(order) <= claim.rdp([order])[0] * (1 + 1e-9)
            for epsilon in (0.0, 0.5, 2.0):
                assert evidence.delta(epsilon) <= claim.delta(epsilon) * (1 + 1e-9) + 1e-15

    @pytest.mark.parametrize("seed", seeds(40))
    def test_exact_quadratic_blocks_in_any_dimension(self, seed):
        """Unclipped quadratics whose slopes differ: the exact mu at every public position."""
        rng = np.random.default_rng(seed)
        dimension, size = int(rng.integers(1, 4)), int(rng.integers(1, 3))
        batches, epochs = int(rng.integers(1, 5)), int(rng.integers(1, 8))
        lowest = float(rng.choice([0.0, 0.3]))
        eta = float(rng.uniform(0.05, 2.2))
        ridge = float(rng.choice([0.0, 0.5]))
        hessians = [random_hessian(rng, dimension, lowest, 1.0) for _ in range(size * batches)]
        maps = [
            np.eye(dimension) - eta * sum(hessians[j * size : (j + 1) * size]) / size
            for j in range(batches)
        ]
        noise = np.exp(rng.normal(0, 0.7, (epochs, batches)))
        event = hsa.BlockCoordinateDpEvent(
            step_size=eta,
            noise_variance=noise,
            gradient_sensitivity=2.0,
            batch_size=size,
            dataset_size=size * batches,
            num_epochs=epochs,
            update_lipschitz=max(np.linalg.norm(m, 2) for m in maps),
            prox_strong_convexity=ridge,
        )
        prox = 1 / (1 + eta * ridge)
        exact = 0.0
        for j0 in range(batches):
            for _ in range(4):
                direction = rng.normal(size=dimension)
                direction *= eta * 2.0 / size / np.linalg.norm(direction)
                shift, covariance = np.zeros(dimension), np.zeros((dimension, dimension))
                for k in range(epochs):
                    for j in range(batches):
                        shift = prox * (maps[j] @ shift + direction * (j == j0))
                        spread = maps[j] @ covariance @ maps[j].T
                        spread += 2 * eta * noise[k, j] * np.eye(dimension)
                        covariance = prox**2 * spread
                exact = max(exact, math.sqrt(shift @ np.linalg.solve(covariance, shift)))
        claim = BlockCoordinate().guarantee(event, REPLACE_ONE).mu
        assert exact <= claim * (1 + 1e-9)
        if dimension == 1 and batches == 1 and size == 1 and eta < 1:
            assert claim <= exact * (1 + 0.5)


class TestOtherFalseClaims:
    def test_an_invertible_prox_does_not_hide_anything(self):
        """Corollary 4.5 with L_T = 1/2 has the exponent 4 where 1 is the truth."""
        # Two batches, record in the first, one epoch, F the identity, prox x/2, v = 2 eta o = 1.
        published = published_rates(0.5, np.ones((1, 2)), 2.0, 1, 1.0, 0.5)[0]
        shift, variance = 0.5, 0.25 + 1.0  # before the last prox: (s/2, 1/4) and then noise
        assert shift**2 / (2 * variance) > 50 * published

    def test_a_hidden_variable_expands(self):
        """(x y - m)^2/2 + lam y^2/2, y fitted: convex in x, but the slope is 1 + eta m^2/lam."""
        eta, m, lam = 0.1, 2.0, 0.5

        def step(x):
            y = m * x / (x * x + lam)
            return x - eta * (x * y - m) * y

        slope = (step(1e-6) - step(-1e-6)) / 2e-6
        assert slope == pytest.approx(1 + eta * m**2 / lam, rel=1e-6)

    def test_a_step_size_that_depends_on_the_hessian_expands(self):
        """Lemma 4.1, f' = 10 sigmoid, kappa = 1, eta = 0.6: claimed 0.5."""

        def step(x):
            p = special.expit(x)
            return x - np.minimum(1 / (10 * p * (1 - p)), 0.6) * 10 * p

        x = np.linspace(-8, 8, 200_001)
        assert np.abs(np.diff(step(x)) / np.diff(x)).max() == pytest.approx(2.73, abs=0.01)
