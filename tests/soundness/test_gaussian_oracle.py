"""Every bound dominates the exact mu of quadratic and linear runs; scalar runs are met exactly."""

import math

import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from gaussian_oracle import QuadraticRun, cyclic_batches, random_hessian

import hidden_state_accountants as hsa

RELATION = NeighboringRelation.REPLACE_ONE


def declared(hessians, gradient_bound, **changes):
    """The event that a user would declare for quadratics with Hessians in [lowest, highest]."""
    eigenvalues = np.linalg.eigvalsh(hessians)
    lowest, highest = float(eigenvalues.min()), float(eigenvalues.max())
    if lowest > 0:
        loss = hsa.LossGeometry.strongly_convex(highest, lowest, gradient_bound)
    elif lowest == 0:
        loss = hsa.LossGeometry.convex(max(highest, 0.0), gradient_bound)
    else:
        loss = hsa.LossGeometry.weakly_convex(max(highest, 0.0), -lowest, gradient_bound)
    return hsa.LastIterateDpEvent(clip_norm=None, loss=loss, **changes)


def exact_mu(event, hessians, records, rng, directions=8):
    """The largest exact mu over records and directions of the gradient difference."""
    order = event.batch_order
    batch_size = event.batch_size
    batches = cyclic_batches(event.dataset_size, batch_size, event.num_steps)
    assert order in (hsa.BatchOrder.FULL, hsa.BatchOrder.CYCLIC)
    run = QuadraticRun(
        hessians,
        batches,
        learning_rate=event.per_step("learning_rate"),
        noise_std=event.noise_std_on_sum(),
        weight_decay=event.per_step("weight_decay"),
        batch_size=batch_size,
    )
    dimension = hessians.shape[1]
    largest = 0.0
    for record in records:
        for _ in range(directions):
            direction = rng.normal(size=dimension)
            direction *= 2 * event.loss.lipschitz / np.linalg.norm(direction)
            largest = max(largest, run.mu(record, direction))
    return largest


@pytest.mark.parametrize("seed", range(150))
def test_bounds_dominate_the_exact_mu(seed):
    rng = np.random.default_rng(seed)
    dimension = int(rng.integers(1, 5))
    batch_size, period = int(rng.integers(1, 4)), int(rng.integers(1, 5))
    steps, size = int(rng.integers(1, 25)), batch_size * period
    lowest = float(rng.choice([0.0, 0.2, -0.3]))
    hessians = np.array([random_hessian(rng, dimension, lowest, 1.5) for _ in range(size)])
    schedule = rng.random() < 0.5

    def draw(low, high):
        return rng.uniform(low, high, steps) if schedule else float(rng.uniform(low, high))

    event = declared(
        hessians,
        gradient_bound=0.8,
        noise_multiplier=draw(0.5, 3),
        learning_rate=draw(0.05, 1.2),
        weight_decay=draw(0.0, 0.6),
        batch_size=batch_size,
        dataset_size=size,
        num_steps=steps,
        batch_order="full" if period == 1 else "cyclic",
    )
    exact = exact_mu(event, hessians, range(0, size, batch_size), rng)
    for bound in hsa.BOUNDS:
        assert bound.check(event, RELATION) == ()
        assert exact <= bound.guarantee(event, RELATION).mu * (1 + 1e-9)
    accountant = hsa.LastIterateAccountant(RELATION).compose(event)
    assert exact <= accountant.guarantee.mu * (1 + 1e-9)


@pytest.mark.parametrize("steps", [1, 7, 60])
@pytest.mark.parametrize("curvature", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_scalar_strongly_convex_quadratics_are_met_exactly(steps, curvature, decay):
    hessians = np.full((8, 1, 1), curvature)
    event = declared(
        hessians,
        gradient_bound=1.0,
        noise_multiplier=2.0,
        learning_rate=0.6,
        weight_decay=decay,
        batch_size=8,
        dataset_size=8,
        num_steps=steps,
        batch_order="full",
    )
    exact = exact_mu(event, hessians, [0], np.random.default_rng(0), directions=1)
    claimed = hsa.LastIterateAccountant(RELATION).compose(event).guarantee.mu
    assert claimed / exact == pytest.approx(1.0, abs=1e-11)


@pytest.mark.parametrize("position", range(4))
@pytest.mark.parametrize("curvature", [0.1, 0.5, 1.0])
def test_one_cyclic_epoch_is_met_exactly_where_no_noise_comes_before(position, curvature):
    hessians = np.full((8, 1, 1), curvature)
    event = declared(
        hessians,
        gradient_bound=1.0,
        noise_multiplier=2.0,
        learning_rate=0.6,
        weight_decay=0.1,
        batch_size=2,
        dataset_size=8,
        num_steps=4,
        batch_order="cyclic",
        record_position=position,
    )
    exact = exact_mu(event, hessians, [2 * position], np.random.default_rng(0), directions=1)
    claimed = hsa.ShiftedInterpolationAccountant(RELATION).compose(event).guarantee.mu
    if position == 0:
        assert claimed / exact == pytest.approx(1.0, abs=1e-11)
    # Noise from before the record's batch hides it in a quadratic, but not in every loss.
    assert claimed >= exact * (1 - 1e-12)


@pytest.mark.parametrize("steps", [9, 29, 30])
def test_worst_position_covers_every_position(steps):
    hessians = np.full((8, 1, 1), 0.5)
    rates = np.linspace(0.9, 0.1, steps)  # falling: the worst is not simply the last batch

    def event(position):
        return declared(
            hessians,
            gradient_bound=1.0,
            noise_multiplier=2.0,
            learning_rate=rates,
            batch_size=2,
            dataset_size=8,
            num_steps=steps,
            batch_order="cyclic",
            record_position=position,
        )

    def claimed(position):
        accountant = hsa.ShiftedInterpolationAccountant(RELATION).compose(event(position))
        return accountant.guarantee.mu

    rng = np.random.default_rng(0)
    for position in range(4):
        exact = exact_mu(event(position), hessians, [2 * position], rng, directions=1)
        assert exact <= claimed(position) * (1 + 1e-12)
    assert claimed(None) == pytest.approx(max(map(claimed, range(4))), rel=1e-12)


@pytest.mark.parametrize("order", ["full", "cyclic"])
@pytest.mark.parametrize("relation", [RELATION, NeighboringRelation.REPLACE_SPECIAL])
def test_linear_losses_give_exactly_composition(order, relation):
    event = hsa.LastIterateDpEvent(
        noise_multiplier=1.3,
        learning_rate=0.4,
        clip_norm=2.0,
        batch_size=12 if order == "full" else 3,
        dataset_size=12,
        num_steps=20,
        batch_order=order,
        loss=hsa.LossGeometry.linear(lipschitz=5.0),
    )
    factor = 2 if relation is RELATION else 1
    participations = 20 if order == "full" else 5
    composition = factor * math.sqrt(participations) / 1.3
    claimed = hsa.ShiftedInterpolationAccountant(relation).compose(event).guarantee.mu
    if order == "full":
        assert claimed == pytest.approx(composition, rel=1e-12)
        return
    # A cyclic record rests between its batches, and the noise of the other steps hides it: the
    # exact mean shift of a linear loss is the sum of all the shifts under the noise of all steps.
    hessians = np.zeros((12, 1, 1))
    run = QuadraticRun(
        hessians, cyclic_batches(12, 3, 20), learning_rate=0.4, noise_std=2.6, batch_size=3
    )
    assert claimed >= run.mu(9, [factor * 2.0])
    assert claimed <= composition


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("period", [1, 3])
def test_released_iterates(seed, period):
    """Released iterates are jointly Gaussian; in full batches Theorem A gives their exact mu."""
    rng = np.random.default_rng(seed)
    hessians = np.full((6, 1, 1), 0.5)
    releases = tuple(sorted(rng.choice(np.arange(1, 20), size=3, replace=False).tolist()))
    batch_size = 6 // period

    def claimed(release_steps):
        event = declared(
            hessians,
            gradient_bound=1.0,
            noise_multiplier=1.0,
            learning_rate=0.7,
            weight_decay=0.2,
            batch_size=batch_size,
            dataset_size=6,
            num_steps=20,
            batch_order="full" if period == 1 else "cyclic",
            release_steps=release_steps,
        )
        return hsa.ShiftedInterpolationAccountant(RELATION).compose(event).guarantee.mu

    c = abs(1 - 0.7 * 0.2 - 0.7 * 0.5)
    shift, noise = 2 * 0.7 / batch_size, 0.7 / batch_size
    ends = (*releases, 20)
    low, gap = np.minimum.outer(ends, ends), np.abs(np.subtract.outer(ends, ends))
    covariance = c**gap * noise**2 * (1 - c ** (2.0 * low)) / (1 - c * c)
    exact = 0.0
    for position in range(period):
        mean, means = 0.0, []
        for t in range(1, 21):
            mean = c * mean + (shift if (t - 1) % period == position else 0.0)
            if t in ends:
                means.append(mean)
        means = np.array(means)
        exact = max(exact, math.sqrt(means @ np.linalg.solve(covariance, means)))
    if period == 1:
        assert claimed(releases) == pytest.approx(exact, rel=1e-9)
    assert claimed(releases) >= exact * (1 - 1e-12)
    assert claimed(releases) >= claimed(()) * (1 - 1e-12)


def test_the_oracle_itself_on_one_step():
    run = QuadraticRun(
        np.zeros((2, 2, 2)), [np.array([0, 1])], learning_rate=0.3, noise_std=1.5, batch_size=2
    )
    assert run.mu(0, [3.0, 4.0]) == pytest.approx(5.0 / 1.5)
    assert run.mu(1, [0.0, 0.0]) == 0.0
