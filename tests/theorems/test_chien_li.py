"""Chien & Li 2024: the paper's figure and its formulas, typed anew, with solvers.

Its sound readings, and its refusals, are in test_papers.py beside this file.
"""

import math

import numpy as np
import pytest
from cases import seeds
from dp_accounting import NeighboringRelation
from gaussian_oracle import GaussianOracle
from runs import cyclic_run
from scipy import optimize, special
from shift_programs import nonlinear_mu_squared

import hidden_state_accountants as hsa
from hidden_state_accountants.bounds import ChienLi
from hidden_state_accountants.bounds import chien_li_2024 as module
from hidden_state_accountants.bounds.chien_li_2024 import sampled_gaussian_divergence

REPLACE_ONE = NeighboringRelation.REPLACE_ONE
SOUND, PUBLISHED = ChienLi(), ChienLi("published")
ALPHA = 3.0
LOSSES = {
    "smooth": hsa.LossGeometry.smooth(1.0, lipschitz=2.0),
    "convex": hsa.LossGeometry.convex(1.0, lipschitz=2.0),
    "strongly_convex": hsa.LossGeometry.strongly_convex(1.0, 1.0, lipschitz=2.0),
}


def per_alpha(event, bound=PUBLISHED):
    """epsilon/alpha of an event."""
    return float(bound.guarantee(event, REPLACE_ONE).rdp([ALPHA])[0]) / ALPHA


def figure_1(loss, steps=200, **changes):
    """Appendix A.13: L = m = 1, K = 2, sigma = 1 on the iterate, D = 1, n = 5, eta = 0.1."""
    arguments = {
        "noise_multiplier": 25.0,
        "learning_rate": 0.1,
        "clip_norm": 2.0,
        "batch_size": 5,
        "dataset_size": 5,
        "num_steps": steps,
        "batch_order": "full",
        "loss": loss,
        "domain_diameter": 1.0,
    }
    return hsa.LastIterateDpEvent(**arguments | changes)


@pytest.mark.parametrize(
    ("kind", "expected"), [("smooth", 0.27317), ("convex", 0.16006), ("strongly_convex", 0.06666)]
)
def test_figure_1(kind, expected):
    """Theory section 7 and Figure 1 (b); output perturbation has D^2/2."""
    values = [per_alpha(figure_1(LOSSES[kind], steps)) for steps in (1, 10, 100, 200, 400, 4000)]
    assert values == sorted(values)
    assert values[0] == pytest.approx(0.08**2 / 2, rel=1e-12)
    assert values[3] == pytest.approx(expected, abs=5e-6)
    assert values[4] == pytest.approx(values[5], rel=1e-3)
    assert per_alpha(figure_1(LOSSES[kind]), SOUND) <= expected + 5e-6


def test_clipping_undoes_convexity_in_the_paper():
    clipped, smooth = (
        figure_1(loss) for loss in (hsa.LossGeometry.strongly_convex(1.0, 1.0), LOSSES["smooth"])
    )
    assert per_alpha(clipped) == per_alpha(smooth)
    assert per_alpha(clipped, SOUND) < per_alpha(smooth)


def theorem_3_1(c, tau, beta, big_k, eta, n, steps, diameter, sigma):
    """The right-hand side of Theorem 3.1 without alpha."""
    first = sum((2 * big_k * eta / n) ** 2 / beta[t - tau] for t in range(tau, steps))
    distance = min(
        2 * eta * big_k / n * sum(c**t for t in range(tau)), 2 * eta * big_k * tau, diameter
    )
    second = sum((1 - beta[t - tau]) * c ** (-2 * (t - tau + 1)) for t in range(tau, steps))
    return (first + (distance**2 / second if distance else 0.0)) / (2 * sigma**2)


@pytest.mark.parametrize("seed", seeds(6))
@pytest.mark.parametrize("kind", LOSSES)
def test_theorem_3_1_is_the_minimum_of_its_formula(kind, seed):
    rng = np.random.default_rng(seed)
    steps, n = int(rng.integers(1, 7)), int(rng.integers(1, 4))
    eta, diameter, noise = rng.uniform(0.05, 0.95), rng.exponential(), rng.uniform(0.5, 3)
    c = {"smooth": 1 + eta, "convex": 1.0, "strongly_convex": 1 - eta}[kind]
    event = figure_1(
        LOSSES[kind],
        steps,
        noise_multiplier=noise,
        learning_rate=eta,
        batch_size=n,
        dataset_size=n,
        domain_diameter=diameter,
    )
    best = math.inf
    for tau in range(steps):

        def value(beta, tau=tau):
            return theorem_3_1(c, tau, beta, 2.0, eta, n, steps, diameter, eta * noise * 2.0 / n)

        width = steps - tau
        best = min(best, value(np.full(width, 1.0 - 1e-15)))
        for start in (0.3, 0.7, 0.95):
            result = optimize.minimize(
                value, np.full(width, start), bounds=[(1e-3, 1 - 1e-9)] * width, tol=1e-14
            )
            best = min(best, float(result.fun))
    # For smooth losses Theorem 3.7 with lambda = 1 tracks the distance step by step.
    ours = per_alpha(event)
    assert ours <= best * (1 + 1e-6)
    assert ours >= best * (1 - 1e-6) or kind == "smooth"


def lemma_a_2(eta_l, exponent, batch, participates, s, drift, diameter):
    """min(D_t, D) of Lemma A.2 for t = 0..T."""
    distances = [0.0]
    for holds in participates:
        before = distances[-1]
        if holds:
            stretched = before + eta_l * (batch - 1) / batch * before**exponent + s
        else:
            stretched = before + eta_l * before**exponent
        distances.append(min(stretched, before + drift) if any(distances) or holds else 0.0)
    return np.minimum(distances, diameter)


@pytest.mark.parametrize("seed", seeds(6))
@pytest.mark.parametrize("exponent", [1.0, None])
def test_theorem_a_1_is_the_minimum_of_its_formula(seed, exponent):
    rng = np.random.default_rng(seed)
    exponent = exponent or float(rng.uniform(0.2, 0.9))
    batch, period, steps = (int(rng.integers(1, m)) for m in (4, 4, 6))
    position = (steps - 1) % period  # the batch processed last
    eta, noise, smoothness = rng.uniform(0.1, 1), rng.uniform(0.5, 3), rng.exponential() + 0.05
    diameter = rng.exponential() + 0.01
    event = cyclic_run(
        noise_multiplier=noise,
        learning_rate=eta,
        weight_decay=0.0,
        batch_size=batch,
        dataset_size=batch * period,
        num_steps=steps,
        loss=hsa.LossGeometry.hoelder(smoothness, exponent),
        domain_diameter=diameter,
    )
    holds = [t % period == position for t in range(steps)]
    s = 2 * eta / batch * np.array(holds)
    distances = lemma_a_2(eta * smoothness, exponent, batch, holds, s.max(), 2 * eta, diameter)

    def reach(t, z):
        return z + eta * smoothness * z**exponent + s[t]

    noise_std = np.full(steps, eta * noise / batch)
    starts = dict(enumerate(distances[:-1]))
    least = nonlinear_mu_squared(reach, noise_std, starts, least=s) / 2
    assert per_alpha(event) == pytest.approx(least, rel=1e-6 if exponent == 1 else 0.01)


@pytest.mark.parametrize("exponent", [1.0, 0.5])
def test_corollary_a_3_averages_theorem_a_1(exponent, monkeypatch):
    loss = hsa.LossGeometry.hoelder(0.5, exponent)
    arguments = {"loss": loss, "weight_decay": 0.0, "domain_diameter": 0.2, "num_steps": 30}
    event = cyclic_run(**arguments, batch_order="shuffled_once")
    guarantee = PUBLISHED.guarantee(event, REPLACE_ONE)
    positions = []
    for p in range(4):
        monkeypatch.setattr(module, "_positions", lambda event, p=p: range(p, p + 1))
        positions.append(PUBLISHED.guarantee(cyclic_run(**arguments), REPLACE_ONE))
    for alpha in (1.5, 4.0, 40.0):
        logs = [(alpha - 1) * float(g.rdp([alpha])[0]) for g in positions]
        expected = (special.logsumexp(logs) - math.log(4)) / (alpha - 1)
        assert float(guarantee.rdp([alpha])[0]) == pytest.approx(expected, rel=1e-9)
    assert "A.3" in guarantee.theorem


def sampled_divergence(alpha, q, sigma):
    """D_alpha(N(0) || (1 - q) N(0) + q N(1)), the standard deviation sigma."""
    oracle = GaussianOracle(
        np.zeros((1, 1, 1)),
        [(q, [[0]]), (1 - q, [[]])],
        learning_rate=1.0,
        noise_std=sigma,
        batch_size=1,
        record=0,
        slope_difference=[1.0],
    )
    return oracle.renyi(alpha)[0]


@pytest.mark.parametrize("q", [0.01, 0.1, 0.7])
@pytest.mark.parametrize("sigma", [0.3, 1.0, 6.0])
def test_definition_3_11(q, sigma):
    alphas = np.array([1.3, 2.0, 6.0])
    expected = [sampled_divergence(alpha, q, sigma) for alpha in alphas]
    found = sampled_gaussian_divergence(alphas, q, sigma)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-12)


def test_theorem_3_12_is_its_formula_with_one_split():
    event = cyclic_run(
        batch_order="without_replacement",
        weight_decay=0.0,
        num_steps=40,
        noise_multiplier=1.0,
        domain_diameter=0.02,
    )
    sigma, s = 0.5 / 5, 2 * 0.5 / 5
    distance = lemma_a_2(0.5, 1.0, 5, [True] * 40, s, 1.0, 0.02) / sigma
    alpha, c = 4.0, 1.5

    k = np.arange(1, 41)
    shifts = distance[40 - k] ** 2 / np.cumsum(c ** (-2.0 * k))
    least = min(
        (
            k * sampled_divergence(alpha, 0.25, beta * sigma / s) + alpha * shifts / (2 - 2 * beta)
        ).min()
        for beta in np.linspace(0.02, 0.995, 20)
    )
    guarantee = PUBLISHED.guarantee(event, REPLACE_ONE)
    ours = float(guarantee.rdp([alpha])[0])
    assert least * 0.99 <= ours <= least * 1.02
    assert ours < 40 * sampled_divergence(alpha, 0.25, sigma / s)
    assert guarantee.caveat
