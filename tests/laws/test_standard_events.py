"""Standard events beside ours: never less than the stock accountants owe, on both versions."""

import functools
import math

import attrs
import dp_accounting
import numpy as np
import pytest
from dp_accounting import NeighboringRelation, dp_event, rdp
from runs import cyclic_run
from scipy import integrate, stats

import hidden_state_accountants as hsa

ADD_OR_REMOVE = NeighboringRelation.ADD_OR_REMOVE_ONE
REPLACE_ONE = NeighboringRelation.REPLACE_ONE
REPLACE_SPECIAL = NeighboringRelation.REPLACE_SPECIAL
RELATIONS = list(NeighboringRelation)


def gaussian(noise=4.0):
    return dp_accounting.GaussianDpEvent(noise)


def optional(name, *arguments):
    """An event that exists from some later dp-accounting version on."""
    cls = getattr(dp_event, name, None)
    return cls(*arguments) if cls else None


EVENTS = {
    "gaussian": gaussian(),
    "laplace": dp_accounting.LaplaceDpEvent(9.0),
    "poisson": dp_accounting.PoissonSampledDpEvent(0.1, gaussian()),
    "poisson_laplace": dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.LaplaceDpEvent(9.0)),
    "poisson_composed": dp_accounting.PoissonSampledDpEvent(
        0.1, dp_accounting.SelfComposedDpEvent(gaussian(), 3)
    ),
    "without_replacement": dp_accounting.SampledWithoutReplacementDpEvent(100, 10, gaussian()),
    "tree": dp_accounting.SingleEpochTreeAggregationDpEvent(9.0, [8]),
    "repeat_and_select": dp_event.RepeatAndSelectDpEvent(gaussian(), 2.0, 1.0),
    "randomized_response": optional("RandomizedResponseDpEvent", 0.8, 2),
    "mixture": optional("MixtureOfGaussiansDpEvent", 40.0, [0.0, 1.0], [0.5, 0.5]),
    "truncated": optional("TruncatedSubsampledGaussianDpEvent", 100, 0.1, 20, 20.0),
    "zcdp": optional("ZCDpEvent", 0.02),
}


# A number of records that is fixed has no record more; stock accountants do not know the others, or
# do not agree on them.
REFUSED = {
    ("without_replacement", ADD_OR_REMOVE),
    ("tree", ADD_OR_REMOVE),
    ("tree", REPLACE_ONE),
    ("repeat_and_select", REPLACE_ONE),
}


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("name", EVENTS)
def test_count_law(name, relation):
    """`count` copies at once are never less than one after the other, and more than one."""
    event = EVENTS[name]
    if event is None:
        pytest.skip("this version of dp-accounting has no such event")
    accountant = hsa.LastIterateAccountant(relation)
    if (name, relation) in REFUSED or not accountant.supports(event):
        with pytest.raises(hsa.UnsupportedRunError):
            accountant.compose(event)
        return
    once = hsa.LastIterateAccountant(relation).compose(event).get_epsilon(1e-5)
    counted = hsa.LastIterateAccountant(relation).compose(event, 6).get_epsilon(1e-5)
    nested = (
        hsa.LastIterateAccountant(relation)
        .compose(dp_accounting.SelfComposedDpEvent(event, 6))
        .get_epsilon(1e-5)
    )
    single = hsa.LastIterateAccountant(relation)
    for _ in range(6):
        single.compose(event)
    assert counted == pytest.approx(nested, rel=1e-9)
    assert counted >= single.get_epsilon(1e-5) * (1 - 1e-3)
    assert counted > once * 1.5


ZERO_NOISE = [
    gaussian(0.0),
    dp_accounting.LaplaceDpEvent(0.0),
    dp_accounting.PoissonSampledDpEvent(0.1, gaussian(0.0)),
    dp_accounting.SampledWithoutReplacementDpEvent(100, 10, gaussian(0.0)),
    dp_accounting.SelfComposedDpEvent(dp_accounting.LaplaceDpEvent(0.0), 3),
]


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("event", ZERO_NOISE, ids=str)
def test_zero_noise_is_infinity(event, relation):
    accountant = hsa.LastIterateAccountant(relation).compose(event)
    assert accountant.get_epsilon(1e-5) == math.inf
    assert accountant.get_delta(10.0) == 1.0


FIXED_SIZE = dp_accounting.SampledWithoutReplacementDpEvent(1000, 100, gaussian(1.0))


@functools.cache
def fixed_size(relation):
    return hsa.LastIterateAccountant(relation).compose(FIXED_SIZE, 3)


class TestBatchesOfFixedSize:
    """Three steps with noise multiplier 1 on a tenth of the records."""

    @pytest.mark.parametrize(
        ("epsilon", "relation"), [(0.0, REPLACE_ONE), (0.5, REPLACE_SPECIAL), (1.0, REPLACE_ONE)]
    )
    def test_between_attacks_and_renyi_divergences(self, epsilon, relation):
        """The record contributes 1, all others 0 or -1, its replacement -1 or, as zeroed, 0."""
        grid, cubes = np.linspace(-8, 9, 171), {}
        for shift in (-1.0, 0.0, 1.0, 2.0):  # of the record against the others
            law = 0.9 * stats.norm.pdf(grid) + 0.1 * stats.norm.pdf(grid - shift)
            cubes[shift] = np.einsum("i,j,k->ijk", law, law, law) * 0.1**3
        zeroed = ((1.0, 0.0), (2.0, 1.0))
        replaced = (*zeroed, (1.0, -1.0), (2.0, 0.0))
        attack = max(
            np.maximum(cubes[one] - math.exp(epsilon) * cubes[other], 0).sum()
            for pair in (zeroed if relation is REPLACE_SPECIAL else replaced)
            for one, other in (pair, pair[::-1])
        )
        halved = dp_accounting.SampledWithoutReplacementDpEvent(1000, 100, gaussian(0.5))
        stock = rdp.RdpAccountant(neighboring_relation=REPLACE_ONE).compose(halved, 3)
        found = fixed_size(relation).get_delta(epsilon)
        assert attack <= found < 1.2 * attack  # at 0 and REPLACE_ONE 0.154, and 0.893 was reported
        assert found < 0.2 * stock.get_delta(epsilon)


class TestPairsInWhichBothDataSetsMove:
    """No stock accountant knows them; 6.02 was 12.36, and 6.60 was refused."""

    @pytest.mark.parametrize(
        ("order", "relation", "limit"),
        [("without_replacement", REPLACE_SPECIAL, 6.0190), ("poisson", REPLACE_ONE, 6.6018)],
    )
    def test_the_same_as_the_run_with_all_iterates_released(self, order, relation, limit):
        sampled = {
            "without_replacement": dp_accounting.SampledWithoutReplacementDpEvent(
                50_000, 500, gaussian(2.0)
            ),
            "poisson": dp_accounting.PoissonSampledDpEvent(0.01, gaussian(2.0)),
        }[order]
        run = cyclic_run(
            batch_order=order, loss=None, batch_size=500, dataset_size=50_000, num_steps=20_000,
            noise_multiplier=2.0,
        )  # fmt: skip
        standard = hsa.LastIterateAccountant(relation).compose(sampled, 20_000).get_epsilon(1e-5)
        ours = hsa.LastIterateAccountant(relation).compose(run).get_epsilon(1e-5)
        assert 0.999 * limit < standard <= limit
        assert standard == pytest.approx(ours, rel=1e-9)

    def test_a_zeroed_record_beside_one_that_is_removed(self):
        """Both pairs are ordered: the data set with the record comes first in each of them."""
        poisson, fixed = (EVENTS[name] for name in ("poisson", "without_replacement"))
        both = hsa.LastIterateAccountant(REPLACE_SPECIAL).compose(poisson, 50).compose(fixed, 50)
        x = np.linspace(-60, 60, 24_001)  # the sum of all steps: others at 0, the record at 1
        joined = stats.binom.pmf(np.arange(101), 100, 0.1)
        law = sum(p * stats.norm.pdf(x, k, 40.0) for k, p in enumerate(joined))
        pair = law, stats.norm.pdf(x, 0.0, 40.0)
        for epsilon in (0.0, 0.1, 0.3):
            exact = max(
                np.maximum(p - math.exp(epsilon) * q, 0).sum() * (x[1] - x[0])
                for p, q in (pair, pair[::-1])
            )
            assert 0 < exact <= both.get_delta(epsilon)
        larger = hsa.LastIterateAccountant(REPLACE_SPECIAL).compose(fixed, 100)
        assert both.get_epsilon(1e-5) < larger.get_epsilon(1e-5)

    def test_divergences_of_steps_add_up(self):
        """Also beside a tree, which has no privacy loss in some versions of dp-accounting."""
        tree, event, orders = EVENTS["tree"], EVENTS["without_replacement"], np.array([2.0, 8.0])
        one, six, alone = (
            hsa.LastIterateAccountant(REPLACE_SPECIAL).compose(*part).guarantee
            for part in ((event, 1), (event, 6), (tree, 1))
        )
        rate = event.sample_size / event.source_dataset_size
        mixture = math.log1p(rate**2 * math.expm1(event.event.noise_multiplier**-2))
        assert mixture <= one.rdp(orders)[0] * (1 + 1e-9)
        np.testing.assert_allclose(six.rdp(orders), 6 * one.rdp(orders))
        both = hsa.LastIterateAccountant(REPLACE_SPECIAL).compose(tree).compose(event, 6)
        if alone.curve.privacy_losses() is None:
            expected = alone.rdp(orders) + six.rdp(orders)
            np.testing.assert_allclose(both.guarantee.rdp(orders), expected)


class TestCappedPoissonBatches:
    """A cap lets a record displace another one: composition of the uncapped run is not enough."""

    def test_the_extra_delta_is_the_probability_that_the_cap_acts(self):
        event = cyclic_run(batch_order="poisson", loss=None, max_batch_size=12)
        without_cap = attrs.evolve(event, max_batch_size=None)
        for relation, others in ((ADD_OR_REMOVE, 20), (REPLACE_SPECIAL, 19)):
            # n of the larger data set, minus the record; P(at least 12 others)
            tail = 24 * stats.binom.sf(11, others, 0.25)
            for named in (relation, relation.name.lower()):
                assert event.cap_delta(named) == pytest.approx(tail)
            free = hsa.LastIterateAccountant(relation).compose(without_cap)
            capped = hsa.LastIterateAccountant(relation).compose(event)
            assert capped.get_delta(1.0) == pytest.approx(free.get_delta(1.0) + tail)
            assert capped.get_epsilon(tail + 1e-6) == pytest.approx(free.get_epsilon(1e-6))
            assert capped.get_epsilon(tail / 2) == math.inf
            assert capped.guarantee.mu is None
            assert np.isinf(capped.guarantee.rdp([2.0])).all()
            with pytest.raises(ValueError, match="No standard event"):
                capped.guarantee.to_dpevent()
            twice = hsa.LastIterateAccountant(relation).compose(event, 2)
            assert twice.get_epsilon(1.9 * tail) == math.inf

    def test_displacement(self):
        """Everybody else has gradient +C, the record -C: N(0) against (1-p) N(0) + p N(2)."""
        event = cyclic_run(
            batch_order="poisson", noise_multiplier=1.0, batch_size=100, dataset_size=100,
            num_steps=1, max_batch_size=50,
        )  # fmt: skip
        ours = hsa.LastIterateAccountant(ADD_OR_REMOVE).compose(event)
        epsilon, p = 4.377, 50 / 101
        grid = np.linspace(-12, 14, 400_001)
        base = stats.norm.pdf(grid)
        mixture = (1 - p) * base + p * stats.norm.pdf(grid - 2)
        exact = integrate.trapezoid(np.maximum(mixture - math.exp(epsilon) * base, 0), grid)
        assert 0.01 < exact <= ours.get_delta(epsilon)


def test_shifts_that_underflow_are_not_forgotten():
    tiny, huge = 1e-200, 1e200
    assert hsa.shifted_gdp_mu([1.0, 0.0], [huge, tiny], [huge, tiny]) >= 1.0
    assert hsa.shifted_gdp_mu([1.0, 1e-300], [huge, tiny], [huge, tiny]) >= math.sqrt(2) * (
        1 - 1e-9
    )
    assert hsa.shifted_gdp_mu([1.0], [0.0], [huge]) == 0.0
    assert hsa.shifted_gdp_mu([1.0], [tiny], [1.0]) == pytest.approx(tiny, rel=1e-9)


def test_enormous_data_sets_cost_no_memory():
    event = cyclic_run(batch_size=1, dataset_size=10**12, num_steps=3)
    assert hsa.LastIterateAccountant().compose(event).guarantee.mu == pytest.approx(0.5)
