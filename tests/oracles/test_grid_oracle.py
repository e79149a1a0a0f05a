"""The grid oracle against closed forms, other oracles and simulation; then as a judge."""

import itertools
import math

import numpy as np
import pytest
from cases import first, seeds
from dp_accounting.pld import privacy_loss_distribution
from gaussian_oracle import GaussianOracle
from grid_oracle import GridOracle
from quadratics import cyclic_batches
from scipy import stats

import hidden_state_accountants as hsa
from hidden_state_accountants.curves.gaussian import delta_from_mu

EPSILONS = (0.0, 0.5, 2.0)
ORDERS = (1.5, 2.0, 8.0)


def run(**changes):
    """A short run that is not clipped."""
    arguments = {
        "noise_multiplier": 2.0,
        "learning_rate": 0.5,
        "clip_norm": None,
        "batch_size": 2,
        "dataset_size": 6,
        "num_steps": 9,
        "batch_order": "cyclic",
        "loss": hsa.LossGeometry.convex(1.0, lipschitz=1.0),
    }
    return hsa.LastIterateDpEvent(**(arguments | changes))


def constant(value):
    return lambda x: np.full_like(x, value)


def affine(slope, value):
    return lambda x: slope * x + value


def agrees(estimate, exact):
    """The estimate is right within its error; the bound is a bound and not a trivial one."""
    assert estimate.value == pytest.approx(exact, abs=estimate.error + 1e-4 * exact + 1e-12)
    assert estimate.lower_bound <= exact * (1 + 1e-10)
    assert estimate.lower_bound >= 0.97 * exact - 8e-3


@pytest.mark.parametrize("seed", seeds(8))
def test_quadratics_against_the_gaussian_oracle(seed):
    rng = np.random.default_rng(seed)
    curvature = rng.uniform(-0.2, 1.0, 6)
    record = int(rng.integers(6))
    event = run(
        noise_multiplier=rng.uniform(1.0, 4.0, 9),
        learning_rate=rng.uniform(0.2, 1.0, 9),
        weight_decay=rng.uniform(0.0, 0.3, 9),
        loss=hsa.LossGeometry.weakly_convex(1.0, 0.2, lipschitz=1.0),
        **({"batch_order": "full", "batch_size": 6} if seed % 2 else {}),
    )
    grid = GridOracle(
        event,
        [affine(h, 0.3) for h in curvature],
        affine(curvature[record], 2.0),
        record=record,
        start=0.7,
        cells_per_std=64,
    )
    exact = GaussianOracle(
        curvature.reshape(6, 1, 1),
        [(1.0, cyclic_batches(6, event.batch_size, 9))],
        learning_rate=event.per_step("learning_rate"),
        noise_std=event.noise_std_on_sum(),
        weight_decay=event.per_step("weight_decay"),
        batch_size=event.batch_size,
        record=record,
        slope_difference=[1.7],
    )
    for epsilon in (0.0, 0.5 * exact.mu, 2 * exact.mu):
        for estimate, value in zip(grid.delta(epsilon), exact.delta(epsilon), strict=True):
            agrees(estimate, value)
    for order in ORDERS:
        if order * exact.mu < 10:
            for estimate, value in zip(grid.renyi(order), exact.renyi(order), strict=True):
                agrees(estimate, value)


@pytest.mark.parametrize("mu", [0.3, 1.0, 3.0])
def test_one_step_is_the_gaussian_mechanism(mu):
    event = run(num_steps=1, batch_size=6, batch_order="full", noise_multiplier=1 / mu)
    grid = GridOracle(event, [constant(1.0)] * 6, None)
    for epsilon in EPSILONS:
        for estimate in grid.delta(epsilon):
            agrees(estimate, delta_from_mu(mu, epsilon))
    for order in (1.5, 2.0, 4.0):
        for estimate in grid.renyi(order):
            agrees(estimate, order * mu**2 / 2)


@pytest.mark.parametrize("cells", [16, 32, 64, 128])
def test_the_bound_tightens_with_the_square_of_the_cells(cells):
    event = run(num_steps=30, weight_decay=0.2)
    grid = GridOracle(event, [affine(0.3, 0.0)] * 6, affine(0.3, 2.0), cells_per_std=cells)
    estimate = grid.renyi(4.0)[0]
    loss = 1 - estimate.lower_bound / estimate.value
    assert 0 < loss * cells**2 < 60
    assert estimate.error < 4 / cells**2


@pytest.mark.parametrize("sigma", first(1, [0.6, 1.5]))
def test_one_poisson_step_against_a_privacy_loss_distribution(sigma):
    event = run(num_steps=1, batch_size=2, batch_order="poisson", noise_multiplier=sigma)
    grid = GridOracle(event, [constant(1.0)] + [constant(0.0)] * 5, None)
    pld = privacy_loss_distribution.from_gaussian_mechanism(
        sigma, sampling_prob=1 / 3, value_discretization_interval=1e-4
    )
    for epsilon in EPSILONS:
        exact = pld.get_delta_for_epsilon(epsilon)  # rounded up by up to 1e-4 in epsilon
        largest = max(grid.delta(epsilon), key=lambda estimate: estimate.value)
        assert largest.value == pytest.approx(exact, rel=1e-3, abs=largest.error)
        assert max(estimate.lower_bound for estimate in grid.delta(epsilon)) <= exact


def test_atoms_at_the_ends_of_the_domain():
    """One step: the clipped Gaussian; its likelihood ratio on the atoms is that of the tails."""
    event = run(
        num_steps=1, batch_size=6, batch_order="full", noise_multiplier=1.0, domain_diameter=0.16
    )
    grid = GridOracle(event, [constant(-1.0)] * 6, constant(1.0), domain=(-0.06, 0.1), start=0.05)
    std, first, second = 0.5 / 6, 0.05 + 0.5, 0.05 + 0.5 - 1 / 6
    first, second = stats.norm(first, std), stats.norm(second, std)
    for epsilon in EPSILONS:
        for (p, q), estimate in zip(
            ((first, second), (second, first)), grid.delta(epsilon), strict=True
        ):
            factor = math.exp(epsilon)
            exact = max(p.cdf(-0.06) - factor * q.cdf(-0.06), 0)
            exact += max(p.sf(0.1) - factor * q.sf(0.1), 0)
            x = np.linspace(-0.06, 0.1, 200_001)
            density = np.maximum(p.pdf(x) - factor * q.pdf(x), 0)
            exact += np.sum((density[1:] + density[:-1]) / 2) * (x[1] - x[0])
            assert estimate.value == pytest.approx(exact, rel=2e-3, abs=1e-9)
            assert estimate.lower_bound <= exact + 1e-12


def orders_of(event):
    """All equally likely batch sequences, by brute force over permutations or subsets."""
    n, b, steps = event.dataset_size, event.batch_size, event.num_steps
    if event.batch_order is hsa.BatchOrder.WITHOUT_REPLACEMENT:
        return list(itertools.product(itertools.combinations(range(n), b), repeat=steps))
    epochs = -(-steps // event.batches_per_epoch)
    once = event.batch_order is hsa.BatchOrder.SHUFFLED_ONCE
    result = []
    for shuffles in itertools.product(
        itertools.permutations(range(n)), repeat=1 if once else epochs
    ):
        batches = [s[i : i + b] for s in shuffles for i in range(0, n, b)]
        result.append((batches * epochs)[:steps])
    return result


@pytest.mark.parametrize(
    ("order", "size", "batch", "steps", "curvature"),
    [
        ("shuffled_once", 4, 2, 5, 0.6),
        ("shuffled_once", 3, 2, 4, 0.0),  # a short last batch
        ("reshuffled", 3, 1, 5, 0.6),  # a partial last epoch
        ("reshuffled", 3, 2, 4, 0.0),
        ("without_replacement", 4, 2, 3, 0.6),
    ],
)
def test_random_orders_against_enumeration(order, size, batch, steps, curvature):
    event = run(batch_order=order, dataset_size=size, batch_size=batch, num_steps=steps)
    values = np.array([1.0, 1.0, -0.5, 0.2])[:size]
    shared = affine(curvature, 1.0)
    gradients = [affine(curvature, 1.0), shared, *(affine(curvature, v) for v in values[2:])]
    grid = GridOracle(event, gradients, affine(curvature, -1.0), cells_per_std=128)
    orders = orders_of(event)
    exact = GaussianOracle(
        np.full((size, 1, 1), curvature),
        [(1 / len(orders), batches) for batches in orders],
        learning_rate=0.5,
        noise_std=2.0,
        batch_size=batch,
        record=0,
        slope_difference=[-2.0],
        slopes=values[:, None],
    )
    for epsilon in EPSILONS[:2]:
        for estimate, value in zip(grid.delta(epsilon), exact.delta(epsilon), strict=True):
            agrees(estimate, value)
    for alpha in ORDERS:
        for estimate, value in zip(grid.renyi(alpha), exact.renyi(alpha), strict=True):
            agrees(estimate, value)


@pytest.mark.parametrize("order", ["cyclic", "poisson", "reshuffled"])
def test_kinks_jumps_and_projections_against_simulation(order):
    event = run(
        clip_norm=0.8,
        batch_order=order,
        batch_size=1,
        dataset_size=2,
        num_steps=6,
        weight_decay=0.1,
        domain_diameter=2.5,
        noise_multiplier=1.2,
    )
    functions = [lambda x: 1.5 * x + 0.4, lambda x: np.sin(3 * x), lambda x: -np.sign(x - 0.2)]
    grid = GridOracle(event, functions[:2], functions[2], start=-0.4, domain=(-1.0, 1.5))
    rng, size = np.random.default_rng(3), 400_000
    sides = []
    for record in (functions[0], functions[2]):
        x = np.full(size, -0.4)
        for t in range(6):
            if order == "reshuffled" and t % 2 == 0:
                lead = rng.random(size) < 0.5
            holds = {
                "cyclic": np.array([t % 2 == 0, t % 2 == 1])[:, None],
                "poisson": rng.random((2, size)) < 0.5,
                "reshuffled": np.array([lead, ~lead]) ^ (t % 2) if order == "reshuffled" else None,
            }[order]
            total = 0.8 * 1.2 * rng.normal(size=size)
            for inside, gradient in zip(holds, (record, functions[1]), strict=True):
                total = total + inside * np.clip(gradient(x), -0.8, 0.8)
            x = np.clip((1 - 0.05) * x - 0.5 * total, -1.0, 1.5)
        sides.append(x)
    edges = np.concatenate([[-2], np.linspace(-0.999, 1.499, 60), [2]])
    p, q = (np.histogram(side, edges)[0] / size for side in sides)
    for epsilon in (0.0, 0.3):
        forward, backward = grid.delta(epsilon)
        factor = math.exp(epsilon)
        assert np.maximum(p - factor * q, 0).sum() == pytest.approx(forward.value, abs=6e-3)
        assert np.maximum(q - factor * p, 0).sum() == pytest.approx(backward.value, abs=6e-3)
