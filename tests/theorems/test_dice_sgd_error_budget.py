"""DiceSGD: what one record can do to the secret error, and that the bound is attained."""

import numpy as np
import pytest
from dice_events import bounds_of, run, simulate
from hypothesis import given, settings
from hypothesis import strategies as st


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


@settings(max_examples=200)
@given(st.integers(0, 10**6), st.integers(1, 4), st.floats(0.01, 100))
def test_lemma_one(seed, dimension, scale):
    """p^2 + r^2 <= d^2 and p^2 <= 2 C2 (d - r), for C2 = 1."""
    rng = np.random.default_rng(seed)
    e, f = rng.normal(size=(2, dimension)) * scale * rng.uniform(0, 2, size=(2, 1))
    clipped = [v * min(1, 1 / np.linalg.norm(v)) for v in (e, f)]
    p = np.linalg.norm(clipped[0] - clipped[1])
    r = np.linalg.norm((e - clipped[0]) - (f - clipped[1]))
    d = np.linalg.norm(e - f)
    assert p**2 + r**2 <= d**2 + 1e-9 * d**2
    assert p**2 <= 2 * (d - r) + 1e-9 * d


def test_the_budget_is_attained_by_holding_and_releasing():
    """Both errors stay saturated on one side until the last step releases all deposits at once."""
    steps, radius, deposit = 9, 1.0, 0.1
    event = run(error_clip_norm=radius, gradient_bound=1.2, num_steps=steps)
    others = np.zeros((steps, 1))
    others[0] = -radius * (steps - 1)  # at the last step the error on D' is just -C2
    mine = np.full((steps, 1), 1.2)
    participates = [True] * (steps - 1) + [False]
    from_error, _ = simulate(participates, others, mine, 1.0, radius, event.batch_size)
    _, budget = bounds_of(participates, event)
    assert budget == pytest.approx(((steps - 1) * deposit) ** 2)
    assert np.sum(from_error**2) == pytest.approx(budget, rel=1e-9)


def test_the_budget_is_attained_by_opposite_saturation():
    """A large deposit against errors saturated on the other side: 2 C2 in every step."""
    steps, radius = 8, 1.0
    bound = 1 + 2 * 2 * radius * (steps - 1)  # a deposit of 2 C2 (T - 1)
    event = run(error_clip_norm=radius, gradient_bound=bound, num_steps=steps)
    others = np.zeros((steps, 1))
    others[0] = -radius * (steps - 1)
    participates = [True] + [False] * (steps - 1)
    from_error, _ = simulate(
        participates, others, np.full((steps, 1), bound), 1.0, radius, event.batch_size
    )
    _, budget = bounds_of(participates, event)
    assert budget == pytest.approx(4 * radius**2 * (steps - 1))
    assert np.sum(from_error**2) == pytest.approx(budget, rel=1e-9)


def per_step_bound(participates, c, h, radius):
    """The bound without a budget: sum of (c in_t + min(2 C2, k_t h))^2."""
    before = np.cumsum(participates) - participates
    error = np.minimum(2 * radius, np.where(before > 0, before * h, 0.0))
    return float(np.sum((c * np.asarray(participates) + error) ** 2))


@given(
    st.lists(st.booleans(), min_size=1, max_size=30),
    st.floats(1.01, 20),
    st.floats(0.05, 3),
)
def test_the_budget_never_costs_more_than_five_percent(participates, bound, radius):
    event = run(error_clip_norm=radius, gradient_bound=bound, num_steps=len(participates))
    old = per_step_bound(participates, 0.5, (bound - 1) / 2, radius)
    assert bounds_of(participates, event)[0] <= 1.05 * old + 1e-12
