"""Balls in bins: Theorem E for their draws, and the pair of a draw of which every step is seen."""

import itertools
import math

import attrs
import numpy as np
import pytest
from cases import first, seeds
from dp_accounting import NeighboringRelation
from mixtures_of_gaussians import half_lines, random_linear_run
from runs import cyclic_run, probe_run
from scipy import integrate, special

import hidden_state_accountants as hsa
from hidden_state_accountants.bounds import BallsInBins, Composition
from hidden_state_accountants.bounds.balls_in_bins import _process
from hidden_state_accountants.curves import profiles
from hidden_state_accountants.curves.balls_in_bins import bins_curve
from hidden_state_accountants.curves.by_profile import ProfileCurve
from hidden_state_accountants.curves.composed import compose_curves

SPECIAL, ONE = NeighboringRelation.REPLACE_SPECIAL, NeighboringRelation.REPLACE_ONE
ADD = NeighboringRelation.ADD_OR_REMOVE_ONE
ONCE, REDRAWN = "balls_in_bins", "balls_in_bins_redrawn"
RELATIONS = pytest.mark.parametrize("relation", [SPECIAL, ONE], ids=lambda r: r.name)
ORDERS = pytest.mark.parametrize("order", [ONCE, REDRAWN])


def linear_run(rng, order):
    """A random run, and the shift of its last iterate for each pattern of a record of slope 1."""
    run, deviation, by_epoch = random_linear_run(rng, order, is_redrawn=order == REDRAWN)
    by_epoch = by_epoch / deviation
    if order == REDRAWN:
        return run, np.array([sum(chosen) for chosen in itertools.product(*by_epoch)])
    return run, by_epoch.sum(axis=0)


@ORDERS
@RELATIONS
@pytest.mark.parametrize("seed", seeds(20, 3))
def test_no_attack_refutes_it(seed, relation, order):
    """Of 15 runs, both orders of the neighbours at two epsilons."""
    rng = np.random.default_rng([seed, relation is ONE, order == ONCE])
    tightest = 0.0
    for _ in range(15):
        run, means = linear_run(rng, order)
        curve = BallsInBins().guarantee(run, relation).curve
        other = rng.choice([-1.0, 0.0, 0.5]) if relation is ONE else 0.0
        weights = np.full(len(means), 1 / len(means))
        for epsilon in rng.uniform(0, 4, 2):
            bound = curve.delta(epsilon)
            for pair in ((means, other * means), (other * means, means)):
                truth = half_lines(*pair, weights, epsilon)
                assert truth <= bound * (1 + 1e-9) + 1e-13, (run, epsilon)
                tightest = max(tightest, truth / bound if bound > 1e-9 else 0)
    assert tightest > (0.9 if order == ONCE else 0.5)


@RELATIONS
def test_reference_values(relation):
    """Shuffled once the probe has .3712 and .6099; composed, 20 epochs of POISSON 2.584."""
    for order, expected in ((ONCE, (0.17736, 0.30550)), (REDRAWN, (0.17923, 0.30987))):
        run = probe_run(batch_order=order, clip_norm=1.4143)
        epsilon = hsa.LastIterateAccountant(relation).compose(run).get_epsilon(1e-5)
        assert epsilon == pytest.approx(expected[relation is ONE], abs=2e-5)
    composed = probe_run(batch_order=REDRAWN, noise_multiplier=1.0, num_steps=2_000, loss=None)
    epsilon = hsa.LastIterateAccountant(relation).compose(composed).get_epsilon(1e-5)
    assert epsilon == pytest.approx((2.4601, 5.248)[relation is ONE], abs=2e-3)


@ORDERS
@RELATIONS
@pytest.mark.parametrize(
    "changes",
    first(
        5,
        [
            {},
            {"release_steps": (5, 6, 13)},
            {"learning_rate": np.geomspace(0.5, 0.05, 24)},
            {"learning_rate": 3.5, "domain_diameter": 1.0},
            {"prox_strong_convexity": 0.5},
            {"num_steps": 22},
            {"num_steps": 3},
            {"release_steps": (8, 12)},
            {"domain_diameter": 0.3},
        ],
    ),
    ids=lambda changes: "-".join(changes) or "plain",
)
def test_it_is_never_above_a_public_order_and_falls_with_noise(order, relation, changes):
    """A public order has the largest modulus of all sizes here, not that of b records."""
    run = cyclic_run(batch_order=order, loss=hsa.LossGeometry.linear(1.0), **changes)
    epsilon = hsa.LastIterateAccountant(relation).compose(run).get_epsilon(1e-5)
    if order == ONCE:
        public = attrs.evolve(run, batch_order="cyclic")
        assert epsilon <= hsa.LastIterateAccountant(relation).compose(public).get_epsilon(1e-5)
    noisier = attrs.evolve(run, noise_multiplier=2.5)
    assert hsa.LastIterateAccountant(relation).compose(noisier).get_epsilon(1e-5) < epsilon
    if not changes:
        longer = attrs.evolve(run, num_steps=run.num_steps + 4)
        assert hsa.LastIterateAccountant(relation).compose(longer).get_epsilon(1e-5) >= epsilon


@ORDERS
def test_adding_a_record_is_zeroing_one(order):
    run = cyclic_run(batch_order=order, loss=hsa.LossGeometry.linear(1.0))
    epsilons = [hsa.LastIterateAccountant(r).compose(run).get_epsilon(1e-5) for r in (SPECIAL, ADD)]
    assert epsilons[0] == pytest.approx(epsilons[1], rel=1e-9)


def test_a_draw_for_every_epoch_is_one_draw_in_one_epoch():
    for relation in (SPECIAL, ONE):
        runs = [cyclic_run(batch_order=order, num_steps=4) for order in (ONCE, REDRAWN)]
        found = [hsa.LastIterateAccountant(relation).compose(r).get_epsilon(1e-5) for r in runs]
        assert found[0] == pytest.approx(found[1], rel=1e-9)


@ORDERS
def test_large_batches_stretch_more(order):
    """A batch of k records acts as b at the learning rate eta k/b."""
    loss = hsa.LossGeometry.generalized_linear(1.0)
    run = cyclic_run(batch_order=order, loss=loss, learning_rate=1.5, weight_decay=0.1)
    process, failure = _process(run, SPECIAL)
    assert process.contraction[0] == pytest.approx(abs(1 - 0.15 - 1.5 * 20 / 5))  # all in one
    assert failure == 0
    large = attrs.evolve(run, batch_size=500, dataset_size=2_000)
    process, failure = _process(large, SPECIAL)
    assert 0 < failure <= 1e-15
    largest = (process.contraction[0] + 1 - 0.15) / 1.5 * 500
    assert 600 < largest < 700
    assert large.overfull_delta(SPECIAL, round(largest)) == failure
    capped = attrs.evolve(large, max_batch_size=560)
    process, failure = _process(capped, SPECIAL)
    assert failure == capped.cap_delta(SPECIAL) > 1e-3
    curve = BallsInBins().guarantee(capped, SPECIAL).curve
    assert curve.delta(50.0) >= failure


def test_one_draw_has_as_many_batches_as_an_epoch():
    run = cyclic_run(batch_order=ONCE, batch_size=500, dataset_size=2_000, num_steps=400)
    redrawn = attrs.evolve(run, batch_order=REDRAWN)
    assert redrawn.overfull_delta(SPECIAL, 640) == pytest.approx(
        100 * run.overfull_delta(SPECIAL, 640)
    )


# --- every iterate released -----------------------------------------------------------------------


def two_bins(mu, epsilon):
    """E (A - e^epsilon)_+ and E (1 - e^epsilon A)_+ for l = 2, by one integral."""
    x = 2 * math.exp(epsilon)

    def call(strike):  # E (X - strike)_+
        if strike <= 0:
            return 1 - strike
        d = -math.log(strike) / mu - mu / 2
        return special.ndtr(d + mu) - strike * special.ndtr(d)

    def integral(function):
        def density(g):
            value = math.exp(mu * g - mu * mu / 2)
            return function(value) * math.exp(-g * g / 2) / math.sqrt(2 * math.pi)

        points = [(math.log(k) + mu * mu / 2) / mu for k in (x, 4 / x)]
        return integrate.quad(density, -12, 12, points=points, epsabs=1e-14, limit=400)[0]

    above = integral(lambda value: call(x - value)) / 2
    strike = 2 * math.exp(-epsilon)  # E (strike - X - Y)_+ = E (X + Y - strike)_+ + strike - 2
    below = integral(lambda value: call(strike - value)) + strike - 2
    return above, math.exp(epsilon) * below / 2


@pytest.mark.parametrize("mu", [0.3, 1.0, 2.5])
def test_two_bins_are_exact(mu):
    curve = bins_curve(mu, 2, is_replaced=False)
    for epsilon in (0.0, 0.05, 0.3, 1.0):
        for found, exact in zip(
            (curve.profile.forward, curve.profile.backward), two_bins(mu, epsilon), strict=True
        ):
            value = float(found(np.array([epsilon]))[0])
            assert exact - 1e-13 <= value <= exact * 1.003 + 1e-9


@pytest.mark.parametrize("seed", seeds(3, 1))
def test_more_bins_are_those_of_samples(seed):
    """The law of A itself, which holds both orders; also of a number that is no power of two."""
    rng = np.random.default_rng(seed)
    for mu, bins in ((0.7, 3), (1.2, 13), (0.5, 100)):
        draws = np.exp(mu * rng.normal(size=(50_000, bins)) - mu * mu / 2).mean(axis=1)
        profile = bins_curve(mu, bins, is_replaced=False).profile
        for epsilon in (0.0, 0.1, 0.4):
            for values, found in (
                (np.maximum(draws - math.exp(epsilon), 0), profile.forward),
                (np.maximum(1 - math.exp(epsilon) * draws, 0), profile.backward),
            ):
                error = 5 * values.std() / math.sqrt(len(values)) + 1e-9
                assert abs(values.mean() - float(found(np.array([epsilon]))[0])) < error


@pytest.mark.parametrize("bins", [2, 3, 4])
def test_no_test_of_replaced_records_refutes_it(bins):
    """Likelihood ratios of both mixtures, by samples of one of them."""
    rng, mu = np.random.default_rng(bins), 1.3
    z = rng.normal(size=(200_000, bins))
    z[np.arange(len(z)), rng.integers(bins, size=len(z))] += mu
    ratio = np.exp(-mu * z).mean(axis=1) / np.exp(mu * z).mean(axis=1)
    curve = bins_curve(mu, bins, is_replaced=True)
    single = bins_curve(mu, bins, is_replaced=False)
    for epsilon in (0.0, 0.5, 1.5, 3.0):
        values = np.maximum(1 - math.exp(epsilon) * ratio, 0)
        truth, error = values.mean(), 5 * values.std() / math.sqrt(len(values))
        assert truth - error <= curve.delta(epsilon) <= 3 * truth + error
        assert curve.delta(epsilon) > single.delta(epsilon)


@pytest.mark.parametrize(("mu", "bins"), [(0.5, 100), (1.0, 100), (1.4, 10)])
def test_bins_are_never_above_poisson_batches(mu, bins):
    """Of the same rate, composed over 20 epochs."""
    once = ProfileCurve(profiles.poisson(profiles.gaussian(mu), 1 / bins))
    poisson = compose_curves([(once, 20 * bins)])
    found = compose_curves([(bins_curve(mu, bins, is_replaced=False), 20)])
    for delta in (1e-3, 1e-5, 1e-9):
        assert found.epsilon(delta) < poisson.epsilon(delta)


def test_one_draw_is_shared_by_releases():
    """One pair for each epoch, composed, would be too small."""
    run = hsa.LastIterateDpEvent(
        noise_multiplier=1 / 1.2, learning_rate=[1.0, 0.0] * 6, clip_norm=1.0, batch_size=1,
        dataset_size=2, num_steps=12, batch_order=ONCE,
        loss=hsa.LossGeometry.linear(1.0), release_steps=range(1, 12),
    )  # fmt: skip
    length, weights = math.sqrt(6) * 1.2, np.array([0.5, 0.5])
    both = attrs.evolve(run, learning_rate=1.0)
    wrong = compose_curves([(bins_curve(1.2, 2, is_replaced=False), 6)])
    exact = bins_curve(length, 2, is_replaced=False)
    for epsilon in (4.0, 8.0):
        truth = half_lines(np.array([length, 0.0]), np.zeros(2), weights, epsilon)
        for bound in (BallsInBins(), Composition()):
            assert truth <= bound.guarantee(run, SPECIAL).curve.delta(epsilon)
        truth = two_bins(length, epsilon)[0]
        assert truth <= Composition().guarantee(both, SPECIAL).curve.delta(epsilon)
        assert truth <= exact.delta(epsilon) <= truth * 1.003
        assert wrong.delta(epsilon) < 0.9 * truth


def test_noise_that_changes_counts_the_worst_bin():
    noise = np.tile([2.0, 1.0, 3.0, 2.0], 6)
    run = cyclic_run(batch_order=ONCE, noise_multiplier=noise)
    curve = Composition().guarantee(run, SPECIAL).curve
    assert curve.largest_mu == pytest.approx(math.sqrt(6))
    redrawn = attrs.evolve(run, batch_order=REDRAWN)
    curve = Composition().guarantee(redrawn, SPECIAL).curve
    assert curve.largest_mu == pytest.approx(math.sqrt(6))
    once = bins_curve(1.0, 4, is_replaced=False)
    assert curve.epsilon(1e-5) == pytest.approx(compose_curves([(once, 6)]).epsilon(1e-5))
