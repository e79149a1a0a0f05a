"""Published formulas that single runs refute, and that the sound accounts do not fall for."""

import math
import warnings

import numpy as np
import pytest
from bounded_domain import BoundedDomain, U
from dice_events import published_noise_std
from dice_outlier import DiceOutlier
from dp_accounting import NeighboringRelation
from gaussian_oracle import GaussianOracle
from mixtures_of_gaussians import divergence
from scipy import special

import hidden_state_accountants as hsa
from hidden_state_accountants.bounds import DiceSgd
from hidden_state_accountants.bounds.chen_liu_2025 import published_rates
from hidden_state_accountants.bounds.dice_sgd_2024 import sound_curve
from hidden_state_accountants.curves.base import known_of
from hidden_state_accountants.process.noisy_process import clipped_update_lipschitz

ADD, ONE, SPECIAL = (
    NeighboringRelation.ADD_OR_REMOVE_ONE,
    NeighboringRelation.REPLACE_ONE,
    NeighboringRelation.REPLACE_SPECIAL,
)


# --- Chien & Li 2024, Theorem 3.12: the smaller direction of a mixture ----------------------------


def sampled(sigma):
    """One step; sigma is the noise in units of the largest change, 2 C."""
    return hsa.LastIterateDpEvent(
        noise_multiplier=2 * sigma,
        learning_rate=0.1,
        clip_norm=3.0,
        batch_size=10,
        dataset_size=100,
        num_steps=1,
        batch_order=hsa.BatchOrder.WITHOUT_REPLACEMENT,
        loss=hsa.LossGeometry.smooth(smoothness=1.0),
    )


def opposite_to_the_record(event):
    """The exact law where all other gradients are those of the record that replaces it."""
    q, b, c = event.sampling_probability, event.batch_size, event.clip_norm
    return GaussianOracle.of(
        event,
        np.zeros((2, 1, 1)),
        [(q, [[0] + [1] * (b - 1)]), (1 - q, [[1] * b])],
        record=0,
        slopes=[[c], [-c]],
        slope_difference=[-2 * c],
    )


@pytest.mark.parametrize(
    ("sigma", "order", "ratio"),
    [(1, 2, 1.485), (1, 4, 3.04), (1, 8, 46.2), (0.5, 2, 9.604), (0.5, 4, 86.1), (0.5, 8, 195.1)],
)
def test_the_stated_direction_is_the_smaller_one(sigma, order, ratio):
    event = sampled(sigma)
    mixture_first, mixture_last = opposite_to_the_record(event).renyi(order)
    assert mixture_first / mixture_last == pytest.approx(ratio, rel=2e-3)
    with pytest.warns(UserWarning, match="direction"):
        published = hsa.ChienLiAccountant(ONE, analysis="published").compose(event)
    assert published.guarantee.rdp([order])[0] == pytest.approx(mixture_last, rel=1e-6)
    sound = hsa.LastIterateAccountant(ONE).compose(event)
    assert sound.guarantee.rdp([order])[0] >= mixture_first * (1 - 1e-9)


# --- Kong & Ribero 2025, Theorem 2.2: a clipped step expands --------------------------------------


def bounded(length, pull, *, batch_size=4001, steps=8):
    """A domain of diameter 1, eta M = 1/2, noise 1/length on the iterate, 2 eta C/b = pull."""
    clip = pull * batch_size
    return hsa.LastIterateDpEvent(
        noise_multiplier=batch_size / (length * 0.5 * clip),
        learning_rate=0.5,
        clip_norm=clip,
        batch_size=batch_size,
        dataset_size=batch_size,
        num_steps=steps,
        batch_order=hsa.BatchOrder.FULL,
        loss=hsa.LossGeometry.convex(smoothness=1.0),
        domain_diameter=1.0,
    )


@pytest.mark.parametrize(
    ("length", "pull", "batch_size", "ratio"), [(40, 0.75, 101, 1.020), (100, 0.7, 4001, 1.050)]
)
def test_the_published_constant_is_too_small(length, pull, batch_size, ratio):
    event = bounded(length, pull, batch_size=batch_size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        published, sound = (
            hsa.KongRiberoAccountant(ONE, analysis=analysis).compose(event).guarantee.rdp([1.01])[0]
            for analysis in ("published", "sound")
        )
    # (16) with L_lambda = 1: convex losses, and eta = 1/2 <= 1/(2 M)
    assert published == pytest.approx(1.01 / 2 * ((1 + pull) * length) ** 2)
    shown = BoundedDomain(event, ONE).renyi(1.01)
    assert shown / published == pytest.approx(ratio, abs=2e-3)
    assert shown < sound


@pytest.mark.parametrize("relation", [ONE, SPECIAL, ADD])
@pytest.mark.parametrize(("length", "pull", "steps"), [(4, 0.7, 8), (2, 3.0, 1), (30, 0.2, 20)])
def test_theorem_a_stays_above(relation, length, pull, steps):
    event = bounded(length, pull, batch_size=51, steps=steps)
    guarantee = hsa.LastIterateAccountant(relation).compose(event).guarantee
    run = BoundedDomain(event, relation)
    tests, orders = [run.tests(overshoot) for overshoot in run.OVERSHOOTS], [1.01, 1.5, 4.0]
    for epsilon in np.linspace(0, 8, 17):
        assert max(test.delta(epsilon) for test in tests) <= guarantee.delta(epsilon)
    shown = np.array([max(test.renyi(order) for test in tests) for order in orders])
    assert (shown <= guarantee.rdp(orders)).all()
    assert (shown > 0.02 * guarantee.rdp(orders)).all()


def test_the_recursion_is_that_of_clipped_gradients_in_the_plane():
    """Simulation in the plane, with per-example clipping and projection on the segment."""
    event = bounded(6.0, 0.75, batch_size=21, steps=5)
    run, runs = BoundedDomain(event, ONE), 40_000
    common, tests = run.common_records(1.0), run.tests(1.0)
    assert sum(number for number, _ in common) <= event.batch_size - 1
    rng, found = np.random.default_rng(0), []
    for pull in run.pulls:
        z = np.full((runs, 2), -0.5) * U
        own = -pull * event.batch_size / event.learning_rate * U
        assert np.linalg.norm(own) <= event.clip_norm * (1 + 1e-12)
        for _ in range(event.num_steps):
            total = own + event.noise_multiplier * event.clip_norm * rng.normal(size=z.shape)
            for number, gradient in common:
                values = gradient(z)
                norms = np.linalg.norm(values, axis=1, keepdims=True)
                total += number * values * np.minimum(1, event.clip_norm / norms)
            z = z - event.learning_rate / event.batch_size * total
            z = np.clip(z @ U, -0.5, 0.5)[:, None] * U
        found.append(np.sort(z @ U) / run.std)
    nodes = run.chain.nodes
    for index in (0, len(nodes) // 4, len(nodes) // 2):
        at_most = [np.searchsorted(x, nodes[index] + 1e-9) / runs for x in found]
        p, q = math.exp(tests.log_p[index]), math.exp(tests.log_q[index])
        tolerance = 5 * 0.5 / math.sqrt(runs)
        assert p - tolerance <= at_most[0] <= p + tolerance + 0.02  # rounding loses a little
        assert q - tolerance - 0.02 <= at_most[1] <= q + tolerance


def test_the_losses_are_convex_smooth_and_expanding():
    run = BoundedDomain(bounded(40, 0.75), ONE)
    common = run.common_records(1.0)
    for _, gradient in common:
        x, y = np.random.default_rng(0).normal(size=(2, 200, 2))
        change, step = gradient(x) - gradient(y), x - y
        inner = (change * step).sum(axis=1)
        assert (inner >= -1e-9).all()
        assert (inner * 1.0 >= (change**2).sum(axis=1) * (1 - 1e-9) - 1e-9).all()  # 1/M-cocoercive
    ends = run.step(np.array([-0.5, 0.5]), common)
    assert 1.0615 < ends[1] - ends[0] <= 1.0625 < clipped_update_lipschitz(0.5, 1.0)


# --- Zhang, Bu, Wu, Hong 2024, Theorem 3.7: errors of DiceSGD are no noise of their own -----------


def dice_paper(**changes):
    """The paper's batch size and data set; noise for (2, 1e-5) by Theorem 3.7."""
    arguments = {
        "noise_std": 1.0, "clip_norm": 1.0, "error_clip_norm": 1.0, "batch_size": 1000,
        "dataset_size": 50_000, "num_steps": 150, **changes,
    }  # fmt: skip
    noise = published_noise_std(hsa.DiceSgdDpEvent(**arguments), 2.0, 1e-5)
    return hsa.DiceSgdDpEvent(**arguments | {"noise_std": noise})


def sum_of_updates(event, epsilon):
    """delta from the sum of all updates alone, with C2 per step after the first participation."""
    rate, steps = event.sampling_probability, event.num_steps
    mass = np.append(rate * (1 - rate) ** np.arange(steps), (1 - rate) ** steps)
    shift = np.append(event.error_clip_norm * np.arange(steps - 1, -1, -1), 0.0)
    moved = shift / (event.noise_std * math.sqrt(steps))
    return divergence(moved, 0 * moved, epsilon, mass)


def test_theorem_3_7_is_refuted():
    event = dice_paper()
    assert sum_of_updates(event, 2.0) >= 0.51
    assert sum_of_updates(event, 18.3) > 1e-5
    published = DiceSgd("published").guarantee(event, SPECIAL)
    assert published.epsilon(1e-5) == pytest.approx(2.0)
    assert hsa.audit(published, event, attacks=(DiceOutlier(),)).violated_by == "dice_outlier"
    evidence = DiceOutlier().evidence(event, SPECIAL, lambda text: None)
    assert evidence.delta(2.0) > 0.85  # errors of opposite sign: 2 C2
    assert evidence.epsilon(1e-5) > 51
    ((revealed, _), *_) = known_of(sound_curve(event, SPECIAL))
    assert evidence.epsilon(1e-5) < revealed.epsilon(1e-5) < 1.06 * evidence.epsilon(1e-5)
    automatic = dice_paper(automatic=True, gradient_bound=1.01)  # gradients are bounded
    assert DiceOutlier().evidence(automatic, SPECIAL, lambda text: None).delta(2.0) > 0.85


# --- Chen & Liu 2025; Theorem 4.6 itself is refuted in test_block_runs.py beside this file --------


def test_an_invertible_prox_does_not_hide_anything():
    """Corollary 4.5 with L_T = 1/2 has the exponent 4 where 1 is the truth."""
    # Two batches, record in the first, one epoch, F the identity, prox x/2, v = 2 eta o = 1.
    published = published_rates(0.5, np.ones((1, 2)), 2.0, 1, 1.0, 0.5)[0]
    shift, variance = 0.5, 0.25 + 1.0  # before the last prox: (s/2, 1/4) and then noise
    assert shift**2 / (2 * variance) > 50 * published


def test_a_hidden_variable_expands():
    """(x y - m)^2/2 + lam y^2/2, y fitted: convex in x, but the slope is 1 + eta m^2/lam."""
    eta, m, lam = 0.1, 2.0, 0.5

    def step(x):
        y = m * x / (x * x + lam)
        return x - eta * (x * y - m) * y

    slope = (step(1e-6) - step(-1e-6)) / 2e-6
    assert slope == pytest.approx(1 + eta * m**2 / lam, rel=1e-6)


def test_a_step_size_that_depends_on_the_hessian_expands():
    """Lemma 4.1, f' = 10 sigmoid, kappa = 1, eta = 0.6: claimed 0.5."""

    def step(x):
        p = special.expit(x)
        return x - np.minimum(1 / (10 * p * (1 - p)), 0.6) * 10 * p

    x = np.linspace(-8, 8, 200_001)
    assert np.abs(np.diff(step(x)) / np.diff(x)).max() == pytest.approx(2.73, abs=0.01)
