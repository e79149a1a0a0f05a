"""Groups of records: exact laws, and the data sets between two that differ in several records."""

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from hypothesis import example, given
from hypothesis import strategies as st
from scipy import stats

import hidden_state_accountants as hsa
from hidden_state_accountants.curves.base import BestOfCurves, GaussianCurve
from hidden_state_accountants.curves.transformed import GroupCurve
from hidden_state_accountants.process.groups import run_of_groups
from hidden_state_accountants.process.noisy_process import noisy_process
from hidden_state_accountants.runs.statement import privacy_statement

ADD, ONE, SPECIAL = NeighboringRelation
CURVED = hsa.LossGeometry.strongly_convex(1.0, 0.2, lipschitz=1.0)


def run(**changes):
    arguments = {
        "noise_multiplier": 1.0, "learning_rate": 1.0, "clip_norm": 1.0, "batch_size": 4,
        "dataset_size": 12, "num_steps": 5, "batch_order": "poisson",
        "loss": hsa.LossGeometry.linear(1.0),
    }  # fmt: skip
    return hsa.LastIterateDpEvent(**(arguments | changes))


def group(event, relation, size):
    return hsa.LastIterateAccountant(relation, group_size=size).compose(event).guarantee


@pytest.mark.parametrize("size", [2, 3, 7])
@pytest.mark.parametrize("mu", [0.1, 1.0])
def test_a_chain_of_gaussian_tests_is_a_gaussian_test(mu, size):
    found, exact = GroupCurve(BestOfCurves(((GaussianCurve(mu), 0.0),)), size), size * mu
    for delta in (1e-9, 1e-5, 1e-2):
        epsilon = GaussianCurve(exact).epsilon(delta)
        assert epsilon <= found.epsilon(delta) <= 1.01 * epsilon
        assert found.delta(found.epsilon(delta)) <= delta


def test_the_ends_of_a_chain():
    nothing = GroupCurve(BestOfCurves(((GaussianCurve(0.0), 0.0),)), 3)
    assert nothing.delta(0.0) == nothing.delta(math.inf) == nothing.epsilon(1e-9) == 0
    failing = GroupCurve(BestOfCurves(((GaussianCurve(0.5), 1e-9),)), 3)
    assert failing.delta(math.inf) == 1.0
    assert failing.epsilon(1e-10) == math.inf
    for epsilon in (0.5, 3.0):  # a failure of a later test counts e^epsilon times
        assert failing.delta(epsilon) > GaussianCurve(1.5).delta(epsilon) + 3e-9


def exact_delta(weights, noise, epsilon):
    """The larger direction of a mixture of N(k / 4, noise^2) against N(0, noise^2)."""
    shifts = np.arange(len(weights)) / 4
    x = np.linspace(-9 * noise, float(shifts.max()) + 9 * noise, 20_001)
    mixture = weights @ stats.norm.pdf(x, shifts[:, None], noise)
    plain = stats.norm.pdf(x, 0, noise)
    factor = math.exp(epsilon)
    return max(
        float(np.maximum(a - factor * b, 0).sum()) * (x[1] - x[0])
        for a, b in ((mixture, plain), (plain, mixture))
    )


@pytest.mark.parametrize(
    ("order", "relation", "size", "steps", "noise"),
    [
        ("poisson", SPECIAL, 2, 8, 4.0),
        ("poisson", ADD, 3, 1, 0.8),
        ("without_replacement", SPECIAL, 2, 1, 0.8),
        ("without_replacement", SPECIAL, 3, 8, 4.0),
    ],
)
def test_exact_laws_of_linear_losses(order, relation, size, steps, noise):
    """Of the last iterate: all others have no gradient, those of the group are the same."""
    event = run(batch_order=order, num_steps=steps, noise_multiplier=noise)
    once = stats.hypergeom(12, size, 4).pmf(np.arange(size + 1))
    if order == "poisson":
        once = stats.binom(size, 1 / 3).pmf(np.arange(size + 1))
    weights = np.ones(1)
    for _ in range(steps):
        weights = np.convolve(weights, once)
    claim, std = group(event, relation, size), noise / 4 * math.sqrt(steps)
    closest = 0.0
    for epsilon in (0.0, 0.2, 1.0, 2.0):
        exact = exact_delta(weights, std, epsilon)
        assert exact <= claim.delta(epsilon) + 1e-7
        closest = max(closest, exact / claim.delta(epsilon))
    assert closest > 0.3  # the attack is no weak one
    assert exact_delta(weights, std, 0.2) > group(event, relation, 1).delta(0.2)


@pytest.mark.parametrize(("relation", "factor"), [(ONE, 2), (SPECIAL, 1), (ADD, 1)])
def test_a_person_with_a_record_in_every_place_of_a_full_batch(relation, factor):
    event = run(batch_order="full", batch_size=12)
    exact = factor * 3 * math.sqrt(5)
    assert group(event, relation, 3).mu == pytest.approx(exact, rel=1e-9)


@given(
    relation=st.sampled_from([SPECIAL, ONE]),
    size=st.integers(1, 6),
    curvatures=st.lists(st.floats(0.2, 1.0), min_size=4, max_size=4),
    changed=st.lists(st.floats(0.2, 1.0), min_size=4, max_size=4),
)
@example(relation=ONE, size=4, curvatures=[0.6] * 4, changed=[1.0] * 4)
@example(relation=SPECIAL, size=5, curvatures=[0.2] * 4, changed=[0.2] * 4)
def test_moduli_of_data_sets_between(relation, size, curvatures, changed):
    """Quadratics in one dimension: a batch of four of a data set on the way."""
    event = run(batch_order="cyclic", loss=CURVED, learning_rate=1.9)
    claimed = noisy_process(run_of_groups(event, relation, size), relation).contraction[0]
    for between in range(min(size, 5)):  # one of two neighbours has at most size - 1 changes
        new = [0.0 if relation is SPECIAL else h for h in changed]
        batch = new[:between] + curvatures[between:]
        assert abs(1 - 1.9 * sum(batch) / 4) <= claimed + 1e-12


@pytest.mark.parametrize("size", [2, 4])
def test_full_batches_with_records_more_or_less(size):
    event = run(
        batch_order="full", batch_size=12, loss=CURVED, learning_rate=1.3,
        weight_decay=[0.1] * 4 + [0.2],
    )  # fmt: skip
    found = noisy_process(run_of_groups(event, ADD, size), ADD)
    plain = noisy_process(event, ADD)
    for name in ("sensitivity", "noise_std", "drift_contraction"):
        np.testing.assert_allclose(getattr(found, name), getattr(plain, name))
    for records in range(12 - size, 12 + size):
        for curvature in (0.2, 1.0):
            step = abs(1 - 1.3 * 0.1 - 1.3 * curvature * records / 12)
            assert step <= found.contraction[0] + 1e-12
    terms = 2 * 12 + 2 * size - 1  # of the two largest neighbours
    assert found.drift[0] >= 1.3 * terms / 12 * (1 - 1e-12)


@pytest.mark.parametrize(("relation", "records"), [(SPECIAL, 12), (ADD, 14)])
def test_poisson_batches(relation, records):
    """Batches may be empty, and larger ones of a class with constant losses never do more."""
    event = run(loss=CURVED)
    found = run_of_groups(event, relation, 3)
    assert found.sampling_probability == event.sampling_probability
    assert (found.dataset_size, found.batch_size) == (records, 4)
    assert found.loss.strong_convexity == 0.0  # a batch may hold the changed records alone
    moduli = [noisy_process(found, relation, k).contraction[0] for k in range(1, 15)]
    assert (np.diff(moduli) >= 0).all()
    assert moduli[0] == 1.0


def test_every_text_says_whose_privacy_it_is():
    event = run()
    plain, users = (group(event, SPECIAL, size) for size in (1, 3))
    said = [privacy_statement([event], found, 1e-5) for found in (plain, users)]
    assert users.group_size == 3
    for text in (users.explain(), said[1]):
        assert "REPLACE_SPECIAL, groups of 3" in text
        assert "one person has at most 3 records" in text
    assert "They differ in up to 3 records." in users.statement()
    assert "groups" not in said[0]
    released = [float(s.split("every iterate were released: ")[1].split()[0]) for s in said]
    assert released[1] > 3 * released[0]


def test_standard_events_belong_to_the_group_as_well():
    for relation, mu in ((SPECIAL, 0.5), (ONE, 1.0)):
        found = group(dp_accounting.GaussianDpEvent(2.0), relation, 3)
        assert found.mu == pytest.approx(3 * mu)
    assert 1.0 < group(dp_accounting.LaplaceDpEvent(2.0), SPECIAL, 3).epsilon(1e-9) <= 1.52


def test_refusals():
    blocks = hsa.BlockCoordinateDpEvent(
        step_size=0.1, noise_variance=1.0, clip_norm=1.0, batch_size=4, dataset_size=12,
        num_epochs=2,
    )  # fmt: skip
    with pytest.raises(hsa.UnsupportedRunError, match="Use REPLACE_ONE"):
        group(blocks, SPECIAL, 2)
    assert group(blocks, ONE, 2).mu == pytest.approx(2 * group(blocks, ONE, 1).mu)
    with pytest.raises(ValueError, match="guarantees for REPLACE_ONE, got one for REPLACE_SPECIAL"):
        hsa.compose_guarantees([group(run(), SPECIAL, 1)], ONE)
    with pytest.raises(ValueError, match="groups of one size"):
        hsa.compose_guarantees([group(blocks, ONE, size) for size in (1, 2)], ONE)
    with pytest.raises(ValueError, match="group_size"):
        hsa.LastIterateAccountant(group_size=0)
    accountant = hsa.LastIterateAccountant(ADD, group_size=2)
    assert accountant.supports(run(batch_order="poisson"))
    for order in ("cyclic", "shuffled_once", "reshuffled", "without_replacement"):
        assert not accountant.supports(run(batch_order=order))
