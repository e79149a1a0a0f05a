"""The two exact oracles against closed forms, each other and simulation."""

import math

import numpy as np
import pytest
from cases import seeds
from dp_accounting.pld import privacy_loss_distribution
from gaussian_oracle import GaussianOracle, equally_likely_orders
from grid_oracle import GridOracle
from runs import cyclic_batches, cyclic_run, random_hessian
from scipy import stats

import hidden_state_accountants as hsa
from hidden_state_accountants.curves.gaussian import delta_from_mu

EPSILONS = (0.0, 0.5, 2.0)
ORDERS = (1.5, 2.0, 8.0)


# --- quadratic losses -----------------------------------------------------------------------------


def released_run(seed):
    """A contracting run on quadratics in the plane, three iterates released."""
    rng = np.random.default_rng(seed)
    return {
        "hessians": np.array([random_hessian(rng, 2, 0.1, 1.0) for _ in range(6)]),
        "orders": [(1.0, cyclic_batches(6, 2, 9))],
        "learning_rate": rng.uniform(0.2, 0.8, 9),
        "noise_std": rng.uniform(1.0, 2.0, 9),
        "weight_decay": 0.1,
        "prox": rng.uniform(0.5, 1.0, 9),
        "batch_size": 2,
        "record": 3,
        "slope_difference": rng.normal(size=2),
        "release_steps": (2, 5),
    }


@pytest.mark.parametrize("seed", range(3))
def test_released_iterates_against_the_joint_law_by_linear_maps(seed):
    """The released iterates are one linear map of all noises and one of the slope difference."""
    run = released_run(seed)
    batches, record = run["orders"][0][1], run["record"]
    noise_map, mean, rows, means = np.zeros((2, 18)), np.zeros(2), [], []
    for t in range(9):
        eta, prox = run["learning_rate"][t], run["prox"][t]
        hessian = run["hessians"][batches[t]].mean(axis=0)
        matrix = np.eye(2) * (1 - eta * run["weight_decay"]) - eta * hessian
        noise_map, mean = matrix @ noise_map, matrix @ mean
        noise_map[:, 2 * t : 2 * t + 2] = np.eye(2) * eta * run["noise_std"][t] / 2
        mean = mean - eta / 2 * np.isin(record, batches[t]) * run["slope_difference"]
        noise_map, mean = prox * noise_map, prox * mean
        if t + 1 in (2, 5, 9):
            rows.append(noise_map.copy())
            means.append(mean)
    mu = np.linalg.norm(np.linalg.pinv(np.vstack(rows)) @ np.concatenate(means))
    oracle = GaussianOracle(**run)
    assert oracle.mu == pytest.approx(mu, rel=1e-9)
    for epsilon in (0.0, 0.3, 2.0):
        expected = delta_from_mu(mu, epsilon)
        assert oracle.delta(epsilon) == pytest.approx((expected, expected), rel=1e-9, abs=1e-15)
    for order in (1.01, 2.0, 30.0):
        expected = order * mu**2 / 2
        assert oracle.renyi(order) == pytest.approx((expected, expected), rel=1e-9)


def assert_simulated(delta_of, sides, edges):
    """A histogram gives a lower bound, up to its own noise."""
    p, q = (np.histogram(side, edges)[0] / len(side) for side in sides)
    for epsilon in (0.0, 0.3, 1.0):
        for a, b, delta in zip((p, q), (q, p), delta_of(epsilon), strict=True):
            found = np.maximum(a - math.exp(epsilon) * b, 0).sum()
            assert found == pytest.approx(getattr(delta, "value", delta), abs=6e-3)


@pytest.mark.parametrize("order", [2, 8])
def test_a_mixture_against_its_series(order):
    """Poisson sampling of one linear record, one step: the binomial series at integer orders."""
    q, mu = 0.2, 0.9
    oracle = GaussianOracle(
        np.zeros((1, 1, 1)), [(q, [[0]]), (1 - q, [[]])], learning_rate=1.0, noise_std=1.0,
        batch_size=1, record=0, slope_difference=[mu],
    )  # fmt: skip
    series = sum(
        math.comb(order, k) * q**k * (1 - q) ** (order - k) * math.exp(k * (k - 1) * mu**2 / 2)
        for k in range(order + 1)
    )
    assert oracle.renyi(order)[1] == pytest.approx(math.log(series) / (order - 1), rel=1e-11)


# --- the grid -------------------------------------------------------------------------------------


def run(**changes):
    """A short run that is not clipped."""
    short = {"batch_size": 2, "dataset_size": 6, "num_steps": 9, "weight_decay": 0.0}
    return cyclic_run(**short | {"clip_norm": None} | changes)


ONE_STEP = {"num_steps": 1, "batch_size": 6, "batch_order": "full"}


def affine(slope, value):
    return lambda x: slope * x + value


def assert_agrees(estimates, exact):
    """Each is right within its error; the bound is a bound and not a trivial one."""
    for estimate, value in zip(estimates, exact, strict=True):
        assert estimate.value == pytest.approx(value, abs=estimate.error + 1e-4 * value + 1e-12)
        assert 0.97 * value - 8e-3 <= estimate.lower_bound <= value * (1 + 1e-10)


@pytest.mark.parametrize("seed", seeds(8))
def test_quadratics_on_the_grid(seed):
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
    exact = GaussianOracle.of(
        event,
        curvature.reshape(6, 1, 1),
        [(1.0, cyclic_batches(6, event.batch_size, 9))],
        record=record,
        slope_difference=[1.7],
    )
    for epsilon in (0.0, 0.5 * exact.mu, 2 * exact.mu):
        assert_agrees(grid.delta(epsilon), exact.delta(epsilon))
    for order in ORDERS:
        if order * exact.mu < 10:
            assert_agrees(grid.renyi(order), exact.renyi(order))


def test_one_poisson_step_against_a_privacy_loss_distribution():
    event = run(num_steps=1, batch_order="poisson", noise_multiplier=0.6)
    grid = GridOracle(event, [affine(0, 1.0)] + [affine(0, 0.0)] * 5, None)
    pld = privacy_loss_distribution.from_gaussian_mechanism(
        0.6, sampling_prob=1 / 3, value_discretization_interval=1e-4
    )
    for epsilon in EPSILONS:
        exact = pld.get_delta_for_epsilon(epsilon)  # rounded up by up to 1e-4 in epsilon
        largest = max(grid.delta(epsilon), key=lambda estimate: estimate.value)
        assert largest.value == pytest.approx(exact, rel=1e-3, abs=largest.error)
        assert largest.lower_bound <= exact


def test_atoms_at_the_ends_of_the_domain():
    """One step: the clipped Gaussian; its likelihood ratio on the atoms is that of the tails."""
    event = run(**ONE_STEP, noise_multiplier=1.0, domain_diameter=0.16)
    grid = GridOracle(event, [affine(0, -1.0)] * 6, affine(0, 1.0), domain=(-0.06, 0.1), start=0.05)
    laws = [stats.norm(centre, 0.5 / 6) for centre in (0.05 + 0.5, 0.05 + 0.5 - 1 / 6)]
    x, width = np.linspace(-0.06, 0.1, 200_001, retstep=True)
    for epsilon in EPSILONS:
        factor = math.exp(epsilon)
        for (p, q), estimate in zip((laws, laws[::-1]), grid.delta(epsilon), strict=True):
            exact = max(p.cdf(-0.06) - factor * q.cdf(-0.06), 0)
            exact += max(p.sf(0.1) - factor * q.sf(0.1), 0)
            exact += np.maximum(p.pdf(x) - factor * q.pdf(x), 0).sum() * width
            assert estimate.value == pytest.approx(exact, rel=2e-3, abs=1e-9)
            assert estimate.lower_bound <= exact + 1e-12


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
    grid = GridOracle(
        event,
        [affine(curvature, v) for v in values],
        affine(curvature, -1.0),
        cells_per_std=128,
    )
    exact = GaussianOracle.of(
        event,
        np.full((size, 1, 1), curvature),
        equally_likely_orders(order, size, batch, steps),
        record=0,
        slope_difference=[-2.0],
        slopes=values[:, None],
    )
    for epsilon in EPSILONS[:2]:
        assert_agrees(grid.delta(epsilon), exact.delta(epsilon))
    for alpha in ORDERS:
        assert_agrees(grid.renyi(alpha), exact.renyi(alpha))


@pytest.mark.parametrize(
    "order",
    [order.value for order in hsa.BatchOrder],
)
def test_records_that_are_alike_are_counted_and_those_without_a_gradient_are_not(order):
    event = run(batch_order=order, batch_size=6 if order == "full" else 2, num_steps=5)
    curved, flat = affine(0.6, -0.1), affine(0, 0.0)
    first, alike = affine(0, 1.0), [curved, flat, flat, curved, flat]
    apart = [affine(0.6, -0.1) if g is curved else affine(0, 0.0) for g in alike]
    without = [None if g is flat else g for g in alike]
    deltas = [
        GridOracle(event, [first, *others], None, cells_per_std=8).delta(0.3)
        for others in (alike, apart, without)
    ]
    for found in deltas[1:]:
        assert [e.value for e in found] == pytest.approx([e.value for e in deltas[0]], rel=1e-11)


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
            if order == "poisson":
                holds = rng.random((2, size)) < 0.5
            else:
                if t % 2 == 0:
                    leads = rng.random(size) < (0.5 if order == "reshuffled" else 1.0)
                holds = np.array([leads, ~leads]) ^ bool(t % 2)
            total = 0.8 * 1.2 * rng.normal(size=size)
            for inside, gradient in zip(holds, (record, functions[1]), strict=True):
                total = total + inside * np.clip(gradient(x), -0.8, 0.8)
            x = np.clip((1 - 0.05) * x - 0.5 * total, -1.0, 1.5)
        sides.append(x)
    edges = np.concatenate([[-2], np.linspace(-0.999, 1.499, 60), [2]])
    assert_simulated(grid.delta, sides, edges)
