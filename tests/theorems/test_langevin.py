"""Chourasia, Ye, Shokri 2021 (arXiv 2102.05855): recursion, conditions, dominance."""

import math
import warnings

import numpy as np
import pytest
from cases import seeds
from dp_accounting import NeighboringRelation
from runs import cyclic_run, full_run
from scipy import integrate

import hidden_state_accountants as hsa
from hidden_state_accountants.bounds import Langevin
from hidden_state_accountants.process.noisy_process import noisy_process

REPLACE_ONE = NeighboringRelation.REPLACE_ONE
REPLACE_SPECIAL = NeighboringRelation.REPLACE_SPECIAL


def ridge_run(**changes):
    """A full-batch run that meets every condition: lambda = 0.3, beta = 1.2, eta = 0.5."""
    arguments = {
        "clip_norm": None,
        "loss": hsa.LossGeometry.strongly_convex(1.0, 0.1, lipschitz=1.0),
    }
    return full_run(**(arguments | changes))


def rate(event, relation=REPLACE_ONE, analysis="sound"):
    return float(Langevin(analysis).guarantee(event, relation).rdp([2.0])[0]) / 2


def log_sobolev_step(rho, q, contraction, s, v):
    """The recursion of docs/papers/last_iterate.md: rate and inverse constant after a step."""
    d, after = math.sqrt(2 * rho * q), contraction**2 * q + v
    if d * v >= s * contraction * q:
        return (contraction * d + s) ** 2 / (2 * after), after
    return rho + s**2 / (2 * v), after


class TestRecursion:
    @pytest.mark.parametrize("seed", seeds(6))
    def test_solves_the_differential_inequality_balanced_best(self, seed):
        """rho' = s^2/(2 v gamma) - (1 - gamma) rho v/(L^2 q + u v), minimised over gamma <= 1."""
        rng = np.random.default_rng(seed)
        rho, q, contraction, s, v = np.exp(rng.normal(0, 1, 5))
        add = s**2 / (2 * v)

        def slope(u, y):
            erosion = y[0] * v / (contraction**2 * q + u * v)
            gamma = min(1.0, math.sqrt(add / erosion))
            return [add / gamma - (1 - gamma) * erosion]

        solved = integrate.solve_ivp(slope, (0, 1), [rho], rtol=1e-11, atol=1e-13).y[0, -1]
        assert log_sobolev_step(rho, q, contraction, s, v)[0] == pytest.approx(solved, rel=1e-8)

    @pytest.mark.parametrize("seed", seeds(6))
    def test_theorem_a_is_never_larger(self, seed):
        """For any moduli, sensitivities and variances; equal for constant ones that contract."""
        rng = np.random.default_rng(seed)
        steps = np.exp(rng.normal(-0.2, 0.7, (30, 3))) * (rng.random((30, 3)) < [1, 0.6, 1])
        constant = np.tile([rng.uniform(0, 1), 0.7, 1.3], (30, 1))
        for run, tolerance in ((steps, math.inf), (constant, 1e-11)):
            rho = q = 0.0
            for c, s, sigma in run:
                rho, q = log_sobolev_step(rho, q, c, s, sigma**2)
            least = hsa.shifted_gdp_mu(*run.T) ** 2 / 2
            assert least * (1 - 1e-12) <= rho <= least * (1 + tolerance)


class TestBound:
    @pytest.mark.parametrize("relation", [REPLACE_ONE, REPLACE_SPECIAL])
    @pytest.mark.parametrize("steps", [1, 24, 500])
    def test_published_is_corollary_1(self, relation, steps):
        event = ridge_run(num_steps=steps)
        # b = n = 20, eta = 0.5, noise std of the iterate 0.5 * 2 / 20, sqrt(2 eta) sigma
        sigma = 0.5 * 2.0 / 20 / math.sqrt(2 * 0.5)
        total = 2.0 if relation is REPLACE_ONE else 1.0
        lam = 0.1 + 0.2
        expected = total**2 / (lam * sigma**2 * 20**2) * (1 - math.exp(-lam * 0.5 * steps / 2))
        assert rate(event, relation, "published") == pytest.approx(expected, rel=1e-9)
        assert rate(event, relation) <= expected

    def test_published_is_true_and_so_needs_no_caveat(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            accountant = hsa.LangevinAccountant(analysis="published").compose(ridge_run())
        assert accountant.guarantee.caveat == ""
        sound = hsa.LangevinAccountant().compose(ridge_run())
        assert sound.get_epsilon(1e-5) < accountant.get_epsilon(1e-5)

    @pytest.mark.parametrize("steps", [1, 7, 60])
    def test_the_quadratic_of_theorem_3_is_met_exactly(self, steps):
        eta, n, sigma = 0.3, 20, 0.05
        event = ridge_run(
            loss=hsa.LossGeometry.strongly_convex(1.0, 1.0, lipschitz=1.0),
            weight_decay=0.0,
            learning_rate=eta,
            noise_multiplier=math.sqrt(2 * eta) * sigma * n / eta,
            num_steps=steps,
        )
        left = (1 - eta) ** steps
        square = (2.0 / (sigma * n)) ** 2
        exact = square / 4 * (2 - eta) / (1 + left) * (1 - left)
        assert rate(event) == pytest.approx(exact, rel=1e-11)
        lower = square / 4 * (1 - math.exp(-eta * steps))  # (68), Theorem 3
        upper = square / (2 - eta) * (1 - math.exp(-(2 - eta) * eta * steps / 2))  # (70)
        assert lower <= exact <= upper
        assert exact <= rate(event, analysis="published")
        # From the paper's start N(0, 2 sigma^2 I) the variance is larger by (1 - eta)^2K 2 sigma^2.
        fixed = 2 * eta * sigma**2 * (1 - left**2) / (1 - (1 - eta) ** 2)
        random = exact * fixed / (fixed + left**2 * 2 * sigma**2)
        assert random <= rate(event, analysis="published")
        if steps == 1:
            assert random < lower

    def test_contraction_of_the_process_is_the_papers(self):
        event = ridge_run()
        process = noisy_process(event, REPLACE_ONE)
        assert process.contraction == pytest.approx(np.full(24, 1 - 0.5 * 0.3), rel=1e-12)

    def test_silent_runs(self):
        assert rate(ridge_run(noise_multiplier=0.0)) == math.inf
        assert (
            hsa.LangevinAccountant().compose(ridge_run(noise_multiplier=0.0)).get_epsilon(1e-5)
            == math.inf
        )
        for analysis in ("sound", "published"):
            assert rate(ridge_run(learning_rate=0.0), analysis=analysis) == 0


class TestConditions:
    @pytest.mark.parametrize(
        ("event", "texts"),
        [
            (cyclic_run(), ["batch order", "CYCLIC"]),
            (ridge_run(loss=hsa.LossGeometry.convex(1.0, 1.0), weight_decay=0.0),
             ["strong convexity", "weight_decay", "got 0 at step 1"]),
            (ridge_run(loss=hsa.LossGeometry.weakly_convex(1.0, 0.3, 1.0)),
             ["strong convexity", "got -0.1"]),
            (ridge_run(learning_rate=0.9),
             ["step size", "learning_rate < 1/beta = 0.833333", "got 0.9"]),
            (ridge_run(learning_rate=[0.5] * 10 + [0.9] * 14), ["got 0.9 at step 11"]),
            (ridge_run(clip_norm=0.5), ["no clipping", "raise clip_norm", "clip_norm 0.5"]),
            (ridge_run(clip_norm=1.0, loss=None), ["loss geometry"]),
            (ridge_run(loss=hsa.LossGeometry.hoelder(1.0, 0.5, 1.0)), ["linear modulus"]),
        ],
    )  # fmt: skip
    def test_each_is_named(self, event, texts):
        accountant = hsa.LangevinAccountant(REPLACE_ONE)
        assert not accountant.supports(event)
        with pytest.raises(hsa.UnsupportedRunError) as error:
            accountant.compose(event)
        for text in texts:
            assert text in str(error.value)

    @pytest.mark.parametrize(
        ("changes", "text"),
        [
            ({"learning_rate": [0.5] * 12 + [0.4] * 12}, "schedule"),
            ({"release_steps": (4,)}, "1 more"),
        ],
    )
    def test_the_corollary_is_for_constant_parameters(self, changes, text):
        event = ridge_run(**changes)
        hsa.LangevinAccountant().compose(event)
        with pytest.raises(hsa.UnsupportedRunError, match=text):
            hsa.LangevinAccountant(analysis="published").compose(event)

    def test_active_clip_is_fine_where_it_keeps_the_class(self):
        event = ridge_run(clip_norm=0.5, loss=hsa.LossGeometry.generalized_linear(1.0))
        assert Langevin().check(event, REPLACE_ONE) == ()

    def test_analysis_and_event_are_checked(self):
        with pytest.raises(ValueError, match='"sound" or "published"'):
            hsa.LangevinAccountant(analysis="paper")
        block = hsa.BlockCoordinateDpEvent(
            step_size=0.1, noise_variance=1.0, gradient_sensitivity=1.0, batch_size=1,
            dataset_size=2, num_epochs=1,
        )  # fmt: skip
        with pytest.raises(hsa.UnsupportedRunError, match="LastIterateDpEvent"):
            hsa.LangevinAccountant().compose(block)
