"""Runs on a cohort: exact laws, and what may not depend on who is in it."""

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting import NeighboringRelation, pld
from scipy import stats

import hidden_state_accountants as hsa

ADD, SPECIAL = NeighboringRelation.ADD_OR_REMOVE_ONE, NeighboringRelation.REPLACE_SPECIAL
Sampled = dp_accounting.PoissonSampledDpEvent


def run(**changes):
    arguments = {
        "noise_multiplier": 1.0, "learning_rate": 1.0, "clip_norm": 1.0, "batch_size": 4,
        "dataset_size": 12, "num_steps": 5, "batch_order": "poisson",
        "loss": hsa.LossGeometry.linear(1.0),
    }  # fmt: skip
    return hsa.LastIterateDpEvent(**(arguments | changes))


def composed(event, relation=SPECIAL, **options):
    return hsa.LastIterateAccountant(relation, **options).compose(event)


def exact_deltas(weights, noise, epsilon):
    """Mixtures of N(j/4, noise^2), j = 0, 1, ..., against the first of them; both directions."""
    shifts = np.arange(len(weights)) / 4
    x = np.linspace(-9 * noise, float(shifts.max()) + 9 * noise, 20_001)
    mixture, plain = (
        weights @ stats.norm.pdf(x, shifts[:, None], noise),
        stats.norm.pdf(x, 0, noise),
    )
    return [
        float(np.maximum(a - math.exp(epsilon) * b, 0).sum()) * (x[1] - x[0])
        for a, b in ((mixture, plain), (plain, mixture))
    ]


@pytest.mark.parametrize("rate", [0.1, 0.5])
@pytest.mark.parametrize("order", ["poisson", "without_replacement", "full"])
@pytest.mark.parametrize("relation", [SPECIAL, ADD])
def test_exact_laws(order, rate, relation):
    """A record of gradient 1 that joins the cohort, and then batches of it."""
    if relation is ADD and order == "without_replacement":
        pytest.skip("a batch of a fixed size cannot lose a record")
    event = run(batch_order=order, batch_size=12 if order == "full" else 4, noise_multiplier=1.5)
    share = 1.0 if order == "full" else 1 / 3
    weights = rate * stats.binom(5, share).pmf(np.arange(6))
    weights[0] += 1 - rate
    noise = 1.5 / 4 * math.sqrt(5)  # in quarters, whatever the divisor is
    claim = composed(Sampled(rate, event), relation)
    closest = 0.0
    for epsilon in (0.0, 0.1, 0.5, 1.5):
        exact = max(exact_deltas(weights, noise, epsilon))
        assert exact <= claim.get_delta(epsilon) + 1e-7
        closest = max(closest, exact / claim.get_delta(epsilon))
    assert closest > (0.99 if order == "full" else 0.5)
    assert claim.get_epsilon(1e-5) < composed(event, relation).get_epsilon(1e-5)


@pytest.mark.slow
def test_gaussian_runs_are_standard_events():
    event = run(batch_order="full", batch_size=12)
    mu = composed(event).guarantee.mu
    guarantee = composed(Sampled(0.2, event)).guarantee
    standard = guarantee.to_dpevent()
    assert standard == Sampled(0.2, dp_accounting.GaussianDpEvent(1 / mu))
    stock = pld.PLDAccountant(ADD).compose(standard).get_epsilon(1e-5)
    assert guarantee.epsilon(1e-5) == pytest.approx(stock, rel=1e-3)
    assert any("never published" in a.text and "cohort" in a.text for a in guarantee.assumptions)
    assert "cohort" in guarantee.theorem


def test_several_runs_on_one_cohort_and_cohorts_of_cohorts():
    full, twice = run(batch_order="full", batch_size=12), composed(run(), SPECIAL)
    several = dp_accounting.ComposedDpEvent([full, full, dp_accounting.GaussianDpEvent(1.0)])
    mu = math.sqrt(2 * composed(full).guarantee.mu ** 2 + 1)
    one = composed(Sampled(0.2, several))
    assert one.guarantee.to_dpevent().event.noise_multiplier == pytest.approx(1 / mu)
    again = dp_accounting.SelfComposedDpEvent(Sampled(0.2, full), 3)
    apart = composed(again)
    assert apart.get_epsilon(1e-5) < composed(full).compose(full, 2).get_epsilon(1e-5)
    nested = composed(Sampled(0.5, Sampled(0.4, run())))
    flat = composed(Sampled(0.2, run()))
    assert 0.99 <= nested.get_epsilon(1e-3) / flat.get_epsilon(1e-3) <= 1.3
    with_others = composed(Sampled(0.2, run())).compose(run())
    assert twice.get_epsilon(1e-5) < with_others.get_epsilon(1e-5) < 10
    person = composed(Sampled(0.2, run()), group_size=2)
    assert person.get_epsilon(1e-3) > flat.get_epsilon(1e-3)


@pytest.mark.parametrize("order", ["cyclic", "poisson", "full"])
def test_few_records_may_be_curved(order):
    """Nearly nobody may be in the cohort: strong convexity of the mean loss is lost."""
    kinds = [
        hsa.LossGeometry.strongly_convex(0.5, 0.5, lipschitz=1.0),
        hsa.LossGeometry.convex(0.5, 1.0),
    ]
    size = 12 if order == "full" else 4
    curved, plain = (
        composed(Sampled(0.5, run(loss=loss, batch_order=order, batch_size=size, num_steps=40)))
        for loss in kinds
    )
    assert curved.get_epsilon(1e-5) == plain.get_epsilon(1e-5)


def test_the_ends():
    assert composed(Sampled(0.0, run())).get_epsilon(1e-5) == 0
    assert composed(Sampled(1.0, run())).get_epsilon(1e-5) == composed(run()).get_epsilon(1e-5)
    assert composed(Sampled(0.5, run(noise_multiplier=0.0))).get_epsilon(1e-5) == math.inf


def test_refusals():
    with pytest.raises(hsa.UnsupportedRunError, match="Use REPLACE_SPECIAL or ADD_OR_REMOVE_ONE"):
        composed(Sampled(0.5, run()), NeighboringRelation.REPLACE_ONE)
    with pytest.raises(hsa.UnsupportedRunError, match="sampling_probability"):
        composed(Sampled(1.5, run()))
    blocks = hsa.BlockCoordinateDpEvent(
        step_size=0.1, noise_variance=1.0, clip_norm=1.0, batch_size=4, dataset_size=12,
        num_epochs=2,
    )  # fmt: skip
    with pytest.raises(hsa.UnsupportedRunError, match="sampled cohort"):
        composed(Sampled(0.5, blocks))
