"""Exact conversion, against 60-digit arithmetic."""

import math

import dp_accounting
import mpmath
import pytest
from dp_accounting import pld

from hidden_state_accountants.curves.gaussian import delta_from_mu, epsilon_from_mu

MUS = [1e-8, 1e-4, 1e-2, 0.5, 0.999, 1.0, 1.001, 3.0, 30.0, 1e3, 1e4]
DELTAS = [1e-300, 1e-100, 1e-30, 1e-12, 1e-5, 1e-2, 0.5, 0.999]


def reference_delta(mu, epsilon):
    mu, epsilon = mpmath.mpf(mu), mpmath.mpf(epsilon)
    a = mu / 2 - epsilon / mu

    def phi(x):
        return mpmath.erfc(-x / mpmath.sqrt(2)) / 2

    return phi(a) - mpmath.exp(epsilon) * phi(a - mu)


@pytest.mark.parametrize("mu", MUS)
@pytest.mark.parametrize("delta", DELTAS)
def test_epsilon(mu, delta):
    epsilon = epsilon_from_mu(mu, delta)
    assert delta_from_mu(mu, epsilon) <= delta
    with mpmath.workdps(60):
        if epsilon == 0:
            assert reference_delta(mu, 0) <= delta * (1 + 1e-13)
            return
        # the exact root lies within 1e-13 relative: delta passes the target in between
        assert reference_delta(mu, epsilon * (1 + 1e-13)) <= delta
        assert reference_delta(mu, epsilon * (1 - 1e-13)) >= delta


@pytest.mark.parametrize("mu", MUS)
@pytest.mark.parametrize("quantile", [0.0, 0.5, 3.0, 20.0, 36.0])
def test_delta(mu, quantile):
    epsilon = mu * (mu / 2 + quantile)
    with mpmath.workdps(60):
        exact = float(reference_delta(mu, epsilon))
    assert delta_from_mu(mu, epsilon) == pytest.approx(exact, rel=1e-10, abs=0)


def test_agrees_with_a_privacy_loss_distribution():
    stock = pld.PLDAccountant().compose(dp_accounting.GaussianDpEvent(2.0))
    assert epsilon_from_mu(0.5, 1e-5) == pytest.approx(stock.get_epsilon(1e-5), rel=1e-6)


def test_limits():
    assert epsilon_from_mu(0.0, 0.0) == epsilon_from_mu(0.0, 1e-9) == 0.0
    assert epsilon_from_mu(1.0, 0.0) == math.inf
    assert epsilon_from_mu(1.0, 1.0) == 0.0
    assert epsilon_from_mu(math.inf, 0.5) == math.inf
    assert delta_from_mu(0.0, 0.0) == delta_from_mu(1.0, math.inf) == 0.0
    assert delta_from_mu(math.inf, 5.0) == 1.0
    assert delta_from_mu(1e4, 0.0) == 1.0
