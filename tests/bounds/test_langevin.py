"""Chourasia, Ye, Shokri 2021 (arXiv 2102.05855): formulas, recursion, conditions, dominance."""

import itertools
import math
import warnings

import numpy as np
import pytest
from cases import seeds
from dp_accounting import NeighboringRelation
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import cyclic_run, full_run
from scipy import integrate

import hidden_state_accountants as hsa
from hidden_state_accountants.bounds.langevin import formulas
from hidden_state_accountants.bounds.langevin.bound import Langevin, recursion_rate
from hidden_state_accountants.bounds.solvers.log_sobolev import log_sobolev_step
from hidden_state_accountants.process.noisy_process import noisy_process

REPLACE_ONE = NeighboringRelation.REPLACE_ONE
REPLACE_SPECIAL = NeighboringRelation.REPLACE_SPECIAL
FIGURE_2 = {"total_sensitivity": 4.0, "dataset_size": 5000, "noise_std": 0.02}


def ridge_run(**changes):
    """A full-batch run that meets every condition: lambda = 0.3, beta = 1.2, eta = 0.5."""
    arguments = {
        "clip_norm": None,
        "loss": hsa.LossGeometry.strongly_convex(1.0, 0.1, lipschitz=1.0),
    }
    return full_run(**(arguments | changes))


def rate(event, relation=REPLACE_ONE, analysis="sound"):
    return float(Langevin(analysis).guarantee(event, relation).rdp([2.0])[0]) / 2


class TestFormulas:
    """Typed again from the paper."""

    @pytest.mark.parametrize(
        ("s", "n", "sigma", "eta", "k", "lam"),
        [
            (4.0, 5000, 0.02, 0.02, 300, 0.7),
            (1.0, 1, 1.0, 0.9, 1, 2.0),
            (0.3, 7, 5.0, 0.1, 0, 1e-3),
        ],
    )
    def test_against_the_paper(self, s, n, sigma, eta, k, lam):
        arguments = (s, n, sigma, eta, k)
        alpha = 7.0
        # Theorem 1 with S_v = S_g/n, T = eta K: alpha S_v^2 T / (4 sigma^2)
        assert alpha * formulas.linear_rate(*arguments) == pytest.approx(
            alpha * (s / n) ** 2 * eta * k / (4 * sigma**2), rel=1e-12
        )
        # (56): alpha S_g^2 / (2 c sigma^4 n^2) (1 - exp(-sigma^2 c eta K))
        c = lam / 3
        assert alpha * formulas.log_sobolev_rate(*arguments, c) == pytest.approx(
            alpha * s**2 / (2 * c * sigma**4 * n**2) * (1 - np.exp(-(sigma**2) * c * eta * k)),
            rel=1e-9,
        )
        # Corollary 1: alpha S_g^2 / (lambda sigma^2 n^2) (1 - exp(-lambda eta K / 2))
        assert alpha * formulas.strongly_convex_rate(*arguments, lam) == pytest.approx(
            alpha * s**2 / (lam * sigma**2 * n**2) * (1 - np.exp(-lam * eta * k / 2)), rel=1e-9
        )
        # (70): alpha S_g^2 / ((2 - eta) sigma^2 n^2) (1 - exp(-(2 - eta)/2 eta K))
        assert alpha * formulas.squared_norm_rate(*arguments) == pytest.approx(
            alpha * s**2 / ((2 - eta) * sigma**2 * n**2) * (1 - np.exp(-(2 - eta) / 2 * eta * k)),
            rel=1e-9,
        )
        # (68): alpha S_g^2 / (4 sigma^2 n^2) (1 - exp(-eta K))
        assert alpha * formulas.squared_norm_lower_rate(*arguments) == pytest.approx(
            alpha * s**2 / (4 * sigma**2 * n**2) * (1 - np.exp(-eta * k)), rel=1e-9
        )

    def test_corollaries_are_theorem_2(self):
        arguments = (1.0, 10, 0.5, 0.1, 40)
        assert formulas.strongly_convex_rate(*arguments, 0.3) == pytest.approx(
            formulas.log_sobolev_rate(*arguments, 0.3 / (2 * 0.5**2)), rel=1e-12
        )
        assert formulas.squared_norm_rate(*arguments) == pytest.approx(
            formulas.log_sobolev_rate(*arguments, (2 - 0.1) / (2 * 0.5**2)), rel=1e-12
        )

    def test_prescriptions_give_the_privacy_that_they_promise(self):
        loss = {
            "lipschitz": 3.0,
            "strong_convexity": 0.2,
            "smoothness": 2.0,
            "dataset_size": 50_000,
            "dimension": 30,
        }
        by_rdp = formulas.prescription_for_rdp(8.0, 0.5, **loss)
        # (71): sigma^2 = 4 alpha L^2/(lambda eps n^2), K* = 2 beta^2/lambda^2 log(n^2 eps/alpha d)
        assert by_rdp.noise_std**2 == pytest.approx(4 * 8 * 9 / (0.2 * 0.5 * 50_000**2), rel=1e-12)
        assert by_rdp.num_steps == math.ceil(200 * math.log(50_000**2 * 0.5 / (8 * 30)))
        assert by_rdp.learning_rate == 0.2 / 8
        steps = (by_rdp.num_steps, 10**9)
        for k in steps:
            promised = formulas.strongly_convex_rate(
                6.0, 50_000, by_rdp.noise_std, by_rdp.learning_rate, k, 0.2
            )
            assert 8 * promised <= 0.5 * (1 + 1e-12)
        # (72): sigma^2 = 8 L^2 (eps + 2 log(1/delta)) / (lambda eps^2 n^2)
        by_dp = formulas.prescription_for_dp(1.5, 1e-6, **loss)
        log = math.log(1e6)
        assert by_dp.noise_std**2 == pytest.approx(
            8 * 9 * (1.5 + 2 * log) / (0.2 * 1.5**2 * 50_000**2), rel=1e-12
        )
        assert by_dp.num_steps == math.ceil(200 * math.log(50_000**2 * 1.5**2 / (4 * log * 30)))
        limit = formulas.strongly_convex_rate(
            6.0, 50_000, by_dp.noise_std, by_dp.learning_rate, 10**9, 0.2
        )
        order = 1 + 2 / 1.5 * log
        assert order * limit + log / (order - 1) <= 1.5 * (1 + 1e-12)

    @pytest.mark.parametrize(
        ("name", "value", "text"),
        [
            ("total_sensitivity", -1.0, "total_sensitivity >= 0"),
            ("dataset_size", 0, "dataset_size >= 1"),
            ("noise_std", math.nan, "noise_std"),
            ("learning_rate", 1.0, "learning_rate < 1"),
            ("num_steps", -1, "num_steps >= 0"),
        ],
    )
    def test_bad_arguments(self, name, value, text):
        arguments = FIGURE_2 | {"learning_rate": 0.02, "num_steps": 3, name: value}
        with pytest.raises(ValueError, match=text):
            formulas.squared_norm_lower_rate(**arguments)

    def test_no_noise_no_privacy(self):
        assert formulas.linear_rate(1.0, 1, 0.0, 0.1, 3) == math.inf
        assert formulas.log_sobolev_rate(1.0, 1, 0.0, 0.1, 3, 1.0) == math.inf
        assert formulas.strongly_convex_rate(1.0, 1, 0.0, 0.1, 3, 1.0) == math.inf
        assert formulas.log_sobolev_rate(0.0, 1, 0.0, 0.1, 3, 1.0) == 0
        assert formulas.linear_rate(1.0, 1, 0.0, 0.1, 0) == 0


class TestFigure2:
    """sigma = eta = 0.02, n = 5000, S_g = 4: the figures behind the plot, divided by alpha."""

    def test_the_plotted_values(self):
        values = {
            k: (
                formulas.squared_norm_lower_rate(**FIGURE_2, learning_rate=0.02, num_steps=k),
                formulas.squared_norm_rate(**FIGURE_2, learning_rate=0.02, num_steps=k),
                formulas.linear_rate(**FIGURE_2, learning_rate=0.02, num_steps=k),
            )
            for k in (1, 100, 5000)
        }
        for k, (lower, upper, composed) in values.items():
            assert lower == pytest.approx(4e-4 * (1 - math.exp(-0.02 * k)), rel=1e-12)
            assert upper == pytest.approx(
                16 / (1.98 * 4e-4 * 5000**2) * (1 - math.exp(-0.99 * 0.02 * k)), rel=1e-12
            )
            assert composed == pytest.approx(8e-6 * k, rel=1e-12)

    def test_upper_is_twice_lower_in_the_limit(self):
        far = {"learning_rate": 0.02, "num_steps": 10_000}
        ratio = formulas.squared_norm_rate(**FIGURE_2, **far) / formulas.squared_norm_lower_rate(
            **FIGURE_2, **far
        )
        assert ratio == pytest.approx(4 / 1.98, rel=1e-9)

    def test_where_it_beats_composition_does_not_depend_on_the_order(self):
        """The text says that larger orders need fewer steps; both bounds are linear in alpha."""
        crossing = next(
            k
            for k in itertools.count(1)
            if formulas.squared_norm_rate(**FIGURE_2, learning_rate=0.02, num_steps=k)
            < formulas.linear_rate(**FIGURE_2, learning_rate=0.02, num_steps=k)
        )
        assert crossing == 81


class TestStep:
    @pytest.mark.parametrize("seed", seeds(20))
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
        after, inverse = log_sobolev_step(rho, q, contraction, s, v, 0.7)
        assert after == pytest.approx(solved, rel=1e-8)
        assert inverse == pytest.approx(0.49 * (contraction**2 * q + v), rel=1e-12)

    def test_without_the_record_it_is_corollary_4_5_of_chen_and_liu(self):
        after, _ = log_sobolev_step(0.3, 1 / 1.7, 0.9, 0.0, 0.4)
        assert after == pytest.approx(0.3 / (1 + 1.7 * 0.4 / 0.81), rel=1e-12)

    def test_degenerate_steps(self):
        assert log_sobolev_step(0.0, 0.0, 0.9, 1.0, 0.0)[0] == math.inf
        assert log_sobolev_step(0.3, 1.0, 0.5, 0.0, 0.0) == (0.3, 0.25)
        assert log_sobolev_step(math.inf, 1.0, 0.5, 0.1, 1.0)[0] == math.inf
        assert log_sobolev_step(math.inf, 1.0, 0.0, 2.0, 1.0) == (2.0, 1.0)
        assert log_sobolev_step(0.3, 1e300, 1e10, 0.0, 1.0)[0] == 0.3

    @settings(max_examples=300, deadline=None)
    @given(st.data())
    def test_never_below_theorem_a(self, data):
        steps = data.draw(st.integers(1, 25))
        spread = data.draw(st.sampled_from([0.1, 1.0, 3.0]))
        rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
        contraction = rng.uniform(0, data.draw(st.sampled_from([1.0, 1.5])), steps)
        sensitivity = rng.uniform(0, 2, steps) * (rng.random(steps) < rng.random())
        variance = np.exp(rng.normal(0, spread, steps))
        rho = inverse = 0.0
        for c, s, v in zip(contraction, sensitivity, variance, strict=True):
            rho, inverse = log_sobolev_step(rho, inverse, c, s, v)
        mu = hsa.shifted_gdp_mu(contraction, sensitivity, np.sqrt(variance))
        assert rho >= mu**2 / 2 * (1 - 1e-12)

    @pytest.mark.parametrize("contraction", [0.0, 0.3, 0.95, 1.0])
    def test_equals_theorem_a_for_constant_parameters(self, contraction):
        rho = inverse = 0.0
        for _ in range(200):
            rho, inverse = log_sobolev_step(rho, inverse, contraction, 0.7, 2.0)
        mu = hsa.shifted_gdp_mu([contraction] * 200, 0.7, math.sqrt(2.0))
        assert rho == pytest.approx(mu**2 / 2, rel=1e-11)


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
        exact = 4 / (4 * sigma**2 * n**2) * (2 - eta) / (1 + left) * (1 - left)
        assert rate(event) == pytest.approx(exact, rel=1e-11)
        assert exact >= formulas.squared_norm_lower_rate(2.0, n, sigma, eta, steps)
        assert exact <= formulas.squared_norm_rate(2.0, n, sigma, eta, steps)
        assert exact <= rate(event, analysis="published")
        # From the paper's start N(0, 2 sigma^2 I) the variance is larger by (1 - eta)^2K 2 sigma^2.
        fixed = 2 * eta * sigma**2 * (1 - left**2) / (1 - (1 - eta) ** 2)
        random = exact * fixed / (fixed + left**2 * 2 * sigma**2)
        assert random <= rate(event, analysis="published")
        if steps == 1:
            assert random < formulas.squared_norm_lower_rate(2.0, n, sigma, eta, steps)

    @pytest.mark.parametrize("seed", seeds(40))
    def test_default_accountant_is_never_larger(self, seed):
        rng = np.random.default_rng(seed)
        steps = int(rng.integers(1, 40))
        schedule = rng.random() < 0.5

        def draw(low, high):
            return rng.uniform(low, high, steps) if schedule else float(rng.uniform(low, high))

        event = ridge_run(
            num_steps=steps,
            learning_rate=draw(0.0, 0.7),
            weight_decay=draw(0.05, 0.4),
            noise_multiplier=draw(0.3, 5.0),
            loss=hsa.LossGeometry.generalized_linear(1.0, 1.0),
            clip_norm=None if rng.random() < 0.5 else draw(0.1, 2.0),
            release_steps=[s for s in (3, 9) if s < steps and rng.random() < 0.3],
        )
        for relation in NeighboringRelation:
            own = hsa.LangevinAccountant(relation).compose(event)
            best = hsa.LastIterateAccountant(relation).compose(event)
            for delta in (1e-2, 1e-6, 1e-12):
                assert best.get_epsilon(delta) <= own.get_epsilon(delta) * (1 + 1e-6)
            for epsilon in (0.0, 0.5, 4.0):
                assert best.get_delta(epsilon) <= own.get_delta(epsilon) * (1 + 1e-6)
            orders = [1.1, 2.0, 30.0]
            assert (best.guarantee.rdp(orders) <= own.guarantee.rdp(orders) * (1 + 1e-9)).all()
            assert ("langevin", "never smaller than shifted_interpolation") in (
                best.guarantee.alternatives
            )

    def test_contraction_of_the_process_is_the_papers(self):
        event = ridge_run()
        process = noisy_process(event, REPLACE_ONE)
        assert process.contraction == pytest.approx(np.full(24, 1 - 0.5 * 0.3), rel=1e-12)

    def test_releases_add_up(self):
        once = rate(ridge_run(num_steps=8))
        assert rate(ridge_run(num_steps=24, release_steps=(8, 16))) == pytest.approx(3 * once)

    def test_silent_runs(self):
        assert rate(ridge_run(noise_multiplier=0.0)) == math.inf
        assert (
            hsa.LangevinAccountant().compose(ridge_run(noise_multiplier=0.0)).get_epsilon(1e-5)
            == math.inf
        )
        for analysis in ("sound", "published"):
            assert rate(ridge_run(learning_rate=0.0), analysis=analysis) == 0

    def test_long_runs_converge(self):
        assert rate(ridge_run(num_steps=20_000)) == pytest.approx(
            rate(ridge_run(num_steps=2_000)), rel=1e-12
        )
        assert recursion_rate(noisy_process(ridge_run(), REPLACE_ONE)) > 0


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
