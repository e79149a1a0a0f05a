"""Every bound dominates the exact mu of quadratic and linear runs; scalar runs are met exactly."""

import math

import numpy as np
import pytest
from cases import seeds
from dp_accounting import NeighboringRelation
from gaussian_oracle import GaussianOracle
from quadratics import cyclic_batches, random_hessian
from runs import mu_at

import hidden_state_accountants as hsa
from hidden_state_accountants.curves.gaussian import delta_from_mu

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
    dimension = hessians.shape[1]
    largest = 0.0
    for record in records:
        for _ in range(directions):
            direction = rng.normal(size=dimension)
            direction *= 2 * event.loss.lipschitz / np.linalg.norm(direction)
            oracle = GaussianOracle(
                hessians,
                [(1.0, batches)],
                learning_rate=event.per_step("learning_rate"),
                noise_std=event.noise_std_on_sum(),
                weight_decay=event.per_step("weight_decay"),
                batch_size=batch_size,
                record=record,
                slope_difference=direction,
            )
            largest = max(largest, oracle.mu)
    return largest


@pytest.mark.parametrize("seed", seeds(150))
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
    applied = [
        bound
        for bound in hsa.BOUNDS
        if bound.sound and isinstance(event, bound.event_type) and not bound.check(event, RELATION)
    ]
    assert {"composition", "shifted_interpolation"} <= {bound.name for bound in applied}
    for bound in applied:
        claimed = bound.guarantee(event, RELATION).rdp([1.5, 20.0])
        assert (np.array([1.5, 20.0]) * exact**2 / 2 <= claimed * (1 + 1e-9)).all()
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
    )
    exact = exact_mu(event, hessians, [2 * position], np.random.default_rng(0), directions=1)
    claimed = mu_at(event, position, RELATION)
    if position == 0:
        assert claimed / exact == pytest.approx(1.0, abs=1e-11)
    # Noise from before the record's batch hides it in a quadratic, but not in every loss.
    assert claimed >= exact * (1 - 1e-12)


@pytest.mark.parametrize("steps", [9, 29, 30])
def test_worst_position_covers_every_position(steps):
    hessians = np.full((8, 1, 1), 0.5)
    rates = np.linspace(0.9, 0.1, steps)  # falling: the worst is not simply the last batch

    event = declared(
        hessians,
        gradient_bound=1.0,
        noise_multiplier=2.0,
        learning_rate=rates,
        batch_size=2,
        dataset_size=8,
        num_steps=steps,
        batch_order="cyclic",
    )
    rng = np.random.default_rng(0)
    claimed = [mu_at(event, position, RELATION) for position in range(4)]
    for position, mu in enumerate(claimed):
        assert exact_mu(event, hessians, [2 * position], rng, directions=1) <= mu * (1 + 1e-12)
    worst = hsa.ShiftedInterpolationAccountant(RELATION).compose(event).guarantee.mu
    assert worst == pytest.approx(max(claimed), rel=1e-12)


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
    oracle = GaussianOracle(
        np.zeros((12, 1, 1)),
        [(1.0, cyclic_batches(12, 3, 20))],
        learning_rate=0.4,
        noise_std=2.6,
        batch_size=3,
        record=9,
        slope_difference=[factor * 2.0],
    )
    assert oracle.mu == pytest.approx(5 * factor * 2.0 / (2.6 * math.sqrt(20)))
    assert claimed >= oracle.mu
    assert claimed <= composition


@pytest.mark.parametrize("seed", seeds(40))
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


def released_oracle(seed, dimension=2, **changes):
    """A contracting run on quadratics in `dimension` dimensions, three iterates released."""
    rng = np.random.default_rng(seed)
    arguments = {
        "hessians": np.array([random_hessian(rng, dimension, 0.1, 1.0) for _ in range(6)]),
        "orders": [(1.0, cyclic_batches(6, 2, 9))],
        "learning_rate": rng.uniform(0.2, 0.8, 9),
        "noise_std": rng.uniform(1.0, 2.0, 9),
        "weight_decay": 0.1,
        "batch_size": 2,
        "record": 3,
        "slope_difference": rng.normal(size=dimension),
        "release_steps": (2, 5),
    }
    return arguments | changes


def test_the_oracle_itself_on_one_step():
    def mu(record, difference):
        return GaussianOracle(
            np.zeros((2, 2, 2)),
            [(1.0, [np.array([0, 1])])],
            learning_rate=0.3,
            noise_std=1.5,
            batch_size=2,
            record=record,
            slope_difference=difference,
        ).mu

    assert mu(0, [3.0, 4.0]) == pytest.approx(5.0 / 1.5)
    assert mu(1, [0.0, 0.0]) == 0.0


@pytest.mark.parametrize("seed", range(5))
def test_one_order_has_the_closed_forms_of_its_mu(seed):
    oracle = GaussianOracle(**released_oracle(seed))
    assert oracle.mu > 0.1
    for epsilon in (0.0, 0.3, 2.0):
        expected = delta_from_mu(oracle.mu, epsilon)
        assert oracle.delta(epsilon) == pytest.approx((expected, expected), rel=1e-9, abs=1e-15)
    for order in (1.01, 2.0, 30.0):
        expected = order * oracle.mu**2 / 2
        assert oracle.renyi(order) == pytest.approx((expected, expected), rel=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_released_iterates_against_the_joint_law_by_linear_maps(seed):
    """The released iterates are one linear map of all noises and one of the slope difference."""
    run = released_oracle(seed)
    batches, record = run["orders"][0][1], run["record"]
    noise_map, mean, rows, means = np.zeros((2, 18)), np.zeros(2), [], []
    for t in range(9):
        eta = run["learning_rate"][t]
        hessian = run["hessians"][batches[t]].mean(axis=0)
        matrix = np.eye(2) * (1 - eta * run["weight_decay"]) - eta * hessian
        noise_map, mean = matrix @ noise_map, matrix @ mean
        noise_map[:, 2 * t : 2 * t + 2] = np.eye(2) * eta * run["noise_std"][t] / 2
        mean -= eta / 2 * np.isin(record, batches[t]) * run["slope_difference"]
        if t + 1 in (2, 5, 9):
            rows.append(noise_map.copy())
            means.append(mean)
    full, means = np.vstack(rows), np.concatenate(means)
    expected = np.linalg.norm(np.linalg.pinv(full) @ means)
    assert GaussianOracle(**run).mu == pytest.approx(expected, rel=1e-9)


def mixture_run():
    """Three orders of two records, the slopes on a line in two dimensions."""
    direction = np.array([0.6, -0.8])
    return released_oracle(
        0,
        hessians=np.tile(np.diag([0.5, 0.5]), (3, 1, 1)),
        orders=[(p, [[i], [j], [i]]) for p, i, j in ((0.5, 0, 1), (0.3, 1, 0), (0.2, 2, 2))],
        learning_rate=0.7,
        noise_std=1.2,
        batch_size=1,
        record=0,
        slopes=np.outer([0.4, -0.9, 2.0], direction),
        slope_difference=1.5 * direction,
        release_steps=(),
    )


def test_a_mixture_against_monte_carlo_and_its_parts():
    run = mixture_run()
    oracle = GaussianOracle(**run)
    rng = np.random.default_rng(7)
    size = 400_000
    chosen = rng.choice(3, size=size, p=[0.5, 0.3, 0.2])
    sides = []
    for slopes in (run["slopes"], run["slopes"] + np.eye(3)[:, :1] * run["slope_difference"]):
        x = np.zeros((size, 2))
        for t in range(3):
            record = np.array([batches[t][0] for _, batches in run["orders"]])[chosen]
            gradient = 0.5 * x + slopes[record] + 1.2 * rng.normal(size=(size, 2))
            x = (1 - 0.7 * 0.1) * x - 0.7 * gradient
        sides.append(np.sort(x @ np.array([0.6, -0.8])))
    # The line is one-dimensional, so any histogram of it gives a lower bound up to its own noise.
    edges = np.linspace(-8, 8, 80)
    p, q = (np.histogram(side, edges)[0] / size for side in sides)
    for epsilon in (0.0, 0.5, 1.0):
        forward, backward = oracle.delta(epsilon)
        assert np.maximum(p - math.exp(epsilon) * q, 0).sum() == pytest.approx(forward, abs=6e-3)
        assert np.maximum(q - math.exp(epsilon) * p, 0).sum() == pytest.approx(backward, abs=6e-3)
    # Joint convexity: no mixture is worse than the average of its parts.
    parts = [
        (p, GaussianOracle(**run | {"orders": [(1.0, batches)]})) for p, batches in run["orders"]
    ]
    assert sum(p * part.delta(0.5)[0] for p, part in parts) >= oracle.delta(0.5)[0]
    assert max(part.renyi(2.0)[0] for _, part in parts) >= oracle.renyi(2.0)[0] > 0


@pytest.mark.parametrize("order", [1.2, 2.0, 8.0])
def test_a_mixture_against_its_series(order):
    """Poisson sampling of one linear record, one step: the binomial series at integer orders."""
    q, mu = 0.2, 0.9
    oracle = GaussianOracle(
        np.zeros((1, 1, 1)),
        [(q, [[0]]), (1 - q, [[]])],
        learning_rate=1.0,
        noise_std=1.0,
        batch_size=1,
        record=0,
        slope_difference=[mu],
    )
    backward = oracle.renyi(order)[1]  # the mixture against N(0, 1)
    if order.is_integer():
        n = int(order)
        series = sum(
            math.comb(n, k) * q**k * (1 - q) ** (n - k) * math.exp(k * (k - 1) * mu**2 / 2)
            for k in range(n + 1)
        )
        assert backward == pytest.approx(math.log(series) / (n - 1), rel=1e-11)
    x, step = np.linspace(-30, 30, 60_001, retstep=True)
    ratio = 1 - q + q * np.exp(mu * x - mu**2 / 2)
    integral = np.sum(ratio**order * np.exp(-(x**2) / 2)) * step / math.sqrt(2 * math.pi)
    assert backward == pytest.approx(math.log(integral) / (order - 1), rel=1e-10)
