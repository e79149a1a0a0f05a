"""Theorem E: its curve against exact divergences, and the theorem against laws of attacks."""

import itertools
import math

import dp_accounting
import mpmath
import numpy as np
import pytest
from cases import seeds
from dp_accounting.pld import PLDAccountant
from mixtures_of_gaussians import half_lines

import hidden_state_accountants as hsa
from hidden_state_accountants.curves import profiles
from hidden_state_accountants.curves.base import GaussianCurve
from hidden_state_accountants.curves.by_profile import ProfileCurve
from hidden_state_accountants.curves.composed import compose_curves
from hidden_state_accountants.curves.composed_loss import ComposedLoss
from hidden_state_accountants.curves.hidden_mixture import HiddenMixtureCurve

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


def test_one_distance_is_gaussian():
    for is_replaced in (False, True):
        curve = HiddenMixtureCurve(
            np.array([0.5, 0.5]), np.array([0.7, 0.7]), is_replaced=is_replaced
        )
        gaussian = GaussianCurve(1.4 if is_replaced else 0.7)
        assert curve.mu == curve.largest_mu == gaussian.mu
        assert curve.delta(1.0) == pytest.approx(gaussian.delta(1.0), rel=1e-11)
        assert curve.epsilon(1e-5) == pytest.approx(gaussian.epsilon(1e-5), rel=1e-11)
        assert curve.to_dpevent() == gaussian.to_dpevent()


def test_infinite_distances_add_their_probability():
    for is_replaced in (False, True):
        weights, mus = np.array([0.3, 0.6999, 1e-4]), np.array([0.0, 1.0, math.inf])
        curve = HiddenMixtureCurve(weights, mus, is_replaced=is_replaced)
        finite = HiddenMixtureCurve(
            np.array([0.3, 0.7]), np.array([0.0, 1.0]), is_replaced=is_replaced
        )
        assert curve.delta(math.inf) == 1e-4
        assert curve.epsilon(5e-5) == math.inf
        for epsilon in (0.0, 0.5, 1.5):
            assert curve.delta(epsilon) == pytest.approx(1e-4 + finite.delta(epsilon), rel=2e-3)
            assert curve.quick.delta(epsilon) >= curve.delta(epsilon) * (1 - 1e-12)
        nothing = HiddenMixtureCurve(np.array([0.5, 0.5]), np.array([0.0, math.inf]))
        assert nothing.delta(0.0) == nothing.delta(9.0) == 0.5
        assert nothing.epsilon(0.4) == math.inf
        assert nothing.epsilon(0.5) == 0


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


def test_a_larger_law_is_larger():
    weights = np.full(4, 0.25)
    for is_replaced in (False, True):
        smaller = HiddenMixtureCurve(weights, np.arange(4.0), is_replaced=is_replaced)
        larger = HiddenMixtureCurve(weights, np.array([0, 1, 2.2, 3]), is_replaced=is_replaced)
        for delta in (0.1, 1e-5, 1e-10):
            assert smaller.epsilon(delta) < larger.epsilon(delta)


@pytest.mark.skipif(
    not hasattr(dp_accounting, "MixtureOfGaussiansDpEvent"), reason="dp-accounting is too old"
)
def test_the_event_that_is_exported_has_the_curve():
    curve = HiddenMixtureCurve(np.full(3, 1 / 3), np.array([0.2, 0.5, 1.0]))
    stock = PLDAccountant().compose(curve.to_dpevent())
    assert curve.epsilon(1e-5) == pytest.approx(stock.get_epsilon(1e-5), rel=1e-3)


# --- exact laws of attacks ------------------------------------------------------------------------


def patterns_of(rng):
    """Steps, and the patterns of the record with their probabilities: coins, or one draw."""
    if rng.random() < 0.5:
        steps, rate = int(rng.integers(1, 7)), rng.choice([0.02, 0.2, 0.5])
        found = np.array(list(itertools.product([0, 1], repeat=steps)))
        return steps, found, rate ** found.sum(axis=1) * (1 - rate) ** (1 - found).sum(axis=1)
    steps, period = int(rng.integers(1, 13)), int(rng.integers(1, 7))
    found = (np.arange(steps) % period == np.arange(period)[:, None]).astype(int)
    return steps, found, np.full(period, 1 / period)


@pytest.mark.parametrize("is_replaced", [False, True])
@pytest.mark.parametrize("seed", seeds(20, 3))
def test_no_attack_refutes_it(seed, is_replaced):
    """Of 30 runs, with linear losses: both orders. The record has slope 1, others have any."""
    rng = np.random.default_rng([seed, is_replaced])
    tightest = 0.0
    for _ in range(30):
        steps, found, weights = patterns_of(rng)
        c = rng.uniform(0, 1.2, steps) if rng.random() < 0.5 else np.full(steps, rng.uniform(0, 1))
        shifts, sigma = np.exp(rng.normal(size=(2, steps)) * rng.choice([0.0, 0.7], (2, 1)))
        sigma *= rng.choice([0.3, 1.0, 2.0])
        kept = np.append(np.cumprod(c[:0:-1])[::-1], 1.0)
        means = found @ (kept * shifts) / math.sqrt(((kept * sigma) ** 2).sum())
        other = rng.choice([-1.0, 0.0, 0.5]) if is_replaced else 0.0
        mus = np.array([hsa.shifted_gdp_mu(c, shifts * pattern, sigma) for pattern in found])
        curve = HiddenMixtureCurve(weights, mus, is_replaced=is_replaced)
        for epsilon in rng.uniform(0, 4, 2):
            bound = curve.delta(epsilon)
            for pair in ((means, other * means), (other * means, means)):
                truth = half_lines(*pair, weights, epsilon)
                assert truth <= bound * (1 + 1e-9) + 1e-13
                tightest = max(tightest, truth / bound if bound > 1e-9 else 0)
    assert 0.9 < tightest


def test_wrong_variants_are_refuted():
    """Runs of linear losses whose truth is above what a wrong variant gives."""
    one_step = np.full(2, 0.5), np.array([0.0, 2.0])
    zero = np.zeros(2)
    right = HiddenMixtureCurve(*one_step)
    truth = half_lines(one_step[1], zero, one_step[0], 1.0)
    assert truth == pytest.approx(0.2104956, rel=1e-3)
    assert truth <= right.delta(1.0)
    assert half_lines(zero, one_step[1], one_step[0], 1.0) == 0  # the other order alone
    replaced = HiddenMixtureCurve(*one_step, is_replaced=True)
    truth = half_lines(-one_step[1], one_step[1], one_step[0], 1.0)
    assert truth == pytest.approx(0.2952652, rel=1e-3)
    assert truth <= replaced.delta(1.0)
    assert half_lines(zero, 2 * one_step[1], one_step[0], 1.0) == 0  # one order of another pair

    found = np.array(list(itertools.product([0, 1], repeat=3)))
    weights = 0.1 ** found.sum(axis=1) * 0.9 ** (3 - found.sum(axis=1))
    kept = 0.3 ** np.arange(2, -1, -1.0)
    means = found @ kept / math.sqrt((kept**2).sum())
    mus = np.array([hsa.shifted_gdp_mu(0.3, np.array(row, float), np.ones(3)) for row in found])
    truth = half_lines(means, np.zeros(8), weights, 2.0)
    assert truth == pytest.approx(3.459879e-06, rel=1e-2)
    assert truth <= HiddenMixtureCurve(weights, mus).delta(2.0)
    for wrong in (float(weights @ mus), math.sqrt(float(weights @ mus**2))):
        assert GaussianCurve(wrong).delta(2.0) < 0.01 * truth
