"""Theorem C: windows of random batches, sampled pairs, stock accountants and plain composition.

Exact laws of runs are in tests/oracles/test_random_distance.py, and in the search beside it.
"""

import itertools
import math

import attrs
import dp_accounting
import numpy as np
import pytest
from cases import seeds
from dp_accounting import NeighboringRelation
from mixtures_of_gaussians import divergence
from runs import cyclic_run, full_run, probe_run
from scipy import special, stats

import hidden_state_accountants as hsa
from hidden_state_accountants.bounds import Composition, Subsampling
from hidden_state_accountants.bounds.composition import record_mus, step_curve, step_profile
from hidden_state_accountants.bounds.solvers.shifts import least_mu_squared
from hidden_state_accountants.bounds.solvers.windows import Plan, SampledSteps, Windows
from hidden_state_accountants.bounds.subsampling import USUAL, SampledRun
from hidden_state_accountants.curves import profiles
from hidden_state_accountants.curves.base import GaussianCurve, known_of
from hidden_state_accountants.curves.by_profile import (
    _divergences,
    replaced_in_poisson_batch,
    replaced_without_replacement,
    sampled_curve,
    zeroed_without_replacement,
)
from hidden_state_accountants.curves.composed import compose_curves
from hidden_state_accountants.process.noisy_process import noisy_process
from hidden_state_accountants.process.stretching import BatchSizes, Stretching, largest_size

SPECIAL = NeighboringRelation.REPLACE_SPECIAL
ADD_OR_REMOVE = NeighboringRelation.ADD_OR_REMOVE_ONE
ONE = NeighboringRelation.REPLACE_ONE
RELATIONS = [("poisson", SPECIAL), ("poisson", ADD_OR_REMOVE), ("poisson", ONE)]
RELATIONS += [("without_replacement", SPECIAL), ("without_replacement", ONE)]
AT = np.array([0.0, 0.01, 0.1, 0.4, 1.0, 2.5])


def run(**changes):
    """Small enough to enumerate, contracting enough for windows to help."""
    arguments = {
        "noise_multiplier": 3.0, "learning_rate": 1.0, "clip_norm": 1.0, "batch_size": 2,
        "dataset_size": 5, "num_steps": 12, "weight_decay": 0.4,
        "loss": hsa.LossGeometry.generalized_linear(0.5),
    }  # fmt: skip
    return hsa.LastIterateDpEvent(**(arguments | changes))


# --- the probe of the theory ----------------------------------------------------------------------


def test_reference_run():
    event = probe_run(batch_order="poisson")
    bound = hsa.LastIterateAccountant().compose(event)
    assert 0.24 < bound.get_epsilon(1e-5) < 0.258  # composition: 3.187
    assert "Theorem C" in bound.guarantee.theorem
    # The largest batch of a longer run is larger: it is not in every step.
    longer = hsa.LastIterateAccountant().compose(attrs.evolve(event, num_steps=100_000))
    assert longer.get_epsilon(1e-5) == pytest.approx(bound.get_epsilon(1e-5), rel=0.01)


class TestBatchSizes:
    @pytest.mark.parametrize("relation", [SPECIAL, ADD_OR_REMOVE])
    @pytest.mark.parametrize(("n", "b", "steps"), [(5, 2, 20), (1000, 10, 500), (50_000, 500, 9)])
    def test_limits_are_the_first_that_are_almost_never_passed(self, relation, n, b, steps):
        event = run(batch_order="poisson", dataset_size=n, batch_size=b, num_steps=steps)
        sizes = BatchSizes.of(event, relation, 2e-12)
        others = n - (relation is SPECIAL)
        law, small = stats.binom(others, b / n), stats.binom(n - 1, b / n)
        assert (sizes.fewest, sizes.others) == (n - 1, others)
        above, below = steps * law.sf(sizes.largest - 1), steps * small.cdf(sizes.smallest - 1)
        assert max(above, below) <= 1e-12
        assert sizes.failure == pytest.approx(above + below, rel=1e-9, abs=0)
        assert sizes.largest == 1 or steps * law.sf(sizes.largest - 2) > 1e-12
        assert steps * small.cdf(sizes.smallest) > 1e-12

    @pytest.mark.parametrize(("n", "rate"), [(1, 0.9), (3, 0.9), (40, 0.5)])
    def test_a_record_that_is_removed_leaves_one_less(self, n, rate):
        """Zeroing one of n records of a Poisson batch is removing it: no smaller epsilon holds.

        A strongly convex loss contracts the less, the fewer records there are.
        """
        event = hsa.LastIterateDpEvent(
            noise_multiplier=2.0, learning_rate=0.5, clip_norm=1.0, batch_size=max(1, n // 2),
            dataset_size=n, num_steps=1000, batch_order="poisson", sampling_rate=rate,
            loss=hsa.LossGeometry.strongly_convex(0.5, 0.5, lipschitz=1.0),
        )  # fmt: skip
        larger, smaller = (Subsampling().guarantee(event, r) for r in (ADD_OR_REMOVE, SPECIAL))
        for delta in (1e-3, 1e-6):
            assert larger.epsilon(delta) >= 0.99 * smaller.epsilon(delta)  # another search

    def test_moduli_of_single_steps_are_those_of_the_largest_batch(self):
        event = probe_run(batch_order="poisson")
        c = SampledRun.of(event, SPECIAL, USUAL).process.contraction[0]
        sizes = BatchSizes.of(event, SPECIAL, 5e-13)
        assert c == noisy_process(event, SPECIAL, sizes.largest).contraction[0]
        assert c > 1.01 * noisy_process(event, SPECIAL, event.batch_size).contraction[0]

    def test_a_cap_adds_the_probability_that_it_acts(self):
        event = probe_run(batch_order="poisson", max_batch_size=610)
        assert largest_size(event, SPECIAL, 1e-12) == 610
        extra = SampledRun.of(event, SPECIAL).failure
        assert extra == pytest.approx(20_000 * stats.binom(49_999, 0.01).sf(609), rel=1e-6)
        assert 1e-6 < extra < 0.1
        curve = Subsampling().guarantee(event, SPECIAL).curve
        assert curve.epsilon(extra) == math.inf
        for single, failure in curve.alternatives():
            assert failure >= extra
            assert curve.delta(1.0) <= (single.delta(1.0) + failure) * (1 + 1e-12)
        assert curve.delta(1.0) >= extra

    def test_contraction_holds_for_every_size(self):
        """k terms over b act like the learning rate eta k / b at the same decay per step."""
        event = run(
            batch_order="poisson", dataset_size=9, loss=hsa.LossGeometry.weakly_convex(1.3, 0.2)
        )
        for terms in range(1, 10):
            c = noisy_process(event, SPECIAL, terms).contraction[0]
            for k in range(1, terms + 1):
                rate = event.learning_rate * k / event.batch_size
                decay = event.weight_decay * event.batch_size / k
                assert hsa.clipped_update_lipschitz(rate, 1.3, 0.2, decay) <= c * (1 + 1e-12)
            assert c >= 1 - event.learning_rate * event.weight_decay

    def test_strong_convexity_is_lost_in_an_empty_batch(self):
        loss = hsa.LossGeometry.strongly_convex(1.0, 0.5, lipschitz=1.0)
        for order, contraction in (("poisson", 1.0), ("without_replacement", 0.5)):
            event = run(batch_order=order, weight_decay=0.0, loss=loss)
            assert noisy_process(event, SPECIAL, 2).contraction[0] == contraction


def shift_mu(contraction, noise_std, distance, length, shifted, beta):
    """The mu of undoing a certain distance, by the engine."""
    total = len(contraction)
    steps = SampledSteps(
        stretching=Stretching.of_moduli(np.asarray(contraction, float), False),
        distance=np.append(0.0, np.full(total, distance)),
        sensitivity=np.full(total, 1e3),  # far more than the distance can be
        noise_std=np.asarray(noise_std, float),
        step_mu=np.ones(total),
        rate=1.0,
        is_constant=False,
    )
    (found,) = Windows(steps).window(Plan(length, shifted, beta), 64, 64).shift_mus
    return found


@pytest.mark.parametrize("seed", seeds(6))
def test_one_pool_is_the_least_shift(seed):
    rng = np.random.default_rng(seed)
    total = int(rng.integers(2, 40))
    c, sigma = rng.uniform(0.3, 1.3, total), rng.uniform(0.1, 2.0, total)
    length = int(rng.integers(1, total))
    for shifted in {1, (length + 1) // 2, length}:
        before = 1.5 * math.prod(c[total - length : total - shifted])
        last = slice(total - shifted, total)
        least = least_mu_squared(c[last], np.zeros(shifted), sigma[last], initial_shift=before)
        found = shift_mu(c, sigma, 1.5, length, shifted, 0.75)
        assert found == pytest.approx(math.sqrt(least / 0.25), rel=1e-6)
    assert shift_mu([1.0, 0.0, 1.0], np.ones(3), 1.0, 2, 1, 0.5) < 1e-250  # a forgotten past


@pytest.mark.parametrize("diameter", [math.inf, 0.02])
@pytest.mark.parametrize("order", ["poisson", "without_replacement"])
def test_a_window_is_paid_for(order, diameter):
    """Re-derives the mus of a window and the law of the distance from the run, in closed form."""
    event = probe_run(
        batch_order=order, domain_diameter=diameter, clip_norm=2**0.5, noise_multiplier=2.0
    )  # the clip never acts: c = 0.95 whatever the size of a batch is
    plan = Plan(60, 12, 0.8)
    sampled = SampledRun.of(event, SPECIAL)
    steps = sampled.segment(0, event.num_steps)
    window = Windows(steps).window(plan, 160, 400)
    assert dict(window.sampled_mus) == {0.5: 48, 0.5 / 0.8**0.5: 12}
    eta, clip, c, b, q = 0.5, 2**0.5, 0.95, 500, 0.01
    std = eta * 2.0 * clip / b
    unit = c**48 / math.sqrt(sum((std / c**i) ** 2 for i in range(1, 13))) / math.sqrt(0.2)
    weights = eta * clip / b * c ** np.arange(300)
    levels = window.shift_mus / unit
    assert 0 < window.rare < 1e-15
    assert 0.2 * weights.sum() < levels.max() <= min(diameter, weights.sum()) * (1 + 1e-6)
    mean = window.shift_weights @ levels
    if diameter == math.inf:
        assert q * weights.sum() <= mean <= 1.05 * q * weights.sum()
    assert set(record_mus(event)) == {0.5}
    assert {failure for _, failure in known_of(sampled.curve_of(window))} == {window.rare}


@pytest.mark.parametrize(
    ("changes", "relation", "condition"),
    [
        ({"batch_order": "without_replacement"}, ADD_OR_REMOVE, "neighboring relation"),
        ({"batch_order": "cyclic", "dataset_size": 6}, SPECIAL, "batch order"),
        ({"batch_order": "poisson", "loss": None}, SPECIAL, "loss geometry"),
        (
            {"batch_order": "poisson", "noise_multiplier": np.linspace(1, 2, 12)},
            SPECIAL,
            "noise multiplier",
        ),
    ],
)
def test_refusals(changes, relation, condition):
    unmet = Subsampling().check(run(**changes), relation)
    assert [u.condition for u in unmet] == [condition]


@pytest.mark.parametrize("noise", [3e-4, 0.002])
@pytest.mark.parametrize(("order", "relation"), RELATIONS)
def test_sampling_never_hurts(order, relation, noise):
    """The step whose batch surely holds the record is a Gaussian one."""
    changes = {"loss": None, "weight_decay": 0.0, "num_steps": 6, "noise_multiplier": noise}
    sampled = Composition().guarantee(cyclic_run(batch_order=order, **changes), relation)
    whole = Composition().guarantee(full_run(**changes), relation)
    assert sampled.epsilon(1e-5) <= whole.epsilon(1e-5) * (1 + 1e-9)


def test_degenerate_runs():
    silent = run(batch_order="poisson", noise_multiplier=0.0)
    assert Subsampling().guarantee(silent, SPECIAL).epsilon(0.5) == math.inf
    idle = run(batch_order="without_replacement", learning_rate=0.0, weight_decay=0.0)
    assert Subsampling().guarantee(idle, SPECIAL).epsilon(1e-9) == 0.0
    whole = run(batch_order="without_replacement", batch_size=5, weight_decay=0.0)
    everything = Composition().guarantee(attrs.evolve(whole, batch_order="full"), ONE)
    assert Subsampling().guarantee(whole, ONE).epsilon(1e-5) <= everything.epsilon(1e-5) * 1.001


def test_a_step_that_forgets_everything_leaves_a_short_window():
    event = run(
        batch_order="without_replacement", weight_decay=0.0, num_steps=40, dataset_size=10,
        loss=hsa.LossGeometry.strongly_convex(1.0, 1.0, lipschitz=1.0), domain_diameter=1.0,
    )  # fmt: skip
    forgets = Subsampling().guarantee(event, ONE).epsilon(1e-5)
    nearly = attrs.evolve(event, learning_rate=0.999)
    assert forgets <= Subsampling().guarantee(nearly, ONE).epsilon(1e-5)


@pytest.mark.parametrize("order", ["poisson", "without_replacement"])
@pytest.mark.parametrize("relation", [SPECIAL, ONE])
def test_a_batch_of_all_records_is_no_sample(order, relation):
    """Three Gaussians of epsilon 73.62: divergences gave 77.37."""
    event = probe_run(
        batch_order=order, batch_size=25, dataset_size=25, num_steps=3, noise_multiplier=0.2,
        loss=None, clip_norm=1.0,
    )  # fmt: skip
    apart = 2 if relation is ONE else 1
    exact = GaussianCurve(apart * math.sqrt(3) / 0.2).epsilon(1e-5)
    assert Composition().guarantee(event, relation).epsilon(1e-5) == pytest.approx(exact, rel=1e-9)


# --- sampled pairs --------------------------------------------------------------------------------


def exact_pair(rate, base, joined, other):
    """H_e between mixtures that place the sampled record here or there; both orders."""
    weights = np.array([1 - rate, rate])
    pair = np.array([base, joined]), np.array([base, other])
    return np.array([[divergence(*p, e, weights) for e in AT] for p in (pair, pair[::-1])])


@pytest.mark.parametrize("mu", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("rate", [0.02, 0.3, 1.0])
@pytest.mark.parametrize(
    ("make", "stand_ins", "others"),
    [
        (zeroed_without_replacement, (-1, -1 / 2, 0, 1), (0,)),
        (replaced_without_replacement, (-1, 0, 1), (-1, 1)),
        (replaced_in_poisson_batch, (0,), (-1, 0, 1 / 2, 1)),
    ],
)
def test_profiles_cover_every_place_and_are_attained(make, stand_ins, others, rate, mu):
    """The stand-in and the records anywhere up to mu from 0; both directions."""
    profile = make(mu, rate)
    claims = np.array([profile.forward(AT), profile.backward(AT)])
    closest = np.zeros(2)
    for places in itertools.product(stand_ins, (-1, 1 / 3, 1), others):
        exact = exact_pair(rate, *(mu * np.array(places)))
        assert (exact <= claims * (1 + 1e-9) + 1e-12).all()
        shares = np.where(claims > 1e-6, exact / np.maximum(claims, 1e-6), 0.0)
        closest = np.maximum(closest, shares.max(axis=1))
    assert closest.min() > 0.999
    # A zeroed record is no closer than a replaced one; functions of e^epsilon are convex.
    assert (claims[1] <= claims[0] * (1 + 1e-9)).all()
    replaced = replaced_without_replacement(mu, rate).forward(AT)
    assert (claims[0] <= replaced * (1 + 1e-9) + 1e-15).all()
    at = np.linspace(0, min(profile.largest, 3.0), 400)
    slopes = np.diff(profile.forward(at)) / np.diff(np.exp(at))
    assert (np.diff(slopes) >= -1e-9).all()


@pytest.mark.parametrize("delta", [1e-12, 1e-6, 1e-3, 0.05, 0.2])
def test_epsilon_inverts_delta(delta):
    curve = sampled_curve(replaced_without_replacement, 0.85, 0.1)
    assert curve.delta(curve.epsilon(delta)) == pytest.approx(min(delta, curve.delta(0.0)))


def test_losses_beyond_the_range_of_exp():
    curve = sampled_curve(replaced_without_replacement, 30.0, 0.1)
    expected = hsa.curves.gaussian.epsilon_from_mu(60.0, 1e-8) + math.log(0.1)
    assert curve.epsilon(1e-9) == pytest.approx(expected)
    curve = sampled_curve(replaced_without_replacement, 30.0, 1e-7)
    for epsilon in (600.0, 690.0, 696.0, 800.0):
        assert curve.delta(epsilon) == pytest.approx(1e-7)
    assert curve.delta(curve.epsilon(5e-8)) == pytest.approx(5e-8, rel=1e-6)
    assert curve.delta(math.inf) == 0.0


@pytest.mark.parametrize("seed", range(3))
def test_composed_orders_with_states_that_choose(seed):
    """Two steps; in the second one the places depend on what the first one showed."""
    rng = np.random.default_rng(seed)
    mu, q = 1.2, 0.3
    claim = compose_curves([(sampled_curve(zeroed_without_replacement, mu, q), 2)])
    x = np.linspace(-9, 9, 361)
    places = rng.choice([-mu, 0.0, mu], size=(2, len(x)))
    first = rng.choice([-mu, mu], size=2)

    def law(is_there):
        joined = places[1] if is_there else np.zeros(len(x))
        one = (1 - q) * stats.norm.pdf(x - first[0])
        one += q * stats.norm.pdf(x - (first[1] if is_there else 0.0))
        two = (1 - q) * stats.norm.pdf(x[None, :] - places[0][:, None])
        two += q * stats.norm.pdf(x[None, :] - joined[:, None])
        return one[:, None] * two * (x[1] - x[0]) ** 2

    laws = law(True), law(False)
    for epsilon in (0.1, 0.7, 1.5):
        for p, r in (laws, laws[::-1]):
            exact = float(np.maximum(p - math.exp(epsilon) * r, 0).sum())
            assert exact <= claim.delta(epsilon) * (1 + 1e-6)


ORDERS = np.array([1.1, 1.5, 2.0, 4.0, 16.0])


def exact_renyi(order, mu, rate, base, joined, other):
    """The larger one of both orders of a pair of mixtures."""
    x = np.linspace(-1, 1, 60_001) * (15 + 2 * order * mu)

    def log_density(place):
        return np.logaddexp(
            math.log1p(-rate) + stats.norm.logpdf(x - base),
            math.log(rate) + stats.norm.logpdf(x - place),
        )

    pair = log_density(joined), log_density(other)
    totals = [special.logsumexp(order * p + (1 - order) * q) for p, q in (pair, pair[::-1])]
    return (max(totals) + math.log(x[1] - x[0])) / (order - 1)


@pytest.mark.parametrize("mu", [0.2, 0.8, 5.0, 20.0])
@pytest.mark.parametrize("rate", [0.01, 0.4])
@pytest.mark.parametrize(
    ("make", "places"),
    [
        (zeroed_without_replacement, (-1, 1, 0)),
        (replaced_in_poisson_batch, (0, 1, -1)),
        (replaced_without_replacement, (0, 2, 0)),
    ],
)
def test_divergences_of_the_pairs(make, places, mu, rate):
    """Far apart, too, where a profile underflows before the divergence has converged."""
    found = sampled_curve(make, mu, rate).rdp(ORDERS)
    for order, claim in zip(ORDERS.tolist(), found.tolist(), strict=True):
        exact = exact_renyi(order, mu, rate, *(mu * np.array(places)))
        assert exact <= claim * (1 + 1e-6)
        assert order > 2 or mu > 1 or exact > 0.2 * claim


@pytest.mark.parametrize("mu", [0.2, 1.0, 3.0])
def test_the_integral_is_that_of_dp_accounting(mu):
    """Of version 0.6 at whole orders only: between them it reports more."""
    event = dp_accounting.PoissonSampledDpEvent(0.05, dp_accounting.GaussianDpEvent(1 / mu))
    stock = dp_accounting.rdp.RdpAccountant(ORDERS.tolist()).compose(event)
    profile = profiles.poisson(profiles.gaussian(mu), 0.05)
    nodes = np.append(0.0, np.geomspace(1e-6, mu * (mu / 2 + 36), 3000))
    for order, reported in zip(ORDERS.tolist(), stock.rdp.tolist(), strict=True):
        expected = exact_renyi(order, mu, 0.05, 0.0, mu, 0.0)
        assert reported >= expected * (1 - 1e-6)
        assert reported == pytest.approx(expected, rel=1e-6) or order % 1 > 0
        directions = profile.forward(nodes), profile.backward(nodes)
        (found,) = _divergences(np.array([order]), nodes, *directions)
        assert expected < found < 1.02 * expected or (order * mu > 30 and found == math.inf)


def test_large_epsilons_and_mus_are_numbers():
    """e^epsilon is infinite at 800, and the divergence there is far below all numbers."""
    whole = profiles.gaussian(30.0)
    epsilons = np.array([600.0, 700.0, 800.0, 2000.0])
    found = profiles.poisson(whole, 1.0).backward(epsilons)
    assert np.isfinite(found).all()
    assert (found >= whole.forward(epsilons)).all()
    found = sampled_curve(replaced_in_poisson_batch, 40.0, 0.1).rdp(np.array([2.0, 300.0]))
    assert np.isfinite(found).all()
    assert found[0] == pytest.approx(6400 + math.log(0.1), rel=1e-3)  # the coin is revealed


# --- composition ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "relation", "long_run", "short_run"),
    [
        ("without_replacement", ONE, (12.353, 12.365), (7.180, 7.1874)),
        ("without_replacement", SPECIAL, (6.01, 6.0190), (3.2372, 3.5255)),
        ("poisson", ONE, (6.59, 6.6018), (5.1386, 5.1537)),
    ],
)
def test_reference_values_of_composition(order, relation, long_run, short_run):
    """The larger ends: a grid of 1e-3 (one record replaced without replacement), else this package.

    The smaller ends of short runs: dp-accounting's composition of the pair on a line, cut into
    cells and rounded down.
    """
    long = probe_run(batch_order=order, loss=None)
    short = cyclic_run(
        batch_order=order, batch_size=10, dataset_size=100, num_steps=300, loss=None,
        noise_multiplier=3.0,
    )  # fmt: skip
    for event, (least, most) in zip((long, short), (long_run, short_run), strict=True):
        assert least < Composition().guarantee(event, relation).epsilon(1e-5) <= most


def test_one_certain_record_is_a_gaussian():
    assert sampled_curve(zeroed_without_replacement, 0.7, 1.0).mu == 0.7
    assert sampled_curve(replaced_in_poisson_batch, 0.7, 1.0).mu == 1.4
    assert sampled_curve(replaced_in_poisson_batch, 0.7, 0.5).mu is None
    assert sampled_curve(zeroed_without_replacement, 0.7, 0.5).to_dpevent() is None


@pytest.mark.parametrize("order", ["poisson", "without_replacement"])
@pytest.mark.parametrize("relation", [SPECIAL, ONE])
def test_the_curve_of_a_step_is_the_profile_that_the_search_uses(order, relation):
    event = cyclic_run(batch_order=order, loss=None)
    profile = step_profile(event, relation)(0.8)
    largest = np.maximum(profile.forward(AT), profile.backward(AT))
    curve = step_curve(event, relation, 0.8)
    found = [curve.delta(e) for e in AT.tolist()]
    np.testing.assert_allclose(found, largest, rtol=1e-3, atol=1e-12)
