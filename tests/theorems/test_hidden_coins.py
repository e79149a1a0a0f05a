"""Theorems E and F of random batches: laws of the distance, attacks, figures."""

import itertools
import math

import attrs
import numpy as np
import pytest
from cases import seeds
from dp_accounting import NeighboringRelation
from mixtures_of_gaussians import divergence, run_of_linear_losses
from runs import probe_run

import hidden_state_accountants as hsa
from hidden_state_accountants.bounds import Composition, HiddenCoins, Subsampling
from hidden_state_accountants.bounds.solvers import coin_costs, cycle_costs
from hidden_state_accountants.bounds.solvers.coin_costs import CoinSteps, law_of_tails
from hidden_state_accountants.bounds.solvers.rounding import fewer, geometric
from hidden_state_accountants.curves.hidden_mixture import HiddenMixtureCurve

ADD_OR_REMOVE = NeighboringRelation.ADD_OR_REMOVE_ONE
SPECIAL, ONE = NeighboringRelation.REPLACE_SPECIAL, NeighboringRelation.REPLACE_ONE


def patterns(steps, rate):
    """All coins, and their probabilities."""
    found = np.array(list(itertools.product([0, 1], repeat=steps)))
    return found, rate ** found.sum(axis=1) * (1 - rate) ** (1 - found).sum(axis=1)


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
    found, weights = patterns(steps, rate)
    mus = np.array([hsa.shifted_gdp_mu(c, shifts * pattern, sigma) for pattern in found])
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
    found, weights = patterns(steps, rate)
    ones = np.ones(steps)
    mus = np.array([hsa.shifted_gdp_mu(1.0, ones * pattern, ones) for pattern in found])
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


# --- exact laws of attacks ------------------------------------------------------------------------


def linear_run(rng, relation, order):
    """A random run, the scale of its iterates' law, and both means of each pattern.

    All losses are linear: the record has slope 1, its replacement `other`, and everybody else `g`.
    """
    steps, batches = int(rng.integers(1, 8)), int(rng.choice([2, 10, 40]))
    rates = np.exp(rng.normal(size=steps) * rng.choice([0.0, 1.0]))
    noise = rng.uniform(0.3, 1.2) * np.ones(steps)
    run, deviation, moves = run_of_linear_losses(rng, order, batches, rates, noise)
    found, weights = patterns(steps, run.sampling_probability)
    moves = found @ moves
    g = float(rng.choice([-1.0, 1.0])) if order == "without_replacement" else 0.0
    other = float(rng.choice([-1.0, 0.0])) if relation is ONE else 0.0
    return run, deviation, weights, (1 - g) * moves, (other - g) * moves


CASES = [
    ("poisson", ADD_OR_REMOVE), ("poisson", SPECIAL), ("poisson", ONE),
    ("without_replacement", SPECIAL), ("without_replacement", ONE),
]  # fmt: skip


@pytest.mark.parametrize(("order", "relation"), CASES)
@pytest.mark.parametrize("seed", seeds(20, 2))
def test_no_attack_refutes_it(order, relation, seed):
    """Of 10 runs: laws at both orders. Over all seeds that are 1,000 runs, 4,000 divergences."""
    rng = np.random.default_rng([seed, CASES.index((order, relation))])
    tightest = 0.0
    for _ in range(10):
        run, deviation, weights, first, second = linear_run(rng, relation, order)
        curve = HiddenCoins().guarantee(run, relation).curve
        for epsilon in rng.uniform(0, 4, 2):
            bound = curve.delta(epsilon)
            for pair in ((first, second), (second, first)):
                truth = divergence(*pair, deviation, epsilon, weights)
                assert truth <= bound * (1 + 1e-9) + 1e-12, (run, epsilon)
                tightest = max(tightest, truth / bound if bound > 1e-9 else 0)
    assert tightest > 0.5


# --- what follows ---------------------------------------------------------------------------------


def head(noise, rate, steps, decay, order="poisson", **changes):
    """A softmax head whose clip does not act."""
    return hsa.LastIterateDpEvent(
        noise_multiplier=noise, learning_rate=0.5, clip_norm=1.0, batch_size=100,
        dataset_size=round(100 / rate), num_steps=steps, batch_order=order, weight_decay=decay,
        loss=hsa.LossGeometry.generalized_linear(0.5), **changes,
    )  # fmt: skip


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


def test_a_run_of_one_step_is_the_sampled_gaussian():
    run = head(0.7, 0.1, 1, 0.0)
    composed = Composition().guarantee(run, ADD_OR_REMOVE)
    hidden = HiddenCoins().guarantee(run, ADD_OR_REMOVE)
    for epsilon in (0.1, 1.0, 3.0):
        delta = composed.delta(epsilon)
        assert delta * 0.999 <= hidden.delta(epsilon) <= delta * 1.05


def test_releases_compose():
    once = HiddenCoins().guarantee(head(0.8, 0.002, 300, 0.1), SPECIAL)
    run = head(0.8, 0.002, 900, 0.1, release_steps=(300, 600))
    thrice = HiddenCoins().guarantee(run, SPECIAL).epsilon(1e-5)
    assert once.epsilon(1e-5) < thrice < 3 * once.epsilon(1e-5 / 3)
    whole = HiddenCoins().guarantee(head(0.8, 0.002, 900, 0.1), SPECIAL).epsilon(1e-5)
    assert whole < thrice


def test_schedules_of_a_step_like_the_others_cost_the_same():
    equal = head(0.6, 0.001, 400, 0.02)
    varied = hsa.LastIterateDpEvent(
        noise_multiplier=np.full(400, 0.6), learning_rate=np.r_[np.full(399, 0.5), 0.5 + 1e-12],
        clip_norm=1.0, batch_size=100, dataset_size=100_000, num_steps=400, weight_decay=0.02,
        loss=hsa.LossGeometry.generalized_linear(0.5), batch_order="poisson",
    )  # fmt: skip
    found = [HiddenCoins().guarantee(run, SPECIAL).epsilon(1e-5) for run in (equal, varied)]
    assert found[0] == pytest.approx(found[1], rel=1e-3)


def test_larger_runs_cost_more():
    def epsilon(noise=0.7, rate=0.002, steps=200, decay=0.05, delta=1e-5):
        return HiddenCoins().guarantee(head(noise, rate, steps, decay), SPECIAL).epsilon(delta)

    usual = epsilon()
    assert epsilon(noise=0.75) < usual
    assert usual <= epsilon(steps=400) * 1.01
    assert usual < epsilon(rate=0.003)
    assert epsilon(delta=1e-4) < usual < epsilon(delta=1e-9)


@pytest.mark.parametrize(
    ("order", "border"), [("poisson", 1.25), ("without_replacement", 2.5)], ids=["E", "F"]
)
def test_noise_and_delta_count_on_both_sides_of_the_border(order, border):
    """Up to a noise multiplier the coins stay secret in a bound of its own."""
    found = []
    for noise in (border, 1.02 * border):
        accountant = hsa.LastIterateAccountant(SPECIAL)
        accountant.compose(head(noise, 0.01, 30, 0.05, order))
        found.append([accountant.get_epsilon(delta) for delta in (1e-5, 1e-7)])
    assert (np.diff(found, axis=0) < 0).all()
    assert (np.diff(found, axis=1) > 0).all()


def test_coins_may_cost_more_than_a_public_order():
    """Two linear losses: no bound may be smaller than what an attacker sees."""
    run = hsa.LastIterateDpEvent(
        noise_multiplier=0.5, learning_rate=1.0, clip_norm=1.0, batch_size=1, dataset_size=2,
        num_steps=2, batch_order="poisson", loss=hsa.LossGeometry.linear(1.0),
    )  # fmt: skip
    move = math.sqrt(2)
    truth = HiddenMixtureCurve([0.25, 0.5, 0.25], [0.0, move, 2 * move]).epsilon(1e-5)
    assert truth == pytest.approx(13.152, abs=1e-3)
    coins = hsa.LastIterateAccountant().compose(run).get_epsilon(1e-5)
    public = hsa.LastIterateAccountant().compose(attrs.evolve(run, batch_order="cyclic"))
    assert public.get_epsilon(1e-5) == pytest.approx(9.997, abs=1e-3)
    assert truth <= coins < 1.3 * truth


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


def test_no_noise_and_no_steps():
    silent = head(0.7, 0.01, 3, 0.0)
    silent = hsa.LastIterateDpEvent(
        noise_multiplier=np.array([1.0, 1.0, 0.0]), learning_rate=0.5, clip_norm=1.0,
        batch_size=100, dataset_size=10_000, num_steps=3, batch_order="poisson",
        loss=silent.loss,
    )  # fmt: skip
    assert HiddenCoins().guarantee(silent, SPECIAL).epsilon(1e-5) == math.inf
