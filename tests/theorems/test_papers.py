"""Kong & Ribero 2025 against the paper's formulas typed anew, solvers and exact oracles."""

import itertools
import math
import warnings

import numpy as np
import pytest
from cases import seeds
from dp_accounting import NeighboringRelation
from runs import cyclic_run, full_run, probe_run
from scipy import integrate
from shift_programs import least_squares_mu_squared

import hidden_state_accountants as hsa
from hidden_state_accountants.bounds import (
    ChienLi,
    Composition,
    Hoelder,
    KongRibero,
    Langevin,
    ShiftedInterpolation,
    ShuffledOnce,
)
from hidden_state_accountants.bounds.hoelder import MOST_STEPS
from hidden_state_accountants.bounds.kong_ribero_2025 import theta
from hidden_state_accountants.process.noisy_process import noisy_process

REPLACE_ONE = NeighboringRelation.REPLACE_ONE
REPLACE_SPECIAL = NeighboringRelation.REPLACE_SPECIAL
ADD_OR_REMOVE_ONE = NeighboringRelation.ADD_OR_REMOVE_ONE
SOUND, PUBLISHED = KongRibero(), KongRibero("published")
ALPHA = 3.0


def per_alpha(event, bound=PUBLISHED, relation=REPLACE_ONE):
    """D_alpha/alpha of an event."""
    return float(bound.guarantee(event, relation).rdp([ALPHA])[0]) / ALPHA


# --- the paper, typed anew --------------------------------------------------------------------


def typed_theta(lipschitz, steps):
    """Equation (15)."""
    return lipschitz ** (2 * (steps - 1)) / sum(lipschitz ** (2 * j) for j in range(steps))


def typed_l_lambda(lam, m, big_m):
    """Equation (13)."""
    return math.sqrt(1 + 2 * lam * m * (1 + m / (2 * (big_m + m))))


def typed_16(lam, m, big_m, clip, b, sigma, diameter):
    return (typed_l_lambda(lam, m, big_m) * diameter + 2 * lam * clip / b) ** 2 / (2 * sigma**2)


def typed_17(lam, m, big_m, clip, b, sigma, epochs, period, factor=2**0.5):
    share = typed_theta(factor * typed_l_lambda(lam, m, big_m), period)
    return 4 * (lam * clip / (b * sigma)) ** 2 * (1 + epochs * share)


def random_case(seed):
    """A run under the conditions of both theorems, and the paper's names for its numbers."""
    rng = np.random.default_rng(seed)
    b, period, epochs = (int(rng.integers(1, n)) for n in (4, 9, 6))
    steps = int(rng.integers((epochs - 1) * period + 1, epochs * period + 1))
    m, big_m = float(rng.choice([0.0, 0.3, 2.0])), float(rng.uniform(0.5, 2))
    clip, noise = rng.uniform(0.5, 2), rng.uniform(0.5, 4)
    lam = rng.uniform(0.1, 1) / (2 * (m + big_m))
    unclipped = bool(rng.integers(2))
    event = hsa.LastIterateDpEvent(
        noise_multiplier=noise,
        learning_rate=lam,
        clip_norm=clip,
        batch_size=b,
        dataset_size=b * period,
        num_steps=steps,
        batch_order="cyclic",
        loss=hsa.LossGeometry.weakly_convex(big_m, m, lipschitz=clip if unclipped else None),
        domain_diameter=float(rng.choice([math.inf, rng.exponential()])),
    )
    sigma = lam * noise * clip / b
    return event, (lam, m, big_m, clip, b, sigma), (epochs, period), unclipped


@pytest.mark.parametrize("seed", seeds(6))
def test_published_is_the_paper(seed):
    event, numbers, shape, unclipped = random_case(seed)
    by_epochs = typed_17(*numbers, *shape, factor=1.0 if unclipped else math.sqrt(2))
    diameter = event.domain_diameter
    by_domain = typed_16(*numbers, diameter) if diameter < math.inf else math.inf
    guarantee = PUBLISHED.guarantee(event, REPLACE_ONE)
    expected = min(by_epochs, by_domain)
    assert per_alpha(event) == pytest.approx(expected, rel=1e-9)
    name = "Theorem 2.2" if by_domain < by_epochs else "(19)" if unclipped else "(17)"
    assert name in guarantee.theorem
    assert bool(guarantee.caveat) == (by_domain < by_epochs and not unclipped)
    assert guarantee.mu is None  # a Renyi bound for all orders is not mu-GDP
    # Half the sensitivity.
    half = per_alpha(event, relation=REPLACE_SPECIAL)
    lam, m, big_m, clip, *rest = numbers
    halved = typed_17(lam, m, big_m, clip / 2, *rest, *shape, factor=1.0 if unclipped else 2**0.5)
    if diameter < math.inf:
        halved = min(halved, typed_16(lam, m, big_m, clip / 2, *rest, diameter))
    assert half == pytest.approx(halved, rel=1e-9)


@pytest.mark.parametrize("lipschitz", [0.3, 1.0, 1.0000001, 1.2, 50.0])
def test_theta(lipschitz):
    for steps in (1, 2, 5, 40):
        assert float(theta(lipschitz, steps)) == pytest.approx(
            typed_theta(lipschitz, steps), rel=1e-9
        )
    assert float(theta(lipschitz, 0)) == 0
    assert np.array_equal(theta(0.0, np.array([0, 1, 2])), [0, 1, 0])


def test_corollary_c_2_as_stated_is_false():
    """Its display lacks the factor E of its proof: linear losses alone exceed it."""
    m, big_m, s, period, epochs = 0.01, 1.0, 1.0, 150, 1000
    lam = 1 / (2 * (m + big_m))
    assert period >= math.log(2) / math.log(1 + m * lam)
    displayed = 2 * s**2 * (1 + 4 * m / (big_m + m))
    exact = epochs * s**2 / period  # s per epoch against the noise of E * l steps
    assert exact > 2 * displayed
    assert 2 * s**2 * (1 + 4 * epochs * m / (big_m + m)) > exact


# --- Figure 1 -----------------------------------------------------------------------------------


def figure_1(loss, steps=100_000, **changes):
    """lambda = 1e-5, C = 10, sigma = 1e-5, b = 10, k = 1e4: s/sigma = 2, 1000 steps per epoch."""
    arguments = {
        "noise_multiplier": 1.0,
        "learning_rate": 1e-5,
        "clip_norm": 10.0,
        "batch_size": 10,
        "dataset_size": 10_000,
        "num_steps": steps,
        "batch_order": "cyclic",
        "loss": loss,
    }
    return hsa.LastIterateDpEvent(**arguments | changes)


def test_figure_1_without_clipping():
    """Left: small m flattens the curve below composition; large m approaches it from above."""
    whole = per_alpha(figure_1(None), Composition())
    assert whole == pytest.approx(100 * 2**2 / 2)
    values = [
        per_alpha(figure_1(hsa.LossGeometry.weakly_convex(1000.0, m, lipschitz=10.0)))
        for m in (0.0, 10.0, 1000.0)
    ]
    assert values == sorted(values)
    assert values[0] == pytest.approx(4 * (1 + 100 / 1000), rel=1e-9)
    assert values[0] < whole / 40
    assert values[2] < whole
    sound = per_alpha(figure_1(hsa.LossGeometry.convex(1000.0, lipschitz=10.0)), SOUND)
    assert sound == pytest.approx(2 * (1 + 99 / 1000), rel=1e-9)


def test_figure_1_with_clipping_is_never_below_composition():
    """theta of sqrt(2)*L is at least 1/2: (17) is at least 4 (1 + E/2), composition is 2 E."""
    for loss in (hsa.LossGeometry.convex(1000.0), hsa.LossGeometry.smooth(1000.0)):
        for steps in (1, 1000, 10_001, 100_000):
            event = figure_1(loss, steps)
            assert per_alpha(event) >= per_alpha(event, Composition()) * (1 + 1e-9)
            assert per_alpha(event, SOUND) <= per_alpha(event, Composition()) * (1 + 1e-12)
    clipped = per_alpha(figure_1(hsa.LossGeometry.convex(1000.0)))
    assert clipped == pytest.approx(4 * (1 + 100 / 2), rel=1e-9)
    assert per_alpha(figure_1(hsa.LossGeometry.convex(1000.0)), SOUND) < clipped / 3


def test_reference_run():
    assert SOUND.guarantee(probe_run(), REPLACE_SPECIAL).mu == pytest.approx(0.500411, abs=5e-6)
    without = probe_run(weight_decay=0.0)
    assert per_alpha(without, relation=REPLACE_SPECIAL) == pytest.approx(25.25, rel=1e-9)
    unclipped = probe_run(weight_decay=0.0, clip_norm=math.sqrt(2))
    assert per_alpha(unclipped, relation=REPLACE_SPECIAL) == pytest.approx(0.75, rel=1e-9)
    assert SOUND.guarantee(unclipped, REPLACE_SPECIAL).mu ** 2 == pytest.approx(0.7475, rel=1e-9)


# --- the sound reading ------------------------------------------------------------------------


@pytest.mark.parametrize("seed", seeds(6))
def test_the_papers_own_shifts_prove_no_less_than_the_sound_reading(seed):
    """Shifts that are spent epoch by epoch, typed as separate programs, or in the last step."""
    event, numbers, (_, period), _ = random_case(seed)
    lam, _, _, clip, b, sigma = numbers
    steps, c = event.num_steps, float(noisy_process(event, REPLACE_ONE).contraction[0])
    totals = []
    for position in range(min(period, steps)):
        starts = [*range(position, steps, period), steps]
        total = 0.0
        for start, stop in itertools.pairwise(starts):
            own = np.zeros(stop - start)
            own[0] = 2 * lam * clip / b
            total += least_squares_mu_squared(
                np.full(stop - start, c), own, np.full(stop - start, sigma)
            )
        totals.append(total)
    last = c * event.domain_diameter + 2 * lam * clip / b
    drift = event.domain_diameter + 2 * lam * clip
    own_argument = min(max(totals), (min(last, drift) / sigma) ** 2)
    least = SOUND.guarantee(event, REPLACE_ONE).mu ** 2
    assert least <= own_argument * (1 + 1e-9)
    published = PUBLISHED.guarantee(event, REPLACE_ONE)
    if not published.caveat:
        assert least / 2 <= per_alpha(event) * (1 + 1e-12)


# --- conditions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("analysis", ["sound", "published"])
def test_the_learning_rate(analysis):
    too_fast = cyclic_run(loss=hsa.LossGeometry.convex(2.0), learning_rate=0.5, weight_decay=0.0)
    text = (
        r"Kong & Ribero 2025, .*: learning rate: needs learning_rate <= 0\.25 \(lower it\), "
        r"got 0\.5\. Or use LastIterateAccountant\."
    )
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        hsa.KongRiberoAccountant(analysis=analysis).compose(too_fast)
    bound = KongRibero(analysis)
    (unmet,) = bound.check(too_fast, REPLACE_ONE)
    assert (unmet.condition, unmet.required, unmet.actual) == (
        "learning rate",
        "learning_rate <= 0.25 (lower it)",
        "0.5",
    )
    unclipped = cyclic_run(
        loss=hsa.LossGeometry.convex(2.0, lipschitz=1.0), learning_rate=0.5, weight_decay=0.0
    )
    assert bound.check(unclipped, REPLACE_ONE) == ()
    weakly = cyclic_run(
        loss=hsa.LossGeometry.weakly_convex(1.0, 3.0), learning_rate=0.125, weight_decay=0.0
    )
    assert bound.check(weakly, REPLACE_ONE) == ()
    linear = cyclic_run(
        loss=hsa.LossGeometry.linear(1.0), learning_rate=1e3, weight_decay=0.0, clip_norm=0.5
    )
    assert bound.check(linear, REPLACE_ONE) == ()


def test_theorem_2_2_needs_the_smaller_learning_rate():
    """Between 1/(2(M + m)) and 1/(M + m), unclipped: only (19)."""
    loss = hsa.LossGeometry.convex(1.0, lipschitz=1.0)
    arguments = {"loss": loss, "weight_decay": 0.0, "domain_diameter": 1e-3}
    slow, fast = (cyclic_run(**arguments, learning_rate=eta) for eta in (0.5, 0.51))
    assert "2.2" in PUBLISHED.guarantee(slow, REPLACE_ONE).theorem
    assert "(19)" in PUBLISHED.guarantee(fast, REPLACE_ONE).theorem


@pytest.mark.parametrize(
    ("changes", "condition"),
    [
        ({"batch_order": "poisson"}, "batch order"),
        ({"loss": None}, "loss geometry"),
        ({"loss": hsa.LossGeometry.hoelder(1.0, 0.5)}, "linear modulus"),
        ({"learning_rate": [0.1] * 23 + [0.2]}, "schedules"),
        ({"release_steps": [3]}, "releases"),
    ],
)
@pytest.mark.parametrize("bound", [SOUND, PUBLISHED])
def test_refusals(bound, changes, condition):
    event = cyclic_run(**{"weight_decay": 0.0} | changes)
    assert [u.condition for u in bound.check(event, REPLACE_ONE)] == [condition]
    with pytest.raises(hsa.UnsupportedRunError, match=rf"Kong & Ribero 2025, .*: {condition}: "):
        bound.guarantee(event, REPLACE_ONE)


def test_refusals_of_the_paper_alone():
    unmet = PUBLISHED.check(full_run(), ADD_OR_REMOVE_ONE)
    assert [u.condition for u in unmet] == ["neighboring relation", "weight decay"]
    assert SOUND.check(full_run(), ADD_OR_REMOVE_ONE) == ()
    assert SOUND.check(cyclic_run(), ADD_OR_REMOVE_ONE)
    with pytest.raises(ValueError, match="analysis"):
        hsa.KongRiberoAccountant(analysis="both")
    assert not PUBLISHED.sound
    assert SOUND.sound


def test_the_accountant_warns_exactly_where_the_statement_is_not_proved():
    arguments = {"weight_decay": 0.0, "learning_rate": 0.25, "domain_diameter": 1e-3}
    clipped = cyclic_run(**arguments, loss=hsa.LossGeometry.convex(1.0))
    with pytest.warns(UserWarning, match=r"Theorem 2\.2.*sqrt\(2\)"):
        hsa.KongRiberoAccountant(analysis="published").compose(clipped)
    unclipped = cyclic_run(**arguments, loss=hsa.LossGeometry.convex(1.0, lipschitz=1.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hsa.KongRiberoAccountant(analysis="published").compose(unclipped)
        hsa.KongRiberoAccountant().compose(clipped)


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


ROUGH = hsa.LossGeometry.hoelder(0.3, 0.5)
CURVED = hsa.LossGeometry.strongly_convex(1.0, 0.1, lipschitz=1.0)


@pytest.mark.parametrize(
    ("paper", "theorem", "event", "bound"),
    [
        (ChienLi(), "Theorem 3.1", full_run(domain_diameter=0.5), ShiftedInterpolation()),
        (ChienLi(), "Theorem 3.7", full_run(loss=ROUGH), Hoelder()),
        (ChienLi(), "Theorem A.1", cyclic_run(), ShiftedInterpolation()),
        (ChienLi(), "Theorem A.1", cyclic_run(loss=ROUGH, domain_diameter=0.2), Hoelder()),
        (ChienLi(), "Corollary A.3", cyclic_run(batch_order="shuffled_once"), ShuffledOnce()),
        (ChienLi(), "Corollary A.3", cyclic_run(batch_order="shuffled_once", loss=ROUGH),
         Hoelder()),
        (KongRibero(), "Theorems 2.2 and 2.3", cyclic_run(prox_strong_convexity=0.5),
         ShiftedInterpolation()),
        (Langevin(), "Lemmas 2 and 3", full_run(loss=CURVED, release_steps=(8, 16)),
         ShiftedInterpolation()),
    ],
)  # fmt: skip
def test_sound_is_theorem_a(paper, theorem, event, bound):
    relations = [relation for relation in NeighboringRelation if not bound.check(event, relation)]
    assert (ADD_OR_REMOVE_ONE in relations) == (event.batch_order is hsa.BatchOrder.FULL)
    for relation in relations:
        found, proved = (b.guarantee(event, relation) for b in (paper, bound))
        assert found.epsilon(1e-5) == proved.epsilon(1e-5)
        assert found.theorem.startswith(f"{theorem} ({paper.citation.authors}, ")
        assert found.theorem.endswith(f"by {proved.theorem}")
        assert found.citations == (paper.citation, bound.citation)
        assert set(proved.assumptions) <= set(found.assumptions)


def test_what_theorem_a_cannot_do_is_refused_as_well():
    long = full_run(loss=ROUGH, num_steps=MOST_STEPS + 1)
    (unmet,) = ChienLi().check(long, REPLACE_ONE)
    assert unmet == Hoelder().check(long, REPLACE_ONE)[0]
    assert unmet.condition == "steps to optimise"
