"""Balls in bins: Theorem E for their draws, and the pair of a draw of which every step is seen.

Exact laws of attacks are in test_attacks.py beside this file.
"""

import math

import attrs
import numpy as np
import pytest
from cases import seeds
from dp_accounting import NeighboringRelation
from runs import cyclic_run, probe_run
from scipy import integrate, special

import hidden_state_accountants as hsa
from hidden_state_accountants.bounds import BallsInBins, Composition
from hidden_state_accountants.bounds.balls_in_bins import _process
from hidden_state_accountants.curves.balls_in_bins import bins_curve
from hidden_state_accountants.curves.composed import compose_curves

SPECIAL, ONE = NeighboringRelation.REPLACE_SPECIAL, NeighboringRelation.REPLACE_ONE
ADD = NeighboringRelation.ADD_OR_REMOVE_ONE
ONCE, REDRAWN = "balls_in_bins", "balls_in_bins_redrawn"
RELATIONS = pytest.mark.parametrize("relation", [SPECIAL, ONE], ids=lambda r: r.name)
ORDERS = pytest.mark.parametrize("order", [ONCE, REDRAWN])
LINEAR = hsa.LossGeometry.linear(1.0)


def epsilon(run, relation=SPECIAL):
    return hsa.LastIterateAccountant(relation).compose(run).get_epsilon(1e-5)


@RELATIONS
def test_reference_values(relation):
    """Shuffled once the probe has .3712 and .6099; composed, 20 epochs of POISSON 2.584."""
    for order, expected in ((ONCE, (0.17736, 0.30550)), (REDRAWN, (0.17923, 0.30987))):
        run = probe_run(batch_order=order, clip_norm=1.4143)
        assert epsilon(run, relation) == pytest.approx(expected[relation is ONE], abs=2e-5)
    composed = probe_run(batch_order=REDRAWN, noise_multiplier=1.0, num_steps=2_000, loss=None)
    expected = (2.4601, 5.248)[relation is ONE]
    assert epsilon(composed, relation) == pytest.approx(expected, abs=2e-3)


def test_runs_that_are_alike():
    """Adding a record is zeroing one; in one epoch a draw for every epoch is one draw."""
    for order in (ONCE, REDRAWN):
        run = cyclic_run(batch_order=order, loss=LINEAR)
        assert epsilon(run) == pytest.approx(epsilon(run, ADD), rel=1e-9)
    for relation in (SPECIAL, ONE):
        once, redrawn = (cyclic_run(batch_order=order, num_steps=4) for order in (ONCE, REDRAWN))
        assert epsilon(once, relation) == pytest.approx(epsilon(redrawn, relation), rel=1e-9)


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
    _, failure = _process(capped, SPECIAL)
    assert failure == capped.cap_delta(SPECIAL) > 1e-3
    assert BallsInBins().guarantee(capped, SPECIAL).delta(50.0) >= failure
    assert _process(attrs.evolve(capped, loss=LINEAR), SPECIAL)[1] == failure


def test_one_draw_has_as_many_batches_as_an_epoch():
    run = cyclic_run(batch_order=ONCE, batch_size=500, dataset_size=2_000, num_steps=400)
    redrawn = attrs.evolve(run, batch_order=REDRAWN).overfull_delta(SPECIAL, 640)
    assert redrawn == pytest.approx(100 * run.overfull_delta(SPECIAL, 640))


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
    profile = bins_curve(mu, 2, is_replaced=False).profile
    for at in (0.0, 0.05, 0.3, 1.0):
        found = profile.forward(np.array([at]))[0], profile.backward(np.array([at]))[0]
        for value, exact in zip(found, two_bins(mu, at), strict=True):
            assert exact - 1e-13 <= value <= exact * 1.003 + 1e-9


@pytest.mark.parametrize("seed", seeds(3, 1))
def test_more_bins_are_those_of_samples(seed):
    """The law of A itself, which holds both orders; also of a number that is no power of two."""
    rng = np.random.default_rng(seed)
    for mu, bins in ((0.7, 3), (1.2, 13), (0.5, 100)):
        draws = np.exp(mu * rng.normal(size=(50_000, bins)) - mu * mu / 2).mean(axis=1)
        profile = bins_curve(mu, bins, is_replaced=False).profile
        for at in (0.0, 0.1, 0.4):
            for values, found in (
                (np.maximum(draws - math.exp(at), 0), profile.forward),
                (np.maximum(1 - math.exp(at) * draws, 0), profile.backward),
            ):
                error = 5 * values.std() / math.sqrt(len(values)) + 1e-9
                assert abs(values.mean() - float(found(np.array([at]))[0])) < error


@pytest.mark.parametrize("bins", [2, 4])
def test_no_test_of_replaced_records_refutes_it(bins):
    """Likelihood ratios of both mixtures, by samples of one of them."""
    rng, mu = np.random.default_rng(bins), 1.3
    z = rng.normal(size=(200_000, bins))
    z[np.arange(len(z)), rng.integers(bins, size=len(z))] += mu
    ratio = np.exp(-mu * z).mean(axis=1) / np.exp(mu * z).mean(axis=1)
    curve = bins_curve(mu, bins, is_replaced=True)
    single = bins_curve(mu, bins, is_replaced=False)
    for at in (0.0, 0.5, 1.5, 3.0):
        values = np.maximum(1 - math.exp(at) * ratio, 0)
        truth, error = values.mean(), 5 * values.std() / math.sqrt(len(values))
        assert truth - error <= curve.delta(at) <= 3 * truth + error
        assert curve.delta(at) > single.delta(at)


def test_one_draw_is_one_pair_of_all_epochs():
    """One pair for each epoch, composed, would be too small."""
    run = cyclic_run(
        batch_order=ONCE, noise_multiplier=1 / 1.2, batch_size=10, num_steps=12, loss=None
    )
    wrong = compose_curves([(bins_curve(1.2, 2, is_replaced=False), 6)])
    for at in (4.0, 8.0):
        truth = two_bins(math.sqrt(6) * 1.2, at)[0]
        assert truth <= Composition().guarantee(run, SPECIAL).delta(at) <= truth * 1.003
        assert wrong.delta(at) < 0.9 * truth


def test_what_is_left_of_the_epochs_before_the_last_one_counts():
    noise = np.linspace(2.0, 3.0, 8)
    both, last = (
        cyclic_run(batch_order=REDRAWN, noise_multiplier=noise[n:], num_steps=8 - n) for n in (0, 4)
    )
    alone = BallsInBins().guarantee(last, SPECIAL).epsilon(1e-5)
    assert BallsInBins().guarantee(both, SPECIAL).epsilon(1e-5) > 1.2 * alone


def test_noise_that_changes_counts_the_worst_bin():
    noise = np.tile([2.0, 1.0, 3.0, 2.0], 6)
    once, redrawn = (
        Composition().guarantee(cyclic_run(batch_order=o, noise_multiplier=noise), SPECIAL).curve
        for o in (ONCE, REDRAWN)
    )
    assert [once.largest_mu, redrawn.largest_mu] == pytest.approx([math.sqrt(6)] * 2)
    exact = compose_curves([(bins_curve(1.0, 4, is_replaced=False), 6)])
    assert redrawn.epsilon(1e-5) == pytest.approx(exact.epsilon(1e-5))
