"""Two published formulas that single runs refute; the attacks against independent computations."""

import math
import warnings

import attrs
import numpy as np
import pytest
from bounded_domain import _U, BoundedDomain, _Run
from dp_accounting import NeighboringRelation
from grid_oracle import GridOracle
from interval_chain import IntervalChain
from scipy import special, stats
from without_replacement_direction import (
    WithoutReplacementDirection,
)

import hidden_state_accountants as hsa
from hidden_state_accountants.curves.gaussian import delta_from_mu
from hidden_state_accountants.process.noisy_process import clipped_update_lipschitz

REPLACE_ONE = NeighboringRelation.REPLACE_ONE
REPLACE_SPECIAL = NeighboringRelation.REPLACE_SPECIAL
ADD_OR_REMOVE_ONE = NeighboringRelation.ADD_OR_REMOVE_ONE


def quiet(line):
    del line


def evidence(attack, event, relation=REPLACE_ONE):
    return attack.evidence(event, relation, quiet)


# --- Chien & Li 2024, Theorem 3.12 ----------------------------------------------------------------


def sampled(sigma=1.0, steps=1, batch_size=10, **changes):
    """Sigma is the noise in units of the largest change, 2 C."""
    arguments = {
        "noise_multiplier": 2 * sigma,
        "learning_rate": 0.1,
        "clip_norm": 3.0,
        "batch_size": batch_size,
        "dataset_size": 100,
        "num_steps": steps,
        "batch_order": hsa.BatchOrder.WITHOUT_REPLACEMENT,
        "loss": hsa.LossGeometry.smooth(smoothness=1.0),
    }
    return hsa.LastIterateDpEvent(**arguments | changes)


def sampled_gaussian(q, sigma, order):
    """D(N0 || mixture), as in Definition 3.11, and D(mixture || N0), by the trapezoid rule."""
    x = np.linspace(-40 * sigma, 40 * sigma + 2 * order, 200_001)
    one = stats.norm.logpdf(x, 0, sigma)
    mixture = np.logaddexp(np.log1p(-q) + one, np.log(q) + stats.norm.logpdf(x, 1, sigma))
    return [
        float(special.logsumexp(order * a + (1 - order) * b) + math.log(x[1] - x[0])) / (order - 1)
        for a, b in ((one, mixture), (mixture, one))
    ]


@pytest.mark.parametrize(
    ("sigma", "order", "ratio"),
    [(1, 2, 1.485), (1, 4, 3.04), (1, 8, 46.2), (0.5, 2, 9.604), (0.5, 4, 86.1), (0.5, 8, 195.1)],
)
def test_the_stated_direction_is_the_smaller_one(sigma, order, ratio):
    published, truth = sampled_gaussian(0.1, sigma, order)
    shown = evidence(WithoutReplacementDirection(), sampled(sigma)).renyi(order)
    assert shown == pytest.approx(truth, rel=1e-9)
    assert shown / published == pytest.approx(ratio, rel=2e-3)


def test_the_published_theorem_312_is_refuted():
    event = sampled(1.0)
    accountant = hsa.ChienLiAccountant(REPLACE_ONE, analysis="published")
    with pytest.warns(UserWarning, match="direction"):
        accountant.compose(event)
    claim = accountant.guarantee.rdp(np.array([4.0]))[0]
    assert claim == pytest.approx(sampled_gaussian(0.1, 1.0, 4)[0], rel=1e-6)
    assert evidence(WithoutReplacementDirection(), event).renyi(4.0) > 3 * claim


@pytest.mark.parametrize("relation", [REPLACE_ONE, REPLACE_SPECIAL])
@pytest.mark.parametrize("steps", [1, 3])
def test_mixtures_by_enumeration_of_the_batches(relation, steps):
    """The law of the last iterate of an actual run: 4 records, all pairs of batches of 2."""
    event = sampled(0.4, steps, batch_size=2, dataset_size=4)
    shown = evidence(WithoutReplacementDirection(), event, relation)
    bound, std = 3.0, 2 * 0.4 * 3.0 * math.sqrt(steps)
    neighbour = -bound if relation is REPLACE_ONE else 0.0
    x = np.linspace(-70, 70, 40_001)
    best_delta, best_renyi = 0.0, 0.0
    for others in (0.0, bound, -bound):
        densities = []
        for record in (bound, neighbour):
            sums = {0.0: 1.0}
            for _ in range(steps):
                following = {}
                for total, p in sums.items():
                    for own in (record + others, 2 * others):  # half of the pairs hold the record
                        key = round(total + own, 9)
                        following[key] = following.get(key, 0.0) + p / 2
                sums = following
            densities.append(sum(p * stats.norm.pdf(x, s, std) for s, p in sums.items()))
        for a, b in (densities, densities[::-1]):
            excess = np.maximum(a - math.exp(0.7) * b, 0).sum() * (x[1] - x[0])
            best_delta = max(best_delta, float(excess))
            best_renyi = max(best_renyi, math.log(np.sum(a**2 / b) * (x[1] - x[0])))
    assert shown.delta(0.7) == pytest.approx(best_delta, rel=1e-4)
    assert shown.renyi(2.0) == pytest.approx(best_renyi, rel=1e-6)


def test_every_batch_holds_the_record():
    """q = 1 is an ordinary composition of Gaussians of sensitivity 2 C."""
    shown = evidence(WithoutReplacementDirection(), sampled(1.5, steps=9, batch_size=100))
    assert shown.delta(1.0) == pytest.approx(delta_from_mu(3 / 1.5, 1.0), rel=1e-9)
    assert shown.renyi(3.0) == pytest.approx(3 * 4 / 2, rel=1e-9)


# --- Kong & Ribero 2025, Theorem 2.2 --------------------------------------------------------------


def bounded(length, pull, *, batch_size=4001, steps=8, **changes):
    """A domain of diameter 1, eta M = 1/2, noise 1/length on the iterate, 2 eta C/b = pull."""
    eta = 0.5
    clip = pull * batch_size / (2 * eta)
    arguments = {
        "noise_multiplier": batch_size / (length * eta * clip),
        "learning_rate": eta,
        "clip_norm": clip,
        "batch_size": batch_size,
        "dataset_size": batch_size,
        "num_steps": steps,
        "batch_order": hsa.BatchOrder.FULL,
        "loss": hsa.LossGeometry.convex(smoothness=1.0),
        "domain_diameter": 1.0,
    }
    return hsa.LastIterateDpEvent(**arguments | changes)


def kong_ribero(order, length, pull, factor):
    """Theorem 2.2 (16) with `factor` in the place of L_lambda."""
    return order / 2 * ((factor + pull) * length) ** 2


@pytest.mark.parametrize(
    ("length", "pull", "batch_size", "ratio"),
    [(40, 0.75, 4001, 1.022), (40, 0.75, 101, 1.020), (100, 0.7, 4001, 1.050)],
)
def test_the_published_constant_is_too_small(length, pull, batch_size, ratio):
    event = bounded(length, pull, batch_size=batch_size)
    shown = evidence(BoundedDomain(), event).renyi(1.01)
    # L_lambda = 1 for convex losses, and eta = 1/2 <= 1/(2 M)
    assert shown / kong_ribero(1.01, length, pull, 1.0) == pytest.approx(ratio, abs=2e-3)
    assert shown < kong_ribero(1.01, length, pull, clipped_update_lipschitz(0.5, 1.0))
    assert shown < kong_ribero(1.01, length, pull, math.sqrt(2))


def test_the_published_theorem_22_is_refuted_and_the_sound_one_is_not():
    event, claims = bounded(40, 0.75), {}
    for analysis in ("published", "sound"):
        accountant = hsa.KongRiberoAccountant(REPLACE_ONE, analysis=analysis)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            accountant.compose(event)
        claims[analysis] = accountant.guarantee.rdp(np.array([1.01]))[0]
    assert claims["published"] == pytest.approx(kong_ribero(1.01, 40, 0.75, 1.0))
    shown = evidence(BoundedDomain(), event).renyi(1.01)
    assert 1.02 * claims["published"] < shown < claims["sound"]


@pytest.mark.parametrize("relation", [REPLACE_ONE, REPLACE_SPECIAL, ADD_OR_REMOVE_ONE])
@pytest.mark.parametrize(("length", "pull", "steps"), [(4, 0.7, 8), (2, 3.0, 1), (30, 0.2, 20)])
def test_theorem_a_stays_above(relation, length, pull, steps):
    event = bounded(length, pull, batch_size=51, steps=steps)
    shown = evidence(BoundedDomain(), event, relation)
    accountant = hsa.LastIterateAccountant(relation)
    accountant.compose(event)
    epsilons = np.linspace(0, 8, 17)
    assert all(shown.delta(e) <= accountant.guarantee.delta(e) for e in epsilons)
    orders = np.array([1.01, 1.5, 4.0])
    divergences = np.array([shown.renyi(a) for a in orders])
    assert (divergences <= accountant.guarantee.rdp(orders)).all()
    assert (divergences > 0.02 * accountant.guarantee.rdp(orders)).all()


@pytest.mark.parametrize("overshoot", [None, 0.0, 1.0])
def test_the_recursion_is_that_of_clipped_gradients_in_the_plane(overshoot):
    """Simulation in the plane, with per-example clipping and projection on the segment."""
    event = bounded(6.0, 0.75, batch_size=21, steps=5)
    run = _Run(event, REPLACE_ONE)
    common = run.common_records(overshoot)
    assert sum(number for number, _ in common) <= event.batch_size - 1
    tests = run.tests(overshoot)
    rng, clip, runs = np.random.default_rng(0), event.clip_norm, 40_000
    bounds = []
    for pull in run.pulls:
        start = 0.0 if overshoot is None else -event.domain_diameter / 2
        z = np.full((runs, 2), start) * _U
        for _ in range(event.num_steps):
            own = -pull * event.batch_size / event.learning_rate * _U
            total = np.zeros_like(z) + own
            assert np.linalg.norm(own) <= clip * (1 + 1e-12)
            for number, gradient in common:
                values = gradient(z)
                norm = np.linalg.norm(values, axis=1, keepdims=True)
                total += number * values * np.minimum(1, clip / norm)
            noise = event.noise_multiplier * clip * rng.normal(size=z.shape)
            z = z - event.learning_rate / event.batch_size * (total + noise)
            along = np.clip(z @ _U, -event.domain_diameter / 2, event.domain_diameter / 2)
            z = along[:, None] * _U
        x = np.sort(z @ _U) / run.std
        bounds.append(x)
    nodes = IntervalChain(event.domain_diameter / run.std, event.num_steps).nodes
    for index in (0, len(nodes) // 4, len(nodes) // 2):
        at_most = [np.searchsorted(x, nodes[index] + 1e-9) / runs for x in bounds]
        p, q = math.exp(tests.log_p[index]), math.exp(tests.log_q[index])
        tolerance = 5 * 0.5 / math.sqrt(runs)
        assert p - tolerance <= at_most[0] <= p + tolerance + 0.02  # rounding loses a little
        assert at_most[1] <= q + tolerance
        assert q <= at_most[1] + tolerance + 0.02


def test_the_losses_are_convex_smooth_and_expanding():
    run = _Run(bounded(40, 0.75), REPLACE_ONE)
    rng = np.random.default_rng(0)
    common = run.common_records(1.0)
    for _, gradient in common:
        x, y = rng.normal(size=(2, 200, 2))
        change, step = gradient(x) - gradient(y), x - y
        inner = (change * step).sum(axis=1)
        assert (inner >= -1e-9).all()
        assert (inner * 1.0 >= (change**2).sum(axis=1) * (1 - 1e-9) - 1e-9).all()  # 1/M-cocoercive
    ends = run.step(np.array([-0.5, 0.5]), common)
    assert 1.0615 < ends[1] - ends[0] <= 1.0625
    assert 1.0625 < clipped_update_lipschitz(0.5, 1.0)


@pytest.mark.parametrize("pull", [0.3, 2.0])
def test_threshold_tests_against_the_grid_oracle(pull):
    """Linear losses on an interval: an independent propagation of the same laws."""
    event = bounded(3.0, pull, batch_size=1, steps=4, loss=hsa.LossGeometry.linear(pull))
    gradient = pull  # eta C = pull / 2
    oracle = GridOracle(
        event,
        [lambda x: np.full_like(x, gradient)],
        lambda x: np.full_like(x, -gradient),
        domain=(-0.5, 0.5),
        cells_per_std=64,
    )
    chain = IntervalChain(3.0, 4)
    shift = pull * 3.0 / 2
    tests = chain.tests(chain.nodes - shift, chain.nodes + shift, start=0.0)
    for epsilon in (0.0, 0.5, 2.0):
        exact = oracle.delta(epsilon)[0].value
        assert tests.delta(epsilon) <= exact + 1e-6
        assert tests.delta(epsilon) >= 0.9 * exact - 0.01
    assert tests.renyi(1.5) <= oracle.renyi(1.5)[0].value


def test_probabilities_of_a_single_step_are_exact_at_the_nodes():
    chain = IntervalChain(50.0, 1)
    tests = chain.tests(chain.nodes * 0.9 - 1, chain.nodes + 30, start=float(chain.nodes[0]))
    start = chain.nodes[0]
    np.testing.assert_allclose(
        tests.log_p[:-1],
        special.log_ndtr(chain.nodes - (0.9 * start - 1))[:-1],
        rtol=1e-9,
        atol=1e-12,
    )
    # rounded down: the mass up to the next node
    np.testing.assert_allclose(
        tests.log_q[:-1], special.log_ndtr(chain.nodes[1:] - (start + 30)), rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize(
    "loss",
    [
        None,
        hsa.LossGeometry.linear(1e9),
        hsa.LossGeometry.generalized_linear(1.0),
        hsa.LossGeometry.hoelder(1.0, 0.5),
        hsa.LossGeometry.convex(4.0),
        hsa.LossGeometry.convex(1.0, lipschitz=10.0),
    ],
)
def test_classes_without_expanding_losses_get_linear_ones(loss):
    event = bounded(10, 0.7, batch_size=101, loss=loss)
    run = _Run(event, REPLACE_ONE)
    x = np.array([-0.5, 0.5])
    assert np.ptp(run.step(x, run.common_records(0.0))) == pytest.approx(1.0)
    assert evidence(BoundedDomain(), event).renyi(1.1) > 0
    assert attrs.asdict(BoundedDomain()) == {}
