"""Kong & Ribero 2025 against the paper's formulas typed anew, solvers and exact oracles."""

import itertools
import math
import warnings

import numpy as np
import pytest
from cases import seeds
from dp_accounting import NeighboringRelation
from runs import cyclic_run, full_run, probe_run
from shift_programs import least_squares_mu_squared

import hidden_state_accountants as hsa
from hidden_state_accountants.bounds import Composition, KongRibero
from hidden_state_accountants.bounds.kong_ribero_2025 import theta
from hidden_state_accountants.process.noisy_process import noisy_process

REPLACE_ONE = NeighboringRelation.REPLACE_ONE
REPLACE_SPECIAL = NeighboringRelation.REPLACE_SPECIAL
ADD_OR_REMOVE_ONE = NeighboringRelation.ADD_OR_REMOVE_ONE
SOUND, PUBLISHED = KongRibero(), KongRibero("published")
ALPHA = 3.0


def per_alpha(event, bound=PUBLISHED, relation=REPLACE_ONE):
    """D_alpha/alpha of an event."""
    return float(bound.guarantee(event, relation).rdp([ALPHA])[0]) / ALPHA


# --- the paper, typed anew --------------------------------------------------------------------


def typed_theta(lipschitz, steps):
    """Equation (15)."""
    return lipschitz ** (2 * (steps - 1)) / sum(lipschitz ** (2 * j) for j in range(steps))


def typed_l_lambda(lam, m, big_m):
    """Equation (13)."""
    return math.sqrt(1 + 2 * lam * m * (1 + m / (2 * (big_m + m))))


def typed_16(lam, m, big_m, clip, b, sigma, diameter):
    return (typed_l_lambda(lam, m, big_m) * diameter + 2 * lam * clip / b) ** 2 / (2 * sigma**2)


def typed_17(lam, m, big_m, clip, b, sigma, epochs, period, factor=2**0.5):
    share = typed_theta(factor * typed_l_lambda(lam, m, big_m), period)
    return 4 * (lam * clip / (b * sigma)) ** 2 * (1 + epochs * share)


def random_case(seed):
    """A run under the conditions of both theorems, and the paper's names for its numbers."""
    rng = np.random.default_rng(seed)
    b, period, epochs = (int(rng.integers(1, n)) for n in (4, 9, 6))
    steps = int(rng.integers((epochs - 1) * period + 1, epochs * period + 1))
    m, big_m = float(rng.choice([0.0, 0.3, 2.0])), float(rng.uniform(0.5, 2))
    clip, noise = rng.uniform(0.5, 2), rng.uniform(0.5, 4)
    lam = rng.uniform(0.1, 1) / (2 * (m + big_m))
    unclipped = bool(rng.integers(2))
    event = hsa.LastIterateDpEvent(
        noise_multiplier=noise,
        learning_rate=lam,
        clip_norm=clip,
        batch_size=b,
        dataset_size=b * period,
        num_steps=steps,
        batch_order="cyclic",
        loss=hsa.LossGeometry.weakly_convex(big_m, m, lipschitz=clip if unclipped else None),
        domain_diameter=float(rng.choice([math.inf, rng.exponential()])),
    )
    sigma = lam * noise * clip / b
    return event, (lam, m, big_m, clip, b, sigma), (epochs, period), unclipped


@pytest.mark.parametrize("seed", seeds(6))
def test_published_is_the_paper(seed):
    event, numbers, shape, unclipped = random_case(seed)
    by_epochs = typed_17(*numbers, *shape, factor=1.0 if unclipped else math.sqrt(2))
    diameter = event.domain_diameter
    by_domain = typed_16(*numbers, diameter) if diameter < math.inf else math.inf
    guarantee = PUBLISHED.guarantee(event, REPLACE_ONE)
    expected = min(by_epochs, by_domain)
    assert per_alpha(event) == pytest.approx(expected, rel=1e-9)
    name = "Theorem 2.2" if by_domain < by_epochs else "(19)" if unclipped else "(17)"
    assert name in guarantee.theorem
    assert bool(guarantee.caveat) == (by_domain < by_epochs and not unclipped)
    assert guarantee.mu is None  # a Renyi bound for all orders is not mu-GDP
    # Half the sensitivity.
    half = per_alpha(event, relation=REPLACE_SPECIAL)
    lam, m, big_m, clip, *rest = numbers
    halved = typed_17(lam, m, big_m, clip / 2, *rest, *shape, factor=1.0 if unclipped else 2**0.5)
    if diameter < math.inf:
        halved = min(halved, typed_16(lam, m, big_m, clip / 2, *rest, diameter))
    assert half == pytest.approx(halved, rel=1e-9)


@pytest.mark.parametrize("lipschitz", [0.3, 1.0, 1.0000001, 1.2, 50.0])
def test_theta(lipschitz):
    for steps in (1, 2, 5, 40):
        assert float(theta(lipschitz, steps)) == pytest.approx(
            typed_theta(lipschitz, steps), rel=1e-9
        )
    assert float(theta(lipschitz, 0)) == 0
    assert np.array_equal(theta(0.0, np.array([0, 1, 2])), [0, 1, 0])


def test_corollary_c_2_as_stated_is_false():
    """Its display lacks the factor E of its proof: linear losses alone exceed it."""
    m, big_m, s, period, epochs = 0.01, 1.0, 1.0, 150, 1000
    lam = 1 / (2 * (m + big_m))
    assert period >= math.log(2) / math.log(1 + m * lam)
    displayed = 2 * s**2 * (1 + 4 * m / (big_m + m))
    exact = epochs * s**2 / period  # s per epoch against the noise of E * l steps
    assert exact > 2 * displayed
    assert 2 * s**2 * (1 + 4 * epochs * m / (big_m + m)) > exact


# --- Figure 1 -----------------------------------------------------------------------------------


def figure_1(loss, steps=100_000, **changes):
    """lambda = 1e-5, C = 10, sigma = 1e-5, b = 10, k = 1e4: s/sigma = 2, 1000 steps per epoch."""
    arguments = {
        "noise_multiplier": 1.0,
        "learning_rate": 1e-5,
        "clip_norm": 10.0,
        "batch_size": 10,
        "dataset_size": 10_000,
        "num_steps": steps,
        "batch_order": "cyclic",
        "loss": loss,
    }
    return hsa.LastIterateDpEvent(**arguments | changes)


def test_figure_1_without_clipping():
    """Left: small m flattens the curve below composition; large m approaches it from above."""
    whole = per_alpha(figure_1(None), Composition())
    assert whole == pytest.approx(100 * 2**2 / 2)
    values = [
        per_alpha(figure_1(hsa.LossGeometry.weakly_convex(1000.0, m, lipschitz=10.0)))
        for m in (0.0, 10.0, 1000.0)
    ]
    assert values == sorted(values)
    assert values[0] == pytest.approx(4 * (1 + 100 / 1000), rel=1e-9)
    assert values[0] < whole / 40
    assert values[2] < whole
    sound = per_alpha(figure_1(hsa.LossGeometry.convex(1000.0, lipschitz=10.0)), SOUND)
    assert sound == pytest.approx(2 * (1 + 99 / 1000), rel=1e-9)


def test_figure_1_with_clipping_is_never_below_composition():
    """theta of sqrt(2)*L is at least 1/2: (17) is at least 4 (1 + E/2), composition is 2 E."""
    for loss in (hsa.LossGeometry.convex(1000.0), hsa.LossGeometry.smooth(1000.0)):
        for steps in (1, 1000, 10_001, 100_000):
            event = figure_1(loss, steps)
            assert per_alpha(event) >= per_alpha(event, Composition()) * (1 + 1e-9)
            assert per_alpha(event, SOUND) <= per_alpha(event, Composition()) * (1 + 1e-12)
    clipped = per_alpha(figure_1(hsa.LossGeometry.convex(1000.0)))
    assert clipped == pytest.approx(4 * (1 + 100 / 2), rel=1e-9)
    assert per_alpha(figure_1(hsa.LossGeometry.convex(1000.0)), SOUND) < clipped / 3


def test_reference_run():
    assert SOUND.guarantee(probe_run(), REPLACE_SPECIAL).mu == pytest.approx(0.500411, abs=5e-6)
    without = probe_run(weight_decay=0.0)
    assert per_alpha(without, relation=REPLACE_SPECIAL) == pytest.approx(25.25, rel=1e-9)
    unclipped = probe_run(weight_decay=0.0, clip_norm=math.sqrt(2))
    assert per_alpha(unclipped, relation=REPLACE_SPECIAL) == pytest.approx(0.75, rel=1e-9)
    assert SOUND.guarantee(unclipped, REPLACE_SPECIAL).mu ** 2 == pytest.approx(0.7475, rel=1e-9)


# --- the sound reading ------------------------------------------------------------------------


@pytest.mark.parametrize("seed", seeds(6))
def test_the_papers_own_shifts_prove_no_less_than_the_sound_reading(seed):
    """Shifts that are spent epoch by epoch, typed as separate programs, or in the last step."""
    event, numbers, (_, period), _ = random_case(seed)
    lam, _, _, clip, b, sigma = numbers
    steps, c = event.num_steps, float(noisy_process(event, REPLACE_ONE).contraction[0])
    totals = []
    for position in range(min(period, steps)):
        starts = [*range(position, steps, period), steps]
        total = 0.0
        for start, stop in itertools.pairwise(starts):
            own = np.zeros(stop - start)
            own[0] = 2 * lam * clip / b
            total += least_squares_mu_squared(
                np.full(stop - start, c), own, np.full(stop - start, sigma)
            )
        totals.append(total)
    last = c * event.domain_diameter + 2 * lam * clip / b
    drift = event.domain_diameter + 2 * lam * clip
    own_argument = min(max(totals), (min(last, drift) / sigma) ** 2)
    least = SOUND.guarantee(event, REPLACE_ONE).mu ** 2
    assert least <= own_argument * (1 + 1e-9)
    published = PUBLISHED.guarantee(event, REPLACE_ONE)
    if not published.caveat:
        assert least / 2 <= per_alpha(event) * (1 + 1e-12)


# --- conditions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("analysis", ["sound", "published"])
def test_the_learning_rate(analysis):
    too_fast = cyclic_run(loss=hsa.LossGeometry.convex(2.0), learning_rate=0.5, weight_decay=0.0)
    text = (
        r"Kong & Ribero 2025, .*: learning rate: needs learning_rate <= 0\.25 \(lower it\), "
        r"got 0\.5\. Or use LastIterateAccountant\."
    )
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        hsa.KongRiberoAccountant(analysis=analysis).compose(too_fast)
    bound = KongRibero(analysis)
    (unmet,) = bound.check(too_fast, REPLACE_ONE)
    assert (unmet.condition, unmet.required, unmet.actual) == (
        "learning rate",
        "learning_rate <= 0.25 (lower it)",
        "0.5",
    )
    unclipped = cyclic_run(
        loss=hsa.LossGeometry.convex(2.0, lipschitz=1.0), learning_rate=0.5, weight_decay=0.0
    )
    assert bound.check(unclipped, REPLACE_ONE) == ()
    weakly = cyclic_run(
        loss=hsa.LossGeometry.weakly_convex(1.0, 3.0), learning_rate=0.125, weight_decay=0.0
    )
    assert bound.check(weakly, REPLACE_ONE) == ()
    linear = cyclic_run(
        loss=hsa.LossGeometry.linear(1.0), learning_rate=1e3, weight_decay=0.0, clip_norm=0.5
    )
    assert bound.check(linear, REPLACE_ONE) == ()


def test_theorem_2_2_needs_the_smaller_learning_rate():
    """Between 1/(2(M + m)) and 1/(M + m), unclipped: only (19)."""
    loss = hsa.LossGeometry.convex(1.0, lipschitz=1.0)
    arguments = {"loss": loss, "weight_decay": 0.0, "domain_diameter": 1e-3}
    slow, fast = (cyclic_run(**arguments, learning_rate=eta) for eta in (0.5, 0.51))
    assert "2.2" in PUBLISHED.guarantee(slow, REPLACE_ONE).theorem
    assert "(19)" in PUBLISHED.guarantee(fast, REPLACE_ONE).theorem


@pytest.mark.parametrize(
    ("changes", "condition"),
    [
        ({"batch_order": "poisson"}, "batch order"),
        ({"loss": None}, "loss geometry"),
        ({"loss": hsa.LossGeometry.hoelder(1.0, 0.5)}, "linear modulus"),
        ({"learning_rate": [0.1] * 23 + [0.2]}, "schedules"),
        ({"release_steps": [3]}, "releases"),
    ],
)
@pytest.mark.parametrize("bound", [SOUND, PUBLISHED])
def test_refusals(bound, changes, condition):
    event = cyclic_run(**{"weight_decay": 0.0} | changes)
    assert [u.condition for u in bound.check(event, REPLACE_ONE)] == [condition]
    with pytest.raises(hsa.UnsupportedRunError, match=rf"Kong & Ribero 2025, .*: {condition}: "):
        bound.guarantee(event, REPLACE_ONE)


def test_refusals_of_the_paper_alone():
    unmet = PUBLISHED.check(full_run(), ADD_OR_REMOVE_ONE)
    assert [u.condition for u in unmet] == ["neighboring relation", "weight decay"]
    assert SOUND.check(full_run(), ADD_OR_REMOVE_ONE) == ()
    assert SOUND.check(cyclic_run(), ADD_OR_REMOVE_ONE)
    with pytest.raises(ValueError, match="analysis"):
        hsa.KongRiberoAccountant(analysis="both")
    assert not PUBLISHED.sound
    assert SOUND.sound


def test_the_accountant_warns_exactly_where_the_statement_is_not_proved():
    arguments = {"weight_decay": 0.0, "learning_rate": 0.25, "domain_diameter": 1e-3}
    clipped = cyclic_run(**arguments, loss=hsa.LossGeometry.convex(1.0))
    with pytest.warns(UserWarning, match=r"Theorem 2\.2.*sqrt\(2\)"):
        hsa.KongRiberoAccountant(analysis="published").compose(clipped)
    unclipped = cyclic_run(**arguments, loss=hsa.LossGeometry.convex(1.0, lipschitz=1.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hsa.KongRiberoAccountant(analysis="published").compose(unclipped)
        hsa.KongRiberoAccountant().compose(clipped)
