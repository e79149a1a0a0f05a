"""Pairs of sampled Gaussians in which both data sets move: exact laws, composition, divergences."""

import functools
import itertools
import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from runs import cyclic_run, probe_run
from scipy import special, stats

import hidden_state_accountants as hsa
from hidden_state_accountants.bounds import Composition
from hidden_state_accountants.bounds.composition import step_curve, step_profile
from hidden_state_accountants.curves import profiles
from hidden_state_accountants.curves.base import GaussianCurve
from hidden_state_accountants.curves.by_profile import (
    _divergences,
    replaced_in_poisson_batch,
    replaced_without_replacement,
    sampled_curve,
    zeroed_without_replacement,
)
from hidden_state_accountants.curves.composed import compose_curves

SPECIAL, ONE = NeighboringRelation.REPLACE_SPECIAL, NeighboringRelation.REPLACE_ONE
EPSILONS = np.array([0.0, 0.01, 0.1, 0.4, 1.0, 2.5])
X = np.linspace(-20, 20, 20_001)


def divergence(p, q, epsilon):
    """sup_S P(S) - e^epsilon Q(S) of densities on X."""
    return float(np.maximum(p - math.exp(epsilon) * q, 0).sum() * (X[1] - X[0]))


def mixture(rate, base, joined):
    return (1 - rate) * stats.norm.pdf(X - base) + rate * stats.norm.pdf(X - joined)


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


@pytest.mark.parametrize("mu", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("rate", [0.02, 0.3, 1.0])
class TestProfiles:
    def test_a_zeroed_record_in_any_place(self, mu, rate):
        """The stand-in and the record anywhere up to mu from 0; both directions."""
        profile = zeroed_without_replacement(mu, rate)
        claims = profile.forward(EPSILONS), profile.backward(EPSILONS)
        closest = [0.0, 0.0]
        for stand_in, record in itertools.product((-mu, -mu / 2, 0.0, mu), (-mu, mu / 3, mu)):
            pair = mixture(rate, stand_in, record), mixture(rate, stand_in, 0.0)
            for way, (p, q) in enumerate((pair, pair[::-1])):
                exact = np.array([divergence(p, q, e) for e in EPSILONS])
                assert (exact <= claims[way] * (1 + 1e-5) + 1e-12).all()
                ratios = exact[claims[way] > 1e-6] / claims[way][claims[way] > 1e-6]
                closest[way] = max(closest[way], *ratios)
        assert min(closest) > 0.999  # attained
        # what is at most 2 mu apart everywhere is no closer
        symmetric = profiles.without_replacement(profiles.gaussian(2 * mu), rate)
        assert (claims[0] <= symmetric.forward(EPSILONS) * (1 + 1e-9) + 1e-15).all()
        assert (claims[1] <= claims[0] * (1 + 1e-9)).all()

    def test_a_replaced_record_in_a_poisson_batch(self, mu, rate):
        profile = replaced_in_poisson_batch(mu, rate)
        claims = profile.forward(EPSILONS)
        assert profile.is_symmetric
        closest = 0.0
        for record, other in itertools.product((-mu, 0.0, mu / 2, mu), repeat=2):
            p, q = mixture(rate, 0.0, record), mixture(rate, 0.0, other)
            exact = np.array([divergence(p, q, e) for e in EPSILONS])
            assert (exact <= claims * (1 + 1e-5) + 1e-12).all()
            closest = max(closest, *(exact[claims > 1e-6] / claims[claims > 1e-6]))
        assert closest > 0.999  # attained

    def test_profiles_are_convex(self, mu, rate):
        """As functions of e^epsilon, also where the two directions meet."""
        for profile in (zeroed_without_replacement(mu, rate), replaced_in_poisson_batch(mu, rate)):
            at = np.linspace(0, min(profile.largest, 3.0), 400)
            slopes = np.diff(profile.forward(at)) / np.diff(np.exp(at))
            assert (np.diff(slopes) >= -1e-9).all()


@pytest.mark.parametrize("mu", [1e-3, 0.1, 1.0, 8.0, 60.0])
def test_the_best_shares_are_better_than_equal_epsilons(mu):
    """Than advanced joint convexity, and joint convexity with the coin revealed."""
    q, at = 0.05, np.linspace(0, min(2 * mu, 40.0), 200)
    inner = np.log1p(np.expm1(at) / q)
    beta = (1 - q) * np.exp(-inner) + q
    d_far, d_near = (profiles.gaussian(m).forward(inner) for m in (2 * mu, mu))
    zeroed, replaced = (
        pair(mu, q).forward(at) for pair in (zeroed_without_replacement, replaced_in_poisson_batch)
    )
    apart = (profiles.gaussian(m).forward(at) for m in (mu, 2 * mu))
    for found, weight, revealed in zip((zeroed, replaced), (beta, 1 - beta), apart, strict=True):
        advanced = q * ((1 - weight) * d_far + weight * d_near)
        assert (found <= np.minimum(advanced, q * revealed) * (1 + 1e-9) + 1e-300).all()
        assert (found >= q * d_near * (1 - 1e-9)).all()
        if mu == 1:
            assert (found < 0.7 * np.minimum(advanced, q * revealed)).any()


@pytest.mark.parametrize("seed", range(3))
def test_composed_orders_with_states_that_choose(seed):
    """Two steps; in the second one the places depend on what the first one showed."""
    rng = np.random.default_rng(seed)
    mu, q = 1.2, 0.3
    claim = compose_curves([(sampled_curve(zeroed_without_replacement, mu, q), 2)])
    x = np.linspace(-9, 9, 361)
    width = x[1] - x[0]
    places = rng.choice([-mu, 0.0, mu], size=(2, len(x)))
    first = rng.choice([-mu, mu], size=2)

    def law(is_there):
        joined = places[1] if is_there else np.zeros(len(x))
        one = (1 - q) * stats.norm.pdf(x - first[0])
        one += q * stats.norm.pdf(x - (first[1] if is_there else 0.0))
        two = (1 - q) * stats.norm.pdf(x[None, :] - places[0][:, None])
        two += q * stats.norm.pdf(x[None, :] - joined[:, None])
        return one[:, None] * two

    laws = law(True), law(False)
    for epsilon in (0.1, 0.7, 1.5):
        for p, r in (laws, laws[::-1]):
            exact = float(np.maximum(p - math.exp(epsilon) * r, 0).sum() * width**2)
            assert exact <= claim.delta(epsilon) * (1 + 1e-6)


class TestDivergences:
    ORDERS = np.array([1.1, 1.5, 2.0, 4.0, 16.0])

    @staticmethod
    def log_mixture(x, rate, base, joined):
        return np.logaddexp(
            math.log1p(-rate) + stats.norm.logpdf(x - base),
            math.log(rate) + stats.norm.logpdf(x - joined),
        )

    @staticmethod
    def exact(order, mu, first, second):
        """Of two densities, given by their logarithms."""
        x = np.linspace(-1, 1, 60_001) * (15 + 2 * order * mu)
        log_terms = order * first(x) + (1 - order) * second(x)
        return (special.logsumexp(log_terms) + math.log(x[1] - x[0])) / (order - 1)

    @pytest.mark.parametrize("mu", [0.2, 0.8, 5.0, 20.0])
    @pytest.mark.parametrize("rate", [0.01, 0.4])
    def test_of_the_pairs(self, mu, rate):
        """Far apart, too, where a profile underflows before the divergence has converged."""
        cases = (
            (sampled_curve(zeroed_without_replacement, mu, rate), (-mu, mu, 0.0)),
            (sampled_curve(replaced_in_poisson_batch, mu, rate), (0.0, mu, -mu)),
            (sampled_curve(replaced_without_replacement, mu, rate), (0.0, 2 * mu, 0.0)),
        )
        for curve, (base, joined, other) in cases:
            pair = [
                functools.partial(self.log_mixture, rate=rate, base=base, joined=place)
                for place in (joined, other)
            ]
            found = curve.rdp(self.ORDERS)
            for order, claim in zip(self.ORDERS.tolist(), found.tolist(), strict=True):
                exact = max(self.exact(order, mu, p, q) for p, q in (pair, pair[::-1]))
                assert exact <= claim * (1 + 1e-6)
                assert order > 2 or mu > 1 or exact > 0.2 * claim

    @pytest.mark.parametrize("mu", [0.2, 1.0, 3.0])
    def test_the_integral_is_that_of_dp_accounting(self, mu):
        """Of version 0.6 at whole orders only: between them it reports more."""
        event = dp_accounting.PoissonSampledDpEvent(0.05, dp_accounting.GaussianDpEvent(1 / mu))
        stock = dp_accounting.rdp.RdpAccountant(self.ORDERS.tolist()).compose(event)
        drawn = functools.partial(self.log_mixture, rate=0.05, base=0.0, joined=mu)
        profile = profiles.poisson(profiles.gaussian(mu), 0.05)
        nodes = np.append(0.0, np.geomspace(1e-6, mu * (mu / 2 + 36), 3000))
        for order, reported in zip(self.ORDERS.tolist(), stock.rdp.tolist(), strict=True):
            expected = self.exact(order, mu, drawn, stats.norm.logpdf)
            assert reported >= expected * (1 - 1e-6)
            assert reported == pytest.approx(expected, rel=1e-6) or order % 1 > 0
            directions = profile.forward(nodes), profile.backward(nodes)
            (found,) = _divergences(np.array([order]), nodes, *directions)
            assert expected < found < 1.02 * expected or (order * mu > 30 and found == math.inf)

    def test_large_epsilons_of_a_certain_record_are_numbers(self):
        """e^epsilon is infinite at 800, and the divergence there is far below all numbers."""
        whole = profiles.gaussian(30.0)
        epsilons = np.array([600.0, 700.0, 800.0, 2000.0])
        found = profiles.poisson(whole, 1.0).backward(epsilons)
        assert np.isfinite(found).all()
        assert (found >= whole.forward(epsilons)).all()

    def test_far_apart_the_coin_is_revealed(self):
        curve = sampled_curve(replaced_in_poisson_batch, 40.0, 0.1)
        found = curve.rdp(np.array([2.0, 300.0]))
        assert np.isfinite(found).all()
        assert found[0] == pytest.approx(6400 + math.log(0.1), rel=1e-3)


class TestComposition:
    """The larger ends: a grid of 1e-3 (one record replaced without replacement), else this package.

    The smaller ends of short runs: dp-accounting's composition of the pair on a line, cut into
    cells and rounded down.
    """

    @pytest.mark.parametrize(
        ("order", "relation", "long_run", "short_run"),
        [
            ("without_replacement", ONE, (12.353, 12.365), (7.180, 7.1874)),
            ("without_replacement", SPECIAL, (6.01, 6.0190), (3.2372, 3.5255)),
            ("poisson", ONE, (6.59, 6.6018), (5.1386, 5.1537)),
        ],
    )
    def test_reference_values(self, order, relation, long_run, short_run):
        long = probe_run(batch_order=order, loss=None)
        short = cyclic_run(
            batch_order=order, batch_size=10, dataset_size=100, num_steps=300, loss=None,
            noise_multiplier=3.0,
        )  # fmt: skip
        for event, (least, most) in zip((long, short), (long_run, short_run), strict=True):
            assert least < Composition().guarantee(event, relation).epsilon(1e-5) <= most

    def test_one_certain_record_is_a_gaussian(self):
        assert sampled_curve(zeroed_without_replacement, 0.7, 1.0).mu == 0.7
        assert sampled_curve(replaced_in_poisson_batch, 0.7, 1.0).mu == 1.4
        assert sampled_curve(replaced_in_poisson_batch, 0.7, 0.5).mu is None
        assert sampled_curve(zeroed_without_replacement, 0.7, 0.5).to_dpevent() is None

    def test_the_curve_of_a_step_is_the_profile_that_the_search_uses(self):
        for order, relation in itertools.product(
            ("poisson", "without_replacement"), (SPECIAL, ONE)
        ):
            event = cyclic_run(batch_order=order, loss=None)
            profile = step_profile(event, relation)(0.8)
            largest = np.maximum(profile.forward(EPSILONS), profile.backward(EPSILONS))
            curve = step_curve(event, relation, 0.8)
            found = [curve.delta(e) for e in EPSILONS.tolist()]
            np.testing.assert_allclose(found, largest, rtol=1e-3, atol=1e-12)

    def test_releasing_everything_is_accounted_under_every_relation(self):
        for relation in NeighboringRelation:
            event = cyclic_run(batch_order="poisson", loss=None)
            assert hsa.LastIterateAccountant(relation).compose(event).get_epsilon(1e-5) > 0
