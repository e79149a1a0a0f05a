"""Theorems E and F of random batches: laws of the distance, figures, the curve of a mixture.

Exact laws of attacks are in test_attacks.py beside this file.
"""

import math

import attrs
import dp_accounting
import mpmath
import numpy as np
import pytest
from cases import seeds
from dp_accounting import NeighboringRelation
from dp_accounting.pld import PLDAccountant
from mixtures_of_gaussians import divergence, patterns
from runs import probe_run

import hidden_state_accountants as hsa
from hidden_state_accountants.bounds import Composition, HiddenCoins, Subsampling
from hidden_state_accountants.bounds.solvers import coin_costs, cycle_costs
from hidden_state_accountants.bounds.solvers.coin_costs import CoinSteps, law_of_tails
from hidden_state_accountants.bounds.solvers.rounding import fewer, geometric
from hidden_state_accountants.curves import profiles
from hidden_state_accountants.curves.base import GaussianCurve
from hidden_state_accountants.curves.by_profile import ProfileCurve
from hidden_state_accountants.curves.composed import compose_curves
from hidden_state_accountants.curves.composed_loss import ComposedLoss
from hidden_state_accountants.curves.hidden_mixture import HiddenMixtureCurve

ADD_OR_REMOVE = NeighboringRelation.ADD_OR_REMOVE_ONE
SPECIAL, ONE = NeighboringRelation.REPLACE_SPECIAL, NeighboringRelation.REPLACE_ONE


def mus_of_coins(c, shifts, sigma, rate):
    """The distance of every pattern of coins, by Theorem A; and the probabilities."""
    found, weights = patterns(hsa.BatchOrder.POISSON, len(shifts), 1, rate)
    return np.array([hsa.shifted_gdp_mu(c, shifts * p, sigma) for p in found]), weights


def assert_is_larger(law, mus, weights, slack=1e-12):
    """The law exceeds every level with at least the probability of a discrete one."""
    above = law.rare + law.probabilities.sum() - np.cumsum(law.probabilities)
    for mu in np.unique(mus):
        truth = float(weights[mus >= mu].sum())
        index = np.searchsorted(law.levels, mu * (1 - 1e-12))  # levels >= mu
        found = law.rare + float(law.probabilities[index:].sum())
        assert truth <= found + slack, (mu, truth, found)
    assert above[0] <= 1 + 1e-9


@pytest.mark.parametrize("seed", seeds(40, 8))
def test_the_law_of_any_steps_is_stochastically_larger(seed, monkeypatch):
    rng = np.random.default_rng(seed)
    if seed % 2:  # chunks and far steps in few steps
        monkeypatch.setattr(coin_costs, "_EXACT", 2)
        monkeypatch.setattr(coin_costs, "_GROWTH", 0.6)
        monkeypatch.setattr(coin_costs, "_NEAR", 0.8)
    steps, rate = int(rng.integers(1, 10)), float(rng.choice([0.003, 0.05, 0.4]))
    c = rng.uniform(0, 1.3, steps) if rng.random() < 0.6 else np.full(steps, rng.uniform(0.5, 1))
    shifts, sigma = np.exp(rng.normal(size=(2, steps)) * rng.choice([0.0, 0.7], (2, 1)))
    mus, weights = mus_of_coins(c, shifts, sigma, rate)
    law = law_of_tails(coin_costs.tails(CoinSteps.of(c, shifts, sigma, rate)))
    assert_is_larger(law, mus, weights)
    levels, masses = fewer(law.levels, law.probabilities, geometric(law.levels, 1.05))
    assert_is_larger(attrs.evolve(law, levels=levels, probabilities=masses), mus, weights)
    if not seed % 2:
        mean = float(law.probabilities @ law.levels**2) + law.rare
        assert mean <= 1.35 * float(weights @ mus**2) + 1e-12


@pytest.mark.parametrize("rate", [0.003, 0.2, 0.6])
@pytest.mark.parametrize("steps", [1, 2, 5, 10])
def test_the_law_of_equal_steps_is_that_of_cycles(steps, rate):
    mus, weights = mus_of_coins(1.0, np.ones(steps), np.ones(steps), rate)
    law = law_of_tails(cycle_costs.tails(steps, rate))
    assert_is_larger(law, mus, weights)
    mean = float(law.probabilities @ law.levels**2)
    exact = rate**2 * steps + rate * (1 - rate) * (1 / np.arange(1, steps + 1)).sum()
    assert exact == pytest.approx(float(weights @ mus**2), rel=1e-12)
    assert exact <= mean <= 1.01 * exact


@pytest.mark.parametrize(("c", "rate", "slack"), [(1.0, 0.01, 1.06), (0.98, 0.01, 1.25)])
def test_the_law_of_many_steps_beside_random_patterns(c, rate, slack):
    """Of 500 patterns; a tail is above its estimate less five standard errors."""
    rng = np.random.default_rng(7)
    steps, number = 400, 500
    ones = np.ones(steps)
    mus = np.array(
        [hsa.shifted_gdp_mu(c, (rng.random(steps) < rate) * 1.0, ones) for _ in range(number)]
    )
    if c == 1:
        law = law_of_tails(cycle_costs.tails(steps, rate))
    else:
        law = law_of_tails(coin_costs.tails(CoinSteps.of(np.full(steps, c), ones, ones, rate)))
    for level in np.quantile(mus[mus > 0], [0.1, 0.5, 0.9, 0.99]):
        truth = float((mus > level).mean())
        found = law.rare + float(law.probabilities[law.levels > level].sum())
        assert found >= truth - 5 * math.sqrt(truth / number)
    mean = float(law.probabilities @ law.levels**2)
    assert mean <= slack * float((mus**2).mean()) + 5 * float((mus**2).std()) / math.sqrt(number)


def test_values_are_rounded_up_to_the_largest_of_their_group():
    values = np.array([0.51, 2.0, 0.0, 1e-9, 0.5])
    found, masses = fewer(values, np.arange(5.0), geometric(values, 1.1))
    assert found.tolist() == [0.0, 1e-9, 0.51, 2.0]
    assert masses.tolist() == [2.0, 3.0, 4.0, 1.0]
    assert fewer(np.zeros(2), np.ones(2), geometric(np.zeros(2), 1.1))[0].tolist() == [0.0]
    assert fewer(np.array([1.0, math.inf]), np.ones(2), np.ones(1))[0].tolist() == [1.0, math.inf]


# --- what follows ---------------------------------------------------------------------------------


def head(noise, rate, steps, decay, order="poisson", **changes):
    """A softmax head whose clip does not act."""
    arguments = {
        "noise_multiplier": noise,
        "batch_size": 100,
        "dataset_size": round(100 / rate),
        "num_steps": steps,
        "batch_order": order,
        "weight_decay": decay,
        "loss": hsa.LossGeometry.generalized_linear(0.5),
    }
    return probe_run(**(arguments | changes))


@pytest.mark.parametrize(
    ("run", "relation", "expected", "revealed"),
    [
        (head(0.6, 1 / 500, 5000, 0.0), ADD_OR_REMOVE, 1.5227, 3.444),
        (head(0.6, 1 / 1000, 2000, 0.02), ADD_OR_REMOVE, 0.3716, 1.008),
        (head(0.6, 1 / 1000, 2000, 0.02), ONE, 0.4723, 1.089),
        (head(1.0, 0.01, 2000, 0.0), ADD_OR_REMOVE, 2.2977, 2.584),
        (head(1.0, 0.01, 5000, 0.04, "without_replacement"), SPECIAL, 3.3180, 4.700),
        (head(1.0, 0.01, 5000, 0.04, "without_replacement"), ONE, 5.1055, 6.614),
    ],
)
def test_reference_values(run, relation, expected, revealed):
    """Beside what is proved with the batches, or the coins before a window, revealed."""
    found = HiddenCoins().guarantee(run, relation).epsilon(1e-5)
    assert found == pytest.approx(expected, rel=1e-3)
    others = [
        bound.guarantee(run, relation).epsilon(1e-5) for bound in (Composition(), Subsampling())
    ]
    assert min(others) == pytest.approx(revealed, abs=4e-3)


def test_releases_compose():
    once = HiddenCoins().guarantee(head(0.8, 0.002, 300, 0.1), SPECIAL)
    run = head(0.8, 0.002, 900, 0.1, release_steps=(300, 600))
    thrice = HiddenCoins().guarantee(run, SPECIAL).epsilon(1e-5)
    assert once.epsilon(1e-5) < thrice < 3 * once.epsilon(1e-5 / 3)
    whole = HiddenCoins().guarantee(head(0.8, 0.002, 900, 0.1), SPECIAL).epsilon(1e-5)
    assert whole < thrice


def test_schedules_of_a_step_like_the_others_cost_the_same():
    found = [
        HiddenCoins().guarantee(head(0.6, 0.001, 400, 0.02, **rates), SPECIAL).epsilon(1e-5)
        for rates in ({}, {"learning_rate": np.r_[np.full(399, 0.5), 0.5 + 1e-12]})
    ]
    assert found[0] == pytest.approx(found[1], rel=1e-3)


def test_a_larger_batch_than_reckoned_with_adds_to_delta():
    capped = head(0.7, 0.002, 200, 0.02, max_batch_size=150)
    curve = HiddenCoins().guarantee(capped, SPECIAL).curve
    acts = capped.overfull_delta(SPECIAL, 150)
    assert acts > 1e-9
    assert curve.delta(50.0) >= acts
    assert HiddenCoins().guarantee(head(0.7, 0.002, 200, 0.02), SPECIAL).delta(50.0) < acts


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"noise_multiplier": 1.3}, "at most 1.25"),
        ({"batch_order": "shuffled_once"}, "batch order"),
        ({"release_steps": (1, 3, 7, 12, 100)}, "release_steps"),
        ({"loss": None}, "loss"),
    ],
)
def test_where_it_is_not_asked(changes, reason):
    run = probe_run(**{"batch_order": "poisson", "noise_multiplier": 1.0, **changes})
    unmet = HiddenCoins().check(run, SPECIAL)
    assert any(reason in str(condition) for condition in unmet)


def test_a_step_without_noise_at_the_end():
    silent = head(np.array([1.0, 1.0, 0.0]), 0.01, 3, 0.0)
    assert HiddenCoins().guarantee(silent, SPECIAL).epsilon(1e-5) == math.inf


# --- the curve of a mixture -----------------------------------------------------------------------

EPSILONS = (0.0, 1e-3, 0.3, 3.0)


def exact(curve, epsilon):
    """The larger divergence of both orders, by the best half-lines in 40 digits."""
    with mpmath.workdps(40):
        weights, mus = ([mpmath.mpf(float(x)) for x in law] for law in (curve.weights, curve.mus))
        weights = [weight / sum(weights) for weight in weights]
        growth = mpmath.exp(epsilon)

        def log_ratio(y):
            return mpmath.log(
                sum(p * mpmath.exp(m * y - m * m / 2) for p, m in zip(weights, mus, strict=True))
            )

        def root(function):
            low, high = mpmath.mpf(-90), mpmath.mpf(90)
            for _ in range(140):
                middle = (low + high) / 2
                low, high = (middle, high) if function(middle) < 0 else (low, middle)
            return low

        def mass(y):  # of the mixture, above y
            return sum(p * mpmath.ncdf(m - y) for p, m in zip(weights, mus, strict=True))

        def below(y):
            return sum(p * mpmath.ncdf(y - m) for p, m in zip(weights, mus, strict=True))

        if curve.is_replaced:
            y = root(lambda y: log_ratio(y) - log_ratio(-y) - epsilon)
            return mass(y) - growth * below(-y)
        y = root(lambda y: log_ratio(y) - epsilon)
        forward = mass(y) - growth * mpmath.ncdf(-y)
        y = root(lambda y: log_ratio(y) + epsilon)
        return max(forward, mpmath.ncdf(y) - growth * below(y))


def random_curve(rng, is_replaced):
    number = int(rng.integers(2, 8))
    mus = rng.gamma(1, 1, number) * 10.0 ** rng.integers(-6, 1) * (rng.random(number) > 0.2)
    mus[0] = rng.choice([mus[0], 3.0])
    weights = rng.dirichlet(np.full(number, 0.3)) + 1e-12
    return HiddenMixtureCurve(weights / weights.sum(), mus, is_replaced=is_replaced)


@pytest.mark.parametrize("is_replaced", [False, True])
@pytest.mark.parametrize("seed", seeds(12, 4))
def test_divergences_are_exact_and_rounded_up(seed, is_replaced):
    curve = random_curve(np.random.default_rng(seed), is_replaced)
    for epsilon in EPSILONS:
        truth, found = exact(curve, epsilon), curve.delta(epsilon)
        if truth > 1e-30:
            assert -2e-15 <= float(found / truth - 1) < 1e-11
        if 1e-30 < found < 1:
            back = curve.epsilon(found)
            assert curve.delta(back) <= found
            assert back == pytest.approx(epsilon, rel=1e-9, abs=1e-9 * curve.largest_mu)
        assert found <= curve.revealed.delta(epsilon) <= 1


@pytest.mark.parametrize("rate", [0.01, 0.5])
@pytest.mark.parametrize("mu", [0.3, 2.0])
def test_one_step_of_poisson_batches_is_the_sampled_gaussian(mu, rate):
    curve = HiddenMixtureCurve(np.array([1 - rate, rate]), np.array([0.0, mu]))
    profile = profiles.poisson(profiles.gaussian(mu), rate)
    epsilons = np.array([0.0, 0.005, 0.1, 0.5, 2.0])
    expected = np.maximum(profile.forward(epsilons), profile.backward(epsilons))
    assert [curve.delta(e) for e in epsilons] == pytest.approx(expected, rel=1e-11, abs=1e-300)
    # The smaller order composes as well.
    polygon = curve.quick.profile
    for ours, theirs in ((polygon.forward, profile.forward), (polygon.backward, profile.backward)):
        assert (ours(epsilons) >= theirs(epsilons) * (1 - 1e-12)).all()
        assert ours(epsilons) == pytest.approx(theirs(epsilons), rel=5e-3, abs=1e-30)
    expected = compose_curves([(ProfileCurve(profile), 10)]).epsilon(1e-6)
    composed = compose_curves([(curve, 10)]).epsilon(1e-6)
    assert expected * (1 - 1e-9) <= composed <= expected * 1.0005


@pytest.mark.parametrize("is_replaced", [False, True])
def test_one_distance_is_gaussian(is_replaced):
    curve = HiddenMixtureCurve([0.5, 0.5], [0.7, 0.7], is_replaced=is_replaced)
    gaussian = GaussianCurve(1.4 if is_replaced else 0.7)
    assert curve.mu == curve.largest_mu == gaussian.mu
    assert curve.delta(1.0) == pytest.approx(gaussian.delta(1.0), rel=1e-11)
    assert curve.epsilon(1e-5) == pytest.approx(gaussian.epsilon(1e-5), rel=1e-11)
    assert curve.to_dpevent() == gaussian.to_dpevent()


@pytest.mark.parametrize("is_replaced", [False, True])
def test_infinite_distances_add_their_probability(is_replaced):
    curve = HiddenMixtureCurve([0.3, 0.6999, 1e-4], [0.0, 1.0, math.inf], is_replaced=is_replaced)
    finite = HiddenMixtureCurve([0.3, 0.7], [0.0, 1.0], is_replaced=is_replaced)
    assert curve.delta(math.inf) == 1e-4
    assert curve.epsilon(5e-5) == math.inf
    for epsilon in (0.0, 0.5, 1.5):
        assert curve.delta(epsilon) == pytest.approx(1e-4 + finite.delta(epsilon), rel=2e-3)
        assert curve.quick.delta(epsilon) >= curve.delta(epsilon) * (1 - 1e-12)
    nothing = HiddenMixtureCurve([0.5, 0.5], [0.0, math.inf], is_replaced=is_replaced)
    assert nothing.delta(0.0) == nothing.delta(9.0) == 0.5
    assert (nothing.epsilon(0.4), nothing.epsilon(0.5)) == (math.inf, 0)


@pytest.mark.parametrize("is_replaced", [False, True])
@pytest.mark.parametrize("seed", seeds(10, 3))
def test_polygons_lie_just_above(seed, is_replaced):
    curve = random_curve(np.random.default_rng(100 + seed), is_replaced)
    if curve.mu is not None:
        return
    quick = curve.quick
    for share in (0.0, 0.01, 0.1, 0.3, 0.6, 1.0):
        epsilon = share * curve.epsilon(1e-9)
        found, truth = quick.delta(epsilon), curve.delta(epsilon)
        assert truth * (1 - 1e-12) <= found <= truth * 1.004
    usual = curve.epsilon(1e-5)
    composed = ComposedLoss(curve.privacy_losses()).epsilon(1e-5)
    assert usual * (1 - 1e-9) - 1e-9 <= composed <= usual * 1.002 + 1e-6


def test_polygons_of_any_epsilon():
    """Also where e^epsilon overflows."""
    curve = hsa.curves.GaussianCurve(40.0)
    nodes = np.append(0.0, np.geomspace(1, 1400, 300))
    polygon = profiles.polygon(nodes, np.array([curve.delta(node) for node in nodes]))
    for epsilon in np.linspace(0, 1500, 400):
        found, truth = float(polygon(np.array(epsilon))), curve.delta(epsilon)
        assert truth <= found
    assert polygon(np.array(900.0)) <= curve.delta(880.0)


@pytest.mark.skipif(
    not hasattr(dp_accounting, "MixtureOfGaussiansDpEvent"), reason="dp-accounting is too old"
)
def test_the_event_that_is_exported_has_the_curve():
    curve = HiddenMixtureCurve(np.full(3, 1 / 3), np.array([0.2, 0.5, 1.0]))
    stock = PLDAccountant().compose(curve.to_dpevent())
    assert curve.epsilon(1e-5) == pytest.approx(stock.get_epsilon(1e-5), rel=1e-3)


@pytest.mark.parametrize(
    ("is_replaced", "expected", "wrong"),
    [
        (False, 0.2104956, ([0.0, 0.0], [0.0, 2.0])),  # the other order alone
        (True, 0.2952652, ([0.0, 0.0], [0.0, 4.0])),  # one order of another pair
    ],
)
def test_one_order_of_a_step_is_refuted(is_replaced, expected, wrong):
    """Runs of linear losses whose truth is above what a wrong variant gives."""
    weights, mus = np.full(2, 0.5), np.array([0.0, 2.0])
    other = -mus if is_replaced else 0 * mus
    truth = max(divergence(*pair, 1.0, weights) for pair in ((mus, other), (other, mus)))
    assert truth == pytest.approx(expected, rel=1e-3)
    assert truth <= HiddenMixtureCurve(weights, mus, is_replaced=is_replaced).delta(1.0)
    assert divergence(*map(np.array, wrong), 1.0, weights) < 0.01 * truth


def test_means_of_the_distances_are_refuted():
    kept = 0.3 ** np.arange(2, -1, -1.0)
    found, weights = patterns(hsa.BatchOrder.POISSON, 3, 1, 0.1)
    truth = divergence(found @ kept / math.sqrt((kept**2).sum()), np.zeros(8), 2.0, weights)
    assert truth == pytest.approx(3.459879e-06, rel=1e-2)
    mus, weights = mus_of_coins(0.3, np.ones(3), np.ones(3), 0.1)
    assert truth <= HiddenMixtureCurve(weights, mus).delta(2.0)
    for wrong in (float(weights @ mus), math.sqrt(float(weights @ mus**2))):
        assert GaussianCurve(wrong).delta(2.0) < 0.01 * truth
