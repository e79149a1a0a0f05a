"""Privacy curves: Gaussians, mixtures, Renyi-only curves and their compositions."""

import functools
import itertools
import math

import dp_accounting
import mpmath
import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from runs import cyclic_run
from scipy import integrate, stats

import hidden_state_accountants as hsa
from hidden_state_accountants.curves import composed
from hidden_state_accountants.curves.base import (
    GaussianCurve,
    GaussianMixtureCurve,
    RdpCurve,
    with_delta,
)
from hidden_state_accountants.curves.by_profile import replaced_without_replacement, sampled_curve
from hidden_state_accountants.curves.composed import compose_curves
from hidden_state_accountants.curves.gaussian import delta_from_mu, deltas_from_mu, epsilon_from_mu
from hidden_state_accountants.curves.standard import EventCurve

WEIGHTS, MUS = [0.5, 0.3, 0.2], [0.0, 0.7, 1.9]
EPSILONS = (0.0, 0.1, 1.0, 3.0, 6.0)


def mixture():
    return GaussianMixtureCurve(WEIGHTS, MUS)


def linear(rho):
    return RdpCurve(lambda orders: rho * orders)


def sampled():
    event = dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(1.5))
    return compose_curves([(EventCurve(event, NeighboringRelation.ADD_OR_REMOVE_ONE), 20)])


def reference_delta(mu, epsilon):
    """Balle & Wang 2018, Theorem 8, in as many digits as mpmath has."""
    mu, epsilon = mpmath.mpf(mu), mpmath.mpf(epsilon)
    a = mu / 2 - epsilon / mu

    def phi(x):
        return mpmath.erfc(-x / mpmath.sqrt(2)) / 2

    return phi(a) - mpmath.exp(epsilon) * phi(a - mu)


@pytest.mark.parametrize("mu", [1e-8, 1e-4, 1e-2, 0.5, 0.999, 1.0, 1.001, 3.0, 30.0, 1e3, 1e4])
class TestGaussian:
    @pytest.mark.parametrize("delta", [1e-300, 1e-100, 1e-30, 1e-12, 1e-5, 1e-2, 0.5, 0.999])
    def test_epsilon(self, mu, delta):
        epsilon = epsilon_from_mu(mu, delta)
        assert delta_from_mu(mu, epsilon) <= delta
        with mpmath.workdps(60):
            if epsilon == 0:
                assert reference_delta(mu, 0) <= delta * (1 + 1e-13)
                return
            # the exact root lies within 1e-13 relative: delta passes the target in between
            assert reference_delta(mu, epsilon * (1 + 1e-13)) <= delta
            assert reference_delta(mu, epsilon * (1 - 1e-13)) >= delta

    @pytest.mark.parametrize("quantile", [0.0, 0.5, 3.0, 20.0, 36.0])
    def test_delta(self, mu, quantile):
        epsilon = mu * (mu / 2 + quantile)
        with mpmath.workdps(60):
            exact = float(reference_delta(mu, epsilon))
        assert delta_from_mu(mu, epsilon) == pytest.approx(exact, rel=1e-10, abs=0)
        arrays = deltas_from_mu(np.array([0.0, mu, math.inf]), epsilon)
        np.testing.assert_allclose(arrays, [0.0, delta_from_mu(mu, epsilon), 1.0], rtol=1e-14)


def test_ends():
    assert epsilon_from_mu(0.0, 0.0) == epsilon_from_mu(0.0, 1e-9) == 0.0
    assert epsilon_from_mu(1.0, 0.0) == epsilon_from_mu(math.inf, 0.5) == math.inf
    assert epsilon_from_mu(1.0, 1.0) == 0.0
    assert delta_from_mu(0.0, 0.0) == delta_from_mu(1.0, math.inf) == 0.0
    assert delta_from_mu(math.inf, 5.0) == delta_from_mu(1e4, 0.0) == 1.0
    assert mixture().epsilon(mixture().delta(0.0)) == 0.0
    assert mixture().epsilon(0.0) == math.inf
    partly_public = GaussianMixtureCurve([0.99, 0.01], [1.0, math.inf])
    assert partly_public.epsilon(0.01) == math.inf
    assert partly_public.delta(math.inf) == 0.01
    assert 0 < partly_public.epsilon(0.02) < math.inf
    coarse = GaussianMixtureCurve([0.99, 0.01], [1.0, math.inf], smallest_delta=1e-20)
    assert compose_curves([(coarse, 2)]).delta(50.0) == pytest.approx(0.0199)
    assert np.isinf(partly_public.rdp(np.array([2.0]))).all()
    assert linear(0.0).epsilon(1e-5) == linear(1.0).delta(math.inf) == 0.0
    nothing = RdpCurve(lambda orders: np.full(orders.shape, math.inf))
    assert nothing.epsilon(1e-5) == math.inf
    assert nothing.delta(3.0) == 1.0


class TestMixture:
    @pytest.mark.parametrize("epsilon", EPSILONS)
    def test_delta_is_the_mean(self, epsilon):
        parts = zip(WEIGHTS, MUS, strict=True)
        expected = float(sum(w * reference_delta(m, epsilon) for w, m in parts if m))
        assert mixture().delta(epsilon) == pytest.approx(expected, rel=1e-12)

    @pytest.mark.parametrize("order", [1.01, 1.5, 2.0, 8.0])
    def test_renyi_against_the_integral_of_the_revealed_pair(self, order):
        def moment(m):
            def density(x):
                log_p, log_q = stats.norm.logpdf(x, m), stats.norm.logpdf(x)
                return math.exp(order * log_p + (1 - order) * log_q - log_top)

            log_top = (order - 1) * order * m**2 / 2
            return math.exp(log_top) * integrate.quad(density, order * m - 12, order * m + 12)[0]

        total = sum(w * moment(m) for w, m in zip(WEIGHTS, MUS, strict=True))
        expected = math.log(total) / (order - 1)
        assert mixture().rdp(np.array([order]))[0] == pytest.approx(expected, rel=1e-6)

    @pytest.mark.parametrize("delta", [1e-12, 1e-5, 1e-2, 0.1])
    def test_epsilon_inverts_delta_and_rounds_up(self, delta):
        epsilon = mixture().epsilon(delta)
        assert mixture().delta(epsilon) <= delta
        assert mixture().delta(epsilon * (1 - 1e-9)) > delta

    def test_what_is_nearly_one_gaussian(self):
        assert GaussianMixtureCurve([0.5, 0.5], [1.3, 1.3]).mu == 1.3
        assert GaussianMixtureCurve([1.0, 0.0], [0.1, math.inf]).mu == 0.1
        assert mixture().mu is None
        for parts in (3, 9, 11, 49):  # weights that round to more than one
            curve = GaussianMixtureCurve(np.full(parts, 1 / parts), np.full(parts, 1.0))
            assert curve.epsilon(delta_from_mu(1.0, 0.0)) <= 1e-9

    @pytest.mark.parametrize("weights", [[0.5, 0.2, 0.2], [1.2, -0.2, 0.0], [math.nan, 0.5, 0.5]])
    def test_weights_that_are_no_probabilities(self, weights):
        with pytest.raises(ValueError, match="weights"):
            GaussianMixtureCurve(weights, MUS)


class TestComposition:
    def test_gaussians_add_exactly(self):
        gaussian = GaussianCurve(0.8)
        curve = compose_curves([(GaussianCurve(0.3), 4), (gaussian, 1), (mixture(), 0)])
        assert curve.mu == pytest.approx(1.0, rel=1e-15)
        assert compose_curves([(gaussian, 1), (GaussianCurve(math.inf), 1)]).mu == math.inf
        assert compose_curves([(gaussian, 0)]).mu == 0

    @pytest.mark.parametrize("epsilon", EPSILONS)
    def test_two_mixtures_against_the_product_mixture(self, epsilon):
        curve = compose_curves([(mixture(), 2)])
        product = GaussianMixtureCurve(
            np.outer(WEIGHTS, WEIGHTS).ravel(), np.hypot.outer(MUS, MUS).ravel()
        )
        exact = product.delta(epsilon)
        assert exact * (1 - 1e-9) <= curve.delta(epsilon) <= exact * (1 + 1e-3) + 1e-9
        np.testing.assert_allclose(
            curve.rdp(np.array([2.0, 5.0])), product.rdp(np.array([2.0, 5.0]))
        )

    @pytest.mark.parametrize("delta", [1e-9, 1e-5])
    def test_renyi_curves_with_gaussians(self, delta):
        """rho * alpha composed with mu-GDP is the Renyi curve of a Gaussian."""
        curve = compose_curves([(linear(0.25), 2), (GaussianCurve(1.0), 1)])
        orders = np.array([1.5, 3.0])
        np.testing.assert_allclose(curve.rdp(orders), orders)
        exact = GaussianCurve(math.sqrt(2)).epsilon(delta)
        assert exact < curve.epsilon(delta) < 1.15 * exact

    def test_many_different_mixtures_are_replaced_by_few_that_dominate(self, monkeypatch):
        rng = np.random.default_rng(0)
        parts = [
            (GaussianMixtureCurve(np.full(20, 0.05), scale * np.sqrt(rng.random(20))), 1 + i % 2)
            for i, scale in enumerate(np.geomspace(0.1, 0.3, 90))
        ]
        monkeypatch.setattr(composed, "MOST", 90)
        exact = compose_curves(parts)
        monkeypatch.setattr(composed, "MOST", 12)
        few = compose_curves(parts)
        assert len(exact.parts) == 90
        assert len(few.parts) <= 12
        assert sum(count for _, count in few.parts) == 135
        for order in (2.0, 30.0):
            assert few.rdp(np.array([order]))[0] > exact.rdp(np.array([order]))[0]
        for delta in (1e-9, 1e-4):
            assert exact.epsilon(delta) < few.epsilon(delta) < 1.2 * exact.epsilon(delta)

    def test_extra_deltas_add_up(self):
        curve = compose_curves([(with_delta(mixture(), 1e-4), 3)])
        inner = compose_curves([(mixture(), 3)])
        assert curve.delta(2.0) == pytest.approx(inner.delta(2.0) + 3e-4)
        assert curve.epsilon(3e-4) == math.inf

    def test_what_is_given_several_times_is_composed_once(self):
        once, other = compose_curves([(mixture(), 1), (linear(0.1), 1)]), mixture()
        parts = [(once, 1), (other, 2), (once, 2), (sampled(), 3), (sampled(), 1), (other, 1)]
        curve = compose_curves(parts)
        assert sorted(count for _, count in curve.parts) == [3, 3, 3, 80]
        assert [n for part, n in curve.parts if isinstance(part, EventCurve)] == [4 * 20]
        orders = np.array([1.5, 3.0])
        apart = sum(count * part.rdp(orders) for part, count in parts)
        np.testing.assert_allclose(curve.rdp(orders), apart, rtol=1e-12)


# --- from 1e-20 to 0.5 ----------------------------------------------------------------------------

ADD_OR_REMOVE = NeighboringRelation.ADD_OR_REMOVE_ONE
REPLACE_ONE = NeighboringRelation.REPLACE_ONE
SMALL = GaussianMixtureCurve([0.9, 0.1], [0.0, 0.6])
DELTAS = (1e-20, 1e-14, 1e-13, 1e-12, 1e-9, 1e-5, 1e-2, 0.5)


def standard(event, count, relation=ADD_OR_REMOVE, mu=0.0):
    return compose_curves([(EventCurve(event, relation), count), (GaussianCurve(mu), 1)])


def poisson(rate, noise):
    return dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))


def guarantee_of(relation=NeighboringRelation.REPLACE_SPECIAL, **changes):
    return hsa.LastIterateAccountant(relation).compose(cyclic_run(**changes)).guarantee


MAKE = {
    "poisson": lambda: standard(poisson(0.01, 0.8), 2000),  # get_delta(11) was -3.2e-15
    "poisson and a gaussian": lambda: standard(poisson(0.1, 2.0), 30, mu=0.4),
    "laplace": lambda: standard(dp_accounting.LaplaceDpEvent(30.0), 50),
    "without replacement": lambda: standard(
        dp_accounting.SampledWithoutReplacementDpEvent(100, 5, dp_accounting.GaussianDpEvent(2.0)),
        20,
        REPLACE_ONE,
    ),
    "c_q": lambda: sampled_curve(replaced_without_replacement, 0.35, 0.05),
    "mixtures": lambda: compose_curves([(SMALL, 500)]),
    "mixtures and an event": lambda: compose_curves(
        [(SMALL, 40), (standard(poisson(0.05, 1.0), 100), 1)]
    ),
    "a probability": lambda: with_delta(compose_curves([(SMALL, 40)]), 1e-13),
    "divergences": lambda: compose_curves([(SMALL, 40), (RdpCurve(lambda a: 0.01 * a), 1)]),
    "reshuffled": lambda: guarantee_of(batch_order="reshuffled"),
    "theorem b": lambda: guarantee_of(batch_order="poisson"),
    "theorem b, fixed size": lambda: guarantee_of(batch_order="without_replacement"),
}
made = functools.cache(lambda name: MAKE[name]())


@pytest.mark.parametrize("name", MAKE)
class TestEveryCurve:
    def test_delta_lies_in_the_unit_interval_and_falls(self, name):
        epsilons = np.concatenate([np.linspace(0, 30, 13), [11.0, 50.0, 300.0, math.inf]])
        deltas = [made(name).delta(float(epsilon)) for epsilon in np.sort(epsilons)]
        assert all(0 <= delta <= 1 for delta in deltas)
        assert all(later <= earlier for earlier, later in itertools.pairwise(deltas))

    def test_epsilon_is_the_smallest_one_and_falls_with_delta(self, name):
        curve = made(name)
        epsilons = [curve.epsilon(delta) for delta in DELTAS]
        for earlier, later in itertools.pairwise(epsilons):
            assert later < earlier or earlier == later in (0, math.inf)
        for delta, epsilon in zip(DELTAS, epsilons, strict=True):
            if epsilon == math.inf:
                continue
            assert curve.delta(epsilon) <= delta * (1 + 1e-9)
            if epsilon > 0:
                assert curve.delta(epsilon * (1 - 1e-6)) > delta
                assert curve.epsilon(curve.delta(epsilon)) == pytest.approx(epsilon, rel=1e-6)


@pytest.mark.parametrize("noise", [0.01, 0.05, 0.08, 0.125])
@pytest.mark.parametrize(
    ("order", "relation"), [("poisson", "replace_one"), ("without_replacement", "replace_special")]
)
def test_one_step_at_any_delta_of_a_double(order, relation, noise):
    """Its law underflows within the composition: "cannot convert float NaN to integer"."""
    event = cyclic_run(
        batch_order=order, noise_multiplier=noise, num_steps=1, batch_size=250, dataset_size=25_000
    )
    accountant = hsa.LastIterateAccountant(relation).compose(event)
    deltas = [1e-5, 1e-100, 1e-200, 1e-250, 1e-280, 1e-300, 5e-324]
    epsilons = [accountant.get_epsilon(delta) for delta in deltas]
    assert epsilons == sorted(epsilons)
    assert epsilons[-1] < math.inf == accountant.get_epsilon(0.0)
    for delta, epsilon in zip(deltas, epsilons, strict=True):
        assert accountant.get_delta(epsilon) <= max(1.01 * delta, 2e-280)
        exact = 2 / noise * stats.norm.isf(delta / 0.01) + 2 / noise**2  # of a record that moves
        assert epsilon <= 1.1 * exact + 10
