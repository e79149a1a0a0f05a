"""DiceSGD: what the accountants say, the laws of the participations, budgets, Theorem 3.7."""

import math

import attrs
import numpy as np
import pytest
from dice_events import ADD, ONE, SPECIAL, bounds_of, published_noise_std, run, simulate
from dp_accounting import NeighboringRelation
from hypothesis import given, settings
from hypothesis import strategies as st
from mixtures_of_gaussians import patterns
from scipy import stats

import hidden_state_accountants as hsa
from hidden_state_accountants.bounds import DiceSgd, dice_sgd_2024
from hidden_state_accountants.bounds.dice_sgd_2024 import Effect, _split, sound_curve
from hidden_state_accountants.bounds.solvers.inclusion_counts import inclusions
from hidden_state_accountants.curves.base import GaussianCurve, GaussianMixtureCurve

Order = hsa.BatchOrder
OF_ANY_SIZE = (Order.FULL, Order.POISSON, Order.BALLS_IN_BINS, Order.BALLS_IN_BINS_REDRAWN)


# --- accountants ----------------------------------------------------------------------------------


@pytest.mark.parametrize("relation", list(NeighboringRelation))
@pytest.mark.parametrize("order", list(Order))
def test_orders_and_relations(order, relation):
    event = run(batch_order=order, batch_size=8 if order is Order.FULL else 2)
    accountant = hsa.DiceSgdAccountant(relation)
    if relation is ADD and order not in OF_ANY_SIZE:
        with pytest.raises(hsa.UnsupportedRunError, match="REPLACE_SPECIAL"):
            accountant.compose(event)
        return
    epsilon = accountant.compose(event).get_epsilon(1e-5)
    assert 0 < epsilon < math.inf
    assert hsa.LastIterateAccountant(relation).compose(event).get_epsilon(1e-5) == epsilon
    twice = hsa.DiceSgdAccountant(relation).compose(event, 2).get_epsilon(1e-5)
    assert epsilon < twice < math.inf


def test_unequal_batches_are_refused():
    with pytest.raises(hsa.UnsupportedRunError, match="drop 2 records"):
        hsa.DiceSgdAccountant().compose(run(batch_order="cyclic", batch_size=3))


def test_an_error_that_is_carried_over_is_one_run():
    """An event per step forgets the error: the guarantee says that it starts at zero."""
    whole = run(error_clip_norm=1.0, num_steps=10, gradient_bound=5.0, batch_order="cyclic")
    step = attrs.evolve(whole, num_steps=1, batch_size=8, batch_order="full")
    whole = hsa.DiceSgdAccountant().compose(whole).guarantee
    pieces = hsa.DiceSgdAccountant().compose(step, 10).guarantee
    assert whole.mu > 2.5 * pieces.mu
    assert any("error starts at zero" in a.text for a in pieces.assumptions)
    text = whole.explain()
    for words in ("never released", "at most 5", "constant 2", "independently of the data"):
        assert words in text


# --- the laws of the participations ---------------------------------------------------------------


@pytest.mark.parametrize("order", [o for o in Order if o is not Order.FULL])
@pytest.mark.parametrize(("steps", "period"), [(1, 3), (2, 3), (6, 3), (7, 3), (8, 2)])
def test_inclusions_equal_the_enumeration(order, steps, period):
    law = inclusions(order, steps, period, 0.3)
    exact, least, found = {}, {}, {}
    for joins, weight in zip(*patterns(order, steps, period, 0.3), strict=True):
        where = np.flatnonzero(joins)
        key = len(where), steps - 1 - where[0] if len(where) else 0
        exact[key] = exact.get(key, 0.0) + weight
        least[key] = max(np.sum(where < steps - 1), least.get(key, 0))
    rows = zip(law.weights, law.count, law.after_first, law.before_last, strict=True)
    for weight, *key, before_last in rows:
        found[tuple(key)] = found.get(tuple(key), 0.0) + weight
        assert before_last >= least.get(tuple(key), 0)
    for key in {*exact, *found}:
        assert found.get(key, 0.0) == pytest.approx(exact.get(key, 0.0), abs=1e-14)


@pytest.mark.parametrize("rate", [1e-4, 0.02, 0.5, 0.999])
def test_long_laws_are_rounded_up_a_little(rate):
    """Against the exact law: dominated in distribution, and close."""
    steps = 700
    law = inclusions(Order.POISSON, steps, 1, rate)
    assert law.weights.sum() == pytest.approx(1, abs=1e-12)
    number = np.arange(steps + 1)
    exact = stats.binom.sf(number, steps, rate)
    found = np.array([law.weights[law.count > k].sum() for k in number])
    assert (found >= exact - 1e-13).all()
    mean = law.weights @ law.count
    assert steps * rate <= mean <= steps * rate * 1.006 + 1e-12
    geometric = (1 - rate) ** (steps - number)  # P(after_first < k)
    after = np.array([law.weights[(law.after_first >= k) & (law.count > 0)].sum() for k in number])
    assert (after >= 1 - geometric - 1e-13).all()
    mean = law.weights @ law.after_first
    assert mean <= (1 - geometric)[1:].sum() * 1.006 + 1e-12


# --- the curves -----------------------------------------------------------------------------------

EPSILONS = (0.0, 0.3, 1.0, 3.0)


def projected_delta(weights, shifts, noise, direction, epsilon):
    """Hockey-stick divergences, both directions, of w.y under a mixture against N(0, sigma^2)."""
    direction = direction / np.linalg.norm(direction)
    centres = shifts @ direction / noise
    edges = np.linspace(min(centres.min(), 0) - 9, max(centres.max(), 0) + 9, 6001)
    here = weights @ np.diff(stats.norm.cdf(edges[None, :] - centres[:, None]), axis=1)
    there = np.diff(stats.norm.cdf(edges))
    factor = math.exp(epsilon)
    return max(
        np.maximum(here - factor * there, 0).sum(), np.maximum(there - factor * here, 0).sum()
    )


def assert_dominates(curve, event, drift, seed=0):
    """Over the updates of every pattern, projected on several directions."""
    steps = event.num_steps
    found, weights = patterns(
        event.batch_order, steps, event.batches_per_epoch, event.sampling_probability
    )
    mine, radius = np.full((steps, 1), event.gradient_bound), event.error_clip_norm
    shifts = np.array(
        [simulate(joins, drift, mine, 1.0, radius, event.batch_size)[1][:, 0] for joins in found]
    )
    rng = np.random.default_rng(seed)
    directions = [weights @ shifts, np.eye(steps)[-1], rng.normal(size=steps), shifts[-1]]
    for direction in directions:
        if np.linalg.norm(direction) > 0:
            for epsilon in EPSILONS:
                exact = projected_delta(weights, shifts, event.noise_std, direction, epsilon)
                assert exact <= curve.delta(epsilon) + 1e-9


@st.composite
def small_runs(draw):
    """A run, and what all others add to the error in its steps."""
    event = run(
        noise_std=draw(st.floats(0.2, 3)),
        error_clip_norm=draw(st.floats(0.05, 2)),
        gradient_bound=draw(st.sampled_from([0.7, 1.0, 1.3, 3.0, 50.0])),
        num_steps=draw(st.integers(1, 5)),
        batch_order=draw(st.sampled_from([Order.POISSON, Order.RESHUFFLED, Order.SHUFFLED_ONCE])),
    )
    drift = [[draw(st.sampled_from([-4.0, -2, -1, 0, 1]))] for _ in range(event.num_steps)]
    return event, event.error_clip_norm * np.array(drift)


@pytest.mark.slow
@given(small_runs(), st.integers(0, 1000))
def test_revealed_participations_dominate_small_runs_enumerated(small, seed):
    """A record that is replaced counts twice; no split there."""
    event, drift = small
    assert_dominates(sound_curve(event, ONE), event, drift, seed)
    if event.gradient_bound < 50:  # else the radius does not count twice
        single = attrs.evolve(
            event, noise_std=2 * event.noise_std, error_clip_norm=2 * event.error_clip_norm
        )
        assert_dominates(sound_curve(single, ONE), event, drift, seed)


@pytest.mark.parametrize(
    ("bound", "noise", "batch", "size"),
    [(1.0, 1.0, 2, 8), (1.3, 2.0, 2, 8), (3.0, 6.0, 2, 8), (2.0, 0.3, 8, 9)],
)
def test_split_noise_dominates_small_runs_enumerated(bound, noise, batch, size):
    """Also the clipped gradient and the error in the same direction, at the same step."""
    event = run(
        noise_std=noise, error_clip_norm=1.0, gradient_bound=bound, num_steps=4, batch_size=batch,
        dataset_size=size,
    )  # fmt: skip
    effect = Effect.of(event, SPECIAL)
    budget = float(effect.error_budget(np.array(3), np.array(3)))
    curve = _split(event, effect, budget)
    if bound > 1:
        (sampled, _), (gaussian, _) = curve.parts
        share = (sampled.event.event.noise_multiplier * effect.step / noise) ** 2
        assert share + budget / (noise * gaussian.mu) ** 2 == pytest.approx(1, rel=1e-12)
    hold = np.array([[-3.0], [0], [0], [0]])
    for drift in (hold, 0 * hold, hold / 3):
        assert_dominates(curve, event, drift)


@pytest.mark.parametrize(
    ("order", "relation"),
    [
        (Order.POISSON, SPECIAL),
        (Order.WITHOUT_REPLACEMENT, SPECIAL),
        (Order.WITHOUT_REPLACEMENT, ONE),
        (Order.FULL, SPECIAL),
    ],
)
@pytest.mark.parametrize("bound", [0.7, 1.0])
def test_without_errors_it_is_dp_sgd(order, relation, bound):
    """The clip never acts: the same as the composition bound of the package."""
    n, batch = (40, 40) if order is Order.FULL else (1000, 20)
    event = run(
        noise_std=1.1 / batch, gradient_bound=bound, batch_order=order, batch_size=batch,
        dataset_size=n, num_steps=100, error_clip_norm=5.0,
    )  # fmt: skip
    plain = hsa.LastIterateDpEvent(
        noise_multiplier=1.1, learning_rate=1.0, clip_norm=1.0, batch_size=batch, dataset_size=n,
        num_steps=100, batch_order=order, loss=hsa.LossGeometry.linear(bound),
    )  # fmt: skip
    composed = hsa.bounds.Composition().guarantee(plain, relation).epsilon(1e-5)
    assert sound_curve(event, relation).epsilon(1e-5) == pytest.approx(composed, rel=1e-9)
    if order is Order.WITHOUT_REPLACEMENT:
        clipped = attrs.evolve(event, gradient_bound=1.02)
        assert sound_curve(clipped, relation).epsilon(1e-5) > 1.05 * composed


@pytest.mark.parametrize(("relation", "factor"), [(SPECIAL, 1), (ADD, 1), (ONE, 2)])
def test_full_batches_have_a_closed_form(relation, factor):
    event = run(batch_order="full", batch_size=8, noise_std=0.3)
    c, h, radius = factor / 8, factor * 0.5 / 8, 0.25
    error = min((5 * h) ** 2, 2 * radius * 5 * h, 4 * radius**2 * 5)
    total = 6 * c**2 + error + 2 * c * min(math.sqrt(5 * error), 2 * radius * 5, 15 * h)
    curve = sound_curve(event, relation)
    assert isinstance(curve, GaussianCurve)
    assert curve.mu == pytest.approx(math.sqrt(total) / 0.3, rel=1e-12)


def test_cyclic_is_the_worst_position():
    event = run(batch_order="cyclic", num_steps=11)
    worst = max(bounds_of([t % 4 == place for t in range(11)], event)[0] for place in range(4))
    assert sound_curve(event, SPECIAL).mu == pytest.approx(math.sqrt(worst) / 2.0, rel=1e-12)


@pytest.mark.parametrize("automatic", [False, True])
def test_unknown_gradients_let_the_error_shift_every_later_step(automatic):
    event = run(
        batch_order="full", batch_size=8, automatic=automatic,
        gradient_bound=1.5 if automatic else math.inf,
    )  # fmt: skip
    c, cap = 1 / 8, 2 * 0.25
    expected = c**2 + 5 * (c + cap) ** 2
    assert sound_curve(event, SPECIAL).mu == pytest.approx(math.sqrt(expected) / 2.0, rel=1e-12)


def test_the_split_bound_wins_where_participations_are_rare_in_the_noise(monkeypatch):
    event = run(
        noise_std=0.02, error_clip_norm=1.0, batch_size=1000, dataset_size=50_000,
        num_steps=2000, gradient_bound=1.02,
    )  # fmt: skip
    best = sound_curve(event, SPECIAL)
    revealed = best.known[0][0]
    split, failure = best.known[-1]
    (sampled, _), (gaussian, _) = split.parts
    share = (sampled.event.event.noise_multiplier / 1000 / 0.02) ** 2
    paid_for = round(math.sqrt(1 - share) * 0.02 * gaussian.mu * 1000 / 0.02)  # participations
    assert failure == pytest.approx(stats.binom.sf(paid_for, 1999, 0.02), rel=1e-9, abs=0)
    assert best.epsilon(1e-5) < 0.6 * revealed.epsilon(1e-5)
    rounded = sound_curve(event, ONE)
    assert isinstance(rounded, GaussianMixtureCurve)  # is not split
    monkeypatch.setattr(dice_sgd_2024, "_MOST_COMPONENTS", 10**6)
    assert 1 <= rounded.epsilon(1e-5) / sound_curve(event, ONE).epsilon(1e-5) < 1.001
    # No split does without the noise of ordinary DP-SGD.
    plain = sound_curve(attrs.evolve(event, gradient_bound=1.0), SPECIAL)
    assert plain.epsilon(1e-5) < best.epsilon(1e-5)


# --- budgets --------------------------------------------------------------------------------------


@st.composite
def adversaries(draw):
    """Errors that are pushed to where clipping does most: near the sphere, or far from it."""
    num, dimension = draw(st.integers(1, 8)), draw(st.integers(1, 3))
    radius = draw(st.floats(0.05, 3))
    bound = draw(st.floats(0.2, 30))
    participates = draw(st.lists(st.booleans(), min_size=num, max_size=num))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    scales = draw(st.lists(st.sampled_from([0, 0.3, 1, 2, 3, 30]), min_size=num, max_size=num))
    unit = rng.normal(size=(num, dimension))
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    direction = unit[:1] if draw(st.booleans()) else unit
    others = unit * radius * np.array(scales)[:, None]
    mine = np.broadcast_to(direction, unit.shape) * bound
    return participates, others, mine, radius, bound


@settings(max_examples=300)
@given(adversaries())
def test_no_run_exceeds_the_budget(adversary):
    participates, others, mine, radius, bound = adversary
    event = run(error_clip_norm=radius, gradient_bound=bound, num_steps=len(participates))
    from_error, total = simulate(participates, others, mine, 1.0, radius, event.batch_size)
    limit, budget = bounds_of(participates, event)
    slack = 1e-9 * (1 + bound**2)
    assert np.sum(from_error**2) <= budget + slack
    assert np.sum(total**2) <= limit + slack


@pytest.mark.parametrize(
    ("participates", "bound", "expected"),
    [
        # All deposits are held on one side until the last step releases them at once.
        ([True] * 8 + [False], 1.2, (8 * 0.1) ** 2),
        # A deposit of 2 C2 (T - 1) against errors saturated on the other side.
        ([True] + [False] * 7, 1 + 2 * 2 * 7, 4 * 7),
    ],
)
def test_the_budget_is_attained(participates, bound, expected):
    steps = len(participates)
    event = run(error_clip_norm=1.0, gradient_bound=bound, num_steps=steps)
    others = np.zeros((steps, 1))
    others[0] = 1.0 - steps
    mine = np.full((steps, 1), bound)
    from_error, _ = simulate(participates, others, mine, 1.0, 1.0, event.batch_size)
    _, budget = bounds_of(participates, event)
    assert budget == pytest.approx(expected)
    assert np.sum(from_error**2) == pytest.approx(budget, rel=1e-9)


# --- Theorem 3.7 as published, which oracles/test_counterexamples.py refutes ----------------------

PAPER = {"clip_norm": 1.0, "error_clip_norm": 1.0, "batch_size": 1000, "dataset_size": 50_000,
         "num_steps": 150, "gradient_bound": math.inf}  # fmt: skip


def test_published_formulas_typed_again():
    log = math.log(1e5)
    for bound, smaller in ((math.inf, 1000), (11.0, 10.0), (0.5, 0.0)):
        noise = published_noise_std(run(**(PAPER | {"gradient_bound": bound})), 2.0, 1e-5)
        typed = 32 * 150 * (1 + 2 * smaller**2) * log / (50_000 * 2) ** 2
        assert noise**2 == pytest.approx(typed, rel=1e-9)
    automatic = run(**PAPER | {"automatic": True, "clip_norm": 0.3, "error_clip_norm": 0.3})
    noise = published_noise_std(automatic, 2.0, 1e-5)
    assert noise == pytest.approx(math.sqrt(96 * 150 * log) * 0.3 / (50_000 * 2), rel=1e-9)


def test_published_guarantee_inverts_the_noise_and_warns():
    for epsilon, delta in ((2.0, 1e-5), (0.5, 1e-8)):
        noise = published_noise_std(run(**PAPER), epsilon, delta)
        event = run(**PAPER | {"noise_std": noise})
        accountant = hsa.DiceSgdAccountant(analysis="published")
        with pytest.warns(UserWarning, match="false"):
            accountant.compose(event)
        assert accountant.get_epsilon(delta) == pytest.approx(epsilon, rel=1e-9)
        assert accountant.get_delta(epsilon) == pytest.approx(delta, rel=1e-9)
        assert accountant.guarantee.caveat
        sound = hsa.DiceSgdAccountant().compose(event).get_epsilon(delta)
        assert sound > 10 * epsilon


def test_the_papers_own_divergences_do_not_give_its_epsilon():
    """The last step of the proof: 16 alpha T G/(sigma N)^2 converts to more than epsilon."""
    noise = published_noise_std(run(**PAPER), 2.0, 1e-5)
    curve = DiceSgd("published").guarantee(run(**PAPER | {"noise_std": noise}), ADD).curve
    orders = 1 + np.geomspace(1e-2, 1e3, 4000)
    typed = 16 * orders * 150 * (1 + 2 * 1000**2) / (noise * 50_000) ** 2
    np.testing.assert_allclose(curve.rdp(orders), typed, rtol=1e-12)
    assert np.min(typed + math.log(1e5) / (orders - 1)) > 1.4 * 2.0


@pytest.mark.parametrize(
    ("changes", "relation", "match"),
    [
        ({"error_clip_norm": 0.5}, SPECIAL, "clip_norm"),
        ({"batch_size": 20_000}, SPECIAL, "0.2"),
        ({"batch_order": "cyclic"}, SPECIAL, "POISSON"),
        ({}, ONE, "REPLACE_SPECIAL"),
        ({"automatic": True, "clip_norm": 0.5}, SPECIAL, "clip_norm"),
    ],
)
def test_published_conditions(changes, relation, match):
    event = run(**PAPER | changes)
    assert DiceSgd("published").check(event, relation)
    with pytest.raises(hsa.UnsupportedRunError, match=match):
        DiceSgd("published").guarantee(event, relation)
