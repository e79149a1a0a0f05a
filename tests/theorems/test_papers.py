"""Kong & Ribero 2025 and Langevin: the papers' formulas typed anew, their figures; sound readings.

What single runs refute of them is in tests/oracles/test_counterexamples.py.
"""

import math
import warnings

import numpy as np
import pytest
from cases import seeds
from dp_accounting import NeighboringRelation
from runs import block_run, cyclic_run, full_run, probe_run

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

REPLACE_ONE = NeighboringRelation.REPLACE_ONE
REPLACE_SPECIAL = NeighboringRelation.REPLACE_SPECIAL
ADD_OR_REMOVE_ONE = NeighboringRelation.ADD_OR_REMOVE_ONE
CHIEN_LI, KONG_RIBERO = ChienLi("published"), KongRibero("published")
ALPHA = 3.0
convex, weakly_convex = hsa.LossGeometry.convex, hsa.LossGeometry.weakly_convex


def per_alpha(event, bound, relation=REPLACE_ONE):
    """D_alpha/alpha of an event."""
    return float(bound.guarantee(event, relation).rdp([ALPHA])[0]) / ALPHA


# --- Kong & Ribero --------------------------------------------------------------------------------


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


@pytest.mark.parametrize("seed", seeds(6))
def test_published_is_kong_and_ribero(seed):
    rng = np.random.default_rng(seed)
    b, period, epochs = (int(rng.integers(1, n)) for n in (4, 9, 6))
    steps = int(rng.integers((epochs - 1) * period + 1, epochs * period + 1))
    m, big_m = float(rng.choice([0.0, 0.3, 2.0])), float(rng.uniform(0.5, 2))
    clip, noise = rng.uniform(0.5, 2), rng.uniform(0.5, 4)
    lam, diameter = rng.uniform(0.1, 1) / (2 * (m + big_m)), rng.choice([1e99, rng.exponential()])
    factor = float(rng.choice([1.0, 2**0.5]))  # unclipped or not
    event = cyclic_run(
        noise_multiplier=noise,
        learning_rate=lam,
        clip_norm=clip,
        weight_decay=0.0,
        batch_size=b,
        dataset_size=b * period,
        num_steps=steps,
        loss=weakly_convex(big_m, m, lipschitz=clip if factor == 1 else None),
        domain_diameter=diameter if diameter < 1e99 else math.inf,
    )
    for relation, bound in ((REPLACE_ONE, clip), (REPLACE_SPECIAL, clip / 2)):
        numbers = lam, m, big_m, bound, b, lam * noise * clip / b
        by_epochs = typed_17(*numbers, epochs, period, factor)
        by_domain = typed_16(*numbers, diameter)
        guarantee = KONG_RIBERO.guarantee(event, relation)
        found = per_alpha(event, KONG_RIBERO, relation)
        assert found == pytest.approx(min(by_epochs, by_domain), rel=1e-9)
        name = "Theorem 2.2" if by_domain < by_epochs else "(19)" if factor == 1 else "(17)"
        assert name in guarantee.theorem
        assert bool(guarantee.caveat) == (by_domain < by_epochs and factor > 1)
        assert guarantee.mu is None  # a Renyi bound for all orders is not mu-GDP
        sound = per_alpha(event, KongRibero(), relation)
        assert sound <= found * (1 + 1e-12) or guarantee.caveat


@pytest.mark.parametrize("lipschitz", [0.3, 1.0, 1.0000001, 50.0])
def test_theta(lipschitz):
    steps = np.array([1, 2, 5, 40])
    expected = [typed_theta(lipschitz, n) for n in steps.tolist()]
    np.testing.assert_allclose(theta(lipschitz, steps), expected, rtol=1e-9)
    assert float(theta(lipschitz, 0)) == 0
    assert np.array_equal(theta(0.0, np.array([0, 1, 2])), [0, 1, 0])


def test_corollary_c_2_as_stated_is_false():
    """Its display lacks the factor E of its proof: linear losses alone exceed it."""
    m, big_m, period, epochs = 0.01, 1.0, 150, 1000
    assert period >= math.log(2) / math.log(1 + m / (2 * (m + big_m)))
    displayed = 2 * (1 + 4 * m / (big_m + m))
    exact = epochs / period  # s^2 times: s per epoch against the noise of E * l steps
    assert 2 * displayed < exact < 2 * (1 + 4 * epochs * m / (big_m + m))


def figure_1(loss, steps=100_000):
    """lambda = 1e-5, C = 10, sigma = 1e-5, b = 10, k = 1e4: s/sigma = 2, 1000 steps per epoch."""
    return cyclic_run(
        noise_multiplier=1.0,
        learning_rate=1e-5,
        clip_norm=10.0,
        weight_decay=0.0,
        batch_size=10,
        dataset_size=10_000,
        num_steps=steps,
        loss=loss,
    )


def test_figure_1_without_clipping():
    """Left: small m flattens the curve below composition; large m approaches it from above."""
    whole = per_alpha(figure_1(None), Composition())
    assert whole == pytest.approx(100 * 2**2 / 2)
    events = [figure_1(weakly_convex(1000.0, m, lipschitz=10.0)) for m in (0.0, 10.0, 1000.0)]
    values = [per_alpha(event, KONG_RIBERO) for event in events]
    assert values == sorted(values)
    assert values[0] == pytest.approx(4 * (1 + 100 / 1000), rel=1e-9)
    assert values[2] < whole
    assert per_alpha(events[0], KongRibero()) == pytest.approx(2 * (1 + 99 / 1000), rel=1e-9)


def test_figure_1_with_clipping_is_never_below_composition():
    """theta of sqrt(2)*L is at least 1/2: (17) is at least 4 (1 + E/2), composition is 2 E."""
    for loss in (convex(1000.0), hsa.LossGeometry.smooth(1000.0)):
        for steps in (1, 1000, 10_001, 100_000):
            event = figure_1(loss, steps)
            composed = per_alpha(event, Composition())
            assert per_alpha(event, KONG_RIBERO) >= composed * (1 + 1e-9)
            assert per_alpha(event, KongRibero()) <= composed * (1 + 1e-12)
    clipped = per_alpha(figure_1(convex(1000.0)), KONG_RIBERO)
    assert clipped == pytest.approx(4 * (1 + 100 / 2), rel=1e-9)
    assert per_alpha(figure_1(convex(1000.0)), KongRibero()) < clipped / 3


def test_the_theorem_of_a_step_follows_its_learning_rate():
    """Between 1/(2(M + m)) and 1/(M + m), unclipped: only (19). Beyond: nothing."""

    def run(loss, rate, **changes):
        return cyclic_run(loss=loss, learning_rate=rate, weight_decay=0.0, **changes)

    unclipped = convex(1.0, lipschitz=1.0)
    for rate, name in ((0.5, "2.2"), (0.51, "(19)")):
        event = run(unclipped, rate, domain_diameter=1e-3)
        assert name in KONG_RIBERO.guarantee(event, REPLACE_ONE).theorem
    linear = hsa.LossGeometry.linear(1.0)
    for bound in (KongRibero(), KONG_RIBERO):
        (unmet,) = bound.check(run(convex(2.0), 0.5), REPLACE_ONE)
        assert unmet.required == "learning_rate <= 0.25 (lower it)"
        assert bound.check(run(convex(2.0, lipschitz=1.0), 0.5), REPLACE_ONE) == ()
        assert bound.check(run(weakly_convex(1.0, 3.0), 0.125), REPLACE_ONE) == ()
        assert bound.check(run(linear, 1e3, clip_norm=0.5), REPLACE_ONE) == ()


def test_the_accountant_warns_exactly_where_the_statement_is_not_proved():
    arguments = {"weight_decay": 0.0, "learning_rate": 0.25, "domain_diameter": 1e-3}
    clipped = cyclic_run(**arguments, loss=convex(1.0))
    with pytest.warns(UserWarning, match=r"Theorem 2\.2.*sqrt\(2\)"):
        hsa.KongRiberoAccountant(analysis="published").compose(clipped)
    unclipped = cyclic_run(**arguments, loss=convex(1.0, lipschitz=1.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hsa.KongRiberoAccountant(analysis="published").compose(unclipped)
        hsa.KongRiberoAccountant().compose(clipped)
        hsa.LangevinAccountant(analysis="published").compose(ridge_run())


# --- Langevin -------------------------------------------------------------------------------------


def ridge_run(**changes):
    """A full-batch run that meets every condition: lambda = 0.3, beta = 1.2, eta = 0.5."""
    arguments = {
        "clip_norm": None,
        "loss": hsa.LossGeometry.strongly_convex(1.0, 0.1, lipschitz=1.0),
    }
    return full_run(**(arguments | changes))


@pytest.mark.parametrize("seed", seeds(6))
def test_theorem_a_is_never_above_the_recursion(seed):
    """Of docs/papers/last_iterate.md, for a rate rho and an inverse constant q, any arrays.

    Equal for constant moduli that contract.
    """
    rng = np.random.default_rng(seed)
    steps = np.exp(rng.normal(-0.2, 0.7, (30, 3))) * (rng.random((30, 3)) < [1, 0.6, 1])
    constant = np.tile([rng.uniform(0, 1), 0.7, 1.3], (30, 1))
    for run, tolerance in ((steps, math.inf), (constant, 1e-11)):
        rho = q = 0.0
        for c, s, sigma in run:
            d, after = math.sqrt(2 * rho * q), c**2 * q + sigma**2
            if d * sigma**2 >= s * c * q:
                rho = (c * d + s) ** 2 / (2 * after)
            else:
                rho += s**2 / (2 * sigma**2)
            q = after
        least = hsa.shifted_gdp_mu(*run.T) ** 2 / 2
        assert least * (1 - 1e-12) <= rho <= least * (1 + tolerance)


@pytest.mark.parametrize("relation", [REPLACE_ONE, REPLACE_SPECIAL])
@pytest.mark.parametrize("steps", [1, 24, 500])
def test_published_is_corollary_1(relation, steps):
    event = ridge_run(num_steps=steps)
    # b = n = 20, eta = 0.5, noise std of the iterate 0.5 * 2 / 20, sqrt(2 eta) sigma
    sigma = 0.5 * 2.0 / 20 / math.sqrt(2 * 0.5)
    total = 2.0 if relation is REPLACE_ONE else 1.0
    lam = 0.1 + 0.2
    expected = total**2 / (lam * sigma**2 * 20**2) * (1 - math.exp(-lam * 0.5 * steps / 2))
    assert per_alpha(event, Langevin("published"), relation) == pytest.approx(expected, rel=1e-9)
    assert per_alpha(event, Langevin(), relation) <= expected


@pytest.mark.parametrize("steps", [1, 7, 60])
def test_the_quadratic_of_theorem_3_is_met_exactly(steps):
    eta, n, sigma = 0.3, 20, 0.05
    event = ridge_run(
        loss=hsa.LossGeometry.strongly_convex(1.0, 1.0, lipschitz=1.0),
        weight_decay=0.0,
        learning_rate=eta,
        noise_multiplier=math.sqrt(2 * eta) * sigma * n / eta,
        num_steps=steps,
    )
    left, square = (1 - eta) ** steps, (2.0 / (sigma * n)) ** 2
    exact = square / 4 * (2 - eta) / (1 + left) * (1 - left)
    assert per_alpha(event, Langevin()) == pytest.approx(exact, rel=1e-11)
    lower = square / 4 * (1 - math.exp(-eta * steps))  # (68), Theorem 3
    upper = square / (2 - eta) * (1 - math.exp(-(2 - eta) * eta * steps / 2))  # (70)
    assert lower <= exact <= upper
    assert exact <= per_alpha(event, Langevin("published"))
    # From the paper's start N(0, 2 sigma^2 I) the variance is larger by (1 - eta)^2K 2 sigma^2.
    fixed = 2 * eta * sigma**2 * (1 - left**2) / (1 - (1 - eta) ** 2)
    random = exact * fixed / (fixed + left**2 * 2 * sigma**2)
    assert random <= per_alpha(event, Langevin("published"))


def test_silent_runs():
    for bound in (Langevin(), Langevin("published")):
        assert per_alpha(ridge_run(noise_multiplier=0.0), bound) == math.inf
        assert per_alpha(ridge_run(learning_rate=0.0), bound) == 0


# --- all of them ----------------------------------------------------------------------------------


def test_reference_run():
    """One linear probe: weight decay helps only the sound readings."""
    for sound in (ChienLi(), KongRibero()):
        mu = sound.guarantee(probe_run(), REPLACE_SPECIAL).mu
        assert mu == pytest.approx(0.500411, abs=5e-6)
    without = probe_run(weight_decay=0.0)
    assert per_alpha(without, CHIEN_LI, REPLACE_SPECIAL) == pytest.approx(24.9453125, rel=1e-9)
    assert per_alpha(without, KONG_RIBERO, REPLACE_SPECIAL) == pytest.approx(25.25, rel=1e-9)
    unclipped = probe_run(weight_decay=0.0, clip_norm=math.sqrt(2))
    assert per_alpha(unclipped, KONG_RIBERO, REPLACE_SPECIAL) == pytest.approx(0.75, rel=1e-9)
    mu = KongRibero().guarantee(unclipped, REPLACE_SPECIAL).mu
    assert mu**2 == pytest.approx(0.7475, rel=1e-9)


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


@pytest.mark.parametrize(
    ("changes", "condition"),
    [
        ({"batch_order": "poisson"}, "batch order"),
        ({"loss": None}, "loss geometry"),
        ({"learning_rate": [0.1] * 23 + [0.2]}, "schedules"),
        ({"release_steps": [3]}, "releases"),
    ],
)
@pytest.mark.parametrize("bound", [ChienLi(), CHIEN_LI, KongRibero(), KONG_RIBERO])
def test_refusals(bound, changes, condition):
    event = cyclic_run(**{"weight_decay": 0.0} | changes)
    assert condition in [u.condition for u in bound.check(event, REPLACE_ONE)]
    text = rf"{bound.citation.authors}, .*: {condition}: "
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        bound.guarantee(event, REPLACE_ONE)


@pytest.mark.parametrize("bound", [CHIEN_LI, KONG_RIBERO])
def test_refusals_of_the_papers_alone(bound):
    unmet = bound.check(full_run(), ADD_OR_REMOVE_ONE)
    assert [u.condition for u in unmet] == ["neighboring relation", "weight decay"]
    sound = type(bound)()
    assert sound.check(full_run(), ADD_OR_REMOVE_ONE) == ()
    assert sound.check(cyclic_run(), ADD_OR_REMOVE_ONE)
    rough = cyclic_run(loss=ROUGH, weight_decay=0.0)
    assert bool(bound.check(rough, REPLACE_ONE)) == (bound is KONG_RIBERO)
    secret = cyclic_run(batch_order="without_replacement", weight_decay=0.0)
    assert bool(bound.check(secret, REPLACE_ONE)) == (bound is KONG_RIBERO)
    assert sound.check(secret, REPLACE_ONE)


@pytest.mark.parametrize(
    ("event", "texts"),
    [
        (cyclic_run(), ["batch order", "CYCLIC"]),
        (ridge_run(loss=convex(1.0, 1.0), weight_decay=0.0),
         ["strong convexity", "weight_decay", "got 0 at step 1"]),
        (ridge_run(loss=weakly_convex(1.0, 0.3, 1.0)), ["strong convexity", "got -0.1"]),
        (ridge_run(learning_rate=[0.5] * 10 + [0.9] * 14),
         ["step size", "learning_rate < 1/beta = 0.833333", "got 0.9 at step 11"]),
        (ridge_run(clip_norm=0.5), ["no clipping", "raise clip_norm", "clip_norm 0.5"]),
        (ridge_run(clip_norm=1.0, loss=None), ["loss geometry"]),
        (ridge_run(loss=hsa.LossGeometry.hoelder(1.0, 0.5, 1.0)), ["linear modulus"]),
    ],
)  # fmt: skip
def test_conditions_of_langevin(event, texts):
    accountant = hsa.LangevinAccountant(REPLACE_ONE)
    assert not accountant.supports(event)
    with pytest.raises(hsa.UnsupportedRunError) as error:
        accountant.compose(event)
    for text in texts:
        assert text in str(error.value)


def test_the_corollary_is_for_constant_parameters():
    for changes in ({"learning_rate": [0.5] * 12 + [0.4] * 12}, {"release_steps": (4,)}):
        event = ridge_run(**changes)
        assert Langevin().check(event, REPLACE_ONE) == ()
        assert Langevin("published").check(event, REPLACE_ONE)
    # A clip that acts is fine where it keeps the class.
    event = ridge_run(clip_norm=0.5, loss=hsa.LossGeometry.generalized_linear(1.0))
    assert Langevin().check(event, REPLACE_ONE) == ()


def test_what_theorem_a_cannot_do_is_refused_as_well():
    long = full_run(loss=ROUGH, num_steps=MOST_STEPS + 1)
    (unmet,) = ChienLi().check(long, REPLACE_ONE)
    assert unmet == Hoelder().check(long, REPLACE_ONE)[0]
    assert unmet.condition == "steps to optimise"


@pytest.mark.parametrize(
    ("accountant", "other"),
    [
        (hsa.ChienLiAccountant, block_run()),
        (hsa.KongRiberoAccountant, block_run()),
        (hsa.LangevinAccountant, block_run()),
        (hsa.BlockCoordinateAccountant, full_run()),
        (hsa.DiceSgdAccountant, full_run()),
    ],
)
def test_other_analyses_and_events_are_refused(accountant, other):
    with pytest.raises(ValueError, match='"sound" or "published"'):
        accountant(analysis="paper")
    with pytest.raises(hsa.UnsupportedRunError, match="DpEvent"):
        accountant().compose(other)
