"""Groups of records: exact laws, and the data sets between two that differ in several records."""

import math

import attrs
import dp_accounting
import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from hypothesis import example, given
from hypothesis import strategies as st
from runs import cyclic_run
from scipy import stats

import hidden_state_accountants as hsa
from hidden_state_accountants.curves.base import BestOfCurves, GaussianCurve
from hidden_state_accountants.curves.transformed import GroupCurve
from hidden_state_accountants.process.groups import run_of_groups
from hidden_state_accountants.process.noisy_process import noisy_process
from hidden_state_accountants.runs.statement import privacy_statement

ADD, SPECIAL, ONE = (
    NeighboringRelation.ADD_OR_REMOVE_ONE,
    NeighboringRelation.REPLACE_SPECIAL,
    NeighboringRelation.REPLACE_ONE,
)


def run(**changes):
    arguments = {
        "noise_multiplier": 1.0, "learning_rate": 1.0, "clip_norm": 1.0, "batch_size": 4,
        "dataset_size": 12, "num_steps": 5, "batch_order": "poisson",
        "loss": hsa.LossGeometry.linear(1.0),
    }  # fmt: skip
    return hsa.LastIterateDpEvent(**(arguments | changes))


def group(event, relation, size):
    return hsa.LastIterateAccountant(relation, group_size=size).compose(event).guarantee


class TestTheChain:
    @pytest.mark.parametrize("size", [2, 3, 7])
    @pytest.mark.parametrize("mu", [0.1, 1.0])
    def test_of_gaussian_tests_is_a_gaussian_test(self, mu, size):
        found, exact = GroupCurve(BestOfCurves(((GaussianCurve(mu), 0.0),)), size), size * mu
        for delta in (1e-9, 1e-5, 1e-2):
            epsilon = GaussianCurve(exact).epsilon(delta)
            assert epsilon <= found.epsilon(delta) <= 1.01 * epsilon
            assert found.delta(found.epsilon(delta)) <= delta

    def test_the_ends(self):
        nothing = GroupCurve(BestOfCurves(((GaussianCurve(0.0), 0.0),)), 3)
        assert nothing.delta(0.0) == nothing.delta(math.inf) == nothing.epsilon(1e-9) == 0
        failing = GroupCurve(BestOfCurves(((GaussianCurve(0.5), 1e-9),)), 3)
        assert failing.delta(math.inf) == 1.0
        assert failing.epsilon(1e-10) == math.inf
        for epsilon in (0.5, 3.0):  # a failure of a later test counts e^epsilon times
            assert failing.delta(epsilon) > GaussianCurve(1.5).delta(epsilon) + 3e-9


def exact_delta(shifts, weights, noise, epsilon):
    """The larger direction of a mixture of N(shift, noise^2) against N(0, noise^2)."""
    x = np.linspace(-9 * noise, float(shifts.max()) + 9 * noise, 20_001)
    mixture = weights @ stats.norm.pdf(x, shifts[:, None], noise)
    plain = stats.norm.pdf(x, 0, noise)
    factor = math.exp(epsilon)
    return max(
        float(np.maximum(a - factor * b, 0).sum()) * (x[1] - x[0])
        for a, b in ((mixture, plain), (plain, mixture))
    )


class TestExactLaws:
    """The last iterate of linear losses: all others have no gradient, the group's are the same."""

    @pytest.mark.parametrize(("size", "relation"), [(2, SPECIAL), (3, ADD)])
    @pytest.mark.parametrize(("steps", "noise"), [(1, 0.8), (8, 4.0)])
    def test_poisson(self, relation, size, steps, noise):
        event = run(num_steps=steps, noise_multiplier=noise)
        heads = np.arange(size * steps + 1)
        weights = stats.binom(size * steps, 1 / 3).pmf(heads)
        self.check(event, relation, size, heads / 4, weights)

    @pytest.mark.parametrize(("size", "steps", "noise"), [(2, 1, 0.8), (3, 8, 4.0)])
    def test_without_replacement(self, size, steps, noise):
        event = run(num_steps=steps, noise_multiplier=noise, batch_order="without_replacement")
        once = stats.hypergeom(12, size, 4).pmf(np.arange(size + 1))
        weights = np.ones(1)
        for _ in range(steps):
            weights = np.convolve(weights, once)
        self.check(event, SPECIAL, size, np.arange(len(weights)) / 4, weights)

    @staticmethod
    def check(event, relation, size, shifts, weights):
        claim = group(event, relation, size)
        noise = event.noise_multiplier / 4 * math.sqrt(event.num_steps)
        closest = 0.0
        for epsilon in (0.0, 0.2, 1.0, 2.0):
            exact = exact_delta(shifts, weights, noise, epsilon)
            assert exact <= claim.delta(epsilon) + 1e-7
            closest = max(closest, exact / claim.delta(epsilon))
        assert closest > 0.3  # the attack is no weak one
        alone = hsa.LastIterateAccountant(relation).compose(event).guarantee
        assert exact_delta(shifts, weights, noise, 0.2) > alone.delta(0.2)

    def test_a_person_with_a_record_in_every_place_of_a_full_batch(self):
        event = run(batch_order="full", batch_size=12)
        exact = 3 * math.sqrt(5)
        assert group(event, ONE, 3).mu == pytest.approx(2 * exact, rel=1e-12)
        for relation in (SPECIAL, ADD):
            assert group(event, relation, 3).mu == pytest.approx(exact, rel=1e-9)


class TestDataSetsBetween:
    @given(
        relation=st.sampled_from([SPECIAL, ONE]),
        size=st.integers(1, 6),
        curvatures=st.lists(st.floats(0.2, 1.0), min_size=4, max_size=4),
        changed=st.lists(st.floats(0.2, 1.0), min_size=4, max_size=4),
    )
    @example(relation=ONE, size=4, curvatures=[0.6] * 4, changed=[1.0] * 4)
    @example(relation=SPECIAL, size=5, curvatures=[0.2] * 4, changed=[0.2] * 4)
    def test_moduli(self, relation, size, curvatures, changed):
        """Quadratics in one dimension: a batch of four of a data set on the way."""
        loss = hsa.LossGeometry.strongly_convex(1.0, 0.2, lipschitz=1.0)
        event = run(batch_order="cyclic", loss=loss, learning_rate=1.9)
        claimed = noisy_process(run_of_groups(event, relation, size), relation).contraction[0]
        for between in range(min(size, 5)):  # one of two neighbours has at most size - 1 changes
            new = [0.0 if relation is SPECIAL else h for h in changed]
            batch = new[:between] + curvatures[between:]
            assert abs(1 - 1.9 * sum(batch) / 4) <= claimed + 1e-12

    @pytest.mark.parametrize("size", [2, 4])
    def test_full_batches_with_records_more_or_less(self, size):
        loss = hsa.LossGeometry.strongly_convex(1.0, 0.2, lipschitz=1.0)
        event = run(batch_order="full", batch_size=12, loss=loss, learning_rate=1.3)
        event = attrs.evolve(event, weight_decay=[0.1] * 5)
        found = noisy_process(run_of_groups(event, ADD, size), ADD)
        plain = noisy_process(event, ADD)
        np.testing.assert_allclose(found.sensitivity, plain.sensitivity)
        np.testing.assert_allclose(found.noise_std, plain.noise_std)
        np.testing.assert_allclose(found.drift_contraction, plain.drift_contraction)
        for records in range(12 - size, 12 + size):
            for curvature in (0.2, 1.0):
                step = abs(1 - 1.3 * 0.1 - 1.3 * curvature * records / 12)
                assert step <= found.contraction[0] + 1e-12
        terms = 2 * 12 + 2 * size - 1  # of the two largest neighbours
        assert found.drift[0] >= 1.3 * terms / 12 * (1 - 1e-12)

    @pytest.mark.parametrize("relation", [SPECIAL, ADD])
    def test_poisson_batches(self, relation):
        """Batches may be empty, and larger ones of a class with constant losses never do more."""
        event = run(loss=hsa.LossGeometry.strongly_convex(1.0, 0.2, lipschitz=1.0))
        found = run_of_groups(event, relation, 3)
        assert found.sampling_probability == event.sampling_probability
        assert found.dataset_size == (14 if relation is ADD else 12)
        assert found.batch_size == 4
        assert found.loss.strong_convexity == 0.0  # a batch may hold the changed records alone
        moduli = [noisy_process(found, relation, k).contraction[0] for k in range(1, 15)]
        assert (np.diff(moduli) >= 0).all()
        assert moduli[0] == 1.0


class TestAccountant:
    def test_says_so(self):
        found = group(run(), SPECIAL, 3)
        assert found.group_size == 3
        assert "REPLACE_SPECIAL, groups of 3" in repr(found)
        assert "REPLACE_SPECIAL, groups of 3" in found.explain()
        assert "They differ in up to 3 records." in found.statement()
        assert any("one person has at most 3 records" in a.text for a in found.assumptions)

    def test_standard_events_belong_to_the_group_as_well(self):
        gaussian = dp_accounting.GaussianDpEvent(2.0)
        for relation, mu in ((SPECIAL, 0.5), (ONE, 1.0)):
            accountant = hsa.LastIterateAccountant(relation, group_size=3).compose(gaussian)
            assert accountant.guarantee.mu == pytest.approx(3 * mu)
        laplace = dp_accounting.LaplaceDpEvent(2.0)
        accountant = hsa.LastIterateAccountant(SPECIAL, group_size=3).compose(laplace)
        assert 1.0 < accountant.get_epsilon(1e-9) <= 1.52

    def test_refusals(self):
        blocks = hsa.BlockCoordinateDpEvent(
            step_size=0.1, noise_variance=1.0, clip_norm=1.0, batch_size=4, dataset_size=12,
            num_epochs=2,
        )  # fmt: skip
        with pytest.raises(hsa.UnsupportedRunError, match="Use REPLACE_ONE"):
            group(blocks, SPECIAL, 2)
        assert group(blocks, ONE, 2).mu == pytest.approx(2 * group(blocks, ONE, 1).mu)
        with pytest.raises(ValueError, match="group_size"):
            hsa.LastIterateAccountant(group_size=0)


@pytest.mark.parametrize("order", ["cyclic", "shuffled_once", "reshuffled", "without_replacement"])
def test_batches_of_a_fixed_size_are_not_supported_where_records_are_added_or_removed(order):
    accountant = hsa.LastIterateAccountant(ADD, group_size=2)
    assert not accountant.supports(run(batch_order=order))
    assert accountant.supports(run(batch_order="poisson"))


class TestEverywhere:
    def test_statement(self):
        event = cyclic_run(noise_multiplier=8.0)
        statements = []
        for size in (1, 3):
            found = group(event, SPECIAL, size)
            statements.append(privacy_statement([event], found, 1e-5))
        plain, users = statements
        assert "REPLACE_SPECIAL, groups of 3" in users
        assert "one person has at most 3 records" in users
        assert "groups" not in plain
        released = [
            float(s.split("every iterate were released: ")[1].split()[0]) for s in statements
        ]
        assert released[1] > 3 * released[0]
