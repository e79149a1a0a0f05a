"""Delta and epsilon of every kind of curve, from 1e-20 to 0.5."""

import functools
import itertools
import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from runs import cyclic_run
from scipy import stats

import hidden_state_accountants as hsa
from hidden_state_accountants.curves.base import (
    GaussianCurve,
    GaussianMixtureCurve,
    RdpCurve,
    with_delta,
)
from hidden_state_accountants.curves.by_profile import replaced_without_replacement, sampled_curve
from hidden_state_accountants.curves.composed import compose_curves
from hidden_state_accountants.curves.standard import EventCurve

ADD_OR_REMOVE = NeighboringRelation.ADD_OR_REMOVE_ONE
REPLACE_ONE = NeighboringRelation.REPLACE_ONE
DELTAS = (1e-20, 1e-17, 1e-14, 3e-14, 1e-13, 1e-12, 1e-9, 1e-5, 1e-2, 0.5)


def standard(event, count, relation=ADD_OR_REMOVE, mu=0.0):
    return compose_curves([(EventCurve(event, relation), count), (GaussianCurve(mu), 1)])


def poisson(rate, noise):
    return dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))


def mixture():
    return GaussianMixtureCurve([0.9, 0.1], [0.0, 0.6])


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
    "mixtures": lambda: compose_curves([(mixture(), 500)]),
    "mixtures and an event": lambda: compose_curves(
        [(mixture(), 40), (standard(poisson(0.05, 1.0), 100), 1)]
    ),
    "a probability": lambda: with_delta(compose_curves([(mixture(), 40)]), 1e-13),
    "divergences": lambda: compose_curves([(mixture(), 40), (RdpCurve(lambda a: 0.01 * a), 1)]),
    "reshuffled": lambda: guarantee_of(batch_order="reshuffled"),
    "theorem b": lambda: guarantee_of(batch_order="poisson"),
    "theorem b, fixed size": lambda: guarantee_of(batch_order="without_replacement"),
}
made = functools.cache(lambda name: MAKE[name]())


@pytest.mark.parametrize("name", MAKE)
class TestEveryCurve:
    def test_delta_lies_in_the_unit_interval_and_falls(self, name):
        epsilons = np.concatenate([np.linspace(0, 30, 51), [11.0, 50.0, 300.0, math.inf]])
        deltas = [made(name).delta(float(epsilon)) for epsilon in np.sort(epsilons)]
        assert all(0 <= delta <= 1 for delta in deltas)
        assert all(later <= earlier for earlier, later in itertools.pairwise(deltas))

    def test_epsilon_falls_with_delta(self, name):
        epsilons = [made(name).epsilon(delta) for delta in DELTAS]
        assert all(epsilon >= 0 for epsilon in epsilons)
        for earlier, later in itertools.pairwise(epsilons):
            assert later < earlier or earlier == later in (0, math.inf)

    @pytest.mark.parametrize("delta", DELTAS)
    def test_delta_at_epsilon_is_at_most_delta(self, name, delta):
        epsilon = made(name).epsilon(delta)
        if epsilon < math.inf:
            assert made(name).delta(epsilon) <= delta * (1 + 1e-9)

    @pytest.mark.parametrize("delta", DELTAS)
    def test_epsilon_is_the_smallest_one(self, name, delta):
        epsilon = made(name).epsilon(delta)
        if 0 < epsilon < math.inf:
            assert made(name).delta(epsilon * (1 - 1e-6)) > delta
            again = made(name).epsilon(made(name).delta(epsilon))
            assert again == pytest.approx(epsilon, rel=1e-6)


def test_delta_of_a_poisson_run_is_not_negative():
    run = hsa.LastIterateDpEvent(
        noise_multiplier=0.8,
        learning_rate=0.1,
        clip_norm=1.0,
        batch_size=10,
        dataset_size=1000,
        num_steps=2000,
        batch_order="poisson",
    )
    accountant = hsa.LastIterateAccountant().compose(run)
    assert accountant.get_delta(11.0) == pytest.approx(4.42e-17, rel=1e-3, abs=0)
    assert accountant.get_delta(8.0) == pytest.approx(8.611e-12, rel=1e-3, abs=0)  # PLD: 8.549e-12


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
